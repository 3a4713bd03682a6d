"""Decides in the driver, before each batch, what a query's control sources hand to Spark next.

Spark polls every source before it plans a batch, once all earlier batches are in its commit log.
That is the moment to commit the last batch's epoch to the service and to read the watermark that
results: the batch planned now carries it to Spark, and the next one closes windows by it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Final, Protocol

from spark_agent.client.client import Client, StageWatermark
from spark_agent.client.poller import Poller, long_poll_s
from spark_agent.clock import Clock
from spark_agent.driver.adoption import STALLED_AFTER_BATCHES, Adoption
from spark_agent.driver.ingress_clock import IngressClock
from spark_agent.driver.late_rows import LateRows
from spark_agent.driver.read_first import ReadFirst
from spark_agent.exceptions import AggregatorError, QueryFailedError
from spark_agent.jvm.progress import CommittedBatch
from spark_agent.sources.admission import Admission, Wanted
from spark_agent.sources.control import END_MS, to_spark_ms
from spark_agent.sources.driver_link import LinkError, Offset, RetryLater
from spark_agent.started_query import StartedQuery
from spark_agent.supervision.batch_waits import BatchWaits
from spark_agent.supervision.diagnostics import log_missing_inputs
from spark_agent.supervision.read_through import ReadThrough
from spark_agent.throttle.source_throttle import SourceThrottle
from spark_agent.times import instant_text

_log: Final = logging.getLogger("spark_agent")


class QuerySupervisor(Protocol):
    """The part of a query's supervisor that the feed needs."""

    def commit_epoch(self, batch: CommittedBatch, timeout_ms: int) -> bool:
        """Commit a batch's epoch unless that is done; return whether it was committed in time."""
        ...

    def finalise_sources(self, timeout_ms: int) -> bool:
        """Make the sources of a drained query final; return whether they became final in time."""
        ...

    def has_read_sessions(self) -> bool:
        """Return whether the promises go by the sessions of the last batch."""
        ...

    @property
    def last_error(self) -> str:
        """Latest error of a request to the service."""
        ...

    @property
    def alive(self) -> bool:
        """True while it supervises the query. A fenced query may go on without it."""
        ...


class FedQuery(Protocol):
    """The part of a running query that the feed needs."""

    def latest_batch(self) -> CommittedBatch | None:
        """Return the latest batch that the query has committed since its start, if any."""
        ...

    def fail(self, message: str) -> None:
        """Make the query fail with this error."""
        ...

    @property
    def failure(self) -> str | None:
        """The error that the agent lets the query fail with, if any."""
        ...

    @property
    def is_active(self) -> bool:
        """True until the query ends, or is being stopped."""
        ...


OtherGeneration = Callable[[int], str | None]
"""Returns why a query has to fail whose job is in this generation; None: it is the query's own."""


