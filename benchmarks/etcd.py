"""etcd, as it would be used for the same: compare the key of the lease, then put all the values.

Through gRPC itself, not its gateway for JSON. The few messages that this takes are written by hand, so
that no package is needed. Each connection has one transaction under way, as one of HTTP/1.1 has.
Where this was written, h2load with one and the same body got no more out of etcd at a thousand keys,
and 15 per cent more at one.

`python -m benchmarks.etcd PORT KEYS CONNECTIONS SECONDS`
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import uvloop

from benchmarks.load import LoadFailedError, Outcome
from benchmarks.servers import ROOT
from tests.support.binaries import free_port, launch, wait_until

LEASE, TOKEN = b"lease/0001", b"a-token-that-nobody-can-guess-at-all"
PUT, TXN = "/etcdserverpb.KV/Put", "/etcdserverpb.KV/Txn"
FIRST = 1_767_225_600_000
SLOT = b"\xff" * len(str(FIRST))
"""Stands in a transaction for the value that rises."""

DATA, HEADERS, RESET, SETTINGS, PING, GOAWAY, WINDOW = 0, 1, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS = 1, 1, 4
FRAME = 16_384
START_WINDOW = 65_535


# ---- messages


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def field(number: int, value: bytes | int) -> bytes:
    """One member of a message."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def put(key: bytes, value: bytes) -> bytes:
    return field(1, key) + field(2, value)


def transaction(keys: int) -> bytes:
    """If the lease's key has the token: every key's new value."""
    is_value, equals = field(2, 3), field(1, 0)
    compare = equals + is_value + field(3, LEASE) + field(7, TOKEN)
    puts = (field(2, put(b"job/s/n%04d" % i, SLOT)) for i in range(keys))
    return field(1, compare) + b"".join(field(2, one) for one in puts)


def succeeded(answer: bytes) -> bool:
    """Whether the transaction's comparison held: the second member of its answer."""
    # The first one is the header, a message.
    return answer[:1] == b"\x0a" and answer[2 + answer[1] :][:2] == b"\x10\x01"


# ---- HTTP/2, as much as one call at a time needs


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + payload


def literal(name: bytes, value: bytes) -> bytes:
    """A header that the table is not to remember."""
    return b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value


