"""Access to the ledger's database: every wait has a timeout, and every failure is an `UnavailableError`,
but for a value that does not fit its column.

SQLite has one connection, and one transaction at a time. Postgres has a pool, and its transactions run
side by side, separated by the locks on rows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, cast

from sqlalchemy import URL, AsyncAdaptedQueuePool, Executable, NullPool, Row, event, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from service.errors import StoreRefusedError, UnavailableError
from service.ledger.deadlines import CURRENT_DEADLINE, Deadline, DriverConnection, with_deadline
from service.ledger.migrate import migrating, run_migrations
from service.ledger.sessions import LIMITS, check_sessions, setter
from service.ledger.sqlite_file import SqliteFile
from service.ledger.tables import history, metadata
from service.telemetry.redaction import redact, shown

R = TypeVar("R")
Work = Callable[[AsyncConnection], Awaitable[R]]

SQLITE = "sqlite+aiosqlite"
POSTGRES = "postgresql+psycopg"

_POOL_SIZE = 5
_POOL_OVERFLOW = 5
_POOL_TIMEOUT_S = 3
_TRANSACTION_TIMEOUT_S = 8.0
"""Timeout of a transaction, including the wait for the server."""

_MIGRATION_TIMEOUT_S = 90.0
"""Timeout of a migration, longer than the wait of `migrations/env.py` for another replica's."""

_CONNECT = {
    "connect_timeout": "3",
    "keepalives_idle": "5",
    "keepalives_interval": "2",
    "keepalives_count": "3",
    # After this time without an acknowledgement, the machine is dead.
    "tcp_user_timeout": "6000",
    "application_name": "tidegauge",
}
_OWNER_LOCK = 0x7469_6465_6F77_6E65
_TAKE_OWNER_LOCK = text("SELECT pg_advisory_lock(:key)")
_OWNER_LOCK_TIMEOUT = {"lock_timeout": "1000"}
"""Not zero: after a kill, the server needs a moment to find the end of the last owner."""

_LOCK_NOT_AVAILABLE = "55P03"


