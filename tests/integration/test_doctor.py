"""`tidegauge doctor`, on real stores that are well, and on some that are not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from service.ledger.sql import SqlLedger
from tests.support.postgres_server import PostgresServer
from tests.support.redis_server import RedisServer
from tests.support.server import ROOT, Service


def doctor(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TIDEGAUGE_")}
    return subprocess.run(
        [sys.executable, "-m", "service.cli", "doctor", *options],
        cwd=folder,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def examine(folder: Path, *options: str) -> tuple[int, dict[str, dict[str, Any]]]:
    done = doctor(folder, "--json", *options)
    assert done.stdout, done.stderr
    return done.returncode, {
        finding["what"]: finding for finding in json.loads(done.stdout)["findings"]
    }


def test_the_defaults_are_well_before_the_first_start_and_after(tmp_path: Path) -> None:
    status, found = examine(tmp_path)
    assert status == 0
    assert {finding["verdict"] for finding in found.values()} <= {"ok", "warning"}
    assert "created at the first start" in found["ledger"]["says"]
    # It looks, and leaves nothing behind.
    assert list(tmp_path.iterdir()) == []
    with Service(tmp_path) as service:
        _, found = examine(tmp_path, "--ledger-url", service.ledger_url)
        assert "in use by a running service" in found["ledger"]["says"]
    _, found = examine(tmp_path, "--ledger-url", service.ledger_url)
    assert "pages are sound" in found["ledger"]["says"]


def test_keys_and_a_certificate_with_which_the_service_cannot_start_are_faults(
    tmp_path: Path,
) -> None:
    (tmp_path / ".env").write_text("TIDEGAUGE_ADMIN_KEY_FILE=gone.key\n")
    status, found = examine(tmp_path)
    assert (status, found["settings"]["verdict"]) == (1, "fault")
    assert "TIDEGAUGE_ADMIN_KEY_FILE 'gone.key' cannot be read" in found["settings"]["says"]
    (tmp_path / ".env").write_text("TIDEGAUGE_ADMIN_KEY=hush-hush\n")
    status, found = examine(tmp_path)
    assert (status, found["settings"]["verdict"]) == (1, "fault")
    assert "hush" not in found["settings"]["says"]
    (tmp_path / ".env").write_text("TIDEGAUGE_TLS_CERT=gone.crt\nTIDEGAUGE_TLS_KEY=gone.key\n")
    status, found = examine(tmp_path, "--live-url", "redis://127.0.0.1:1")
    assert (status, found["settings"]["verdict"]) == (1, "fault")
    assert "TIDEGAUGE_TLS_CERT gone.crt cannot be read" in found["settings"]["says"]


def test_findings_are_printed_in_each_form(tmp_path: Path) -> None:
    found = json.loads(doctor(tmp_path, "-o", "json").stdout)
    in_yaml = doctor(tmp_path, "-o", "yaml").stdout
    names = [each["what"] for each in found["findings"]]
    assert [each["what"] for each in YAML(typ="safe").load(in_yaml)["findings"]] == names
    folder = tmp_path / ("long-" * 20)
    table = doctor(tmp_path, "--ledger-url", f"sqlite+aiosqlite:///{folder}/a.db").stdout
    begins = {line.split()[0] for line in table.splitlines()}
    assert begins <= {"ok", "warning", "fault"}, "a line of a pipe is wrapped"
    assert str(folder) in table
    rejected = doctor(tmp_path, "--json", "-o", "yaml")
    assert (rejected.returncode, rejected.stdout) == (2, "")


def test_a_damaged_file_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "a.db").write_bytes(b"no database " * 1_000)
    status, found = examine(tmp_path, "--ledger-url", f"sqlite+aiosqlite:///{tmp_path}/a.db")
    assert (status, found["ledger"]["verdict"]) == (1, "fault")
    assert "restore it from a backup" in found["ledger"]["says"]


@pytest.mark.anyio
async def test_servers_are_looked_at(
    tmp_path: Path, redis_server: RedisServer, postgres_server: PostgresServer
) -> None:
    url = postgres_server.database()
    stores = ("--ledger-url", url, "--live-url", redis_server.url)
    _, found = examine(tmp_path, *stores)
    assert "first start" in found["ledger's schema"]["says"]
    ledger = SqlLedger(url)
    await ledger.open(exclusive=False)
    await ledger.close()
    redis_server.command("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    try:
        _, found = examine(tmp_path, *stores)
    finally:
        redis_server.command("CONFIG", "SET", "maxmemory-policy", "noeviction")
    assert "takes writes" in found["ledger's schema"]["says"]
    assert found["live store"]["verdict"] == "ok"
    assert found["live store's clock"]["verdict"] == found["ledger's clock"]["verdict"] == "ok"
    assert found["live store's eviction"]["verdict"] == "warning"
    assert "set noeviction" in found["live store's eviction"]["says"]


def test_servers_that_are_away_are_faults(tmp_path: Path) -> None:
    status, found = examine(
        tmp_path,
        "--ledger-url",
        "postgresql+psycopg://me:hidden@127.0.0.1:1/db",
        "--live-url",
        "redis://:hidden@127.0.0.1:1/0",
    )
    assert status == 1
    assert found["ledger"]["verdict"] == found["live store"]["verdict"] == "fault"
    assert "hidden" not in json.dumps(found)
