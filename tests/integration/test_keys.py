"""Keys: every route, from the running application, with every key that must not open it."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.aggregator.keys import RECHECK_MS, STALE_MS, Keys
from service.errors import ForbiddenError, UnauthenticatedError, UnavailableError
from service.ledger.sql import SqlLedger
from service.model.audit import Actor, Deed
from service.model.keys import Role
from service.server.app import create_app
from service.settings import Settings
from tests.support.api import Api, eventually, ok, problem
from tests.support.clock import FakeClock
from tests.support.inprocess import InProcess, with_schema
from tests.support.server import Service
from tests.support.wire import Wire, ask, request

pytestmark = pytest.mark.anyio

ADMIN = "admin-of-the-operator-0123456789abcdef"
SCRAPE = "scrape-of-the-operator-0123456789abcdef"
SPEC = {"s": {"shards": ["0"]}, "k": {"inputs": ["s"], "ranges": 1}}
OPEN = {("get", "/healthz"), ("get", "/readyz")}
SMALLER = {"read": "scrape", "report": "read", "drive": "report", "admin": "drive"}


def sent(secret: str) -> bytes:
    return b"Bearer " + secret.encode()


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


def operations() -> list[tuple[str, str, str | None]]:
    """Method, path and needed role of every route that the service documents."""
    settings = Settings(_env_file=None)  # pyright: ignore[reportCallIssue]
    paths: dict[str, dict[str, Any]] = create_app(settings).openapi()["paths"]
    return [
        (method, path, described.get("x-role"))
        for path, methods in paths.items()
        for method, described in methods.items()
    ]


GUARDED = [(method, path, role) for method, path, role in operations() if role is not None]


OF_THE_KEY = {"/v1/jobs", "/v1/overview", "/v1/problems", "/v1/whoami"}
"""These answer whoever may read anything: with the jobs that the key is for."""


class Guarded:
    """A service with an operator's admin key, and keys that are made as they are asked for."""

    def __init__(self, service: InProcess) -> None:
        self.service = service
        self._numbers = itertools.count()

    @property
    def client(self) -> httpx.AsyncClient:
        return self.service.client

    async def key(self, role: str, jobs: str = "*", **members: Any) -> dict[str, str]:
        """A new key's header."""
        return bearer((await self.create(role, jobs, **members))["secret"])

    async def create(self, role: str, jobs: str = "*", **members: Any) -> Any:
        name = f"{role}-{next(self._numbers)}"
        body = {"name": name, "role": role, "jobs": jobs} | members
        return ok(await self.client.post("/v1/keys", json=body, headers=bearer(ADMIN)), 201)

    async def used_at(self, made: Mapping[str, Any]) -> str | None:
        keys = ok(await self.client.get("/v1/keys", headers=bearer(ADMIN)))["keys"]
        [line] = [each for each in keys if each["name"] == made["name"]]
        return line["used_at"]

    async def send(
        self, method: str, path: str, headers: Mapping[str, str], job: str = "scores-1"
    ) -> httpx.Response:
        """A request whose body nobody can read: whoever is refused is refused before."""
        path = path.format(job=job, stage="s", range="0", run=1, key="no-such-key")
        content = b"{" if method in {"post", "put"} else None
        sent = {name: value.encode("latin-1") for name, value in headers.items()}
        if content is not None:
            sent["Content-Type"] = b"application/json"
        async with asyncio.timeout(60):
            async with self.client.stream(
                method,
                path,
                headers=sent,  # pyright: ignore[reportArgumentType]
                content=content,
            ) as response:
                # The stream of events never ends.
                if response.headers["content-type"].startswith("application"):
                    await response.aread()
                return response


@pytest.fixture(params=[True, False], ids=["fast-lane", "ordinary"])
async def guarded(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Guarded]:
    async with InProcess(
        with_schema(tmp_path), fast_lane=request.param, admin_key=ADMIN, scrape_key=SCRAPE
    ) as service:
        service.client.headers.update(bearer(ADMIN))
        await service.api("scores-1").define(SPEC)
        del service.client.headers["Authorization"]
        yield Guarded(service)


