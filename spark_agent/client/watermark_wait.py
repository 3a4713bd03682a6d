"""Waiting for a watermark, through restarts of the service."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol, Self

from spark_agent.client.responses import EtaAnswer, ExplainAnswer, WatermarkAnswer
from spark_agent.clock import Clock
from spark_agent.exceptions import (
    AggregatorError,
    NotInTime,
    Unavailable,
    WrongAddress,
)
from spark_agent.times import duration_text, instant_text, read_instant_ms


class WaitOutcome(StrEnum):
    """The outcome of waiting for a watermark, with the same words in `--json`, errors and logs."""

    REACHED = "reached"
    NOT_IN_TIME = "not in time"
    UNAVAILABLE = "unavailable"
    """The service does not answer. A retry may help."""
    WRONG = "wrong"
    """The job, stage, instant, key or address is wrong. A retry does not help."""


_PAUSE_MS: Final = 500
_PATIENCE_MS: Final = 5_000
"""Wait for an answer beyond the service's own wait, since the service may be restarting."""
_LEAST_PATIENCE_MS: Final = 2_000

Show = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class WaitResult:
    """Result of a wait."""

    reached: bool
    seen: WatermarkAnswer
    """The stage's watermark when it was last read."""
    waited_ms: int
    answers: bool = True
    """False if the service did not answer the last request: `seen` is older then."""

    @property
    def outcome(self) -> WaitOutcome:
        """The outcome, in the words of `tidegauge wait`."""
        if self.reached:
            return WaitOutcome.REACHED
        return WaitOutcome.NOT_IN_TIME if self.answers else WaitOutcome.UNAVAILABLE

    def require(self) -> WatermarkAnswer:
        """Return the watermark if it has reached the instant. Raises `NotInTime`, `Unavailable`."""
        at = f"the output watermark is at {instant_text(self.seen['output_watermark'])}"
        match self.outcome:
            case WaitOutcome.REACHED:
                return self.seen
            case WaitOutcome.NOT_IN_TIME:
                raise NotInTime(f"after {self.waited_ms:,} ms {at}")
            case _:
                raise Unavailable(f"the service does not answer; when it last did, {at}")


class WatermarkClient(Protocol):
    """The part of `Client` that a wait needs."""

    def show(
        self, job: str, stage: str, *, at_least_ms: int | None = None, wait_s: int = 0
    ) -> WatermarkAnswer:
        """Return a stage's watermark; with `wait_s`, once it has reached `at_least_ms`."""
        ...

    def eta(self, job: str, stage: str, at: str) -> EtaAnswer:
        """Estimate when the watermark reaches an instant."""
        ...

    def explain(self, job: str, stage: str, *, limit: int = 10) -> ExplainAnswer:
        """Explain the watermark."""
        ...

    def without_retries(self, timeout_ms: int) -> Self:
        """Return a client whose requests take at most this long, and are sent once."""
        ...


