"""The client against a real server that answers whatever a service, or something before it, may."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

import spark_agent
from service.api import requests
from spark_agent import arguments
from spark_agent.client.client import Client, shared_client
from spark_agent.client.errors import (
    InputAhead,
    LeaseConflict,
    LeaseLost,
    PreconditionRequired,
    Refused,
    StaleEpoch,
    StaleRun,
    UnknownJob,
)
from spark_agent.client.reports import Lease, RangeReport, Rank, StageProgress
from spark_agent.exceptions import NotServing, Unavailable
from tests.support.byte_columns import as_bytes
from tests.unit.agent.answers import Answer, Answers, FakeClock, problem

GRANTED = {"token": "t", "fence": 7, "expires_in_ms": 10_000, "granted": ["a"], "denied": []}


def client(server: Answers, clock: FakeClock, patience_ms: int = 2_000) -> Client:
    return Client(server.url, patience_ms=patience_ms, clock=clock, jitter=lambda: 1.0)


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_it_asks_again_what_could_not_be_answered(status: int) -> None:
    clock = FakeClock()
    with Answers(Answer(status), Answer(status), Answer(201, {"run": 7})) as server:
        assert client(server, clock).open_run("j", ["s"], "me") == 7
    assert len(server.asked) == 3
    assert clock.pauses_ms == [51, 101], "longer each time"


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize(
    ("retry_after", "pause_ms"),
    [
        ("1", 1_051),
        ("0", 51),
        ("Thu, 01 Jan 1970 00:16:41 GMT", 1_051),
        ("Thursday, 01-Jan-70 00:16:41 GMT", 1_051),
        ("Thu Jan  1 00:16:41 1970", 1_051),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 51),
        ("soon", 51),
        ("-1", 51),
        ("1.5", 51),
        ("\u00b2", 51),
        ("9" * 5_000, 51),
        ("Thu, 01 Jan 99999 00:00:00 GMT", 51),
    ],
)
def test_it_waits_as_long_as_an_answer_requests(
    status: int, retry_after: str, pause_ms: int
) -> None:
    clock = FakeClock(now_ms=1_000_000)
    refused = Answer(status, headers={"Retry-After": retry_after})
    with Answers(refused, Answer(201, {"run": 7})) as server:
        assert client(server, clock).open_run("j", ["s"], "me") == 7
    assert len(server.asked) == 2
    assert clock.pauses_ms == [pause_ms]


@pytest.fixture
def far_zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process 14 hours ahead of UTC."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Pacific/Kiritimati")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("far_zone")
def test_a_requested_date_is_one_of_utc_wherever_the_client_runs() -> None:
    clock = FakeClock(now_ms=1_000_000)
    answers = [
        Answer(503, headers={"Retry-After": date})
        for date in ("Thu Jan  1 00:16:41 1970", "Thu, 01 Jan 1970 00:16:43 GMT")
    ]
    with Answers(*answers, Answer(201, {"run": 7})) as server:
        client(server, clock, patience_ms=9_000).open_run("j", ["s"], "me")
    assert clock.pauses_ms == [1_051, 2_050]


@pytest.mark.parametrize("retry_after", ["2", "Thu, 01 Jan 2070 00:00:00 GMT"])
def test_a_retry_that_is_requested_after_the_deadline_comes_at_the_client_s_own_pace(
    retry_after: str,
) -> None:
    clock = FakeClock()
    with (
        Answers(Answer(503, headers={"Retry-After": retry_after})) as server,
        pytest.raises(Unavailable, match="status 503"),
    ):
        client(server, clock, patience_ms=2_000).open_run("j", ["s"], "me")
    assert clock.pauses_ms == [51, 101, 201, 401, 801]


def test_requested_pauses_count_against_the_patience() -> None:
    clock = FakeClock()
    with (
        Answers(Answer(503, headers={"Retry-After": "1"})) as server,
        pytest.raises(Unavailable, match="status 503"),
    ):
        client(server, clock, patience_ms=4_000).open_run("j", ["s"], "me")
    assert clock.pauses_ms == [1_051, 1_101, 1_201, 401], "the last one at its own pace"


def test_it_takes_a_page_of_a_proxy_for_no_answer() -> None:
    with Answers(Answer(200, "<html>"), Answer(200, "[]"), Answer(201, {"run": 7})) as server:
        assert client(server, FakeClock()).open_run("j", ["s"], "me") == 7


def test_an_answer_that_lacks_what_it_must_have_is_none() -> None:
    """Else a task would fail for what stands in the service's place."""
    with Answers(Answer(200, {"message": "welcome"})) as server:
        asking = client(server, FakeClock())
        with pytest.raises(Unavailable, match="no member 'denied': is this tidegauge"):
            asking.claim("j", "s", ["a"], holder="me", ttl_ms=5_000, rank=Rank(3, 2, 1))
        with pytest.raises(Unavailable, match="no member 'input_watermark'"):
            asking.watermark("j", "s")


