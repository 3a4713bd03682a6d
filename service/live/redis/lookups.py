"""Cache of leases between their reports, up to a number of bytes."""

from __future__ import annotations

from typing import Any, Final

_MOST_BYTES: Final = 128 * 2**20
"""For all jobs together: a million ranges that are reported by their names take 100 MB."""


class Lookups:
    """A cache by key, which drops what was used least recently. What is dropped is looked up again.

    >>> kept = Lookups(most_bytes=10)
    >>> kept.put("a", 1, 6); kept.put("b", 2, 4); kept.get("a")
    1
    >>> kept.put("c", 3, 4); kept.get("b"), kept.get("a"), kept.get("c")
    (None, 1, 3)
    """

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._kept: dict[object, tuple[Any, int]] = {}
        """The most recently used come last."""
        self._bytes = 0

    def get(self, key: object) -> Any:  # noqa: ANN401 - who puts something knows what it is
        """Return what is kept; None: nothing is."""
        found = self._kept.pop(key, None)
        if found is None:
            return None
        self._kept[key] = found
        return found[0]

    def put(self, key: object, value: object, size: int) -> None:
        """Keep something of about so many bytes, in place of what was kept."""
        self.drop(key)
        self._kept[key] = value, size
        self._bytes += size
        while self._bytes > self._most_bytes:
            self.drop(next(iter(self._kept)))

    def drop(self, key: object) -> None:
        """Keep it no longer."""
        _, size = self._kept.pop(key, (None, 0))
        self._bytes -= size
