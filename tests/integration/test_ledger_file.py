"""The file of an embedded ledger: other names for it, and what may happen to it under the service."""

from __future__ import annotations

import os
import resource
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from sqlalchemy import Select
from sqlalchemy.dialects import sqlite

from service.errors import StoreRefusedError, UnavailableError
from service.ledger import history_statements as sql
from service.ledger.port import NewLayout
from service.ledger.sql import SqlLedger
from tests.support.api import Api, eventually, ok, problem
from tests.support.server import Service

pytestmark = pytest.mark.anyio

SPEC = b'{"stages":{"s":{"shards":["0"]}}}'


def ledger_at(path: Path) -> SqlLedger:
    return SqlLedger(f"sqlite+aiosqlite:///{path}")


@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to])
async def test_another_name_for_the_file_leads_to_the_same_lock(
    tmp_path: Path, link: Callable[[Path, Path], None]
):
    ledger, other = ledger_at(tmp_path / "a.db"), ledger_at(tmp_path / "b.db")
    await ledger.open(exclusive=True)
    link(tmp_path / "b.db", tmp_path / "a.db")
    with pytest.raises(StoreRefusedError, match="another process serves"):
        await other.open(exclusive=True)
    await ledger.close()
    await other.open(exclusive=True)
    await other.close()


def delete(path: Path) -> None:
    path.unlink()


def replace(path: Path) -> None:
    path.rename(path.with_suffix(".old"))
    path.write_bytes(path.with_suffix(".old").read_bytes())


def cut(path: Path) -> None:
    os.truncate(path, 0)


def delete_log(path: Path) -> None:
    Path(f"{path}-wal").unlink()


def cut_log(path: Path) -> None:
    os.truncate(f"{path}-wal", 0)


@pytest.mark.parametrize(
    ("happens", "words"),
    [
        (delete, "moved or deleted"),
        (replace, "moved or deleted"),
        (cut, "truncated from"),
        (delete_log, "-wal was moved or deleted"),
        (cut_log, "-wal was truncated from"),
    ],
)
async def test_a_file_that_is_gone_is_noticed_at_once(
    tmp_path: Path, happens: Callable[[Path], None], words: str
):
    """Every use says so, and what to do: nothing is answered as if it was written."""
    ledger = ledger_at(tmp_path / "a.db")
    await ledger.open(exclusive=True)
    await ledger.create(NewLayout("job", SPEC, ["s"]), 1)
    happens(tmp_path / "a.db")
    for use in (ledger.ping, ledger.heads, lambda: ledger.reset("job", 2)):
        with pytest.raises(UnavailableError, match=words) as refused:
            await use()
        assert "restore the file from a backup" in refused.value.detail
    await ledger.close()


@pytest.mark.parametrize("table", ["jobs", "stages"])
async def test_a_damaged_page_is_found_at_the_start(tmp_path: Path, table: str):
    path = tmp_path / "a.db"
    ledger = ledger_at(path)
    await ledger.open(exclusive=True)
    await ledger.create(NewLayout("job", SPEC, ["s"]), 1)
    await ledger.close()
    # The rows of a small table are on one page, with the name of the job in them.
    content, needle = bytearray(path.read_bytes()), b"job" + (b"s" if table == "stages" else b"")
    size = int.from_bytes(content[16:18], "big")
    pages = [
        n for n in range(1, len(content) // size) if needle in content[n * size : (n + 1) * size]
    ]
    assert pages
    for number in pages:
        content[number * size : number * size + 64] = b"\xff" * 64
    path.write_bytes(content)
    ledger = ledger_at(path)
    with pytest.raises(StoreRefusedError, match=r"is damaged .* restore it from a backup"):
        await ledger.open(exclusive=True)
    await ledger.close()


async def test_something_else_is_no_ledger(tmp_path: Path):
    path = tmp_path / "a.db"
    path.write_bytes(b"no database " * 1_000)
    ledger = ledger_at(path)
    with pytest.raises((StoreRefusedError, UnavailableError), match="file is not a database"):
        await ledger.open(exclusive=True)
    await ledger.close()
    assert path.read_bytes() == b"no database " * 1_000


async def test_a_full_disk(tmp_path: Path):
    """The watermark stands, readiness says so, and with room again everything goes on."""
    with Service(tmp_path) as service:
        async with httpx.AsyncClient(base_url=service.url, timeout=30) as client:
            api = Api(client)
            await api.define({"s": {"shards": ["0"]}})
            token = await api.token("s", ttl_ms=600_000)
            await api.report("s", token, {"0": 10})
            # No file of the service may grow.
            resource.prlimit(service.pid, resource.RLIMIT_FSIZE, (1_024, resource.RLIM_INFINITY))
            refused = await eventually(
                lambda: client.get("/readyz"), lambda answer: answer.status_code == 503
            )
            assert "disk" in problem(refused, 503, "unavailable")["detail"]
            await api.report("s", token, {"0": 20})
            assert await api.output("s") == 10
            problem(await Api(client, "other").put({"s": {"shards": ["0"]}}), 503, "unavailable")
            resource.prlimit(
                service.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            )
            await eventually(lambda: api.output("s"), lambda output: output == 20)
            await eventually(
                lambda: client.get("/readyz"), lambda answer: answer.status_code == 200
            )
            ok(await client.get("/v1/jobs/job"))


@pytest.mark.parametrize(
    "statement",
    [sql.FIND_HISTORY, sql.FIND_LAST_HISTORY, sql.FIND_NEXT_HISTORY],
)
async def test_history_is_found_by_all_columns_of_its_index(statement: Select, tmp_path: Path):
    """By the first ones alone, a whole job or stage would be passed over."""
    ledger = ledger_at(tmp_path / "a.db")
    await ledger.open(exclusive=True)
    await ledger.close()
    compiled = statement.compile(dialect=sqlite.dialect(paramstyle="named"))
    asked = {name: 1 if value is None else value for name, value in compiled.params.items()}
    with closing(sqlite3.connect(tmp_path / "a.db")) as db:
        steps = [row[3] for row in db.execute(f"EXPLAIN QUERY PLAN {compiled}", asked)]
    [search] = [s for s in steps if "watermark_history" in s and "PRIMARY KEY" not in s]
    assert "USING INDEX watermark_history_by_stage ((job,stage,at_ms)" in search