class WatermarkWait:
    """Polls a watermark until it has reached a target."""

    def __init__(
        self,
        client: WatermarkClient,
        clock: Clock,
        job: str,
        stage: str,
        target_ms: int,
        poll_s: int,
    ) -> None:
        self._client = client
        self._clock = clock
        self._job = job
        self._stage = stage
        self._target_ms = target_ms
        self._poll_s = poll_s

    def wait(
        self,
        timeout_ms: int,
        show: Show,
        *,
        estimates: bool = False,
        begin: Callable[[], None] = lambda: None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> WaitResult:
        """Return once the watermark has reached the target, after the timeout, or soon after `is_over`.

        The first request is answered at once. `begin` is called if the target is not reached by then.

        While the service is unavailable, also at the start, requests are retried until the timeout.
        Raises `Unavailable` if it has never answered, `WrongAddress`, and `Wrong` if it rejects the
        request.
        """
        began_ms = self._clock.steady_ms()
        deadline_ms = began_ms + timeout_ms
        seen: WatermarkAnswer | None = None
        answers = True
        first = True
        while True:
            left_ms = max(deadline_ms - self._clock.steady_ms(), 0)
            wait_s = 0 if first else min(self._poll_s, -(-left_ms // 1_000))
            try:
                seen = self._patient(wait_s, left_ms).show(
                    self._job, self._stage, at_least_ms=self._target_ms, wait_s=wait_s
                )
                answers = True
            except WrongAddress:
                raise
            except Unavailable as error:
                over = is_over() or self._clock.steady_ms() >= deadline_ms
                if seen is None and over:
                    raise
                if answers:
                    show(f"{error}: retrying")
                answers = False
                self._clock.pause(min(_PAUSE_MS, left_ms))
            now_ms = self._clock.steady_ms()
            if seen is not None:
                output_ms = seen["output_watermark"]
                reached = answers and output_ms is not None and output_ms >= self._target_ms
                if reached or now_ms >= deadline_ms or is_over():
                    return WaitResult(reached, seen, now_ms - began_ms, answers)
            if first:
                begin()
            first = False
            if seen is not None and answers and estimates:
                show(self._progress(seen, deadline_ms - now_ms))

    def _patient(self, wait_s: int, left_ms: int) -> WatermarkClient:
        """Return a client whose patience is little longer than the service's wait, or the time left.

        It does not retry: a retry would have less time left than the wait that the service was sent.
        """
        spare_ms = left_ms - 1_000 * wait_s
        patience_ms = min(max(spare_ms, _LEAST_PATIENCE_MS), _PATIENCE_MS)
        return self._client.without_retries(1_000 * wait_s + patience_ms)

    def _progress(self, seen: WatermarkAnswer, timeout_ms: int) -> str:
        """Return the position, T, the time left, the timeout and the cause, as far as they are known."""
        target, output_ms = instant_text(self._target_ms), seen["output_watermark"]
        place = "is without a watermark, and waits for"
        if output_ms is not None:
            place = f"is at {instant_text(output_ms)} of"
        parts = [f"{self._stage} {place} {target}"]
        with suppress(AggregatorError):
            found = self._client.eta(self._job, self._stage, f"{self._target_ms}ms")
            parts.append(time_left_text(found, self._clock.wall_ms()))
        parts.append(f"timeout in {duration_text(timeout_ms)}")
        with suppress(AggregatorError):
            parts.append(self._client.explain(self._job, self._stage, limit=1)["because"])
        return "; ".join(parts)


def eta_text(found: EtaAnswer) -> str:
    """Write an estimate as text."""
    there = instant_text(found["at"])
    if found["reached"]:
        return f"has reached {there}"
    if found["expected_at"] is None or found["between"] is None:
        return f"is not at {there} yet, and an estimate is not possible"
    low, high = found["between"]
    return (
        f"will reach {there} at about {found['expected_at']},"
        f" between {low} and {high} in {found['confidence']:.0%} of all cases"
    )


def time_left_text(found: EtaAnswer, now_ms: int) -> str:
    """Write the time that is left until an estimate.

    >>> expected = {"reached": False, "expected_at": "1970-01-01T00:05:00.000Z"}
    >>> bounds = {"between": ["1970-01-01T00:04:00.000Z", "1970-01-01T00:07:30.000Z"]}
    >>> time_left_text({**expected, **bounds}, 60_000)
    'about 4 min left (3 min to 6 min 30 s)'
    >>> time_left_text({"reached": False, "expected_at": None, "between": None}, 0)
    'no estimate of the time left'
    """
    if found["reached"]:
        return "0 s left"
    if found["expected_at"] is None or found["between"] is None:
        return "no estimate of the time left"
    expected, low, high = (
        duration_text(max(read_instant_ms(at, name="expected_at") - now_ms, 0))
        for at in (found["expected_at"], *found["between"])
    )
    return f"about {expected} left ({low} to {high})"
