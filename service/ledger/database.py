"""A database as a ledger needs it: each wait has an end, and each failure is one kind of error.

SQLite has one connection, and one transaction at a time. Postgres has a pool; its transactions run side
by side, and it is the locks on its rows that keep them apart.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Protocol, TextIO, TypeVar, cast

from sqlalchemy import URL, AsyncAdaptedQueuePool, Executable, NullPool, Row, event, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from service.errors import StoreRefusedError, UnavailableError
from service.ledger.migrate import migrating, run_migrations

R = TypeVar("R")
Work = Callable[[AsyncConnection], Awaitable[R]]

SQLITE = "sqlite+aiosqlite"
POSTGRES = "postgresql+psycopg"

_POOL_SIZE = 5
_POOL_OVERFLOW = 5
_POOL_TIMEOUT_S = 3
_TRANSACTION_S = 8.0
"""How long a transaction may take in all, waiting for the server included."""

_MIGRATION_S = 90.0
"""Longer than `migrations/env.py` waits for another replica's migration."""

_CONNECT = {
    "connect_timeout": "3",
    "keepalives_idle": "5",
    "keepalives_interval": "2",
    "keepalives_count": "3",
    # Data that nobody acknowledges: the machine is gone, and no answer will come.
    "tcp_user_timeout": "6000",
    "application_name": "tidegauge",
}
_SESSION = {
    "statement_timeout": "5000",
    "lock_timeout": "3000",
    # A replica that vanishes in mid-transaction must not hold a job's row for long, ...
    "idle_in_transaction_session_timeout": "10000",
    # ... nor the whole ledger, if it had that for itself.
    "tcp_keepalives_idle": "5",
    "tcp_keepalives_interval": "2",
    "tcp_keepalives_count": "3",
}

_OWNER_LOCK = 0x7469_6465_6F77_6E65
_TAKE_OWNER_LOCK = text("SELECT pg_advisory_lock(:key)")
_OWNER_LOCK_TIMEOUT = {"lock_timeout": "1000"}
"""Not at once: after a kill the server needs a moment to notice that the last owner is gone."""

_LOCK_NOT_AVAILABLE = "55P03"


class _Wire(Protocol):
    """What is asked of a `psycopg.AsyncConnection`."""

    @property
    def closed(self) -> bool: ...
    def fileno(self) -> int: ...


class _Patience:
    """How long one transaction may take; then the wire that it waits on is cut.

    To cancel its task would not do: psycopg then asks the server to cancel, and waits for that answer
    too, of a server that does not answer. A cut wire is to psycopg, to SQLAlchemy and to the pool what
    it looks like, a dead connection, and is thrown away by all three.
    """

    def __init__(self, within_s: float) -> None:
        self.over = False
        self.committing = False
        self._wire: _Wire | None = None
        self._timer = asyncio.get_running_loop().call_later(within_s, self._lose)

    def watch(self, wire: _Wire | None) -> None:
        """Cut this one from now on, or none."""
        self._wire = wire
        if self.over:
            self._lose()

    def end(self) -> None:
        """All is done, one way or the other."""
        self._timer.cancel()

    def _lose(self) -> None:
        self.over = True
        if self._wire is None or self._wire.closed:
            return
        # A duplicate of the descriptor: the original stays psycopg's own, to be closed by it alone.
        with suppress(OSError), socket.socket(fileno=os.dup(self._wire.fileno())) as wire:
            wire.shutdown(socket.SHUT_RDWR)


_PATIENCE: ContextVar[_Patience] = ContextVar("_PATIENCE")