@pytest.mark.parametrize(
    "url",
    [
        *("127.0.0.1:8000", "", "ftp://127.0.0.1", "http://", "http://a b:80"),
        *("http://::1:8000", "http://[::1", "http://h:99999", "http://h:x", "http://h/?job=j"),
    ],
)
def test_a_url_that_is_no_service_s_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="write http://HOST:PORT"):
        Client(url)


@pytest.mark.parametrize("path", ["/v1", "/v1/", "/below/v1"])
def test_a_url_with_the_path_of_the_api_is_refused(path: str) -> None:
    """Requests went to /v1/v1/jobs."""
    with pytest.raises(ValueError, match="leave /v1 out"):
        Client(f"http://h:80{path}")


@pytest.mark.parametrize(
    "url",
    [
        "http://me:hush@h:80",
        "http://hush@h",
        "http://me:hush@h:x",
        "http://me:hu/sh@h",
        "me:hush@h",
    ],
)
def test_a_url_with_a_login_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(ValueError, match="put the key into a file") as caught:
        Client(url)
    assert "hush" not in str(caught.value)


def test_its_patience_ends() -> None:
    clock = FakeClock()
    with Answers(Answer(503)) as server, pytest.raises(Unavailable, match="status 503"):
        client(server, clock, patience_ms=500).open_run("j", ["s"], "me")
    assert sum(clock.pauses_ms) <= 500


def test_a_service_that_cannot_serve_gives_its_reason() -> None:
    """It was taken for a wrong address."""
    problem = {"type": "/problems/unavailable", "detail": "the live store does not answer"}
    asked = pytest.raises(NotServing, match="status 503: the live store does not answer")
    with Answers(Answer(503, problem)) as server, asked:
        client(server, FakeClock(), patience_ms=100).open_run("j", ["s"], "me")


def test_nobody_there() -> None:
    with Answers(Answer()) as gone:
        pass
    with pytest.raises(Unavailable, match="/v1/jobs/j/runs"):
        client(gone, FakeClock(), patience_ms=100).open_run("j", ["s"], "me")


@pytest.mark.parametrize(
    ("status", "slug", "kind"),
    [
        (404, "unknown-job", UnknownJob),
        (409, "lease-conflict", LeaseConflict),
        (409, "stale-run", StaleRun),
        (409, "stale-epoch", StaleEpoch),
        (409, "input-ahead", InputAhead),
        (410, "lease-lost", LeaseLost),
        (428, "precondition-required", PreconditionRequired),
        (422, "invalid-report", Refused),
        (418, "unheard-of", Refused),
    ],
)
def test_a_refusal_is_final_and_has_a_type(status: int, slug: str, kind: type[Refused]) -> None:
    with Answers(problem(status, slug)) as server, pytest.raises(kind) as caught:
        client(server, FakeClock()).open_run("j", ["s"], "me")
    assert len(server.asked) == 1
    assert type(caught.value) is kind
    assert str(caught.value) == f"{status}: No. so it is"
    assert caught.value.problem["detail"] == "so it is"


def test_a_claim_says_who_and_when() -> None:
    with Answers(Answer(201, GRANTED)) as server:
        lease = client(server, FakeClock()).claim(
            "j", "s", None, holder="me", ttl_ms=5_000, rank=Rank(3, 2, 1)
        )
    assert (lease.token, lease.granted, lease.denied) == ("t", ("a",), ())
    [asked] = server.asked
    assert (asked.method, asked.path) == ("POST", "/v1/jobs/j/stages/s/leases")
    assert asked.body == {
        "ranges": "all",
        "holder": "me",
        "ttl_ms": 5_000,
        "run": 3,
        "epoch": 2,
        "attempt": 1,
    }


