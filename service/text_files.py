"""Small text files that people write with any editor: keys and URLs."""

from __future__ import annotations

import codecs
from pathlib import Path


def read_text(path: Path) -> str:
    """Return a file's text without a byte order mark and without space around it.

    UTF-8, or UTF-16 with its mark, as Windows' PowerShell writes what a command prints into a file.
    Raises `OSError`, or `UnicodeDecodeError`.
    """
    data = path.read_bytes()
    utf_16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return data.decode("utf-16" if utf_16 else "utf-8-sig").strip()
