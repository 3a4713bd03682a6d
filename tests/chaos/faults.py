"""The faults. `inject` causes a fault, ends it, and returns when everything is as before."""

from __future__ import annotations

import contextlib
import random
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import ClassVar

import psycopg

from tests.chaos.cluster import LIVES, Cluster, Live
from tests.chaos.workload import TTL_MS, Workload
from tests.fuzz.requests import Maker
from tests.support.binaries import limit_files, wait_until
from tests.support.proxy import Proxy
from tests.support.redis_server import RedisError
from tests.support.wire import Wire


@dataclass
class Scene:
    """Targets of a fault."""

    cluster: Cluster
    workload: Workload
    chance: random.Random
    hold_s: float = 2.0
    """Duration of a fault that ends at our command."""

    def hold(self) -> None:
        """Let the load run during the fault."""
        time.sleep(self.hold_s)

    def writes(self, timeout_s: float = 5) -> None:
        """Let some load run first, which the fault may then lose."""
        before = self.workload.shown()
        self.workload.wait(lambda: self.workload.moved(before), timeout_s)


class Fault(ABC):
    """One kind of fault."""

    name: ClassVar[str]
    touches: ClassVar[frozenset[str]]
    """Two faults may happen at once if they touch different things."""
    embedded: ClassVar[bool] = False
    """True if it can also be done to one replica on the embedded stores."""
    lives: ClassVar[tuple[Live, ...]] = LIVES
    """To which deployments of Redis it can be done."""

    def suits(self, cluster_live: Live, *, embedded: bool) -> bool:
        """Return whether it can be done there."""
        return self.embedded if embedded else cluster_live in self.lives

    @abstractmethod
    def inject(self, scene: Scene) -> None:
        """Cause it, and end it."""


class ReplicaKilled(Fault):
    """A replica is killed, and restarted."""

    name = "replica-killed"
    touches = frozenset({"replica"})
    embedded = True

    def inject(self, scene: Scene) -> None:
        replica = scene.chance.choice(scene.cluster.replicas)
        replica.kill()
        time.sleep(scene.chance.uniform(0, scene.hold_s / 2))
        replica.start()


class ReplicaStopped(Fault):
    """A replica pauses for longer than a lease, then continues its work."""

    name = "replica-stopped"
    touches = frozenset({"replica"})
    embedded = True

    def inject(self, scene: Scene) -> None:
        replica = scene.chance.choice(scene.cluster.replicas)
        replica.pause()
        try:
            time.sleep(TTL_MS / 1_000 + 0.7)
        finally:
            replica.resume()


class RedisFlushed(Fault):
    """Redis is emptied while it runs."""

    name = "redis-flushed"
    touches = frozenset({"redis"})

    def inject(self, scene: Scene) -> None:
        with scene.cluster.loses_live_store(self.name):
            for server in scene.cluster.stores.holders():
                server.command("FLUSHALL")


class RedisEmptied(Fault):
    """Redis stops, and comes back empty. Of a cluster: a node that has a job."""

    name = "redis-emptied"
    touches = frozenset({"redis"})
    lives = ("redis", "cluster")

    def inject(self, scene: Scene) -> None:
        stores = scene.cluster.stores
        redis = scene.chance.choice(stores.holders())
        with contextlib.ExitStack() as lost:
            if stores.nodes is None:
                # Only one of a cluster's nodes has the watched job.
                lost.enter_context(scene.cluster.loses_live_store(self.name))
            redis.kill()
            time.sleep(scene.chance.uniform(0, 1))
            redis.restart(empty=True)
            if stores.nodes is not None:
                stores.nodes.wait_ok()


class RedisAged(Fault):
    """Redis stops, and comes back with an older state."""

    name = "redis-aged"
    touches = frozenset({"redis"})
    lives = ("redis",)

    def inject(self, scene: Scene) -> None:
        redis = scene.cluster.stores.redis
        saved = redis.save_files()
        scene.writes()
        with scene.cluster.loses_live_store(self.name):
            redis.kill()
            redis.restore_files(saved)
            redis.start()


class RedisFailedOver(Fault):
    """The primary is killed, and a replica takes over that lacks its latest writes."""

    name = "redis-failed-over"
    touches = frozenset({"redis"})
    lives = ("redis",)

    def inject(self, scene: Scene) -> None:
        stores = scene.cluster.stores
        primary, replica = stores.redis, stores.new_redis()
        with Proxy(primary.port) as link:
            replica.command("REPLICAOF", "127.0.0.1", link.port)
            wait_until(
                lambda: replica.info("replication")["master_link_status"] == "up", "replication"
            )
            link.stall()
            scene.writes()
            with scene.cluster.loses_live_store(self.name):
                primary.kill()
                link.close()
                replica.promote()
                stores.redis = replica
                for proxy in stores.to_redis:
                    proxy.retarget(replica.port)


