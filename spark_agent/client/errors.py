"""Refusals of a request by the service, one class per problem type of its API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from spark_agent.client.credentials import FILE_VARIABLE
from spark_agent.exceptions import Wrong


class Refused(Wrong):
    """The service refused the request and changed nothing. `problem` is its answer (RFC 9457)."""

    slug: ClassVar[str] = ""

    def __init__(self, status: int, problem: Mapping[str, Any]) -> None:
        title = str(problem.get("title", "refused"))
        super().__init__(f"{status}: {title} {problem.get('detail', '')}".strip())
        self.status = status
        self.problem = problem


class NoUsableKey(Wrong):
    """There is a key, but it cannot be sent."""


class NotAllowed(Refused):
    """The request needs a key, or another one. The base of two refusals."""


class Unauthenticated(NotAllowed):
    """The request was sent without a key, or with one that is unknown, revoked or expired."""

    slug = "unauthenticated"

    def __init__(self, status: int, problem: Mapping[str, Any]) -> None:
        super().__init__(status, problem)
        self.args = (f"{self.args[0]} (the agent takes its key from {FILE_VARIABLE} or key_file=)",)


class Forbidden(NotAllowed):
    """The key may not do this."""

    slug = "forbidden"


class UnknownJob(Refused):
    """The service knows no job of this name."""

    slug = "unknown-job"


class UnknownStage(Refused):
    """The job has no stage of this name."""

    slug = "unknown-stage"


class PreconditionRequired(Refused):
    """The job is declared otherwise, and the request does not allow replacing that."""

    slug = "precondition-required"


class ChangedMeanwhile(Refused):
    """Somebody else has changed the job's specification since it was read."""

    slug = "precondition-failed"


class DeclaredOtherwise(PreconditionRequired):
    """The same, with a message for users of `Pipeline`."""

    def __init__(self, job: str, refusal: Refused) -> None:
        super().__init__(refusal.status, refusal.problem)
        message = (
            f"job {job!r} is already declared with other stages, or with another throttle: pass "
            f"Pipeline(…, replace=True) to replace them, or give this pipeline a job name of its own"
        )
        self.args = (message,)


class LimitReached(Refused):
    """The job would be larger than the service is set to keep."""

    slug = "limit-reached"


class LeaseConflict(Refused):
    """None of the ranges was granted."""

    slug = "lease-conflict"


class LeaseLost(Refused):
    """The token no longer covers any of the ranges."""

    slug = "lease-lost"


class StaleRun(Refused):
    """A newer run has taken the stage over."""

    slug = "stale-run"


class StaleEpoch(Refused):
    """The epoch is at or below the last committed one."""

    slug = "stale-epoch"


class InputAhead(Refused):
    """The input watermark was never published."""

    slug = "input-ahead"