def test_a_report_beyond_the_limit_goes_in_parts() -> None:
    ranges = {f"shard-{i}": RangeReport(i) for i in range(10_001)}
    lease = Lease("t", tuple(ranges), ())
    with Answers(Answer(200, {"accepted": 10_000}), Answer(200, {"accepted": 1})) as server:
        assert client(server, FakeClock()).report("j", "s", lease, ranges, epoch=4) == 10_001
    first, second = (asked.body for asked in server.asked)
    assert len(first["ranges"]) == 10_000
    assert second == {"token": "t", "epoch": 4, "ranges": {"shard-10000": {"watermark": 10_000}}}


def test_a_report_for_all_shards_of_a_lease_sends_no_names() -> None:
    a, b = RangeReport(5, records=2, late=0), RangeReport(3, records=0, late=1)
    with Answers(Answer(200, {"accepted": 1})) as server:
        http, lease = client(server, FakeClock()), Lease("t", ("b", "a"), ("c",))
        http.report("j", "s", lease, {"a": a, "b": b}, epoch=4)
        http.report("j", "s", lease, {"a": RangeReport(final=True), "b": RangeReport(idle=True)})
        http.report("j", "s", lease, {"a": a})
        http.report("j", "s", lease, {"a": a, "b": RangeReport(3)})
        http.report("j", "s", lease, {"a": RangeReport(), "b": RangeReport()}, input_ms=7)
    bodies = [asked.body for asked in server.asked]
    watermark = as_bytes([3, 5])
    packed = {"watermark": watermark, "records": [0, 2], "late": [1, 0]}
    assert bodies == [
        {"token": "t", "epoch": 4, "columns": packed},
        {
            "token": "t",
            "columns": {"watermark": as_bytes([None, None]), "idle": "AQA=", "final": "AAE="},
        },
        {"token": "t", "ranges": {"a": {"watermark": 5, "records": 2, "late": 0}}},
        {
            "token": "t",
            "ranges": {"a": {"watermark": 5, "records": 2, "late": 0}, "b": {"watermark": 3}},
        },
        {"token": "t", "input_watermark": 7, "ranges": {"a": {}, "b": {}}},
    ]


def test_what_is_no_64_bit_integer_is_left_to_the_service() -> None:
    with Answers(Answer(200, {"accepted": 1})) as server:
        lease = Lease("t", ("a",), ())
        client(server, FakeClock()).report("j", "s", lease, {"a": RangeReport(2**63)})
    assert server.asked[0].body == {"token": "t", "columns": {"watermark": [2**63]}}


def test_a_commit_gives_the_input_only_where_there_is_one() -> None:
    progress = {"s": None, "k": StageProgress(5), "join": StageProgress(5, {"join": 3})}
    with Answers(Answer(200, {"applied": {"s": 1, "k": 2}})) as server:
        applied = client(server, FakeClock()).commit("j", 3, 9, progress)
    assert applied == {"s": 1, "k": 2}
    assert server.asked[0].body == {
        "run": 3,
        "epoch": 9,
        "stages": {
            "s": {},
            "k": {"input_watermark": 5},
            "join": {"input_watermark": 5, "holds": {"join": 3}},
        },
    }


def test_a_commit_says_how_many_rows_came_late_only_if_some_did() -> None:
    progress = {"s": None, "k": StageProgress(5), "join": StageProgress(5)}
    with Answers(Answer(200, {"applied": {}})) as server:
        client(server, FakeClock()).commit("j", 3, 9, progress, late={"s": 2, "k": 4, "join": 0})
    assert server.asked[0].body["stages"] == {
        "s": {"late": 2},
        "k": {"input_watermark": 5, "late": 4},
        "join": {"input_watermark": 5},
    }


def test_each_attempt_of_a_commit_has_the_age_of_its_evidence() -> None:
    clock = FakeClock()
    with Answers(Answer(503), Answer(503), Answer(200, {"applied": {}})) as server:
        # The wall clock that is set back changes nothing.
        planned_ms = clock.steady_ms() - 700
        clock.set_ahead(-60_000)
        client(server, clock).commit("j", 3, 9, {"s": None}, planned_ms=planned_ms)
        client(server, clock).commit("j", 3, 9, {"s": None}, planned_ms=clock.steady_ms() + 1)
    assert [asked.body["evidence_age_ms"] for asked in server.asked] == [700, 751, 852, 0]