class SentinelFailedOver(Fault):
    """The primary is killed, the Sentinels promote the replica, and the old primary follows it."""

    name = "sentinel-failed-over"
    touches = frozenset({"redis"})
    lives = ("sentinel",)

    def inject(self, scene: Scene) -> None:
        sentinels = scene.cluster.stores.sentinels
        assert sentinels is not None
        with scene.cluster.loses_live_store(self.name):
            old = sentinels.fail_over()
        sentinels.rejoin(old)


class ScriptsFlushed(Fault):
    """Redis forgets the scripts from time to time."""

    name = "scripts-flushed"
    touches = frozenset({"redis"})

    def inject(self, scene: Scene) -> None:
        for _ in range(10):
            for server in scene.cluster.stores.holders():
                server.command("SCRIPT", "FLUSH")
            time.sleep(scene.hold_s / 10)


class RedisRefuses(Fault):
    """Redis answers, but takes no writes."""

    name = "redis-refuses"
    touches = frozenset({"redis"})

    def inject(self, scene: Scene) -> None:
        servers = scene.cluster.stores.holders()
        setting, refusing, usual = scene.chance.choice(
            [("maxmemory", "1", "0"), ("min-replicas-to-write", "9", "0")]
        )
        try:
            for server in servers:
                server.command("CONFIG", "SET", setting, refusing)
            scene.hold()
        finally:
            for server in servers:
                server.command("CONFIG", "SET", setting, usual)


class RedisKeyDamaged(Fault):
    """One key after the other is lost, or holds something else."""

    name = "redis-key-damaged"
    touches = frozenset({"redis"})

    def inject(self, scene: Scene) -> None:
        for _ in range(4):
            redis = scene.chance.choice(scene.cluster.stores.holders())
            keys = sorted(redis.command("KEYS", "tidegauge*"))
            if keys:
                # Not every key is missed: of some, all that was in them is restored or not needed.
                key = scene.chance.choice(keys)
                redis.command("DEL", key)
                if scene.chance.random() < 0.5:
                    # Unless somebody has just written it again.
                    with contextlib.suppress(RedisError):
                        redis.command("XADD", key, "*", "something", "else")
            time.sleep(scene.hold_s / 4)


class RedisClockSetBack(Fault):
    """The clock of Redis is set back by an hour: what is stored was written an hour ahead of it."""

    name = "redis-clock-set-back"
    touches = frozenset({"redis"})

    def inject(self, scene: Scene) -> None:
        for redis in scene.cluster.stores.holders():
            for key in redis.command("KEYS", "*:deadlines"):
                job = key.removesuffix(b":deadlines")
                redis.command("EVAL", _AN_HOUR_AHEAD, 2, job, key)
        scene.hold()


_AN_HOUR_AHEAD = """
if redis.call('TYPE', KEYS[2])['ok'] ~= 'zset' then return end
if redis.call('HEXISTS', KEYS[1], 'clock') == 0 then return end
redis.call('HINCRBY', KEYS[1], 'clock', 3600000)
for _, fence in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do
  redis.call('ZINCRBY', KEYS[2], 3600000, fence)
end
"""


class HostileClient(Fault):
    """Somebody sends nonsense to both replicas, as fast as he can."""

    name = "hostile-client"
    touches = frozenset({"hostile"})
    embedded = True

    def inject(self, scene: Scene) -> None:
        maker = Maker(scene.chance.randrange(2**32), ())
        end = time.monotonic() + scene.hold_s
        while time.monotonic() < end:
            for replica in scene.cluster.replicas:
                with contextlib.suppress(OSError), Wire(replica.url, timeout_s=1) as wire:
                    for _ in range(20):
                        wire.send(maker.request()[0])
                    wire.closed(within_s=0.2)


class PostgresRestarted(Fault):
    """Postgres stops, in one of three ways, and comes back."""

    name = "postgres-restarted"
    touches = frozenset({"postgres"})

    def inject(self, scene: Scene) -> None:
        postgres = scene.cluster.stores.postgres
        ends: list[Callable[[], None]] = [
            postgres.stop,
            lambda: postgres.stop("immediate"),
            postgres.kill,
        ]
        scene.chance.choice(ends)()
        time.sleep(scene.chance.uniform(0, scene.hold_s / 2))
        postgres.start()


