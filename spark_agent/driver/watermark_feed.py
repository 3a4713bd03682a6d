"""Decides in the driver, before each batch, what a query's control sources hand to Spark next.

Spark polls every source before it plans a batch, once all earlier batches are in its commit log.
That is the moment to commit the last batch's epoch to the service and to read the watermark that
results: the batch planned now carries it to Spark, and the next one closes windows by it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Protocol

from spark_agent.client.client import Client
from spark_agent.clock import Clock
from spark_agent.exceptions import AggregatorError, QueryFailedError
from spark_agent.jvm.progress import CommittedBatch
from spark_agent.soundness.operators import Promise
from spark_agent.sources.admission import Admission, Wanted
from spark_agent.sources.control import END_MS, to_spark_ms
from spark_agent.sources.driver_link import Hold, Offset
from spark_agent.supervision.diagnostics import log_missing_inputs
from spark_agent.throttle.source_throttle import SourceThrottle
from spark_agent.times import instant_text

_log: Final = logging.getLogger("spark_agent")

_LONGEST_PAUSE_MS: Final = 5_000
_STALLED_AFTER_BATCHES: Final = 3
"""Spark must have adopted a watermark this many batches after it was handed over."""


class EpochCommitter(Protocol):
    """The part of a query's supervisor that the feed needs."""

    def commit_epoch(self, batch: CommittedBatch, timeout_ms: int) -> bool:
        """Commit a batch's epoch unless that is done; return whether it was committed in time."""
        ...

    def finalise_sources(self, timeout_ms: int) -> bool:
        """Make the sources of a drained query final; return whether they became final in time."""
        ...

    def fail_query(self, message: str) -> None:
        """Make the query fail with this error."""
        ...

    @property
    def last_error(self) -> str:
        """Latest error of a request to the service."""
        ...

    @property
    def failure(self) -> str | None:
        """Why the query has to fail; None: it does not."""
        ...

    @property
    def alive(self) -> bool:
        """True while it supervises the query. A fenced query may go on without it."""
        ...

    def wait_because(self, reason: str | None) -> None:
        """Keep the sources' leases while the query waits for this reason; None: it does not."""
        ...

    def note_shards(self, stage: str, *, unread: Collection[str], waits: Mapping[str, str]) -> None:
        """Note which shards of a source have unread files, and why which of them get none or fewer."""
        ...


@dataclass(frozen=True, slots=True)
class WatermarkFeedConfig:
    """Facts about a started query that the feed needs."""

    job: str
    promises: Mapping[str, Promise]
    """By keyed stage."""
    caps_ms: Mapping[str, int | None]
    """By keyed stage that is capped: the highest input watermark of this run. None: no watermark."""
    inputs: Mapping[str, Collection[str]]
    """By keyed stage: every stage that its input watermark depends on."""
    bounded: bool
    ends_when_idle: bool
    """True if Spark ends the query at the first trigger that finds no new data (`availableNow`)."""
    patience_ms: int
    poll_ms: int
    finish_timeout_ms: int
    """The longest wait, at the end of such a run, for a service that is away."""


