"""Polling of one value of the service, no more often than necessary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Generic, TypeVar

from spark_agent.clock import Clock
from spark_agent.exceptions import AggregatorError

T = TypeVar("T")

_LONGEST_PAUSE_MS: Final = 5_000


class Poller(Generic[T]):
    """Polls a value, at most once per `poll_ms`, and backs off while the service does not answer.

    `fetch` gets the latest value, if any, and returns the current value; it raises `AggregatorError`.
    Not thread-safe.

    >>> from spark_agent.clock import SystemClock
    >>> poller = Poller(lambda latest: (latest or 0) + 1, poll_ms=60_000, clock=SystemClock())
    >>> poller.latest(), poller.latest()
    (1, 1)
    >>> poller.refresh_soon()
    >>> poller.latest()
    2
    """

    def __init__(self, fetch: Callable[[T | None], T], *, poll_ms: int, clock: Clock) -> None:
        self._fetch = fetch
        self._poll_ms = poll_ms
        self._clock = clock
        self._latest: T | None = None
        self._pause_ms = poll_ms
        self._next_ms: int | None = None
        self.received_ms: int | None = None
        """Time of the latest answer, by the steady clock; None: the service has not answered yet."""
        self.is_current = False
        """True if the service has answered since the last call of `refresh_soon`."""
        self.error: AggregatorError | None = None
        """The error of the latest poll, if it failed."""

    def refresh_soon(self) -> None:
        """Poll on the next call, unless backing off from a service that does not answer."""
        self.is_current = False
        if self._pause_ms <= self._poll_ms:
            self._next_ms = None

    def latest(self) -> T | None:
        """Return the latest value, if any. An idle query calls this every 10 ms."""
        now_ms = self._clock.steady_ms()
        if self._next_ms is None or now_ms >= self._next_ms:
            self._poll()
            self._next_ms = self._clock.steady_ms() + self._pause_ms
        return self._latest

    def _poll(self) -> None:
        try:
            self._latest = self._fetch(self._latest)
        except AggregatorError as error:
            # The old value stays: for a watermark, that is always safe.
            self.error = error
            self._pause_ms = min(2 * self._pause_ms, max(_LONGEST_PAUSE_MS, self._poll_ms))
            return
        self.error, self._pause_ms = None, self._poll_ms
        self.received_ms, self.is_current = self._clock.steady_ms(), True