class WatermarkFeed:
    """Serves the control sources of one started query. `next` is thread-safe."""

    def __init__(
        self,
        query: StartedQuery,
        running: FedQuery,
        *,
        supervisor: QuerySupervisor,
        waits: BatchWaits,
        read: ReadThrough,
        late_rows: LateRows,
        caps_ms: Mapping[str, int | None],
        other_generation: OtherGeneration,
        throttle: SourceThrottle | None,
        client: Client,
        clock: Clock,
    ) -> None:
        """`caps_ms` are the highest input watermarks of this run, by keyed stage that has a cap.

        `throttle` holds the query back while it is active.
        """
        self._query = query
        self._running = running
        self._supervisor = supervisor
        self._waits = waits
        self._read = read
        self._ingress = IngressClock(query, client)
        self._late_rows = late_rows
        self._caps_ms = caps_ms
        self._other_generation = other_generation
        self._throttle = throttle
        self._client = client
        self._clock = clock
        self._lock = threading.Lock()
        self._inputs = {
            stage: Poller(
                partial(_fetch_watermark, client, query.job, stage),
                poll_ms=query.timing.poll_ms,
                clock=clock,
                wait_s=long_poll_s(query.timing.ttl_ms),
            )
            for stage in query.stages.promises
        }
        self._committed_epoch = -1
        self._drained = False
        self._is_finalising = False
        self._awaits_since_ms: int | None = None
        self._gave_up = False
        self._logged_missing: set[str] = set()
        self._logged_before_1970: set[str] = set()
        self._adoption = Adoption()
        self._read_first = {
            stage: ReadFirst(query.stages.limited_topics) for stage in query.stages.promises
        }
        self._checked: set[str] = set()
        """Readers whose checkpoint has been compared with the job."""
        self._retrying: set[str] = set()
        """Readers whose trigger goes on: they were answered `RetryLater`."""
        # By reader: the offset last returned, and the latest epoch at that time.
        self._last_answers: dict[str, tuple[Offset, int]] = {}
        self._first_epoch: int | None = None

    def next(
        self, reader: str, stage: str, at: Offset, until_ms: int | None = None
    ) -> Offset | RetryLater:
        """Return a control source's next offset, or `at` itself if nothing is new; a `RetryLater` while
        the next batch has to wait.

        Offsets never go back, even if the service's watermark does: its ledger may have been lost, or
        the query may run from an old checkpoint. On a source's first call the offset always
        advances, so every start of a query runs a batch in which all ranges report, even if the last
        epoch before a crash was never committed and no data arrives.

        `until_ms`: instant until which the source waits, on the steady clock; None: without an end.

        Raises `QueryFailedError` if the query must not run another batch, and `LinkError` if the source
        waits no longer.
        """
        with self._lock:
            found = self._next(reader, stage, at, until_ms)
            if isinstance(found, RetryLater):
                self._retrying.add(reader)
            else:
                self._retrying.discard(reader)
            return found

    def _asked_ms(self, until_ms: int | None) -> int:
        """Return the time of the wall clock, at which a source waits for the answer to its request.

        A driver that has stalled may find a request after its source has given up. Spark has planned a
        batch since, and the source may have sent the next request. Such a request must not be noted as
        one of the present trigger. Raises `LinkError`.
        """
        now_ms = self._clock.wall_ms()
        # After the reading, and after that of the latest batch: no stall in between makes them newer.
        if until_ms is not None and self._clock.steady_ms() >= until_ms:
            raise LinkError("the source waits no longer")
        return now_ms

    def _next(
        self, reader: str, stage: str, at: Offset, until_ms: int | None
    ) -> Offset | RetryLater:
        latest = self._running.latest_batch()
        now_ms = self._asked_ms(until_ms)
        behind = self._ingress.reason_to_wait(now_ms)
        if behind is None:
            # Before the commit, with which the supervisor reports by it.
            self._read.note_poll(reader, now_ms, latest, is_retry=reader in self._retrying)
        self._settle(latest)
        if self._must_wait(latest, behind):
            return RetryLater(self._query.timing.poll_ms)
        found = at
        if stage in self._inputs:  # else it is a gate, which only holds batches back
            found = self._next_offset(reader, stage, at, latest)
            if found == at:
                found = self._settled(stage, at, latest)
                if isinstance(found, RetryLater):
                    # The trigger goes on: the answer is not noted, so that a second poll of the
                    # same trigger is not taken for a trigger without data.
                    return found
            self._raise_failure()
        elif stage in self._query.clocks and reader not in self._last_answers:
            # One batch at each start, even without data: after its commit, the driver may promise.
            found = Offset(at.watermark_ms, at.turn + 1)
        self._last_answers[reader] = found, _epoch(latest)
        waited = None if self._throttle is None else self._throttle.end_wait()
        if waited is None or latest is None or latest.read_nothing:
            # A batch without rows that has not waited: an offset for it would cause another one.
            return found
        return Offset(found.watermark_ms, at.turn + 1, waited)

    def admit(self, stage: str, wanted: Wanted, until_ms: int | None = None) -> Admission:
        """Return what the shards of a source of ours may read in the next batch.

        Raises as `next` does.
        """
        with self._lock:
            latest = self._running.latest_batch()
            now_ms = self._asked_ms(until_ms)
            self._settle(latest)
            admission = Admission()
            if self._throttle is not None:
                admission = self._throttle.admit(stage, wanted, latest)
            self._read.note_listing(stage, now_ms, wanted, admission)
            self._waits.note_complete(stage, wanted, _epoch(latest))
            self._waits.note_shards(stage, unread=list(wanted.unread), waits=admission.because)
            return admission

    def _settle(self, latest: CommittedBatch | None) -> None:
        """Commit the latest batch. Raises `QueryFailedError`."""
        if self._first_epoch is None:
            self._first_epoch = _epoch(latest)
        self._late_rows.note_batch(latest)
        self._commit(latest)
        self._raise_failure()

    def _raise_failure(self) -> None:
        """Raise `QueryFailedError` if the query has to fail.

        Spark checks for a failure only between two triggers, and this one has begun: its batch would
        still be run, or an `availableNow` run would end well.
        """
        if (failure := self._running.failure) is not None:
            raise QueryFailedError(failure)

    def _must_wait(self, latest: CommittedBatch | None, behind: str | None) -> bool:
        """Return whether the clock is behind, or the sources are throttled. Spark's thread waits in the
        control source then, and so would a call of `query.stop()`, which is why one that is being
        stopped never waits.
        """
        reason = None
        # Each look at the query is a request to the JVM.
        if (behind is not None or self._throttle is not None) and self._running.is_active:
            reason = behind
            if self._throttle is not None:
                reason = reason or self._throttle.reason_to_wait(latest)
        self._waits.because = reason
        return reason is not None

    def _next_offset(
        self, reader: str, stage: str, at: Offset, latest: CommittedBatch | None
    ) -> Offset:
        first = reader not in self._last_answers
        if reader not in self._checked:
            self._check_checkpoint(reader, stage, at)
        if self._query.bounded and not self._drained and self._has_drained(reader, at, latest):
            self._finalise_sources()
            self._inputs[stage].refresh_soon()
        self._log_missing_inputs(stage, latest)
        found = self._inputs[stage].latest()
        if found is not None:
            other = self._other_generation(found.generation)
            if other is not None:
                if self._running.failure is None:
                    self._running.fail(other)
                return at
        target_ms = self._target_ms(stage, found, latest)
        self._log_before_1970(stage, found, target_ms)
        if target_ms is not None and (at.watermark_ms is None or target_ms > at.watermark_ms):
            return Offset(target_ms, at.turn + 1)
        awaited = (
            self._adoption.is_awaited(reader, at, latest) or self._read_first[stage].is_waiting
        )
        if first or awaited or self._must_continue(latest):
            return Offset(at.watermark_ms, at.turn + 1)
        return at

    @property
    def _ends_when_idle(self) -> bool:
        """True if Spark ends the query at the first trigger that finds no new data."""
        return self._query.trigger.is_available_now

    def _finalise_sources(self) -> None:
        """Make the sources final, if the service answers. Until then the run does not end."""
        drained = self._supervisor.finalise_sources(self._query.timing.patience_ms)
        # A query that does not end by itself need not wait: its supervisor keeps trying.
        self._drained = drained or not self._ends_when_idle
        self._is_finalising = not self._drained

    def _settled(
        self, stage: str, at: Offset, latest: CommittedBatch | None
    ) -> Offset | RetryLater:
        """Return `at`, unless a run would end by it for which the service may still have news.

        Spark ends an `availableNow` run at the first trigger without news. The next watermark may be
        such news, but is there only once the service has taken the last epoch, has made drained sources
        final, and has answered a poll after that. A query that is started by this one's end is to find
        this one's promise, so open sessions are read before. So the run goes on until a batch has read
        nothing, and then waits.
        """
        is_settled = (
            _epoch(latest) <= self._committed_epoch
            and not self._is_finalising
            and self._inputs[stage].is_current
            and (not self._ends_when_idle or self._supervisor.has_read_sessions())
        )
        is_supervised = self._running.is_active and self._supervisor.alive
        if is_settled or not self._ends_when_idle or latest is None or not is_supervised:
            self._awaits_since_ms = None
            return at
        if self._gave_up or self._running.failure is not None:
            return at
        if not latest.read_nothing:
            return Offset(at.watermark_ms, at.turn + 1)
        return self._await_service(stage, at)

    def _await_service(self, stage: str, at: Offset) -> Offset | RetryLater:
        """Return a `RetryLater`, for `finish_timeout` at most; then `at`, which ends the run."""
        now_ms = self._clock.steady_ms()
        if self._awaits_since_ms is None:
            self._awaits_since_ms = now_ms
            _log.info("stage %s: the run ends once the service has answered", stage)
        if now_ms - self._awaits_since_ms < self._query.timing.finish_timeout_ms:
            return RetryLater(self._query.timing.poll_ms)
        self._give_up()
        return at

    def _give_up(self) -> None:
        """Let the run end without the service. A bounded one fails: nothing follows it."""
        self._gave_up = True
        timeout_s = self._query.timing.finish_timeout_ms // 1_000
        found = (
            f"this run has read all its input, but within finish_timeout "
            f"({timeout_s} s) the service did not take what it has done: "
            f"{self._supervisor.last_error}"
        )
        if self._query.bounded:
            self._running.fail(
                f"tidegauge: {found}. So its last windows did not come out. Nothing is lost: mend that "
                f"and run it again"
            )
        else:
            _log.warning("%s. Its last windows come out in the next run", found)

    def _log_before_1970(
        self, stage: str, found: StageWatermark | None, target_ms: int | None
    ) -> None:
        """Log once that Spark's watermark, which begins at 1970, cannot follow the stage's."""
        if found is None or target_ms is None or target_ms > 0 or stage in self._logged_before_1970:
            return
        promise = self._query.stages.promises[stage]
        if found.input_ms is not None and found.input_ms > 0 and promise.allowed_lateness_ms:
            self._logged_before_1970.add(stage)
            _log.warning(
                "stage %s: its watermark is at %s, and that less its allowed lateness is before 1970, "
                "where Spark's watermark begins: its windows wait until it is after 1970",
                stage,
                instant_text(found.input_ms),
            )

    def _log_missing_inputs(self, stage: str, latest: CommittedBatch | None) -> None:
        found = self._inputs[stage].latest()
        if stage in self._logged_missing or found is None or found.input_ms is not None:
            return
        if self._first_epoch is None or _epoch(latest) - self._first_epoch < STALLED_AFTER_BATCHES:
            return
        # Only one attempt: batches must not wait for a service that has become unavailable.
        self._logged_missing.add(stage)
        with suppress(AggregatorError):
            watermarks = self._client.watermarks(self._query.job)
            log_missing_inputs(stage, self._query.stages.inputs[stage], watermarks)

    def _check_checkpoint(self, reader: str, stage: str, at: Offset) -> None:
        """Check that the job has not fallen behind the query's checkpoint, once the service answers.
        Until then, no offset has another watermark than the checkpoint's.
        """
        found = self._inputs[stage].latest()
        if found is None:
            return
        input_ms = found.input_ms
        self._checked.add(reader)
        if at.watermark_ms is None:
            return
        here_ms = None if input_ms is None else self._to_spark_ms(input_ms)
        if here_ms is not None and here_ms >= at.watermark_ms:
            return
        if at.watermark_ms >= END_MS - 1:
            self._running.fail(
                f"tidegauge: a bounded run left this query's checkpoint at the end of time, but stage "
                f"{stage!r} is not there: the job was reset, or the service's ledger was lost. Spark "
                f"would drop every row as late. Start over, with Pipeline.reset(), a new checkpoint and "
                f"an empty output"
            )
        else:
            _log.warning(
                "stage %s: this query's checkpoint is at %s, but the job is only at %s: its ledger was "
                "lost, or is an older copy. Spark drops late rows by its checkpoint. To start "
                "over, give the query a new checkpoint and an empty output",
                stage,
                instant_text(at.watermark_ms),
                instant_text(input_ms),
            )

    def _commit(self, latest: CommittedBatch | None) -> None:
        if latest is None or latest.epoch <= self._committed_epoch:
            return
        if self._supervisor.commit_epoch(latest, self._query.timing.patience_ms):
            self._committed_epoch = latest.epoch
            for each in self._inputs.values():
                each.refresh_soon()
            if self._throttle is not None:
                self._throttle.refresh_soon()

    def _has_drained(self, reader: str, at: Offset, latest: CommittedBatch | None) -> bool:
        """Return whether a trigger has found no new data in any source except control sources.

        Either the last batch read nothing, or no batch has run since this source was last polled,
        although that trigger polled all sources. A batch planned before this start, which Spark only
        repeats, proves nothing. Nor does a trigger that found nothing because shards have to wait.
        """
        if latest is None or self._first_epoch is None or self._waits.has_unread:
            return False
        read_nothing = latest.read_nothing and latest.epoch > self._first_epoch
        return read_nothing or self._last_answers.get(reader) == (at, latest.epoch)

    def _must_continue(self, latest: CommittedBatch | None) -> bool:
        """Return whether a run must not end yet: no empty batch has shown that it is drained."""
        if self._is_finalising:
            return False  # It waits instead.
        ends = self._query.bounded and self._ends_when_idle
        return ends and not self._drained and latest is not None

    def _target_ms(
        self, stage: str, found: StageWatermark | None, latest: CommittedBatch | None
    ) -> int | None:
        input_ms = None if found is None else found.input_ms
        if stage in self._caps_ms:
            cap_ms = self._caps_ms[stage]
            input_ms = None if input_ms is None or cap_ms is None else min(input_ms, cap_ms)
        if input_ms is not None:
            input_ms = self._read_first[stage].passed_ms(input_ms, latest)
        return None if input_ms is None else self._to_spark_ms(input_ms)

    def _to_spark_ms(self, input_ms: int) -> int:
        """Return the one watermark for all operators of the query: what the strictest one needs."""
        found_ms = to_spark_ms(input_ms)
        return min(each.spark_ms(found_ms) for each in self._query.stages.promises.values())


def _epoch(latest: CommittedBatch | None) -> int:
    return -1 if latest is None else latest.epoch


def _fetch_watermark(
    client: Client, job: str, stage: str, latest: StageWatermark | None, wait_s: int
) -> StageWatermark:
    if latest is None:
        return client.watermark(job, stage)
    return client.watermark_since(job, stage, latest.etag, wait_s=wait_s) or latest
