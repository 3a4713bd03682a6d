"""The least that a durable chain costs: a commit of SQLite for each stage, one after the other."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path

_ROW = "UPDATE watermark SET output = output + 1"


def latencies_ms(path: Path, commits: int, ticks: int) -> list[float]:
    """Return, for each tick, the duration of these commits in a new database.

    They are as durable as the ledger's.
    """
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        database.execute("CREATE TABLE watermark (output INTEGER)")
        database.execute("INSERT INTO watermark VALUES (0)")
        return [_duration_ms(database, commits) for _ in range(ticks)]


def _duration_ms(database: sqlite3.Connection, commits: int) -> float:
    start = time.perf_counter()
    for _ in range(commits):
        database.execute(_ROW)
    return (time.perf_counter() - start) * 1e3
