"""Examination of the ledger's database: its answers, its writes and the durability of its commits."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from sqlalchemy import text
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import AsyncConnection

from service.clock import Clock
from service.errors import ProblemError, StoreRefusedError, UnavailableError
from service.ledger.database import Database, Work
from service.ledger.migrate import newest_revision
from service.ledger.sql import SqlLedger
from service.model.findings import Finding, compare_clocks

_ROOM_BYTES = 512 * 2**20
_DURABLE = ("fsync", "synchronous_commit", "full_page_writes")
_TIME_LIMITS = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout")


async def examine(url: str, clock: Clock) -> Sequence[Finding]:
    """Examine the database at this URL. Raises `StoreRefusedError` if the URL cannot be used.

    Nothing is migrated or created: a missing ledger is reported as such.
    """
    ledger = SqlLedger(url)
    try:
        if ledger.database.is_sqlite:
            return await _examine_file(Path(make_url(url).database or ":memory:"), ledger)
        return await _examine_server(ledger, clock)
    finally:
        await ledger.close()


async def _examine_file(path: Path, ledger: SqlLedger) -> list[Finding]:
    found = _examine_folder(path)
    if found[-1].what == "ledger":
        return found
    try:
        await ledger.database.examine()
    except StoreRefusedError as error:
        running = "another process serves" in error.detail
        finding = "is in use by a running service: see its /readyz" if running else error.detail
        return [*found, Finding("ledger", "ok" if running else "fault", finding)]
    except ProblemError as error:
        return [*found, Finding("ledger", "fault", error.detail)]
    return [*found, Finding("ledger", "ok", f"{path} can be read, and its pages are sound")]


def _examine_folder(path: Path) -> list[Finding]:
    folder = path.resolve().parent
    if not folder.is_dir():
        return [Finding("ledger", "fault", f"the folder {folder} does not exist: create it")]
    found: list[Finding] = []
    free = shutil.disk_usage(folder).free
    short = free < _ROOM_BYTES
    found.append(
        Finding(
            "ledger's disk",
            "warning" if short else "ok",
            f"{free // 2**20:,} MiB are free"
            + (": make room, or watermarks will stand" if short else ""),
        )
    )
    if not path.exists():
        found.append(Finding("ledger", "ok", f"{path} is created at the first start"))
    return found


async def _examine_server(ledger: SqlLedger, clock: Clock) -> list[Finding]:
    database = ledger.database
    try:
        version = (await database.read(_lines("SHOW server_version")))[0]
        found = [Finding("ledger", "ok", f"Postgres {version} answers"), await _limits(database)]
        found += await _schema(ledger)
        off = [n for n in _DURABLE if (await database.read(_lines(f"SHOW {n}")))[0] == "off"]
        found.append(
            Finding("ledger's durability", "ok", "commits are on the disk")
            if not off
            else Finding(
                "ledger's durability",
                "fault",
                f"{', '.join(off)} is off: after a crash a published watermark could go back",
            )
        )
        before_ms = clock.wall_ms()
        now = "SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint"
        theirs_ms = int((await database.read(_lines(now)))[0])
        found.append(compare_clocks("ledger's clock", theirs_ms, before_ms, clock.wall_ms()))
    except UnavailableError as error:
        return [Finding("ledger", "fault", f"{error.detail}: is TIDEGAUGE_LEDGER_URL right?")]
    return found


async def _limits(database: Database) -> Finding:
    what = "ledger's time limits"
    try:
        await database.check_sessions()
    except StoreRefusedError as error:
        return Finding(what, "fault", error.detail)
    shown = [f"{n} {(await database.read(_lines(f'SHOW {n}')))[0]}" for n in _TIME_LIMITS]
    return Finding(what, "ok", f"hold in each session: {', '.join(shown)}")


async def _schema(ledger: SqlLedger) -> list[Finding]:
    there = "SELECT count(*) FROM information_schema.tables WHERE table_name = 'alembic_version'"
    if (await ledger.database.read(_lines(there)))[0] == "0":
        return [Finding("ledger's schema", "ok", "is created at the first start")]
    revision = (await ledger.database.read(_lines("SELECT version_num FROM alembic_version")))[0]
    if revision != newest_revision():
        return [
            Finding(
                "ledger's schema",
                "warning",
                f"is {revision}, this release's is {newest_revision()}: `tidegauge migrate`, or the"
                " next start, upgrades an older one; a newer one needs a newer release",
            )
        ]
    await ledger.ping()
    return [Finding("ledger's schema", "ok", f"is {revision}, and takes writes")]


def _lines(statement: str) -> Work[list[str]]:
    async def run(db: AsyncConnection) -> list[str]:
        return [str(row[0]) for row in await db.execute(text(statement))]

    return run
