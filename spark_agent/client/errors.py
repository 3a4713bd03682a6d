"""Rejections of a request by the service, one class per problem type of its API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from spark_agent.client.credentials import FILE_VARIABLE
from spark_agent.exceptions import Wrong


def free_in_ms(denied: Iterable[Mapping[str, Any]]) -> int | None:
    """Return the time until the first lease on a denied range expires; None: denied for other reasons.

    >>> free_in_ms([{"range": "a", "expires_in_ms": 70}, {"range": "b", "expires_in_ms": 50}])
    50
    >>> free_in_ms([{"range": "a", "expires_in_ms": None}]) is None
    True
    """
    found = [each.get("expires_in_ms") for each in denied]
    return min((each for each in found if each is not None), default=None)


class Refused(Wrong):
    """The service rejected the request and changed nothing. `problem` is its answer (RFC 9457)."""

    slug: ClassVar[str] = ""

    def __init__(self, status: int, problem: Mapping[str, Any]) -> None:
        title = str(problem.get("title", "refused"))
        super().__init__(f"{status}: {title} {problem.get('detail', '')}".strip())
        self.status = status
        self.problem = problem


class NoUsableKey(Wrong):
    """The key cannot be sent."""


class NotAllowed(Refused):
    """The request needs a key, or another key. The base of `Unauthenticated` and `Forbidden`."""


class Unauthenticated(NotAllowed):
    """The request was sent without a key, or with a key that is unknown, revoked or expired."""

    slug = "unauthenticated"

    def __init__(self, status: int, problem: Mapping[str, Any]) -> None:
        super().__init__(status, problem)
        self.args = (f"{self.args[0]} (the agent takes its key from {FILE_VARIABLE} or key_file=)",)


class Forbidden(NotAllowed):
    """The key lacks the role, or is for other jobs."""

    slug = "forbidden"


class UnknownJob(Refused):
    """The job does not exist."""

    slug = "unknown-job"


class UnknownStage(Refused):
    """The job does not have this stage."""

    slug = "unknown-stage"


class UnknownRange(Refused):
    """The stage does not have this range."""

    slug = "unknown-range"


class PreconditionRequired(Refused):
    """The job is declared otherwise, and the request does not allow a replacement."""

    slug = "precondition-required"


class ChangedMeanwhile(Refused):
    """The job's specification was changed since it was read."""

    slug = "precondition-failed"


class DeclaredOtherwise(PreconditionRequired):
    """A `PreconditionRequired` with a message for users of `Pipeline`."""

    def __init__(self, job: str, refusal: Refused) -> None:
        super().__init__(refusal.status, refusal.problem)
        message = (
            f"job {job!r} is already declared with other stages, or with another throttle: pass "
            f"Pipeline(…, replace=True) to replace them, or give this pipeline a job name of its own"
        )
        self.args = (message,)


class LimitReached(Refused):
    """The job would exceed a limit of the service."""

    slug = "limit-reached"


class TooLarge(Refused):
    """The body of the request is larger than the service, or a proxy before it, takes."""

    slug = "payload-too-large"

    def __init__(self, status: int, problem: Mapping[str, Any]) -> None:
        super().__init__(status, problem)
        if not problem:
            message = (
                f"{status}: a proxy before the service rejects the body of the request as too large: "
                f"raise the proxy's limit to 16 MiB, the service's own (nginx: client_max_body_size 16m)"
            )
            self.args = (message,)


class LeaseConflict(Refused):
    """None of the ranges was granted."""

    slug = "lease-conflict"

    @property
    def free_in_ms(self) -> int | None:
        """Time until the first lease on one of the ranges expires; None: denied for another reason."""
        return free_in_ms(self.problem.get("denied", ()))


class LeaseLost(Refused):
    """The token no longer covers any of the ranges."""

    slug = "lease-lost"


class StaleRun(Refused):
    """The stage belongs to a newer run."""

    slug = "stale-run"


class StaleEpoch(Refused):
    """The epoch is at or below the last committed one."""

    slug = "stale-epoch"


class InputAhead(Refused):
    """The input watermark was never published."""

    slug = "input-ahead"
