"""A task's identity, its claims and its reports.

A task never fails because of the service. A report that cannot be sent in time is dropped and
counted. The driver gets the same promises through Spark, and reports them after the batch instead.
"""

from __future__ import annotations

import gc
import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final, Literal

from pyspark import Accumulator, TaskContext

from spark_agent.client.client import Client, shared_client
from spark_agent.client.errors import StaleEpoch
from spark_agent.client.reports import RangeReport, Rank
from spark_agent.clock import Clock
from spark_agent.exceptions import (
    CONTINUES,
    AggregatorError,
    NotStartedError,
    OldCheckpointError,
    Unavailable,
    old_checkpoint_message,
)
from spark_agent.executor.tally import Count, EarlyRow, Tallies, Tally
from spark_agent.strategies import Rows

_log: Final = logging.getLogger("spark_agent")

Reaction = Literal["stop", "continue"]
"""Reaction of a query to a newer run of its stages, or to the loss of its checkpoint."""

QUERY_PROPERTY: Final = "tidegauge.query"
"""Local property of the thread that starts a query, which its tasks inherit: the name of this start."""
RUN_PROPERTY: Final = "tidegauge.run"
"""Likewise: the run number; empty if the service was unavailable at the start."""
ON_LOST_CHECKPOINT_PROPERTY: Final = "tidegauge.on_lost_checkpoint"
"""Likewise: set if the query continues although the job has its batches already."""
_BATCH_PROPERTY: Final = "streaming.sql.batchId"

BACKOFF_MS: Final = 5_000
"""After a call without an answer, the tasks of this process send no requests for this long. Otherwise a
service that hangs would cost every task of every batch its whole patience."""
_backoff_until_ms: Final[dict[tuple[int, str], int]] = {}
_promised_ms: Final[dict[tuple[int, str, str, str], tuple[tuple[str, int], int | None]]] = {}
"""By process, service, job and stage: the last query and epoch, and the stage's promise in it."""


@cache
def freeze_imports() -> None:
    """Exclude the modules that this process has imported from garbage collection, once.

    Spark's workers run a full collection after every task. Scanning a worker's modules takes some
    30 ms each time, more than the rest of the task's reporting, and modules are never garbage. The
    interpreter's own count of frozen objects walks through all of them, which takes as long.
    """
    gc.freeze()


@dataclass(frozen=True, slots=True)
class ReportTarget:
    """Destination of a task's reports, and timeout of a call. Pickled and sent to the executors."""

    url: str
    job: str
    stage: str
    ttl_ms: int
    patience_ms: int
    clock: Clock
    tallies: Accumulator[Tallies]
    key_file: str | None = None
    """Path of the key on the executors; None: from their environment. Never the key itself."""
    partitioned_by_shard: bool = False
    """True if the caller has declared that all of a shard's rows are in one task. The driver checks
    it."""
    watched: bool = True
    """False: the source has an idle policy. For the service, a watched lease proves that its shard is
    polled, and a polled shard without rows is idle. But after the end of its task the shard is not
    polled: the next batch may be busy for a long time, with rows of that shard."""


@dataclass(frozen=True, slots=True)
class Task:
    """Identifies a task: one attempt, for one partition, in one batch of one started query."""

    query: str
    rank: Rank | None
    """None: the query has no run, so the task leaves reporting to the driver."""
    epoch: int
    partition: int
    holder: str
    on_lost_checkpoint: Reaction = "stop"
    """Reaction of the task to an epoch that was committed before it began."""


def current_task(stage: str) -> Task | None:
    """Identify the running task; None: it is not of a streaming batch.

    Raises `NotStartedError` if its query was not started with `Pipeline.start`.

    The attempt in the rank is Spark's task attempt id, not its attempt number. The number starts over
    when Spark repeats a whole stage. The id rises over all tasks of the application, so the attempt
    that was started last always outranks the others.
    """
    context = TaskContext.get()
    batch = context and context.getLocalProperty(_BATCH_PROPERTY)
    if context is None or not batch:
        return None
    query = context.getLocalProperty(QUERY_PROPERTY)
    if not query:
        raise NotStartedError(stage)
    epoch, attempt = int(batch), context.taskAttemptId()
    run = context.getLocalProperty(RUN_PROPERTY)
    return Task(
        query=query,
        rank=Rank(int(run), epoch, attempt) if run else None,
        epoch=epoch,
        partition=context.partitionId(),
        holder=f"{query}.task-{attempt}",
        on_lost_checkpoint="continue"
        if context.getLocalProperty(ON_LOST_CHECKPOINT_PROPERTY) == "continue"
        else "stop",
    )


