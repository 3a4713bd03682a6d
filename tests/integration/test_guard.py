"""Limits of one connection, and of all together: real sockets against a real service."""

from __future__ import annotations

import resource
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.server import Service
from tests.support.wire import Answer, Wire, ask, request

CONNECTIONS = 40

SETTINGS = {
    "TIDEGAUGE_MAX_CONNECTIONS": str(CONNECTIONS),
    "TIDEGAUGE_MAX_BODIES_BYTES": str(4 * 2**20),
    "TIDEGAUGE_HEADER_TIMEOUT_MS": "1000",
    "TIDEGAUGE_BODY_STALL_TIMEOUT_MS": "1000",
    "TIDEGAUGE_BODY_TIMEOUT_MS": "3000",
    "TIDEGAUGE_IDLE_TIMEOUT_MS": "4000",
    "TIDEGAUGE_WRITE_TIMEOUT_MS": "1000",
}

HEALTH = request("GET", "/healthz")
MIB = 2**20


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service with small limits."""
    with Service(tmp_path_factory.mktemp("strict"), environment=SETTINGS) as service:
        yield service


def wait_for(probe: Callable[[], bool], what: str, deadline_s: float = 60) -> None:
    end = time.monotonic() + deadline_s
    while not probe():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def is_well(service: Service) -> bool:
    try:
        return ask(service.url, HEALTH).status == 200
    except (OSError, EOFError):
        return False


def metric(service: Service, sample: str) -> float:
    text = ask(service.url, request("GET", "/metrics")).body.decode()
    values = [line.rpartition(" ")[2] for line in text.splitlines() if line.startswith(sample)]
    return float(values[0]) if values else 0.0


def refused(service: Service, reason: str) -> float:
    return metric(service, f'tidegauge_refused_requests_total{{reason="{reason}"}}')


def check(answer: Answer, status: int, slug: str, setting: str) -> None:
    assert (answer.status, answer.slug) == (status, slug)
    assert setting in answer.problem["detail"]


PUT = "PUT /v1/jobs/j HTTP/1.1\r\nHost: 127.0.0.1\r\n"
CHUNKED = f"{PUT}Transfer-Encoding: chunked\r\n\r\n".encode()


@pytest.mark.parametrize(
    ("data", "status", "slug", "setting"),
    [
        pytest.param(
            b"GET / HTTP/1.1\r\nHost: h\r\nX: " + b"x" * 64 * MIB,
            431, "header-too-large", "TIDEGAUGE_MAX_HEADER_BYTES", id="a header without an end",
        ),
        pytest.param(
            b"GET / HTTP/1.1\r\nHost: h\r\n" + b"".join(b"X: %d\r\n" % i for i in range(4 * MIB)),
            431, "header-too-large", "TIDEGAUGE_MAX_HEADER_BYTES", id="headers without an end",
        ),
        pytest.param(
            request("GET", "/healthz", f"X: {'x' * 33_000}"),
            431, "header-too-large", "TIDEGAUGE_MAX_HEADER_BYTES", id="a long header",
        ),
        pytest.param(
            request("GET", "/healthz", *("X: 1" for _ in range(101))),
            431, "header-too-large", "TIDEGAUGE_MAX_HEADERS", id="many headers",
        ),
        pytest.param(
            CHUNKED + b"1\r\n{\r\n0\r\nX: " + b"x" * MIB,
            431, "header-too-large", "TIDEGAUGE_MAX_HEADER_BYTES", id="a trailer without an end",
        ),
        pytest.param(
            CHUNKED + b"1;" + b"x" * MIB,
            431, "header-too-large", "TIDEGAUGE_MAX_HEADER_BYTES", id="a chunk's endless extension",
        ),
        pytest.param(
            b"GET /" + b"x" * 64 * MIB,
            414, "uri-too-long", "TIDEGAUGE_MAX_URL_BYTES", id="an address without an end",
        ),
        pytest.param(
            request("GET", "/" + "x" * 8_192),
            414, "uri-too-long", "TIDEGAUGE_MAX_URL_BYTES", id="a long address",
        ),
        pytest.param(b"GET / HTTP/1.1\r\nHost: h\r\n", 408, "request-timeout",
                     "TIDEGAUGE_HEADER_TIMEOUT_MS", id="half a header"),
        pytest.param(
            f"{PUT}Content-Length: 10\r\n\r\n{{".encode(), 408, "request-timeout",
            "TIDEGAUGE_BODY_STALL_TIMEOUT_MS", id="half a body",
        ),
        pytest.param(
            CHUNKED + b"1\r\n{\r\n", 408, "request-timeout",
            "TIDEGAUGE_BODY_STALL_TIMEOUT_MS", id="half a body in chunks",
        ),
        pytest.param(b"nonsense\r\n\r\n", 400, "malformed-http", "HTTP/1.1", id="nonsense"),
        pytest.param(CHUNKED + b"zz\r\n", 400, "malformed-http", "HTTP/1.1", id="a chunk of nonsense"),
        pytest.param(
            b"CONNECT h:80 HTTP/1.1\r\nHost: h\r\n\r\n", 400, "malformed-http", "HTTP/1.1", id="CONNECT",
        ),
    ],
)  # fmt: skip
def test_what_is_too_much_is_refused(
    strict: Service, data: bytes, status: int, slug: str, setting: str
) -> None:
    before = refused(strict, slug)
    with Wire(strict.url) as wire:
        wire.send(data)
        answer = wire.answer()
        check(answer, status, slug, setting)
        assert answer.headers["connection"] == "close"
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert wire.closed()
    assert refused(strict, slug) > before
    assert is_well(strict)


def test_a_body_that_trickles_has_a_time_in_all(strict: Service) -> None:
    with Wire(strict.url) as wire:
        wire.send(f"{PUT}Content-Length: 1000000\r\n\r\n".encode())
        wire.socket.settimeout(0.1)
        answer = None
        while answer is None:
            wire.send(b" ")
            try:
                answer = wire.answer()
            except TimeoutError:
                continue
    check(answer, 408, "request-timeout", "TIDEGAUGE_BODY_TIMEOUT_MS")


def test_a_trailer_is_no_header(strict: Service) -> None:
    """Else one could say after the checks what they would have refused."""
    body = b'{"stages": {"s": {"shards": ["0"]}}}'
    answer = ask(
        strict.url,
        b"PUT /v1/jobs/trailer HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
        + b"%x\r\n%s\r\n0\r\nIf-Match: x\r\n\r\n" % (len(body), body),
    )
    assert answer.status == 201, answer.body


def test_earlier_requests_are_answered_first(strict: Service) -> None:
    with Wire(strict.url) as wire:
        wire.send(HEALTH * 3 + b"nonsense\r\n\r\n")
        assert [wire.answer().status for _ in range(4)] == [200, 200, 200, 400]
        assert wire.closed()


def test_pipelined_requests_are_answered_and_bounded(strict: Service) -> None:
    with Wire(strict.url) as wire:
        wire.send(HEALTH * 50)
        assert {wire.answer().status for _ in range(50)} == {200}
        wire.send(HEALTH * 10_000)
        *answers, last = [wire.answer() for _ in range(66)]
        assert {answer.status for answer in answers} == {200}
        check(last, 503, "overloaded", "TIDEGAUGE_MAX_PIPELINED")


def test_a_wish_to_upgrade_is_ignored(strict: Service) -> None:
    """Java's client has it in its first request by default, also if that has a body."""
    wish = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk")
    spec = b'{"stages": {"s": {"shards": ["0"]}}}'
    with Wire(strict.url) as wire:
        for _ in range(2):
            wire.send(request("PUT", "/v1/jobs/upgrade", *wish, body=spec))
            assert wire.answer().status in {200, 201}
        data = request("PUT", "/v1/jobs/upgrade", *wish, body=spec) + request(
            "GET", "/healthz", *wish
        )
        wire.send(data + HEALTH)
        assert [wire.answer().status for _ in range(3)] == [200, 200, 200]
        for at in range(0, len(data), 7):
            wire.send(data[at : at + 7])
        assert [wire.answer().status for _ in range(2)] == [200, 200]
        wire.send(request("GET", "/healthz", "Connection: close, upgrade", "Upgrade: websocket"))
        assert wire.answer().headers["connection"] == "close"
        assert wire.closed()


