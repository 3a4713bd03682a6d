"""The benchmark against Flink: its arithmetic, and its line where Flink cannot be had."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.figures import QUICK
from benchmarks.flink.commits import latencies_ms
from benchmarks.flink.figures import WARM, counted, figures, percentile
from benchmarks.flink.process import FIRST, first_shown, lowest, moments


def test_without_maven_it_is_skipped_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for program in ("java", "javac"):
        (tmp_path / program).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    [skipped] = figures(QUICK, tmp_path)
    assert skipped.value is None
    assert "install Maven 3" in skipped.detail


def test_without_a_compiler_it_is_skipped_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    [skipped] = figures(QUICK, tmp_path)
    assert skipped.value is None
    assert "install a JDK" in skipped.detail


def test_the_answer_of_a_chain_is_parsed() -> None:
    assert moments("done 5:9 7:12\n") == [(5, 9), (7, 12)]
    with pytest.raises(ValueError, match="no answer of a chain: 'ready"):
        moments("ready\n")


def test_the_lowest_watermark_counts_once_each_task_has_one() -> None:
    one = [{"id": "0.currentInputWatermark", "value": "7"}]
    assert lowest(one, tasks=2) is None
    assert lowest([*one, {"id": "1.currentInputWatermark", "value": "5"}], tasks=2) == 6


def test_a_tick_is_shown_by_the_first_reading_that_reaches_it() -> None:
    readings = [(10, FIRST - 5), (20, FIRST + 1), (30, FIRST + 2)]
    assert first_shown([1, 2, 3, 4], readings) == [(1, 20), (2, 20), (3, 30)]


def test_the_end_of_time_shows_every_tick() -> None:
    assert first_shown([1, 2], [(10, 1 << 63)]) == [(1, 10), (2, 10)]


def test_only_ticks_between_the_first_and_the_last_ones_count() -> None:
    aside = [(0, 9_000_000)]
    assert counted(aside * WARM + [(1_000_000, 3_500_000)] + aside, 1) == [2.5]


def test_percentiles_are_values_that_were_measured() -> None:
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([float(value) for value in range(200, 0, -1)], 99) == 199.0
    with pytest.raises(ValueError, match="no latency"):
        percentile([], 50)


def test_commits_alone_are_timed_for_each_tick(tmp_path: Path) -> None:
    found = latencies_ms(tmp_path / "commits.db", 3, 4)
    assert len(found) == 4
    assert min(found) > 0