def test_only_the_probes_are_open() -> None:
    assert {(method, path) for method, path, role in operations() if role is None} == OPEN
    assert {role for _, _, role in GUARDED} == {role.value for role in Role}


async def test_every_route_refuses_who_has_no_good_key(guarded: Guarded) -> None:
    revoked = await guarded.create("admin")
    gone = await guarded.client.delete(f"/v1/keys/{revoked['name']}", headers=bearer(ADMIN))
    assert gone.status_code == 204
    expired = await guarded.create("admin", expires_in_ms=1_000)
    guarded.service.advance(1_001)
    good = await guarded.create("admin")
    strangers: dict[str, dict[str, str]] = {
        "no key": {},
        "garbage": bearer("tg_garbage"),
        "not ASCII": {"Authorization": "Bearer t\u00e4\u00e4"},
        "endless": bearer("x" * 10_000),
        "another scheme": {"Authorization": f"Basic {good['secret']}"},
        "no scheme": {"Authorization": good["secret"]},
        "a prefix": bearer(good["secret"][:-1]),
        "revoked": bearer(revoked["secret"]),
        "expired": bearer(expired["secret"]),
    }
    for method, path, _ in GUARDED:
        for who, headers in strangers.items():
            response = await guarded.send(method, path, headers)
            problem(response, 401, "unauthenticated")
            assert response.headers["www-authenticate"] == "Bearer", (method, path, who)
            assert good["secret"][:-1] not in response.text


async def test_every_route_refuses_a_key_of_another_job_and_a_smaller_role(
    guarded: Guarded,
) -> None:
    for method, path, role in GUARDED:
        smaller = await (
            guarded.key("read", "scores-*") if role == "scrape" else guarded.key(SMALLER[role])
        )
        refused = problem(await guarded.send(method, path, smaller), 403, "forbidden")
        assert refused["role"] == role
        assert f"role {role}" in refused["detail"]
        if path not in OF_THE_KEY:
            other = await guarded.key("admin", "flights-?")
            refused = problem(await guarded.send(method, path, other), 403, "forbidden")
            assert refused["role"] == role


async def test_a_refusal_does_not_tell_which_jobs_there_are(guarded: Guarded) -> None:
    other, smaller = await guarded.key("admin", "flights"), await guarded.key("read", "flights")
    for method, path, role in GUARDED:
        if "{job}" not in path:
            continue
        for headers in (other, smaller, {}):
            answers = [await guarded.send(method, path, headers, job) for job in ("scores-1", "x")]
            assert answers[0].content == answers[1].content, (method, path, role)
            assert answers[0].status_code == answers[1].status_code


async def test_every_route_lets_in_the_role_that_it_names(guarded: Guarded) -> None:
    for method, path, role in GUARDED:
        if (method, path) == ("delete", "/v1/jobs/{job}"):
            continue
        everywhere = "{job}" not in path
        headers = await guarded.key(role, "*" if everywhere else "scores-?")
        assert (await guarded.send(method, path, headers)).status_code not in {401, 403}
        assert (await guarded.send(method, path, bearer(ADMIN))).status_code not in {401, 403}


async def test_a_key_lists_only_the_jobs_that_it_may_read(guarded: Guarded) -> None:
    client = guarded.client
    ok(await client.put("/v1/jobs/flights", json={"stages": SPEC}, headers=bearer(ADMIN)), 201)

    async def listed(headers: dict[str, str]) -> list[str]:
        return [each["job"] for each in ok(await client.get("/v1/jobs", headers=headers))["jobs"]]

    assert sorted(await listed(bearer(ADMIN))) == ["flights", "scores-1"]
    assert await listed(await guarded.key("read", "scores-*")) == ["scores-1"]
    assert await listed(await guarded.key("drive", "[fg]lights")) == ["flights"]
    assert await listed(await guarded.key("read", "x")) == []


