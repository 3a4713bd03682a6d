"""How far a job is, in the numbers that only rise."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Position:
    """How far a job is in a store, to be held against where it is in the other."""

    incarnation: int
    generation: int
    layout_version: int
    revision: int
    last_run: int

    def is_behind(self, other: Position) -> bool:
        """Whether the other has something to tell. Of incarnations, each store knows for itself.

        >>> here = Position(1, generation=2, layout_version=1, revision=7, last_run=3)
        >>> here.is_behind(Position(1, 2, 1, 8, 3)), here.is_behind(Position(1, 1, 9, 7, 3))
        (True, False)
        """
        return (
            (self.generation, self.layout_version) < (other.generation, other.layout_version)
            or self.revision < other.revision
            or self.last_run < other.last_run
        )
