"""`python -m benchmarks.readers [--readers 10000] [--deaf 1000]`: what waiting readers cost.

Half of the readers follow the job's events, half wait in long polls. Printed are the time from an
advance until the last of them has it, and the rate of reports to another job: without readers, with
them, with an advance every second, and with some more that never read. Rates are ratios to the one
without readers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import socket
import tempfile
import time
from pathlib import Path

import httpx

from tests.support.server import Service

FLOW = {"stages": {"s": {"shards": ["0"]}}}


class Reader(asyncio.Protocol):
    """Notes when it has received a text."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.wanted = b""
        self.received: asyncio.Future[float] | None = None
        self.first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.ask()

    def ask(self) -> None:
        self.transport.write(self._request)

    def want(self, text: bytes) -> asyncio.Future[float]:
        self.wanted, self._tail = text, b""
        self.received = asyncio.get_running_loop().create_future()
        return self.received

    def data_received(self, data: bytes) -> None:
        if not self.first.done():
            self.first.set_result(None)
        self._tail = self._tail[-200:] + data
        if self.received and not self.received.done() and self.wanted in self._tail:
            self.received.set_result(time.perf_counter())


def request(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: localhost", *headers, "", ""]).encode()


class Bench:
    def __init__(self, service: Service, client: httpx.AsyncClient) -> None:
        self.service = service
        self.client = client
        self.value = 0
        self.token = ""

    async def define(self) -> str:
        for job in ("watched", "other"):
            (await self.client.put(f"/v1/jobs/{job}", json=FLOW)).raise_for_status()
        tokens = [await self.claim(job) for job in ("watched", "other")]
        self.token = tokens[0]
        return tokens[1]

    async def claim(self, job: str) -> str:
        body = {"ranges": "all", "holder": "bench", "ttl_ms": 600_000}
        answer = await self.client.post(f"/v1/jobs/{job}/stages/s/leases", json=body)
        return answer.raise_for_status().json()["token"]

    async def advance(self) -> bytes:
        self.value += 1
        body = {"token": self.token, "ranges": {"0": 1_000_000_000 + self.value}}
        answer = await self.client.post("/v1/jobs/watched/stages/s/reports", json=body)
        answer.raise_for_status()
        return b'"output_watermark":%d' % (1_000_000_000 + self.value)

    async def etag(self) -> str:
        answer = await self.client.get("/v1/jobs/watched/stages/s/watermark")
        return answer.headers["etag"]

    async def rate(self, token: str, seconds: float) -> float:
        """Reports a second to the other job, by eight connections."""
        body = json.dumps({"token": token, "ranges": {"0": 5}})
        head = {"Content-Type": "application/json"}
        end, done = time.perf_counter() + seconds, 0

        async def send() -> None:
            nonlocal done
            async with httpx.AsyncClient(base_url=self.service.url, timeout=60) as client:
                while time.perf_counter() < end:
                    url = "/v1/jobs/other/stages/s/reports"
                    (await client.post(url, content=body, headers=head)).raise_for_status()
                    done += 1

        await asyncio.gather(*(send() for _ in range(8)))
        return done / seconds

    async def connect(self, count: int) -> tuple[list[Reader], list[Reader]]:
        loop = asyncio.get_running_loop()
        poll = request(
            "/v1/jobs/watched/stages/s/watermark",
            f"If-None-Match: {await self.etag()}",
            "Prefer: wait=60",
        )
        streams: list[Reader] = []
        polls: list[Reader] = []
        for start in range(0, count, 200):
            for n in range(start, min(start + 200, count)):
                text = request("/v1/jobs/watched/events") if n % 2 else poll
                _, reader = await loop.create_connection(
                    lambda text=text: Reader(text), "127.0.0.1", self.service.port
                )
                (streams if n % 2 else polls).append(reader)
            await asyncio.gather(*(reader.first for reader in streams))
        return streams, polls


async def deaf(service: Service, count: int) -> list[socket.socket]:
    """Connections that ask for events and never read."""
    opened: list[socket.socket] = []
    for _ in range(count):
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2_048)
        one.setblocking(True)
        one.connect(("127.0.0.1", service.port))
        one.sendall(request("/v1/jobs/watched/events"))
        opened.append(one)
        if not len(opened) % 50:
            await asyncio.sleep(0)
    return opened


def cpu_s(pid: int) -> float:
    """The processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readers", description=__doc__)
    parser.add_argument("--readers", type=int, default=10_000)
    parser.add_argument("--deaf", type=int, default=1_000)
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with (
        tempfile.TemporaryDirectory(prefix="tidegauge-readers-") as folder,
        # All of them are at one address.
        Service(Path(folder), environment={"TIDEGAUGE_MAX_READERS_PER_CLIENT": "16000"}) as service,
    ):
        async with httpx.AsyncClient(base_url=service.url, timeout=60) as client:
            bench = Bench(service, client)
            token = await bench.define()
            await bench.advance()
            await bench.rate(token, 1)
            alone = await bench.rate(token, options.seconds)
            print(f"without readers: {alone:,.0f} reports/s")
            streams, polls = await bench.connect(options.readers)
            waiting = await bench.rate(token, options.seconds)
            print(f"{options.readers:,} readers waiting: {waiting / alone:.2f} of that")
            value = b'"output_watermark":%d' % (1_000_000_000 + bench.value + 1)
            wanted = [reader.want(value) for reader in (*streams, *polls)]
            began, used = time.perf_counter(), cpu_s(service.pid)
            await bench.advance()
            answered = time.perf_counter() - began
            times = await asyncio.gather(*wanted)
            print(
                f"one advance: answered after {answered:.2f} s, with the last reader after"
                f" {max(times) - began:.2f} s, for {cpu_s(service.pid) - used:.2f} s of the service's"
                " processor time"
            )

            async def advancing() -> None:
                while True:
                    await bench.advance()
                    await asyncio.sleep(1)

            task = asyncio.create_task(advancing())
            moving = await bench.rate(token, options.seconds)
            print(f"{len(streams):,} streams, an advance a second: {moving / alone:.2f} of that")
            sockets = await deaf(service, options.deaf)
            unread = await bench.rate(token, options.seconds)
            task.cancel()
            print(f"and {len(sockets):,} more that never read: {unread / alone:.2f} of that")
            for one in sockets:
                one.close()
            for reader in (*streams, *polls):
                reader.transport.abort()


if __name__ == "__main__":
    asyncio.run(main())
