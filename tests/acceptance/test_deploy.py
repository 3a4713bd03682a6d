"""The deployment: its files against each other, the service, and what is here of the real programs."""

from __future__ import annotations

import json
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
import tomllib
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import httpx
import psycopg
import pytest
import redis
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pydantic import SecretStr
from redis.exceptions import NoPermissionError
from ruamel.yaml import YAML

from deploy.write_secrets import FOLDER, RANDOM, REDIS_RIGHTS, write
from service.clock import SystemClock
from service.errors import UnavailableError
from service.model.keys import Role
from service.server.app import (
    create_app,
    open_ledger,
    open_live_store,
)
from service.server.bootstrap_keys import check_not_exposed, operator_keys
from service.settings import Settings
from tests.support.api import ok, problem
from tests.support.binaries import end, free_port, launch, redis_server, wait_until
from tests.support.postgres_server import PostgresServer
from tests.support.redis_rights import documented_rights
from tests.support.redis_server import RedisServer
from tests.support.server import Service

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
HAPROXY = DEPLOY / "haproxy.cfg"
REPLICAS = ("tidegauge-1", "tidegauge-2")
LONGEST_POLL_S = 60

haproxy = pytest.mark.skipif(shutil.which("haproxy") is None, reason="no haproxy on this machine")


def read_yaml(path: Path, environment: Mapping[str, str] | None = None) -> Any:
    """Read a file as `docker compose` does: `${NAME:-default}` is filled in."""
    environment = environment or {}

    def fill(found: re.Match[str]) -> str:
        name, default = found.groups()
        return environment.get(name, default)

    return YAML(typ="safe").load(re.sub(r"\$\{(\w+):-([^}]*)\}", fill, path.read_text()))


COMPOSE = read_yaml(ROOT / "docker-compose.yml")
SERVICES: dict[str, Any] = COMPOSE["services"]
MOUNTED = Path("/run/secrets")
"""Folder in which a container of Compose has its secrets."""


@pytest.fixture
def secrets_folder(tmp_path: Path) -> Path:
    """The files that `make secrets` writes."""
    folder = tmp_path / "secrets"
    write(folder)
    return folder


def mounted(service: str, folder: Path) -> dict[str, str]:
    """Return a container's environment, with the paths of its secrets in this folder."""
    found: dict[str, str] = {}
    for name, value in SERVICES[service]["environment"].items():
        path = Path(str(value))
        if name.endswith("_FILE"):
            assert path.parent == MOUNTED
            assert path.name in SERVICES[service]["secrets"]
        found[name] = str(folder / path.name) if path.parent == MOUNTED else str(value)
    return found


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions, each in one line."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return [
        (word, " ".join(rest.split())) for word, rest in (line.split(None, 1) for line in lines)
    ]


def last_stage() -> list[tuple[str, str]]:
    all_of_them = instructions()
    start = max(i for i, (word, _) in enumerate(all_of_them) if word == "FROM")
    return all_of_them[start:]


def said(word: str) -> str:
    """Return the text of the image's only instruction of this name."""
    [one] = [rest for name, rest in last_stage() if name == word]
    return one


def image_environment() -> dict[str, str]:
    return dict(re.findall(r"(\S+?)=(\S+)", said("ENV")))


