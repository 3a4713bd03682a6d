"""Commits of a query's epochs to the service, in order, and of what the tasks could not report."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from spark_agent.client.client import Client
from spark_agent.client.errors import InputAhead, StaleEpoch
from spark_agent.client.reports import RangeReport, StageProgress
from spark_agent.clock import Clock
from spark_agent.exceptions import CONTINUES, StrategyError, old_checkpoint_message
from spark_agent.executor.tally import Count, Tallies, Tally, pop_tallies
from spark_agent.jvm.nodes import LateFate
from spark_agent.jvm.progress import CommittedBatch
from spark_agent.jvm.running_query import RunningQuery
from spark_agent.sources.control import END_MS
from spark_agent.started_query import StartedQuery
from spark_agent.supervision.committed import Committed
from spark_agent.supervision.diagnostics import log_silence
from spark_agent.supervision.finalisation import Finalisation
from spark_agent.supervision.in_flight_reports import InFlightReports
from spark_agent.supervision.joined_shards import JoinedShards
from spark_agent.supervision.pending_reports import PendingReports, add_reports
from spark_agent.supervision.read_through import ReadThrough
from spark_agent.supervision.row_counts import RowCounts
from spark_agent.supervision.session_readings import SessionReadings
from spark_agent.supervision.shard_states import ShardStates
from spark_agent.times import MAX_MS

_log: Final = logging.getLogger("spark_agent")

_COUNTS: Final[Mapping[LateFate, Count]] = {
    LateFate.DROP: Count.DROPPED_ROWS,
    LateFate.ASIDE: Count.ROWS_ASIDE,
}
_LAST_EPOCH: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class _Attempt:
    """A commit that the service may have taken, with the late rows and corrections that it brings."""

    epoch: int
    planned_ms: int
    """When its trigger began, on the steady clock: Spark polled the sources after that."""
    stages: Mapping[str, StageProgress | None]
    late: Mapping[str, int]
    corrections: Mapping[str, int]

    @property
    def brings_counts(self) -> bool:
        """True if it brings late rows or corrections."""
        return bool(self.late or self.corrections)


class EpochCommits:
    """The committed and the uncommitted epochs of one query.

    Committing after Spark has done so is safe: the batch's rows are in the output, so the driver's
    promise for it holds from then on, even if the tasks' own reports were lost with the service.
    """

    def __init__(
        self,
        query: StartedQuery,
        running: RunningQuery,
        *,
        client: Client,
        tallies: Tallies,
        joined: JoinedShards,
        finalisation: Finalisation,
        in_flight: InFlightReports,
        states: ShardStates,
        read: ReadThrough,
        sessions: SessionReadings,
        clock: Clock,
    ) -> None:
        self._query = query
        self._stages = query.stages
        self._running = running
        self._client = client
        self._tallies = tallies
        self._joined = joined
        self._finalisation = finalisation
        self._in_flight = in_flight
        self._states = states
        self._read = read
        self._sessions = sessions
        self._watermark_ms = 0
        """Spark's watermark in the latest batch that the service has taken."""
        self._clock = clock
        self._uncommitted: CommittedBatch | None = None
        self._planned_ms = 0
        """When the trigger of the uncommitted batch began, on the steady clock."""
        self._unpromised: list[CommittedBatch] = []
        """Batches that strategies with state have still to count, oldest first."""
        self._late: Counter[str] = Counter()
        """By stage: late rows that no attempt of a commit has brought yet."""
        self._corrections: Counter[str] = Counter()
        """By stage: corrections that no attempt of a commit has brought yet."""
        self._attempt: _Attempt | None = None
        """The last attempt, until the service answers it."""
        self._latest_epoch = -1
        self._is_silence_logged = False
        self.committed = Committed()
        self.pending = PendingReports(clock, query.stages.watched)
        self.counts = RowCounts(query.job)

    @property
    def uncommitted(self) -> CommittedBatch | None:
        """The latest batch that Spark has committed and the service has not, if any."""
        return self._uncommitted

    @property
    def are_reported(self) -> bool:
        """True if the service has taken everything that Spark has committed."""
        return self._uncommitted is None and not self._unpromised and not self.pending

    def add(self, batch: CommittedBatch) -> None:
        """Add a batch that Spark has committed. Both the feed and Spark's listener bus bring each."""
        if batch.epoch <= self._latest_epoch:
            return
        self._latest_epoch = batch.epoch
        # Only the latest matters: watermarks rise from epoch to epoch.
        self._uncommitted = batch
        # Once for all attempts: the wall clock, which Spark's progress has, may be set back meanwhile.
        since_ms = max(self._clock.wall_ms() - batch.triggered_ms, batch.duration_ms)
        self._planned_ms = self._clock.steady_ms() - since_ms
        self._read.note_batch(batch)
        self._unpromised.append(batch)
        self._sessions.add(batch)
        for stage in self._stages.keyed[:1]:
            self.counts.add(stage.name, {Count.DROPPED_ROWS: batch.dropped_rows})
            corrections = self._query.corrections(batch.epoch)
            self.counts.add(stage.name, {Count.CORRECTIONS: corrections})
            self._corrections[stage.name] += corrections
        for (stage, fate), rows in batch.late_rows.items():
            self.counts.add(stage, {_COUNTS[fate]: rows})
            self._late[stage] += rows

    def promise_by_state(self) -> None:
        """Add the promises of strategies with state to the reports that are pending.

        Not with the commit: the states do not wait for a service that is away. Raises `Py4JError` if the
        checkpoint cannot be read: then the batch is still to be counted.
        """
        while self._unpromised:
            try:
                promises = self._states.update(self._unpromised[0])
            except StrategyError as error:
                self._running.fail(str(error))
                promises = {}
            del self._unpromised[0]
            for stage, promised in promises.items():
                self.pending.add(stage, {shard: RangeReport(ms) for shard, ms in promised.items()})

    def count_unreported(self) -> None:
        """Count the rows of batches that the service has not taken, at the query's end."""
        for stage in self._stages.names:
            self.counts.record(stage, self._pop(stage, self._latest_epoch))

    def drop_tallies(self) -> None:
        """Drop the rest of the tasks' tallies: the query has ended, and nothing reads them."""
        for stage in self._stages.names:
            self._pop(stage, _LAST_EPOCH)

    def _pop(self, stage: str, epoch: int) -> list[Tally]:
        return pop_tallies(self._tallies, self._query.name, stage, epoch)

    def commit(self, run: int) -> None:
        """Commit the latest batch's epoch, unless that is done. Raises `AggregatorError`."""
        batch = self._uncommitted
        if batch is None:
            return
        self._joined.check_ledger()
        promised = self._progress(batch.watermark_ms)
        stages: dict[str, StageProgress | None] = {
            stage.name: None for stage in self._stages.sources
        }
        # While Spark has no watermark to promise by, the epoch is committed all the same: the service
        # refuses it if the job is further.
        stages |= {stage.name: StageProgress(None) for stage in self._stages.keyed}
        stages |= promised
        applied: Mapping[str, int] = {}
        try:
            applied = self._commit_once(run, batch, stages)
            self._joined.acknowledge(batch.epoch)
        except StaleEpoch as error:
            self._warn_of_old_checkpoint(batch, error)
        except InputAhead as error:
            # The checkpoint is newer than the job. Nothing of this epoch was applied: it is pending.
            _log.info("query %s, epoch %d: %s", self._query.name, batch.epoch, error)
        self.committed = Committed(
            batch.epoch, promised, self._emitted_ms(batch, promised), batch.duration_ms
        )
        self._reconcile(batch, promised, applied)
        self._uncommitted = None
        self._watermark_ms = batch.watermark_ms

    def promise_by_sessions(self) -> None:
        """Promise for the latest committed batch again, by a new reading of its sessions."""
        progress = self._progress(self._watermark_ms)
        for stage, promise in self._stages.promises.items():
            if promise.reads_state and stage in progress:
                self.pending.set_progress(stage, progress[stage])
        self.committed = replace(self.committed, progress=progress)

    def _commit_once(
        self, run: int, batch: CommittedBatch, stages: Mapping[str, StageProgress | None]
    ) -> Mapping[str, int]:
        """Commit an epoch with all late rows and corrections not counted yet, and count none twice.

        The service may have taken an attempt that it could not answer. The counts of an attempt stay
        with its epoch, which is repeated before a later one is committed: committed again, an epoch
        adds nothing.
        """
        earlier = self._attempt
        if earlier is not None and earlier.epoch != batch.epoch and earlier.brings_counts:
            with suppress(StaleEpoch, InputAhead):
                self._send(run, earlier)
        elif earlier is not None:
            self._late.update(earlier.late)
            self._corrections.update(earlier.corrections)
        attempt = _Attempt(batch.epoch, self._planned_ms, stages, +self._late, +self._corrections)
        self._late.clear()
        self._corrections.clear()
        return self._send(run, attempt)

    def _send(self, run: int, attempt: _Attempt) -> Mapping[str, int]:
        """Commit an epoch; keep the attempt unless the service has taken or refused the epoch."""
        self._attempt = attempt
        applied: Mapping[str, int] = {}
        try:
            applied = self._client.commit(
                self._query.job,
                run,
                attempt.epoch,
                attempt.stages,
                late=attempt.late,
                corrections=attempt.corrections,
                # Only idle policies take a commit as evidence. An older service rejects its age.
                planned_ms=attempt.planned_ms if self._stages.watched else None,
            )
        except (StaleEpoch, InputAhead):
            self._attempt = None
            raise
        self._attempt = None
        return applied

    def _emitted_ms(
        self, batch: CommittedBatch, promised: Mapping[str, StageProgress]
    ) -> dict[str, int]:
        return {
            stage: each.input_ms
            for stage, each in promised.items()
            if each.input_ms is not None
            and batch.keeps_nothing
            and self._stages.promises[stage].may_idle
        }

    def _progress(self, watermark_ms: int) -> dict[str, StageProgress]:
        """Return how far each keyed stage is after a batch, given Spark's watermark in it."""
        if watermark_ms <= 0:  # Spark has no watermark yet, which it writes as 1970
            return {}
        if watermark_ms >= END_MS - 1:
            return dict.fromkeys(self._stages.promises, StageProgress(MAX_MS))
        found = {
            stage: promise.progress(watermark_ms, self._sessions.newest)
            for stage, promise in self._stages.promises.items()
        }
        return {
            stage: progress for stage, progress in found.items() if progress.input_ms is not None
        }

    def _warn_of_old_checkpoint(self, batch: CommittedBatch, error: StaleEpoch) -> None:
        """Log once why an epoch is below the job's. The reports of the batch are pending."""
        if self.counts.rereads:
            return
        self.counts.rereads = True
        latest = error.problem.get("last_epoch", "a later one")
        message = old_checkpoint_message(self._query.name, f"ran batch {batch.epoch}", latest)
        if self._query.on_lost_checkpoint == "continue":
            _log.warning("%s", message)
        else:
            self._running.fail(f"{message}. {CONTINUES}")

    def _reconcile(
        self,
        batch: CommittedBatch,
        promised: Mapping[str, StageProgress],
        applied: Mapping[str, int],
    ) -> None:
        """Compare what was applied with what the batch had to report; keep the rest as pending."""
        reported = False
        for stage in self._stages.sources:
            tallies = self._pop(stage.name, batch.epoch)
            reported = reported or bool(tallies)
            self.counts.record(stage.name, tallies)
            newest: dict[str, RangeReport] = {}
            for tally in tallies:
                add_reports(newest, tally.promises)
                if stage.is_dynamic:
                    self._finalisation.add_joined(stage.name, tally.promises)
                self._in_flight.add(stage, tally, self._states.promised(stage.name))
            # If several epochs were committed at once, only the last one's reports were applied.
            if applied.get(stage.name, 0) < len(newest) or len(tallies) > 1:
                # The reports may have been applied or not, so some rows are counted twice. To leave
                # out their count would be worse: the shard would look as if it had none.
                self.pending.add(stage.name, newest)
        for stage in self._stages.keyed:
            tallies = self._pop(stage.name, batch.epoch)
            reported = reported or bool(tallies)
            self.counts.record(stage.name, tallies)
            is_applied = applied.get(stage.name, 0) >= len(stage.ranges)
            self.pending.set_progress(stage.name, None if is_applied else promised.get(stage.name))
        if batch.rows and not reported and not self._is_silence_logged:
            self._is_silence_logged = True
            log_silence(self._query.name, self._stages.names, batch.epoch, batch.rows)
