"""Polling of one value of the service, with as few requests as it takes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Final, Generic, TypeVar

from spark_agent.clock import Clock
from spark_agent.exceptions import AggregatorError

T = TypeVar("T")

_LONGEST_PAUSE_MS: Final = 5_000
_LONGEST_WAIT_S: Final = 10


def long_poll_s(ttl_ms: int) -> int:
    """Return the length of long polls whose value is to be newer than a lease of `ttl_ms`.

    0: long polls, which take whole seconds, are too long for such a lease.

    >>> long_poll_s(60_000), long_poll_s(9_000), long_poll_s(2_000)
    (10, 3, 0)
    """
    return min(ttl_ms // 3_000, _LONGEST_WAIT_S)


@dataclass(frozen=True, slots=True)
class _Answer(Generic[T]):
    """The end of a long poll: the value, or the error."""

    turn: int
    found: T | Exception
    received_ms: int


class Poller(Generic[T]):
    """Polls a value, at most once per `poll_ms`, and backs off while the service does not answer.

    `fetch` gets the latest value, if any, and a number of seconds. It returns the current value, at the
    latest after these seconds if it equals the latest one; it raises `AggregatorError`.

    With `wait_s`, the caller of `latest` polls only at first, after `refresh_soon`, and if the latest
    value is older than two long polls. Other polls are long polls, in a thread that ends with the poll,
    so a value that does not change costs a request in `wait_s`. Not thread-safe but for that.

    >>> from spark_agent.clock import SystemClock
    >>> poller = Poller(lambda latest, _: (latest or 0) + 1, poll_ms=60_000, clock=SystemClock())
    >>> poller.latest(), poller.latest()
    (1, 1)
    >>> poller.refresh_soon()
    >>> poller.latest()
    2
    """

    def __init__(
        self,
        fetch: Callable[[T | None, int], T],
        *,
        poll_ms: int,
        clock: Clock,
        wait_s: int = 0,
    ) -> None:
        self._fetch = fetch
        self._poll_ms = poll_ms
        self._clock = clock
        self._wait_s = wait_s
        self._latest: T | None = None
        self._pause_ms = poll_ms
        self._next_ms: int | None = None
        self._turn = 0
        """Rises with each poll of the caller: a long poll that began before has an older value."""
        self._answers = SimpleQueue[_Answer[T]]()
        self._is_waiting = False
        self.received_ms: int | None = None
        """Time of the latest answer, by the steady clock; None: the service has not answered yet."""
        self.is_current = False
        """True if the service has answered since the last call of `refresh_soon`."""
        self.error: AggregatorError | None = None
        """The error of the latest poll, if it failed."""

    def refresh_soon(self) -> None:
        """Poll on the next call, unless backing off from a service that does not answer."""
        self.is_current = False
        self._turn += 1
        if self._pause_ms <= self._poll_ms:
            self._next_ms = None

    def latest(self) -> T | None:
        """Return the latest value, if any. An idle query calls this every 10 ms."""
        self._take_answer()
        now_ms = self._clock.steady_ms()
        if self._next_ms is None or now_ms >= self._next_ms:
            if self._may_wait(now_ms):
                self._begin_long_poll(now_ms)
            else:
                self._poll()
        return self._latest

    def _may_wait(self, now_ms: int) -> bool:
        """Return whether a long poll may bring the next value, because the latest one is good enough.

        A service that does not answer is retried by the caller, whose patience is shorter.
        """
        if not self._wait_s or not self.is_current or self.error is not None:
            return False
        return self.received_ms is not None and now_ms - self.received_ms < 2_000 * self._wait_s

    def _poll(self) -> None:
        self._turn += 1
        try:
            found: T | AggregatorError = self._fetch(self._latest, 0)
        except AggregatorError as error:
            found = error
        self._note(found, self._clock.steady_ms())

    def _begin_long_poll(self, now_ms: int) -> None:
        """Begin a long poll, unless one is under way.

        One that began before a poll of the caller ends as soon as the value changes. Its answer is not
        taken, and the next one brings the value at once.
        """
        self._next_ms = now_ms + self._poll_ms
        if self._is_waiting:
            return
        self._is_waiting = True
        args = self._turn, self._latest
        threading.Thread(target=self._long_poll, args=args, name="long poll", daemon=True).start()

    def _long_poll(self, turn: int, latest: T | None) -> None:
        try:
            found: T | Exception = self._fetch(latest, self._wait_s)
        except Exception as error:  # noqa: BLE001 - the caller of `latest` raises it
            found = error
        self._answers.put(_Answer(turn, found, self._clock.steady_ms()))

    def _take_answer(self) -> None:
        try:
            answer = self._answers.get_nowait()
        except Empty:
            return
        self._is_waiting = False
        if isinstance(answer.found, Exception) and not isinstance(answer.found, AggregatorError):
            raise answer.found
        if answer.turn == self._turn:
            self._note(answer.found, answer.received_ms)

    def _note(self, found: T | AggregatorError, at_ms: int) -> None:
        if isinstance(found, AggregatorError):
            # The old value stays: for a watermark, that is always safe.
            self.error = found
            self._pause_ms = min(2 * self._pause_ms, max(_LONGEST_PAUSE_MS, self._poll_ms))
        else:
            self._latest = found
            self.error, self._pause_ms = None, self._poll_ms
            self.received_ms, self.is_current = at_ms, True
        self._next_ms = at_ms + self._pause_ms
