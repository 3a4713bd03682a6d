"""The HTTP API, version 1, as typed calls: for drivers and executors alike.

Every request here may be repeated: a claim by the same holder is granted again, a report or a commit
changes nothing the second time, and of two opened runs the newer one counts. So each request is
retried, within its caller's patience, if the service does not answer or is temporarily unavailable.
"""

from __future__ import annotations

import base64
import json
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Final, Literal, cast
from urllib.parse import urlencode

import urllib3
from urllib3.exceptions import HTTPError

from spark_agent import tracing
from spark_agent.answers import (
    MAX_MS,
    AdviceAnswer,
    EtaAnswer,
    ExplainAnswer,
    GroupAnswer,
    HistoryAnswer,
    JobAnswer,
    JobsAnswer,
    RangesAnswer,
    SnapshotAnswer,
    ThrottleAnswer,
    WatermarkAnswer,
)
from spark_agent.clock import Clock, SystemClock
from spark_agent.durations import Duration, duration_ms

# AggregatorError is for those who catch what the client raises.
from spark_agent.errors import (
    AggregatorError as AggregatorError,  # noqa: PLC0414
)
from spark_agent.errors import (
    ChangedMeanwhile,
    DeclaredOtherwise,
    Forbidden,
    InputAhead,
    LeaseConflict,
    LeaseLost,
    NoUsableKey,
    PreconditionRequired,
    Refused,
    StaleEpoch,
    StaleRun,
    Unauthenticated,
    Unavailable,
    UnknownJob,
    UnknownStage,
)
from spark_agent.errors import (
    NotAllowed as NotAllowed,  # noqa: PLC0414
)
from spark_agent.keys import UnusableKeyError, key_source
from spark_agent.polling import Waited, Waiting
from spark_agent.spec import check_name, read_spec
from spark_agent.tracing import span

Json = dict[str, Any]

_RETRYABLE_STATUSES: Final = frozenset({429, 500, 502, 503, 504})
_FIRST_PAUSE_MS: Final = 50
_LONGEST_PAUSE_MS: Final = 1_000
_RANGES_PER_REPORT: Final = 10_000
_POLL_S: Final = 10
_PATIENCE_MS: Final = 5_000
"""How much longer than the service takes to answer: it may be on its way up again."""


_REFUSALS: Final = {
    refusal.slug: refusal
    for refusal in (
        Unauthenticated,
        Forbidden,
        UnknownJob,
        UnknownStage,
        PreconditionRequired,
        ChangedMeanwhile,
        LeaseConflict,
        LeaseLost,
        StaleRun,
        StaleEpoch,
        InputAhead,
    )
}


