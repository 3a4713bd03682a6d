"""The ranges of one stage in memory: columns over the layout's order, and their running agreement.

A stage may have a million ranges, so a range is a row of numbers, not an object; and a report must not
look at the others, so their minimum is kept in a tree of minima.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np

from service.frontier.agreement import (
    Agreement,
    agree,
    agree_keyed,
    are_idle_together,
    leaves_out,
    weight,
)
from service.frontier.columns import Bools, are_behind, join_promises, weights
from service.frontier.facts import (
    NO_FACTS,
    UNFINISHED,
    Counts,
    Facts,
    ReportedFacts,
    merge_facts,
    note_waiting,
)
from service.frontier.idleness import stays_idle
from service.frontier.ranges import Layout, ShardLayout, inherit, staying
from service.frontier.reports import is_behind, join_report
from service.frontier.retirement import counted_promise
from service.frontier.timestamps import MAX, MIN
from service.live.memory.changed_chunks import ChangedChunks
from service.live.memory.minimum_tree import Int64s, MinimumTree
from service.live.memory.range_notes import RangeNotes
from service.live.memory.rows import Rows, among, as_list
from service.model.checkpoints import (
    CHUNK,
    COLUMNS,
    Columns,
    packed_column,
    packed_flags,
)
from service.model.reports import (
    Column,
    RangeView,
)

BULK = 64
"""From this many ranges on, array operations are cheaper than a loop."""

EVERY = -1
"""In `returned`: all ranges of the stage."""

NOBODY = 0
"""In `owner`: no lease is on the range."""


@dataclass(frozen=True, slots=True)
class RangeLookup:
    """The ranges of a report, looked up by name."""

    table: RangeTable
    names: Sequence[str]
    indices: Column


class RangeTable:
    """Promises, idleness, owners and holds of a stage's ranges, by index in the layout."""

    __slots__ = (
        "_idle",
        "_idle_view",
        "_is_keyed",
        "_owner_view",
        "_promise",
        "_promise_view",
        "_tree",
        "changed",
        "counts",
        "facts",
        "final",
        "held_since_ms",
        "idle",
        "idle_by_policy",
        "layout",
        "leased",
        "notes",
        "owner",
        "promised",
        "raised_at_ms",
        "reported_at_ms",
        "retired",
        "returned",
    )  # fmt: skip

    def __init__(self, layout: Layout, saved: Columns | None = None) -> None:
        """Begin with these columns, which are copied, and without leases."""
        size = len(layout)
        columns = {
            name: np.full(size, empty, dtype=np.int64)
            if saved is None or name not in saved
            else saved[name].copy()
            for name, empty in COLUMNS.items()
        }
        unfinished = np.flatnonzero(columns["unfinished"]).tolist()
        self.layout = layout
        self._is_keyed = not isinstance(layout, ShardLayout)
        """The idleness of a key range takes nothing out of the minimum (see `agree_keyed`)."""
        self._promise = columns["promises"]
        self._idle = np.zeros(size, dtype=np.bool_)
        self.owner: Int64s = np.zeros(size, dtype=np.int64)
        """The fence of the lease on each range, or `NOBODY`."""
        self.reported_at_ms: Int64s = np.zeros(size, dtype=np.int64)
        """When the last report of each was applied; 0: it has none."""
        self.raised_at_ms = columns["raised_at_ms"]
        """When the promise of each, as it counts, moved last; 0: it is not known."""
        self.held_since_ms: Int64s = np.zeros(size, dtype=np.int64)
        """Since when each leased range has been leased without a gap."""
        self.idle_by_policy: set[int] = set()
        """Those that the service has decided to be idle, and not their workers."""
        self.facts: dict[int, Facts] = dict.fromkeys(unfinished, UNFINISHED)
        """Facts about the ranges that have reported any."""
        self.retired: set[int] = set(np.flatnonzero(columns["retired"]).tolist())
        """Those that are waited for no longer. None of them is idle or final."""
        self.counts = Counts()
        self.notes = RangeNotes(size)
        self.changed = ChangedChunks()
        self.returned: set[int] = set()
        """Ranges that have returned (see `awaits_revision`), until `LiveJob.note_returns`."""
        self.leased = 0
        self._promise_view = self._promise.data
        self._owner_view = self.owner.data
        self._idle_view = self._idle.data
        self._recount()

    def __len__(self) -> int:
        return len(self._promise)

    def name(self, index: int) -> str:
        """Return the name of the range at `index`."""
        return self.layout.name(index)

    @property
    def index(self) -> Mapping[str, int]:
        """The index of each range, by name."""
        return self.layout.index

    @property
    def agreement(self) -> Agreement:
        """Agreement of the ranges."""
        if self._is_keyed:
            return agree_keyed(self._tree.least, len(self), self.idle, self._final)
        least = self._tree.least
        # Nobody is active: that is rare, and then the least of all promises counts.
        lowest_idle = int(self.promises.min()) if least == MAX and self.idle else MAX
        return agree(least, self.idle, lowest_idle)

    @property
    def _final(self) -> int:
        """Number of ranges that count as final."""
        return self.final + len(self.retired)

    @property
    def leaves_out(self) -> bool:
        """See `leaves_out`."""
        return leaves_out(self.idle, len(self.retired), keyed=self._is_keyed)

    def _note_returned(self, indices: Iterable[int]) -> None:
        """Note that ranges are idle no longer, or retired. Must be called while they count as such."""
        if not self._is_keyed:
            self.returned.update(indices)
        elif are_idle_together(len(self), self.idle, self._final):
            self.returned.add(EVERY)

    def _weight(self, promise: int, *, idle: bool) -> int:
        return weight(promise, idle=idle and not self._is_keyed)

    def _weights(self, promises: Int64s, idle: Bools) -> Int64s:
        return promises if self._is_keyed else weights(promises, idle)

    def promise(self, index: int) -> int:
        """Return the promise of one range."""
        return self._promise_view[index]

    @property
    def promises(self) -> Int64s:
        """The promise of each range, as it counts: read-only."""
        if not self.retired:
            return self._promise
        counted = self._promise.copy()
        counted[list(self.retired)] = counted_promise(MIN, retired=True)
        return counted

    @property
    def idle_ranges(self) -> Bools:
        """Idle flag of each range, read-only."""
        return self._idle

    def owned_by(self, index: int) -> int:
        """Return the fence of the lease on one range, or `NOBODY`."""
        return self._owner_view[index]

    def owned(self, fence: int, among: Int64s) -> Int64s:
        """Return those of the indices `among` that this lease is still on."""
        return among[self.owner[among] == fence]

    def covered(
        self, fence: int, names: Sequence[str], last: RangeLookup | None
    ) -> RangeLookup | None:
        """Look up ranges that this lease is on; None: it is not on all of them.

        `last` is the lease's previous lookup: a worker mostly reports for the same ranges in the same
        order, and to compare the names is cheaper than to look them up again.
        """
        if last is not None and last.table is self and last.names == names:
            indices = last.indices
        else:
            try:
                indices: Column = list(map(self.index.__getitem__, names))
            except KeyError:
                return None
            if len(indices) >= BULK:
                indices = np.array(indices, dtype=np.int64)
            last = RangeLookup(self, names, indices)
        owner = self._owner_view
        if isinstance(indices, np.ndarray):
            return last if bool((self.owner[indices] == fence).all()) else None
        return last if all(owner[i] == fence for i in indices) else None

    def is_on(self, fence: int, name: str) -> bool:
        """Return whether this lease is on the range of this name."""
        index = self.index.get(name)
        return index is not None and self._owner_view[index] == fence

    def apply(
        self,
        indices: Rows,
        promises: Column,
        idle: Sequence[bool] | None = None,
        *,
        wall_ms: int,
    ) -> list[int]:
        """Apply what these ranges report, no range twice.

        A promise joins the earlier ones of its range; idleness is as reported last. Returns the indices
        of those whose earlier promise was greater: they are behind, and change nothing. Their retirement
        ends.
        """
        self.end_retirements(indices, wall_ms=wall_ms)
        if len(promises) < BULK:
            return [
                i
                for i, promise, is_idle in zip(
                    # One at a time, as Python's own integers: these become watermarks.
                    as_list(indices),
                    as_list(promises),
                    idle or repeat(False),
                    strict=False,
                )
                if self._apply_one(i, promise, is_idle, wall_ms)
            ]
        at = indices if isinstance(indices, slice) else np.asarray(indices, dtype=np.int64)
        reported = np.asarray(promises, dtype=np.int64)
        # One that is idle and final is not counted, but no longer idle once it reports without it.
        if idle is None and not self.idle and not np.count_nonzero(self._idle[at]):
            return self._raise_many(at, reported, wall_ms)
        is_idle = np.zeros(len(reported), np.bool_) if idle is None else np.array(idle, np.bool_)
        return self._apply_many(at, reported, is_idle, wall_ms)

    def _apply_one(self, index: int, promise: int, idle: bool, wall_ms: int) -> bool:
        earlier = self._promise_view[index]
        was_idle = self._idle_view[index]
        now, is_idle = join_report(earlier, promise, idle=idle)
        if was_idle and not is_idle and now != MAX:
            self._note_returned((index,))
        if now != earlier:
            self._promise_view[index] = now
            self.raised_at_ms[index] = wall_ms
            self.changed.note(index)
            self.final += now == MAX
            self.promised += earlier == MIN
        elif is_idle == was_idle:
            return is_behind(earlier, promise)
        self._idle_view[index] = is_idle
        if not is_idle:
            self.idle_by_policy.discard(index)
        self.idle += (is_idle and now != MAX) - (was_idle and earlier != MAX)
        self._tree.put(index, self._weight(now, idle=is_idle))
        return is_behind(earlier, promise)

    def _raise_many(self, at: Int64s | slice, reported: Int64s, wall_ms: int) -> list[int]:
        """Join promises where no range is idle, before or after: nothing else can change."""
        # A slice is a view, which would change with the promises.
        earlier = self._promise[at].copy()
        now = join_promises(earlier, reported)
        raised = now != earlier
        if np.count_nonzero(raised):
            self._promise[at] = now
            self._note_raised(at, raised, earlier, now, wall_ms)
            self._tree.put_many(at, now)
        return self._behind(at, reported, earlier)

    def _note_raised(
        self, at: Int64s | slice, raised: Bools, earlier: Int64s, now: Int64s, wall_ms: int
    ) -> None:
        if isinstance(at, slice):
            np.putmask(self.raised_at_ms[at], raised, wall_ms)
        else:
            self.raised_at_ms[at[raised]] = wall_ms
        self.changed.note_many(at)
        if now.max() == MAX:
            self.final += int(np.count_nonzero(now == MAX) - np.count_nonzero(earlier == MAX))
        if self.promised < len(self):
            self.promised += int(np.count_nonzero(now != MIN) - np.count_nonzero(earlier != MIN))

    def _behind(self, at: Int64s | slice, reported: Int64s, earlier: Int64s) -> list[int]:
        behind = are_behind(earlier, reported)
        return among(at, behind).tolist() if np.count_nonzero(behind) else []

    def _apply_many(
        self, at: Int64s | slice, reported: Int64s, idle: Bools, wall_ms: int
    ) -> list[int]:
        earlier = self._promise[at].copy()
        was_idle = self._idle[at].copy()
        now = join_promises(earlier, reported)
        returned = was_idle & ~idle & (now != MAX)
        if np.count_nonzero(returned):
            self._note_returned(among(at, returned).tolist())
        raised = now != earlier
        if np.count_nonzero(raised):
            self._promise[at] = now
            self._note_raised(at, raised, earlier, now, wall_ms)
        self._idle[at] = idle
        if self.idle_by_policy:
            self.idle_by_policy.difference_update(among(at, ~idle).tolist())
        self.idle += int(
            np.count_nonzero(idle & (now != MAX)) - np.count_nonzero(was_idle & (earlier != MAX))
        )
        moved = raised | (idle != was_idle)
        if np.count_nonzero(moved):
            self._tree.put_many(among(at, moved), self._weights(now, idle)[moved])
        return self._behind(at, reported, earlier)

    def end_policy_idleness(self) -> None:
        """End the idleness of the ranges that are idle by policy: the policy has ended."""
        for index in tuple(self.idle_by_policy):
            self._apply_one(index, MIN, idle=False, wall_ms=0)
        # Records that were computed without them are of the former layout, and the ledger rejects these.
        self.returned = set()

    def retire(self, index: int) -> bool:
        """Retire a range until its next report; return False if it is retired or final already."""
        promise = self._promise_view[index]
        if promise == MAX or index in self.retired:
            return False
        self.retired.add(index)
        self.promised += promise == MIN
        self.idle -= self._idle_view[index]
        self._idle_view[index] = False
        self.idle_by_policy.discard(index)
        self._tree.put(index, counted_promise(promise, retired=True))
        self.changed.note(index)
        return True

    def end_retirements(self, indices: Rows, holder: str = "", *, wall_ms: int) -> None:
        """End the retirement of those ranges that are retired.

        Each of them holds its stage again, from its own promise on: as it counts, its promise moves.
        `holder`: of the lease that reports; empty: unknown, at a commit.
        """
        ended = self.retired.intersection(as_list(indices)) if self.retired else ()
        if ended:
            self._note_returned(ended)
            self.returned.update(ended)
        for index in ended:
            self.changed.note_end_of_retirement(index, holder)
            self.retired.discard(index)
            self.raised_at_ms[index] = wall_ms
            self.promised -= self._promise_view[index] == MIN
            self._tree.put(index, self._promise_view[index])

    def returned_from_retirement(self, chunk: int) -> Mapping[str, str]:
        """Return the names of the ranges of a chunk whose retirement has ended, if this is unsaved, each
        with the holder that has ended it.
        """
        ended = self.changed.unsaved_ends(chunk)
        return {self.layout.name(i): who for i, who in ended.items() if i not in self.retired}

    def own(self, indices: Int64s, fence: int) -> None:
        """Put a lease on ranges, or remove it with `NOBODY`. Their idleness ends (see `join_report`)."""
        before = int(np.count_nonzero(self.owner[indices] != NOBODY))
        self.leased += (len(indices) if fence != NOBODY else 0) - before
        self.owner[indices] = fence
        if self.idle or np.count_nonzero(self._idle[indices]):
            lapsed = indices[self._idle[indices]]
            if len(lapsed):
                nothing = np.full(len(lapsed), MIN, dtype=np.int64)
                # Nothing is raised by this, so there is no moment to note.
                self._apply_many(lapsed, nothing, np.zeros(len(lapsed), dtype=np.bool_), 0)

    def staying_idle(
        self,
        indices: Rows,
        idle: Sequence[bool] | None,
        facts: Sequence[ReportedFacts | None] | None,
    ) -> Sequence[bool] | None:
        """Return which of the reported ranges are idle: also those that remain so by policy.

        A range that is reported idle is so by its worker's word from now on.
        """
        if not self.idle_by_policy:
            return idle
        if idle is not None:
            words = zip(as_list(indices), idle, strict=False)
            self.idle_by_policy.difference_update(index for index, is_idle in words if is_idle)
        if facts is None:
            return idle
        return [
            is_idle
            or stays_idle(
                was_idle_by_policy=index in self.idle_by_policy,
                reported_nothing=reported is not None and reported.is_nothing,
            )
            for index, is_idle, reported in zip(
                as_list(indices), idle or repeat(False), facts, strict=False
            )
        ]

    def keep_facts(
        self,
        indices: Rows,
        facts: Sequence[ReportedFacts | None] | None,
        *,
        now_ms: int,
        wall_ms: int,
    ) -> None:
        """Note that reports of these ranges were applied, and merge their facts."""
        self.reported_at_ms[indices] = wall_ms
        if facts is None and not self.facts:
            return
        for index, reported in zip(as_list(indices), facts or repeat(None), strict=False):
            earlier = self.facts.get(index)
            if reported is None and earlier is None:
                continue
            newer = reported or NO_FACTS
            self.counts = self.counts.plus(newer)
            merged = merge_facts(earlier, newer, now_ms=now_ms, wall_ms=wall_ms)
            self.facts[index] = merged
            if merged.is_unfinished != (earlier is not None and earlier.is_unfinished):
                self.changed.note(index)

    def note_waiting(self, index: int, reported: ReportedFacts, *, now_ms: int) -> None:
        """Note the facts of a report that waits for its commit."""
        earlier = self.facts.get(index)
        noted = note_waiting(earlier, reported, now_ms=now_ms)
        if noted is None:
            return
        self.facts[index] = noted
        if noted.is_unfinished != (earlier is not None and earlier.is_unfinished):
            self.changed.note(index)

    def carried_over(self, layout: Layout) -> RangeTable:
        """Return the table of the stage's next layout. Ranges that stay keep their state."""
        table = RangeTable(layout, {"promises": inherit(self.layout, self._promise, layout)})
        old, new = staying(self.layout, layout)
        table.changed = self.changed.after_layout_change(len(layout), old, new)
        table.counts = self.counts
        if len(old):
            table.owner[new] = self.owner[old]
            table._idle[new] = self._idle[old]
            table.reported_at_ms[new] = self.reported_at_ms[old]
            table.raised_at_ms[new] = self.raised_at_ms[old]
            table.held_since_ms[new] = self.held_since_ms[old]
            noted = bool(self.notes or self.facts or self.idle_by_policy or self.retired)
            moved = dict(zip(old.tolist(), new.tolist(), strict=True)) if noted else {}
            table.notes = self.notes.carried_over(len(layout), old, new, moved)
            table.facts = {moved[o]: each for o, each in self.facts.items() if o in moved}
            table.idle_by_policy = {moved[o] for o in self.idle_by_policy if o in moved}
            table.retired = {moved[o] for o in self.retired if o in moved}
            table.leased = int(np.count_nonzero(table.owner))
            table._recount()
        return table

    def _recount(self) -> None:
        """Compute the counts and the tree from the columns."""
        self.final = int(np.count_nonzero(self._promise == MAX))
        self.idle = int(np.count_nonzero(self._idle & (self._promise != MAX)))
        """Number of ranges that are idle and not final."""
        self.retired = {i for i in self.retired if self._promise[i] != MAX}
        counted = self.promises
        self.promised = int(np.count_nonzero(counted != MIN))
        """Number of ranges that have ever promised, or are retired. The others hold the watermark back,
        unless idle."""
        self._tree = MinimumTree(self._weights(counted, self._idle))

    def chunk(self, number: int) -> Mapping[str, bytes]:
        """Return the columns of one chunk for a checkpoint, packed."""
        part = slice(number * CHUNK, (number + 1) * CHUNK)
        return {
            "promises": packed_column(self._promise[part]),
            "raised_at_ms": packed_column(self.raised_at_ms[part]),
            "unfinished": packed_flags(
                index - part.start for index in self._unfinished(part.start, part.stop)
            ),
            "retired": packed_flags(
                sorted(i - part.start for i in self.retired if part.start <= i < part.stop)
            ),
        }

    def _unfinished(self, start: int, stop: int) -> Iterator[int]:
        """Return which ranges have something unfinished, from one index to another."""
        # Few facts are all checked; of many, only those of this part's ranges.
        among = self.facts if len(self.facts) < stop - start else range(start, stop)
        for index in among:
            facts = self.facts.get(index)
            if facts is not None and facts.is_unfinished and start <= index < stop:
                yield index

    def lowest_first(self, limit: int) -> Iterator[int]:
        """Return the indices, those that hold the stage back most first."""
        return iter(self._tree.lowest(limit))

    def view(self, index: int, holder: str | None, expires_in_ms: int | None) -> RangeView:
        """Return the view of one range."""
        owner = self._owner_view[index]
        return RangeView(
            name=self.name(index),
            promise=self._promise_view[index],
            idle=bool(self._idle_view[index]),
            note=self.notes.of(index),
            holder=holder,
            fence=owner if owner != NOBODY else None,
            expires_in_ms=expires_in_ms,
            reported_at_ms=int(self.reported_at_ms[index]) or None,
            raised_at_ms=int(self.raised_at_ms[index]) or None,
            facts=self.facts.get(index),
            retired=index in self.retired,
        )