class TaskAttempt:
    """One task's claims and reports for a stage. Failures of the service never raise.

    Only one error fails a task: its epoch was committed before the task reported. The driver commits an
    epoch after Spark, so Spark runs the epoch again only from a checkpoint that is new or an old copy.
    The rows that the task has read may have been written already, and its output may be skipped by a
    sink that has a batch of this number. Spark must not commit the output as this batch.
    """

    def __init__(self, target: ReportTarget, task: Task) -> None:
        self._target = target
        self._task = task
        self.counts: Counter[str] = Counter()

    def promised_ms(self) -> int | None:
        """Return the stage's promise so far: rows before it are late. None: unknown.

        The promise does not move while the stage's own epoch is open, so the tasks of a process share
        one request for each epoch.
        """
        if self._task.rank is None:
            return None
        target = self._target
        key = (os.getpid(), target.url, target.job, target.stage)
        of_epoch = (self._task.query, self._task.epoch)
        kept = _promised_ms.get(key)
        if kept is not None and kept[0] == of_epoch:
            return kept[1]
        if self._backing_off():
            return None
        try:
            promised_ms = self._client().watermark(target.job, target.stage).output_ms
        except AggregatorError as error:
            self._drop(error, "watermark request", 0)
            return None
        _promised_ms[key] = (of_epoch, promised_ms)
        return promised_ms

    def report_shards(self, reports: Mapping[str, RangeReport]) -> None:
        """Report shards of a source for this epoch."""
        if not self._send(reports):
            self.counts[Count.REPORTS_DROPPED] += len(reports)

    def report_ranges(self, ranges: Sequence[str]) -> None:
        """Report key ranges for this epoch. They promise the input watermark that Spark ran the batch
        with, which the driver adds at the commit.

        A driver without their reports has their promise all the same, so none counts as dropped for a
        service that was unavailable before.
        """
        self._send(dict.fromkeys(ranges, RangeReport()))

    def _send(self, reports: Mapping[str, RangeReport]) -> bool:
        """Claim ranges and report them, in one request. False: the service is unavailable, as found out
        at the start of the query or a moment ago.

        The claim fences every older attempt at this task. A task has no lease before: while it runs for
        long, the driver holds its ranges, and reports that their work is stuck (`LeaseKeeper`).
        """
        rank, target = self._task.rank, self._target
        if not reports:
            return True
        if rank is None or self._backing_off():
            return False
        try:
            accepted = (
                self._client()
                .claim_and_report(
                    target.job,
                    target.stage,
                    reports,
                    holder=self._task.holder,
                    ttl_ms=target.ttl_ms,
                    rank=rank,
                    epoch=self._task.epoch,
                    watched=target.watched,
                )
                .accepted
            )
        except StaleEpoch as error:
            if self._task.on_lost_checkpoint == "stop":
                latest = error.problem.get("last_epoch", "a later one")
                does = f"ran batch {self._task.epoch}"
                message = old_checkpoint_message(self._task.query, does, latest)
                raise OldCheckpointError(f"{message}. {CONTINUES}") from None
            self._drop(error, "report", len(reports))
        except AggregatorError as error:
            self._drop(error, "report", len(reports))
        else:
            self.counts[Count.REPORTS_DROPPED] += len(reports) - accepted
        return True

    def report_to_driver(
        self,
        reports: Mapping[str, RangeReport] | None = None,
        early: EarlyRow | None = None,
        in_flight: Mapping[str, bytes] | None = None,
        rows: Mapping[str, Rows] | None = None,
    ) -> None:
        """Send the reports to the driver through Spark, which drops them if the task fails."""
        key = (self._task.query, self._target.stage, self._task.epoch)
        here = frozenset({self._task.partition})
        shards = dict(reports or {})
        partitions = dict.fromkeys(shards, here) if self._target.partitioned_by_shard else {}
        counts = {self._task.partition: dict(self.counts)}
        seen = {shard: {self._task.partition: some} for shard, some in (rows or {}).items()}
        tally = Tally(shards, counts, partitions, early, in_flight or {}, seen)
        self._target.tallies.add({key: tally})

    def _client(self) -> Client:
        return shared_client(self._target.url, self._target.patience_ms, self._target.key_file)

    def _backing_off(self) -> bool:
        until_ms = _backoff_until_ms.get((os.getpid(), self._target.url), 0)
        return self._target.clock.steady_ms() < until_ms

    def _drop(self, error: AggregatorError, what: str, ranges: int) -> None:
        if isinstance(error, Unavailable):
            now_ms = self._target.clock.steady_ms()
            _backoff_until_ms[os.getpid(), self._target.url] = now_ms + BACKOFF_MS
        self.counts[Count.REPORTS_DROPPED] += ranges
        _log.info(
            "stage %s, epoch %d: %s failed, %d ranges not reported: %s",
            self._target.stage,
            self._task.epoch,
            what,
            ranges,
            error,
        )
