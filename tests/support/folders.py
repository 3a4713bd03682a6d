"""Folders of the tests' files: in memory, if there is room."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

IN_MEMORY = Path("/dev/shm")
_NEEDED_KIB = 8 * 2**20
"""Databases and checkpoints of two processes, and enough to spare."""


def use_memory() -> None:
    """Keep temporary files of this process and its children in memory, if there is room for them.

    The stores force each commit to the disk. With a disk that is slow, or shared, the tests would mostly
    wait for that, and what they show does not depend on it.
    """
    if "TMPDIR" not in os.environ and _has_room():
        os.environ["TMPDIR"] = tempfile.tempdir = str(IN_MEMORY)


def _has_room() -> bool:
    if not IN_MEMORY.is_dir() or not os.access(IN_MEMORY, os.W_OK | os.X_OK):
        return False
    system = os.statvfs(IN_MEMORY)
    return min(_available_kib(), system.f_bavail * system.f_frsize // 1024) >= _NEEDED_KIB


def _available_kib() -> int:
    """Return how much memory there is to use; 0: nobody says."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    found = [line.split() for line in lines if line.startswith("MemAvailable:")]
    return int(found[0][1]) if found else 0
