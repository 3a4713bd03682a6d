"""Firings: the rule, its inverse, and what of a checkpoint and of a plan is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import LongType, StructType

from spark_agent.driver.window_notes import check_note, note_of
from spark_agent.exceptions import UnsoundPlanError
from spark_agent.jvm.nodes import RANGES_TAG, Column, Control, Node, Stamp, WindowGrid
from spark_agent.jvm.unfired import needed_of
from spark_agent.soundness.firings import Firing, firing_of
from spark_agent.soundness.operators import Promise
from spark_agent.sources.control import END_MS

TIMES = st.integers(1, 10**15)
HOUR = WindowGrid(3_600_000_000, 3_600_000_000, 0)
WINDOW, KEY, AT = Column(1, "window", Stamp.WINDOW), Column(2, "key"), Column(3, "at", Stamp.TIME)


@given(TIMES, st.integers(0, 10**12), st.integers(0, 1))
def test_the_promise_does_not_wait_for_late_rows(
    watermark_ms: int, lateness_ms: int, lag_ms: int
) -> None:
    promise = Promise(spark_lag_ms=lag_ms, allowed_lateness_ms=lateness_ms)
    spark_ms = promise.spark_ms(watermark_ms)
    assert spark_ms <= watermark_ms - lateness_ms
    assert promise.input_ms(spark_ms) == promise.promise_ms(spark_ms) == watermark_ms
    assert not promise.progress(spark_ms).holds


def test_at_the_end_of_time_nothing_is_kept() -> None:
    assert Promise(allowed_lateness_ms=9).spark_ms(END_MS) == END_MS
    assert Promise(allowed_lateness_ms=9).input_ms(END_MS) == END_MS


@given(TIMES, TIMES, st.integers(1, 10**7), st.integers(1, 10**7))
def test_windows_fire_when_the_watermark_passes_an_end(
    one_ms: int, other_ms: int, size_us: int, slide_us: int
) -> None:
    before_ms, now_ms = sorted((one_ms, other_ms))
    grid = WindowGrid(size_us, min(slide_us, size_us), 0)
    firing = Firing("s", 5, grid, "window", ("window",))
    # Ends are at size + k * slide.
    last_us = (now_ms * 1_000 - size_us) // grid.slide_us * grid.slide_us + size_us
    assert firing.fires(before_ms, now_ms) == (last_us > before_ms * 1_000)


def test_a_batch_reads_what_older_batches_have_kept() -> None:
    names = ["0", "2", "2.whole", "4", "9.whole", "11"]
    assert needed_of(names, 2) == ["0"]
    assert needed_of(names, 5) == ["2.whole", "4"]
    assert needed_of(names, 9) == ["2.whole", "4"], "its own from an attempt that failed"
    assert needed_of(names, 12) == ["9.whole", "11"]


def test_notes_of_another_query_are_refused() -> None:
    rows = StructType().add("n", LongType())
    firing = Firing("s", 5_000, HOUR, "window", ("window",))
    note = note_of(firing, rows, {})
    check_note(note, note)
    check_note(None, None)
    with pytest.raises(ValueError, match="lateness of 5,000 ms, and this query one of 0 ms"):
        check_note(note, None)
    with pytest.raises(ValueError, match="lateness of 0 ms, and this query one of 5,000 ms"):
        check_note(None, note)
    shown = (
        "keeps windows with struct<n:bigint> by window, and this query writes struct<n:bigint> by k"
    )
    with pytest.raises(ValueError, match=shown):
        check_note(note, note_of(replace(firing, keys=("k",)), rows, {}))
    half_hours = WindowGrid(HOUR.size_us, HOUR.slide_us // 2, 0)
    with pytest.raises(ValueError, match="has other windows: their size, their slide or their off"):
        check_note(note, note_of(replace(firing, windows=half_hours), rows, {}))


def watermarked(lateness_ms: int, call: str = "1") -> Node:
    control = Control("s", call, allowed_lateness_ms=lateness_ms)
    source = Node("StreamingRelationV2", output=(AT, KEY), control=control)
    data = Node("StreamingRelation", output=(AT, KEY))
    return Node("Union", (source, data), output=(AT, KEY))


def windowed(below: Node) -> Node:
    window = Column(9, "window", Stamp.WINDOW)
    project = Node("Project", (below,), output=(window, KEY), windows={9: HOUR})
    return Node(
        "Aggregate",
        (project,),
        output=(WINDOW, KEY, Column(4, "n")),
        groups=(window, KEY),
        copies={1: (9, ""), 2: (2, "")},
    )


def test_keys_are_followed_through_projections() -> None:
    until, name = Column(11, "until", Stamp.END), Column(12, "name")
    report = Node(
        "Filter", (windowed(watermarked(7)),), output=(WINDOW, KEY), tag=f"{RANGES_TAG}1.s"
    )
    plan = Node("Project", (report,), output=(until, name), copies={11: (1, "end"), 12: (2, "")})
    assert firing_of(plan) == Firing("s", 7, HOUR, "until", ("until", "name"))
    assert firing_of(windowed(watermarked(0))) is None


def test_two_data_frames_must_allow_the_same_lateness() -> None:
    both = Node("Union", (watermarked(5), watermarked(5, "2")), output=(AT, KEY))
    found = firing_of(windowed(both))
    assert found is not None
    assert found.keys == ("window", "key")
    differing = Node("Union", (watermarked(5), watermarked(0, "2")), output=(AT, KEY))
    with pytest.raises(UnsoundPlanError, match="differ in allowed_lateness"):
        firing_of(windowed(differing))


def test_other_operators_with_state_are_refused() -> None:
    with pytest.raises(UnsoundPlanError, match="the only operator with state"):
        firing_of(windowed(Node("Deduplicate", (watermarked(5),), output=(AT, KEY))))
    with pytest.raises(UnsoundPlanError, match="Deduplicate is not supported here"):
        firing_of(Node("Deduplicate", (windowed(watermarked(5)),)))
    with pytest.raises(UnsoundPlanError, match="a filter follows its windows"):
        firing_of(Node("Filter", (windowed(watermarked(5)),), output=(WINDOW, KEY)))
    with pytest.raises(UnsoundPlanError, match="key is not among the columns"):
        firing_of(Node("Project", (windowed(watermarked(5)),), output=(WINDOW,)))
    with pytest.raises(UnsoundPlanError, match="the query has none"):
        firing_of(watermarked(5))