def test_an_idle_connection_is_closed(strict: Service) -> None:
    with Wire(strict.url) as silent, Wire(strict.url) as blank, Wire(strict.url) as used:
        used.send(HEALTH)
        assert used.answer().status == 200
        # An empty line before a request is allowed, and is none.
        for _ in range(3):
            blank.send(b"\r\n")
        assert silent.closed()
        assert blank.closed()
        assert used.closed()


def test_who_reads_nothing_is_cut_off(strict: Service) -> None:
    spec = b'{"stages": {"s": {"shards": [%s]}}}' % b",".join(b'"%064d"' % i for i in range(60_000))
    answer = ask(strict.url, request("PUT", "/v1/jobs/wide", body=spec))
    assert answer.status == 201, answer.body[:500]
    before = refused(strict, "slow-reader")
    with Wire(strict.url) as wire:
        wire.send(request("GET", "/v1/jobs/wide") * 60)
        wait_for(lambda: refused(strict, "slow-reader") > before, "cut off")
    assert is_well(strict)


# ---- bodies


def unfinished(service: Service, size: int) -> Wire:
    """A request whose body of this size lacks its last byte."""
    wire = Wire(service.url)
    wire.send(f"{PUT}Content-Length: {size}\r\n\r\n".encode() + b" " * (size - 1))
    return wire


