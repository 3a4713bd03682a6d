"""Long files are few, and CONTRIBUTING gives the reason of each."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
LONGEST = 400
MOST_FILES = 10
HEADING = "## Files above 400 lines"


def long_files(root: Path) -> set[str]:
    return {
        path.relative_to(root).as_posix()
        for package in ("service", "spark_agent")
        for path in (root / package).rglob("*.py")
        if len(path.read_text(encoding="utf-8").splitlines()) > LONGEST
    }


def listed_files() -> list[str]:
    section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition(HEADING)[2]
    return re.findall(r"^\| `(\S+\.py)` \| \S", section.partition("\n## ")[0], re.MULTILINE)


def test_each_long_file_has_a_reason() -> None:
    assert long_files(ROOT) - set(listed_files()) == set()


def test_listed_files_exist_and_are_few() -> None:
    listed = listed_files()
    assert 0 < len(listed) <= MOST_FILES
    assert [name for name in listed if not (ROOT / name).is_file()] == []


def test_a_long_file_is_found(tmp_path: Path) -> None:
    (tmp_path / "service" / "api").mkdir(parents=True)
    (tmp_path / "service" / "api" / "long.py").write_text("x = 1\n" * 401)
    (tmp_path / "service" / "short.py").write_text("x = 1\n" * 400)
    assert long_files(tmp_path) == {"service/api/long.py"}
