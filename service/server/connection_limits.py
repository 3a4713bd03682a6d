"""The guard: the limits of all connections together on the process.

The limits of a single connection are in `service.server.http_protocol`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
from collections import Counter
from typing import Final, Protocol

from service.clock import Clock
from service.errors import OverloadedError
from service.settings import Settings
from service.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

SWEEP_S: Final = 0.5

_GIVES_WAY_MS: Final = 1_000
"""The time after which an idle connection may be closed to make room."""

_LINGERING: Final = 64
"""Number of rejected connections that are kept for a moment, so that their clients read the reason."""

_MOST_CONNECTIONS: Final = 16_000
_WANTED_DESCRIPTORS: Final = 16_384
_KEPT_DESCRIPTORS: Final = 128
"""Descriptors for stores, logs and files."""


class Connection(Protocol):
    """The part of a connection that the guard needs."""

    address: str
    since_ms: int
    """Instant when the current read began, or the connection became idle."""

    @property
    def idle(self) -> bool:
        """True if nothing is being read or answered."""
        ...

    def check(self, now_ms: int) -> None:
        """End a connection, or reject a request, that takes too long."""
        ...

    def abort(self) -> None:
        """Close the connection at once."""
        ...


class Guard:
    """The limits of one process, and their use."""

    def __init__(self, settings: Settings, metrics: Metrics, clock: Clock) -> None:
        self.limits = settings
        self.max_connections = settings.max_connections or connections_for(raise_descriptors())
        self.now_ms = clock.steady_ms()
        """The time of the last sweep: precise enough here, and free to read."""
        self._lingering = 0
        self._clock = clock
        self._metrics = metrics
        self._connections: set[Connection] = set()
        self._of_client: Counter[str] = Counter()
        self._idle: list[Connection] = []
        self._logged_ms: dict[str, int] = {}
        self._unlogged: Counter[str] = Counter()

    def accept(self, connection: Connection) -> None:
        """Accept a new connection. Raises `OverloadedError` at a limit."""
        self._connections.add(connection)
        self._of_client[connection.address] += 1
        most = self.limits.max_connections_per_client
        if most and self._of_client[connection.address] > most:
            raise OverloadedError(
                f"{connection.address} has {most} connections"
                " (TIDEGAUGE_MAX_CONNECTIONS_PER_CLIENT): close some, or reuse them"
            )
        if len(self._connections) > self.max_connections and not self._close_an_idle_one():
            raise OverloadedError(
                f"the service has {self.max_connections} connections (TIDEGAUGE_MAX_CONNECTIONS, or the"
                " limit of file descriptors): retry, or add a replica"
            )

    def forget(self, connection: Connection) -> None:
        """Note that a connection has ended."""
        if connection in self._connections:
            self._connections.remove(connection)
            self._of_client[connection.address] -= 1
            if not self._of_client[connection.address]:
                del self._of_client[connection.address]

    def let_linger(self) -> bool:
        """Return whether one more rejected connection may stay for a moment; if so, count it."""
        if self._lingering >= _LINGERING:
            return False
        self._lingering += 1
        return True

    def end_linger(self) -> None:
        """Note that a connection that lingered has ended."""
        self._lingering -= 1

    def _close_an_idle_one(self) -> bool:
        # The list is of the last sweep. So a flood can close the connections that were idle then, and no
        # more until the next sweep: it cannot make the process spend its time on the search.
        while self._idle:
            oldest = self._idle.pop()
            if oldest in self._connections and self._gives_way(oldest):
                oldest.abort()
                self.count("idle", "an idle connection was closed to make room for a new one")
                return True
        return False

    def _gives_way(self, connection: Connection) -> bool:
        # A client with a request each second is never idle that long.
        return connection.idle and self.now_ms - connection.since_ms >= _GIVES_WAY_MS

    def count(self, reason: str, detail: str) -> None:
        """Count a rejection, and log it unless a similar one was logged within the last second."""
        self._metrics.refused_requests.labels(reason).inc()
        if self.now_ms - self._logged_ms.get(reason, self.now_ms - 1_000) < 1_000:
            self._unlogged[reason] += 1
            return
        self._logged_ms[reason] = self.now_ms
        more = self._unlogged.pop(reason, 0)
        log.warning(
            "%s%s", detail, f" (and {more} more like it since the last line)" if more else ""
        )

    async def watch(self) -> None:
        """Sweep until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            self.sweep(self._clock.steady_ms())

    def sweep(self, now_ms: int) -> None:
        """Check all connections, and that the process can still open files."""
        self.now_ms = now_ms
        for connection in list(self._connections):
            connection.check(now_ms)
        full = len(self._connections) > self.max_connections * 3 // 4
        idle = [each for each in self._connections if full and self._gives_way(each)]
        self._idle = sorted(idle, key=lambda each: each.since_ms, reverse=True)
        self._check_descriptors()

    def _check_descriptors(self) -> None:
        # Without a descriptor, libuv accepts and closes a connection silently.
        try:
            os.close(os.dup(0 if _is_open(0) else 1))
        except OSError as error:
            self.count(
                "descriptors",
                f"the process has no file descriptor left ({error.strerror}): raise ulimit -n",
            )


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def raise_descriptors() -> int:
    """Raise this process's limit of file descriptors, up to a sane number; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _WANTED_DESCRIPTORS if hard == resource.RLIM_INFINITY else hard
    if soft == resource.RLIM_INFINITY or soft >= min(most, _WANTED_DESCRIPTORS):
        return most if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, _WANTED_DESCRIPTORS), hard))
    return min(most, _WANTED_DESCRIPTORS)


def connections_for(descriptors: int) -> int:
    """Return the limit of connections for a limit of file descriptors.

    >>> connections_for(256), connections_for(1_024), connections_for(1_048_576)
    (128, 896, 16000)
    """
    return min(_MOST_CONNECTIONS, max(descriptors - _KEPT_DESCRIPTORS, descriptors // 4))
