"""Feeds: the order of the states that a follower gets, while its replica cannot read the newest one."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import cast

import pytest

from service.aggregator import feeds
from service.aggregator.feed_changes import Changes
from service.aggregator.feeds import Feeds
from service.aggregator.states import StageState
from service.errors import UnavailableError
from service.frontier.graph import Pipeline, Stage, StageWatermark
from service.frontier.ranges import ShardLayout
from service.frontier.throttle import NO_ADVICE, ThrottleView
from service.live.memory import MemoryLiveStore
from service.model.jobs import Census, JobView, StageView
from service.tasks import Shutdown
from tests.support.clock import FakeClock

pytestmark = pytest.mark.anyio

FLOW = Pipeline({"s": Stage(layout=ShardLayout.of("0"))})


class Replica:
    """One replica, whose live store may be away."""

    def __init__(self) -> None:
        self.generation = self.layout_version = 1
        self.output = 10
        """The revision of the job, too."""
        self.is_away = False
        self.feeds = Feeds(
            MemoryLiveStore(FakeClock()), self._read, self._complete, self._throttle, Shutdown()
        )

    async def _read(self, job: str) -> Mapping[str, StageState]:
        if self.is_away:
            raise UnavailableError("the live store does not answer")
        view = StageView(StageWatermark(output=self.output), self.output, self.output, 0, 0)
        numbers = self.generation, self.layout_version, self.output
        read = JobView(job, FLOW, 1, *numbers, {"s": view}, self.output)
        return {"s": StageState(read, "s", view, Census(1, 1, 0, 0, 0))}

    async def _complete(self, states: Mapping[str, StageState]) -> Mapping[str, StageState]:
        return states

    async def _throttle(self, _job: str, _view: JobView) -> ThrottleView:
        return NO_ADVICE

    def follow(self, cursor: str | None = None) -> aclosing[AsyncGenerator[Changes]]:
        return aclosing(cast("AsyncGenerator[Changes]", self.feeds.follow("j", cursor)))


def outputs(changes: Changes) -> list[int]:
    return [each.state.view.watermark.output for each in changes.changes]


@pytest.mark.parametrize("seen", ["1-1-20-00000000", "1-2-10-00000000", "2-1-3-00000000"])
@pytest.mark.parametrize("has_read", [True, False])
async def test_invariant_1_a_stream_resumes_with_nothing_older_than_its_client_has_seen(
    monkeypatch: pytest.MonkeyPatch, seen: str, has_read: bool
) -> None:
    """Another replica has shown a later state, with another health."""
    monkeypatch.setattr(feeds, "HEARTBEAT_S", 0.01)
    replica = Replica()
    replica.is_away = not has_read
    async with replica.follow() as first:
        assert outputs(await anext(first)) == ([10] if has_read else [])
        replica.is_away = True
        async with replica.follow(seen) as resumed:
            assert not await anext(resumed), "a heartbeat"
            replica.is_away, replica.output = False, 20
            replica.generation = replica.layout_version = 2
            async with replica.follow() as another:
                await anext(another)
            while not (changes := await anext(resumed)):
                pass
            assert outputs(changes) == [20]


@pytest.mark.parametrize("seen", ["1-1-99-00000000", "9-9-9-00000000"])
async def test_a_cursor_of_another_ledger_shows_everything(seen: str) -> None:
    """The ledger was restored from a backup, and has later states only in a while."""
    replica = Replica()
    async with replica.follow(seen) as resumed:
        assert outputs(await anext(resumed)) == [10]