def settings_of(environment: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> Settings:
    ours = {name: value for name, value in environment.items() if name.startswith("TIDEGAUGE_")}
    known = {f"TIDEGAUGE_{name.upper()}" for name in Settings.model_fields}
    assert set(ours) <= known
    for name, value in ours.items():
        monkeypatch.setenv(name, value)
    settings = Settings(_env_file=None)  # pyright: ignore[reportCallIssue]
    for name, value in ours.items():
        if name in {"TIDEGAUGE_LEDGER_URL", "TIDEGAUGE_LIVE_URL"} and f"{name}_FILE" in ours:
            continue
        # Settings have the URL of a file in place of its path.
        is_read = name in {"TIDEGAUGE_LEDGER_URL_FILE", "TIDEGAUGE_LIVE_URL_FILE"}
        field = name.removesuffix("_FILE") if is_read else name
        found = getattr(settings, field.removeprefix("TIDEGAUGE_").lower())
        shown = found.get_secret_value() if isinstance(found, SecretStr) else str(found)
        assert shown == (Path(value).read_text() if is_read else value)
    return settings


def routes() -> set[str]:
    return set(create_app(Settings(live_url="memory://")).openapi()["paths"])


def port_of(name: str) -> int:
    """Return the port inside, at which a service of the compose file listens."""
    if name in REPLICAS:
        return int(image_environment()["TIDEGAUGE_PORT"])
    ports = {
        "redis": 6379,
        "postgres": 5432,
        "prometheus": 9090,
        "alertmanager": 9093,
        "grafana": 3000,
    }
    return {**ports, "balancer": bound_port()}[name]


def bound_port() -> int:
    [port] = re.findall(r"^\s+bind :(\d+)$", HAPROXY.read_text(), re.MULTILINE)
    return int(port)


def seconds(timeout: str) -> float:
    """A timeout of the load balancer's."""
    [found] = re.findall(rf"^\s+timeout {timeout} (\d+)s$", HAPROXY.read_text(), re.MULTILINE)
    return float(found)


# ---- the compose file


def test_compose_is_valid() -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "check_jsonschema"),
            *("--builtin-schema", "vendor.compose-spec", str(ROOT / "docker-compose.yml")),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("replica", REPLICAS)