@dataclass(frozen=True, slots=True, order=True)
class Rank:
    """Decides between two claims to a range: the greater rank takes over."""

    run: int
    epoch: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to report for `granted`, until it runs out or is outranked."""

    token: str
    granted: tuple[str, ...]
    denied: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StageProgress:
    """What an epoch of a keyed stage ran with. All its ranges have it in common."""

    input_ms: int | None
    """Its input watermark; None: there was none."""
    holds: Mapping[str, int] = field(default_factory=dict[str, int])
    """What they keep back of it, by component."""

    def body(self) -> Json:
        """Return its JSON form."""
        body: Json = {"input_watermark": self.input_ms}
        return body | {"holds": dict(self.holds)} if self.holds else body


@dataclass(frozen=True, slots=True)
class InFlight:
    """The event times (ms) of what a range has in flight, as a DataSketches KLL doubles sketch."""

    count: int
    """0: nothing is in flight."""
    event_times: bytes = b""

    def body(self) -> Json | None:
        """Return its JSON form."""
        if not self.count:
            return None
        return {"count": self.count, "event_times": base64.b64encode(self.event_times).decode()}


NOTHING_IN_FLIGHT: Final = InFlight(0)


@dataclass(frozen=True, slots=True)
class RangeReport:
    """The report for one range. `watermark_ms` and `final` are for sources only.

    `records` and `late` count the rows since the range's last report; None says nothing of them.
    `backlog` is how many are left to read, `pending` what is in flight; None says nothing of it.
    """

    watermark_ms: int | None = None
    final: bool = False
    idle: bool = False
    holds: Mapping[str, int] = field(default_factory=dict[str, int])
    records: int | None = None
    late: int | None = None
    backlog: int | None = None
    pending: InFlight | None = None

    def __add__(self, later: RangeReport) -> RangeReport:
        """Return one report instead of two of a source's shard, the second of which is the later one.

        >>> RangeReport(5, records=2) + RangeReport(3, records=1, late=1)
        RangeReport(watermark_ms=5, final=False, idle=False, holds={}, records=3, late=1, backlog=None, \
pending=None)
        """
        watermarks = [w for w in (self.watermark_ms, later.watermark_ms) if w is not None]
        return RangeReport(
            max(watermarks, default=None),
            self.final or later.final,
            later.idle,
            later.holds,
            _sum(self.records, later.records),
            _sum(self.late, later.late),
            later.backlog,
            later.pending or self.pending,
        )

    def body(self) -> Json:
        """Return its JSON form."""
        body: Json = {
            name: count
            for name, count in (
                ("records", self.records),
                ("late", self.late),
                ("backlog", self.backlog),
            )
            if count is not None
        }
        if self.pending is not None:
            body["pending"] = self.pending.body()
        if _speaks_of_a_shard(self):
            body["watermark"] = self.watermark_ms
        if self.final:
            body["final"] = True
        if self.idle:
            body["idle"] = True
        if self.holds:
            body["holds"] = dict(self.holds)
        return body


def _sum(one: int | None, other: int | None) -> int | None:
    return other if one is None else one + (other or 0)


def _bodies(lease: Lease, ranges: Mapping[str, RangeReport]) -> Iterator[Json]:
    """Yield what is said of ranges, in as many requests as it takes."""
    names = list(ranges)
    # Whoever reports for key ranges leaves out `watermark`, without which there is nothing to pack.
    if len(names) <= _RANGES_PER_REPORT and set(ranges) == set(lease.granted):
        reports = [ranges[name] for name in lease.granted]
        columns = _columns(reports)
        if columns is not None and any(_speaks_of_a_shard(each) for each in reports):
            yield {"columns": columns}
            return
    for first in range(0, len(names), _RANGES_PER_REPORT):
        some = names[first : first + _RANGES_PER_REPORT]
        yield {"ranges": {name: ranges[name].body() for name in some}}


def _speaks_of_a_shard(report: RangeReport) -> bool:
    said = (report.watermark_ms, report.backlog, report.pending)
    return report.final or any(each is not None for each in said)


def _columns(reports: Sequence[RangeReport]) -> Json | None:
    """Return shards' reports in packed form: one array for each member, in the order of the lease.

    None: they have no such form, since some say what others leave out.
    """
    columns: Json = {"watermark": [each.watermark_ms for each in reports]}
    for name in ("records", "late", "backlog"):
        counts = [getattr(each, name) for each in reports]
        if None not in counts:
            columns[name] = counts
        elif any(count is not None for count in counts):
            return None
    for name in ("idle", "final"):
        flags = [getattr(each, name) for each in reports]
        if any(flags):
            columns[name] = flags
    return None if any(each.holds or each.pending for each in reports) else columns


@dataclass(frozen=True, slots=True)
class StageWatermark:
    """A stage's watermarks in ms. None: none yet; `MAX_MS`: the end of time."""

    input_ms: int | None
    output_ms: int | None
    status: str
    etag: str | None = None

    @property
    def final(self) -> bool:
        """Whether nothing more leaves the stage."""
        return self.output_ms == MAX_MS

    @classmethod
    def read(cls, body: Mapping[str, Any], etag: str | None = None) -> StageWatermark:
        """Read it from its JSON form."""
        return cls(body["input_watermark"], body["output_watermark"], body["status"], etag)


@dataclass(frozen=True, slots=True)
class Throttle:
    """What a job's sources are asked to wait for."""

    groups: Sequence[GroupAnswer]
    shards: Mapping[str, Mapping[str, AdviceAnswer]]
    """By stage and shard: only those that are asked to do something."""
    etag: str | None = None