async def test_the_metrics_are_for_scrapers_and_for_who_may_read_every_job(
    guarded: Guarded,
) -> None:
    for headers in (bearer(SCRAPE), await guarded.key("scrape"), await guarded.key("read")):
        assert (await guarded.client.get("/metrics", headers=headers)).status_code == 200
    problem(await guarded.client.get("/v1/jobs", headers=bearer(SCRAPE)), 403, "forbidden")
    body = {"name": "x", "role": "scrape", "jobs": "scores-*"}
    refused = await guarded.client.post("/v1/keys", json=body, headers=bearer(ADMIN))
    assert "the metrics name every job" in problem(refused, 422, "invalid-request")["detail"]


async def test_a_pipeline_is_run_with_keys_that_may_do_no_more(guarded: Guarded) -> None:
    driver, worker = await guarded.key("drive", "scores-*"), await guarded.key("report", "scores-1")
    api = Api(guarded.client, "scores-1")
    guarded.client.headers.update(driver)
    run = await api.run("s")
    guarded.client.headers.update(worker)
    token = await api.token("s", run=run)
    await api.report("s", token, {"0": 5}, epoch=1)
    problem(await api.post_commit(1, {"s": {}}, run=run), 403, "forbidden")
    guarded.client.headers.update(driver)
    await api.commit(1, {"s": {}}, run=run)
    assert await api.output("s") == 5


# ---- managing them


async def test_a_secret_is_shown_once(guarded: Guarded) -> None:
    made = await guarded.create("report", "scores-*", expires_in_ms=60_000)
    assert made["secret"].startswith("tg_")
    assert len(made["secret"]) >= 46
    listing = await guarded.client.get("/v1/keys", headers=bearer(ADMIN))
    [line] = [each for each in ok(listing)["keys"] if each["name"] == made["name"]]
    assert line["jobs"] == "scores-*"
    assert line["created_by"] == "admin (environment)"
    assert line["expires_at"] == made["expires_at"] is not None
    assert line["used_at"] is None
    assert "secret" not in line
    assert made["secret"] not in listing.text
    assert ADMIN not in listing.text


async def test_a_name_is_taken_until_its_key_is_revoked(guarded: Guarded) -> None:
    client, headers = guarded.client, bearer(ADMIN)
    body = {"name": "ci", "role": "read"}
    first = ok(await client.post("/v1/keys", json=body, headers=headers), 201)
    problem(await client.post("/v1/keys", json=body, headers=headers), 409, "key-exists")
    assert (await client.delete("/v1/keys/ci", headers=headers)).status_code == 204
    problem(await client.delete("/v1/keys/ci", headers=headers), 404, "unknown-key")
    second = ok(await client.post("/v1/keys", json=body, headers=headers), 201)
    problem(await client.get("/v1/jobs", headers=bearer(first["secret"])), 401)
    ok(await client.get("/v1/jobs", headers=bearer(second["secret"])))


@pytest.mark.parametrize(
    "members",
    [
        {"role": "king"},
        {"jobs": "a b"},
        {"jobs": ""},
        {"name": "-"},
        {"expires_in_ms": 0},
        {"secret": "mine"},
    ],
)
async def test_what_cannot_be_a_key_is_refused(guarded: Guarded, members: dict[str, Any]) -> None:
    body = {"name": "n", "role": "read"} | members
    response = await guarded.client.post("/v1/keys", json=body, headers=bearer(ADMIN))
    problem(response, 422, "invalid-request")


async def test_the_last_use_is_written_about_once_a_minute(guarded: Guarded) -> None:
    made = await guarded.create("read")

    async def used_at() -> str | None:
        return await guarded.used_at(made)

    async def use() -> None:
        ok(await guarded.client.get("/v1/jobs", headers=bearer(made["secret"])))

    assert await used_at() is None
    await use()
    first = await eventually(used_at, lambda at: at is not None)
    guarded.service.advance(59_000)
    await use()
    guarded.service.advance(1_000)
    await use()
    second = await eventually(used_at, lambda at: at != first)
    assert second is not None
    assert first is not None
    assert second[14:16] != first[14:16], "a minute later, not at 59 s"
    assert second[17:] == first[17:]


# ---- what takes long


