"""Requests of a hostile or clumsy client: bytes, made from a seed."""

from __future__ import annotations

import json
import random
from base64 import b64encode
from collections.abc import Sequence
from typing import Any

MAX = 2**63 - 1
NAMES = ["job", "fuzz", "s", "k", "0", "1", "00000000-100000000", "x" * 128]
ODD_NAMES = [
    "", "-", "..", "%2e%2e", "%00", "%0A", "s%0a", "é", "x" * 129, "x" * 5_000, "%", "%zz", "a b",
    "'; DROP TABLE jobs; --", "${jndi:x}", "%ff%fe", "{job}", "a/../b", "//", "*", "\x7f",
]  # fmt: skip
NUMBERS: list[Any] = [
    0, -1, 1, 2**31, 2**32, 2**53, 2**53 + 1, MAX, MAX + 1, -(2**63), 2**64, 10**40, 1.5, -0.0, 1e308,
    float("inf"), float("nan"), "1", "", None, True, False, 253402300799999, 1767225600000,
]  # fmt: skip
METHODS = [
    "GET",
    "PUT",
    "POST",
    "DELETE",
    "HEAD",
    "OPTIONS",
    "PATCH",
    "TRACE",
    "CONNECT",
    "get",
    "M-SEARCH",
]
ROUTES = [
    ("GET", "/v1/jobs", ""),
    ("PUT", "/v1/jobs/{0}", "pipeline"),
    ("GET", "/v1/jobs/{0}", ""),
    ("DELETE", "/v1/jobs/{0}", ""),
    ("POST", "/v1/jobs/{0}/reset", ""),
    ("POST", "/v1/jobs/{0}/runs", "run"),
    ("POST", "/v1/jobs/{0}/commits", "commit"),
    ("POST", "/v1/jobs/{0}/leases/renew", "tokens"),
    ("POST", "/v1/jobs/{0}/leases/release", "tokens"),
    ("POST", "/v1/jobs/{0}/stages/{1}/leases", "claim"),
    *[("POST", "/v1/jobs/{0}/stages/{1}/reports", "report")] * 4,
    ("GET", "/v1/jobs/{0}/watermarks", ""),
    ("GET", "/v1/jobs/{0}/stages/{1}/watermark", ""),
    ("GET", "/v1/jobs/{0}/stages/{1}/commits", ""),
    ("GET", "/v1/jobs/{0}/stages/{1}/ranges", ""),
    ("POST", "/v1/jobs/{0}/stages/{1}/ranges/{0}/retire", "anything"),
    ("GET", "/v1/jobs/{0}/stages/{1}/history", ""),
    ("GET", "/v1/jobs/{0}/stages/{1}/eta", ""),
    ("GET", "/healthz", ""),
    ("GET", "/readyz", ""),
    ("GET", "/metrics", ""),
    ("GET", "/docs", ""),
    ("GET", "/", ""),
    ("GET", "*", ""),
]
KINDS = ["pipeline", "run", "claim", "tokens", "report", "commit", "anything"]
SPEC = {"s": {"shards": ["0", "1"]}, "k": {"inputs": ["s"], "ranges": 1}}
QUERIES = [
    "", "?at_least={0}", "?limit={0}", "?order={0}", "?limit={0}&order=promise", "?{0}",
    "?a=%ff", "?&&=", "?at={0}", "?from={0}", "?to={0}&points={0}",
]  # fmt: skip
HEADER_NAMES = [
    "If-Match", "If-None-Match", "Prefer", "Last-Event-ID", "Content-Type", "Content-Length",
    "Transfer-Encoding", "Connection", "Expect", "Upgrade", "Host", "Origin", "Sec-Fetch-Site",
    "Accept", "Range", "Cookie", "X-Forwarded-For", "Content-Encoding", "TE", "Trailer",
]  # fmt: skip
HEADER_VALUES = [
    "", "*", '"1-1"', 'W/"1-1", "2-2"', "wait=0", "wait=1e9", 'wait="0"', "wait=-1", "chunked", "gzip",
    "close", "keep-alive", "100-continue", "websocket", "h2c", "application/json", "text/plain", "evil",
    "null", "cross-site", "0", "-1", "5", "99999999999999999999", "9" * 5_000, ",", ",,,", '"', "\t",
    "\xff\xfe", "identity", "chunked, chunked", "chunked, identity",
]  # fmt: skip


