"""Two replicas of the service on one Redis and one Postgres, with a proxy on every connection."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self

from tests.chaos.history import History, Mark
from tests.support.postgres_server import PostgresServer
from tests.support.proxy import Proxy
from tests.support.redis_server import RedisCluster, RedisSentinels, RedisServer
from tests.support.server import START_S, Service

MAX_CONNECTIONS = 40
"""The limit of Postgres connections: low, so that it is soon reached."""

_LOG_LINE = re.compile(r"\d{4}-\d\d-\d\d ")
"""Start of a log line; the lines of a traceback start differently."""


class Replica(Service):
    """One service on a port of its own, which its clients reach through a proxy."""

    def __init__(self, folder: Path, name: str, *, ledger_url: str, live_url: str) -> None:
        folder.mkdir(parents=True)
        super().__init__(folder, options=("--live-url", live_url, "--log-level", "info"))
        self.name = name
        self.ledger_url = ledger_url
        self.front = Proxy(self.port)
        self.front_url = f"http://127.0.0.1:{self.front.port}"

    @property
    def log_file(self) -> Path:
        return self.folder / "service.log"

    def errors(self) -> str:
        """The first errors of its log, each with its traceback."""
        kept: list[str] = []
        is_error = False
        for line in self.log_file.read_text(errors="replace").splitlines():
            if _LOG_LINE.match(line):
                is_error = " ERROR " in line
            if is_error:
                kept.append(line)
        return "\n".join(kept)[:8_000]

    def wait_ready(self) -> None:
        """Restart it if it ends because a store is unavailable, as a process manager would."""
        deadline = time.monotonic() + START_S
        while True:
            try:
                super().wait_ready()
            except AssertionError:
                if time.monotonic() > deadline or self._process is None:
                    raise
                if self._process.poll() is None:
                    raise
                self._process = None
                time.sleep(0.2)
                self.launch()
            else:
                return

    def pause(self) -> None:
        """Pause it, in the middle of whatever it is doing."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


Live = Literal["redis", "sentinel", "cluster"]
"""Deployment of Redis."""

LIVES: Final[tuple[Live, ...]] = ("redis", "sentinel", "cluster")


class Stores:
    """Redis and Postgres, and each replica's proxies to them.

    Sentinel and Cluster tell clients where to go, so there is no proxy on the way to those.
    """

    def __init__(self, folder: Path, stack: ExitStack, live: Live) -> None:
        self._folder = folder
        self._stack = stack
        self._made = 0
        self._redis: RedisServer | None = None
        self.sentinels: RedisSentinels | None = None
        self.nodes: RedisCluster | None = None
        match live:
            case "redis":
                self._redis = self.new_redis()
            case "sentinel":
                self.sentinels = stack.enter_context(RedisSentinels(folder / "sentinels"))
            case "cluster":
                self.nodes = stack.enter_context(RedisCluster(folder / "nodes"))
        self.postgres = stack.enter_context(
            PostgresServer(folder / "postgres", max_connections=MAX_CONNECTIONS)
        )
        self._ledger = self.postgres.database()
        self.to_redis: list[Proxy] = []
        self.to_postgres: list[Proxy] = []

    @property
    def redis(self) -> RedisServer:
        """The one server, or the primary that Sentinel names."""
        if self.sentinels is not None:
            return self.sentinels.primary
        assert self._redis is not None, "there is no one server"
        return self._redis

    @redis.setter
    def redis(self, server: RedisServer) -> None:
        self._redis = server

    def holders(self) -> Sequence[RedisServer]:
        """The servers that have any state."""
        servers = [self.redis] if self.nodes is None else self.nodes.nodes
        return [server for server in servers if server.command("DBSIZE")]

    def new_redis(self) -> RedisServer:
        self._made += 1
        return self._stack.enter_context(RedisServer(self._folder / f"redis-{self._made}"))

    def urls(self) -> tuple[str, str]:
        """A replica's own connections to the ledger and to the live store."""
        postgres = self._stack.enter_context(Proxy(self.postgres.port, seed=self._made))
        self.to_postgres.append(postgres)
        ledger = self._ledger.replace(f":{self.postgres.port}/", f":{postgres.port}/")
        discovered = self.sentinels or self.nodes
        if discovered is not None:
            return ledger, discovered.url
        redis = self._stack.enter_context(Proxy(self.redis.port, seed=self._made))
        self.to_redis.append(redis)
        return ledger, f"redis://127.0.0.1:{redis.port}"


class Cluster:
    """The system that the faults are injected into."""

    def __init__(self, folder: Path, *, embedded: bool = False, live: Live = "redis") -> None:
        """`embedded`: one replica on the stores for one process, with no proxy behind it."""
        self._folder = folder
        self._embedded = embedded
        self.live: Live = live
        self._stack = ExitStack()
        self._stores: Stores | None = None
        self.replicas: list[Replica] = []
        self.history: History | None = None
        """History of the workload that runs now."""

    @property
    def stores(self) -> Stores:
        assert self._stores is not None, "the embedded stores cannot be broken apart"
        return self._stores

    @property
    def embedded(self) -> bool:
        return self._embedded

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def _start(self) -> None:
        if not self._embedded:
            self._stores = Stores(self._folder, self._stack, self.live)
        for name in "a" if self._embedded else "ab":
            ledger, live = self._urls(name)
            replica = Replica(self._folder / name, name, ledger_url=ledger, live_url=live)
            self.replicas.append(replica)
            self._stack.callback(replica.front.close)
            self._stack.push(replica.__exit__)
            replica.launch()
        for replica in self.replicas:
            replica.wait_ready()

    def _urls(self, name: str) -> tuple[str, str]:
        if self._stores is not None:
            return self._stores.urls()
        return f"sqlite+aiosqlite:///{self._folder / name / 'ledger.db'}", "memory://"

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def proxies(self) -> Iterator[Proxy]:
        yield from (replica.front for replica in self.replicas)
        if self._stores is not None:
            yield from self._stores.to_redis
            yield from self._stores.to_postgres

    def logs(self) -> str:
        """The errors that each replica has logged, with tracebacks, and the end of its log."""
        return "\n".join(
            f"--- {r.name}: errors\n{r.errors()}\n--- {r.name}: the end\n{r.log()}"
            for r in self.replicas
        )

    @contextmanager
    def loses_live_store(self, name: str) -> Generator[None]:
        """Record in the history that the live store's state is lost from here on."""
        begin_ns = time.monotonic_ns()
        yield
        if self.history is not None:
            self.history.add(Mark("live-lost", name, begin_ns, time.monotonic_ns()))
