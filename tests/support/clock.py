"""A clock that only moves when the test advances it."""

from __future__ import annotations


class FakeClock:
    """Both clocks of `service.clock.Clock`, in step until one is set."""

    def __init__(self, now_ms: int = 1_767_225_600_000) -> None:
        self.now_ms = now_ms
        self._ahead_ms = 0

    def wall_ms(self) -> int:
        return self.now_ms + self._ahead_ms

    def steady_ms(self) -> int:
        return self.now_ms

    def advance(self, ms: int) -> None:
        self.now_ms += ms

    def set_ahead(self, ms: int) -> None:
        """Set the wall clock, which the steady one does not follow."""
        self._ahead_ms += ms
