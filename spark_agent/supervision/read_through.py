"""Instants through which a query has read its sources, for strategies that promise by the clock."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from spark_agent.jvm.progress import CommittedBatch
from spark_agent.sources.admission import Admission, Wanted
from spark_agent.started_query import StartedQuery


@dataclass(frozen=True, slots=True)
class _Polls:
    """The latest polls of one control source: instants (ms) of different triggers of Spark, in order."""

    earlier_ms: int
    latest_ms: int
    epoch: int
    """The latest batch that Spark had committed at the latest poll."""


@dataclass(frozen=True, slots=True)
class _Listing:
    """The latest listing of a source of ours, with the instants (ms) that it proves."""

    admitted_ms: int
    """When it was admitted. The next listing is later."""
    earlier_ms: int
    """When the listing before was admitted. This one is later, and proves this for most shards."""
    left: Collection[str]
    """The shards of which the batch planned then leaves files unread."""
    unread: Mapping[str, int | None]
    """The instants of the shards that had unread files."""
    behind: Mapping[str, int | None]
    """Those of the shards of which this batch, or the one before, leaves files unread."""

    def of(self, shard: str) -> int | None:
        """Return the instant of a shard; None: not yet."""
        return self.unread.get(shard, self.earlier_ms)


class ReadThrough:
    """Instants through which everything is read and committed that was available, by source and shard.

    Every trigger of Spark first polls all sources of a query, in an order of its own, and by then all
    batches of earlier triggers are committed. So a poll proves something about the trigger before it:
    the sources were listed then, later than at the poll before. The driver's feed notes polls, and its
    supervisor reads the instants. Thread-safe: values are replaced, never changed.
    """

    def __init__(self, query: StartedQuery, started_ms: int) -> None:
        """`started_ms` is the wall clock just before Spark starts the query."""
        self._stages = query.stages
        # Such a run reads what was there at its start, however long it takes.
        self._most_ms = started_ms if query.trigger.is_available_now else None
        self._is_one_batch = query.trigger.ends and not query.trigger.is_available_now
        self._has_planned = False
        """True once this run has committed a batch that it has planned itself."""
        self._started_ms = started_ms
        self._reader: str | None = None
        self._polls: _Polls | None = None
        self._first_epoch: int | None = None
        """The first batch that this run has committed."""
        self._all_ms: int | None = None
        self._polled_ms: int | None = None
        self._ended_ms: int | None = None
        self._listings: dict[str, _Listing] = {}

    @property
    def all_ms(self) -> int:
        """The instant for all sources together, else the start of the query.

        A shard of which batches leave files unread is behind them.
        """
        # A copy: the feed may add a listing meanwhile.
        behind = [ms for each in list(self._listings.values()) for ms in each.behind.values()]
        return min(self._started_ms if ms is None else ms for ms in (self._all_ms, *behind))

    @property
    def polled_ms(self) -> int | None:
        """The latest poll: every batch that is not committed by now is planned after it."""
        return self._polled_ms

    def note_poll(
        self, reader: str, now_ms: int, latest: CommittedBatch | None, *, is_retry: bool = False
    ) -> None:
        """Note a poll of a control source; `is_retry`: a later one of the same trigger."""
        # A run that ends is not kept going by the clock alone: each promise would cause one more batch.
        if self._most_ms is None or latest is None or not latest.read_nothing:
            self._polled_ms = now_ms
        if latest is not None:
            self.note_batch(latest)
        # One reader alone: the polls of several may be in one trigger.
        self._reader = self._reader or reader
        if reader != self._reader or is_retry:
            return
        epoch = -1 if latest is None else latest.epoch
        polls = self._polls
        if polls is None:
            self._polls = _Polls(self._started_ms, now_ms, epoch)
            return
        if polls.epoch == epoch:
            # A whole trigger has passed, and planned no batch: it has found nothing unread.
            self._raise(polls.earlier_ms)
        self._polls = _Polls(polls.latest_ms, now_ms, epoch)

    def note_batch(self, batch: CommittedBatch) -> None:
        """Note that Spark has committed a batch.

        A batch that has read nothing has found nothing unread, also where batches are limited. A batch
        that this run only repeats proves nothing: its sources were listed before. A batch was planned in
        this run if the run has polled when the batch before was the latest, or if it has committed
        another one before: Spark repeats a single batch, the first.
        """
        first = self._first_epoch = batch.epoch if self._first_epoch is None else self._first_epoch
        polls = self._polls
        is_new = batch.epoch > first or (polls is not None and polls.epoch < batch.epoch)
        self._has_planned = self._has_planned or is_new
        if is_new and (self._stages.reads_all or batch.read_nothing):
            self._raise(batch.triggered_ms)

    def note_end(self) -> None:
        """Note that the query has ended by itself, since it has read everything.

        A run of one batch has read nothing anew if it repeats the batch of a run before.
        """
        if self._is_one_batch and not self._has_planned:
            return
        self._ended_ms = self._started_ms
        self._raise(self._started_ms)

    def note_listing(self, stage: str, now_ms: int, wanted: Wanted, admission: Admission) -> None:
        """Note a listing of a source of ours, and what of it may be read.

        A run that ends may request its admission again for the same listing. Its instants are not later
        than its start, so nothing is proved by that.
        """
        before = self._listings.get(stage)
        if before is None:
            unknown = dict.fromkeys(wanted.unread)
            before = _Listing(self._started_ms, self._started_ms, tuple(unknown), unknown, {})
        unread = {
            # All of the listing before is read, unless the batch has left some.
            shard: before.of(shard) if shard in before.left else before.earlier_ms
            for shard in wanted.unread
        }
        left = admission.leaves(wanted)
        # A shard that was left is behind until the next listing: this batch is still to be committed.
        behind = {each: unread[each] for each in unread if each in left or each in before.left}
        self._listings[stage] = _Listing(now_ms, before.admitted_ms, left, unread, behind)

    def of(self, stage: str, shards: Collection[str]) -> dict[str, int]:
        """Return the instant of each shard of a source that has one."""
        found = dict.fromkeys(shards, self._all_ms)
        if stage in self._stages.by_shard:
            listing = self._listings.get(stage)
            for shard in shards:
                listed_ms = None if listing is None else listing.of(shard)
                if listed_ms is not None:
                    found[shard] = self._capped(listed_ms)
                else:
                    # A run of one batch also ends with files unread, those of a shard that is paused.
                    is_left = listing is not None and shard in listing.left
                    found[shard] = None if is_left else self._ended_ms
        return {shard: ms for shard, ms in found.items() if ms is not None}

    def _capped(self, ms: int) -> int:
        return ms if self._most_ms is None else min(ms, self._most_ms)

    def _raise(self, through_ms: int) -> None:
        self._all_ms = max(self._capped(through_ms), self._all_ms or self._started_ms)