async def test_a_poll_of_a_revoked_key_is_not_answered(guarded: Guarded) -> None:
    made = await guarded.create("read")
    path = "/v1/jobs/scores-1/stages/s/watermark?at_least=5"
    headers = bearer(made["secret"]) | {"Prefer": "wait=60"}
    waiting = asyncio.create_task(guarded.client.get(path, headers=headers))
    # It has been let in.
    await eventually(lambda: guarded.used_at(made), lambda at: at is not None)
    await guarded.client.delete(f"/v1/keys/{made['name']}", headers=bearer(ADMIN))
    await advance(guarded, 5)
    problem(await waiting, 401, "unauthenticated")


async def test_a_stream_of_a_revoked_key_ends(guarded: Guarded) -> None:
    made = await guarded.create("read")
    path, headers = "/v1/jobs/scores-1/events", bearer(made["secret"])
    async with guarded.client.stream("GET", path, headers=headers) as response:
        lines = response.aiter_lines()
        async for line in lines:
            if line.startswith("data:"):
                break
        await guarded.client.delete(f"/v1/keys/{made['name']}", headers=bearer(ADMIN))
        await advance(guarded, 5)
        async with asyncio.timeout(60):
            rest = [line async for line in lines]
    assert not any('"output_watermark":5' in line for line in rest)


async def advance(guarded: Guarded, value: int) -> None:
    api = Api(guarded.client, "scores-1")
    guarded.client.headers.update(bearer(ADMIN))
    await api.report("s", await api.token("s"), {"0": value})
    del guarded.client.headers["Authorization"]


# ---- without keys


async def test_without_any_key_everyone_may_do_everything(gauge: InProcess) -> None:
    await gauge.api("j").define(SPEC)
    ok(await gauge.client.get("/v1/keys", headers=bearer("tg_ignored")))
    [record] = ok(await gauge.client.get("/v1/audit"))["records"]
    assert (record["by"], record["action"]) == ("anyone (no keys)", "create-job")


async def test_the_first_key_closes_the_service_and_must_be_able_to_create_others(
    gauge: InProcess,
) -> None:
    await gauge.api("j").define(SPEC)
    for body in ({"role": "drive"}, {"role": "admin", "jobs": "j"}):
        response = await gauge.client.post("/v1/keys", json={"name": "n"} | body)
        assert "TIDEGAUGE_ADMIN_KEY_FILE" in problem(response, 409, "first-key")["detail"]
    ok(await gauge.client.get("/v1/jobs"))
    body = {"name": "n", "role": "admin", "expires_in_ms": 1_000}
    secret = ok(await gauge.client.post("/v1/keys", json=body), 201)["secret"]
    problem(await gauge.client.get("/v1/jobs"), 401, "unauthenticated")
    ok(await gauge.client.get("/v1/jobs", headers=bearer(secret)))
    # A key that has run out does not open the service again, nor does a restart.
    gauge.advance(1_000 + RECHECK_MS)
    problem(await gauge.client.get("/v1/jobs", headers=bearer(secret)), 401, "unauthenticated")
    problem(await gauge.client.get("/v1/jobs"), 401, "unauthenticated")
    if not gauge.stores.redis:
        await gauge.restart()
        problem(await gauge.client.get("/v1/jobs"), 401, "unauthenticated")


# ---- while the ledger is away


class Away(SqlLedger):
    """A ledger that can be made to fail."""

    away = False
    answer_lost = False

    async def delete_key(self, name: str, deed: Deed) -> bool:
        done = await super().delete_key(name, deed)
        if self.answer_lost:
            raise UnavailableError("the connection was lost during the commit")
        return done

    async def keys(self) -> Any:
        if self.away:
            raise UnavailableError("away")
        return await super().keys()


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[Away]:
    ledger = Away(f"sqlite+aiosqlite:///{with_schema(tmp_path) / '0.db'}")
    await ledger.open(exclusive=True)
    yield ledger
    await ledger.close()


BY = Actor("me", "here")


