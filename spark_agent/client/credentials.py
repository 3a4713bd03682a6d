"""Sources of the agent's key: a parameter, a file, or the environment. The key is never shown.

On executors a task finds the key by itself. Data that Spark carries there (plans, options of sources,
local properties, pickled functions) may be logged, shown in Spark's UI, or written to disk. So the
driver sends at most the *path* of a file with the key. The file must exist on every machine.
"""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Protocol

KEY_VARIABLE: Final = "TIDEGAUGE_KEY"
FILE_VARIABLE: Final = "TIDEGAUGE_KEY_FILE"

_SECRET: Final = re.compile(r"[\x21-\x7e]{1,4096}")
"""More than a service takes, and less than the headers of a request may have."""


class UnusableKeyError(Exception):
    """The key cannot be used. The message does not show the key."""


class KeySource(Protocol):
    """Source of a key."""

    def read(self) -> str | None:
        """Return the key; None: requests carry no key. Raises `UnusableKeyError`."""
        ...


class FixedKey:
    """A key that does not change, or None.

    >>> FixedKey("tg_0123", "TIDEGAUGE_KEY").read()
    'tg_0123'
    """

    def __init__(self, secret: str | None, name: str) -> None:
        self._secret = secret
        self._name = name

    def read(self) -> str | None:
        """See `KeySource`."""
        if self._secret is None:
            return None
        # `$(cat FILE)` keeps a byte order mark and a carriage return of the file.
        secret = self._secret.lstrip("\ufeff").rstrip("\r\n")
        if _SECRET.fullmatch(secret) is None:
            raise UnusableKeyError(
                f"{self._name} is not a key: it has spaces, is empty or very long"
            )
        return secret


class KeyInFile:
    """A key in a file. A changed file is read again, so keys are rotated without a restart."""

    def __init__(self, path: str, name: str) -> None:
        self._path = Path(path)
        self._name = name
        self._state: tuple[int, int, int] | None = None
        self._secret: str | None = None

    def read(self) -> str | None:
        """See `KeySource`. While the file is being replaced, the previous key is used."""
        try:
            stat = self._path.stat()
            state = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            if state != self._state:
                self._secret = self._read()
                self._state = state
        except (OSError, UnicodeDecodeError, UnusableKeyError) as error:
            if self._secret is None:
                reason = error.strerror if isinstance(error, OSError) else "it contains no key"
                raise UnusableKeyError(
                    f"{self._name} {str(self._path)!r} cannot be used: {reason}"
                ) from None
        return self._secret

    def _read(self) -> str:
        secret = read_text(self._path)
        if _SECRET.fullmatch(secret) is None:
            raise UnusableKeyError
        return secret


def read_text(path: Path) -> str:
    """Return a file's text without a byte order mark and without space around it.

    The text is UTF-8, or UTF-16 with its mark, as written by a redirection in Windows' PowerShell.
    Raises `OSError`, or `UnicodeDecodeError`.
    """
    with open(path, "rb", opener=_open_at_once) as file:
        data = file.read()
    utf_16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return data.decode("utf-16" if utf_16 else "utf-8-sig").strip()


def _open_at_once(path: str, flags: int) -> int:
    """Open a file. A pipe without a writer is at its end, and is not waited for."""
    if not hasattr(os, "O_NONBLOCK"):  # Windows
        return os.open(path, flags)
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    os.set_blocking(descriptor, True)
    return descriptor


def key_source(
    key: str | None,
    key_file: str | None,
    environment: Mapping[str, str] = os.environ,
) -> KeySource:
    """Choose the source of the key: a parameter, else the environment of this process.

    >>> key_source(None, None, {"TIDEGAUGE_KEY": "tg_0123"}).read()
    'tg_0123'
    """
    if key is not None:
        return FixedKey(key, "key")
    if key_file is not None:
        return KeyInFile(key_file, "key_file")
    if environment.get(KEY_VARIABLE):
        return FixedKey(environment[KEY_VARIABLE], KEY_VARIABLE)
    if environment.get(FILE_VARIABLE):
        return KeyInFile(environment[FILE_VARIABLE], FILE_VARIABLE)
    return FixedKey(None, KEY_VARIABLE)