class DiskFull(Fault):
    """The ledger's disk is full: nothing can be written beyond what its files have.

    The limit is that of the process, which needs no rights. To Postgres it is the end if it happens in
    its log, as on a disk that is full; then it is started again, once there is room.
    """

    name = "disk-full"
    touches = frozenset({"postgres"})
    embedded = True

    def inject(self, scene: Scene) -> None:
        if scene.cluster.embedded:
            [replica] = scene.cluster.replicas
            limit_files([replica.pid], 0)
            scene.hold()
            limit_files([replica.pid], -1)
            return
        postgres = scene.cluster.stores.postgres
        postgres.limit_files(0)
        scene.hold()
        postgres.limit_files(-1)
        wait_until(postgres.takes_writes, "Postgres takes writes")


class ConnectionsExhausted(Fault):
    """Neither store takes another connection, and those that there were are cut."""

    name = "connections-exhausted"
    touches = frozenset({"redis", "postgres"})
    lives = ("redis",)

    def inject(self, scene: Scene) -> None:
        stores = scene.cluster.stores
        with _redis_full(scene), _postgres_full(scene):
            for proxy in (*stores.to_redis, *stores.to_postgres):
                proxy.cut_all()
            scene.hold()


@contextmanager
def _redis_full(scene: Scene) -> Generator[None]:
    """Opens idle connections until none are left; an older connection ends the fault."""
    redis = scene.cluster.stores.redis
    with socket.create_connection(("127.0.0.1", redis.port), 5) as admin, ExitStack() as idle:

        def limit(clients: int) -> None:
            admin.sendall(f"CONFIG SET maxclients {clients}\r\n".encode())
            assert admin.recv(1_000).startswith(b"+OK")

        before = int(redis.command("CONFIG", "GET", "maxclients")[1])
        for _ in range(8):
            idle.enter_context(socket.create_connection(("127.0.0.1", redis.port), 5))
        # The admin and the idle ones are as many as there may be.
        limit(9)
        try:
            yield
        finally:
            limit(before)


@contextmanager
def _postgres_full(scene: Scene) -> Generator[None]:
    stores = scene.cluster.stores
    with ExitStack() as idle:

        def take_all() -> None:
            # The superuser's last places, too.
            with contextlib.suppress(psycopg.OperationalError):
                while True:
                    url = stores.postgres.url("postgres").replace("+psycopg", "")
                    idle.callback(psycopg.connect(url, connect_timeout=5).close)

        take_all()
        for proxy in stores.to_postgres:
            proxy.cut_all()
        # Those that the service had are free now, and it wants them back: it is a race for each.
        take_all()
        yield


class AnswersLost(Fault):
    """Responses are cut off after the request was executed: to the clients, and from the stores."""

    name = "answers-lost"
    touches = frozenset({"ways"})
    embedded = True

    def inject(self, scene: Scene) -> None:
        with _proxies(list(scene.cluster.proxies())) as proxies:
            for proxy in proxies:
                fronts = [replica.front for replica in scene.cluster.replicas]
                proxy.cut_answers(probability=0.2 if proxy in fronts else 0.02)
            scene.hold()


@contextmanager
def _proxies(proxies: list[Proxy]) -> Generator[list[Proxy]]:
    try:
        yield proxies
    finally:
        for proxy in proxies:
            proxy.flow()


class ClientsCancel(Fault):
    """Clients give up in the middle of a request."""

    name = "clients-cancel"
    touches = frozenset({"cancel"})
    embedded = True

    def inject(self, scene: Scene) -> None:
        mischief = scene.workload.mischief
        usual, mischief.cancel = mischief.cancel, 0.4
        scene.hold()
        mischief.cancel = usual


class ReportsRepeated(Fault):
    """Reports come twice, late and out of order."""

    name = "reports-repeated"
    touches = frozenset({"repeat"})
    embedded = True

    def inject(self, scene: Scene) -> None:
        mischief = scene.workload.mischief
        usual, mischief.repeat = mischief.repeat, 0.8
        scene.hold()
        mischief.repeat = usual


FAULTS: tuple[Fault, ...] = (
    ReplicaKilled(),
    ReplicaStopped(),
    RedisFlushed(),
    RedisEmptied(),
    RedisAged(),
    RedisFailedOver(),
    SentinelFailedOver(),
    ScriptsFlushed(),
    RedisRefuses(),
    RedisKeyDamaged(),
    RedisClockSetBack(),
    HostileClient(),
    PostgresRestarted(),
    DiskFull(),
    ConnectionsExhausted(),
    AnswersLost(),
    ClientsCancel(),
    ReportsRepeated(),
)