class Client:
    """A connection pool to one service. `timeout_ms` limits an attempt, `patience_ms` a whole call.

    The key is `key`, or in the file `key_file`, or where the environment says (`spark_agent.keys`).
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_ms: int = 2_000,
        patience_ms: int = 2_000,
        key: str | None = None,
        key_file: str | None = None,
        connections: int = 4,
        clock: Clock | None = None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._key = key_source(key, key_file)
        self._url = url.rstrip("/")
        self._timeout_ms = timeout_ms
        self._patience_ms = patience_ms
        self._clock = clock or SystemClock()
        self._jitter = jitter
        self._pool = urllib3.PoolManager(maxsize=connections, retries=False)

    def with_patience(self, patience_ms: int) -> Client:
        """Return a client on the same connections that waits so long for an answer."""
        made = copy(self)
        made.__dict__.update(_timeout_ms=patience_ms, _patience_ms=patience_ms)
        return made

    def declare(
        self,
        job: str,
        stages: Mapping[str, Any],
        *,
        throttle: Mapping[str, Any] | None = None,
        replace: bool = False,
    ) -> Json:
        """Declare the job's stages, and when its sources are throttled; return the answer.

        With `replace` they replace another specification. A key that may not declare jobs will do for a
        job that is already declared with these stages; its policies are then those of who declared it.

        Raises `DeclaredOtherwise` if it is declared otherwise and `replace` is not set, `NotAllowed`.
        """
        path, body = _job(job), {"stages": dict(stages)}
        if throttle is not None:
            body["throttle"] = dict(throttle)
        try:
            return self._call("PUT", path, body)[0]
        except Forbidden as refusal:
            return self._declared(job, stages, refusal)
        except PreconditionRequired as refusal:
            if not replace:
                raise DeclaredOtherwise(job, refusal) from None
        etag = self._call("GET", path)[1]
        return self._call("PUT", path, body, {"If-Match": etag} if etag else {})[0]

    def _declared(self, job: str, stages: Mapping[str, Any], refusal: Forbidden) -> Json:
        """Return the job if somebody else has declared it with these stages; else raise `refusal`."""
        try:
            stored = self._call("GET", _job(job))[0]
        except UnknownJob:
            why = f"job {job!r} is not declared yet"
        else:
            if read_spec(stored["stages"]) == read_spec(stages):
                return stored
            why = f"job {job!r} is declared with other stages"
        refusal.args = (f"{refusal}. And {why}: let somebody with an admin key declare it",)
        raise refusal

    def reset(self, job: str) -> None:
        """Start the job's next generation: its watermarks start over. Raises `UnknownJob`."""
        self._call("POST", f"{_job(job)}/reset")

    def generation(self, job: str) -> int:
        """Return the number of the job's generation, which rises with each reset."""
        return int(self._call("GET", _job(job))[0]["generation"])

    def open_run(self, job: str, stages: Sequence[str], holder: str) -> int:
        """Open a run of these stages, which fences all older ones; return its number."""
        body = {"stages": list(stages), "holder": holder}
        return int(self._call("POST", f"{_job(job)}/runs", body)[0]["run"])

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
        """Claim ranges (None: all). Raises `LeaseConflict` if none is granted, `StaleRun`."""
        body: Json = {
            "ranges": "all" if ranges is None else list(ranges),
            "holder": holder,
            "ttl_ms": ttl_ms,
            "run": rank.run,
            "epoch": rank.epoch,
            "attempt": rank.attempt,
        }
        answer = self._call("POST", f"{_stage(job, stage)}/leases", body)[0]
        denied = tuple(each["range"] for each in answer["denied"])
        return Lease(answer["token"], tuple(answer["granted"]), denied)

    def release(self, job: str, leases: Sequence[Lease]) -> None:
        """Give leases back. What was reported under them stays."""
        body = {"tokens": [lease.token for lease in leases]}
        self._call("POST", f"{_job(job)}/leases/release", body)

    def report(
        self,
        job: str,
        stage: str,
        lease: Lease,
        ranges: Mapping[str, RangeReport],
        *,
        epoch: int | None = None,
        input_ms: int | None = None,
    ) -> int:
        """Report for ranges under a lease; return how many were accepted.

        With `epoch` the report takes effect when that epoch is committed. A report for all shards of a
        lease is packed: their names are not sent again.

        Raises `LeaseLost`, `StaleRun`, `StaleEpoch`, `InputAhead`.
        """
        path, accepted = f"{_stage(job, stage)}/reports", 0
        common: Json = {"token": lease.token}
        if epoch is not None:
            common["epoch"] = epoch
        if input_ms is not None:
            common["input_watermark"] = input_ms
        of_epoch = {} if epoch is None else {"epoch": epoch}
        with span("report", job, stage=stage, ranges=len(ranges), **of_epoch):
            for said in _bodies(lease, ranges):
                accepted += int(self._call("POST", path, common | said)[0]["accepted"])
        return accepted

    def commit(
        self, job: str, run: int, epoch: int, stages: Mapping[str, StageProgress | None]
    ) -> dict[str, int]:
        """Commit an epoch; return how many ranges of each stage were applied.

        `stages` maps each stage to what the epoch ran with; None if it has no input.
        """
        body: Json = {
            "run": run,
            "epoch": epoch,
            "stages": {
                name: {} if progress is None else progress.body()
                for name, progress in stages.items()
            },
        }
        with span("commit", job, run=run, epoch=epoch):
            answer = self._call("POST", f"{_job(job)}/commits", body)[0]
        return {str(name): int(count) for name, count in answer["applied"].items()}

    def watermark(self, job: str, stage: str, etag: str | None = None) -> StageWatermark | None:
        """Return a stage's watermarks; None if they have not changed since `etag`."""
        headers = {"If-None-Match": etag} if etag else {}
        body, new_etag = self._call("GET", f"{_stage(job, stage)}/watermark", headers=headers)
        return StageWatermark.read(body, new_etag) if body else None

    def percentile_ms(self, job: str, stage: str, percentage: int) -> int | None:
        """Return a percentile watermark of a stage (ms); None: it has none yet."""
        path = f"{_stage(job, stage)}/watermark?percentile={percentage}"
        return cast("WatermarkAnswer", self._call("GET", path)[0])["output_watermark"]

    def watermarks(self, job: str) -> dict[str, StageWatermark]:
        """Return every stage's watermarks, in one consistent snapshot."""
        answer = self._call("GET", f"{_job(job)}/watermarks")[0]["watermarks"]
        return {name: StageWatermark.read(body) for name, body in answer.items()}

    def lowest_range(self, job: str, stage: str) -> Json | None:
        """Return the range of a stage that has promised least, in its JSON form."""
        path = f"{_stage(job, stage)}/ranges?limit=1&order=promise"
        ranges = self._call("GET", path)[0]["ranges"]
        return ranges[0] if ranges else None

    def jobs(self) -> JobsAnswer:
        """Return every job that the key may read."""
        return cast("JobsAnswer", self._call("GET", "/v1/jobs")[0])

    def job(self, job: str) -> tuple[JobAnswer, str]:
        """Return a job's specification, and its ETag for `apply`. Raises `UnknownJob`."""
        body, etag = self._call("GET", _job(job))
        return cast("JobAnswer", body), etag or ""

    def apply(self, job: str, spec: Mapping[str, Any], *, etag: str | None = None) -> JobAnswer:
        """Declare a job by its whole specification, in place of the one with this ETag.

        Raises `PreconditionRequired` if there is another one, `ChangedMeanwhile` if that is not the one
        with this ETag.
        """
        headers = {"If-Match": etag} if etag else {}
        return cast("JobAnswer", self._call("PUT", _job(job), dict(spec), headers)[0])

    def check(self, job: str, spec: Mapping[str, Any]) -> None:
        """Check whether the service would accept a specification, without changing the job.

        Raises `Refused` in the service's words if it would not.
        """
        self._call("POST", f"{_job(job)}/check", dict(spec))

    def delete(self, job: str) -> None:
        """Delete a job, with all its watermarks. Raises `UnknownJob`."""
        self._call("DELETE", _job(job))

    def snapshot(self, job: str) -> SnapshotAnswer:
        """Return the watermarks of all stages of a job, at one instant."""
        return cast("SnapshotAnswer", self._call("GET", f"{_job(job)}/watermarks")[0])

    def show(
        self, job: str, stage: str, *, at_least_ms: int | None = None, wait_s: int = 0
    ) -> WatermarkAnswer:
        """Return the watermarks of a stage.

        With `at_least_ms`, once its output watermark has reached that, or after `wait_s` seconds.
        """
        path, headers = f"{_stage(job, stage)}/watermark", {}
        if at_least_ms is not None:
            path, headers = f"{path}?at_least={at_least_ms}", {"Prefer": f"wait={wait_s}"}
        return cast("WatermarkAnswer", self._call("GET", path, headers=headers)[0])

    def ranges(
        self, job: str, stage: str, *, limit: int, order: Literal["range", "promise"] = "promise"
    ) -> RangesAnswer:
        """Return the ranges of a stage that hold it back most; or the first by their names."""
        asked = _query({"limit": limit, "order": order})
        return cast("RangesAnswer", self._call("GET", f"{_stage(job, stage)}/ranges{asked}")[0])

    def history(
        self,
        job: str,
        stage: str,
        *,
        from_ms: int | None = None,
        until_ms: int | None = None,
        points: int | None = None,
    ) -> HistoryAnswer:
        """Return where a stage's watermarks were, by wall time. None: the service's defaults."""
        asked = _query({"from": from_ms, "to": until_ms, "points": points})
        return cast("HistoryAnswer", self._call("GET", f"{_stage(job, stage)}/history{asked}")[0])

    def eta(self, job: str, stage: str, at_ms: int) -> EtaAnswer:
        """Return when a stage's output watermark will get to a time."""
        return cast("EtaAnswer", self._call("GET", f"{_stage(job, stage)}/eta?at={at_ms}")[0])

    def explain(self, job: str, stage: str, *, limit: int = 10) -> ExplainAnswer:
        """Return why a stage's watermark is where it is."""
        path = f"{_stage(job, stage)}/explain?limit={limit}"
        return cast("ExplainAnswer", self._call("GET", path)[0])

    def throttle(self, job: str) -> ThrottleAnswer:
        """Return what a job's sources are asked to wait for."""
        return cast("ThrottleAnswer", self._call("GET", f"{_job(job)}/throttle")[0])

    def wait_until(
        self,
        job: str,
        stage: str,
        at_ms: int,
        *,
        timeout: Duration = "1h",
        is_over: Callable[[], bool] = lambda: False,
    ) -> Waited:
        """Wait until a stage's output watermark has reached a time: everything before it has arrived.

        Returns as soon as it has, or after the timeout, and says which. A service that restarts
        meanwhile is waited for. Another thread may end it with `is_over`, which is looked at every 15
        seconds or so. Raises `AggregatorError` if it refuses the question, or has never answered it.
        """
        patient = self.with_patience(1_000 * _POLL_S + _PATIENCE_MS)
        asking = Waiting(patient, self._clock, job, stage, at_ms, _POLL_S)
        timeout_ms = duration_ms(timeout, name="timeout")
        return asking.wait(timeout_ms, lambda _: None, is_over=is_over)

    def throttle_since(self, job: str, etag: str | None = None) -> Throttle | None:
        """Return what a job's sources are asked to wait for; None if that is as at `etag`."""
        headers = {"If-None-Match": etag} if etag else {}
        body, new_etag = self._call("GET", f"{_job(job)}/throttle", headers=headers)
        return Throttle(body["groups"], body["shards"], new_etag) if body else None

    def create_key(
        self, name: str, role: str, jobs: str = "*", expires_in_ms: int | None = None
    ) -> Json:
        """Create a key; return it with its secret, which cannot be shown again."""
        body: Json = {"name": name, "role": role, "jobs": jobs}
        if expires_in_ms is not None:
            body["expires_in_ms"] = expires_in_ms
        return self._call("POST", "/v1/keys", body)[0]

    def keys(self) -> list[Json]:
        """Return every key, without its secret."""
        return self._call("GET", "/v1/keys")[0]["keys"]

    def revoke_key(self, name: str) -> None:
        """Revoke a key."""
        self._call("DELETE", f"/v1/keys/{_name('key', name)}")

    def audit(self, *, limit: int, job: str | None = None, before: int | None = None) -> list[Json]:
        """Return who changed what, the newest first."""
        asked = _query({"limit": limit, "job": job, "before": before})
        return self._call("GET", f"/v1/audit{asked}")[0]["records"]

    def ready(self) -> bool:
        """Return whether the service and its stores answer, without retrying."""
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
        """Send a request, and retry until it is answered or patience runs out; return body and ETag."""
        deadline_ms = self._clock.steady_ms() + self._patience_ms
        pause_ms = _FIRST_PAUSE_MS
        while True:
            left_ms = max(deadline_ms - self._clock.steady_ms(), 1)
            try:
                return self._try_once(method, path, body, headers or {}, left_ms)
            except (HTTPError, _RetryableError) as error:
                if self._clock.steady_ms() + pause_ms >= deadline_ms:
                    raise Unavailable(f"{method} {self._url}{path}: {error}") from error
            # Full jitter: tasks that lost the service together must not retry together.
            self._clock.pause(int(pause_ms * self._jitter()) + 1)
            pause_ms = min(2 * pause_ms, _LONGEST_PAUSE_MS)

    def _try_once(
        self, method: str, path: str, body: Json | None, headers: Mapping[str, str], left_ms: int
    ) -> tuple[Json, str | None]:
        answer = self._pool.request(
            method,
            f"{self._url}{path}",
            body=None if body is None else json.dumps(body).encode(),
            headers={
                "Content-Type": "application/json",
                **self._authorization(),
                **tracing.headers(),
                **headers,
            },
            timeout=min(self._timeout_ms, left_ms) / 1_000,
        )
        etag = answer.headers.get("ETag")
        if answer.status == 304:
            return {}, etag
        if answer.status in _RETRYABLE_STATUSES:
            raise _RetryableError(f"status {answer.status}")
        if answer.status >= 300 and answer.status < 400:
            location = answer.headers.get("Location", "another address")
            raise Unavailable(
                f"{method} {self._url}{path}: {answer.status} to {location}: give that as the URL"
            )
        content = _json_object(answer.data)
        if answer.status >= 400:
            raise _refusal(answer.status, content)
        return content, etag

    def _authorization(self) -> Mapping[str, str]:
        try:
            key = self._key.read()
        except UnusableKeyError as error:
            raise NoUsableKey(str(error)) from None
        return {} if key is None else {"Authorization": f"Bearer {key}"}