def test_a_commit_gives_corrections_only_where_there_are_some() -> None:
    progress = {"s": None, "k": StageProgress(5), "join": StageProgress(5)}
    corrections = {"k": 4, "join": 0}
    with Answers(Answer(200, {"applied": {}})) as server:
        client(server, FakeClock()).commit(
            "j", 3, 9, progress, late={"s": 2, "k": 1}, corrections=corrections
        )
    assert server.asked[0].body["stages"] == {
        "s": {"late": 2},
        "k": {"input_watermark": 5, "late": 1, "corrections": 4},
        "join": {"input_watermark": 5},
    }


def test_a_throttle_is_declared_with_the_stages_also_where_it_replaces_another() -> None:
    answers = (problem(428, "precondition-required"), Answer(200, {}, {"ETag": '"1-4"'}), Answer())
    stages, throttle = {"s": {"shards": ["0"]}}, {"groups": [{"stages": ["s"], "max_drift_ms": 5}]}
    with Answers(*answers) as server:
        client(server, FakeClock()).declare("j", stages, throttle=throttle, replace=True)
    body = {"stages": stages, "throttle": throttle}
    assert [asked.body for asked in server.asked] == [body, None, body]
    with Answers(Answer()) as server:
        client(server, FakeClock()).declare("j", stages)
    assert server.asked[0].body == {"stages": stages}


def test_replacing_a_pipeline_names_the_one_that_is_replaced() -> None:
    answers = (problem(428, "precondition-required"), Answer(200, {}, {"ETag": '"1-4"'}), Answer())
    with Answers(*answers) as server:
        client(server, FakeClock()).declare("j", {"s": {"shards": ["0"]}}, replace=True)
    assert [asked.method for asked in server.asked] == ["PUT", "GET", "PUT"]
    assert server.asked[2].headers["If-Match"] == '"1-4"'


def test_a_watermark_is_read_whole_though_it_has_an_etag() -> None:
    """A service that has lost its ledger counts from the beginning, and comes to the same ETag again."""
    bodies = [
        {"input_watermark": at, "output_watermark": None, "status": "unknown"} for at in (5, 7)
    ]
    with Answers(*(Answer(200, each, {"ETag": '"1-2"'}) for each in bodies)) as server:
        asking = client(server, FakeClock())
        found = [asking.watermark("j", "s") for _ in bodies]
    assert [(each.input_ms, each.output_ms, each.final) for each in found] == [
        (5, None, False),
        (7, None, False),
    ]
    assert not any("If-None-Match" in asked.headers for asked in server.asked)


def test_a_process_has_one_client_and_shares_it_with_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine = shared_client("http://127.0.0.1:1", 100)
    assert shared_client("http://127.0.0.1:1", 100) is mine
    child = os.getpid() + 1
    monkeypatch.setattr(os, "getpid", lambda: child)
    assert shared_client("http://127.0.0.1:1", 100) is not mine, "a forked worker has its own"


@pytest.mark.parametrize(
    "name", ["../jobs/orders", "./x", "prod?old", "x#2", "", "a/b", "é", "a\n"]
)
def test_a_name_that_would_lead_elsewhere_is_refused_before_it_is_sent(name: str) -> None:
    client = Client("http://127.0.0.1:1")
    for use in (
        lambda: client.reset(name),
        lambda: client.revoke_key(name),
        lambda: client.declare(name, {}),
        lambda: client.watermark("job", name),
    ):
        with pytest.raises(ValueError, match="is not a valid name"):
            use()


def test_the_agent_takes_the_leases_that_the_service_grants() -> None:
    assert (arguments.MIN_TTL_MS, arguments.MAX_TTL_MS) == (
        requests.MIN_TTL_MS,
        requests.MAX_TTL_MS,
    )


def test_a_context_closes_the_connections_and_a_later_call_opens_new_ones() -> None:
    with Answers(Answer(body={"jobs": []})) as server:
        with Client(server.url) as made:
            made.jobs()
            pool = made._http._pool
            assert len(pool.pools) == 1
        assert len(pool.pools) == 0
        assert made.jobs() == {"jobs": []}


def test_every_public_name_is_completed() -> None:
    assert set(spark_agent.__all__) <= set(dir(spark_agent))
