"""The HTTP API, version 1, as typed calls: for drivers and executors alike.

Every request may be repeated. A repeated claim by the same holder is granted again. A repeated report or
commit changes nothing. Of two opened runs the newer one counts, perhaps that of the earlier attempt.
`StaleRun` names its holder. So each request is retried, within its caller's patience, while the service
is unavailable.
"""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Self, cast
from urllib.parse import urlencode

from spark_agent.client.credentials import key_source
from spark_agent.client.errors import (
    DeclaredOtherwise,
    Forbidden,
    LeaseConflict,
    PreconditionRequired,
    TooLarge,
    UnknownJob,
    free_in_ms,
)
from spark_agent.client.reports import (
    ClaimedReport,
    Json,
    Lease,
    RangeReport,
    Rank,
    StageProgress,
    claim_body,
    halves,
    named_bodies,
    report_bodies,
)
from spark_agent.client.responses import (
    AdviceAnswer,
    CommitsAnswer,
    EtaAnswer,
    ExplainAnswer,
    GroupAnswer,
    HistoryAnswer,
    JobAnswer,
    JobProblemsAnswer,
    JobsAnswer,
    OverviewAnswer,
    ProblemsAnswer,
    RangesAnswer,
    RetireAnswer,
    RunOutcome,
    RunsAnswer,
    SnapshotAnswer,
    ThrottleAnswer,
    WatermarkAnswer,
)
from spark_agent.client.spec import check_name, read_spec
from spark_agent.client.tracing import span
from spark_agent.client.transport import Transport
from spark_agent.client.watermark_wait import WaitResult, WatermarkWait
from spark_agent.clock import Clock, SystemClock
from spark_agent.exceptions import WrongName
from spark_agent.times import (
    MAX_MS,
    Duration,
    Instant,
    duration_ms,
    read_instant_ms,
)

_POLL_S: Final = 10
_LONG_POLL_PATIENCE_MS: Final = 5_000
"""Wait for the answer to a long poll, beyond the wait that it requests."""
_NO_COUNTS: Final[Mapping[str, int]] = {}


@dataclass(frozen=True, slots=True)
class StageWatermark:
    """A stage's watermarks in ms. None: not yet; `MAX_MS`: the end of time.

    The result of `Client.watermark` and `Client.watermarks`.

    >>> StageWatermark(input_ms=90, output_ms=60, status="active").final
    False
    >>> StageWatermark(input_ms=MAX_MS, output_ms=MAX_MS, status="final").final
    True
    """

    input_ms: int | None
    output_ms: int | None
    status: str
    generation: int = 0
    """The job's generation, which rises with each reset."""
    etag: str | None = field(default=None, compare=False)
    """Names the watermarks, for `Client.watermark_since`."""
    retired: int = field(default=0, compare=False)
    """Number of the stage's ranges that an operator has retired."""

    @property
    def final(self) -> bool:
        """True if nothing more leaves the stage."""
        return self.output_ms == MAX_MS

    @classmethod
    def read(cls, body: Mapping[str, Any], etag: str | None = None) -> StageWatermark:
        """Decode the JSON form."""
        return cls(
            body["input_watermark"],
            body["output_watermark"],
            body["status"],
            body.get("generation", 0),
            etag,
            body.get("ranges", {}).get("retired", 0),
        )


@dataclass(frozen=True, slots=True)
class Throttle:
    """Throttle advice for a job's sources."""

    groups: Sequence[GroupAnswer]
    shards: Mapping[str, Mapping[str, AdviceAnswer]]
    """By stage and shard: only shards that should pause or slow down."""
    etag: str | None = None


