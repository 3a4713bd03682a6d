"""A real Postgres on a loopback port, which tests stop, kill, pause and restart."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, LiteralString, Self, cast

import psycopg

from tests.support.binaries import (
    WAIT_S,
    Owner,
    end,
    free_port,
    launch,
    limit_files,
    postgres_folder,
    somebody,
    wait_until,
)

HOME = "tidegauge-pg"
KEPT = 100
"""Databases that are kept: older ones are of tests that have ended."""
STOP_SIGNALS = {"fast": signal.SIGINT, "immediate": signal.SIGQUIT}


class PostgresServer:
    """One Postgres on one port, through any number of processes."""

    def __init__(self, folder: Path, *, max_connections: int = 50, durable: bool = False) -> None:
        self.folder = folder
        self.port = free_port()
        self._max_connections = max_connections
        self._durable = durable
        self._owner: Owner = somebody()
        self._home: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._paused: Sequence[int] = ()
        self._names = itertools.count(1)

    @property
    def pid(self) -> int:
        assert self._process is not None, "not running"
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        """Start, and return once it answers."""
        assert self._process is None, "already running"
        self.folder.mkdir(parents=True, exist_ok=True)
        data = self._cluster()
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": "",
            "max_connections": self._max_connections,
            "fsync": "on" if self._durable else "off",
            "shared_buffers": "16MB",
            "logging_collector": "off",
            # Postgres does not stop before connections on which nothing was ever sent.
            "authentication_timeout": 5,
        }
        options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        command = [postgres_folder() / "postgres", "-D", data, *options]
        self._process = launch(command, self._log, cwd=data, owner=self._owner)
        wait_until(self._ready, f"Postgres ready\n{self.log()}")

    @property
    def _log(self) -> Path:
        return self.folder / "postgres.log"

    def _cluster(self) -> Path:
        """Make the data folder, once."""
        if self._home is None:
            # Root's temporary folders are closed to others, and Postgres is never root.
            root = os.geteuid() == 0
            self._home = _open_folder() if root else self.folder
            if root:
                os.chown(self._home, self._owner.uid, self._owner.gid)
            data = self._home / "data"
            options = ["-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"]
            initdb = [postgres_folder() / "initdb", "-D", data, *options]
            status = launch(initdb, self._log, cwd=self._home, owner=self._owner).wait()
            assert status == 0, self.log()
        return self._home / "data"

    def _ready(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            status = self._process.returncode
            self._process = None
            raise AssertionError(f"ended with {status}\n{self.log()}")
        try:
            return self.execute("SELECT 1") == [(1,)]
        except psycopg.OperationalError:
            return False

    def log(self) -> str:
        """The end of its log."""
        return self._log.read_text(errors="replace")[-4000:] if self._log.exists() else ""

    def stop(self, mode: Literal["fast", "immediate"] = "fast") -> None:
        """Stop; `immediate` without a checkpoint, as after a crash."""
        if self._process is not None:
            self.resume()
            process, self._process = self._process, None
            end(process, STOP_SIGNALS[mode])

    def restart(self) -> None:
        self.stop()
        self.start()

    def kill(self) -> None:
        """Kill it as a machine failure would: all of its processes at once."""
        if self._process is None:
            return
        process, self._process, self._paused = self._process, None, ()
        backends = _children(process.pid)
        process.kill()
        for pid in backends:
            _signal(pid, signal.SIGKILL)
        process.wait()
        # They hold the shared memory, and the next start refuses while anybody does.
        wait_until(lambda: not any(map(_alive, backends)), "the backends' end")

    def pause(self) -> None:
        """Pause it and every backend: connections stay open, nothing is answered."""
        # The postmaster first, so that no backend starts after the list was made.
        os.kill(self.pid, signal.SIGSTOP)
        self._paused = [self.pid, *_children(self.pid)]
        for pid in self._paused:
            _signal(pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Resume after `pause`."""
        paused, self._paused = self._paused, ()
        for pid in reversed(paused):
            _signal(pid, signal.SIGCONT)

    def limit_files(self, size: int) -> None:
        """Let it write beyond this offset of no file: to it, the disk is full. -1: no limit."""
        # Itself first, so that no process that it starts meanwhile is left out.
        limit_files([self.pid], size, self._owner)
        limit_files(_children(self.pid), size, self._owner)

    def takes_writes(self) -> bool:
        """Return whether it takes writes. It ends if it could not recover before its disk had room."""
        assert self._process is not None, "not running"
        if self._process.poll() is not None:
            self._process = None
            self.start()
        try:
            self.execute("SELECT pg_catalog.txid_current()")
        except psycopg.Error:
            return False
        return True

    def database(self) -> str:
        """Create an empty database; return its URL for SQLAlchemy."""
        number = next(self._names)
        self.execute(f"CREATE DATABASE t{number}")
        if number > KEPT:
            # It may still be in use, by a service that many tests share.
            with contextlib.suppress(psycopg.errors.ObjectInUse):
                self.execute(f"DROP DATABASE t{number - KEPT}")
        return self.url(f"t{number}")

    def url(self, name: str) -> str:
        return f"postgresql+psycopg://postgres@127.0.0.1:{self.port}/{name}"

    def execute(self, statement: str, database: str = "postgres") -> list[tuple[Any, ...]]:
        """Run one statement on a connection of its own; return its rows, if it has any."""
        with psycopg.connect(
            host="127.0.0.1",
            port=self.port,
            user="postgres",
            dbname=database,
            connect_timeout=WAIT_S,
            autocommit=True,
        ) as connection:
            cursor = connection.execute(cast("LiteralString", statement))
            return cursor.fetchall() if cursor.description else []

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop("immediate")
        if self._home is not None and self._home != self.folder:
            shutil.rmtree(self._home)


def _open_folder() -> Path:
    """Make a folder that users other than root can access, and clean up after tests that were killed."""
    for left in Path(tempfile.gettempdir()).glob(f"{HOME}-*-*"):
        whose = left.name.removeprefix(f"{HOME}-").split("-")[0]
        if whose.isdecimal() and not _alive(int(whose)):
            shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{HOME}-{os.getpid()}-"))


def _children(parent: int) -> Sequence[int]:
    listed = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True
    )
    pairs = (map(int, line.split()) for line in listed.stdout.splitlines())
    return [pid for pid, ppid in pairs if ppid == parent]


def _signal(pid: int, how: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, how)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
