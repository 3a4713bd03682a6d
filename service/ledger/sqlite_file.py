"""The file of an SQLite ledger, locked against other processes, and checked while it is open.

SQLite continues to write to a file that was unlinked, replaced or truncated, and these writes are lost
at the end of the process. So the file is checked before each transaction, which costs a few
microseconds.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from service.errors import StoreRefusedError, UnavailableError

_RESTORE = "stop the service, restore the file from a backup, and start again"


class SqliteFile:
    """One file, under any name."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._log: os.stat_result | None = None
        """SQLite's write-ahead log, with the newest transactions."""
        self._size = 0
        self._log_size = 0

    def take(self) -> None:
        """Lock the file, and create it if it is missing. Raises `StoreRefusedError`.

        The lock is on the file itself, so it holds under every name of the file. (SQLite's own locks, on
        parts of the file, are independent of it.) The kernel releases it when the process ends.
        """
        if self._descriptor is not None:
            return
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StoreRefusedError(
                f"cannot write the ledger {self._path}: {error.strerror}; choose another"
                " TIDEGAUGE_LEDGER_URL"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise StoreRefusedError(
                f"another process serves {self._path}, and memory:// with SQLite is for one process:"
                " stop it, or use TIDEGAUGE_LIVE_URL=redis://… and"
                " TIDEGAUGE_LEDGER_URL=postgresql+psycopg://…"
            ) from None
        self._descriptor = descriptor

    def note_log(self) -> None:
        """Note the write-ahead log that SQLite has opened."""
        with suppress(FileNotFoundError):
            self._log = Path(self._path + "-wal").stat()
            self._log_size = 0

    def check(self) -> None:
        """Raise `UnavailableError` if the file was replaced, deleted or truncated."""
        if self._descriptor is None:
            return
        opened = os.fstat(self._descriptor)
        if not _leads_to(self._path, opened):
            raise UnavailableError(
                f"the ledger {self._path} was moved or deleted while the service was using it:"
                f" {_RESTORE}"
            )
        if self._log is not None and not _leads_to(self._path + "-wal", self._log):
            raise UnavailableError(
                f"the ledger's log {self._path}-wal was moved or deleted while the service was using"
                f" it: {_RESTORE}"
            )
        if self._log is not None:
            log_size = Path(self._path + "-wal").stat().st_size
            if log_size < self._log_size:
                raise UnavailableError(
                    f"the ledger's log {self._path}-wal was truncated from {self._log_size} to "
                    f"{log_size}"
                    f" bytes while the service was using it: {_RESTORE}"
                )
            self._log_size = log_size
        if opened.st_size < self._size:
            raise UnavailableError(
                f"the ledger {self._path} was truncated from {self._size} to {opened.st_size} "
                f"bytes while the"
                f" service was using it: {_RESTORE}"
            )
        self._size = opened.st_size

    def close(self) -> None:
        """Release the lock. SQLite must have closed the file before."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            self._log = None
            self._size = self._log_size = 0


def _leads_to(path: str, opened: os.stat_result) -> bool:
    try:
        found = Path(path).stat()
    except OSError:
        return False
    return (found.st_dev, found.st_ino) == (opened.st_dev, opened.st_ino)