class Client:
    """A client of one service, safe for several threads. `with` closes its connections at the end.

    Every call is retried for `patience_ms` while the service is unavailable, and then raises
    `Unavailable`. `timeout_ms` limits a single attempt. A rejected request raises `Refused`, which is
    `Wrong`: a retry does not help. Times are ms since 1970, UTC; `None` is *no watermark yet*.

    The key is `key`, or in the file `key_file`, or from the environment
    (`spark_agent.client.credentials`). Raises `ValueError` if the URL is not one of HTTP.

    ```python
    client = Client("http://127.0.0.1:8000", patience_ms=10_000)
    client.declare("parcels", {"scans": {"shards": ["north"]}})
    rank = Rank(client.open_run("parcels", ["scans"], "reader-1"), epoch=0, attempt=0)
    lease = client.claim("parcels", "scans", None, holder="reader-1", ttl_ms=10_000, rank=rank)
    client.report("parcels", "scans", lease, {"north": RangeReport(1767225600000)})
    print(client.watermark("parcels", "scans").output_ms)    # 1767225600000
    ```
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
        self._clock = clock or SystemClock()
        self._http = Transport(
            url,
            key_source(key, key_file),
            timeout_ms=timeout_ms,
            patience_ms=patience_ms,
            connections=connections,
            clock=self._clock,
            jitter=jitter,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections that are not in use. A later call opens new ones."""
        self._http.close()

    def without_retries(self, timeout_ms: int) -> Self:
        """Return a client on the same connections that makes single attempts of this length."""
        made = copy(self)
        made.__dict__.update(_http=self._http.without_retries(timeout_ms))
        return made

    def ready(self) -> bool:
        """Return whether the service and its stores answer, without retrying."""
        return self._http.ready()

    def declare(
        self,
        job: str,
        stages: Mapping[str, Any],
        *,
        throttle: Mapping[str, Any] | None = None,
        replace: bool = False,
    ) -> Json:
        """Declare the job's stages, and the throttle of its sources; return the answer.

        With `replace`, the stages replace another specification. A key that may not declare jobs is
        sufficient for a job that is already declared with these stages; the declared policies then stay.

        Raises `DeclaredOtherwise` if the job is declared otherwise and `replace` is not set,
        `NotAllowed`.
        """
        path, body = _job(job), {"stages": dict(stages)}
        if throttle is not None:
            body["throttle"] = dict(throttle)
        try:
            return self._http.call("PUT", path, body)[0]
        except Forbidden as refusal:
            return self._declared(job, stages, refusal)
        except PreconditionRequired as refusal:
            if not replace:
                raise DeclaredOtherwise(job, refusal) from None
        etag = self._http.call("GET", path)[1]
        return self._http.call("PUT", path, body, {"If-Match": etag} if etag else {})[0]

    def _declared(self, job: str, stages: Mapping[str, Any], refusal: Forbidden) -> Json:
        """Return the job if it is already declared with these stages; else raise `refusal`."""
        try:
            stored = self._http.call("GET", _job(job))[0]
        except UnknownJob:
            why = f"job {job!r} is not declared yet"
        else:
            if read_spec(stored["stages"]) == read_spec(stages):
                return stored
            why = f"job {job!r} is declared with other stages"
        refusal.args = (f"{refusal}. And {why}: declare it with an admin key",)
        raise refusal

    def reset(self, job: str) -> None:
        """Start the job's next generation: its watermarks start over. Raises `UnknownJob`."""
        self._http.call("POST", f"{_job(job)}/reset")

    def generation(self, job: str) -> int:
        """Return the number of the job's generation, which rises with each reset."""
        return int(self._http.call("GET", _job(job))[0]["generation"])

    def open_run(
        self,
        job: str,
        stages: Sequence[str],
        holder: str,
        *,
        program: str | None = None,
        links: Mapping[str, str] | None = None,
    ) -> int:
        """Open a run of these stages, which fences all older ones; return its number.

        `program` is the name of the program, `links` are addresses of its pages, by name.
        """
        body: Json = {"stages": list(stages), "holder": holder}
        if program:
            body["program"] = program
        if links:
            body["links"] = dict(links)
        return int(self._http.call("POST", f"{_job(job)}/runs", body)[0]["run"])

    def end_run(self, job: str, run: int, outcome: RunOutcome, because: str = "") -> None:
        """End a run. Its leases are released; its watermarks stay. Raises `StaleRun`."""
        body = {"outcome": outcome, "because": because}
        self._http.call("POST", f"{_job(job)}/runs/{run:d}/end", body)

    def runs(self, job: str, *, stage: str | None = None, limit: int = 20) -> RunsAnswer:
        """Return the newest runs of a job, or of a stage, and their ends."""
        query = _query({"stage": stage, "limit": limit})
        return cast("RunsAnswer", self._http.call("GET", f"{_job(job)}/runs{query}")[0])

    def job_problems(self, job: str) -> JobProblemsAnswer:
        """Return every root cause of stages that stand still in a job, the worst first."""
        return cast("JobProblemsAnswer", self._http.call("GET", f"{_job(job)}/problems")[0])

    def problems(self, *, limit: int = 100) -> ProblemsAnswer:
        """Return the problems of all jobs that the key may read, the worst first."""
        return cast("ProblemsAnswer", self._http.call("GET", f"/v1/problems?limit={limit}")[0])

    def claim(
        self,
        job: str,
        stage: str,
        ranges: Sequence[str] | None,
        *,
        holder: str,
        ttl_ms: int,
        rank: Rank,
        watched: bool = True,
    ) -> Lease:
        """Claim ranges (None: all). With `watched=False`, the lease is not evidence that they are quiet.

        Raises `LeaseConflict` if none is granted, `StaleRun`.
        """
        names = "all" if ranges is None else list(ranges)
        body: Json = {"ranges": names, **claim_body(holder, ttl_ms, rank, watched=watched)}
        answer = self._http.call("POST", f"{_stage(job, stage)}/leases", body)[0]
        denied = tuple(each["range"] for each in answer["denied"])
        free_ms = free_in_ms(answer["denied"])
        return Lease(answer["token"], tuple(answer["granted"]), denied, free_ms)

    def renew(self, job: str, leases: Sequence[Lease]) -> Sequence[Lease]:
        """Renew leases; return those that are current, each with the ranges that it still has."""
        if not leases:
            return ()
        body = {"tokens": [lease.token for lease in leases]}
        answer = self._http.call("POST", f"{_job(job)}/leases/renew", body)[0]
        return [Lease(each["token"], tuple(each["ranges"]), ()) for each in answer["renewed"]]

    def release(self, job: str, leases: Sequence[Lease]) -> None:
        """Release leases. Reports under them stay valid."""
        body = {"tokens": [lease.token for lease in leases]}
        self._http.call("POST", f"{_job(job)}/leases/release", body)

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

        With `epoch`, the report takes effect when the epoch is committed. A report for all shards of a
        lease is packed: their names are not sent again. A body that a proxy rejects as too large is sent
        in smaller parts.

        Raises `LeaseLost`, `StaleRun`, `StaleEpoch`, `InputAhead`.
        """
        path, accepted = f"{_stage(job, stage)}/reports", 0
        of_epoch: dict[str, int] = {} if epoch is None else {"epoch": epoch}
        common: Json = {"token": lease.token, **of_epoch}
        if input_ms is not None:
            common["input_watermark"] = input_ms
        with span("report", job, stage=stage, ranges=len(ranges), **of_epoch):
            parts = deque(report_bodies(lease, ranges))
            while parts:
                answer = self._send_part(path, common, parts, ranges)
                accepted += 0 if answer is None else int(answer["accepted"])
        return accepted

    def claim_and_report(
        self,
        job: str,
        stage: str,
        ranges: Mapping[str, RangeReport],
        *,
        holder: str,
        ttl_ms: int,
        rank: Rank,
        epoch: int | None = None,
        watched: bool = True,
    ) -> ClaimedReport:
        """Claim ranges and report for the granted ones, in one atomic step of the service.

        With `epoch`, the report takes effect when the epoch is committed. With `watched=False`, the
        lease is not evidence that the ranges are quiet. More than 10,000 ranges, or a body that a proxy
        rejects as too large, take several steps.

        Raises `LeaseConflict` if none is granted, `StaleRun`, `StaleEpoch`. A step that raises has
        claimed nothing.
        """
        path, accepted = f"{_stage(job, stage)}/reports", 0
        granted: list[str] = []
        conflict: LeaseConflict | None = None
        of_epoch: dict[str, int] = {} if epoch is None else {"epoch": epoch}
        claim = claim_body(holder, ttl_ms, rank, watched=watched)
        common: Json = {"claim": claim, **of_epoch}
        with span("report", job, stage=stage, ranges=len(ranges), **of_epoch):
            parts = deque(named_bodies(ranges))
            while parts:
                try:
                    answer = self._send_part(path, common, parts, ranges)
                except LeaseConflict as error:
                    conflict = error
                    continue
                if answer is not None:
                    accepted += int(answer["accepted"])
                    granted += answer["granted"]
        if conflict is not None and not granted:
            raise conflict
        return ClaimedReport(accepted, tuple(granted))

    def _send_part(
        self, path: str, common: Json, parts: deque[Json], ranges: Mapping[str, RangeReport]
    ) -> Json | None:
        """Send the first of the parts of a report, and remove it; return the answer.

        None: the part was too large, and its halves take its place. Each half is a report of its own, so
        the order and a failure in between matter as little as with other parts.
        """
        part = parts.popleft()
        try:
            return self._http.call("POST", path, common | part)[0]
        except TooLarge:
            smaller = halves(part, ranges)
            if not smaller:
                raise
            parts.extendleft(reversed(smaller))
            return None

    def commit(
        self,
        job: str,
        run: int,
        epoch: int,
        stages: Mapping[str, StageProgress | None],
        *,
        late: Mapping[str, int] = _NO_COUNTS,
        corrections: Mapping[str, int] = _NO_COUNTS,
        planned_ms: int | None = None,
    ) -> dict[str, int]:
        """Commit an epoch; return the number of ranges of each stage that were applied.

        `stages` maps each stage to the progress that the epoch ran with; None for a source.
        `late` has the late rows of some of these stages that no report counts. `corrections` has the
        values of some of these stages that correct emitted ones. Both are counted once, however often
        the epoch is committed. `planned_ms` is the moment when the epoch's batch was planned, on the
        client's steady clock: until then, shards without a report were quiet. Each attempt sends the
        time since.
        """
        body: Json = {
            "run": run,
            "epoch": epoch,
            "stages": {
                name: _stage_commit(progress, late.get(name, 0), corrections.get(name, 0))
                for name, progress in stages.items()
            },
        }

        def with_age() -> Json:
            if planned_ms is None:
                return body
            return body | {"evidence_age_ms": max(0, self._clock.steady_ms() - planned_ms)}

        with span("commit", job, run=run, epoch=epoch):
            answer = self._http.call("POST", f"{_job(job)}/commits", with_age)[0]
        return {str(name): int(count) for name, count in answer["applied"].items()}

    def commits(self, job: str, stage: str) -> CommitsAnswer:
        """Return the run that a stage belongs to, and its last committed epoch."""
        return cast("CommitsAnswer", self._http.call("GET", f"{_stage(job, stage)}/commits")[0])

    def watermark(self, job: str, stage: str) -> StageWatermark:
        """Return a stage's watermarks."""
        return StageWatermark.read(*self._http.call("GET", f"{_stage(job, stage)}/watermark"))

    def watermark_since(
        self, job: str, stage: str, etag: str | None, *, wait_s: int = 0
    ) -> StageWatermark | None:
        """Return a stage's watermarks once they differ from those of `etag`; None: unchanged after
        `wait_s` seconds.
        """
        found = self._since(f"{_stage(job, stage)}/watermark", etag, wait_s)
        return None if found is None else StageWatermark.read(*found)

    def percentile_ms(self, job: str, stage: str, percentage: int) -> int | None:
        """Return a percentile watermark of a stage (ms); None: not yet."""
        path = f"{_stage(job, stage)}/watermark?percentile={percentage}"
        return cast("WatermarkAnswer", self._http.call("GET", path)[0])["output_watermark"]

    def watermarks(self, job: str) -> dict[str, StageWatermark]:
        """Return every stage's watermarks, in one consistent snapshot."""
        answer = self._http.call("GET", f"{_job(job)}/watermarks")[0]["watermarks"]
        return {name: StageWatermark.read(body) for name, body in answer.items()}

    def lowest_range(self, job: str, stage: str) -> Json | None:
        """Return the range of a stage with the lowest promise, in its JSON form."""
        path = f"{_stage(job, stage)}/ranges?limit=1&order=promise"
        ranges = self._http.call("GET", path)[0]["ranges"]
        return ranges[0] if ranges else None

    def jobs(self) -> JobsAnswer:
        """Return every job that the key may read."""
        return cast("JobsAnswer", self._http.call("GET", "/v1/jobs")[0])

    def overview(self, *, search: str = "", limit: int = 200) -> OverviewAnswer:
        """Return the jobs that the key may read, the worst first, with their slowest stages.

        `search`: only jobs with this text in their name.
        """
        query = urlencode({"search": search, "limit": limit})
        return cast("OverviewAnswer", self._http.call("GET", f"/v1/overview?{query}")[0])

    def job(self, job: str) -> tuple[JobAnswer, str]:
        """Return a job's specification, and its ETag for `apply`. Raises `UnknownJob`."""
        body, etag = self._http.call("GET", _job(job))
        return cast("JobAnswer", body), etag or ""

    def apply(self, job: str, spec: Mapping[str, Any], *, etag: str | None = None) -> JobAnswer:
        """Declare a job by its whole specification, in place of the specification with this ETag.

        Raises `PreconditionRequired` if the job has a specification and `etag` is not given,
        `ChangedMeanwhile` if the job's specification has another ETag.
        """
        headers = {"If-Match": etag} if etag else {}
        return cast("JobAnswer", self._http.call("PUT", _job(job), dict(spec), headers)[0])

    def check(self, job: str, spec: Mapping[str, Any]) -> None:
        """Check whether the service would accept a specification, without changing the job.

        Raises `Refused`, with the service's reason, if the service would reject it.
        """
        self._http.call("POST", f"{_job(job)}/check", dict(spec))

    def delete(self, job: str) -> None:
        """Delete a job, with all its watermarks. Raises `UnknownJob`."""
        self._http.call("DELETE", _job(job))

    def snapshot(self, job: str) -> SnapshotAnswer:
        """Return the watermarks of all stages of a job, at one instant."""
        return cast("SnapshotAnswer", self._http.call("GET", f"{_job(job)}/watermarks")[0])

    def show(
        self, job: str, stage: str, *, at_least_ms: int | None = None, wait_s: int = 0
    ) -> WatermarkAnswer:
        """Return the watermarks of a stage.

        With `at_least_ms`, once the output watermark has reached it, or after `wait_s` seconds.
        """
        path, headers = f"{_stage(job, stage)}/watermark", {}
        if at_least_ms is not None:
            path, headers = f"{path}?at_least={at_least_ms}", {"Prefer": f"wait={wait_s}"}
        return cast("WatermarkAnswer", self._http.call("GET", path, headers=headers)[0])

    def ranges(
        self, job: str, stage: str, *, limit: int, order: Literal["range", "promise"] = "promise"
    ) -> RangesAnswer:
        """Return the ranges of a stage: by default the ones with the lowest promises."""
        query = _query({"limit": limit, "order": order})
        return cast(
            "RangesAnswer", self._http.call("GET", f"{_stage(job, stage)}/ranges{query}")[0]
        )

    def history(
        self,
        job: str,
        stage: str,
        *,
        from_ms: int | None = None,
        until_ms: int | None = None,
        points: int | None = None,
    ) -> HistoryAnswer:
        """Return past watermarks of a stage, by wall time. None: the service's defaults."""
        query = _query({"from": from_ms, "to": until_ms, "points": points})
        return cast(
            "HistoryAnswer", self._http.call("GET", f"{_stage(job, stage)}/history{query}")[0]
        )

    def eta(self, job: str, stage: str, at: Instant) -> EtaAnswer:
        """Estimate when a stage's output watermark reaches an instant. See `wait_until` for its forms.

        Raises `WrongInstant` if `at` is invalid or ambiguous.
        """
        at_ms = read_instant_ms(at, name="at")
        return cast("EtaAnswer", self._http.call("GET", f"{_stage(job, stage)}/eta?at={at_ms}")[0])

    def explain(self, job: str, stage: str, *, limit: int = 10) -> ExplainAnswer:
        """Return the ranges that hold a stage's watermark back, and the reason."""
        path = f"{_stage(job, stage)}/explain?limit={limit}"
        return cast("ExplainAnswer", self._http.call("GET", path)[0])

    def retire(
        self, job: str, stage: str, range_name: str, because: str, *, dry_run: bool = False
    ) -> RetireAnswer:
        """Retire a range that is gone for good: its stage does not wait for it until its next report.

        Return the watermarks that move by it at once; with `dry_run`, without a change. Raises
        `UnknownRange`.
        """
        path = f"{_stage(job, stage)}/ranges/{_name('range', range_name)}/retire"
        body: Json = {"because": because, "dry_run": dry_run}
        return cast("RetireAnswer", self._http.call("POST", path, body)[0])

    def throttle(self, job: str) -> ThrottleAnswer:
        """Return the throttle advice for a job's sources."""
        return cast("ThrottleAnswer", self._http.call("GET", f"{_job(job)}/throttle")[0])

    def wait_until(
        self,
        job: str,
        stage: str,
        until: Instant,
        *,
        timeout: Duration = "1h",
        is_over: Callable[[], bool] = lambda: False,
    ) -> WaitResult:
        """Wait until a stage's output watermark reaches an instant: everything before it has arrived.

        `until` is a `datetime` (UTC, unless it has an offset), text such as `2026-01-01T01:00+01:00` or
        `1767225600s`, or ms. A bare number of nine to eleven digits may be seconds: `WrongInstant`.

        Returns once the watermark is there, or after the timeout: see `WaitResult.outcome`. While the
        service is unavailable, also at the start, requests are retried until the timeout. Another thread
        may end the wait with `is_over`, which is checked about every 15 seconds. Raises `Unavailable`
        (retry) if the service has never answered, `Wrong` (do not retry) if it rejects the request.
        """
        until_ms = read_instant_ms(until, name="until")
        wait = WatermarkWait(self, self._clock, job, stage, until_ms, _POLL_S)
        timeout_ms = duration_ms(timeout, name="timeout")
        return wait.wait(timeout_ms, lambda _: None, is_over=is_over)

    def throttle_since(
        self, job: str, etag: str | None = None, *, wait_s: int = 0
    ) -> Throttle | None:
        """Return the throttle advice for a job's sources once it differs from that of `etag`; None:
        unchanged after `wait_s` seconds.
        """
        found = self._since(f"{_job(job)}/throttle", etag, wait_s)
        return found and Throttle(found[0]["groups"], found[0]["shards"], found[1])

    def _since(self, path: str, etag: str | None, wait_s: int) -> tuple[Json, str | None] | None:
        """Return a body that has another ETag than this one, and its ETag; None: unchanged."""
        http, headers = self._http, {"If-None-Match": etag} if etag else {}
        if etag and wait_s:
            http = http.without_retries(wait_s * 1_000 + _LONG_POLL_PATIENCE_MS)
            headers["Prefer"] = f"wait={wait_s}"
        body, new_etag = http.call("GET", path, headers=headers)
        return (body, new_etag) if body else None

    def create_key(
        self, name: str, role: str, jobs: str = "*", expires_in_ms: int | None = None
    ) -> Json:
        """Create a key; return it with its secret, which cannot be shown again."""
        body: Json = {"name": name, "role": role, "jobs": jobs}
        if expires_in_ms is not None:
            body["expires_in_ms"] = expires_in_ms
        return self._http.call("POST", "/v1/keys", body)[0]

    def keys(self) -> list[Json]:
        """Return every key, without its secret."""
        return self._http.call("GET", "/v1/keys")[0]["keys"]

    def revoke_key(self, name: str) -> None:
        """Revoke a key."""
        self._http.call("DELETE", f"/v1/keys/{_name('key', name)}")

    def audit(self, *, limit: int, job: str | None = None, before: int | None = None) -> list[Json]:
        """Return the audit records, the newest first."""
        query = _query({"limit": limit, "job": job, "before": before})
        return self._http.call("GET", f"/v1/audit{query}")[0]["records"]


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
    """Return the address of a job. Raises `WrongName` for an invalid name."""
    return f"/v1/jobs/{_name('job', job)}"


def _stage(job: str, stage: str) -> str:
    """Return the address of a stage. Raises `WrongName` for an invalid name."""
    return f"{_job(job)}/stages/{_name('stage', stage)}"


def _stage_commit(progress: StageProgress | None, late: int, corrections: int) -> Json:
    """Return the JSON form of a stage's part of a commit.

    >>> _stage_commit(None, 0, 0), _stage_commit(StageProgress(5), 3, 0)
    ({}, {'input_watermark': 5, 'late': 3})
    """
    body = {} if progress is None else progress.body()
    # An older service rejects a member that it does not know.
    counts = {"late": late, "corrections": corrections}
    return body | {name: count for name, count in counts.items() if count}


def _query(wanted: Mapping[str, object]) -> str:
    given = {name: value for name, value in wanted.items() if value is not None}
    return f"?{urlencode(given)}" if given else ""


def _name(what: str, name: str) -> str:
    try:
        check_name(what, name)
    except ValueError as error:
        raise WrongName(str(error)) from None
    return name