def test_the_settings_of_a_replica(
    replica: str, secrets_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = image_environment() | mounted(replica, secrets_folder)
    settings = settings_of(environment, monkeypatch)
    open_live_store(settings.live_url, SystemClock())
    open_ledger(settings.ledger_url)

    live, ledger = urlsplit(settings.live_url), urlsplit(settings.ledger_url)
    assert (live.hostname, live.port) == ("redis", port_of("redis"))
    assert live.password == (secrets_folder / "redis-password").read_text()
    postgres = mounted("postgres", secrets_folder)
    assert (ledger.hostname, ledger.port) == ("postgres", port_of("postgres"))
    assert ledger.username == postgres["POSTGRES_USER"]
    assert ledger.password == Path(postgres["POSTGRES_PASSWORD_FILE"]).read_text()
    assert ledger.path == f"/{postgres['POSTGRES_DB']}"
    assert settings.host == "0.0.0.0"
    # It is reached from elsewhere, so it must have keys, and those must be good ones.
    check_not_exposed(settings, protected=bool(operator_keys(settings)))
    assert [key.role for key in operator_keys(settings)] == [Role.ADMIN, Role.SCRAPE]
    assert not settings.insecure


def test_each_secret_is_a_file_that_one_command_writes(secrets_folder: Path) -> None:
    """Compose does not start without the files, so no key has a default."""
    for name, source in COMPOSE["secrets"].items():
        assert source == {"file": f"./{FOLDER.relative_to(ROOT)}/{name}"}
        assert (secrets_folder / name).is_file()
    used = {name for service in SERVICES.values() for name in service.get("secrets", ())}
    assert used == set(COMPOSE["secrets"])


def test_secrets_are_random_and_closed_to_other_users(secrets_folder: Path, tmp_path: Path) -> None:
    assert stat.S_IMODE(secrets_folder.stat().st_mode) == 0o700
    write(tmp_path / "other")
    for name in RANDOM:
        text = (secrets_folder / name).read_text()
        assert re.fullmatch(r"[0-9a-f]{64}", text)
        assert text != (tmp_path / "other" / name).read_text()
    # Containers run as users of their own, and have the files with the modes of this machine.
    assert {stat.S_IMODE(path.stat().st_mode) for path in secrets_folder.iterdir()} == {0o644}
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert f"/{FOLDER.relative_to(ROOT)}/" in ignored


def test_secrets_that_exist_are_kept(tmp_path: Path) -> None:
    """Also a password of an older volume, which the URL takes."""
    (tmp_path / "postgres-password").write_text("p@ss/word\n")
    done = subprocess.run(
        [sys.executable, DEPLOY / "write_secrets.py", tmp_path],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "6 files written, the others kept" in done.stdout
    url = urlsplit((tmp_path / "ledger-url").read_text())
    assert unquote(url.password or "") == "p@ss/word"
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert write(tmp_path) == []
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before
    assert not [name for name in before if before[name].strip() in done.stdout]


@pytest.fixture
def guarded_postgres(tmp_path: Path) -> Iterator[PostgresServer]:
    """A Postgres whose user `tidegauge` must have a password, as in the image."""
    with PostgresServer(tmp_path / "postgres") as server:
        [[path]] = server.execute("SHOW hba_file")
        rules = Path(path)
        rules.write_text(f"host all tidegauge all scram-sha-256\n{rules.read_text()}")
        server.execute("SELECT pg_reload_conf()")
        yield server


def test_a_replica_runs_on_the_secrets(
    tmp_path: Path, secrets_folder: Path, guarded_postgres: PostgresServer
) -> None:
    """The real service, Redis and Postgres with the files, but for the stores' addresses."""
    postgres = mounted("postgres", secrets_folder)
    user, name = postgres["POSTGRES_USER"], postgres["POSTGRES_DB"]
    password = Path(postgres["POSTGRES_PASSWORD_FILE"]).read_text()
    guarded_postgres.execute(f"CREATE USER {user} PASSWORD '{password}'")
    guarded_postgres.execute(f"CREATE DATABASE {name} OWNER {user}")
    with running_redis(tmp_path, secrets_folder) as port:
        for file, address, here in (
            ("ledger-url", "postgres:5432", f"127.0.0.1:{guarded_postgres.port}"),
            ("live-url", "redis:6379", f"127.0.0.1:{port}"),
        ):
            path = secrets_folder / file
            path.write_text(path.read_text().replace(f"@{address}/", f"@{here}/"))
        ledger = urlsplit((secrets_folder / "ledger-url").read_text())
        wrong = f"host={ledger.hostname} port={ledger.port} dbname={name} user={user} password=x"

        def guarded() -> bool:
            try:
                psycopg.connect(wrong).close()
            except psycopg.OperationalError as error:
                return "password authentication failed" in str(error)
            return False

        wait_until(guarded, "Postgres checks passwords")
        environment = mounted(REPLICAS[0], secrets_folder)
        environment.pop("FORWARDED_ALLOW_IPS")
        with Service(tmp_path, environment=environment) as service:
            assert httpx.get(f"{service.url}/v1/jobs").status_code == 401
            for file, path in (("admin-key", "/v1/jobs"), ("scrape-key", "/metrics")):
                key = (secrets_folder / file).read_text()
                headers = {"Authorization": f"Bearer {key}"}
                assert httpx.get(service.url + path, headers=headers).status_code == 200
            shown = Path(f"/proc/{service.pid}")
            for hidden in (*RANDOM, "ledger-url", "live-url"):
                secret = (secrets_folder / hidden).read_bytes()
                assert secret not in (shown / "environ").read_bytes()
                assert secret not in (shown / "cmdline").read_bytes()


def test_two_replicas_that_are_equal() -> None:
    first, second = (SERVICES[name] for name in REPLICAS)
    assert first == second
    assert (ROOT / first["build"]["dockerfile"]).is_file()


def test_who_starts_after_whom() -> None:
    for name, service in SERVICES.items():
        needed = service.get("depends_on", {})
        for other in needed:
            assert other in SERVICES, (name, other)
            if isinstance(needed, dict) and needed[other]["condition"] == "service_healthy":
                healthy = "healthcheck" in SERVICES[other] or other in REPLICAS
                assert healthy, f"{name} waits for the health of {other}, which has no check"
    for replica in REPLICAS:
        assert set(SERVICES[replica]["depends_on"]) == {"redis", "postgres"}
    assert set(SERVICES["balancer"]["depends_on"]) == set(REPLICAS)


def test_every_service_has_what_it_needs_to_run_for_long() -> None:
    for name, service in SERVICES.items():
        assert service["restart"] == "unless-stopped", name
        assert service["deploy"]["resources"]["limits"]["memory"], name
        assert set(service["networks"]) <= set(COMPOSE["networks"]), name
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            there = (
                (ROOT / source).exists()
                if source.startswith("./")
                else source in COMPOSE["volumes"]
            )
            assert there, (name, volume)
    # Only on this machine, and each at the port that is listened on.
    for name in ("balancer", "prometheus", "alertmanager", "grafana"):
        [published] = SERVICES[name]["ports"]
        host, _, inside = published.split(":")
        assert (host, int(inside)) == ("127.0.0.1", port_of(name))
    closed = {name for name, service in SERVICES.items() if "ports" not in service}
    assert closed == {*REPLICAS, "redis", "postgres"}


def test_who_speaks_to_whom_shares_a_network() -> None:
    def meet(one: str, other: str) -> bool:
        return bool(set(SERVICES[one]["networks"]) & set(SERVICES[other]["networks"]))

    for replica in REPLICAS:
        assert all(
            meet(replica, other) for other in ("redis", "postgres", "balancer", "prometheus")
        )
    assert not meet("balancer", "redis")


def test_the_data_of_the_stores_is_kept() -> None:
    image, mount = SERVICES["postgres"]["image"], SERVICES["postgres"]["volumes"][0]
    [major] = re.findall(r"^postgres:(\d+)", image)
    assert int(major) >= 18
    assert mount.split(":")[1] == "/var/lib/postgresql"
    assert SERVICES["redis"]["volumes"][0].split(":")[1] == "/data"
    # An end in order is given the time that it takes.
    graceful = re.findall(
        r'"timeout_graceful_shutdown": (\d+)', (ROOT / "service/server/serve.py").read_text()
    )
    for replica in REPLICAS:
        assert int(SERVICES[replica]["stop_grace_period"].removesuffix("s")) > int(graceful[0])


# ---- Redis


def redis_options() -> dict[str, str]:
    program, *words = SERVICES["redis"]["command"]
    assert program == "redis-server"
    return {
        name.removeprefix("--"): value for name, value in zip(words[::2], words[1::2], strict=True)
    }


@contextmanager
def running_redis(folder: Path, secrets_folder: Path) -> Generator[int]:
    """Run the real Redis with the options of the compose file; its port."""
    port = free_port()
    _, *words = (
        str(secrets_folder / Path(word).name) if Path(word).parent == MOUNTED else word
        for word in SERVICES["redis"]["command"]
    )
    where = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)]
    process = launch([redis_server(), *words, *where], folder / "redis.log", cwd=folder)
    # As the health check: a ping without a password.
    client = redis.Redis(port=port)

    def answers() -> bool:
        assert process.poll() is None, (folder / "redis.log").read_text()
        try:
            return bool(client.ping())
        except redis.ConnectionError:
            return False

    try:
        wait_until(answers, "Redis ready")
        yield port
    finally:
        client.close()
        end(process, signal.SIGTERM)


