"""The test servers do what their tests rely on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from tests.support.binaries import wait_until
from tests.support.postgres_server import PostgresServer
from tests.support.redis_server import RedisCluster, RedisError, RedisSentinel, RedisServer
from tests.support.server import ROOT


def test_redis_keeps_what_it_was_told_through_a_kill(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as redis:
        redis.command("SET", "a", "1")
        redis.kill()
        with pytest.raises(ConnectionError):
            redis.command("PING")
        redis.start()
        assert redis.command("GET", "a") == b"1"
        redis.restart()
        assert redis.command("GET", "a") == b"1"
        redis.restart(empty=True)
        assert redis.command("GET", "a") is None
        with pytest.raises(RedisError, match="unknown command"):
            redis.command("NONSENSE")


def test_redis_comes_back_on_an_old_disk(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as redis:
        redis.command("SET", "a", "old")
        saved = redis.save_files()
        redis.command("SET", "a", "new")
        redis.kill()
        redis.restore_files(saved)
        redis.start()
        assert redis.command("GET", "a") == b"old"


def test_a_paused_redis_is_silent_and_goes_on(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as redis:
        redis.pause()
        state = Path(f"/proc/{redis.pid}/stat")
        wait_until(lambda: state.read_text().rsplit(")", 1)[1].split()[0] == "T", "stopped")
        redis.resume()
        assert redis.command("PING") == "PONG"


def test_a_replica_follows_until_it_is_promoted(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "a") as primary, RedisServer(tmp_path / "b") as replica:
        primary.command("SET", "a", "1")
        replica.replicate(primary)
        assert replica.command("GET", "a") == b"1"
        with pytest.raises(RedisError, match="READONLY"):
            replica.command("SET", "a", "2")
        replica.promote()
        assert replica.command("SET", "a", "2") == "OK"


def test_a_cluster_serves_every_slot(tmp_path: Path) -> None:
    with RedisCluster(tmp_path) as cluster:
        assert cluster.url.count(",") == 2
        answers: list[object] = []
        for node in cluster.nodes:
            try:
                answers.append(node.command("SET", "a", "1"))
            except RedisError as error:
                answers.append(str(error).split()[0])
        assert sorted(map(str, answers)) == ["MOVED", "MOVED", "OK"]
        cluster.nodes[0].kill()
        cluster.nodes[0].start()
        cluster.wait_ok()


@pytest.mark.slow
def test_a_sentinel_promotes_the_replica(tmp_path: Path) -> None:
    with (
        RedisServer(tmp_path / "a") as primary,
        RedisServer(tmp_path / "b") as replica,
        RedisSentinel(tmp_path / "s", primary, replica) as sentinel,
    ):
        assert sentinel.primary_port() == primary.port
        primary.command("SET", "a", "1")
        wait_until(lambda: replica.command("GET", "a") == b"1", "replicated")
        primary.kill()
        sentinel.wait_for_primary(replica.port)
        assert replica.command("GET", "a") == b"1"
        primary.start()
        wait_until(lambda: is_pair(primary, replica), "one follows the other")
        # The old one follows the new one, unless a stall made Sentinel think again.
        before = sentinel.primary_port()
        sentinel.failover()
        assert {before, sentinel.primary_port()} == {primary.port, replica.port}


def is_pair(one: RedisServer, other: RedisServer) -> bool:
    states = sorted((s.info("replication") for s in (one, other)), key=lambda s: s["role"])
    return [s["role"] for s in states] == ["master", "slave"] and (
        states[1]["master_link_status"] == "up"
    )


def test_postgres_keeps_its_databases_through_anything(tmp_path: Path) -> None:
    with PostgresServer(tmp_path) as postgres:
        name = postgres.database().rsplit("/", 1)[1]
        assert postgres.database() != name
        postgres.execute("CREATE TABLE t AS SELECT 1 AS x", name)
        for end in (postgres.stop, lambda: postgres.stop("immediate"), postgres.kill):
            end()
            with pytest.raises(psycopg.OperationalError):
                postgres.execute("SELECT 1")
            postgres.start()
            assert postgres.execute("SELECT x FROM t", name) == [(1,)]


def test_a_paused_postgres_answers_nobody_and_goes_on(tmp_path: Path) -> None:
    with PostgresServer(tmp_path) as postgres:
        where = f"host=127.0.0.1 port={postgres.port} user=postgres"
        with psycopg.connect(where, autocommit=True) as open_already:
            postgres.pause()
            with pytest.raises(psycopg.OperationalError):
                psycopg.connect(f"{where} connect_timeout=2")
            postgres.resume()
            assert open_already.execute("SELECT 1").fetchall() == [(1,)]


def test_servers_die_with_the_tests(tmp_path: Path) -> None:
    program = f"""
import os, signal, sys
from pathlib import Path
from tests.support.redis_server import RedisServer
from tests.support.postgres_server import PostgresServer
redis, postgres = RedisServer(Path({str(tmp_path)!r})), PostgresServer(Path({str(tmp_path)!r}))
redis.start()
postgres.start()
print(redis.pid, postgres.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    environment = dict(os.environ) | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    for pid in done.stdout.split():
        wait_until(lambda pid=pid: not _runs(int(pid)), "the server's end")


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
