"""Time as a parameter: the only module of the agent that reads the machine's clocks."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """The clock that the agent runs on, in milliseconds."""

    def wall_ms(self) -> int:
        """Milliseconds since the Unix epoch, UTC."""
        ...

    def steady_ms(self) -> int:
        """Milliseconds since some fixed instant; monotonic, for deadlines."""
        ...

    def pause(self, pause_ms: int) -> None:
        """Sleep for `pause_ms` milliseconds."""
        ...


class SystemClock:
    """The machine's clocks. Without state, and so pickled for the executors."""

    def wall_ms(self) -> int:
        """See `Clock`."""
        return time.time_ns() // 1_000_000

    def steady_ms(self) -> int:
        """See `Clock`."""
        return time.monotonic_ns() // 1_000_000

    def pause(self, pause_ms: int) -> None:
        """See `Clock`."""
        time.sleep(pause_ms / 1_000)
