"""What a query's control sources hand to Spark next: decided in the driver, before each batch.

Spark asks every source before it plans a batch, when every earlier batch is in its commit log. So
that is the moment to commit the last batch's epoch to the service, and to look at once how far the
watermark has come by it: the batch planned now brings it along, and the one after closes by it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Protocol

from spark_agent.client import AggregatorError, Client
from spark_agent.clock import Clock
from spark_agent.control_source import END_MS, to_spark_ms
from spark_agent.diagnostics import log_missing_inputs
from spark_agent.link import Offset
from spark_agent.operators import Promise
from spark_agent.plan import CommittedBatch
from spark_agent.times import instant_text

_log: Final = logging.getLogger("spark_agent")

_LONGEST_PAUSE_MS: Final = 5_000
_FINALISE_TIMEOUT_MS: Final = 60_000
"""How long a drained run waits until its sources are final."""
_STALLED_AFTER_BATCHES: Final = 3
"""So many batches after a watermark was handed to Spark, Spark should run with it."""


class EpochCommitter(Protocol):
    """What the feed asks of the query's supervisor."""

    def commit_epoch(self, batch: CommittedBatch, timeout_ms: int) -> bool:
        """Commit a batch's epoch if that is not done; say whether it is, within the time."""
        ...

    def finalise_sources(self, timeout_ms: int) -> bool:
        """Note that the query has read all that its sources had; say whether they are final, within
        the time.
        """
        ...

    def fail_query(self, message: str) -> None:
        """Let the query end with this error."""
        ...


@dataclass(frozen=True, slots=True)
class FeedConfig:
    """How a query was started, as far as its control sources need to know."""

    job: str
    promises: Mapping[str, Promise]
    """By keyed stage."""
    caps_ms: Mapping[str, int | None]
    """By keyed stage that has one: the furthest input watermark of this run. None: none at all."""
    inputs: Mapping[str, Collection[str]]
    """By keyed stage: every stage that its input watermark depends on."""
    bounded: bool
    ends_when_idle: bool
    """Whether Spark ends the query at the first trigger that finds no news (`availableNow`)."""
    patience_ms: int
    poll_ms: int