class _RetryableError(Exception):
    """An answer that is worth a retry."""


class _AnswerObject(dict[str, Any]):
    """A JSON object of an answer. If a required member is missing, the answer is unusable."""

    def __missing__(self, name: str) -> Any:  # noqa: ANN401
        raise Unavailable(f"the answer has no member {name!r}: is this tidegauge?")


def _json_object(data: bytes) -> Json:
    """Parse an answer. One that is not a JSON object, such as a proxy's error page, is retried."""
    if not data:
        return {}
    try:
        content = json.loads(data, object_pairs_hook=_AnswerObject)
    except ValueError:
        raise _RetryableError("the answer is not JSON") from None
    if not isinstance(content, dict):
        raise _RetryableError("the answer is not a JSON object")
    return cast("Json", content)


def _refusal(status: int, problem: Json) -> Refused:
    slug = str(problem.get("type", "")).rpartition("/")[2]
    return _REFUSALS.get(slug, Refused)(status, problem)


_clients: dict[tuple[int, str, int, str | None], Client] = {}


def shared_client(url: str, patience_ms: int, key_file: str | None = None) -> Client:
    """Return this process's client for a service, created on first use.

    Keyed by process: Python workers are forked from a daemon that may already have one, and two
    processes that share a socket would read each other's answers.
    """
    this = (os.getpid(), url, patience_ms, key_file)
    client = _clients.get(this)
    if client is None:
        client = _clients[this] = Client(
            url, patience_ms=patience_ms, timeout_ms=patience_ms, key_file=key_file
        )
    return client


def _job(job: str) -> str:
    """Return the address of a job. Raises `ValueError` for a name that would lead elsewhere."""
    return f"/v1/jobs/{_name('job', job)}"


def _stage(job: str, stage: str) -> str:
    """Return the address of a stage. Raises `ValueError` likewise."""
    return f"{_job(job)}/stages/{_name('stage', stage)}"


def _query(wanted: Mapping[str, object]) -> str:
    given = {name: value for name, value in wanted.items() if value is not None}
    return f"?{urlencode(given)}" if given else ""


def _name(what: str, name: str) -> str:
    check_name(what, name)
    return name