class Database:
    """Transactions of the database. Raises `UnavailableError` for one that cannot complete.

    A value that does not fit its column is a `RejectedValueError`.
    """

    def __init__(self, url: str) -> None:
        self._url = _checked_url(url)
        self.is_sqlite = self._url.drivername == SQLITE
        self._engine = _sqlite(self._url) if self.is_sqlite else _postgres(self._url)
        # A read takes several statements (a job, its stages), which need one snapshot. It is not
        # declared read-only, because SQLAlchemy would then set the connection to "read write" after it,
        # even on a server that its operator, or a full disk, has made read-only.
        self._reads = (
            self._engine
            if self.is_sqlite
            else self._engine.execution_options(isolation_level="REPEATABLE READ")
        )
        self._autocommit = self._engine.execution_options(isolation_level="AUTOCOMMIT")
        # SQLite allows one writer. A wait here costs nothing; SQLite itself would poll.
        self._writer_lock = asyncio.Lock()
        self._file: SqliteFile | None = None
        path = self._url.database
        if self.is_sqlite and path and path != ":memory:":
            self._file = SqliteFile(path)
            event.listen(self._engine.sync_engine, "connect", self._note_connection)
        self._owner: AsyncConnection | None = None

    async def open(self, *, exclusive: bool) -> None:
        """Bring the schema up to date; with `exclusive`, lock out other processes first."""
        if self._file is not None:
            self._file.take()
        elif exclusive and not self.is_sqlite:
            await self._take_database()
        if not self.is_sqlite:
            await self.check_sessions()
        async with migrating():
            await self._run(
                self._engine, lambda db: db.run_sync(run_migrations), _MIGRATION_TIMEOUT_S
            )
        if self.is_sqlite:
            await self._check_pages()

    async def examine(self) -> None:
        """Raise `StoreRefusedError` if SQLite's file is in use by another process, or damaged."""
        if self._file is not None:
            self._file.take()
        await self._check_pages()

    async def check_sessions(self) -> None:
        """Raise `StoreRefusedError` if a connection to Postgres is not a single session."""
        engine = _postgres(self._url, pooled=False)
        async with with_deadline(_TRANSACTION_TIMEOUT_S):
            await check_sessions(engine)

    async def _check_pages(self) -> None:
        """Raise `StoreRefusedError` if pages of SQLite's file are damaged.

        The history is left out: it may be large, and only displays depend on it.
        """
        found: list[str] = []
        try:
            for table in metadata.tables.keys() - {history.name}:
                statement = text(f"PRAGMA quick_check('{table}')")
                found += await self.read(lambda db, statement=statement: _lines(db, statement))
        except UnavailableError as error:
            found.append(error.detail)
        damage = [line for line in found if line != "ok"]
        if damage:
            raise StoreRefusedError(
                f"the ledger {self._url.database} is damaged ({damage[0]}): restore it from a backup, or"
                " move it away to begin with an empty one"
            )

    async def write(self, work: Work[R]) -> R:
        """Run `work` in one transaction. It may be started twice, but is committed at most once."""
        return await self._run(self._engine, work, _TRANSACTION_TIMEOUT_S)

    async def read(self, work: Work[R]) -> R:
        """Run `work`, which only reads. It does not wait for writers, except in SQLite."""
        return await self._run(self._reads, work, _TRANSACTION_TIMEOUT_S)

    async def run_statement(
        self, statement: Executable, parameters: Mapping[str, Any]
    ) -> Sequence[Row[Any]] | None:
        """Run a single statement as its own transaction, on Postgres; return its rows.

        None: the connection was lost. The statement may or may not have been committed, so the caller
        must be able to repeat it safely.
        """
        async with with_deadline(_TRANSACTION_TIMEOUT_S) as deadline:
            try:
                async with self._autocommit.connect() as db:
                    deadline.watch(await _driver_connection(db))
                    rows = (await db.execute(statement, parameters)).all()
                    deadline.watch(None)
            except DBAPIError as error:
                if not error.connection_invalidated or deadline.expired:
                    raise
                return None
            return rows

    async def close(self) -> None:
        """Close all connections and release the locks."""
        await self._leave_database()
        await self._engine.dispose()
        if self._file is not None:
            self._file.close()

    async def _run(self, engine: AsyncEngine, work: Work[R], timeout_s: float) -> R:
        if self.is_sqlite:
            async with self._writer_lock, with_deadline(timeout_s) as deadline:
                if self._file is not None:
                    self._file.check()
                return await _attempt(engine, work, deadline)
        async with with_deadline(timeout_s) as deadline:
            try:
                return await _attempt(engine, work, deadline)
            except DBAPIError as error:
                # A pooled connection may have died long ago, at a restart of the server, and only its
                # use reveals this. Nothing is written before the commit is sent, so a retry is safe.
                # After it the outcome is unknown, and the caller gets the error.
                if not error.connection_invalidated or deadline.committing or deadline.expired:
                    raise
            return await _attempt(engine, work, deadline)

    def _note_connection(self, _connection: object, _record: object) -> None:
        if self._file is not None:
            self._file.note_log()

    async def _take_database(self) -> None:
        """Lock the database against other processes, for as long as a connection to it is open.

        If the connection is lost, so is the lock, and another process may take it. This is safe: the
        other process begins new incarnations, and from then on the ledger rejects the records of this
        process. The lock only reports the mistake at once, to the operator who can correct it.
        """
        await self._leave_database()
        engine = _postgres(self._url, owner=True)
        async with with_deadline(_TRANSACTION_TIMEOUT_S) as deadline:
            db = await engine.connect()
            try:
                deadline.watch(await _driver_connection(db))
                await db.execute(_TAKE_OWNER_LOCK, {"key": _OWNER_LOCK})
            except DBAPIError as error:
                await db.close()
                if getattr(error.orig, "sqlstate", None) != _LOCK_NOT_AVAILABLE:
                    raise
                where = redact(self._url.render_as_string())
                raise StoreRefusedError(
                    f"another process serves {where}, and memory:// is for one process: stop it,"
                    " or use TIDEGAUGE_LIVE_URL=redis://… for all of them"
                ) from None
            deadline.watch(None)
        self._owner = db

    async def _leave_database(self) -> None:
        owner, self._owner = self._owner, None
        if owner is not None:
            await owner.close()


