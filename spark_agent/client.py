"""The HTTP contract, version 1, as typed calls: for drivers and executors alike.

Every call here may be repeated: a claim by the same holder is granted again, a report and a commit
change nothing the second time, and of two runs opened the newer one counts. So each is retried,
within the time that its caller has, when the service does not answer or says that it cannot now.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, cast

import urllib3
from urllib3.exceptions import HTTPError

from spark_agent.clock import Clock, SystemClock

MAX_MS: Final = 9_223_372_036_854_775_807
"""The end of time: nothing more will come."""

Json = dict[str, Any]

_RETRYABLE_STATUSES: Final = frozenset({429, 500, 502, 503, 504})
_FIRST_PAUSE_MS: Final = 50
_LONGEST_PAUSE_MS: Final = 1_000
_RANGES_PER_REPORT: Final = 10_000


class AggregatorError(Exception):
    """The service did not do what it was asked for."""


class Unavailable(AggregatorError):  # noqa: N818  (it names a state, not a fault of the caller)
    """The service gave no usable answer within the time that the caller had."""


class Refused(AggregatorError):  # noqa: N818
    """The service understood and said no; nothing was changed. `problem` is what it said."""

    slug: ClassVar[str] = ""

    def __init__(self, status: int, problem: Mapping[str, Any]) -> None:
        title = str(problem.get("title", "refused"))
        super().__init__(f"{status}: {title} {problem.get('detail', '')}".strip())
        self.status = status
        self.problem = problem


class UnknownJob(Refused):
    """The service knows no job of this name."""

    slug = "unknown-job"


class PreconditionRequired(Refused):
    """The job is declared otherwise, and nobody said that it may be replaced."""

    slug = "precondition-required"


class DeclaredOtherwise(PreconditionRequired):
    """The same, in the words of whoever declares a job through the agent."""

    def __init__(self, job: str, refusal: Refused) -> None:
        super().__init__(refusal.status, refusal.problem)
        message = (
            f"job {job!r} is declared with other stages than these: say Pipeline(…, replace=True) to "
            f"put these in their place, or give this pipeline a job name of its own"
        )
        self.args = (message,)


class LeaseConflict(Refused):
    """None of the ranges was granted."""

    slug = "lease-conflict"


class LeaseLost(Refused):
    """The token no longer covers any of the ranges."""

    slug = "lease-lost"


class StaleRun(Refused):
    """A newer run has taken over the stage."""

    slug = "stale-run"


class StaleEpoch(Refused):
    """The epoch is at or below the last committed one."""

    slug = "stale-epoch"


class InputAhead(Refused):
    """The input watermark was never published."""

    slug = "input-ahead"


_REFUSALS: Final = {
    refusal.slug: refusal
    for refusal in (
        UnknownJob,
        PreconditionRequired,
        LeaseConflict,
        LeaseLost,
        StaleRun,
        StaleEpoch,
        InputAhead,
    )
}


@dataclass(frozen=True, slots=True, order=True)
class Rank:
    """What decides between two claims to one range: the greater takes over."""

    run: int
    epoch: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to report for `granted`, until it runs out or somebody outranks it."""

    token: str
    granted: tuple[str, ...]
    denied: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RangeReport:
    """What is said of one range. `watermark_ms`, `final` and `idle` are a source's words."""

    watermark_ms: int | None = None
    final: bool = False
    idle: bool = False
    holds: Mapping[str, int] = field(default_factory=dict[str, int])

    def body(self) -> Json:
        """Write it as the contract has it."""
        body: Json = {}
        if self.watermark_ms is not None:
            body["watermark"] = self.watermark_ms
        if self.final:
            body["final"] = True
        if self.idle:
            body["idle"] = True
        if self.holds:
            body["holds"] = dict(self.holds)
        return body


@dataclass(frozen=True, slots=True)
class StageWatermark:
    """Where a stage is. Watermarks in ms; None: none yet; `MAX_MS`: the end of time."""

    input_ms: int | None
    output_ms: int | None
    status: str
    etag: str | None = None

    @property
    def final(self) -> bool:
        """Nothing more comes out of the stage."""
        return self.output_ms == MAX_MS

    @classmethod
    def read(cls, body: Mapping[str, Any], etag: str | None = None) -> StageWatermark:
        """Take it from the contract's form."""
        return cls(body["input_watermark"], body["output_watermark"], body["status"], etag)


