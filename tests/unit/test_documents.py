"""Names in the documents for developers exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
TESTS = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
FOLDERS = ("", "service", "service/api", "service/frontier", "service/live", "tests/conformance")


@pytest.mark.parametrize("document", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_what_is_named_is_there(document: str) -> None:
    names = re.findall(r"`([\w./-]+)`", (ROOT / document).read_text())
    for name in names:
        if name.startswith("test_") and not name.endswith(".py"):
            assert f"def {name}(" in TESTS
        elif re.search(r"/|\.(py|md|lua|json)$", name):
            assert any((ROOT / folder / name).exists() for folder in FOLDERS), name
