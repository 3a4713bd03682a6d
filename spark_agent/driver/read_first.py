"""Watermarks of topics that a query reads at a limited rate: they wait until their rows are read.

A watermark covers rows that were readable before it was published. A query that reads everything has
them in time (`spark_agent.sources.control`). One with `maxOffsetsPerTrigger` may leave covered rows for
later batches, so their watermark has to wait. Each batch has the ends of its topics' partitions, as they
were when it was planned. An end that is later than the watermark is enough: once a batch has read so
far, it has read all that the watermark covers.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from spark_agent.jvm.progress import CommittedBatch
from spark_agent.sources.kafka import Offsets, is_read


@dataclass(frozen=True, slots=True)
class _Polled:
    """A watermark (ms), with the latest committed batch when it was polled."""

    watermark_ms: int
    epoch: int | None
    """None: the query had not committed a batch since its start."""
    end: Offsets | None = None
    """Ends of the partitions at a later time; None: not known yet."""


class ReadFirst:
    """Holds a query's watermark back until its topics are read so far."""

    def __init__(self, topics: AbstractSet[str]) -> None:
        """`topics` are read at a limited rate, and written by others."""
        self._topics = topics
        self._noted_epoch: int | None = None
        self._passed_ms: int | None = None
        self._waiting: _Polled | None = None
        self._newest: _Polled | None = None

    @property
    def is_waiting(self) -> bool:
        """True while a watermark waits. Batches must go on until it passes."""
        return self._waiting is not None

    def passed_ms(self, watermark_ms: int, latest: CommittedBatch | None) -> int | None:
        """Return the greatest watermark (ms) whose rows are read; `watermark_ms` was polled just now.

        None: not any yet. `latest` is the latest batch that is committed.
        """
        if not self._topics:
            return watermark_ms
        if latest is not None and latest.epoch != self._noted_epoch:
            self._noted_epoch = latest.epoch
            self._note(latest)
        newest = self._newest or self._waiting
        known_ms = self._passed_ms if newest is None else newest.watermark_ms
        if known_ms is None or watermark_ms > known_ms:
            polled = _Polled(watermark_ms, None if latest is None else latest.epoch)
            if self._waiting is None:
                self._waiting = polled
            else:
                self._newest = polled
        return self._passed_ms

    def _note(self, batch: CommittedBatch) -> None:
        waiting = self._waiting
        if waiting is None:
            return
        before = batch.epoch - 1 if waiting.epoch is None else waiting.epoch
        waiting = replace(waiting, epoch=before)
        # The next batch after the poll may have listed its topics before it, the one after that has not.
        # A batch that Spark repeats was planned before, and may be without ends.
        if (
            waiting.end is None
            and batch.epoch >= before + 2
            and self._topics <= batch.latest.keys()
        ):
            waiting = replace(waiting, end={each: batch.latest[each] for each in self._topics})
        if waiting.end is not None and is_read(batch.read, waiting.end):
            self._passed_ms = waiting.watermark_ms
            self._waiting, self._newest = self._newest, None
        else:
            self._waiting = waiting
