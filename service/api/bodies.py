"""A budget for the bodies of all requests together."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from service.errors import OverloadedError

FREE_BYTES = 64 * 2**10
"""The largest body that is not counted: the limit of connections bounds small bodies.

So a client with many large bodies keeps out only other large bodies, and no reports.
"""


class Reservation:
    """One request's share of the budget."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.bytes = 0

    def take(self, size: int) -> None:
        """Take `size` bytes more. Raises `OverloadedError`."""
        self._budget.take(size)
        self.bytes += size


class BodyBudget:
    """The limit of the bodies of all requests of this process together, in bytes."""

    def __init__(self, limit: int, what: str = "bodies of other requests") -> None:
        self._limit = limit
        self._what = what
        self.reserved = 0

    @contextmanager
    def reserve(self) -> Generator[Reservation]:
        """Reserve bytes in the block; the end of the block releases them."""
        reservation = Reservation(self)
        try:
            yield reservation
        finally:
            self.reserved -= reservation.bytes

    def take(self, size: int) -> None:
        """See `Reservation.take`."""
        if self.reserved + size > self._limit:
            raise OverloadedError(
                f"the {self._what} have {self.reserved} of {self._limit} bytes"
                f" (TIDEGAUGE_MAX_BODIES_BYTES), and this one needs {size} more: retry, or make it"
                " smaller"
            )
        self.reserved += size