def test_redis_takes_its_options(tmp_path: Path, secrets_folder: Path) -> None:
    options = redis_options()
    # An administrator to read the settings with, whom the file does not have.
    users = secrets_folder / "redis-users"
    users.write_text(f"{users.read_text()}\nuser operator on nopass ~* &* +@all")
    with running_redis(tmp_path, secrets_folder) as port:
        client = redis.Redis(port=port, username="operator", password="-", decode_responses=True)
        there = client.config_get("*")
        client.close()
        given = {**options, "maxmemory": str(1 << 30), "aclfile": str(users)}
        assert options["maxmemory"] == "1gb"
        assert Path(options["aclfile"]).parent == MOUNTED
        assert {name: there[name] for name in given} == given
    assert (options["appendonly"], options["maxmemory-policy"]) == ("yes", "noeviction")


def test_redis_has_the_service_and_the_health_check_as_users(
    tmp_path: Path, secrets_folder: Path
) -> None:
    password = (secrets_folder / "redis-password").read_text()
    with running_redis(tmp_path, secrets_folder) as port:
        stranger = redis.Redis(port=port)
        assert stranger.ping()
        for command in ("GET tidegauge:x", "INFO", "CONFIG GET *", "FLUSHALL"):
            with pytest.raises(NoPermissionError):
                stranger.execute_command(*command.split())
        stranger.close()
        with pytest.raises(redis.AuthenticationError):
            redis.Redis(port=port, username="tidegauge", password="wrong").ping()
        service = redis.Redis(port=port, username="tidegauge", password=password)
        service.set("tidegauge:x", "1")
        with pytest.raises(NoPermissionError):
            service.execute_command("FLUSHALL")
        service.close()
    assert REDIS_RIGHTS.split() == [*documented_rights()]
    check = SERVICES["redis"]["healthcheck"]["test"]
    assert check == ["CMD-SHELL", "redis-cli ping | grep -q PONG"]


