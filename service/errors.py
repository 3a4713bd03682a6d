"""All errors of the service, in one hierarchy: the docstring of each is its title.

The API turns every one of them into an RFC 9457 problem with one handler (`service.api.problems`), and
the same classes make the error part of the OpenAPI. A rejected request changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar


class ProblemError(Exception):
    """An error of the service."""

    slug: ClassVar[str] = "internal"
    status: ClassVar[int] = 500

    def __init__(self, detail: str, **members: object) -> None:
        super().__init__(detail)
        self.detail = detail
        self.members = members
        """More members of the problem, for programs."""

    @classmethod
    def title(cls) -> str:
        """Return the title: a sentence that is the same for each error of the class."""
        return (cls.__doc__ or "").splitlines()[0]


class MalformedJsonError(ProblemError):
    """The body is not JSON."""

    slug = "malformed-json"
    status = 400


class InvalidRequestError(ProblemError):
    """The request violates its type or its bounds."""

    slug = "invalid-request"
    status = 422


class InvalidPipelineSpecError(ProblemError):
    """The pipeline is not a directed acyclic graph of well-formed stages."""

    slug = "invalid-pipeline"
    status = 422


class LimitReachedError(ProblemError):
    """The job, or all jobs together, would exceed a limit of this service."""

    slug = "limit-reached"
    status = 422

    def __init__(self, detail: str, limit: int, setting: str) -> None:
        super().__init__(f"{detail}: at most {limit:,} ({setting})", limit=limit, setting=setting)


class InvalidReportError(ProblemError):
    """The report violates its type, its bounds or its stage."""

    slug = "invalid-report"
    status = 422


class ClientGoneError(ProblemError):
    """The client disconnected before it was answered."""

    slug = "client-gone"
    status = 400


class PayloadTooLargeError(ProblemError):
    """The body, or the number of ranges in it, is above the limit."""

    slug = "payload-too-large"
    status = 413


class UnauthenticatedError(ProblemError):
    """The request needs a valid key, which has not expired."""

    slug = "unauthenticated"
    status = 401


class ForbiddenError(ProblemError):
    """The key does not permit this request."""

    slug = "forbidden"
    status = 403


class NotFoundError(ProblemError):
    """The address does not exist."""

    slug = "not-found"
    status = 404


class MethodNotAllowedError(ProblemError):
    """The address does not allow this method."""

    slug = "method-not-allowed"
    status = 405


class UnknownJobError(NotFoundError):
    """The job does not exist."""

    slug = "unknown-job"


class UnknownStageError(NotFoundError):
    """The job does not have this stage."""

    slug = "unknown-stage"


class UnknownRangeError(NotFoundError):
    """The stage does not have this range."""

    slug = "unknown-range"


class UnknownRunError(NotFoundError):
    """The job does not have this run."""

    slug = "unknown-run"


class UnknownKeyError(NotFoundError):
    """The key does not exist."""

    slug = "unknown-key"


class KeyExistsError(ProblemError):
    """The key already exists."""

    slug = "key-exists"
    status = 409


class FirstKeyError(ProblemError):
    """The first key must be able to create others."""

    slug = "first-key"
    status = 409


class PreconditionRequiredError(ProblemError):
    """The stored pipeline differs: name the one to replace with If-Match."""

    slug = "precondition-required"
    status = 428


class PreconditionFailedError(ProblemError):
    """The stored pipeline is no longer the one to replace."""

    slug = "precondition-failed"
    status = 412


class StaleRunError(ProblemError):
    """The stage belongs to another run, or the run has ended."""

    slug = "stale-run"
    status = 409

    def __init__(self, detail: str, run: int | None, **members: object) -> None:
        super().__init__(detail, run=run, **members)
        self.run = run
        """The owning run, if any."""

    def opened_by(self, holder: str) -> StaleRunError:
        """Return the error with the holder of the stage's run."""
        return StaleRunError(
            f"{self.detail}; {holder} opened run {self.run}", self.run, holder=holder
        )


class LeaseConflictError(ProblemError):
    """None of the ranges could be granted."""

    slug = "lease-conflict"
    status = 409

    def __init__(self, detail: str, denied: Sequence[object], total: int) -> None:
        more = {} if total == len(denied) else {"denied_total": total}
        super().__init__(detail, denied=denied, **more)
        self.denied = denied
        """The first of the ranges that were not granted, each with its reason."""
        self.total = total


class LeaseLostError(ProblemError):
    """The token does not, or no longer, cover any of these ranges."""

    slug = "lease-lost"
    status = 410


class InputAheadError(ProblemError):
    """The observed input watermark was never published."""

    slug = "input-ahead"
    status = 409


class StaleEpochError(ProblemError):
    """The epoch is already committed, or older than the last committed one."""

    slug = "stale-epoch"
    status = 409


class EpochsWaitingError(ProblemError):
    """Too many epochs of the stage wait for their commit."""

    slug = "epochs-waiting"
    status = 409


class UnavailableError(ProblemError):
    """A store does not answer; retry."""

    slug = "unavailable"
    status = 503


class GuardError(ProblemError):
    """The service rejects the request before it is read."""

    slug = "refused"
    status = 400


class MalformedHttpError(GuardError):
    """The request is not HTTP/1.1."""

    slug = "malformed-http"
    status = 400


class CrossSiteError(GuardError):
    """A page of another site may not change anything here."""

    slug = "cross-site"
    status = 403


class RequestTimeoutError(GuardError):
    """The request was not complete in time."""

    slug = "request-timeout"
    status = 408


class UriTooLongError(GuardError):
    """The address is too long."""

    slug = "uri-too-long"
    status = 414


class UnsupportedMediaTypeError(GuardError):
    """Bodies must be JSON, with its Content-Type."""

    slug = "unsupported-media-type"
    status = 415


class UnknownHostError(GuardError):
    """The Host is not a name of the service."""

    slug = "unknown-host"
    status = 421


class HeaderTooLargeError(GuardError):
    """The header is too large."""

    slug = "header-too-large"
    status = 431


class OverloadedError(GuardError):
    """The service is at a limit of its load; retry."""

    slug = "overloaded"
    status = 503


class StoreRefusedError(ProblemError):
    """The store cannot be used with these settings."""

    slug = "store-refused"
    status = 500


class CannotStartError(ProblemError):
    """The service cannot start with these settings."""

    slug = "cannot-start"