class WatermarkFeed:
    """Serves the control sources of one started query. `next` is thread-safe."""

    def __init__(
        self,
        config: WatermarkFeedConfig,
        *,
        supervisor: EpochCommitter,
        client: Client,
        progress: Callable[[], CommittedBatch | None],
        clock: Clock,
        other_generation: Callable[[int], str | None],
        throttle: SourceThrottle | None = None,
        is_active: Callable[[], bool] = lambda: True,
    ) -> None:
        """`other_generation` tells why the query must fail if the job is in this generation; None: it
        need not. `throttle` holds the query back while `is_active`, that is until somebody stops it.
        """
        self._config = config
        self._throttle = throttle
        self._is_active = is_active
        self.supervisor = supervisor
        self._progress = progress
        self._clock = clock
        self._lock = threading.Lock()
        self._inputs = {
            stage: _InputWatermark(config, stage, client, clock, other_generation)
            for stage in config.promises
        }
        self._committed_epoch = -1
        self._drained = False
        self._is_finalising = False
        self._awaits_since_ms: int | None = None
        self._gave_up = False
        self._logged_missing: set[str] = set()
        self._client = client
        self._stalled: _StalledWatermark | None = None
        self._checked: set[str] = set()
        """Readers whose checkpoint has been compared with the job."""
        # By reader: the offset last returned, and the latest epoch at that time.
        self._last_answers: dict[str, tuple[Offset, int]] = {}
        self._first_epoch: int | None = None
        # By source of ours: its shards that have unread files.
        self._unread: dict[str, Collection[str]] = {}

    def next(self, reader: str, stage: str, at: Offset) -> Offset | Hold:
        """Return a control source's next offset, or `at` itself if nothing is new; a `Hold` while the
        next batch has to wait.

        Offsets never go back, even if the service's watermark does: its ledger may have been lost, or
        the query may run from an old checkpoint. On a source's first call the offset always
        advances, so every start of a query runs a batch in which all ranges report, even if the last
        epoch before a crash was never committed and no data arrives.

        Raises `QueryFailedError` if the query must not run another batch.
        """
        with self._lock:
            latest = self._latest()
            if self._must_wait(latest):
                return Hold(self._config.poll_ms)
            found = at
            if stage in self._inputs:  # else it is a gate, which only holds batches back
                found = self._next_offset(reader, stage, at, latest)
                if found == at:
                    found = self._settled(stage, at, latest)
                    if isinstance(found, Hold):
                        # The trigger goes on: the answer is not noted, so that a second poll of the
                        # same trigger is not taken for a trigger without data.
                        return found
                self._raise_failure()
                self._last_answers[reader] = found, _epoch(latest)
            waited = None if self._throttle is None else self._throttle.end_wait()
            if waited is None or latest is None or latest.read_nothing:
                # Nothing to tell, or nothing to read: to tell it would cause a batch without an end.
                return found
            return Offset(found.watermark_ms, at.turn + 1, waited)

    def admit(self, stage: str, wanted: Wanted) -> Admission:
        """Return what the shards of a source of ours may read in the next batch.

        Raises `QueryFailedError` if the query must not run another batch.
        """
        with self._lock:
            latest = self._latest()
            admission = Admission()
            if self._throttle is not None:
                admission = self._throttle.admit(stage, wanted, latest)
            self._unread[stage] = list(wanted.unread)
            self.supervisor.note_shards(stage, unread=list(wanted.unread), waits=admission.because)
            return admission

    def _latest(self) -> CommittedBatch | None:
        """Commit the latest batch, and return it. Raises `QueryFailedError`."""
        latest = self._progress()
        if self._first_epoch is None:
            self._first_epoch = _epoch(latest)
        self._commit(latest)
        self._raise_failure()
        return latest

    def _raise_failure(self) -> None:
        """Raise `QueryFailedError` if the query has to fail.

        Spark checks for a failure only between two triggers, and this one has begun: its batch would
        still be run, or an `availableNow` run would end well.
        """
        if (failure := self.supervisor.failure) is not None:
            raise QueryFailedError(failure)

    def _must_wait(self, latest: CommittedBatch | None) -> bool:
        """Return whether the sources are throttled. Spark's thread waits in the control source then, and
        so would a call of `query.stop()`, which is why one that is being stopped never waits.
        """
        if self._throttle is None:
            return False
        reason = self._throttle.reason_to_wait(latest) if self._is_active() else None
        self.supervisor.wait_because(reason)
        return reason is not None

    def _next_offset(
        self, reader: str, stage: str, at: Offset, latest: CommittedBatch | None
    ) -> Offset:
        first = reader not in self._last_answers
        if reader not in self._checked:
            self._check_checkpoint(reader, stage, at)
        if self._config.bounded and not self._drained and self._has_drained(reader, at, latest):
            self._finalise_sources()
            self._inputs[stage].refresh_soon()
        self._log_missing_inputs(stage, latest)
        if (other := self._inputs[stage].other_generation) is not None:
            if self.supervisor.failure is None:
                self.supervisor.fail_query(other)
            return at
        target_ms = self._target_ms(stage)
        if target_ms is not None and (at.watermark_ms is None or target_ms > at.watermark_ms):
            return Offset(target_ms, at.turn + 1)
        if first or self._spark_lags(at, latest) or self._must_continue(latest):
            return Offset(at.watermark_ms, at.turn + 1)
        return at

    def _finalise_sources(self) -> None:
        """Make the sources final, if the service answers. Until then the run does not end."""
        drained = self.supervisor.finalise_sources(self._config.patience_ms)
        # A query that does not end by itself need not wait: its supervisor keeps trying.
        self._drained = drained or not self._config.ends_when_idle
        self._is_finalising = not self._drained

    def _settled(self, stage: str, at: Offset, latest: CommittedBatch | None) -> Offset | Hold:
        """Return `at`, unless a run would end by it for which the service may still have news.

        Spark ends an `availableNow` run at the first trigger without news. The next watermark may be
        such news, but is known only once the service has taken the last epoch, has made drained sources
        final, and has answered a poll after that. So the run goes on until a batch has read nothing,
        and then waits for the service.
        """
        config = self._config
        is_settled = (
            _epoch(latest) <= self._committed_epoch
            and not self._is_finalising
            and self._inputs[stage].is_current
        )
        is_supervised = self._is_active() and self.supervisor.alive
        if is_settled or not config.ends_when_idle or latest is None or not is_supervised:
            self._awaits_since_ms = None
            return at
        if self._gave_up or self.supervisor.failure is not None:
            return at
        if not latest.read_nothing:
            return Offset(at.watermark_ms, at.turn + 1)
        return self._await_service(stage, at)

    def _await_service(self, stage: str, at: Offset) -> Offset | Hold:
        """Return a `Hold`, for `finish_timeout` at most; then `at`, which ends the run."""
        now_ms = self._clock.steady_ms()
        if self._awaits_since_ms is None:
            self._awaits_since_ms = now_ms
            _log.info("stage %s: the run ends once the service has answered", stage)
        if now_ms - self._awaits_since_ms < self._config.finish_timeout_ms:
            return Hold(self._config.poll_ms)
        self._give_up()
        return at

    def _give_up(self) -> None:
        """Let the run end without the service. A bounded one fails: nothing follows it."""
        self._gave_up = True
        found = (
            f"this run has read all its input, but within finish_timeout "
            f"({self._config.finish_timeout_ms // 1_000} s) the service did not take what it has done: "
            f"{self.supervisor.last_error}"
        )
        if self._config.bounded:
            self.supervisor.fail_query(
                f"tidegauge: {found}. So its last windows did not come out. Nothing is lost: mend that "
                f"and run it again"
            )
        else:
            _log.warning("%s. Its last windows come out in the next run", found)

    def _log_missing_inputs(self, stage: str, latest: CommittedBatch | None) -> None:
        known = self._inputs[stage]
        if stage in self._logged_missing or known.latest_ms() is not None or not known.answered:
            return
        if self._first_epoch is None or _epoch(latest) - self._first_epoch < _STALLED_AFTER_BATCHES:
            return
        # Only one attempt: batches must not wait for a service that has become unavailable.
        self._logged_missing.add(stage)
        with suppress(AggregatorError):
            watermarks = self._client.watermarks(self._config.job)
            log_missing_inputs(stage, self._config.inputs[stage], watermarks)

    def _check_checkpoint(self, reader: str, stage: str, at: Offset) -> None:
        """Check that the job has not fallen behind the query's checkpoint, once the service answers.
        Until then, no offset has another watermark than the checkpoint's.
        """
        known = self._inputs[stage]
        input_ms = known.latest_ms()
        if not known.answered:
            return
        self._checked.add(reader)
        if at.watermark_ms is None:
            return
        here_ms = None if input_ms is None else self._to_spark_ms(input_ms)
        if here_ms is not None and here_ms >= at.watermark_ms:
            return
        if at.watermark_ms >= END_MS - 1:
            self.supervisor.fail_query(
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
        if self.supervisor.commit_epoch(latest, self._config.patience_ms):
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
        if latest is None or self._first_epoch is None or any(self._unread.values()):
            return False
        read_nothing = latest.read_nothing and latest.epoch > self._first_epoch
        return read_nothing or self._last_answers.get(reader) == (at, latest.epoch)

    def _must_continue(self, latest: CommittedBatch | None) -> bool:
        """Return whether a run must not end yet: no empty batch has shown that it is drained."""
        config = self._config
        if self._is_finalising:
            return False  # It waits instead.
        return config.bounded and config.ends_when_idle and not self._drained and latest is not None

    def _target_ms(self, stage: str) -> int | None:
        input_ms = self._inputs[stage].latest_ms()
        if stage in self._config.caps_ms:
            cap_ms = self._config.caps_ms[stage]
            input_ms = None if input_ms is None or cap_ms is None else min(input_ms, cap_ms)
        if input_ms is None:
            return None
        return self._to_spark_ms(input_ms)

    def _to_spark_ms(self, input_ms: int) -> int:
        """Return the one watermark for all operators of the query: what the strictest one needs."""
        strictest = max(self._config.promises.values(), key=lambda promise: promise.spark_lag_ms)
        return strictest.spark_ms(to_spark_ms(input_ms))

    def _spark_lags(self, at: Offset, latest: CommittedBatch | None) -> bool:
        """Return whether Spark needs another batch to adopt the watermark it was handed.

        A control row becomes Spark's watermark at the end of its batch. Without stateful operators
        Spark would not run another batch until data arrives.
        """
        if latest is None or at.watermark_ms is None or latest.watermark_ms >= at.watermark_ms:
            self._stalled = None
            return False
        if at.watermark_ms <= 0:
            return False  # Spark's own watermark starts at 1970.
        if self._stalled is None or self._stalled.watermark_ms != at.watermark_ms:
            self._stalled = _StalledWatermark(at.watermark_ms, latest.epoch)
        stall = self._stalled
        if latest.epoch - stall.since_epoch < _STALLED_AFTER_BATCHES:
            return True
        if not stall.logged:
            self._stalled = _StalledWatermark(stall.watermark_ms, stall.since_epoch, logged=True)
            _log.warning(
                "Spark's watermark is stuck at %d ms, although the control source handed it %d ms "
                "%d batches ago. Either its batches are not computed: the function of foreachBatch "
                "does not use its rows, or the output folder has these batches already, from another "
                "checkpoint. Or something holds it back: a withWatermark on another source of this "
                "query, or an optimiser rule that drops the control rows",
                latest.watermark_ms,
                at.watermark_ms,
                latest.epoch - stall.since_epoch,
            )
        return False


@dataclass(frozen=True, slots=True)
class _StalledWatermark:
    """A watermark handed to Spark that Spark has not adopted yet."""

    watermark_ms: int
    since_epoch: int
    logged: bool = False


def _epoch(latest: CommittedBatch | None) -> int:
    return -1 if latest is None else latest.epoch


class _InputWatermark:
    """A stage's input watermark, polled no more often than necessary."""

    def __init__(
        self,
        config: WatermarkFeedConfig,
        stage: str,
        client: Client,
        clock: Clock,
        other_generation: Callable[[int], str | None],
    ) -> None:
        self._config = config
        self._stage = stage
        self._client = client
        self._clock = clock
        self._latest_ms: int | None = None
        self._compare = other_generation
        self.other_generation: str | None = None
        """Why the query has to fail: the job is in another generation. None: it is not."""
        self.answered = False
        """True once the service has answered."""
        self.is_current = False
        """True if the service has answered since the last call of `refresh_soon`."""
        self._pause_ms = config.poll_ms
        self._next_refresh_ms: int | None = None

    def refresh_soon(self) -> None:
        """Poll on the next call, unless backing off from a service that does not answer."""
        self.is_current = False
        if self._pause_ms <= self._config.poll_ms:
            self._next_refresh_ms = None

    def latest_ms(self) -> int | None:
        """Return the latest known value. An idle query calls this every 10 ms."""
        now_ms = self._clock.steady_ms()
        if self._next_refresh_ms is None or now_ms >= self._next_refresh_ms:
            self._refresh()
            self._next_refresh_ms = self._clock.steady_ms() + self._pause_ms
        return self._latest_ms

    def _refresh(self) -> None:
        try:
            found = self._client.watermark(self._config.job, self._stage)
        except AggregatorError:
            # Keeping the old watermark is always safe. Back off until the service answers again.
            self._pause_ms = min(2 * self._pause_ms, max(_LONGEST_PAUSE_MS, self._config.poll_ms))
            return
        self._pause_ms = self._config.poll_ms
        self.answered = self.is_current = True
        self._latest_ms = found.input_ms
        self.other_generation = self._compare(found.generation)