# ---- the image


def test_the_image_is_built_of_what_is_there() -> None:
    rules = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    let_in = {rule[1:] for rule in rules if rule.startswith("!")}
    assert "*" in rules
    built = False
    for word, rest in instructions():
        if word != "COPY":
            continue
        *sources, _ = (part for part in rest.split() if not part.startswith("--"))
        if "--from=" in rest:
            built = True
            assert sources == ["/opt/tidegauge"]
            continue
        for source in sources:
            assert (ROOT / source).exists(), source
            assert any(fnmatch(source, rule) for rule in let_in), f"{source} is ignored"
    assert built


def of_extra(name: str, optional: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """The packages of an extra, and of those of our own that it names."""
    for one in optional[name]:
        requirement = Requirement(one)
        if requirement.name == "tidegauge":
            for extra in requirement.extras:
                yield from of_extra(extra, optional)
        else:
            yield one


def test_what_is_installed_is_locked() -> None:
    """Every package of the image is in the lock, with hashes; and so is what builds it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    [install] = [rest for word, rest in instructions() if word == "RUN" and "--constraint" in rest]
    assert "--constraint requirements.lock" in install
    assert "--build-constraint requirements.lock" in install
    [extras] = re.findall(r'"\.\[([^]]+)\]"', install)
    optional = project["project"]["optional-dependencies"]
    assert "production" in extras.split(",")
    assert set(extras.split(",")) <= set(optional)

    lock = (ROOT / "requirements.lock").read_text()
    pinned = re.findall(r"^([\w.-]+)==\S+[^\n]*\\\n\s+--hash=sha256:", lock, re.MULTILINE)
    wanted = [
        *project["project"]["dependencies"],
        *project["build-system"]["requires"],
        *(package for extra in extras.split(",") for package in of_extra(extra, optional)),
    ]
    names = {canonicalize_name(Requirement(one).name) for one in wanted}
    assert names <= {canonicalize_name(name) for name in pinned}


def test_the_base_is_an_argument_that_takes_a_digest() -> None:
    """Both stages are on one base, so that the environment of one runs in the other."""
    before = instructions()[: [word for word, _ in instructions()].index("FROM")]
    assert before == [("ARG", "BASE=python:3.11-slim")]
    bases = [rest.split()[0] for word, rest in instructions() if word == "FROM"]
    assert bases == ["${BASE}", "${BASE}"]
    assert "--build-arg BASE=python:3.11-slim@sha256:" in (DEPLOY / "Dockerfile").read_text()


def test_the_image_runs_on_a_file_system_that_it_cannot_write() -> None:
    for replica in REPLICAS:
        assert SERVICES[replica]["read_only"] is True
        assert SERVICES[replica]["tmpfs"] == ["/tmp"]
    assert "docker run --read-only --tmpfs /tmp" in (DEPLOY / "Dockerfile").read_text()


def test_the_image_runs_as_nobody_special(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = [word for word, _ in last_stage()]
    user = said("USER")
    assert user not in {"root", "0"}
    assert re.search(rf"useradd .*--uid 10001 .*\b{user}$", said("RUN"))
    # Nothing is done as root after that.
    assert "RUN" not in stage[stage.index("USER") :]
    assert json.loads(said("CMD")) == ["tidegauge", "serve"]
    settings = settings_of(image_environment(), monkeypatch)
    assert settings.port == int(said("EXPOSE"))
    # By itself it runs on its embedded stores, and the ledger is on the volume.
    assert settings.live_url == "memory://"
    assert settings.ledger_url.startswith(f"sqlite+aiosqlite:///{said('VOLUME')}/")


def test_the_image_is_healthy_as_long_as_it_is_alive(tmp_path: Path) -> None:
    check = said("HEALTHCHECK")
    command: list[str] = json.loads(check[check.index("CMD") + 3 :])
    [path] = re.findall(r"\}(/\w+)'", command[-1])
    assert path in routes()
    assert path == "/healthz"
    with Service(tmp_path) as service:
        environment = {"TIDEGAUGE_PORT": str(service.port)}
        run = [sys.executable, *command[1:]]
        assert subprocess.run(run, env=environment, timeout=30, check=False).returncode == 0
    done = subprocess.run(run, env=environment, timeout=30, capture_output=True, check=False)
    assert done.returncode != 0


# ---- who speaks to the replicas


def test_prometheus_asks_every_replica() -> None:
    [job] = read_yaml(DEPLOY / "prometheus.yml")["scrape_configs"]
    assert job.get("metrics_path", "/metrics") in routes()
    # It has a key for that, and for nothing else.
    [secret] = SERVICES["prometheus"]["secrets"]
    assert job["authorization"]["credentials_file"] == f"/run/secrets/{secret}"
    # The label job of the metrics of a stage is tidegauge's own, and the alerts go by it.
    assert job["honor_labels"] is True
    environment = SERVICES[REPLICAS[0]]["environment"]
    assert environment["TIDEGAUGE_SCRAPE_KEY_FILE"] == f"/run/secrets/{secret}"
    [static] = job["static_configs"]
    assert static["targets"] == [f"{name}:{port_of(name)}" for name in REPLICAS]


def test_the_balancer_knows_every_replica() -> None:
    text = HAPROXY.read_text()
    backends = re.split(r"^backend ", text, flags=re.MULTILINE)[1:]
    assert len(backends) == 2
    for backend in backends:
        servers = re.findall(r"^\s+server (\S+) (\S+)$", backend, re.MULTILINE)
        assert servers == [(name, f"{name}:{port_of(name)}") for name in REPLICAS]
        assert "http-request disable-l7-retry if !METH_GET" in backend
    checks = re.findall(r"http-check send meth GET uri (\S+)", text)
    assert checks == ["/readyz", "/healthz"]
    assert set(checks) <= routes()
    [health] = [word for word in SERVICES["balancer"]["healthcheck"]["test"] if "://" in word]
    assert urlsplit(health).port == bound_port()
    assert urlsplit(health).path in routes()


def test_the_balancer_waits_longer_than_any_poll() -> None:
    assert seconds("client") > LONGEST_POLL_S
    assert seconds("server") > LONGEST_POLL_S


def test_the_balancer_speaks_as_the_service_does() -> None:
    found = re.findall(
        r"http-error status (\d+) content-type (\S+) hdr Retry-After 1 string '(.*)'",
        HAPROXY.read_text(),
    )
    assert [status for status, _, _ in found] == ["502", "503", "504"]
    for status, media_type, body in found:
        assert media_type == "application/problem+json"
        said_here = json.loads(body)
        assert said_here["status"] == int(status)
        assert said_here["type"] == f"/problems/{UnavailableError.slug}"
        assert said_here["title"] == UnavailableError.title()


# ---- the load balancer itself


@contextmanager
def balancer(folder: Path, replicas: Mapping[str, Service]) -> Generator[str]:
    """The real one by the file that is deployed, but for the addresses; its URL."""
    port = free_port()
    text = HAPROXY.read_text().replace(f"bind :{bound_port()}", f"bind 127.0.0.1:{port}")
    for name, service in replicas.items():
        text = text.replace(f"{name}:{port_of(name)}", f"127.0.0.1:{service.port}")
    config, log = folder / "haproxy.cfg", folder / "haproxy.log"
    config.write_text(text)
    program = shutil.which("haproxy")
    assert program is not None
    checked = subprocess.run(
        [program, "-c", "-f", str(config)], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr
    process = launch([program, "-db", "-f", config], log, cwd=folder)
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        assert process.poll() is None, log.read_text()
        try:
            return httpx.get(f"{url}/readyz").status_code == 200
        except httpx.TransportError:
            return False

    try:
        wait_until(answers, "the balancer")
        yield url
    finally:
        end(process, signal.SIGTERM)


@contextmanager
def production(
    folder: Path, stores: tuple[RedisServer, PostgresServer]
) -> Generator[dict[str, Service]]:
    """Both replicas on the same stores."""
    live, ledger = stores[0].url, stores[1].database()
    replicas: dict[str, Service] = {}
    for name in REPLICAS:
        (folder / name).mkdir()
        replicas[name] = Service(folder / name, options=("--live-url", live))
        replicas[name].ledger_url = ledger
    with replicas[REPLICAS[0]], replicas[REPLICAS[1]]:
        yield replicas


@haproxy
def test_two_replicas_behind_the_balancer(tmp_path: Path, postgres_server: PostgresServer) -> None:
    """Events come as they happen, and a replica that dies costs no request."""
    with (
        RedisServer(tmp_path / "redis") as live,
        production(tmp_path, (live, postgres_server)) as replicas,
        balancer(tmp_path, replicas) as url,
        httpx.Client(base_url=url, timeout=30) as client,
    ):
        job = "/v1/jobs/deployed"
        ok(client.put(job, json={"stages": {"s": {"shards": ["0"]}}}), 201)
        lease = {"ranges": "all", "holder": "worker", "ttl_ms": 600_000}
        token = ok(client.post(f"{job}/stages/s/leases", json=lease), 201)["token"]

        watermark = f"{job}/stages/s/watermark"

        def report(value: int) -> None:
            ok(
                client.post(
                    f"{job}/stages/s/reports", json={"token": token, "ranges": {"0": value}}
                )
            )

        def output() -> Any:
            return ok(client.get(watermark))["output_watermark"]

        with client.stream("GET", f"{job}/events") as events:
            lines = events.iter_lines()
            for value in (1_000, 2_000, 3_000):
                report(value)
                # Before the next is sent: what waits for more to come would wait for ever.
                while f'"output_watermark":{value}' not in next(lines):
                    pass

        poll = client.get(f"{watermark}?at_least=9000", headers={"Prefer": "wait=2"})
        assert ok(poll)["output_watermark"] == 3_000
        assert poll.elapsed.total_seconds() > 1.5

        # At once, before any check could have noticed: who cannot be reached is passed over.
        replicas[REPLICAS[0]].kill()
        for value in range(4_000, 4_100):
            report(value)
            assert output() == value
        replicas[REPLICAS[0]].start()
        for service in replicas.values():
            assert ok(httpx.get(service.url + watermark))["output_watermark"] == 4_099

        # No replica is ready, but readers are still shown what is certain.
        live.kill()
        wait_until(lambda: httpx.get(f"{url}/readyz").status_code == 503, "no replica is ready")
        for _ in range(30):
            assert output() == 4_099
            time.sleep(0.1)

        for service in replicas.values():
            service.kill()
        wait_until(lambda: client.get(f"{job}/watermarks").status_code == 503, "nobody there")
        problem(client.get(f"{job}/watermarks"), 503, "unavailable")
        assert client.get(f"{job}/watermarks").headers["retry-after"] == "1"
