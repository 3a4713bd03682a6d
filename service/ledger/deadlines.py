"""Deadlines of transactions, and the errors of transactions that cannot complete."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from typing import Protocol

from sqlalchemy.exc import DataError, DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from service.errors import UnavailableError
from service.ledger.port import RejectedValueError


class DriverConnection(Protocol):
    """The used part of `psycopg.AsyncConnection`."""

    @property
    def closed(self) -> bool:
        """True once the connection is over."""
        ...

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        ...


class Deadline:
    """The deadline of one transaction. At the deadline, the connection's socket is shut down.

    A cancellation of the task would not help: psycopg would request a cancellation from the server, and
    wait for a server that does not answer. To psycopg, SQLAlchemy and the pool, a socket that was shut
    down is a dead connection, and all three discard it.
    """

    def __init__(self, timeout_s: float) -> None:
        self.expired = False
        self.committing = False
        self._connection: DriverConnection | None = None
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._expire)

    def watch(self, connection: DriverConnection | None) -> None:
        """Shut this connection down at the deadline; None: none."""
        self._connection = connection
        if self.expired:
            self._expire()

    def end(self) -> None:
        """Stop the timer: the transaction has ended."""
        self._timer.cancel()

    def _expire(self) -> None:
        self.expired = True
        if self._connection is None or self._connection.closed:
            return
        # On a duplicate of the descriptor: only psycopg may close the original.
        with suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as sock:
            sock.shutdown(socket.SHUT_RDWR)


CURRENT_DEADLINE: ContextVar[Deadline] = ContextVar("CURRENT_DEADLINE")


@asynccontextmanager
async def with_deadline(timeout_s: float) -> AsyncGenerator[Deadline]:
    """Give a transaction this deadline.

    Raises `RejectedValueError` for a value that does not fit, `UnavailableError` for other errors of the
    database.
    """
    deadline = Deadline(timeout_s)
    token = CURRENT_DEADLINE.set(deadline)
    try:
        yield deadline
    except (DataError, OverflowError) as error:
        # SQLite's driver rejects an integer of more than 64 bits before the statement is sent.
        raise RejectedValueError(f"the ledger rejects a value: {_reason(error)}") from error
    except (DBAPIError, PoolTimeoutError, OSError) as error:
        raise UnavailableError(f"the ledger does not answer: {_reason(error)}") from error
    finally:
        deadline.end()
        CURRENT_DEADLINE.reset(token)


def _reason(error: Exception) -> str:
    """Return the driver's message without the statement: it is sent to clients."""
    message = str(error.orig if isinstance(error, DBAPIError) else error).strip()
    return message.splitlines()[0] if message else type(error).__name__
