"""The client behind a proxy that answers in the service's place."""

from __future__ import annotations

import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from typing_extensions import override

from spark_agent.client.client import Client
from spark_agent.client.errors import LeaseConflict, TooLarge
from spark_agent.client.reports import Lease, RangeReport, Rank
from spark_agent.exceptions import Unavailable
from tests.support.loopback import Loopback
from tests.unit.agent.answers import Answer, Answers, FakeClock

PAGE = "<html><head><title>{0}</title></head>\r\n<body><h1>{0}</h1>nginx</body></html>"


def client(server: Loopback) -> Client:
    return Client(server.url, patience_ms=200, clock=FakeClock(), jitter=lambda: 1.0)


@pytest.mark.parametrize("status", [403, 404, 407, 502])
@pytest.mark.parametrize(
    ("page", "shown"),
    [
        (PAGE.format("Not you"), ": Not you Not you nginx"),
        ("Ask the\nteam of the proxy", ": Ask the team of the proxy"),
        ("x" * 5_000, ": x{100}…"),
        ("\x00\x01", ""),
    ],
    ids=["html", "text", "long", "binary"],
)
def test_the_status_and_the_page_of_a_proxy_are_in_the_message(
    status: int, page: str, shown: str
) -> None:
    with (
        Answers(Answer(status, page)) as server,
        pytest.raises(
            Unavailable, match=f"/v1/jobs/j/runs: status {status}( without JSON)?{shown}$"
        ),
    ):
        client(server).open_run("j", ["s"], "me")


def test_the_status_of_a_page_without_an_error_is_in_the_message() -> None:
    with (
        Answers(Answer(200, "<b>log in</b>")) as server,
        pytest.raises(Unavailable, match=r": status 200 without JSON: log in$"),
    ):
        client(server).open_run("j", ["s"], "me")


@pytest.mark.parametrize(
    "body", [PAGE.format("Too large"), "", {"message": "Too long"}], ids=["html", "empty", "json"]
)
def test_a_request_that_a_proxy_finds_too_large_is_not_retried(body: str | dict[str, str]) -> None:
    with (
        Answers(Answer(413, body)) as server,
        pytest.raises(
            TooLarge, match=r"^413: a proxy .* \(nginx: client_max_body_size 16m\)$"
        ) as caught,
    ):
        client(server).open_run("j", ["s"], "me")
    assert caught.value.status == 413
    assert len(server.asked) == 1


def test_the_limit_of_the_service_itself_is_not_one_of_a_proxy() -> None:
    problem = {"type": "/problems/payload-too-large", "title": "Too large.", "detail": "17 MiB"}
    with (
        Answers(Answer(413, problem)) as server,
        pytest.raises(TooLarge, match=r"^413: Too large\. 17 MiB$"),
    ):
        client(server).open_run("j", ["s"], "me")


class Narrow(Loopback):
    """A proxy that passes small bodies to a service, which grants all ranges that are not denied."""

    def __init__(self, limit: int, denied: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self.passed: list[Any] = []
        self._limit = limit
        self._denied = denied

    @override
    def answer(self, request: BaseHTTPRequestHandler, body: bytes) -> None:
        if len(body) > self._limit:
            self._send(request, 413, PAGE.format("413 Request Entity Too Large"))
            return
        read = json.loads(body)
        self.passed.append(read)
        granted = [each for each in read["ranges"] if each not in self._denied]
        if not granted:
            conflict = {"type": "/problems/lease-conflict", "title": "No.", "denied": []}
            self._send(request, 409, json.dumps(conflict))
            return
        self._send(request, 200, json.dumps({"accepted": len(granted), "granted": granted}))

    def _send(self, request: BaseHTTPRequestHandler, status: int, text: str) -> None:
        request.send_response(status)
        request.send_header("Content-Length", str(len(text)))
        request.end_headers()
        request.wfile.write(text.encode())


SHARDS = {f"shard-{number}": RangeReport(number, records=1) for number in range(100)}
Report = Callable[[Client], int]


def by_lease(asking: Client) -> int:
    return asking.report("j", "s", Lease("t", tuple(SHARDS), ()), SHARDS, epoch=4)


def by_claim(asking: Client) -> int:
    made = asking.claim_and_report(
        "j", "s", SHARDS, holder="me", ttl_ms=5_000, rank=Rank(3, 4, 1), epoch=4
    )
    assert made.granted == tuple(SHARDS)
    return made.accepted


@pytest.mark.parametrize("report", [by_lease, by_claim])
def test_a_report_that_is_too_large_for_a_proxy_goes_in_smaller_parts(report: Report) -> None:
    with Narrow(1_000) as proxy:
        assert report(client(proxy)) == 100
    sent = [name for part in proxy.passed for name in part["ranges"]]
    assert sent == list(SHARDS), "each range once, in their order"
    assert all(part["epoch"] == 4 for part in proxy.passed)


def test_a_part_that_others_hold_leaves_the_parts_after_it_reported() -> None:
    denied = frozenset(list(SHARDS)[:50])
    with Narrow(1_000, denied) as proxy:
        made = client(proxy).claim_and_report(
            "j", "s", SHARDS, holder="me", ttl_ms=5_000, rank=Rank(3, 4, 1)
        )
    assert made.granted == tuple(each for each in SHARDS if each not in denied)


def test_a_report_of_one_range_that_is_too_large_names_the_limit_of_the_proxy() -> None:
    with Narrow(20) as proxy, pytest.raises(TooLarge, match="raise the proxy's limit"):
        by_lease(client(proxy))


def test_a_report_whose_parts_are_all_held_by_others_is_a_conflict() -> None:
    with Narrow(1_000, frozenset(SHARDS)) as proxy, pytest.raises(LeaseConflict):
        by_claim(client(proxy))
