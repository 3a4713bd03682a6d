"""The keys and passwords of the compose file, one in each file: `make secrets` writes the missing ones.

    python deploy/write_secrets.py [FOLDER]

Existing files are kept, and URLs take their passwords from them. To replace a secret, delete its file
and the files with the same password, and run the command again.

The folder is closed to other users of the machine (mode 0700). The files within are readable (0644):
Compose mounts each file with its own owner and mode, and the containers run as users of their own.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import quote

FOLDER: Final = Path(__file__).parent / "secrets"
RANDOM: Final = ("admin-key", "scrape-key", "postgres-password", "redis-password")
"""Files that have 256 random bits each."""

REDIS_RIGHTS: Final = (
    "~tidegauge:* resetchannels &tidegauge:changes:*"
    " +ping +info +select +client|setname +eval +evalsha +publish +psubscribe +time +del +exists"
    " +get +set +getrange +setrange +strlen +rpush +lpop +sadd +srem +smembers"
    " +hget +hmget +hgetall +hset +hsetnx +hdel +hexists +hkeys +hvals +hlen +hincrby"
    " +zadd +zrem +zscore +zcount +zincrby +zrangebyscore"
)
"""Rights of the service, as in `docs/service/production.md`."""


def derived(random: Mapping[str, str]) -> Mapping[str, str]:
    """Return the texts of the files that contain one of the passwords or its hash."""
    digest = hashlib.sha256(random["redis-password"].encode()).hexdigest()
    quoted = {name: quote(text, safe="") for name, text in random.items()}
    ledger = f"tidegauge:{quoted['postgres-password']}@postgres:5432/tidegauge"
    return {
        "ledger-url": f"postgresql+psycopg://{ledger}",
        "live-url": f"redis://tidegauge:{quoted['redis-password']}@redis:6379/0",
        # Without a password Redis answers the health check alone.
        "redis-users": (
            "user default on nopass resetkeys resetchannels -@all +ping\n"
            f"user tidegauge on #{digest} {REDIS_RIGHTS}"
        ),
    }


def write(folder: Path) -> Sequence[str]:
    """Write the missing files; return their names."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    written = [name for name in RANDOM if _create(folder / name, secrets.token_hex(32))]
    random = {name: (folder / name).read_text().strip() for name in RANDOM}
    made = derived(random)
    return [*written, *(name for name, text in made.items() if _create(folder / name, text))]


def _create(path: Path, text: str) -> bool:
    """Write a file unless it exists; return whether it was written."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "w") as file:
        # Without a line break, which the operator of Prometheus would take for a part of the key.
        file.write(text)
    path.chmod(0o644)
    return True


def main() -> None:
    """Write the missing files into the folder of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    folder: Path = parser.parse_args().folder
    written = write(folder)
    sys.stdout.write(f"{folder}: {len(written)} files written, the others kept\n")


if __name__ == "__main__":
    main()