def test_bodies_have_a_bound_together(strict: Service) -> None:
    """The first has three of four MiB until it is over, however slowly; then others may."""
    with unfinished(strict, 3 * MIB) as first:
        second = ask(strict.url, f"{PUT}Content-Length: {2 * MIB}\r\n\r\n".encode())
        check(second, 503, "overloaded", "TIDEGAUGE_MAX_BODIES_BYTES")
        assert second.headers["retry-after"] == "1"
        chunk = b"10000\r\n" + b" " * 65_536 + b"\r\n"
        check(
            ask(strict.url, CHUNKED + chunk * 32), 503, "overloaded", "TIDEGAUGE_MAX_BODIES_BYTES"
        )
        # Small bodies are not counted.
        assert ask(strict.url, request("PUT", "/v1/jobs/j", body=b"{}")).status == 422
        first.send(b" ")
        assert first.answer().slug == "malformed-json"
    with unfinished(strict, 3 * MIB) as third:
        third.send(b" ")
        assert third.answer().slug == "malformed-json"


def test_bodies_that_are_given_up_are_given_back(strict: Service) -> None:
    for _ in range(3):
        unfinished(strict, 3 * MIB).close()

    def free() -> bool:
        with unfinished(strict, 3 * MIB) as wire:
            wire.send(b" ")
            return wire.answer().slug == "malformed-json"

    wait_for(free, "the budget is free again")


def test_unfinished_bodies_cost_no_memory(tmp_path: Path) -> None:
    """Twenty of 120 MB each: it had 2.6 GB of them."""
    settings = {"TIDEGAUGE_MAX_BODIES_BYTES": str(130 * MIB)}
    with Service(tmp_path, environment=settings) as service:
        before = service.resident_bytes()
        piece = b" " * MIB
        wires: list[Wire] = []
        for _ in range(20):
            wire = Wire(service.url)
            wire.send(f"{PUT}Content-Length: {120 * MIB}\r\n\r\n".encode())
            wires.append(wire)
        for _ in range(60):
            for wire in wires:
                wire.send(piece)
        assert is_well(service)
        assert service.resident_bytes() - before < 300 * MIB
        for wire in wires:
            wire.close()


# ---- connections


def test_the_bound_on_connections(strict: Service) -> None:
    """Those that do something are kept, those that are idle make room, the rest is told to wait."""
    busy = [Wire(strict.url) for _ in range(CONNECTIONS)]
    try:
        waiting = request("GET", "/v1/jobs/conns/stages/s/watermark?at_least=1", "Prefer: wait=20")
        busy[0].send(request("PUT", "/v1/jobs/conns", body=b'{"stages":{"s":{"shards":["0"]}}}'))
        assert busy[0].answer().status in {200, 201}
        for wire in busy:
            wire.send(waiting)

        def is_refused() -> bool:
            try:
                answer = ask(strict.url, HEALTH)
            except (OSError, EOFError):
                return False
            if answer.status == 200:
                return False
            check(answer, 503, "overloaded", "TIDEGAUGE_MAX_CONNECTIONS")
            return answer.headers["retry-after"] == "1"

        wait_for(is_refused, "refused")
    finally:
        for wire in busy:
            wire.close()
    wait_for(lambda: is_well(strict), "well again")