class Database:
    """Runs transactions. Raises `UnavailableError` for whatever keeps one from its end."""

    def __init__(self, url: str) -> None:
        self._url = _usable(url)
        self.is_sqlite = self._url.drivername == SQLITE
        self._engine = _sqlite(self._url) if self.is_sqlite else _postgres(self._url)
        # All of one read is of one instant: a job and its stages are several statements.
        self._reads = (
            self._engine
            if self.is_sqlite
            else self._engine.execution_options(
                isolation_level="REPEATABLE READ", postgresql_readonly=True
            )
        )
        self._autocommit = self._engine.execution_options(isolation_level="AUTOCOMMIT")
        # SQLite has one writer. Waiting for it here costs nothing, waiting in SQLite is a poll.
        self._turn = asyncio.Lock()
        self._file: TextIO | None = None
        self._owner: AsyncConnection | None = None

    async def open(self, *, exclusive: bool) -> None:
        """Take the database for this process alone if asked to, and bring its schema up to date."""
        if self.is_sqlite:
            self._take_file()
        elif exclusive:
            await self._take_database()
        async with migrating():
            await self._run(self._engine, lambda db: db.run_sync(run_migrations), _MIGRATION_S)

    async def write(self, work: Work[R]) -> R:
        """Do work in one transaction. It may be begun twice, but is done once or not at all."""
        return await self._run(self._engine, work, _TRANSACTION_S)

    async def read(self, work: Work[R]) -> R:
        """Do work that only reads; waits for no writer, except in SQLite."""
        return await self._run(self._reads, work, _TRANSACTION_S)

    async def at_once(
        self, statement: Executable, parameters: Mapping[str, Any]
    ) -> Sequence[Row[Any]] | None:
        """Run one statement that is a transaction by itself, on Postgres; return its rows.

        None: the connection was lost. Then it may have been done or not, and whoever asks must be able
        to do it once more.
        """
        async with _bounded(_TRANSACTION_S) as patience:
            try:
                async with self._autocommit.connect() as db:
                    patience.watch(await _wire(db))
                    rows = (await db.execute(statement, parameters)).all()
                    patience.watch(None)
            except DBAPIError as error:
                if not error.connection_invalidated or patience.over:
                    raise
                return None
            return rows

    async def close(self) -> None:
        """Let go of it."""
        await self._leave_database()
        await self._engine.dispose()
        if self._file is not None:
            self._file.close()
            self._file = None

    async def _run(self, engine: AsyncEngine, work: Work[R], within_s: float) -> R:
        if self.is_sqlite:
            async with self._turn, _bounded(within_s) as patience:
                return await _attempt(engine, work, patience)
        async with _bounded(within_s) as patience:
            try:
                return await _attempt(engine, work, patience)
            except DBAPIError as error:
                # A pooled connection may have died long ago, with a restart of the server: that is
                # seen by using it. As long as no commit was sent nothing is written, and once more is
                # safe; if one was, nobody knows, and the caller is told so.
                if not error.connection_invalidated or patience.committing or patience.over:
                    raise
            return await _attempt(engine, work, patience)

    def _take_file(self) -> None:
        """Keep other processes off an SQLite ledger: beside it, each would have leases of its own."""
        path = self._url.database
        if self._file is not None or not path or path == ":memory:":
            return
        lock = Path(f"{path}.lock")
        try:
            handle = lock.open("w")
        except OSError as error:
            raise StoreRefusedError(
                f"cannot write the ledger {path}: {error.strerror}; choose another TIDEGAUGE_LEDGER_URL"
            ) from error
        try:
            # The kernel lets go of it when the process dies, however it dies.
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            handle.close()
            raise StoreRefusedError(
                f"another process serves {path}, and memory:// with SQLite is for one process: stop it,"
                " or use TIDEGAUGE_LIVE_URL=redis://… and TIDEGAUGE_LEDGER_URL=postgresql+psycopg://…"
            ) from None
        self._file = handle

    async def _take_database(self) -> None:
        """Keep other processes off, with a lock that the server holds as long as a connection lives.

        If the connection is lost, so is the lock, and another process may get in. Nothing breaks by it:
        that one begins new incarnations, and from then on nothing of this one's is taken. The lock only
        tells of the mistake at once, to whoever can mend it.
        """
        await self._leave_database()
        engine = _postgres(self._url, alone=True)
        async with _bounded(_TRANSACTION_S) as patience:
            db = await engine.connect()
            try:
                patience.watch(await _wire(db))
                await db.execute(_TAKE_OWNER_LOCK, {"key": _OWNER_LOCK})
            except DBAPIError as error:
                await db.close()
                if getattr(error.orig, "sqlstate", None) != _LOCK_NOT_AVAILABLE:
                    raise
                raise StoreRefusedError(
                    f"another process serves {self._url.render_as_string()}, and memory:// is for one"
                    " process: stop it, or use TIDEGAUGE_LIVE_URL=redis://… for all of them"
                ) from None
            patience.watch(None)
        self._owner = db

    async def _leave_database(self) -> None:
        owner, self._owner = self._owner, None
        if owner is not None:
            await owner.close()


