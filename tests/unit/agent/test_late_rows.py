"""Late rows: the rule, its time for each batch, and what of a plan is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_agent.driver.late_rows import LateRows
from spark_agent.exceptions import QueryFailedError, UnsoundPlanError
from spark_agent.jvm.checkpoint import Beginning
from spark_agent.jvm.nodes import Bounds, Control, LateFate, Node, WindowGrid
from spark_agent.jvm.progress import CommittedBatch, parse_watermark_ms
from spark_agent.soundness.late_rows import Lateness, check_shares_shuffles, lateness_by_call
from spark_agent.sources.control import END_MS

GRIDS = st.builds(
    lambda size, slide, offset: WindowGrid(size, min(slide, size), offset % min(slide, size)),
    st.integers(1, 50_000),
    st.integers(1, 50_000),
    st.integers(0, 50_000),
)


def ends(grid: WindowGrid, time_us: int) -> list[int]:
    """Return the ends of all windows that a time is in, one by one."""
    last = time_us - (time_us - grid.offset_us) % grid.slide_us
    starts = range(last, time_us - grid.size_us, -grid.slide_us)
    return [start + grid.size_us for start in starts]


@given(GRIDS, st.integers(-100, 100), st.integers(-200_000, 200_000))
def test_a_row_is_late_once_its_last_window_has_ended(
    grid: WindowGrid, watermark_ms: int, time_us: int
) -> None:
    is_late = time_us < Lateness(grid).first_on_time_us(watermark_ms)
    assert is_late == all(end <= watermark_ms * 1_000 for end in ends(grid, time_us))


@given(st.integers(-100, 100), st.integers(-200_000, 200_000), st.booleans())
def test_without_windows_a_row_is_late_by_its_time(
    watermark_ms: int, time_us: int, at_watermark: bool
) -> None:
    first_us = Lateness(at_watermark=at_watermark).first_on_time_us(watermark_ms)
    watermark_us = watermark_ms * 1_000
    is_late = time_us <= watermark_us if at_watermark else time_us < watermark_us
    assert (time_us < first_us) == is_late


class Logged:
    """A checkpoint with these watermarks."""

    def __init__(self, *watermarks_ms: int) -> None:
        self.watermarks_ms = watermarks_ms

    def read(self) -> Beginning:
        return Beginning(len(self.watermarks_ms))

    def watermark_before(self, batch: int) -> int:
        return 0 if batch == 0 else self.watermarks_ms[batch - 1]


class Cell:
    """A number of a plan."""

    value = -1

    def set(self, value: int) -> None:
        self.value = value


def late_rows(checkpoint: Logged, cell: Cell) -> LateRows:
    return LateRows({"1": Lateness()}, {"1": cell}, checkpoint)


def test_a_start_goes_by_the_watermark_of_the_batch_before() -> None:
    cell = Cell()
    late_rows(Logged(), cell).begin()
    assert cell.value == 0
    late_rows(Logged(0, 5, 7), cell).begin()
    assert cell.value == 7_000


def test_each_batch_goes_by_the_one_before_and_never_back() -> None:
    cell = Cell()
    rows = late_rows(Logged(), cell)
    rows.begin()
    for watermark_ms, expected_us in ((3, 3_000), (9, 9_000), (4, 9_000)):
        rows.note_batch(CommittedBatch(0, watermark_ms))
        assert cell.value == expected_us
    rows.note_batch(None)
    assert cell.value == 9_000


def test_a_batch_that_was_planned_with_another_watermark_is_not_written() -> None:
    checkpoint = Logged()
    rows = late_rows(checkpoint, Cell())
    rows.begin()
    rows.check(0)
    checkpoint.watermarks_ms = (3,)
    with pytest.raises(QueryFailedError, match=r"batch 1 .* Nothing was written: start the query"):
        rows.check(1)
    rows.note_batch(CommittedBatch(0, 3))
    rows.check(1)


@pytest.mark.parametrize("at", ["+100000-01-01T00:00:00.000Z", "+99999-12-31T23:59:59.999Z"])
def test_a_batch_after_the_end_of_time_is_written(at: str) -> None:
    """Operators with a row at the watermark late end a millisecond before, which the progress hides."""
    logged_ms = END_MS if at.startswith("+100000") else END_MS - 1
    checkpoint = Logged(5, logged_ms)
    cell = Cell()
    rows = late_rows(checkpoint, cell)
    rows.begin()
    rows.note_batch(CommittedBatch(1, parse_watermark_ms(at)))
    rows.check(2)
    assert cell.value == (END_MS - 1) * 1_000, "later than any row"
    checkpoint.watermarks_ms = (5, 6)
    with pytest.raises(QueryFailedError, match="batch 2 was planned to find rows late at"):
        rows.check(2)


def test_a_batch_noted_at_the_end_of_time_has_the_times_of_a_start_there() -> None:
    checkpoint = Logged(5)
    noted, started = Cell(), Cell()
    rows = late_rows(checkpoint, noted)
    rows.begin()
    checkpoint.watermarks_ms = (5, END_MS - 1)
    rows.note_batch(CommittedBatch(1, parse_watermark_ms("+99999-12-31T23:59:59.999Z")))
    rows.check(2)
    late_rows(checkpoint, started).begin()
    assert noted.value == started.value


def test_a_query_without_such_calls_reads_nothing_of_its_checkpoint() -> None:
    class Unread(Logged):
        def read(self) -> Beginning:
            raise AssertionError

    rows = LateRows({}, {}, Unread())
    rows.begin()
    rows.note_batch(CommittedBatch(0, 3))


def union(late: LateFate, *above: str) -> Node:
    """Return the union of control source and data, below these operators."""
    control = Node("StreamingRelationV2", control=Control("s", "1", late=late))
    plan = Node("Union", (control, Node("StreamingRelation")))
    for operator in above:
        plan = Node(operator, (plan,), bounds=Bounds(0, 0) if operator == "Join" else None)
    return plan


def test_the_first_operator_with_state_decides() -> None:
    assert lateness_by_call(union(LateFate.PASS, "Deduplicate")) == {}
    assert lateness_by_call(union(LateFate.DROP, "Filter")) == {"1": Lateness()}
    for operator in ("Deduplicate", "Join", "FlatMapGroupsInPandasWithState"):
        found = lateness_by_call(union(LateFate.ASIDE, "Project", operator, "Filter"))
        assert found == {"1": Lateness(at_watermark=True)}


def test_a_join_with_a_table_keeps_nothing_and_decides_nothing() -> None:
    joined = Node("Join", (union(LateFate.DROP), Node("LogicalRelation", streaming=False)))
    assert lateness_by_call(joined) == {"1": Lateness()}
    assert lateness_by_call(Node("Deduplicate", (joined,))) == {"1": Lateness(at_watermark=True)}


def test_operators_that_differ_in_which_rows_are_late_are_refused() -> None:
    both = Node(
        "Union", (union(LateFate.DROP, "Filter"), union(LateFate.DROP, "Deduplicate", "Filter"))
    )
    with pytest.raises(UnsoundPlanError, match="differ in which rows are late"):
        lateness_by_call(both)


@pytest.mark.parametrize("shuffles", [[], [1, 1], [2, 2], [3]])
def test_a_plan_that_does_not_share_one_shuffle_is_refused(shuffles: list[int]) -> None:
    late = Node("SubqueryAlias", late_of="1")
    check_shares_shuffles([late], [2])
    with pytest.raises(UnsoundPlanError, match="would not read one shuffle"):
        check_shares_shuffles([late], shuffles)
