"""Commits of a query's epochs to a service that is away now and then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import pytest
from pyspark.sql import SparkSession

from spark_agent.client.client import Client
from spark_agent.exceptions import Unavailable
from spark_agent.jvm.nodes import LateFate
from spark_agent.jvm.progress import CommittedBatch
from spark_agent.jvm.running_query import RunningQuery
from spark_agent.soundness.operators import Promise
from spark_agent.supervision.batch_waits import BatchWaits
from spark_agent.supervision.epoch_commits import EpochCommits
from spark_agent.supervision.finalisation import Finalisation
from spark_agent.supervision.in_flight_reports import InFlightReports
from spark_agent.supervision.joined_shards import JoinedShards
from spark_agent.supervision.read_through import ReadThrough
from spark_agent.supervision.session_readings import SessionReadings
from spark_agent.supervision.shard_states import ShardStates
from tests.unit.agent.answers import Answer, Answers, FakeClock
from tests.unit.agent.queries import NoNotes, source, started

NO_CORRECTIONS: Mapping[int, int] = {}
TAKEN = Answer(200, {"applied": {}})
AWAY = Answer(503)
STALE = Answer(
    409, {"type": "/problems/stale-epoch", "title": "No.", "status": 409, "detail": "no"}
)
AHEAD = Answer(
    409, {"type": "/problems/input-ahead", "title": "No.", "status": 409, "detail": "no"}
)


def epoch_commits(
    server: Answers,
    corrections: Mapping[int, int] = NO_CORRECTIONS,
    *,
    clock: FakeClock | None = None,
    has_idle_policy: bool = False,
) -> EpochCommits:
    """Epochs of a query with a source and two keyed stages, whose client asks once.

    `corrections`: of its first keyed stage, by epoch.
    """
    clock, notes = clock or FakeClock(), NoNotes()
    query = started(
        [source("s", has_idle_policy=has_idle_policy)],
        {"k": Promise(), "join": Promise()},
        on_lost_checkpoint="continue",
        corrections=lambda epoch: corrections.get(epoch, 0),
    )
    client = Client(server.url, clock=clock).without_retries(10_000)
    running = RunningQuery(cast("SparkSession", None))
    return EpochCommits(
        query,
        running,
        client=client,
        tallies={},
        joined=JoinedShards(query, client, notes),
        finalisation=Finalisation(query, running, client, BatchWaits(query)),
        in_flight=InFlightReports({}, query.stages.watched, clock),
        states=ShardStates(query, notes, {}),
        read=ReadThrough(query, 0),
        sessions=SessionReadings(query, clock),
        clock=clock,
    )


def late(epoch: int, **stages: int) -> CommittedBatch:
    rows = {(stage, LateFate.ASIDE): rows for stage, rows in stages.items()}
    return CommittedBatch(epoch, 0, late_rows=rows)


def told(server: Answers, member: str = "late") -> list[tuple[int, Mapping[str, int]]]:
    """Each commit that the service was asked for: its epoch, and one of its counts by stage."""

    def rows(body: Any) -> dict[str, int]:
        return {name: each[member] for name, each in body["stages"].items() if member in each}

    return [(asked.body["epoch"], rows(asked.body)) for asked in server.asked]


def counted(server: Answers, member: str = "late") -> dict[str, int]:
    """One of the counts by stage in a service that takes each commit that it was asked for."""
    total: dict[str, int] = {}
    last = -1
    for epoch, rows in told(server, member):
        if epoch > last:
            last = epoch
            total = {name: total.get(name, 0) + rows.get(name, 0) for name in {*total, *rows}}
    return total


def test_late_rows_of_both_fates_are_committed_by_stage_and_once() -> None:
    with Answers(TAKEN) as server:
        commits = epoch_commits(server)
        rows = {("k", LateFate.ASIDE): 3, ("k", LateFate.DROP): 2, ("join", LateFate.DROP): 0}
        for _ in range(2):
            commits.add(CommittedBatch(4, 0, late_rows=rows))
            commits.commit(7)
        commits.add(late(5, join=1))
        commits.commit(7)
    assert told(server) == [(4, {"k": 5}), (5, {"join": 1})]


def test_a_service_that_is_away_for_one_commit_counts_late_rows_once_and_whole() -> None:
    with Answers(AWAY, TAKEN) as server:
        commits = epoch_commits(server)
        commits.add(late(4, k=3))
        with pytest.raises(Unavailable):
            commits.commit(7)
        commits.commit(7)
        assert commits.uncommitted is None
    assert told(server) == [(4, {"k": 3}), (4, {"k": 3})]


def test_each_commit_is_dated_by_the_trigger_of_its_batch() -> None:
    """Also one that is repeated before a later one, for its late rows, and after a step of the clock."""
    clock = FakeClock()
    now_ms = clock.now_ms
    with Answers(AWAY, TAKEN) as server:
        commits = epoch_commits(server, clock=clock, has_idle_policy=True)
        commits.add(replace(late(4, k=3), triggered_ms=now_ms - 900))
        with pytest.raises(Unavailable):
            commits.commit(7)
        clock.set_ahead(-60_000)
        # A batch is at least as old as it has lasted.
        commits.add(replace(late(5), triggered_ms=now_ms - 200, duration_ms=150))
        commits.commit(7)
    dated = [(asked.body["epoch"], asked.body["evidence_age_ms"]) for asked in server.asked]
    assert dated == [(4, 900), (4, 900), (5, 150)]


def test_a_commit_that_is_not_evidence_has_no_age() -> None:
    """An older service would reject it."""
    with Answers(TAKEN) as server:
        commits = epoch_commits(server)
        commits.add(late(4))
        commits.commit(7)
    assert "evidence_age_ms" not in server.asked[0].body


def test_late_rows_of_batches_that_were_never_committed_come_with_the_latest() -> None:
    with Answers(TAKEN) as server:
        commits = epoch_commits(server)
        for batch in (late(4, k=3), late(5), late(6, k=1, join=2)):
            commits.add(batch)
        commits.commit(7)
    assert told(server) == [(6, {"k": 4, "join": 2})]


def test_an_epoch_that_may_have_been_taken_is_repeated_before_a_later_one() -> None:
    with Answers(AWAY, AWAY, TAKEN, AWAY, TAKEN) as server:
        commits = epoch_commits(server)
        for batch in (late(4, k=3), late(5, k=10)):
            commits.add(batch)
            with pytest.raises(Unavailable):
                commits.commit(7)
        commits.add(late(6, k=100))
        with pytest.raises(Unavailable):
            commits.commit(7)
        commits.commit(7)
    sent = [(4, {"k": 3}), (4, {"k": 3}), (4, {"k": 3}), (6, {"k": 110}), (6, {"k": 110})]
    assert told(server) == sent
    assert counted(server) == {"k": 113}, "as if the first attempt had been taken"


@pytest.mark.parametrize("refusal", [STALE, AHEAD], ids=["stale epoch", "input ahead"])
def test_late_rows_of_an_epoch_that_is_refused_are_dropped(refusal: Answer) -> None:
    with Answers(refusal, AWAY, refusal, TAKEN) as server:
        commits = epoch_commits(server)
        commits.add(late(4, k=3))
        commits.commit(7)
        commits.add(late(5, k=10))
        with pytest.raises(Unavailable):
            commits.commit(7)
        commits.add(late(6, k=100))
        commits.commit(7)
    assert told(server) == [(4, {"k": 3}), (5, {"k": 10}), (5, {"k": 10}), (6, {"k": 100})]


def test_corrections_are_committed_with_the_first_keyed_stage_and_once() -> None:
    with Answers(TAKEN) as server:
        commits = epoch_commits(server, {4: 5})
        for _ in range(2):
            commits.add(late(4, join=1))
            commits.commit(7)
        commits.add(late(5))
        commits.commit(7)
        assert commits.counts.total["corrections"] == 5
    assert told(server, "corrections") == [(4, {"k": 5}), (5, {})]
    assert told(server) == [(4, {"join": 1}), (5, {})]


def test_a_service_that_is_away_for_one_commit_counts_corrections_once_and_whole() -> None:
    with Answers(AWAY, TAKEN) as server:
        commits = epoch_commits(server, {4: 3})
        commits.add(late(4))
        with pytest.raises(Unavailable):
            commits.commit(7)
        commits.commit(7)
        assert commits.uncommitted is None
    assert told(server, "corrections") == [(4, {"k": 3}), (4, {"k": 3})]


def test_corrections_of_batches_that_were_never_committed_come_with_the_latest() -> None:
    with Answers(TAKEN) as server:
        commits = epoch_commits(server, {4: 3, 6: 1})
        for epoch in (4, 5, 6):
            commits.add(late(epoch))
        commits.commit(7)
    assert told(server, "corrections") == [(6, {"k": 4})]


def test_an_epoch_with_corrections_that_may_have_been_taken_is_repeated_before_a_later_one() -> (
    None
):
    with Answers(AWAY, AWAY, TAKEN, AWAY, TAKEN) as server:
        commits = epoch_commits(server, {4: 3, 5: 10, 6: 100})
        for epoch in (4, 5):
            commits.add(late(epoch))
            with pytest.raises(Unavailable):
                commits.commit(7)
        commits.add(late(6))
        with pytest.raises(Unavailable):
            commits.commit(7)
        commits.commit(7)
    sent = [(4, {"k": 3}), (4, {"k": 3}), (4, {"k": 3}), (6, {"k": 110}), (6, {"k": 110})]
    assert told(server, "corrections") == sent
    assert counted(server, "corrections") == {"k": 113}, "as if the first attempt had been taken"


@pytest.mark.parametrize("refusal", [STALE, AHEAD], ids=["stale epoch", "input ahead"])
def test_corrections_of_an_epoch_that_is_refused_are_dropped(refusal: Answer) -> None:
    with Answers(refusal, AWAY, refusal, TAKEN) as server:
        commits = epoch_commits(server, {4: 3, 5: 10, 6: 100})
        commits.add(late(4))
        commits.commit(7)
        commits.add(late(5))
        with pytest.raises(Unavailable):
            commits.commit(7)
        commits.add(late(6))
        commits.commit(7)
    sent = [(4, {"k": 3}), (5, {"k": 10}), (5, {"k": 10}), (6, {"k": 100})]
    assert told(server, "corrections") == sent
