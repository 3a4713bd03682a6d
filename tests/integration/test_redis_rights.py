"""A Redis user that lacks a right: the service is unavailable and says which, and nothing is dropped."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import pytest

from service.live.redis.client import LUA, RedisClient
from service.live.redis.rights import DeniedError
from tests.support.api import ok, problem
from tests.support.binaries import wait_until
from tests.support.redis_rights import documented, documented_rights, grant
from tests.support.redis_server import RedisCluster, RedisServer
from tests.support.server import ROOT, Service

EVERYTHING = ("~*", "&*", "+@all")
T = 1_767_225_600_000
PATIENCE_S = 20
"""No request takes so long, on however busy a machine: the restoring loop went on for over a minute."""
PATH = "/v1/jobs/water/stages/taps"
SPEC = {"stages": {"taps": {"shards": ["north"]}, "hourly": {"inputs": ["taps"], "ranges": 2}}}


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    (tmp_path / "redis").mkdir()
    with RedisServer(tmp_path / "redis") as server:
        yield server


@pytest.fixture
def service(tmp_path: Path, redis: RedisServer) -> Iterator[Service]:
    url = grant(redis, "app", EVERYTHING)
    with Service(tmp_path, options=("--live-url", url)) as running:
        yield running


@pytest.fixture
def client(service: Service) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.url, timeout=PATIENCE_S) as client:
        yield client


def report(client: httpx.Client, token: str, watermark: int) -> httpx.Response:
    body = {"token": token, "ranges": {"north": watermark}}
    return client.post(f"{PATH}/reports", json=body)


def lease(client: httpx.Client) -> str:
    ok(client.put("/v1/jobs/water", json=SPEC), 201)
    claim = {"ranges": "all", "holder": "me", "ttl_ms": 600_000}
    token = ok(client.post(f"{PATH}/leases", json=claim), 201)["token"]
    assert ok(report(client, token, T))["watermark"]["output_watermark"] == T
    return token


def ready_again(client: httpx.Client) -> None:
    wait_until(lambda: client.get("/readyz").status_code == 200, "ready again")


def incarnations(client: httpx.Client) -> float:
    [line] = re.findall(
        r"^tidegauge_incarnations_total (.*)$", client.get("/metrics").text, re.MULTILINE
    )
    return float(line)


@pytest.mark.parametrize(
    ("rules", "named"),
    [
        (("~*", "&*", "+@all", "-time"), "TIME"),
        (("~*", "resetchannels", "+@all"), "the channels tidegauge:changes:*"),
        (("~*", "&*", "+@all", "-publish"), "PUBLISH"),
        (("~*", "&*", "+@all", "-psubscribe"), "PSUBSCRIBE"),
        (("~*", "&*", "+@all", "-evalsha"), "EVALSHA"),
        (("~other:*", "&*", "+@all"), "the keys tidegauge:*"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_right_that_is_taken_away_is_unavailable_and_nothing_is_dropped(
    redis: RedisServer, service: Service, client: httpx.Client, rules: tuple[str, ...], named: str
) -> None:
    token = lease(client)
    before = incarnations(client)
    grant(redis, "app", rules)
    if named not in {"PUBLISH", "PSUBSCRIBE", "the channels tidegauge:changes:*"}:
        # A command that needs the right is refused itself; the others notice by the check.
        assert named in problem(report(client, token, T + 1), 503)["detail"]
    wait_until(lambda: client.get("/readyz").status_code == 503, "not ready")
    for _ in range(3):
        assert named in problem(client.get("/readyz"), 503, "unavailable")["detail"]
        for response in (
            report(client, token, T + 1),
            client.get(f"{PATH}/ranges"),
            client.post(f"{PATH}/leases", json={"ranges": "all", "holder": "other"}),
            client.get(f"{PATH}/watermark", headers={"Prefer": "wait=1"}),
        ):
            # A watermark may still be shown as it was seen last.
            assert response.status_code in (
                {503, 200} if "water" in response.url.path[-9:] else {503}
            )
    assert redis.command("EXISTS", "tidegauge:{water}") == 1
    grant(redis, "app", EVERYTHING)
    ready_again(client)
    # The lease, the promise and the incarnation are those from before.
    assert ok(client.get(f"{PATH}/watermark"))["output_watermark"] == T
    assert ok(report(client, token, T + 2))["watermark"]["output_watermark"] == T + 2
    assert incarnations(client) == before
    assert "dropping it" not in service.log()


def test_what_is_missing_is_logged_now_and_then(
    redis: RedisServer, service: Service, client: httpx.Client
) -> None:
    token = lease(client)
    grant(redis, "app", (*EVERYTHING, "-time"))
    began = time.monotonic()
    problem(report(client, token, T + 1), 503)
    lines = service.log().count("\n")
    # A window of the machine's own time: what is counted is the rate.
    time.sleep(3)
    written = (service.folder / "service.log").read_text().count("\n") - lines
    assert written / (time.monotonic() - began) < 20


@pytest.mark.parametrize("command", ["ZADD", "HGET"])
def test_a_script_that_stopped_in_its_middle_is_made_good_once_the_right_is_back(
    redis: RedisServer, client: httpx.Client, command: str
) -> None:
    """Half of a claim may be written: the state is kept while the right is missing, then restored."""
    token = lease(client)
    before = incarnations(client)
    grant(redis, "app", (*EVERYTHING, f"-{command.lower()}"))
    claim = {"ranges": "all", "holder": "me", "ttl_ms": 600_000}
    assert command in problem(client.post(f"{PATH}/leases", json=claim), 503)["detail"]
    assert redis.command("EXISTS", "tidegauge:{water}") == 1
    grant(redis, "app", EVERYTHING)
    ready_again(client)
    assert ok(client.get(f"{PATH}/watermark"))["output_watermark"] == T
    # For half a second at most, the last look at the rights still counts.
    wait_until(lambda: report(client, token, T + 1).status_code != 503, "it serves again")
    problem(report(client, token, T + 1), 410, "lease-lost")
    again = ok(client.post(f"{PATH}/leases", json=claim), 201)["token"]
    assert ok(report(client, again, T + 2))["watermark"]["output_watermark"] == T + 2
    assert incarnations(client) == before + 1


@pytest.mark.parametrize(
    ("rules", "named"),
    [((*EVERYTHING, "-time"), "TIME"), (("~*", "resetchannels", "+@all"), "tidegauge:changes:*")],
)
def test_a_service_that_starts_without_a_right_says_so_and_is_well_once_it_has_it(
    tmp_path: Path, redis: RedisServer, rules: tuple[str, ...], named: str
) -> None:
    url = grant(redis, "app", rules)
    service = Service(tmp_path, options=("--live-url", url))
    try:
        service.launch()
        with httpx.Client(base_url=service.url, timeout=PATIENCE_S) as client:
            wait_until(lambda: "listens on" in service.log(), "it listens")
            assert named in problem(client.get("/readyz"), 503, "unavailable")["detail"]
            assert client.put("/v1/jobs/water", json=SPEC).status_code == 503
            assert redis.command("KEYS", "tidegauge:{*") == []
            grant(redis, "app", EVERYTHING)
            ready_again(client)
            assert client.put("/v1/jobs/water", json=SPEC).status_code in {200, 201}
    finally:
        service.kill()


# ---- the rights that the documentation lists


def test_the_listed_rights_serve(tmp_path: Path, redis: RedisServer) -> None:
    url = documented(redis)
    with (
        Service(tmp_path, options=("--live-url", f"{url}/1")) as service,
        httpx.Client(base_url=service.url, timeout=PATIENCE_S) as client,
    ):
        token = lease(client)
        assert ok(report(client, token, T + 1))["watermark"]["output_watermark"] == T + 1
        problem(client.put("/v1/jobs/water", json={"stages": {"x": {"shards": ["1"]}}}), 428)
        assert ok(client.get("/v1/jobs/water/watermarks"))["watermarks"]
        assert client.delete("/v1/jobs/water").status_code == 204
        assert "may not use" not in service.log()


def missing(url: str) -> dict[str, str]:
    async def ask() -> dict[str, str]:
        client = RedisClient(url)
        try:
            return dict(await client.missing_rights())
        finally:
            await client.close()

    return asyncio.run(ask())


def test_none_of_the_listed_rights_is_too_much_and_each_is_tried(redis: RedisServer) -> None:
    listed = documented_rights()
    assert missing(grant(redis, "app", listed)) == {}
    for without in listed:
        rest = [rule for rule in listed if rule != without]
        if without == "+select":
            # Only with a database of a number above 0.
            with pytest.raises(DeniedError):
                asyncio.run(RedisClient(f"{grant(redis, 'app', rest)}/1").check_rights())
            continue
        if without == "resetchannels":
            # A user of Redis 7 begins without channels, one of 6.2 with all of them.
            continue
        found = missing(grant(redis, "app", rest))
        assert found, f"{without} is listed, and not needed"
        right = without[1:].replace("|", " ").upper()
        if without.startswith("+"):
            assert any(right.split()[0] in each for each in found), (without, found)
        else:
            assert any(without[1:] in each for each in found), (without, found)


def test_every_command_of_the_scripts_is_listed_and_tried() -> None:
    used = {
        command
        for file in LUA.rglob("*.lua")
        if file.name != "rights.lua"
        for command in re.findall(r"call\(\s*'([A-Z]+)'", file.read_text())
    }
    tried = set(re.findall(r"\{'([A-Z]+)'", (LUA / "rights.lua").read_text()))
    listed = {rule[1:].upper() for rule in documented_rights() if rule.startswith("+")}
    assert used <= tried <= listed


def test_a_cluster_is_tried_for_every_right_and_ready(tmp_path: Path) -> None:
    """CLIENT SETNAME has no key by which a Cluster's node is found: no service became ready."""
    with RedisCluster(tmp_path / "cluster") as cluster:

        async def missing() -> Mapping[str, str]:
            client = RedisClient(cluster.url)
            try:
                return await client.missing_rights()
            finally:
                await client.close()

        assert asyncio.run(missing()) == {}
        with Service(tmp_path, options=("--live-url", cluster.url)) as running:
            assert httpx.get(f"{running.url}/readyz", timeout=PATIENCE_S).status_code == 200


def test_doctor_names_every_right_that_is_missing(tmp_path: Path, redis: RedisServer) -> None:
    def verdict(url: str) -> tuple[int, dict[str, str]]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TIDEGAUGE_")}
        done = subprocess.run(
            [sys.executable, "-m", "service.cli", "doctor", "--json", "--live-url", url],
            cwd=tmp_path,
            env=environment | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        found = {each["what"]: each for each in json.loads(done.stdout)["findings"]}
        return done.returncode, found["live store's rights"]

    status, found = verdict(grant(redis, "app", ("~*", "&*", "+@all", "-time", "-zadd", "-hget")))
    assert (status, found["verdict"]) == (1, "fault")
    assert all(named in found["says"] for named in ("TIME", "ZADD", "HGET"))
    status, found = verdict(grant(redis, "app", ("~*", "resetchannels", "+@all")))
    assert (status, found["verdict"]) == (1, "fault")
    assert "the channels tidegauge:changes:*" in found["says"]
    status, found = verdict(documented(redis))
    assert (status, found["verdict"]) == (0, "ok")
