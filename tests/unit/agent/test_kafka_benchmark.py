"""The benchmark over Kafka where Kafka cannot be fetched."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.figures import QUICK
from benchmarks.spark.figures import KAFKA, measured


def test_the_part_is_skipped_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    [skipped] = measured(QUICK, tmp_path, only=KAFKA)
    assert skipped.value is None
    assert "install Maven 3" in skipped.detail