@asynccontextmanager
async def _bounded(within_s: float) -> AsyncGenerator[_Patience]:
    patience = _Patience(within_s)
    token = _PATIENCE.set(patience)
    try:
        yield patience
    except (DBAPIError, PoolTimeoutError, OSError) as error:
        raise UnavailableError(f"the ledger does not answer: {_reason(error)}") from error
    finally:
        patience.end()
        _PATIENCE.reset(token)


async def _attempt(engine: AsyncEngine, work: Work[R], patience: _Patience) -> R:
    async with engine.connect() as db:
        patience.watch(await _wire(db))
        result = await work(db)
        patience.committing = True
        await db.commit()
        # What is left of closing asks the server nothing, and then the connection is somebody else's.
        patience.watch(None)
        return result


async def _wire(db: AsyncConnection) -> _Wire | None:
    if db.dialect.name == "sqlite":
        return None
    return cast("_Wire", (await db.get_raw_connection()).driver_connection)


def _reason(error: Exception) -> str:
    """Say what the driver said, without the statement: clients get to read this."""
    said = str(error.orig if isinstance(error, DBAPIError) else error).strip()
    return said.splitlines()[0] if said else type(error).__name__


# ---- engines


def _usable(url: str) -> URL:
    try:
        made = make_url(url)
    except SQLAlchemyError as error:
        raise StoreRefusedError(f"TIDEGAUGE_LEDGER_URL cannot be used: {error}") from error
    if made.drivername in {SQLITE, POSTGRES}:
        return made
    advice = f"{SQLITE}:///… or {POSTGRES}://…"
    for known in (SQLITE, POSTGRES):
        # postgresql://, postgres://, postgresql+asyncpg://, sqlite:// and the like.
        if made.drivername[:6] == known[:6]:
            advice = made.set(drivername=known).render_as_string()
    raise StoreRefusedError(
        f"TIDEGAUGE_LEDGER_URL {made.render_as_string()!r} cannot be used: use {advice}"
    )


def _sqlite(url: URL) -> AsyncEngine:
    engine = create_async_engine(url, poolclass=AsyncAdaptedQueuePool, pool_size=1, max_overflow=0)
    event.listen(engine.sync_engine, "connect", _prepare_sqlite)
    return engine


def _postgres(url: URL, *, alone: bool = False) -> AsyncEngine:
    """Make an engine for transactions, or for one connection that stays.

    The driver is imported here and not before: SQLite does without.
    """
    session = _SESSION | _OWNER_LOCK_TIMEOUT if alone else _SESSION
    ours = " ".join(f"-c {name}={value}" for name, value in session.items())
    theirs = url.query.get("options", "")
    # What the URL says comes last, and so wins.
    options = " ".join([ours, *([theirs] if isinstance(theirs, str) else theirs)])
    connect = {name: value for name, value in _CONNECT.items() if name not in url.query}
    pool: dict[str, Any] = (
        {"poolclass": NullPool}
        if alone
        else {
            "pool_size": _POOL_SIZE,
            "max_overflow": _POOL_OVERFLOW,
            "pool_timeout": _POOL_TIMEOUT_S,
        }
    )
    try:
        engine = create_async_engine(
            url,
            connect_args=connect | {"options": options},
            isolation_level="AUTOCOMMIT" if alone else "READ COMMITTED",
            use_native_hstore=False,
            **pool,
        )
    except ImportError as error:
        raise StoreRefusedError(
            f"a ledger on Postgres needs psycopg ({error}): pip install 'tidegauge[production]'"
        ) from error
    # First of all listeners: the next one already asks the server something.
    event.listen(engine.sync_engine, "connect", _watch_new, insert=True)
    return engine


class _Adapted(Protocol):
    @property
    def driver_connection(self) -> _Wire: ...


def _watch_new(connection: _Adapted, _record: object) -> None:
    patience = _PATIENCE.get(None)
    if patience is not None:
        patience.watch(connection.driver_connection)


class _Cursor(Protocol):
    def execute(self, statement: str, /) -> object: ...
    def close(self) -> object: ...


class _RawConnection(Protocol):
    def cursor(self) -> _Cursor: ...


def _prepare_sqlite(connection: _RawConnection, _record: object) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    # FULL: a commit is on the disk, not in its cache, before anybody is told of an advance.
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute("PRAGMA busy_timeout=5000")
    cursor.close()
