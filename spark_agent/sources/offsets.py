"""Position of a source that reads logs in folders: files that are unread, late, or in a batch. Pure.

A shard's files are read in the order of their names. Its offset has the name of the last file that was
read, and short digests of the names and sizes of the files before it. So a batch that Spark repeats
reads exactly the files that it read the first time. A file that appears with a name before the last one
is found, and so is a changed file: otherwise its new rows would never be read, without any error.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final

_DIGEST_BYTES: Final = 5
"""Bytes of a name's digest. A late file stays unnoticed with a probability of files / 2^40."""
_SIZE_BYTES: Final = 3
"""Bytes that are kept of a file's size. A change by a multiple of 16 MiB stays unnoticed."""
_ENTRY_BYTES: Final = _DIGEST_BYTES + _SIZE_BYTES


_NONE: Final[Mapping[bytes, bytes]] = {}


def is_hidden(name: str) -> bool:
    """Return whether a file or folder is skipped, by Spark's rules.

    >>> [is_hidden(name) for name in ("0001.json", ".0001.json", "_SUCCESS", "_y=1", "a._COPYING_")]
    [False, True, True, False, True]
    """
    return (
        name.startswith(".")
        or (name.startswith("_") and "=" not in name)
        or name.endswith("._COPYING_")
    )


def _digest(name: str) -> bytes:
    encoded = name.encode(errors="surrogateescape")
    return blake2b(encoded, digest_size=_DIGEST_BYTES).digest()


def _size_digest(size: int) -> bytes:
    return (size % (1 << 8 * _SIZE_BYTES)).to_bytes(_SIZE_BYTES, "big")


def _packed(sizes: Mapping[str, int]) -> str:
    digests = sorted(_digest(name) + _size_digest(size) for name, size in sizes.items())
    return b64encode(b"".join(digests)).decode()


@dataclass(frozen=True, slots=True)
class ShardOffset:
    """Position in one shard."""

    last: str = ""
    """The name of the last file; empty: not yet."""
    files: int = 0
    """Number of files that were read in all."""
    seen: str = ""
    """Digests of the files up to the last one that existed when the batch was planned."""
    complete: bool = False
    """True once the folder was noticed as complete, with nothing unread: nothing may follow."""

    def unread(self, names: Sequence[str]) -> list[str]:
        """Return the files of a folder after the last one, in order.

        >>> ShardOffset(last="0002").unread(["0001", "0002", "0003", "0004"])
        ['0003', '0004']
        """
        return list(names[bisect_right(names, self.last) :])

    def late(self, names: Sequence[str]) -> list[str]:
        """Return the files that sort before the last one, and were not read.

        >>> first = ShardOffset().after({}, {"0002": 7, "0004": 7})
        >>> first.late(["0002", "0003", "0004", "0005"])
        ['0003']
        >>> first.late(["0004"])  # a file that was read may be deleted
        []
        """
        before = self.read_of(names)
        seen = self._seen() if before else _NONE
        return [name for name in before if _digest(name) not in seen]

    def added(self, names: Sequence[str]) -> list[str]:
        """Return the files that were not read, wherever they sort.

        >>> first = ShardOffset().after({}, {"0002": 7, "0004": 7})
        >>> first.added(["0001", "0002", "0004", "0005"])
        ['0001', '0005']
        """
        seen = self._seen() if names else _NONE
        return [name for name in names if _digest(name) not in seen]

    def changed(self, sizes: Mapping[str, int]) -> list[str]:
        """Return the files whose size has changed since they were read.

        >>> ShardOffset().after({}, {"0002": 7, "0004": 7}).changed({"0002": 9, "0004": 7})
        ['0002']
        """
        seen = self._seen() if sizes else _NONE
        return [
            name for name, size in sizes.items() if seen.get(_digest(name)) != _size_digest(size)
        ]

    def read_of(self, names: Sequence[str]) -> Sequence[str]:
        """Return the files of a folder up to the last one, in order."""
        return names[: bisect_right(names, self.last)]

    def after(self, present: Mapping[str, int], taken: Mapping[str, int]) -> ShardOffset:
        """Return the offset after a batch that reads `taken`, while `present` are the existing files
        before them. Both have the files' sizes, in order.
        """
        [*_, last] = taken
        return ShardOffset(last, self.files + len(taken), _packed({**present, **taken}))

    def completed(self, present: Mapping[str, int]) -> ShardOffset:
        """Return the offset of a complete folder that has nothing unread; `present` as in `after`.

        >>> first = ShardOffset().after({}, {"0002": 7})
        >>> first.completed({"0002": 7}).complete, first.completed({}).added(["0002"])
        (True, ['0002'])
        """
        return ShardOffset(self.last, self.files, _packed(present), complete=True)

    def batch(self, names: Sequence[str], end: ShardOffset) -> list[str] | None:
        """Return the files of the batch from here to `end`; None: some of them are missing.

        >>> start = ShardOffset().after({}, {"1": 7})
        >>> end = start.after({"1": 7}, {"2": 7, "4": 7})
        >>> start.batch(["1", "2", "3", "4", "5"], end), start.batch(["1", "3", "4"], end)
        (['2', '4'], None)
        """
        between = names[bisect_right(names, self.last) : bisect_right(names, end.last)]
        seen = end._seen() if between else _NONE
        found = [name for name in between if _digest(name) in seen]
        return found if len(found) == end.files - self.files else None

    def _seen(self) -> Mapping[bytes, bytes]:
        """Return the digests of the sizes, by the digests of the names."""
        packed = b64decode(self.seen)
        return {
            packed[i : i + _DIGEST_BYTES]: packed[i + _DIGEST_BYTES : i + _ENTRY_BYTES]
            for i in range(0, len(packed), _ENTRY_BYTES)
        }


@dataclass(frozen=True, slots=True)
class LogsOffset:
    """Position in a source, in Spark's checkpoint."""

    shards: Mapping[str, ShardOffset] = field(default_factory=dict[str, ShardOffset])
    turn: int = 0
    """Number of batches without files."""
    waits: Mapping[str, str] = field(default_factory=dict[str, str])
    """Reasons why shards got no files in this batch, or fewer, for the query's progress only."""

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> LogsOffset:
        """Decode the form that Spark logs."""
        shards = {shard: ShardOffset(**each) for shard, each in stored["shards"].items()}
        return cls(shards, stored["turn"], stored.get("waits", {}))

    def to_dict(self) -> dict[str, Any]:
        """Encode for Spark's log."""
        shards = {
            shard: {"last": at.last, "files": at.files, "seen": at.seen}
            | ({"complete": True} if at.complete else {})
            for shard, at in sorted(self.shards.items())
        }
        stored: dict[str, Any] = {"shards": shards, "turn": self.turn}
        return stored | {"waits": dict(self.waits)} if self.waits else stored

    @property
    def complete(self) -> frozenset[str]:
        """The shards that were noticed as complete."""
        return frozenset(shard for shard, at in self.shards.items() if at.complete)

    def of(self, shard: str) -> ShardOffset:
        """Return the position of a shard."""
        return self.shards.get(shard, ShardOffset())
