"""A state that is lost again and again: a request restores it with pauses, and gives up in time."""

from __future__ import annotations

from typing import Any, cast

import pytest

from service.consistency.reconciler import Reconciler
from service.errors import UnavailableError
from service.live.port import StateLostError
from tests.support.clock import FakeClock

pytestmark = pytest.mark.anyio


class Restores(Reconciler):
    """Restores nothing. Each restoration takes some time of the clock."""

    def __init__(self, clock: FakeClock, *, takes_ms: int) -> None:
        nothing = cast("Any", None)
        super().__init__(nothing, nothing, nothing, clock, nothing)
        self.times = 0
        self._takes_ms = takes_ms
        self._fake = clock

    async def restore(self, job: str) -> None:
        self.times += 1
        self._fake.advance(self._takes_ms)


async def lost() -> None:
    raise StateLostError("water")


async def test_a_request_gives_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    paused: list[float] = []

    async def pause(pause_s: float) -> None:
        paused.append(pause_s)

    monkeypatch.setattr("service.consistency.reconciler.asyncio.sleep", pause)
    reconciler = Restores(FakeClock(), takes_ms=100)
    with pytest.raises(UnavailableError, match=r"is being restored: retry"):
        await reconciler.run_with_restore("water", lost)
    assert reconciler.times == 51
    # The first retry is at once; then it leaves more and more to others.
    assert paused[:4] == pytest.approx([0.0, 0.02, 0.06, 0.14])
    assert set(paused[6:]) == {0.5}