def test_idle_connections_make_room(strict: Service) -> None:
    idle = [Wire(strict.url) for _ in range(CONNECTIONS)]
    try:
        # Well before they are closed for being idle too long, or the test shows nothing.
        wait_for(lambda: is_well(strict), "room")
        assert refused(strict, "idle") > 0
    finally:
        for wire in idle:
            wire.close()


def test_a_flood_of_connections_is_logged_once_a_second(tmp_path: Path) -> None:
    settings = {"TIDEGAUGE_MAX_CONNECTIONS": "5"}
    with Service(tmp_path, environment=settings) as service:
        began = time.monotonic()
        for _ in range(20):
            wires = [Wire(service.url) for _ in range(50)]
            for wire in wires:
                wire.close()
        wait_for(lambda: is_well(service), "well again")
        took_s = time.monotonic() - began
        lines = [line for line in service.log().splitlines() if "MAX_CONNECTIONS" in line]
        assert 1 <= len(lines) <= took_s + 2
        assert refused(service, "overloaded") >= len(lines)


@pytest.mark.parametrize("path", ["stages/s/watermark", "throttle", "events"])
def test_a_reader_that_goes_away_gives_its_place_back(strict: Service, path: str) -> None:
    """As behind a load balancer, where all readers have one address. It would wait for a minute."""
    spec = b'{"stages": {"s": {"shards": ["0"]}}}'
    assert ask(strict.url, request("PUT", "/v1/jobs/j", body=spec)).status in {200, 201}
    headers = "If-None-Match: *", "Prefer: wait=60"
    for _ in range(CONNECTIONS // 2):
        with Wire(strict.url) as wire:
            wire.send(request("GET", f"/v1/jobs/j/{path}", *headers))
            time.sleep(0.01)
    live = request("GET", "/v1/jobs/j/stages/s/watermark", "If-None-Match: *", "Prefer: wait=1")
    wait_for(lambda: ask(strict.url, live).status == 304, "there is room again", deadline_s=20)


def test_a_bound_for_each_address(tmp_path: Path) -> None:
    settings = {"TIDEGAUGE_MAX_CONNECTIONS_PER_CLIENT": "3"}
    with Service(tmp_path, environment=settings) as service:
        wires = [Wire(service.url) for _ in range(3)]
        for wire in wires:
            wire.send(HEALTH)
            assert wire.answer().status == 200
        check(ask(service.url, HEALTH), 503, "overloaded", "TIDEGAUGE_MAX_CONNECTIONS_PER_CLIENT")
        wires.pop().close()
        wait_for(lambda: is_well(service), "room for one")
        for wire in wires:
            wire.close()


def test_without_file_descriptors_it_says_so_and_goes_on(tmp_path: Path) -> None:
    with Service(tmp_path) as service:
        before = resource.prlimit(service.pid, resource.RLIMIT_NOFILE)
        scarce = service.descriptors() + 5
        resource.prlimit(service.pid, resource.RLIMIT_NOFILE, (scarce, before[1]))
        wires = [Wire(service.url) for _ in range(20)]
        wait_for(lambda: "has no file descriptor left" in service.log(), "a line in the log")
        for wire in wires:
            wire.close()
        wait_for(lambda: is_well(service), "well again")
        assert refused(service, "descriptors") >= 1


def test_a_client_that_leaves_with_answers_unread_is_no_error(tmp_path: Path) -> None:
    """Each request of a pipeline notices that its client has gone, and writes nothing more."""
    with Service(tmp_path) as service:
        wires = [Wire(service.url) for _ in range(20)]
        for wire in wires:
            wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2_048)
            wire.send(request("GET", "/docs/swagger-ui-bundle.js") * 3)
        for wire in wires:
            # Once something has come, the rest waits for somebody to read it.
            wire.socket.recv(1)
            wire.close()
        assert ask(service.url, request("GET", "/healthz")).status == 200
        service.stop()
        assert "Traceback" not in (tmp_path / "service.log").read_text()
        service.start()
