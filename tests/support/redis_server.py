"""Real Redis servers: alone, with a replica, behind a Sentinel, as a Cluster."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

from tests.support.binaries import WAIT_S, free_port, launch, redis_server, wait_until
from tests.support.process import ServerProcess, Started

SLOTS = 16_384
NODES_FILE = "nodes.conf"
SETTINGS: Mapping[str, str] = {
    "bind": "127.0.0.1",
    "save": "",
    "daemonize": "no",
    # A saved copy of the files must not be of the middle of a rewrite.
    "auto-aof-rewrite-percentage": "0",
    "repl-diskless-sync": "yes",
    "repl-diskless-sync-delay": "0",
    "repl-ping-replica-period": "1",
}


class RedisError(Exception):
    """A server's error reply."""


class _Server(ServerProcess):
    """One `redis-server` on one port, through any number of processes."""

    def __init__(self, folder: Path, port: int) -> None:
        super().__init__()
        self.folder = folder
        self.port = port

    def _arguments(self) -> Sequence[str]:
        raise NotImplementedError

    def start(self) -> None:
        """Start, and return once it answers and has loaded its files."""
        assert self._process is None, "already running"
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [redis_server(), *self._arguments()]
        self._process = launch(command, self.folder / "redis.log", cwd=self.folder)
        wait_until(self._ready, f"Redis ready\n{self.log()}")

    def _ready(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            status = self._process.returncode
            self._process = None
            raise AssertionError(f"ended with {status}\n{self.log()}")
        try:
            return self.command("PING") == "PONG"
        except RedisError as error:
            if not str(error).startswith(("LOADING", "MASTERDOWN")):
                raise
            return False

    def log(self) -> str:
        """The end of its log."""
        path = self.folder / "redis.log"
        return path.read_text(errors="replace")[-4000:] if path.exists() else ""

    def command(self, *words: str | bytes | int) -> Any:
        """Send one command on a connection of its own: a status is a str, a bulk string bytes."""
        with socket.create_connection(("127.0.0.1", self.port), WAIT_S) as connection:
            connection.sendall(_encode(words))
            with connection.makefile("rb") as reader:
                return _decode(reader)


class RedisServer(_Server):
    """One Redis with its files in `folder`."""

    def __init__(
        self,
        folder: Path,
        *,
        port: int | None = None,
        appendonly: bool = True,
        fsync: Literal["always", "everysec"] = "always",
        extra: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(folder, port or free_port())
        self._settings = {
            **SETTINGS,
            "port": str(self.port),
            "dir": str(self._data),
            "appendonly": "yes" if appendonly else "no",
            "appendfsync": fsync,
            **(extra or {}),
        }
        self._saved = 0

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def _data(self) -> Path:
        return self.folder / "data"

    def _arguments(self) -> Sequence[str]:
        self._data.mkdir(exist_ok=True)
        return [word for name, value in self._settings.items() for word in (f"--{name}", value)]

    def restart(self, *, empty: bool = False) -> None:
        """Stop in order and start again; `empty`: with nothing of what it knew (but its cluster)."""
        self.stop()
        if empty:
            self._forget()
        self.start()

    def save_files(self) -> Path:
        """Copy what is on the disk now, for `restore_files`. It need not stop for that."""
        self._saved += 1
        saved = self.folder / f"saved-{self._saved}"
        shutil.copytree(self._data, saved, ignore=shutil.ignore_patterns(NODES_FILE, "temp-*"))
        return saved

    def restore_files(self, saved: Path) -> None:
        """Put the files back that were saved, while it does not run: the disk of an older day."""
        assert self._process is None, "still running"
        self._forget()
        shutil.copytree(saved, self._data, dirs_exist_ok=True)

    def _forget(self) -> None:
        for path in self._data.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != NODES_FILE:
                path.unlink()

    def replicate(self, primary: RedisServer) -> None:
        """Become a replica, and return once everything is copied."""
        self.command("REPLICAOF", "127.0.0.1", primary.port)
        wait_until(lambda: self.info("replication")["master_link_status"] == "up", "replication")

    def promote(self) -> None:
        """Become a primary."""
        self.command("REPLICAOF", "NO", "ONE")

    def info(self, section: str) -> Mapping[str, str]:
        """One section of INFO."""
        return _fields(self.command("INFO", section))


class RedisCluster(Started):
    """Masters that share the slots, without replicas."""

    def __init__(
        self,
        folder: Path,
        nodes: int = 3,
        *,
        appendonly: bool = True,
        extra: Mapping[str, str] | None = None,
    ) -> None:
        settings = {
            "cluster-enabled": "yes",
            "cluster-config-file": NODES_FILE,
            "cluster-node-timeout": "2000",
            **(extra or {}),
        }
        ports: set[int] = set()
        while len(ports) < nodes:
            ports.add(free_port(bus=True))
        self.nodes = [
            RedisServer(folder / f"node-{n}", port=port, appendonly=appendonly, extra=settings)
            for n, port in enumerate(sorted(ports))
        ]

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def start(self) -> None:
        """Start all nodes and join them; return once every node reports that the cluster works."""
        for node in self.nodes:
            node.start()
        size = -(-SLOTS // len(self.nodes))
        for n, node in enumerate(self.nodes):
            node.command("CLUSTER", "ADDSLOTS", *range(n * size, min(SLOTS, (n + 1) * size)))
            # Otherwise all start at 0 and must first resolve the conflict.
            node.command("CLUSTER", "SET-CONFIG-EPOCH", n + 1)
        for node in self.nodes[1:]:
            self.nodes[0].command("CLUSTER", "MEET", "127.0.0.1", node.port)
        self.wait_ok()

    def wait_ok(self) -> None:
        """Return once every node knows the others and that every slot is served."""
        wait_until(lambda: all(map(self._ok, self.nodes)), "cluster_state:ok")

    def _ok(self, node: RedisServer) -> bool:
        state = _fields(node.command("CLUSTER", "INFO"))
        return (
            state["cluster_state"] == "ok"
            and state["cluster_slots_ok"] == str(SLOTS)
            and state["cluster_known_nodes"] == str(len(self.nodes))
        )

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()

    def kill(self) -> None:
        for node in self.nodes:
            node.kill()


class RedisSentinel(_Server):
    """One Sentinel, by default alone. Primary and replica are the caller's, and run already.

    It asks them once a second: who does not answer for hardly longer would be given up for nothing.
    """

    def __init__(
        self,
        folder: Path,
        primary: RedisServer,
        replica: RedisServer,
        name: str = "tidegauge",
        *,
        down_after_ms: int = 3_000,
        quorum: int = 1,
    ) -> None:
        super().__init__(folder, free_port())
        self.name = name
        self._quorum = quorum
        self._primary = primary
        self._replica = replica
        self._down_after_ms = down_after_ms

    @property
    def url(self) -> str:
        return f"redis+sentinel://127.0.0.1:{self.port}/{self.name}"

    def _arguments(self) -> Sequence[str]:
        config = self.folder / "sentinel.conf"
        # Once written, the file is the Sentinel's: it records the current primary there.
        if not config.exists():
            config.write_text(
                f"port {self.port}\n"
                "bind 127.0.0.1\n"
                f'dir "{self.folder}"\n'
                f"sentinel monitor {self.name} 127.0.0.1 {self._primary.port} {self._quorum}\n"
                f"sentinel down-after-milliseconds {self.name} {self._down_after_ms}\n"
                f"sentinel failover-timeout {self.name} 5000\n"
            )
        return [str(config), "--sentinel"]

    def start(self) -> None:
        """Start, and return once it knows both and would promote the replica."""
        if self._replica.info("replication")["role"] == "master":
            self._replica.replicate(self._primary)
        super().start()
        wait_until(lambda: any(map(_promotable, self._replicas())), "Sentinel knows the replica")

    def knows(self, others: int) -> bool:
        """Return whether it knows so many other Sentinels."""
        return len(self.command("SENTINEL", "SENTINELS", self.name)) == others

    def _replicas(self) -> Sequence[Mapping[str, str]]:
        replies: list[list[bytes]] = self.command("SENTINEL", "REPLICAS", self.name)
        return [_pairs([item.decode() for item in reply]) for reply in replies]

    def failover(self) -> None:
        """Promote the replica now, although the primary is alive, and return once that is done."""
        before = self.primary_port()
        wait_until(self._begin_failover, "failover begun")
        wait_until(lambda: self.primary_port() != before, "failover done")
        self.wait_for_primary(self.primary_port())

    def _begin_failover(self) -> bool:
        try:
            return self.command("SENTINEL", "FAILOVER", self.name) == "OK"
        except RedisError as error:
            # INPROG: a failover has started by itself, or the last one is not finished.
            if not str(error).startswith(("NOGOODSLAVE", "INPROG")):
                raise
            return False

    def primary_port(self) -> int:
        """The port it sends clients to."""
        _, port = self.command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.name)
        return int(port)

    def wait_for_primary(self, port: int) -> None:
        """Return once clients are sent to `port`, and the server there reports itself as primary."""
        found = next(s for s in (self._primary, self._replica) if s.port == port)
        wait_until(
            lambda: self.primary_port() == port and found.info("replication")["role"] == "master",
            f"primary at {port}",
        )


class RedisSentinels(Started):
    """A primary, a replica, and three Sentinels, of which two must agree."""

    def __init__(self, folder: Path, name: str = "tidegauge") -> None:
        self.servers = [RedisServer(folder / f"redis-{n}") for n in range(2)]
        self.sentinels = [
            RedisSentinel(
                folder / f"sentinel-{n}",
                self.servers[0],
                self.servers[1],
                name,
                down_after_ms=2_000,
                quorum=2,
            )
            for n in range(3)
        ]
        self._name = name

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis+sentinel://{hosts}/{self._name}"

    @property
    def primary(self) -> RedisServer:
        """The server that clients are sent to."""
        port = self.sentinels[0].primary_port()
        return next(server for server in self.servers if server.port == port)

    def start(self) -> None:
        """Start all of them; return once they know each other."""
        for server in (*self.servers, *self.sentinels):
            server.start()
        wait_until(lambda: all(s.knows(2) for s in self.sentinels), "Sentinels know each other")

    def fail_over(self) -> RedisServer:
        """Kill the primary; return it once every Sentinel sends clients to the replica."""
        old = self.primary
        new = next(server for server in self.servers if server is not old)
        old.kill()
        for sentinel in self.sentinels:
            sentinel.wait_for_primary(new.port)
        return old

    def rejoin(self, server: RedisServer) -> None:
        """Start a server that was killed; return once it follows the primary."""
        server.start()
        wait_until(
            lambda: server.info("replication").get("master_link_status") == "up", "it follows"
        )

    def kill(self) -> None:
        for server in (*self.sentinels, *self.servers):
            server.kill()


def _promotable(replica: Mapping[str, str]) -> bool:
    return replica["flags"] == "slave" and replica["master-link-status"] == "ok"


def _pairs(items: Sequence[str]) -> Mapping[str, str]:
    return dict(zip(items[::2], items[1::2], strict=True))


def _fields(reply: bytes) -> Mapping[str, str]:
    lines = reply.decode().splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


def _encode(words: Sequence[str | bytes | int]) -> bytes:
    parts = [word if isinstance(word, bytes) else str(word).encode() for word in words]
    body = b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)
    return b"*%d\r\n%b" % (len(parts), body)


def _decode(reader: BinaryIO) -> Any:
    line = reader.readline()
    if not line.endswith(b"\r\n"):
        raise ConnectionError("the server hung up")
    kind, rest = line[:1], line[1:-2]
    match kind:
        case b"+":
            return rest.decode()
        case b"-":
            raise RedisError(rest.decode())
        case b":":
            return int(rest)
        case b"$":
            return None if rest == b"-1" else reader.read(int(rest) + 2)[:-2]
        case b"*":
            return None if rest == b"-1" else [_decode(reader) for _ in range(int(rest))]
        case _:
            raise AssertionError(f"not RESP: {line!r}")
