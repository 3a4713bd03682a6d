"""Sends what `Maker` makes to a service, and looks at every answer and at the process."""

from __future__ import annotations

import json
import re
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

from tests.fuzz.requests import SPEC, Maker
from tests.support.server import Service
from tests.support.wire import Answer, Wire, ask, request

MIB = 2**20
PIPELINED = 16
ROUND = 1_000
"""Requests between two looks at the service."""

_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")

SETTINGS = {
    "TIDEGAUGE_HEADER_TIMEOUT_MS": "2000",
    "TIDEGAUGE_BODY_STALL_TIMEOUT_MS": "2000",
    # A round does more than a thousand refused requests: one line a second is logged of each kind.
    "TIDEGAUGE_LOG_LEVEL": "warning",
}


class FuzzError(AssertionError):
    """The service did what it must not do, with the requests that it was sent."""

    def __init__(self, what: str, sent: Sequence[bytes]) -> None:
        super().__init__(f"{what}; sent: {[data[:2_000] for data in sent]!r}")


class Fuzzer:
    """One service and one stream of requests."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.seed = seed
        self.statuses: Counter[int] = Counter()
        self.service = Service(folder, environment=SETTINGS)
        self._rounds = 0
        self._settled_bytes = 0
        self._settled_descriptors = 0

    def run(self, requests: int, tell: Callable[[str], None] = lambda _: None) -> None:
        """Send so many requests. Raises `FuzzError`."""
        with self.service:
            rounds = max(1, requests // ROUND)
            # Memory allocated once, for the first requests of each kind, is not growth.
            settled = max(1, rounds // 10)
            for number in range(rounds):
                self._round(Maker(self.seed + number, self._honest_client()))
                if number + 1 == settled:
                    self._settled_bytes = self.service.resident_bytes()
                    self._settled_descriptors = self.service.descriptors()
                if number % 20 == 19:
                    tell(f"{(number + 1) * ROUND} requests, {self._state()}")
            self._honest_client()
            self._check_process()
            tell(f"done, {self._state()}")

    def _state(self) -> str:
        return (
            f"{self.service.resident_bytes() // MIB} MiB, {self.service.descriptors()} descriptors,"
            f" answers {dict(sorted(self.statuses.items()))}"
        )

    def _round(self, maker: Maker) -> None:
        made = iter(maker.request, None)
        honest: list[bytes] = []
        for data, is_honest in islice(made, ROUND):
            if is_honest:
                honest.append(data)
            else:
                self._send_alone(data)
            if len(honest) == PIPELINED:
                self._send_pipelined(honest)
                honest = []

    def _send_pipelined(self, requests: Sequence[bytes]) -> None:
        with Wire(self.service.url, timeout_s=30) as wire:
            wire.send(b"".join(requests))
            for number, sent in enumerate(requests):
                try:
                    answer = wire.answer()
                except (EOFError, ConnectionError):
                    if number == 0:
                        raise FuzzError("it did not answer", requests) from None
                    raise FuzzError("it closed without saying so", requests[number - 1 :]) from None
                except TimeoutError:
                    raise FuzzError("it did not answer in time", [sent]) from None
                self._check(answer, sent)
                if answer.headers.get("connection") == "close":
                    return

    def _check(self, answer: Answer, sent: bytes) -> None:
        self.statuses[answer.status] += 1
        if answer.status >= 400:
            try:
                slug = answer.slug
            except (AssertionError, ValueError, KeyError):
                raise FuzzError(f"{answer.status} without a problem", [sent]) from None
            if answer.status >= 500 and slug != "overloaded":
                raise FuzzError(f"{answer.status} {slug}", [sent])

    def _send_alone(self, data: bytes) -> None:
        """Bytes that need not be a request: they are answered, or the connection is closed."""
        received = b""
        with Wire(self.service.url, timeout_s=30) as wire:
            try:
                wire.socket.sendall(data)
                wire.socket.shutdown(socket.SHUT_WR)
                while piece := wire.socket.recv(65_536):
                    received += piece
            except TimeoutError:
                raise FuzzError("it neither answered nor closed", [data]) from None
            except OSError:
                pass
        for status in _STATUS.findall(received):
            self.statuses[int(status)] += 1
            if int(status) >= 500 and b"/problems/overloaded" not in received:
                raise FuzzError(f"{int(status)}", [data])

    def _honest_client(self) -> list[str]:
        """A worker in between: it must get what it always gets. Its tokens are for the next round."""
        tokens: list[str] = []
        for job in ("fuzz", "honest"):
            root = f"/v1/jobs/{job}"
            self._expect({204, 404}, request("DELETE", root))
            self._expect({201}, self._json("PUT", root, {"stages": SPEC}))
            claim = {"ranges": "all", "holder": "fuzz", "ttl_ms": 600_000}
            for stage in SPEC:
                granted = self._expect(
                    {201}, self._json("POST", f"{root}/stages/{stage}/leases", claim)
                )
                tokens.append(json.loads(granted.body)["token"])
        report = {"token": tokens[-2], "ranges": {"0": 1_000, "1": 2_000}}
        self._expect({200}, self._json("POST", "/v1/jobs/honest/stages/s/reports", report))
        read = self._expect({200}, request("GET", "/v1/jobs/honest/stages/s/watermark"))
        if json.loads(read.body)["output_watermark"] != 1_000:
            raise FuzzError(f"a wrong watermark: {read.body!r}", [])
        return tokens[:2]

    def _json(self, method: str, path: str, body: object) -> bytes:
        return request(
            method, path, "Content-Type: application/json", body=json.dumps(body).encode()
        )

    def _expect(self, statuses: set[int], sent: bytes) -> Answer:
        answer = ask(self.service.url, sent)
        if answer.status not in statuses:
            raise FuzzError(f"an honest client got {answer.status}: {answer.body[:500]!r}", [sent])
        return answer

    def _check_process(self) -> None:
        grown = self.service.resident_bytes() - self._settled_bytes
        if grown > 64 * MIB:
            raise FuzzError(f"its memory grew by {grown // MIB} MiB", [])
        more = self.service.descriptors() - self._settled_descriptors
        if more > 20:
            raise FuzzError(f"it has {more} descriptors more", [])
        if "Traceback" in self.service.log():
            raise FuzzError(f"its log:\n{self.service.log()}", [])
