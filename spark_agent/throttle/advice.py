"""The throttle advice of the service for a query's sources, polled. Not thread-safe."""

from __future__ import annotations

from typing import Final

from spark_agent.client.client import Client, Throttle
from spark_agent.clock import Clock
from spark_agent.exceptions import AggregatorError

_LONGEST_PAUSE_MS: Final = 5_000


class ThrottleAdvicePoller:
    """Polls the throttle advice of a job, no more often than necessary."""

    def __init__(
        self, job: str, *, poll_ms: int, keep_ms: int, client: Client, clock: Clock
    ) -> None:
        """`keep_ms` is the time for which an answer counts if no other follows."""
        self._job = job
        self._poll_ms = poll_ms
        self._keep_ms = keep_ms
        self._client = client
        self._clock = clock
        self._latest: Throttle | None = None
        self._received_ms = 0
        self._pause_ms = poll_ms
        self._next_ms: int | None = None

    def refresh_soon(self) -> None:
        """Poll on the next call, unless the service does not answer."""
        if self._pause_ms <= self._poll_ms:
            self._next_ms = None

    def latest(self) -> Throttle | None:
        """Return the latest advice; None once it is older than `keep_ms`."""
        now_ms = self._clock.steady_ms()
        if self._next_ms is None or now_ms >= self._next_ms:
            self._refresh()
            now_ms = self._clock.steady_ms()
            self._next_ms = now_ms + self._pause_ms
        return self._latest if now_ms - self._received_ms < self._keep_ms else None

    def _refresh(self) -> None:
        etag = None if self._latest is None else self._latest.etag
        try:
            found = self._client.throttle_since(self._job, etag)
        except AggregatorError:
            self._pause_ms = min(2 * self._pause_ms, max(_LONGEST_PAUSE_MS, self._poll_ms))
            return
        self._pause_ms = self._poll_ms
        self._received_ms = self._clock.steady_ms()
        self._latest = found or self._latest
