"""The command and keys: who is served without one, how they are managed, where no secret shows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import pytest

from service.settings import Settings
from spark_agent.client.client import Client
from tests.support.api import ok, problem
from tests.support.postgres_server import PostgresServer
from tests.support.redis_server import RedisServer
from tests.support.server import ROOT, Service

ADMIN = "operator-0123456789abcdef0123456789abcdef"
SCRAPE = "prometheus-0123456789abcdef0123456789abcdef"
SPEC = {"s": {"shards": ["0"]}}


def run(
    *arguments: str, cwd: Path, environment: Mapping[str, str] | None = None, answer: str = ""
) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("TIDEGAUGE_")}
    return subprocess.run(
        [sys.executable, "-m", "service", *arguments],
        cwd=cwd,
        env=clean | {"PYTHONPATH": str(ROOT)} | dict(environment or {}),
        input=answer,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("keys")
    (folder / "admin.key").write_text(ADMIN + "\n")
    environment = {"TIDEGAUGE_SCRAPE_KEY": SCRAPE, "TIDEGAUGE_LOG_LEVEL": "debug"}
    options = ("--admin-key-file", "admin.key")
    with Service(folder, options=options, environment=environment) as service:
        yield service


# ---- who is served without a key

ANYWHERE = ("serve", "--host", "0.0.0.0", "--port", "0")


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    [line] = [line for line in done.stderr.splitlines() if line.startswith("tidegauge: ")]
    return line


def test_without_a_key_it_serves_nobody_beyond_this_machine(tmp_path: Path) -> None:
    line = refusal(run(*ANYWHERE, cwd=tmp_path))
    assert "0.0.0.0" in line
    for way_out in ("TIDEGAUGE_ADMIN_KEY_FILE", "--host 127.0.0.1", "--insecure"):
        assert way_out in line


def test_several_processes_refuse_it_too(
    tmp_path: Path, postgres_server: PostgresServer, redis_server: RedisServer
) -> None:
    ledger = postgres_server.database()
    live = redis_server.url
    stores = ("--ledger-url", ledger, "--live-url", live)
    assert "the service has no key" in refusal(
        run(*ANYWHERE, "--workers", "2", *stores, cwd=tmp_path)
    )


class Anywhere(Service):
    """Listens on every address, and is reached on loopback."""

    def _arguments(self) -> list[str]:
        return [*super()._arguments(), "--host", "0.0.0.0"]


@pytest.mark.parametrize(
    ("options", "environment"),
    [
        (("--insecure",), {}),
        ((), {"TIDEGAUGE_INSECURE": "true"}),
        ((), {"TIDEGAUGE_ADMIN_KEY": ADMIN}),
    ],
)
def test_it_serves_everywhere_with_a_key_or_when_told_to(
    tmp_path: Path, options: tuple[str, ...], environment: dict[str, str]
) -> None:
    with Anywhere(tmp_path, options=options, environment=environment) as service:
        listed = httpx.get(f"{service.url}/v1/jobs")
        if "TIDEGAUGE_ADMIN_KEY" in environment:
            problem(listed, 401, "unauthenticated")
        else:
            ok(listed)
            assert "everyone with access to" in service.log()


def test_a_key_in_the_ledger_is_enough(tmp_path: Path) -> None:
    with Service(tmp_path) as service:
        body = {"name": "root", "role": "admin"}
        secret = ok(httpx.post(f"{service.url}/v1/keys", json=body), 201)["secret"]
        service.stop()
    with Anywhere(tmp_path) as service:
        problem(httpx.get(f"{service.url}/v1/jobs"), 401, "unauthenticated")
        ok(httpx.get(f"{service.url}/v1/jobs", headers=bearer(secret)))
        # The last one: nobody is let in by that, as it listens everywhere.
        gone = httpx.delete(f"{service.url}/v1/keys/root", headers=bearer(secret))
        assert gone.status_code == 204
        problem(httpx.get(f"{service.url}/v1/jobs"), 401, "unauthenticated")


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"TIDEGAUGE_ADMIN_KEY": "too-short-a-secret"}, "TIDEGAUGE_ADMIN_KEY has 18 characters"),
        ({"TIDEGAUGE_SCRAPE_KEY": "with spaces " * 4}, "TIDEGAUGE_SCRAPE_KEY has 48 characters"),
        ({"TIDEGAUGE_ADMIN_KEY_FILE": "none"}, "TIDEGAUGE_ADMIN_KEY_FILE 'none' cannot be read"),
        ({"TIDEGAUGE_ADMIN_KEY": ADMIN, "TIDEGAUGE_ADMIN_KEY_FILE": "x"}, "both set"),
        ({"TIDEGAUGE_ADMIN_KEY": ADMIN, "TIDEGAUGE_SCRAPE_KEY": ADMIN}, "the same secret"),
    ],
)
def test_an_operators_key_that_is_none_is_refused(
    tmp_path: Path, environment: dict[str, str], says: str
) -> None:
    done = run("serve", "--port", "0", cwd=tmp_path, environment=environment)
    assert says in refusal(done)
    for name in ("TIDEGAUGE_ADMIN_KEY", "TIDEGAUGE_SCRAPE_KEY"):
        assert environment.get(name, "x" * 99) not in done.stdout + done.stderr


# ---- managing keys


def test_keys_are_created_listed_used_and_revoked(service: Service, tmp_path: Path) -> None:
    where = {"TIDEGAUGE_URL": service.url, "TIDEGAUGE_ADMIN_KEY": ADMIN}
    made = run(
        *("keys", "create", "workers", "--role", "report", "--jobs", "scores-[ab]"),
        *("--expires-in", "2 days"),
        cwd=tmp_path,
        environment=where,
    )
    assert made.returncode == 0, made.stderr
    [secret] = made.stdout.splitlines()
    assert secret.startswith("tg_")
    assert "not shown again" in made.stderr
    assert secret not in made.stderr
    ok(httpx.get(f"{service.url}/v1/jobs", headers=bearer(secret)))

    listed = run("keys", "list", cwd=tmp_path, environment=where).stdout
    assert "scores-[ab]" in listed
    assert secret not in listed
    # An admin key from a file, named in the command.
    (tmp_path / "admin.key").write_text(ADMIN)
    by_file = run(
        *("keys", "list", "--json", "--url", service.url, "--key-file", "admin.key"), cwd=tmp_path
    )
    assert [each["name"] for each in json.loads(by_file.stdout)["keys"]] == ["workers"]

    gone = run("keys", "revoke", "workers", cwd=tmp_path, environment=where)
    assert (gone.returncode, gone.stdout) == (0, "key workers is revoked\n")
    problem(httpx.get(f"{service.url}/v1/jobs", headers=bearer(secret)), 401, "unauthenticated")
    again = run("keys", "revoke", "workers", cwd=tmp_path, environment=where)
    assert again.returncode == 5
    assert "there is no key 'workers'" in again.stderr


def test_json_has_the_secret_once(service: Service, tmp_path: Path) -> None:
    where = {"TIDEGAUGE_URL": service.url, "TIDEGAUGE_KEY": ADMIN}
    command = ("keys", "create", "ci", "--role", "admin", "--json")
    made = json.loads(run(*command, cwd=tmp_path, environment=where).stdout)
    assert made["role"] == "admin"
    ok(httpx.get(f"{service.url}/v1/keys", headers=bearer(made["secret"])))


@pytest.mark.parametrize(
    ("command", "environment", "says"),
    [
        (["keys", "list"], {}, "--key-file or TIDEGAUGE_KEY_FILE"),
        (["audit"], {"TIDEGAUGE_KEY": "nobody's"}, "misspelt, or was revoked"),
        (["reset", "x", "--yes"], {"TIDEGAUGE_KEY": SCRAPE}, "needs a key with role admin"),
        (
            ["keys", "list", "--key-file", "none"],
            {},
            "key_file 'none' cannot be used: No such file or directory. Name a file with an admin key",
        ),
        (
            ["keys", "create", "n", "--role", "king"],
            {"TIDEGAUGE_KEY": ADMIN},
            "Invalid enum value 'king'",
        ),
        (
            ["keys", "create", "n", "--role", "read", "--expires-in", "soon"],
            {"TIDEGAUGE_KEY": ADMIN},
            "--expires-in 'soon'",
        ),
        (["keys", "list", "--url", "http://127.0.0.1:1"], {}, "is tidegauge at http://127.0.0.1:1"),
    ],
)
def test_what_goes_wrong_is_said_in_a_line(
    service: Service, tmp_path: Path, command: list[str], environment: dict[str, str], says: str
) -> None:
    where = {"TIDEGAUGE_URL": service.url}
    done = run(*command, cwd=tmp_path, environment=where | environment)
    assert done.returncode == (4 if "is tidegauge at" in says else 5), done.stdout
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_help_has_examples(tmp_path: Path) -> None:
    for command in (["keys", "create"], ["keys", "list"], ["keys", "revoke"], ["audit"]):
        assert f"tidegauge {' '.join(command)}" in run(*command, "--help", cwd=tmp_path).stdout


@pytest.mark.parametrize(("said", "shown"), [("203.0.113.9", "203.0.113.9"), ("<b>", "unknown")])
def test_the_audit_believes_a_proxy_that_is_trusted(tmp_path: Path, said: str, shown: str) -> None:
    environment = {"TIDEGAUGE_ADMIN_KEY": ADMIN, "FORWARDED_ALLOW_IPS": "127.0.0.1"}
    with (
        Service(tmp_path, environment=environment) as service,
        httpx.Client(base_url=service.url, headers=bearer(ADMIN)) as client,
    ):
        client.put("/v1/jobs/a", json={"stages": SPEC}, headers={"X-Forwarded-For": said})
        [record] = ok(client.get("/v1/audit"))["records"]
        assert record["address"] == shown


def test_the_audit_says_who_did_what_from_where(service: Service, tmp_path: Path) -> None:
    client = httpx.Client(base_url=service.url, headers=bearer(ADMIN))
    with client:
        body = {"name": "driver", "role": "drive", "jobs": "audited"}
        driver = ok(client.post("/v1/keys", json=body), 201)["secret"]
        put = client.put("/v1/jobs/audited", json={"stages": SPEC})
        ok(put, 201)
        # Nothing changes, and nothing is recorded.
        ok(client.put("/v1/jobs/audited", json={"stages": SPEC}))
        changed = {"stages": {"s": {"shards": ["0", "1"]}}}
        etag = {"If-Match": put.headers["etag"]}
        ok(client.put("/v1/jobs/audited", json=changed, headers=etag))
        runs = {"stages": ["s"], "holder": "driver-1"}
        opened = ok(client.post("/v1/jobs/audited/runs", json=runs, headers=bearer(driver)), 201)
        end = f"/v1/jobs/audited/runs/{opened['run']}/end"
        ok(client.post(end, json={"outcome": "stopped"}, headers=bearer(driver)))
        client.post("/v1/jobs/audited/reset")
        client.delete("/v1/jobs/audited")
        # Nobody said that there is a proxy to be believed.
        client.delete("/v1/keys/driver", headers={"X-Forwarded-For": "203.0.113.9"})
        [newest, _] = ok(client.get("/v1/audit?limit=2"))["records"]
        assert (newest["action"], newest["address"]) == ("revoke-key", "127.0.0.1")
        assert len(ok(client.get("/v1/audit?limit=2"))["records"]) == 2
    where = {"TIDEGAUGE_URL": service.url, "TIDEGAUGE_KEY": ADMIN}
    found = run("audit", "audited", "--json", cwd=tmp_path, environment=where).stdout
    records = json.loads(found)["records"]
    assert [(each["action"], each["by"], each["detail"]) for each in records] == [
        ("delete-job", "admin (environment)", ""),
        ("reset-job", "admin (environment)", "generation 2"),
        ("end-run", "driver", "run 1 of s was stopped"),
        ("open-run", "driver", "run 1 of s by driver-1"),
        ("change-job", "admin (environment)", "layout 2; s: + shard 1"),
        ("create-job", "admin (environment)", ""),
    ]
    assert {each["address"] for each in records} == {"127.0.0.1"}
    none = run("audit", "nope", cwd=tmp_path, environment=where).stdout
    assert none.strip() == "the audit has not a record of job 'nope'"
    everything = run("audit", cwd=tmp_path, environment=where).stdout
    assert "revoke-key" in everything
    assert "drive for audited" in everything


# ---- where no secret shows


def test_no_secret_shows_in_logs_processes_or_settings(service: Service) -> None:
    made = Client(service.url, key=ADMIN).create_key("shown", "admin")
    secret = made["secret"]
    for headers in (bearer(secret), bearer(SCRAPE), bearer(secret + "x"), bearer(ADMIN)):
        httpx.get(f"{service.url}/v1/jobs", headers=headers)
        httpx.put(f"{service.url}/v1/jobs/shown", json={"stages": SPEC}, headers=headers)
    ps = ["ps", "-ww", "-o", "args=", "-p", str(service.pid)]
    processes = subprocess.run(ps, capture_output=True, text=True, check=True, timeout=60).stdout
    log = (service.folder / "service.log").read_text()
    ledger = b"".join(path.read_bytes() for path in service.folder.glob("ledger.db*"))
    assert "--admin-key-file" in processes
    for hidden in (ADMIN, SCRAPE, secret):
        assert hidden not in processes
        assert hidden not in log
        assert hidden.encode() not in ledger


@pytest.mark.parametrize("file_name", ["live-url", ".env"])
def test_a_url_from_a_file_shows_in_no_process(
    tmp_path: Path, postgres_server: PostgresServer, redis_server: RedisServer, file_name: str
) -> None:
    """Each process reads the file; its URL may have a password."""
    file = tmp_path / file_name
    # The option of the ledger comes before the file that the environment, or `.env`, names.
    ledger_file = "TIDEGAUGE_LEDGER_URL_FILE"
    named: dict[str, str] = {}
    if file_name == ".env":
        file.write_text(f"TIDEGAUGE_LIVE_URL={redis_server.url}\n{ledger_file}=/nowhere\n")
    else:
        file.write_text(redis_server.url)
        named = {ledger_file: "/nowhere", "TIDEGAUGE_LIVE_URL_FILE": str(file)}
    service = Service(tmp_path, options=("--workers", "2"), environment=named)
    service.ledger_url = postgres_server.database()
    with service:
        shown = children_environments(service.pid)
        assert len(shown) >= 2
        for environment in shown:
            assert (str(file) in environment) == (file_name != ".env")
            assert redis_server.url not in environment
        service.stop()


def children_environments(pid: int) -> list[str]:
    """Return the environments of a process's children, as other programs of the user see them.

    A process that `spawn` starts has the environment of its start.
    """
    ps = ["ps", "-o", "pid=", "--ppid", str(pid)]
    found = subprocess.run(ps, capture_output=True, text=True, check=True, timeout=60).stdout
    return [Path(f"/proc/{each}/environ").read_text() for each in found.split()]


def test_no_secret_shows_in_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGAUGE_ADMIN_KEY", ADMIN)
    settings = Settings(_env_file=None)  # pyright: ignore[reportCallIssue]
    assert settings.admin_key is not None
    assert ADMIN not in f"{settings!r}{settings}{settings.model_dump()}"


def test_several_processes_have_the_operators_key(
    tmp_path: Path, postgres_server: PostgresServer, redis_server: RedisServer
) -> None:
    """It is not handed on as an option, and not written out as `**********`."""
    live = redis_server.url
    options = ("--live-url", live, "--workers", "2")
    service = Service(tmp_path, options=options, environment={"TIDEGAUGE_ADMIN_KEY": ADMIN})
    service.ledger_url = postgres_server.database()
    with service:
        for _ in range(20):
            # A connection each: now the one process answers, now the other.
            ok(httpx.get(f"{service.url}/v1/jobs", headers=bearer(ADMIN)))
            problem(httpx.get(f"{service.url}/v1/jobs"), 401, "unauthenticated")
        service.stop()
