"""One client's hostile or large request is no other client's business.

While it runs, another client reads a watermark again and again. Its slow reads are compared with those
of a quiet run just before, on the same machine and the same service.

To add a case, write a function that takes the service's address and an `Event`, does its worst until the
event is set, and list it in `ACTS`.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import select
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing.synchronize import Event

import pytest

from tests.support.server import Service
from tests.support.wire import Wire, request

_spawn = multiprocessing.get_context("spawn")

Act = Callable[[str, Event], None]

MIB = 2**20
MILLION = 1_000_000
# One at a time: two of them would be beside each other's acts, on the same processors.
pytestmark = pytest.mark.xdist_group("bystander")

READS = 200
TRIES = 20
ALLOWED_S = 0.05
"""By how much the act may delay the slowest reads but one in a hundred, on a quiet machine."""

SETTINGS = {
    "TIDEGAUGE_MAX_CONNECTIONS": "200",
    "TIDEGAUGE_HEADER_TIMEOUT_MS": "2000",
    "TIDEGAUGE_BODY_STALL_TIMEOUT_MS": "2000",
}
SPEC = b'{"stages": {"s": {"shards": ["0", "1"]}}}'
READ = request("GET", "/v1/jobs/read/stages/s/watermark")
CLAIM = b'{"ranges": "all", "holder": "x", "ttl_ms": 600000}'
PUT = "PUT /v1/jobs/other HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"


def endless_header(url: str, stop: Event) -> None:
    header = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"x" * 64 * MIB
    while not stop.is_set():
        with Wire(url) as wire:
            wire.send(header)


def slow_headers(url: str, stop: Event) -> None:
    trickle(url, stop, b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ")


def slow_bodies(url: str, stop: Event) -> None:
    trickle(url, stop, f"{PUT}Content-Length: {16 * MIB}\r\n\r\n".encode())


def trickle(url: str, stop: Event, beginning: bytes) -> None:
    with ExitStack() as stack:
        wires = [stack.enter_context(Wire(url)) for _ in range(150)]
        for wire in wires:
            wire.send(beginning)
        while not stop.wait(0.05):
            for wire in wires:
                wire.send(b"x")


def large_bodies_that_do_not_fit(url: str, stop: Event) -> None:
    """All of it is JSON, but the first value is wrong."""
    numbers = b"1234567890," * (15 * MIB // 11)
    body = b'{"token": 1, "ranges": {"0": [%s1]}}' % numbers
    while not stop.is_set():
        with Wire(url) as wire:
            wire.send(request("POST", "/v1/jobs/read/stages/s/reports", body=body))
            assert wire.answer().status == 422


def large_bodies_that_are_no_json(url: str, stop: Event) -> None:
    body = b'{"token": "' + b"x" * 15 * MIB
    while not stop.is_set():
        with Wire(url) as wire:
            wire.send(request("POST", "/v1/jobs/read/stages/s/reports", body=body))
            assert wire.answer().status == 400


def unfinished_bodies(url: str, stop: Event) -> None:
    """Twenty of 120 MB, of which the service may not hold more than two."""
    piece = b" " * MIB
    with ExitStack() as stack:
        wires = [stack.enter_context(Wire(url)) for _ in range(20)]
        for wire in wires:
            wire.send(f"{PUT}Content-Length: {120 * MIB}\r\n\r\n".encode())
        while not stop.wait(0.01):
            for wire in wires:
                wire.send(piece)


def flood_of_connections(url: str, stop: Event) -> None:
    while not stop.is_set():
        with ExitStack() as stack:
            for _ in range(400):
                with contextlib.suppress(OSError):
                    stack.enter_context(Wire(url))
            stop.wait(0.1)


def idle_connections(url: str, stop: Event) -> None:
    with ExitStack() as stack:
        for _ in range(199):
            wire = stack.enter_context(Wire(url))
            wire.send(request("GET", "/healthz"))
        stop.wait()


def pipelined_requests(url: str, stop: Event) -> None:
    while not stop.is_set():
        with Wire(url) as wire:
            wire.send(request("GET", "/healthz") * 20_000)


def nonsense(url: str, stop: Event) -> None:
    while not stop.is_set():
        with Wire(url) as wire:
            wire.send(b"\0" * 100)


def layouts_of_a_million(url: str, stop: Event) -> None:
    """A request of a hundred bytes that makes a million ranges, changes them, and starts them over."""
    while not stop.is_set():
        spec = b'{"stages": {"s": {"shards": ["0"]}, "k": {"inputs": ["s"], "ranges": %d}}}'
        ask(url, "PUT", "/v1/jobs/large", spec % MILLION, 201)
        ask(url, "PUT", "/v1/jobs/large", spec % MILLION, 200)
        ask(url, "PUT", "/v1/jobs/large", spec % (MILLION - 1), 200, "If-Match: *")
        ask(url, "POST", "/v1/jobs/large/reset", b"", 200)
        ask(url, "DELETE", "/v1/jobs/large", b"", 204)


def claims_of_a_million(url: str, stop: Event) -> None:
    """All of them granted, denied, renewed, shown and released."""
    spec = b'{"stages": {"s": {"shards": ["0"]}, "k": {"inputs": ["s"], "ranges": %d}}}' % MILLION
    ask(url, "PUT", "/v1/jobs/claimed", spec, 201)
    stage = "/v1/jobs/claimed/stages/k"
    while not stop.is_set():
        wanted = b'{"ranges": "all", "holder": "%s", "ttl_ms": 600000}'
        granted = json.loads(ask(url, "POST", f"{stage}/leases", wanted % b"one", 201))
        assert len(granted["granted"]) == MILLION
        denied = json.loads(ask(url, "POST", f"{stage}/leases", wanted % b"other", 409))
        assert (len(denied["denied"]), denied["denied_total"]) == (1_000, MILLION)
        tokens = json.dumps({"tokens": [granted["token"]]}).encode()
        ask(url, "POST", "/v1/jobs/claimed/leases/renew", tokens, 200)
        for order in ("range", "promise"):
            ask(url, "GET", f"{stage}/ranges?limit=10000&order={order}", b"", 200)
        ask(url, "POST", "/v1/jobs/claimed/leases/release", tokens, 200)
    ask(url, "DELETE", "/v1/jobs/claimed", b"", 204)


def summaries_of_a_million(url: str, stop: Event) -> None:
    """Asked for by several clients at once, with as much in each as there may be."""
    spec = b'{"stages": {"s": {"shards": ["0"]}, "k": {"inputs": ["s"], "ranges": %d}}}' % MILLION
    ask(url, "PUT", "/v1/jobs/summed", spec, 201)
    ask(url, "POST", "/v1/jobs/summed/stages/s/leases", CLAIM, 201)
    by_turns(url, stop, "/v1/jobs/summed/stages/k/range-summary?buckets=2000&limit=1000")
    ask(url, "DELETE", "/v1/jobs/summed", b"", 204)


def explanations_of_a_million(url: str, stop: Event) -> None:
    """All the ranges hold their stage back, since its source has ended."""
    spec = b'{"stages": {"s": {"shards": ["0"]}, "k": {"inputs": ["s"], "ranges": %d}}}' % MILLION
    ask(url, "PUT", "/v1/jobs/explained", spec, 201)
    lease = json.loads(ask(url, "POST", "/v1/jobs/explained/stages/s/leases", CLAIM, 201))
    final = json.dumps({"token": lease["token"], "ranges": {"0": {"final": True}}}).encode()
    ask(url, "POST", "/v1/jobs/explained/stages/s/reports", final, 200)
    path = "/v1/jobs/explained/stages/k/explain?limit=1000"
    assert json.loads(ask(url, "GET", path, b"", 200))["holders_total"] == MILLION
    by_turns(url, stop, path)
    ask(url, "DELETE", "/v1/jobs/explained", b"", 204)


def by_turns(url: str, stop: Event, path: str) -> None:
    with ExitStack() as stack:
        wires = [stack.enter_context(Wire(url)) for _ in range(3)]
        while not stop.is_set():
            for wire in wires:
                wire.send(request("GET", path))
            for wire in wires:
                assert wire.answer().status == 200


def ask(url: str, method: str, path: str, body: bytes, status: int, *headers: str) -> bytes:
    with Wire(url) as wire:
        wire.send(request(method, path, *headers, body=body))
        answer = wire.answer()
        assert answer.status == status, answer
        return answer.body


def named_shards(url: str, stop: Event) -> None:
    """Two megabytes of names, read again and again."""
    names = b",".join(b'"shard-%06d"' % n for n in range(200_000))
    ask(url, "PUT", "/v1/jobs/named", b'{"stages": {"s": {"shards": [%b]}}}' % names, 201)
    while not stop.is_set():
        ask(url, "GET", "/v1/jobs/named", b"", 200)
    ask(url, "DELETE", "/v1/jobs/named", b"", 204)


def lists_that_are_read(url: str, stop: Event) -> None:
    burst(url, stop, 300, "/v1/jobs/read/stages/k/ranges?limit=10000", reads=True)


def lists_that_nobody_reads(url: str, stop: Event) -> None:
    burst(url, stop, 300, "/v1/jobs/read/stages/k/ranges?limit=10000", reads=False)


def files_that_nobody_reads(url: str, stop: Event) -> None:
    burst(url, stop, 600, "/docs/swagger-ui-bundle.js", reads=False)


def burst(url: str, stop: Event, clients: int, path: str, *, reads: bool) -> None:
    """Many clients at once that each ask twice for something large, and leave after a while."""
    while not stop.is_set():
        with ExitStack() as stack:
            wires = [stack.enter_context(Wire(url)) for _ in range(clients)]
            for wire in wires:
                wire.send(request("GET", path) * 2)
            begun = time.monotonic()
            while not stop.wait(0.05) and time.monotonic() < begun + 2:
                readable = (
                    select.select([wire.socket for wire in wires], (), (), 0)[0] if reads else ()
                )
                for connection in readable:
                    connection.recv(MIB)


BURSTS = [
    named_shards,
    pytest.param(lists_that_are_read, marks=pytest.mark.slow),
    lists_that_nobody_reads,
    files_that_nobody_reads,
]
"""Those that are beside others in the same queue of new connections, or of large answers."""

ACTS = [
    layouts_of_a_million,
    claims_of_a_million,
    summaries_of_a_million,
    explanations_of_a_million,
    endless_header,
    slow_headers,
    slow_bodies,
    large_bodies_that_do_not_fit,
    large_bodies_that_are_no_json,
    unfinished_bodies,
    flood_of_connections,
    idle_connections,
    pytest.param(pipelined_requests, marks=pytest.mark.slow),
    nonsense,
]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("bystander"), environment=SETTINGS) as running:
        with Wire(running.url) as wire:
            wire.send(request("PUT", "/v1/jobs/read", body=SPEC))
            assert wire.answer().status == 201
        yield running


def read(wire: Wire) -> None:
    wire.send(READ)
    assert wire.answer().status == 200


def read_anew(url: str) -> None:
    with Wire(url) as wire:
        read(wire)


def slowest_s(work: Callable[[], None], times: int = READS) -> float:
    """Return the time of the slowest, but for one in a hundred."""
    took: list[float] = []
    for _ in range(times):
        began = time.monotonic()
        work()
        took.append(time.monotonic() - began)
    return sorted(took)[-1 - times // 100]


@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.__name__)
def test_another_client_does_not_notice(service: Service, act: Act) -> None:
    # It is connected before: a flood may keep new clients out, but not those that are in.
    with Wire(service.url) as reader:
        check_beside(service.url, act, lambda: read(reader))


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service with as many connections as there may be by default, and a stage of many ranges."""
    with Service(tmp_path_factory.mktemp("bystander")) as running:
        spec = b'{"stages": {"s": {"shards": ["0"]}, "k": {"inputs": ["s"], "ranges": 20000}}}'
        ask(running.url, "PUT", "/v1/jobs/read", spec, 201)
        yield running