class Call(asyncio.Protocol):
    """One connection, and the call that is under way on it."""

    def __init__(self) -> None:
        self._streams = itertools.count(1, 2)
        self._buffer = bytearray()
        self._window = START_WINDOW
        self._room = asyncio.Event()
        self._answer = bytearray()
        self._done: asyncio.Future[bytes] | None = None

    @classmethod
    async def connect(cls, port: int) -> Call:
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(cls, "127.0.0.1", port)
        return made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's is one, and does not say so.
        self._transport = cast("asyncio.Transport", transport)
        # The server may send as much as it likes.
        window = (1 << 31) - 1
        settings = (4).to_bytes(2) + window.to_bytes(4)
        self._transport.write(
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
            + frame(SETTINGS, 0, 0, settings)
            + frame(WINDOW, 0, 0, (window - START_WINDOW).to_bytes(4))
        )

    async def __call__(self, path: str, message: bytes) -> bytes:
        """The answer's message."""
        stream = next(self._streams)
        body = b"\0" + len(message).to_bytes(4) + message
        while self._window < len(body):
            self._room.clear()
            await self._room.wait()
        self._window -= len(body)
        head = (
            b"\x83\x86"  # POST, http
            + literal(b":path", path.encode())
            + literal(b":authority", b"etcd")
            + literal(b"content-type", b"application/grpc")
            + literal(b"te", b"trailers")
        )
        parts = [frame(HEADERS, END_HEADERS, stream, head)]
        for start in range(0, len(body), FRAME):
            last = start + FRAME >= len(body)
            piece = body[start : start + FRAME]
            parts.append(frame(DATA, END_STREAM if last else 0, stream, piece))
        self._answer.clear()
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(b"".join(parts))
        return await self._done

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= 9:
            size = int.from_bytes(self._buffer[:3])
            if len(self._buffer) < 9 + size:
                return
            kind, flags = self._buffer[3], self._buffer[4]
            stream = int.from_bytes(self._buffer[5:9])
            payload = bytes(self._buffer[9 : 9 + size])
            del self._buffer[: 9 + size]
            self._take(kind, flags, stream, payload)

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == DATA:
            self._answer += payload
        elif kind == WINDOW and stream == 0:
            self._window += int.from_bytes(payload)
            self._room.set()
        elif kind in {SETTINGS, PING} and not flags & ACK:
            self._transport.write(frame(kind, ACK, 0, payload if kind == PING else b""))
        elif kind in {RESET, GOAWAY}:
            self._finish(LoadFailedError(f"etcd hung up: {payload!r}"))
        if kind in {DATA, HEADERS} and flags & END_STREAM:
            # Without a message it was refused: why is in the trailers, which are compressed.
            refused = LoadFailedError("etcd refused the call") if not self._answer else None
            self._finish(refused)

    def _finish(self, error: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            if error is None:
                self._done.set_result(bytes(self._answer[5:]))
            else:
                self._done.set_exception(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish(LoadFailedError(f"etcd hung up: {exc}"))

    def close(self) -> None:
        self._transport.close()


async def load(port: int, keys: int, connections: int, seconds: float) -> tuple[int, float]:
    """How many transactions were made, in what time."""
    calls = [await Call.connect(port) for _ in range(connections)]
    await calls[0](PUT, put(LEASE, TOKEN))
    template = transaction(keys).split(SLOT)
    values = itertools.count(FIRST)
    start = time.perf_counter()
    until = start + seconds

    async def client(call: Call) -> int:
        done = 0
        while time.perf_counter() < until:
            answer = await call(TXN, (b"%d" % next(values)).join(template))
            if not succeeded(answer):
                raise LoadFailedError(f"etcd's transaction failed: {answer[:100]!r}")
            done += 1
        return done

    counts = await asyncio.gather(*map(client, calls))
    took = time.perf_counter() - start
    for call in calls:
        call.close()
    return sum(counts), took


# ---- the server


@dataclass(frozen=True)
class Etcd:
    """An etcd that runs."""

    port: int
    pid: int


@contextmanager
def etcd(folder: Path) -> Generator[Etcd | None]:
    """Run etcd on a folder of its own. None: it is not installed."""
    program = shutil.which("etcd")
    if program is None:
        yield None
        return
    folder.mkdir()
    client, peer = free_port(), free_port()
    here = f"http://127.0.0.1:{client}"
    among = f"http://127.0.0.1:{peer}"
    process = launch(
        [
            *(program, "--name", "bench", "--data-dir", folder / "data"),
            *("--listen-client-urls", here, "--advertise-client-urls", here),
            *("--listen-peer-urls", among, "--initial-advertise-peer-urls", among),
            *("--initial-cluster", f"bench={among}", "--log-level", "error"),
            *("--max-txn-ops", "10000", "--max-request-bytes", str(8 << 20)),
            # Room for every round: a full one would refuse.
            *("--quota-backend-bytes", str(8 << 30)),
        ],
        folder / "etcd.log",
        cwd=folder,
    )

    def answers() -> bool:
        assert process.poll() is None, (folder / "etcd.log").read_text()[-4000:]
        try:
            return uvloop.run(load(client, 1, 1, 0.01))[0] > 0
        except LoadFailedError:
            return False

    try:
        wait_until(answers, "etcd ready")
        yield Etcd(client, process.pid)
    finally:
        process.kill()
        process.wait()


def run_etcd(port: int, keys: int, connections: int, seconds: float) -> Outcome:
    """The load, from a process of its own."""
    words = [str(port), str(keys), str(connections), str(seconds)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.etcd", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise LoadFailedError(f"etcd: {done.stderr[-2000:]}")
    return Outcome(*json.loads(done.stdout))


if __name__ == "__main__":
    to, how_many, clients, duration = sys.argv[1:]
    print(json.dumps(uvloop.run(load(int(to), int(how_many), int(clients), float(duration)))))
