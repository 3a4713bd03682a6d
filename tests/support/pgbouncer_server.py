"""A real PgBouncer before a test's Postgres."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Generator
from pathlib import Path

import psycopg

from tests.support.binaries import end, free_port, launch, somebody, wait_until
from tests.support.postgres_server import PostgresServer
from tests.support.required import program


@contextlib.contextmanager
def pgbouncer(postgres: PostgresServer, **settings: str) -> Generator[str]:
    """Run it with these settings; yield the URL of an empty database behind it."""
    binary = program("pgbouncer", install="apt-get install pgbouncer")
    name = postgres.database().rpartition("/")[2]
    port = free_port()
    # Not below the test's own folder, which is root's alone, while PgBouncer is never root.
    folder = Path(tempfile.mkdtemp(prefix="pgbouncer-"))
    owner = somebody()
    if owner.uid:
        os.chown(folder, owner.uid, owner.gid)
        folder.chmod(0o700)
    (folder / "users.txt").write_text('"postgres" ""\n')
    listed = {
        "listen_addr": "127.0.0.1",
        "listen_port": str(port),
        "unix_socket_dir": "",
        "auth_type": "trust",
        "auth_file": str(folder / "users.txt"),
        **settings,
    }
    lines = [f"{key} = {value}" for key, value in listed.items()]
    (folder / "pgbouncer.ini").write_text(
        "\n".join(
            [f"[databases]\n* = host=127.0.0.1 port={postgres.port}\n[pgbouncer]", *lines, ""]
        )
    )
    log = folder / "pgbouncer.log"
    process = launch([binary, folder / "pgbouncer.ini"], log, cwd=folder, owner=owner)
    try:
        wait_until(lambda: _answers(process, port, name, log), "PgBouncer ready")
        yield f"postgresql+psycopg://postgres@127.0.0.1:{port}/{name}"
    finally:
        end(process, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def _answers(process: subprocess.Popen[bytes], port: int, name: str, log: Path) -> bool:
    assert process.poll() is None, log.read_text()
    with contextlib.suppress(psycopg.OperationalError):
        psycopg.connect(host="127.0.0.1", port=port, user="postgres", dbname=name).close()
        return True
    return False