@pytest.mark.parametrize("act", BURSTS, ids=lambda act: act.__name__)
def test_a_new_client_does_not_notice(roomy: Service, act: Act) -> None:
    check_beside(roomy.url, act, lambda: read_anew(roomy.url))


def check_beside(url: str, act: Act, work: Callable[[], None]) -> None:
    """Check that work beside the act takes hardly longer than work alone."""
    quiet_s = slowest_s(work)
    # A process of its own, or it would hold the reader's interpreter lock.
    stop, begun = _spawn.Event(), _spawn.Event()
    process = _spawn.Process(target=perform, args=(act, url, begun, stop), daemon=True)
    process.start()
    try:
        # It goes on reading: an idle connection may be closed to make room for a flood.
        while not begun.is_set():
            slowest_s(work, 100)
            assert process.is_alive()
        # The best of many: it is the service that is measured, and not who else is on the machine. A
        # service that lets others wait does so each time.
        beside_s = slowest_s(work)
        for _ in range(TRIES):
            if beside_s <= quiet_s * 3 + ALLOWED_S:
                break
            beside_s = min(beside_s, slowest_s(work))
    finally:
        stop.set()
        process.join(60)
    assert process.exitcode == 0
    assert beside_s <= quiet_s * 3 + ALLOWED_S, (quiet_s, beside_s)


def perform(act: Act, url: str, begun: Event, stop: Event) -> None:
    begun.set()
    act(url, stop)
