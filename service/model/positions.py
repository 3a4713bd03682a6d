"""The position of a job in a store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

NOT_LIVE: Final = -1
"""Count of changes of a view that the live store has not just returned."""


@dataclass(frozen=True, slots=True)
class Position:
    """The numbers of a job that only rise, for a comparison of the two stores."""

    incarnation: int
    generation: int
    layout_version: int
    revision: int
    last_run: int

    def is_behind(self, other: Position) -> bool:
        """Return whether the other store is newer. Incarnations are compared separately.

        >>> here = Position(1, generation=2, layout_version=1, revision=7, last_run=3)
        >>> here.is_behind(Position(1, 2, 1, 8, 3)), here.is_behind(Position(1, 1, 9, 7, 3))
        (True, False)
        """
        return (
            (self.generation, self.layout_version) < (other.generation, other.layout_version)
            or self.revision < other.revision
            or self.last_run < other.last_run
        )


@dataclass(frozen=True, slots=True)
class LivePosition(Position):
    """Position of a job in a live store, with a count of its changes by any replica."""

    changes: int
    """Count since the beginning of the incarnation. While it stands, all that readers can see stands,
    except what follows the clock.
    """