class Feed:
    """One for each started query. `next` may be called by several threads."""

    def __init__(
        self,
        config: FeedConfig,
        *,
        supervisor: EpochCommitter,
        client: Client,
        progress: Callable[[], CommittedBatch | None],
        clock: Clock,
    ) -> None:
        self._config = config
        self.supervisor = supervisor
        self._progress = progress
        self._clock = clock
        self._lock = threading.Lock()
        self._inputs = {
            stage: _InputWatermark(config, stage, client, clock) for stage in config.promises
        }
        self._committed_epoch = -1
        self._drained = False
        self._draining_since_ms: int | None = None
        self._logged_missing: set[str] = set()
        self._client = client
        self._stalled: _StalledWatermark | None = None
        # By reader: the offset last answered, and the epoch that was the newest then.
        self._last_answers: dict[str, tuple[Offset, int]] = {}
        self._first_epoch: int | None = None

    def next(self, reader: str, stage: str, at: Offset) -> Offset:
        """Say where a control source goes from `at`, or `at` itself if it has no news.

        Offsets never go back, whatever the service says: the job may have been reset, the query
        may come from an old checkpoint. The first time a source takes a turn in any case: so each
        start of a query runs a batch, in which every range reports, even if the last epoch before
        a crash was never committed and no data comes.
        """
        with self._lock:
            latest = self._progress()
            if self._first_epoch is None:
                self._first_epoch = _epoch(latest)
            self._commit(latest)
            found = self._next_offset(reader, stage, at, latest)
            self._last_answers[reader] = found, _epoch(latest)
            return found

    def _next_offset(
        self, reader: str, stage: str, at: Offset, latest: CommittedBatch | None
    ) -> Offset:
        first = reader not in self._last_answers
        if first:
            self._check_checkpoint(stage, at)
        if self._config.bounded and not self._drained and self._has_drained(reader, at, latest):
            self._finalise_sources()
            self._inputs[stage].refresh_soon()
        self._log_missing_inputs(stage, latest)
        target_ms = self._target_ms(stage)
        if target_ms is not None and (at.watermark_ms is None or target_ms > at.watermark_ms):
            return Offset(target_ms, at.turn + 1)
        if first or self._spark_lags(at, latest) or self._must_continue(latest):
            return Offset(at.watermark_ms, at.turn + 1)
        return at

    def _finalise_sources(self) -> None:
        """Make the sources final. While that does not succeed the run goes on, but not for ever."""
        drained = self.supervisor.finalise_sources(self._config.patience_ms)
        # A run that does not end by itself needs no waiting for: its supervisor goes on trying.
        self._drained = drained or not self._config.ends_when_idle
        if self._drained:
            return
        now_ms = self._clock.steady_ms()
        if self._draining_since_ms is None:
            self._draining_since_ms = now_ms
        if now_ms - self._draining_since_ms >= _FINALISE_TIMEOUT_MS:
            self.supervisor.fail_query(
                f"tidegauge: this bounded query has read all there is, but could not make its sources "
                f"final within {_FINALISE_TIMEOUT_MS // 1_000} s, so that its last windows did not come "
                f"out: the aggregator is away, or another driver holds their shards. Nothing is "
                f"lost: run it again when that is put right"
            )

    def _log_missing_inputs(self, stage: str, latest: CommittedBatch | None) -> None:
        known = self._inputs[stage]
        if stage in self._logged_missing or known.latest_ms() is not None or not known.answered:
            return
        if self._first_epoch is None or _epoch(latest) - self._first_epoch < _STALLED_AFTER_BATCHES:
            return
        # Tried once: batches must not wait for a service that has gone away since.
        self._logged_missing.add(stage)
        with suppress(AggregatorError):
            watermarks = self._client.watermarks(self._config.job)
            log_missing_inputs(stage, self._config.inputs[stage], watermarks)

    def _check_checkpoint(self, stage: str, at: Offset) -> None:
        """Find out at the start whether the query's checkpoint and the job are of one another."""
        known = self._inputs[stage]
        input_ms = known.latest_ms()
        if at.watermark_ms is None or not known.answered:
            return
        here_ms = None if input_ms is None else self._to_spark_ms(input_ms)
        if here_ms is not None and here_ms >= at.watermark_ms:
            return
        if at.watermark_ms >= END_MS - 1:
            self.supervisor.fail_query(
                f"tidegauge: this query's checkpoint is at the end of time, where a bounded run left "
                f"it, but stage {stage!r} is not: the job was started over. Spark would drop every row "
                f"as late. Give the query a new checkpoint and an empty output"
            )
        else:
            _log.warning(
                "stage %s: this query's checkpoint has come to %s, but the job only to %s: it was "
                "started over, or its ledger was lost. Spark drops rows by its checkpoint. To start "
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

    def _has_drained(self, reader: str, at: Offset, latest: CommittedBatch | None) -> bool:
        """Say whether a trigger has found nothing new in any source but the control sources.

        Either the last batch was such a one, or there was none since this source was last asked,
        although that trigger asked all sources. A batch that was planned before this start and
        only repeated by it proves nothing.
        """
        if latest is None or self._first_epoch is None:
            return False
        read_nothing = latest.read_nothing and latest.epoch > self._first_epoch
        return read_nothing or self._last_answers.get(reader) == (at, latest.epoch)

    def _must_continue(self, latest: CommittedBatch | None) -> bool:
        """Keep a run from ending before an empty batch has shown that its sources are drained."""
        config = self._config
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
        """One watermark for all of a query's operators: what the strictest of them needs."""
        strictest = max(self._config.promises.values(), key=lambda promise: promise.spark_lag_ms)
        return strictest.spark_ms(to_spark_ms(input_ms))

    def _spark_lags(self, at: Offset, latest: CommittedBatch | None) -> bool:
        """Say whether a batch is needed for Spark to run with what it was handed.

        A control row becomes Spark's watermark at the end of its batch. Operators that only pass
        rows on would not see it before the next row comes.
        """
        if latest is None or at.watermark_ms is None or latest.watermark_ms >= at.watermark_ms:
            self._stalled = None
            return False
        if at.watermark_ms <= 0:
            return False  # Spark's own watermark begins in 1970.
        if self._stalled is None or self._stalled.at != at.watermark_ms:
            self._stalled = _StalledWatermark(at.watermark_ms, latest.epoch)
        stall = self._stalled
        if latest.epoch - stall.since_epoch < _STALLED_AFTER_BATCHES:
            return True
        if not stall.logged:
            self._stalled = _StalledWatermark(stall.at, stall.since_epoch, logged=True)
            _log.warning(
                "Spark's watermark stands at %d ms, although the control source has handed it %d ms "
                "%d batches ago: a withWatermark of another source in this query, or a rule of "
                "Spark's optimiser that drops the control rows, holds it back",
                latest.watermark_ms,
                at.watermark_ms,
                latest.epoch - stall.since_epoch,
            )
        return False


@dataclass(frozen=True, slots=True)
class _StalledWatermark:
    at: int
    since_epoch: int
    logged: bool = False


def _epoch(latest: CommittedBatch | None) -> int:
    return -1 if latest is None else latest.epoch


class _InputWatermark:
    """A stage's input watermark, asked for no more often than need be."""

    def __init__(self, config: FeedConfig, stage: str, client: Client, clock: Clock) -> None:
        self._config = config
        self._stage = stage
        self._client = client
        self._clock = clock
        self._etag: str | None = None
        self._latest_ms: int | None = None
        self.answered = False
        """Whether the service has said it."""
        self._pause_ms = config.poll_ms
        self._next_refresh_ms: int | None = None

    def refresh_soon(self) -> None:
        """Ask again the next time, whatever the pause."""
        if self._pause_ms <= self._config.poll_ms:
            self._next_refresh_ms = None

    def latest_ms(self) -> int | None:
        """Return the newest that is known. An idle query comes here every 10 ms."""
        now_ms = self._clock.steady_ms()
        if self._next_refresh_ms is None or now_ms >= self._next_refresh_ms:
            self._refresh()
            self._next_refresh_ms = self._clock.steady_ms() + self._pause_ms
        return self._latest_ms

    def _refresh(self) -> None:
        try:
            found = self._client.watermark(self._config.job, self._stage, self._etag)
        except AggregatorError:
            # Without news the watermark stands still, which is always safe; and we ask less often
            # until the service is back.
            self._pause_ms = min(2 * self._pause_ms, max(_LONGEST_PAUSE_MS, self._config.poll_ms))
            return
        self._pause_ms = self._config.poll_ms
        self.answered = True
        if found is not None:
            self._etag, self._latest_ms = found.etag, found.input_ms
