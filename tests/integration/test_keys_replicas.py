"""Keys at several replicas: what one creates or revokes, the others know of soon."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.api import ok, problem
from tests.support.binaries import wait_until
from tests.support.postgres_server import PostgresServer
from tests.support.redis_server import RedisServer
from tests.support.server import Service

ADMIN = "operator-0123456789abcdef0123456789abcdef"


@pytest.fixture
def replicas(
    tmp_path: Path, redis_server: RedisServer, postgres_server: PostgresServer
) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    redis_server.command("FLUSHALL")
    ledger = postgres_server.database()
    one, other = (
        Service(
            tmp_path / name,
            options=("--live-url", redis_server.url),
            environment={"TIDEGAUGE_ADMIN_KEY": ADMIN},
        )
        for name in ("one", "other")
    )
    for service in (one, other):
        service.folder.mkdir()
        service.ledger_url = ledger
    with (
        one,
        other,
        httpx.Client(base_url=one.url, timeout=60) as first,
        httpx.Client(base_url=other.url, timeout=60) as second,
    ):
        yield first, second


def test_what_one_creates_and_revokes_the_other_knows_of(
    replicas: tuple[httpx.Client, httpx.Client],
) -> None:
    one, other = replicas
    admin = {"Authorization": f"Bearer {ADMIN}"}
    body = {"name": "reader", "role": "read"}
    secret = ok(one.post("/v1/keys", json=body, headers=admin), 201)["secret"]
    reader = {"Authorization": f"Bearer {secret}"}
    ok(one.get("/v1/jobs", headers=reader))
    wait_until(lambda: other.get("/v1/jobs", headers=reader).status_code == 200, "known there")

    # Revoked at the one: refused there by the very next request, and by the other soon.
    assert one.delete("/v1/keys/reader", headers=admin).status_code == 204
    problem(one.get("/v1/jobs", headers=reader), 401, "unauthenticated")
    wait_until(lambda: other.get("/v1/jobs", headers=reader).status_code == 401, "refused there")

    # The name is free again, at either of them.
    again = ok(other.post("/v1/keys", json=body, headers=admin), 201)["secret"]
    assert again != secret
    problem(other.get("/v1/jobs", headers=reader), 401, "unauthenticated")
    [line] = ok(one.get("/v1/keys", headers=admin))["keys"]
    assert line["name"] == "reader"
    actions = [each["action"] for each in ok(one.get("/v1/audit", headers=admin))["records"]]
    assert actions == ["create-key", "revoke-key", "create-key"]
