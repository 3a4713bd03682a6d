"""Chunks of a stage's promises that a checkpoint has yet to save."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from service.live.memory.minimum_tree import Int64s
from service.live.memory.rows import Rows, as_list
from service.model.checkpoints import CHUNK, chunk_numbers

_FEW_CHUNKS = 4


def _chunks(at: Int64s | slice) -> Iterable[int]:
    """Return the chunks of a checkpoint that have any of these ranges.

    >>> import numpy as np
    >>> sorted(_chunks(np.array([0, 5 * CHUNK]))), list(_chunks(slice(CHUNK - 1, CHUNK + 1)))
    ([0, 5], [0, 1])
    """
    if isinstance(at, slice):
        return range(at.start // CHUNK, (at.stop - 1) // CHUNK + 1)
    first, last = int(at.min()) // CHUNK, int(at.max()) // CHUNK
    # To save a chunk between them for nothing is cheaper than to look at each range.
    return range(first, last + 1) if last - first < _FEW_CHUNKS else set((at // CHUNK).tolist())


class ChangedChunks:
    """Chunks with a promise that changed since the last checkpoint, each with the stamp of its change.

    >>> changed = ChangedChunks()
    >>> changed.note(0); changed.note(CHUNK); changed.note(1); changed.unsaved()
    [(0, 3), (1, 2)]
    >>> changed.saved(0, 1); changed.saved(1, 2); changed.unsaved()
    [(0, 3)]
    """

    __slots__ = ("_ends", "_stamp", "_stamps")

    def __init__(self, stamp: int = 0) -> None:
        self._stamp = stamp
        self._stamps: dict[int, int] = {}
        self._ends: dict[int, tuple[int, str]] = {}

    def note(self, index: int) -> None:
        """Note that what a checkpoint keeps of a range has changed."""
        self._stamp += 1
        self._stamps[index // CHUNK] = self._stamp

    def note_many(self, at: Int64s | slice) -> None:
        """Note the same of several ranges."""
        self._stamp += 1
        for chunk in _chunks(at):
            self._stamps[chunk] = self._stamp

    def note_end_of_retirement(self, index: int, holder: str) -> None:
        """Note that a range's retirement has ended by a report of this holder, until the end is saved.

        A report that was applied, but not answered, is sent again: without the note, the second one
        would be answered before the end is durable.
        """
        self.note(index)
        self._ends[index] = self._stamp, holder

    def has_unsaved_end(self, indices: Rows) -> bool:
        """Return True if the end of a retirement of any of these ranges is not saved yet."""
        return bool(self._ends) and not self._ends.keys().isdisjoint(as_list(indices))

    def unsaved_ends(self, number: int) -> Mapping[int, str]:
        """Return the ranges of a chunk whose retirement has ended, if the end is not saved yet, each
        with the holder that has ended it.
        """
        return {i: holder for i, (_, holder) in self._ends.items() if i // CHUNK == number}

    def unsaved(self) -> Sequence[tuple[int, int]]:
        """Return the unsaved chunks, each with the stamp of its last change."""
        return list(self._stamps.items())

    def saved(self, number: int, stamp: int) -> None:
        """Note that a chunk is saved as of that stamp; it may have changed since."""
        if self._stamps.get(number) == stamp:
            del self._stamps[number]
        self._ends = {
            index: ended
            for index, ended in self._ends.items()
            if index // CHUNK != number or ended[0] > stamp
        }

    def after_layout_change(self, size: int, old: Int64s, new: Int64s) -> ChangedChunks:
        """Return the chunks of the next layout, all unsaved. Ranges at `old` are at `new` there.

        Stamps go on rising: chunks of the old layout are distinguished by the layout, not by the stamp.
        """
        changed = ChangedChunks(self._stamp + 1)
        changed._stamps = dict.fromkeys(chunk_numbers(size), changed._stamp)
        if self._ends:
            stay = zip(old.tolist(), new.tolist(), strict=True)
            changed._ends = {
                to: (changed._stamp, self._ends[at][1]) for at, to in stay if at in self._ends
            }
        return changed