class Maker:
    """Makes requests. The same seed makes the same ones."""

    def __init__(self, seed: int, tokens: Sequence[str]) -> None:
        self._random = random.Random(seed)
        self._tokens = list(tokens)

    def pick(self, choices: Sequence[Any]) -> Any:
        return self._random.choice(choices)

    def often(self, chance: float) -> bool:
        return self._random.random() < chance

    # ---- JSON

    def name(self) -> str:
        return self.pick(NAMES) if self.often(0.8) else self.pick(ODD_NAMES)

    def number(self) -> Any:
        return self.pick(NUMBERS) if self.often(0.6) else self._random.randint(-(2**40), 2**41)

    def value(self, depth: int = 0) -> Any:
        kind = self._random.randrange(6 if depth < 4 else 3)
        match kind:
            case 0 | 1:
                return self.number()
            case 2:
                return self.name()
            case 3:
                return [self.value(depth + 1) for _ in range(self._random.randrange(4))]
            case _:
                return {
                    self.name(): self.value(depth + 1) for _ in range(self._random.randrange(4))
                }

    def stage(self) -> Any:
        return self.pick(
            [
                {"shards": [self.name() for _ in range(self._random.randrange(4))]},
                {"inputs": [self.name()], "ranges": self.number()},
                {"inputs": [self.name()], "ranges": [{"start": self.number(), "end": self.number()}]},
                {"inputs": [self.name()], "passthrough": True},
                {"shards": ["0", "1"]},
                self.value(),
            ]
        )  # fmt: skip

    def token(self) -> Any:
        return self.pick(self._tokens) if self._tokens and self.often(0.8) else self.name()

    def ranges(self) -> Any:
        return {
            self.name(): self.pick(
                [
                    self.number(),
                    {"watermark": self.number()},
                    {"holds": {self.name(): self.number()}},
                    {"idle": True},
                    {},
                ]
            )
            for _ in range(self._random.randrange(4))
        }  # fmt: skip

    def columns(self) -> Any:
        """Columns of the stage with two shards and of that with one range, or of neither."""
        names = ["watermark", "oldest_work", "idle", "final", "records", "pending"]
        columns = {name: self.column() for name in names if self.often(0.3)}
        return columns | ({"holds": {self.name(): self.column()}} if self.often(0.5) else {})

    def column(self) -> Any:
        count = self._random.randrange(4)
        if self.often(0.4):
            return [self.number() for _ in range(count)]
        size = count * self.pick([1, 8, 8])
        octets = self.noise(size) if self.often(0.5) else bytes(size)
        text = b64encode(octets).decode()
        return (
            text if self.often(0.7) else text[:-1] + self.pick(["", "=", "\n", "-", " ", "é", "\0"])
        )

    def document(self, kind: str) -> Any:
        """The body that a route takes, with odd values in it."""
        match kind if self.often(0.9) else self.pick(KINDS):
            case "pipeline":
                stages = {self.name(): self.stage() for _ in range(self._random.randrange(3))}
                return {"stages": SPEC if self.often(0.5) else stages}
            case "run":
                return {"stages": [self.name()], "holder": self.name()}
            case "claim":
                body = {"ranges": self.pick(["all", [self.name()]]), "holder": self.name()}
                return body | self.some("ttl_ms", "run", "epoch", "attempt")
            case "tokens":
                return {"tokens": [self.token()]}
            case "report":
                said = {"columns": self.columns()} if self.often(0.3) else {"ranges": self.ranges()}
                body = {"token": self.token()} | said
                return body | self.some("epoch", "input_watermark")
            case "commit":
                stages = {self.name(): self.some("input_watermark", "late", "corrections")}
                return {"epoch": self.number(), "stages": stages} | self.some("run")
            case _:
                return self.value()

    def some(self, *members: str) -> dict[str, Any]:
        return {member: self.number() for member in members if self.often(0.3)}

    def body(self, kind: str) -> bytes:
        text = json.dumps(self.document(kind)).encode()
        match self._random.randrange(12):
            case 0:
                return text[: self._random.randrange(len(text) + 1)]
            case 1:
                return self.noise(self._random.randrange(200))
            case 2:
                return b"[" * self._random.randrange(5_000)
            case 3:
                where = self._random.randrange(len(text) + 1)
                return text[:where] + self.noise(3) + text[where:]
            case 4:
                return text + b"\n" * self._random.randrange(100) + self.pick([b"", b"{}", b"\0"])
            case 5:
                return b'{"a":' * self._random.randrange(2_000)
            case _:
                return text

    def noise(self, length: int) -> bytes:
        return self._random.randbytes(length)

    # ---- HTTP

    def path(self, path: str, *, destroys: bool) -> str:
        # Or it would soon be gone, and most of what follows be about no job.
        job = "fuzz" if self.often(0.02 if destroys else 0.7) else self.name().replace("fuzz", "f")
        path = path.format(job, self.pick(["s", "k"]) if self.often(0.7) else self.name())
        return path + (self.pick(QUERIES).format(self.number()) if self.often(0.3) else "")

    def header(self) -> str:
        name = (
            self.pick(HEADER_NAMES) if self.often(0.95) else self.pick(["", " ", "a b", "x" * 300])
        )
        return f"{name}: {self.pick(HEADER_VALUES)}"

    def request(self) -> tuple[bytes, bool]:
        """Bytes of one request, and whether it is well-formed HTTP, so that it has one answer."""
        if self.often(0.05):
            return self.noise(self._random.randrange(1, 2_000)), False
        honest = self.often(0.85)
        method, path, kind = self.pick(ROUTES)
        if self.often(0.1):
            method = self.pick(METHODS[:4] if honest else METHODS)
        body = self.body(kind) if kind or self.often(0.05) else b""
        path = self.path(path, destroys=path.endswith("reset") or method == "DELETE")
        if honest:
            path = "".join(c if "!" <= c <= "~" else "%41" for c in path)
        headers = ["Host: localhost"]
        if honest:
            for name, value in (
                ("If-Match", "*"), ("If-None-Match", '"1-1"'), ("Prefer", "wait=0"),
                ("Last-Event-ID", "9" * 50), ("Origin", "http://evil"), ("Sec-Fetch-Site", "none"),
            ):  # fmt: skip
                if self.often(0.1):
                    headers.append(f"{name}: {value}")
        else:
            headers = headers * self._random.randrange(3)
            headers += [self.header() for _ in range(self._random.randrange(6))]
        framed = self._frame(headers, body, honest=honest)
        data = f"{method} {path} HTTP/1.1\r\n".encode("utf-8", "replace") + framed
        if not honest and self.often(0.3):
            where = self._random.randrange(len(data))
            data = data[:where] + self.noise(self._random.randrange(1, 4)) + data[where + 1 :]
        return data, honest

    def _frame(self, headers: list[str], body: bytes, *, honest: bool) -> bytes:
        kinds = ["application/json", "application/json; charset=utf-8"]
        if body or self.often(0.2):
            kind = self.pick(kinds) if self.often(0.9) else self.pick(HEADER_VALUES[15:17])
            headers = [*headers, f"Content-Type: {kind}"]
        if body and self.often(0.3):
            pieces: list[bytes] = []
            for start in range(0, len(body), step := self._random.randrange(1, len(body) + 1)):
                piece = body[start : start + step]
                pieces.append(b"%x\r\n%s\r\n" % (len(piece), piece))
            headers = [*headers, "Transfer-Encoding: chunked"]
            body = b"".join([*pieces, b"0\r\n\r\n"])
        elif body or honest:
            length = len(body) if honest or self.often(0.7) else self._random.randrange(300)
            headers = [*headers, f"Content-Length: {length}"]
        return "\r\n".join([*headers, "", ""]).encode("latin-1", "replace") + body
