"""The stores that a test runs the service on, and how to pass time and lose state there."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.support.postgres_server import PostgresServer
from tests.support.redis_server import RedisServer


def hasten(servers: Sequence[RedisServer], ms: int) -> None:
    """Let time pass for leases in Redis, which uses its own clock: move every deadline closer."""
    for server in servers:
        for key in server.command("KEYS", "*:deadlines"):
            for fence in server.command("ZRANGE", key, 0, -1):
                server.command("ZINCRBY", key, -ms, fence)


@dataclass
class Stores:
    """The servers behind a service; without them it is on its embedded stores."""

    redis: RedisServer | None = None
    postgres: PostgresServer | None = None
    live_url: str = ""
    """URL of Redis, if not its own address."""
    ledger_url: str | None = field(default=None, init=False)
    _looked_at: float = field(default_factory=time.monotonic, init=False)

    def __post_init__(self) -> None:
        if self.redis is not None:
            self.redis.command("FLUSHALL")
        self.live_url = self.live_url or ("memory://" if self.redis is None else self.redis.url)
        if self.postgres is not None:
            self.ledger_url = self.postgres.database()

    def hasten(self, ms: int) -> None:
        if self.redis is not None:
            hasten([self.redis], ms)

    def stand_still(self) -> None:
        """Let no time have passed since this was called last: only a fake clock moves."""
        now = time.monotonic()
        passed_ms, self._looked_at = int(1_000 * (now - self._looked_at)), now
        self.hasten(-passed_ms)

    def lose(self) -> None:
        """Let the live store lose everything, as memory does when its process ends."""
        if self.redis is not None:
            self.redis.command("FLUSHALL")

    def execute(self, statement: str) -> None:
        """Change the ledger behind the service's back, as another replica would."""
        assert self.postgres is not None
        assert self.ledger_url is not None
        self.postgres.execute(statement, self.ledger_url.rpartition("/")[2])
