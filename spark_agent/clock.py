"""Time as a parameter: the one place of the agent that asks the machine what time it is."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """What the agent asks of time, in milliseconds."""

    def wall_ms(self) -> int:
        """Milliseconds since the Unix epoch, UTC."""
        ...

    def steady_ms(self) -> int:
        """Milliseconds since any fixed instant, never going back: for deadlines."""
        ...

    def pause(self, pause_ms: int) -> None:
        """Return after so many milliseconds."""
        ...


class SystemClock:
    """The machine's clocks. Carries nothing, so it travels to executors."""

    def wall_ms(self) -> int:
        """See `Clock`."""
        return time.time_ns() // 1_000_000

    def steady_ms(self) -> int:
        """See `Clock`."""
        return time.monotonic_ns() // 1_000_000

    def pause(self, pause_ms: int) -> None:
        """See `Clock`."""
        time.sleep(pause_ms / 1_000)
