# pyright: basic, reportAttributeAccessIssue=false
"""etcd, as it would be used for the same: compare the key of the lease, then put all the values.

Through gRPC itself, not its gateway for JSON. Each connection has one transaction under way, as one of
HTTP/1.1 has. The client's own work counts against etcd on the same cores; so a transaction is made by
protobuf once, and only the value that rises is put into its bytes for each call. With one key a
transaction, a client that wrote the few HTTP/2 frames itself got a quarter to two thirds more out of it:
read that ratio with this in mind. With a thousand keys there was no difference.

`python -m benchmarks.etcd PORT KEYS CONNECTIONS SECONDS`
"""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any, Final

import grpc

from benchmarks.load import LoadFailedError, Outcome
from benchmarks.servers import ROOT
from tests.support.binaries import free_port, launch, wait_until

LEASE: Final = b"lease/0001"
TOKEN: Final = b"a-token-that-nobody-can-guess-at-all"
FIRST: Final = 1_767_225_600_000
SLOT: Final = b"\xff" * len(str(FIRST))
"""Stands in a transaction for the value that rises."""

# Each client has a connection of its own, also to one and the same server.
_OPTIONS: Final = [("grpc.use_local_subchannel_pool", 1)]


def _messages() -> Any:  # noqa: ANN401 - made from the .proto when it is loaded
    return grpc.protos("benchmarks/etcd.proto")


def transaction(keys: int) -> bytes:
    """If the lease's key has the token: every key's new value."""
    m = _messages()
    compare = m.Compare(result="EQUAL", target="VALUE", key=LEASE, value=TOKEN)
    puts = [m.PutRequest(key=b"job/s/n%04d" % i, value=SLOT) for i in range(keys)]
    ops = [m.RequestOp(request_put=put) for put in puts]
    return m.TxnRequest(compare=[compare], success=ops).SerializeToString()


def load(port: int, keys: int, connections: int, seconds: float) -> tuple[int, float]:
    """Return the number of transactions, and their time.

    A thread for each connection: gRPC does nearly all of the work outside the interpreter's lock, and
    its asyncio variant takes twice the processor time for a call.
    """
    m = _messages()
    channels = [
        grpc.insecure_channel(f"127.0.0.1:{port}", options=_OPTIONS) for _ in range(connections)
    ]
    template = transaction(keys).split(SLOT)
    values = itertools.count(FIRST)

    def client(channel: grpc.Channel, until: float) -> int:
        call = channel.unary_unary(
            "/etcdserverpb.KV/Txn", response_deserializer=m.TxnResponse.FromString
        )
        done = 0
        while time.perf_counter() < until:
            if not call((b"%d" % next(values)).join(template)).succeeded:
                raise LoadFailedError("etcd's transaction failed: the lease has another token")
            done += 1
        return done

    try:
        put = channels[0].unary_unary("/etcdserverpb.KV/Put", m.PutRequest.SerializeToString)
        put(m.PutRequest(key=LEASE, value=TOKEN))
        with ThreadPoolExecutor(connections) as threads:
            start = time.perf_counter()
            counts = list(threads.map(client, channels, repeat(start + seconds)))
            return sum(counts), time.perf_counter() - start
    except grpc.RpcError as error:
        raise LoadFailedError(f"etcd: {error}") from error
    finally:
        for channel in channels:
            channel.close()


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
            return load(client, 1, 1, 0.01)[0] > 0
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
    arguments = [str(port), str(keys), str(connections), str(seconds)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.etcd", *arguments],
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
    print(json.dumps(load(int(to), int(how_many), int(clients), float(duration))))
