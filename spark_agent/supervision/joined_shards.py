"""Shards that join the dynamic sources of a query, also those that a restored ledger lacks."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import Final, Protocol

from spark_agent.client.client import Client
from spark_agent.client.errors import LeaseConflict
from spark_agent.exceptions import OldCheckpointError
from spark_agent.started_query import StartedQuery
from spark_agent.supervision.diagnostics import forgotten_epochs_message
from spark_agent.supervision.driver_reporter import DriverReporter

_MOST_CLAIMED: Final = 10_000
"""Shards in one claim."""


class JoinedNotes(Protocol):
    """Notes in the query's checkpoint: `spark_agent.driver.preconditions.Resumption`."""

    def joined(self, stage: str) -> Collection[str]:
        """Return the shards that are noted for a source, in the job's generation."""
        ...

    def note_joined(self, stage: str, shards: Collection[str]) -> None:
        """Note more of them."""
        ...


class JoinedShards:
    """Keeps the watermark from passing joined shards after a loss of the ledger.

    A ledger that was restored from a backup lacks the shards that have joined since then, and its
    watermark would pass those that are quiet. The query's checkpoint has them. So each run begins with a
    claim of all: a shard joins with its first claim, and a second one changes nothing.

    A task's report may be dropped, or the service may have reached its limit of ranges. So the driver
    claims a new shard before it commits the epoch that has the shard's first rows, and notes the shard
    before that: if the query ends meanwhile, the next run begins with the claim.
    """

    def __init__(self, query: StartedQuery, client: Client, notes: JoinedNotes) -> None:
        self._query = query
        self._client = client
        self._notes = notes
        self._sources = {each.name: each for each in query.stages.sources if each.is_dynamic}
        self._watched = frozenset(query.stages.watched)
        self._noted: dict[str, set[str]] = {}
        self._claimed: dict[str, set[str]] = {stage: set() for stage in self._sources}
        """Shards that have joined, by an answer of the service to a claim of the run."""
        self._run: int | None = None
        """The run that has claimed the noted shards."""
        self._acknowledged: int | None = None
        """The last epoch of the run that the service has acknowledged as durable."""

    def rejoin(self, reporter: DriverReporter) -> None:
        """Claim all noted shards, once in each run.

        The claim outranks none of the run's tasks: there are notes only after the first epoch, and the
        tasks' epochs are higher than that of the claim.
        """
        if self._run == reporter.run:
            return
        for stage in self._sources:
            self._claimed[stage].clear()
            self._claim(reporter, stage, self._find_noted(stage))
        self._run = reporter.run
        self._acknowledged = None

    def join(self, reporter: DriverReporter, stage: str, shards: Iterable[str]) -> Collection[str]:
        """Note shards and claim those that have not joined yet. Return the new ones.

        Before the commit of the epoch: the watermark must not pass a shard that the service lacks.
        Raises `LimitReached` if the service has not room for them.
        """
        new = set(shards).difference(self._claimed[stage], self._sources[stage].shards)
        self._note(stage, new)
        self._claim(reporter, stage, new)
        return new

    def _claim(self, reporter: DriverReporter, stage: str, shards: Collection[str]) -> None:
        """Claim shards, and keep the lease: a shard without one would pass for one without a worker.

        The lease on a shard that may be idle is unwatched, since the query does not poll the shard yet.
        """
        names = sorted(shards)
        for first in range(0, len(names), _MOST_CLAIMED):
            some = names[first : first + _MOST_CLAIMED]
            # Shards that are denied have joined: a task holds them.
            with suppress(LeaseConflict):
                reporter.claim_some(stage, some, watched=stage not in self._watched)
            self._claimed[stage].update(some)

    def _note(self, stage: str, shards: Collection[str]) -> None:
        noted = self._find_noted(stage)
        new = set(shards).difference(noted)
        if new:
            self._notes.note_joined(stage, new)
            noted |= new

    def acknowledge(self, epoch: int) -> None:
        """Note that the service has committed an epoch."""
        self._acknowledged = epoch

    def check_ledger(self) -> None:
        """Raise `OldCheckpointError` if the ledger lacks an epoch that the service has acknowledged.

        Then the ledger was restored while the query runs, and the next commit could pass quiet shards.
        """
        if self._acknowledged is None:
            return
        for stage in self._sources:
            found = self._client.commits(self._query.job, stage)
            # The commit of a later run is refused by itself.
            lacks = found["epoch"] is None or found["epoch"] < self._acknowledged
            if found["run"] == self._run and lacks:
                message = forgotten_epochs_message(
                    self._query.name, self._acknowledged, found["epoch"]
                )
                raise OldCheckpointError(message)

    def _find_noted(self, stage: str) -> set[str]:
        if stage not in self._noted:
            self._noted[stage] = set(self._notes.joined(stage))
        return self._noted[stage]