async def test_a_key_whose_revocation_got_no_answer_is_not_let_in_for_ever(ledger: Away) -> None:
    """Also by a service that otherwise has no reason to read the table again."""
    keys = Keys(ledger, FakeClock(), shared=False)
    await keys.create("admin", Role.ADMIN, "*", None, BY)
    _, secret = await keys.create("reader", Role.READ, "*", None, BY)
    ledger.answer_lost = True
    with pytest.raises(UnavailableError):
        await keys.revoke("reader", BY)
    await keys.catch_up()
    with pytest.raises(UnauthenticatedError):
        keys.authorize(sent(secret), Role.READ, "j")


async def test_a_key_is_revoked_even_if_the_client_does_not_wait(ledger: Away) -> None:
    keys = Keys(ledger, FakeClock(), shared=False)
    await keys.create("admin", Role.ADMIN, "*", None, BY)
    _, secret = await keys.create("reader", Role.READ, "*", None, BY)
    revoking = asyncio.create_task(keys.revoke("reader", BY))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    revoking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await revoking
    assert [key.name for key in await keys.all()] == ["admin"]
    with pytest.raises(UnauthenticatedError):
        keys.authorize(sent(secret), Role.READ, "j")


async def test_what_is_remembered_is_bounded(ledger: Away) -> None:
    keys = Keys(ledger, FakeClock())
    _, secret = await keys.create("admin", Role.ADMIN, "*", None, BY)
    for number in range(30_000):
        keys.authorize(sent(secret), Role.READ, f"j{number}")
        with pytest.raises(UnauthenticatedError):
            keys.authorize(sent(f"tg_{number}"), Role.READ, "j")
    assert len(keys._granted) <= 10_000


async def test_the_last_known_keys_stand_for_a_bounded_time(ledger: Away) -> None:
    clock = FakeClock()
    keys = Keys(ledger, clock)
    _, admin = await keys.create("admin", Role.ADMIN, "*", None, BY)
    _, secret = await keys.create("reader", Role.READ, "*", None, BY)
    ledger.away = True
    with pytest.raises(UnavailableError):
        await keys.refresh()
    clock.advance(STALE_MS)
    assert keys.authorize(sent(secret), Role.READ, "j").name == "reader"
    with pytest.raises(ForbiddenError):
        keys.authorize(sent(secret), Role.REPORT, "j")
    clock.advance(1 + RECHECK_MS)
    with pytest.raises(UnavailableError, match="revoked keys are unknown"):
        keys.authorize(sent(secret), Role.READ, "j")
    ledger.away = False
    await keys.refresh()
    assert keys.authorize(sent(admin), Role.ADMIN, None).name == "admin"
    with pytest.raises(UnauthenticatedError):
        keys.authorize(None, Role.READ, "j")


async def test_only_one_of_many_makes_the_first_key(gauge: InProcess) -> None:
    """Whoever has no key could make one in the same instant, and keep it."""
    answers = await asyncio.gather(
        *(gauge.client.post("/v1/keys", json={"name": f"k{n}", "role": "admin"}) for n in range(8))
    )
    assert sorted(answer.status_code for answer in answers) == [201] + 7 * [401]


def test_a_key_that_is_revoked_while_a_body_comes_is_refused(tmp_path: Path) -> None:
    """The last byte may come minutes after the header with the key."""
    body = b'{"name": "backdoor", "role": "admin"}'
    with Service(tmp_path, environment={"TIDEGAUGE_ADMIN_KEY": ADMIN}) as service:
        admin = f"Authorization: Bearer {ADMIN}"
        created = ask(
            service.url,
            request("POST", "/v1/keys", admin, body=b'{"name": "thief", "role": "admin"}'),
        )
        thief = f"Authorization: Bearer {json.loads(created.body)['secret']}"
        with Wire(service.url) as slow:
            whole = request("POST", "/v1/keys", thief, body=body)
            slow.send(whole[:-1])
            assert ask(service.url, request("GET", "/v1/keys", thief)).status == 200
            assert ask(service.url, request("DELETE", "/v1/keys/thief", admin)).status == 204
            slow.send(whole[-1:])
            assert slow.answer().status == 401
        listed = json.loads(ask(service.url, request("GET", "/v1/keys", admin)).body)
        assert "backdoor" not in json.dumps(listed)
