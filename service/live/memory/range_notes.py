"""The latest notes of a stage's ranges in memory, for display: promises already include their holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import cast

import numpy as np

from service.frontier.timestamps import MAX
from service.live.memory.minimum_tree import Int64s
from service.live.memory.rows import Rows, as_list
from service.model.reports import NOTHING_NOTED, HoldColumns, RangeNote, holds_at, noted

MAX_HOLD_COLUMNS = 16
"""Components of a stage whose holds are kept as columns."""


class RangeNotes:
    """Notes by index in the layout."""

    __slots__ = ("_columns", "_notes", "_size")

    def __init__(self, size: int) -> None:
        self._size = size
        self._notes: dict[int, RangeNote] = {}
        """Notes of the ranges that have any."""
        self._columns: dict[str, Int64s] = {}
        """Holds of the ranges whose last report was packed: columns over all ranges, by component."""

    def __bool__(self) -> bool:
        """Return whether a range has a note of its own."""
        return bool(self._notes)

    def put(self, indices: Rows, notes: Sequence[RangeNote | None] | None) -> None:
        """Keep the notes of these ranges."""
        for kept in self._columns.values():
            kept[indices] = MAX
        if notes is None and not self._notes:
            return
        numbers = as_list(indices)
        if notes is not None and all(notes):
            self._notes.update(zip(numbers, cast("Sequence[RangeNote]", notes), strict=True))
            return
        for index, note in zip(numbers, notes or repeat(None), strict=False):
            if note:
                self._notes[index] = note
            else:
                self._notes.pop(index, None)

    def put_columns(self, indices: Rows, columns: HoldColumns) -> None:
        """Keep the holds of ranges whose report was packed."""
        if len(self._columns.keys() | columns.keys()) > MAX_HOLD_COLUMNS:
            # Each costs eight bytes for each range of the stage: so many names are kept one by one.
            rows = range(len(as_list(indices)))
            self.put(indices, noted([RangeNote(holds_at(columns, row)) for row in rows]))
            return
        if self._notes:
            for index in as_list(indices):
                self._notes.pop(index, None)
        for name in self._columns.keys() - columns.keys():
            self._columns[name][indices] = MAX
        for name, column in columns.items():
            kept = self._columns.get(name)
            if kept is None:
                kept = self._columns[name] = np.full(self._size, MAX, dtype=np.int64)
            kept[indices] = column

    def of(self, index: int) -> RangeNote:
        """Return the note of one range."""
        note = self._notes.get(index, NOTHING_NOTED)
        if note.holds or note.position or not self._columns:
            return note
        return RangeNote(holds_at(self._columns, index))

    def carried_over(
        self, size: int, old: Int64s, new: Int64s, moved: Mapping[int, int]
    ) -> RangeNotes:
        """Return the notes in the next layout. `moved` maps `old` to `new`, if any range is noted."""
        carried = RangeNotes(size)
        for name, kept in self._columns.items():
            carried._columns[name] = np.full(size, MAX, dtype=np.int64)
            carried._columns[name][new] = kept[old]
        carried._notes = {moved[o]: note for o, note in self._notes.items() if o in moved}
        return carried
