"""Time as a parameter. Only this module reads the machine's clocks."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Two clocks in milliseconds, passed as a parameter."""

    def wall_ms(self) -> int:
        """Milliseconds since the Unix epoch, UTC: for display, for `updated_at` and for lag."""
        ...

    def steady_ms(self) -> int:
        """Milliseconds since a fixed instant, monotonic: for deadlines."""
        ...


class SystemClock:
    """The machine's clocks."""

    def wall_ms(self) -> int:
        """See `Clock`."""
        return time.time_ns() // 1_000_000

    def steady_ms(self) -> int:
        """See `Clock`."""
        return time.monotonic_ns() // 1_000_000
