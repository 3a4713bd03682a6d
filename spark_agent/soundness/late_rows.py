"""Rows that a batch finds late, and checks of a query that puts such rows aside.

In batch n, Spark's operators drop rows by W(n - 1): the watermark with which the batch before was
planned. It is in the checkpoint, so a repeated batch has it again. The service's watermark at the time
of a batch is not, which is why it never decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from spark_agent.exceptions import UnsoundPlanError
from spark_agent.jvm.nodes import Control, Node, WindowGrid, made_in
from spark_agent.soundness.operators import AGGREGATE_BY_TIME, TABLE, row_name

_US_PER_MS: Final = 1_000
_LIMITS: Final = frozenset({"GlobalLimit", "LocalLimit"})


@dataclass(frozen=True, slots=True)
class Lateness:
    """The rule by which the rows of one call of `watermarked` or `split_late` are late."""

    windows: WindowGrid | None = None
    """The windows of the operator that reads them; None: it goes by their times."""
    at_watermark: bool = False
    """True if a row dated exactly W is late."""

    def first_on_time_us(self, watermark_ms: int) -> int:
        """Return the earliest time (µs) of a row that is not late at Spark's watermark W (ms).

        A row in windows is late once the last of them has ended: its end is at or before W (Akidau et
        al., VLDB 2015, section 2.3, and Flink's `isWindowLate`).

        >>> hour = 3_600_000_000
        >>> tumbling = Lateness(WindowGrid(size_us=hour, slide_us=hour, offset_us=0))
        >>> [tumbling.first_on_time_us(ms) // hour for ms in (3_599_999, 3_600_000, 7_199_999)]
        [0, 1, 1]
        >>> sliding = Lateness(WindowGrid(size_us=10_000, slide_us=5_000, offset_us=0))
        >>> [sliding.first_on_time_us(ms) for ms in (9, 10, 14, 15)]
        [0, 5000, 5000, 10000]
        >>> Lateness().first_on_time_us(7), Lateness(at_watermark=True).first_on_time_us(7)
        (7000, 7001)
        """
        if self.windows is None:
            return watermark_ms * _US_PER_MS + self.at_watermark
        return self.windows.first_open_us(watermark_ms)


def lateness_by_call(plan: Node) -> dict[str, Lateness]:
    """Return the rule of each call that sets late rows apart, by the id of its control source.

    Raises `UnsoundPlanError` if there is not one rule for all rows of a call.
    """
    found: dict[str, Lateness] = {}
    for path, control in paths_to_controls(plan):
        if not control.sets_apart:
            continue
        rule = _lateness(path, control)
        if found.setdefault(control.id, rule) != rule:
            raise UnsoundPlanError(
                f"stage {control.stage!r}: several operators read the rows of one call, and differ in "
                f"which rows are late: give each operator a data frame of its own"
            )
    return found


def check_late_rows(plan: Node, late_plans: Sequence[Node]) -> None:
    """Check that late rows that are put aside have one writer, and come there as they are.

    `plan` is of the results, `late_plans` are of the writers of late rows. Raises `UnsoundPlanError`.
    """
    aside = {control.id: control for _, control in paths_to_controls(plan) if control.puts_aside}
    written = [call for late in late_plans for call in calls_in(late)]
    for late in late_plans:
        _check_late_plan(late, aside)
    for call, control in aside.items():
        times = written.count(call)
        if times == 0:
            raise UnsoundPlanError(
                f"stage {control.stage!r}: the late rows of split_late() would be lost, since start() "
                f"has no writer for them: start(writer, late=late.writeStream…). To drop and count "
                f"them, use watermarked(…, late='drop') instead of split_late()"
            )
        if times > 1:
            raise UnsoundPlanError(
                f"stage {control.stage!r}: late rows of one split_late() are written {times} times: "
                f"give start() one writer for them"
            )
        if sum(other.id == call for _, other in paths_to_controls(plan)) > 1:
            raise UnsoundPlanError(
                f"stage {control.stage!r}: the query reads the rows of one split_late() more than once, "
                f"so they would be shuffled, and their late rows found, more than once: to join or "
                f"union a source with itself, read its data a second time, and split it again"
            )


def check_shares_shuffles(late_plans: Sequence[Node], shuffles: Sequence[int]) -> None:
    """Check that the results and the late rows of each call read one shuffle.

    `shuffles` are, for each shuffle of flagged rows that differs from the others, the number of places
    that read it. Raises `UnsoundPlanError`.
    """
    calls = sum(len(calls_in(late)) for late in late_plans)
    if list(shuffles) != [2] * calls:
        raise UnsoundPlanError(
            "Spark would not read one shuffle for the results and for the late rows, so a row could be "
            "in both outputs, or in neither. A rule that was added to the optimiser "
            "(spark.experimental, or an extension) may treat the two differently: leave it out"
        )


def calls_in(late: Node) -> list[str]:
    """Return the ids of the calls of `split_late` whose late rows a plan has."""
    return [node.late_of for node in late.walk() if node.late_of]


def _check_late_plan(late: Node, aside: Mapping[str, Control]) -> None:
    calls = calls_in(late)
    if not calls:
        raise UnsoundPlanError(
            "a writer of late= does not write late rows: give it the second data frame of split_late()"
        )
    for call in calls:
        if call not in aside:
            raise UnsoundPlanError(
                "a writer of late= has late rows of another query: write its on-time rows in the same "
                "query"
            )
    for node in _above_late(late):
        row = TABLE.get(node.operator)
        if row is None or row.empty_batches or node.tag or node.operator in _LIMITS:
            raise UnsoundPlanError(
                f"late rows pass through Spark's operator {node.operator}, which may keep or drop them: "
                f"write them as they are, and process what was written in another query"
            )
        if node.operator == "Union" and not all(calls_in(child) for child in node.children):
            raise UnsoundPlanError(
                "late rows are unioned with other rows: write these in another query"
            )


def _above_late(node: Node) -> Iterator[Node]:
    """Yield the operators through which late rows pass."""
    if node.late_of or not node.streaming:
        return
    yield node
    for child in node.children:
        yield from _above_late(child)


def paths_to_controls(
    node: Node, above: tuple[Node, ...] = ()
) -> Iterator[tuple[tuple[Node, ...], Control]]:
    """Yield each call's control source with the nodes from the root to its union with the data."""
    path = (*above, node)
    if node.is_control_union:
        [control] = [each.control for each in node.children[0].walk() if each.control]
        yield path, control
    for child in node.children:
        yield from paths_to_controls(child, path)


def has_state(node: Node) -> bool:
    """Return whether an operator keeps state by event time, and so drops late rows."""
    name = row_name(node) if node.operator in TABLE else node.operator
    row = TABLE.get(name)
    joins_table = node.operator == "Join" and node.bounds is None
    return row is not None and row.empty_batches and not joins_table


def _lateness(path: Sequence[Node], control: Control) -> Lateness:
    for at in range(len(path) - 1, -1, -1):
        node = path[at]
        if not has_state(node):
            continue
        row = TABLE[row_name(node)]
        if node.operator != "Aggregate" or row.name == AGGREGATE_BY_TIME:
            return Lateness(at_watermark=row.late_at_watermark)
        return Lateness(windows_of(path[at:], control.stage))
    return Lateness()


def windows_of(path: Sequence[Node], stage: str) -> WindowGrid:
    """Return the windows by which an aggregation groups, the first of nodes that read each the next.

    Raises `UnsoundPlanError` if the nodes do not show them.
    """
    [window] = [column.id for column in path[0].groups if column.stamp is not None]
    grid = made_in(path[1:], window, lambda node: node.windows)
    if grid is None:
        raise UnsoundPlanError(
            f"stage {stage!r}: the windows cannot be read from the query's plan, so it is unknown "
            f"which rows are late for them: group by window(…) of the event time"
        )
    return grid