class Client:
    """One connection pool to one service. `timeout_ms` bounds a try, `patience_ms` a whole call."""

    def __init__(
        self,
        url: str,
        *,
        timeout_ms: int = 2_000,
        patience_ms: int = 2_000,
        clock: Clock | None = None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._url = url.rstrip("/")
        self._timeout_ms = timeout_ms
        self._patience_ms = patience_ms
        self._clock = clock or SystemClock()
        self._jitter = jitter
        self._pool = urllib3.PoolManager(maxsize=4, retries=False)

    def declare(self, job: str, stages: Mapping[str, Any], *, replace: bool = False) -> Json:
        """Store the job's stages; return the answer. `replace` takes the place of another layout.

        Raises `DeclaredOtherwise` if the job is stored otherwise and `replace` is not given.
        """
        path, body = f"/v1/jobs/{job}", {"stages": dict(stages)}
        try:
            return self._call("PUT", path, body)[0]
        except PreconditionRequired as refusal:
            if not replace:
                raise DeclaredOtherwise(job, refusal) from None
        etag = self._call("GET", path)[1]
        return self._call("PUT", path, body, {"If-Match": etag} if etag else {})[0]

    def reset(self, job: str) -> None:
        """Begin the job's next generation: its watermarks start over. Raises `UnknownJob`."""
        self._call("POST", f"/v1/jobs/{job}/reset")

    def generation(self, job: str) -> int:
        """Ask how many times the job has started over, the first time included."""
        return int(self._call("GET", f"/v1/jobs/{job}")[0]["generation"])

    def open_run(self, job: str, stages: Sequence[str], holder: str) -> int:
        """Begin a run of these stages, which fences every older one; return its number."""
        body = {"stages": list(stages), "holder": holder}
        return int(self._call("POST", f"/v1/jobs/{job}/runs", body)[0]["run"])

    def claim(
        self,
        job: str,
        stage: str,
        ranges: Sequence[str] | None,
        *,
        holder: str,
        ttl_ms: int,
        rank: Rank,
    ) -> Lease:
        """Ask for ranges (None: for all). Raises `LeaseConflict` if none is granted, `StaleRun`."""
        body: Json = {
            "ranges": "all" if ranges is None else list(ranges),
            "holder": holder,
            "ttl_ms": ttl_ms,
            "run": rank.run,
            "epoch": rank.epoch,
            "attempt": rank.attempt,
        }
        answer = self._call("POST", f"/v1/jobs/{job}/stages/{stage}/leases", body)[0]
        denied = tuple(each["range"] for each in answer["denied"])
        return Lease(answer["token"], tuple(answer["granted"]), denied)

    def report(
        self,
        job: str,
        stage: str,
        token: str,
        ranges: Mapping[str, RangeReport],
        *,
        epoch: int | None = None,
        input_ms: int | None = None,
    ) -> int:
        """Report for ranges under a lease; return how many were accepted.

        With `epoch` it waits for the commit.
        Raises `LeaseLost`, `StaleRun`, `StaleEpoch`, `InputAhead`.
        """
        path, accepted = f"/v1/jobs/{job}/stages/{stage}/reports", 0
        names = list(ranges)
        for first in range(0, len(names), _RANGES_PER_REPORT):
            some = names[first : first + _RANGES_PER_REPORT]
            body: Json = {"token": token, "ranges": {name: ranges[name].body() for name in some}}
            if epoch is not None:
                body["epoch"] = epoch
            if input_ms is not None:
                body["input_watermark"] = input_ms
            accepted += int(self._call("POST", path, body)[0]["accepted"])
        return accepted

    def commit(
        self, job: str, run: int, epoch: int, stages: Mapping[str, int | None]
    ) -> dict[str, int]:
        """Declare an epoch done; return how many ranges of each stage were applied.

        `stages` gives the input watermark (ms) that a stage ran with; None where there is none.
        """
        body: Json = {
            "run": run,
            "epoch": epoch,
            "stages": {
                name: {} if input_ms is None else {"input_watermark": input_ms}
                for name, input_ms in stages.items()
            },
        }
        answer = self._call("POST", f"/v1/jobs/{job}/commits", body)[0]
        return {str(name): int(count) for name, count in answer["applied"].items()}

    def watermark(self, job: str, stage: str, etag: str | None = None) -> StageWatermark | None:
        """Ask where a stage is; None if that is still where `etag` had it."""
        headers = {"If-None-Match": etag} if etag else {}
        body, new_etag = self._call(
            "GET", f"/v1/jobs/{job}/stages/{stage}/watermark", headers=headers
        )
        return StageWatermark.read(body, new_etag) if body else None

    def watermarks(self, job: str) -> dict[str, StageWatermark]:
        """Ask where every stage is, in one consistent snapshot."""
        answer = self._call("GET", f"/v1/jobs/{job}/watermarks")[0]["watermarks"]
        return {name: StageWatermark.read(body) for name, body in answer.items()}

    def lowest_range(self, job: str, stage: str) -> Json | None:
        """Ask which range of a stage has promised least, as the contract has it."""
        path = f"/v1/jobs/{job}/stages/{stage}/ranges?limit=1&order=promise"
        ranges = self._call("GET", path)[0]["ranges"]
        return ranges[0] if ranges else None

    def ready(self) -> bool:
        """Ask once whether the service and its stores answer."""
        try:
            return self._pool.request("GET", f"{self._url}/readyz", timeout=1.0).status == 200
        except HTTPError:
            return False

    def _call(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[Json, str | None]:
        """Ask until there is an answer or the patience is at its end; return body and ETag."""
        deadline_ms = self._clock.steady_ms() + self._patience_ms
        pause_ms = _FIRST_PAUSE_MS
        while True:
            left_ms = max(deadline_ms - self._clock.steady_ms(), 1)
            try:
                return self._try_once(method, path, body, headers or {}, left_ms)
            except (HTTPError, _RetryableError) as error:
                if self._clock.steady_ms() + pause_ms >= deadline_ms:
                    raise Unavailable(f"{method} {self._url}{path}: {error}") from error
            # Full jitter: tasks that lost the service together must not come back together.
            self._clock.pause(int(pause_ms * self._jitter()) + 1)
            pause_ms = min(2 * pause_ms, _LONGEST_PAUSE_MS)

    def _try_once(
        self, method: str, path: str, body: Json | None, headers: Mapping[str, str], left_ms: int
    ) -> tuple[Json, str | None]:
        answer = self._pool.request(
            method,
            f"{self._url}{path}",
            body=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json", **headers},
            timeout=min(self._timeout_ms, left_ms) / 1_000,
        )
        etag = answer.headers.get("ETag")
        if answer.status == 304:
            return {}, etag
        if answer.status in _RETRYABLE_STATUSES:
            raise _RetryableError(f"status {answer.status}")
        content = _json_object(answer.data)
        if answer.status >= 400:
            raise _refusal(answer.status, content)
        return content, etag


class _RetryableError(Exception):
    """An answer that says: not now."""


class _AnswerObject(dict[str, Any]):
    """An object of an answer. What the contract has and it has not makes it no answer at all."""

    def __missing__(self, name: str) -> Any:  # noqa: ANN401
        raise Unavailable(f"the answer has no member {name!r}: is this tidegauge?")


def _json_object(data: bytes) -> Json:
    """Read an answer; one that is no JSON object counts as no answer (a proxy's page, say)."""
    if not data:
        return {}
    try:
        content = json.loads(data, object_pairs_hook=_AnswerObject)
    except ValueError:
        raise _RetryableError("the answer is not JSON") from None
    if not isinstance(content, dict):
        raise _RetryableError("the answer is no JSON object")
    return cast("Json", content)


def _refusal(status: int, problem: Json) -> Refused:
    slug = str(problem.get("type", "")).rpartition("/")[2]
    return _REFUSALS.get(slug, Refused)(status, problem)


_clients: dict[tuple[int, str, int], Client] = {}


def shared_client(url: str, patience_ms: int) -> Client:
    """Return this process's client for a service, made when it is first asked for.

    Keyed by process: Python workers are forked from a daemon that may have one already, and two
    processes that share a socket would read each other's answers.
    """
    key = (os.getpid(), url, patience_ms)
    client = _clients.get(key)
    if client is None:
        client = _clients[key] = Client(url, patience_ms=patience_ms, timeout_ms=patience_ms)
    return client
