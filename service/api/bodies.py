"""A budget for the bodies of all requests together."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from service.errors import OverloadedError

FREE_BYTES = 64 * 2**10
"""A body of at most this size is not counted: the bound on connections bounds those.

So whoever sends many large bodies keeps only others' large bodies out, and no reports.
"""


class Hold:
    """Share of the budget that one request has."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.bytes = 0

    def take(self, size: int) -> None:
        """Take `size` bytes more. Raises `OverloadedError`."""
        self._budget.take(size)
        self.bytes += size


class BodyBudget:
    """The bytes that the bodies of all requests of this process may have together."""

    def __init__(self, limit: int, what: str = "bodies of other requests") -> None:
        self._limit = limit
        self._what = what
        self.held = 0

    @contextmanager
    def hold(self) -> Generator[Hold]:
        """Return what the block takes once it ends."""
        hold = Hold(self)
        try:
            yield hold
        finally:
            self.held -= hold.bytes

    def take(self, size: int) -> None:
        """See `Hold.take`."""
        if self.held + size > self._limit:
            raise OverloadedError(
                f"the {self._what} have {self.held} of {self._limit} bytes"
                f" (TIDEGAUGE_MAX_BODIES_BYTES), and this one needs {size} more: try again, or make it"
                " smaller"
            )
        self.held += size