async def _attempt(engine: AsyncEngine, work: Work[R], deadline: Deadline) -> R:
    async with engine.connect() as db:
        deadline.watch(await _driver_connection(db))
        result = await work(db)
        deadline.committing = True
        await db.commit()
        # Closing sends nothing to the server; then the pool may reuse the connection.
        deadline.watch(None)
        return result


async def _lines(db: AsyncConnection, statement: Executable) -> list[str]:
    return [str(row[0]) for row in await db.execute(statement)]


async def _driver_connection(db: AsyncConnection) -> DriverConnection | None:
    if db.dialect.name == "sqlite":
        return None
    return cast("DriverConnection", (await db.get_raw_connection()).driver_connection)


# ---- engines


def _checked_url(url: str) -> URL:
    try:
        made = make_url(url)
    except (SQLAlchemyError, ValueError):
        # The messages are not passed on: they may quote half of a password with a `:` or a `/`.
        raise StoreRefusedError(
            f"TIDEGAUGE_LEDGER_URL {shown(url)} cannot be read: use {SQLITE}:///… or"
            f" {POSTGRES}://…; in a password, write / as %2F, @ as %40 and so on"
        ) from None
    if made.drivername in {SQLITE, POSTGRES}:
        return made
    advice = f"{SQLITE}:///… or {POSTGRES}://…"
    for supported in (SQLITE, POSTGRES):
        # postgresql://, postgres://, postgresql+asyncpg://, sqlite:// and the like.
        if made.drivername[:6] == supported[:6]:
            advice = redact(made.set(drivername=supported).render_as_string())
    raise StoreRefusedError(f"TIDEGAUGE_LEDGER_URL {shown(url)} cannot be used: use {advice}")


def _sqlite(url: URL) -> AsyncEngine:
    engine = create_async_engine(url, poolclass=AsyncAdaptedQueuePool, pool_size=1, max_overflow=0)
    event.listen(engine.sync_engine, "connect", _prepare_sqlite)
    return engine


def _postgres(url: URL, *, owner: bool = False, pooled: bool = True) -> AsyncEngine:
    """Make an engine for transactions, or for the one connection that holds the owner's lock.

    The driver is imported only here: SQLite does not need it.
    """
    theirs = url.query.get("options", "")
    options = theirs if isinstance(theirs, str) else " ".join(theirs)
    limits = {**LIMITS, **_OWNER_LOCK_TIMEOUT} if owner else LIMITS
    connect = {name: value for name, value in _CONNECT.items() if name not in url.query}
    pool: dict[str, Any] = (
        {"poolclass": NullPool}
        if owner or not pooled
        else {
            "pool_size": _POOL_SIZE,
            "max_overflow": _POOL_OVERFLOW,
            "pool_timeout": _POOL_TIMEOUT_S,
        }
    )
    try:
        engine = create_async_engine(
            url,
            connect_args=connect,
            isolation_level="AUTOCOMMIT" if owner else "READ COMMITTED",
            use_native_hstore=False,
            **pool,
        )
    except ImportError as error:
        raise StoreRefusedError(
            f"a ledger on Postgres needs psycopg ({error}): pip install 'tidegauge[production]'"
        ) from error
    # Before all other listeners: the next one already sends a query.
    event.listen(engine.sync_engine, "connect", _watch_new_connection, insert=True)
    event.listen(engine.sync_engine, "connect", setter(limits, options))
    return engine


class _Adapted(Protocol):
    @property
    def driver_connection(self) -> DriverConnection: ...


def _watch_new_connection(connection: _Adapted, _record: object) -> None:
    deadline = CURRENT_DEADLINE.get(None)
    if deadline is not None:
        deadline.watch(connection.driver_connection)


class _Cursor(Protocol):
    def execute(self, statement: str, /) -> object: ...
    def close(self) -> object: ...


class _RawConnection(Protocol):
    def cursor(self) -> _Cursor: ...


def _prepare_sqlite(connection: _RawConnection, _record: object) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    # FULL: a commit is on the disk, not in its cache, before an advance becomes visible.
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute("PRAGMA busy_timeout=5000")
    # SQLite opens its log with the first statement.
    cursor.execute("SELECT count(*) FROM sqlite_master")
    cursor.close()
