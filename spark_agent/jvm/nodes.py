"""A query's logical plan as plain values."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, TypeVar

T = TypeVar("T")

TAG: Final = "tidegauge."
"""The prefix of the names of the agent's own functions in a plan."""
SOURCE_TAG: Final = f"{TAG}source."
RANGES_TAG: Final = f"{TAG}ranges."
"""Prefixes of the two reporters' names in a plan. A unique number and the stage follow."""
LATE_ALIAS: Final = "tidegauge_late_"
"""Prefix of the alias of late rows in a plan. The id of the call's control source follows."""
UNPROMISED_ALIAS: Final = "tidegauge_source_"
"""Prefix of the alias of a source without a strategy. Its id follows."""

WINDOW_TIME: Final = "window_time"
"""A window's last instant, of `window_time()`, where a field of the window is named: `start`, `end`."""

_US_PER_MS: Final = 1_000
_SOURCES: Final = frozenset(
    {"StreamingRelation", "StreamingRelationV2", "StreamingDataSourceV2Relation"}
)
_CONTROL_CHAIN: Final = frozenset({"Filter", "EventTimeWatermark", "Project"})


class Stamp(StrEnum):
    """Relation of a column's value to event time."""

    TIME = "time"
    """A row's event time."""
    WINDOW = "window"
    """A window: a struct of start and end."""
    SESSION = "session"
    """A session window, likewise."""
    END = "end"
    """The end of a window."""
    START = "start"
    """The start of a window."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a node, with Spark's id and its relation to event time in Spark's metadata."""

    id: int
    name: str
    stamp: Stamp | None = None


@dataclass(frozen=True, slots=True)
class Bounds:
    """Distance (ms) of a stream-stream join's rows behind the watermark, at most; None: unbounded."""

    left_ms: int | None
    right_ms: int | None
    one_sided_equality: bool = False
    """True if one side's event time is equated with a value that is not the other side's event time."""
    full_outer: bool = False
    null_keys: tuple[str, ...] = ()
    """Equated columns of a full outer join that may be null on both sides."""
    cast_by_zone: tuple[str, ...] = ()
    """Event times without a time zone that the condition compares with instants, by Spark's zone."""
    hidden: bool = False
    """True if Spark does not see the bounds in the condition as it is written, which it needs for a join
    that is not an inner one: of wall clocks."""


@dataclass(frozen=True, slots=True)
class WindowGrid:
    """Tumbling or sliding windows (µs): each begins at a multiple of the slide after the offset."""

    size_us: int
    slide_us: int
    offset_us: int

    def first_open_us(self, watermark_ms: int) -> int:
        """Return the start (µs) of the first window that ends after a watermark (ms).

        >>> hour = 3_600_000_000
        >>> tumbling = WindowGrid(size_us=hour, slide_us=hour, offset_us=0)
        >>> [tumbling.first_open_us(ms) // hour for ms in (3_599_999, 3_600_000, 7_199_999)]
        [0, 1, 1]
        >>> sliding = WindowGrid(size_us=10_000, slide_us=5_000, offset_us=0)
        >>> [sliding.first_open_us(ms) for ms in (9, 10, 14, 15)]
        [0, 5000, 5000, 10000]
        """
        periods = (watermark_ms * _US_PER_MS - self.size_us - self.offset_us) // self.slide_us + 1
        return periods * self.slide_us + self.offset_us


class LateFate(StrEnum):
    """Treatment of late rows by `watermarked` and `split_late`."""

    PASS = "pass"  # noqa: S105  (not a password)
    """They pass, and Spark's operators drop them."""
    DROP = "drop"
    """They are counted and dropped."""
    ASIDE = "aside"
    """They are counted, and written by a writer of their own."""


@dataclass(frozen=True, slots=True)
class Control:
    """A control source: the stage of its input watermark, and its id at the driver."""

    stage: str
    id: str
    is_gate: bool = False
    """True if it yields nothing, and only delays batches while its source stage is throttled."""
    percentile: int | None = None
    """The percentile of the stage's input that it follows, for early results; None: the input
    watermark."""
    late: LateFate = LateFate.PASS
    allowed_lateness_ms: int = 0
    """Duration for which windows that have fired are kept, and fire again for late rows."""

    @property
    def sets_apart(self) -> bool:
        """True if late rows are set apart from the others before Spark's operators."""
        return self.late is not LateFate.PASS

    @property
    def puts_aside(self) -> bool:
        """True if late rows are written by a writer of their own."""
        return self.late is LateFate.ASIDE


@dataclass(frozen=True, slots=True)
class LogsSource:
    """A source of logs in folders: the stage of its shards, and its id at the driver."""

    stage: str
    id: str
    has_marker: bool = False
    """True if a file marks a folder as complete."""


@dataclass(frozen=True, slots=True)
class TopicsSource:
    """A source of Kafka's topics."""

    stage: str
    """The stage whose shards are the partitions; empty: not read by `read_kafka`."""
    topics: frozenset[str]
    """Their names; empty: given by a pattern, or by partitions."""
    limit: str | None = None
    """The largest number of rows in a batch, as it was given."""
    fails_on_loss: bool = True
    """True if the query fails once a topic has lost rows before they were read."""
    servers: frozenset[str] = frozenset()
    """Addresses of its brokers."""
    isolation: str = "read_uncommitted"
    """Its isolation level: with `read_committed`, its latest offset is before an open transaction."""

    def may_share(self, other: TopicsSource) -> bool:
        """Return whether both may read a topic. By a pattern, or by partitions, a source may read any.

        >>> rides = TopicsSource("s", frozenset({"rides"}))
        >>> rides.may_share(rides), rides.may_share(TopicsSource("", frozenset({"lifts"})))
        (True, False)
        >>> rides.may_share(TopicsSource("", frozenset()))
        True
        """
        return not self.topics or not other.topics or bool(self.topics & other.topics)


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a query's logical plan."""

    operator: str
    """Spark's name for it, such as `Aggregate`."""
    children: tuple[Node, ...] = ()
    output: tuple[Column, ...] = ()
    streaming: bool = True
    tag: str = ""
    """The name of the agent's function in the node; empty: not a node of the agent's."""
    event_time: int | None = None
    """Id of the event time column, for a source's reporter."""
    copies: Mapping[int, tuple[int, str]] = field(default_factory=dict[int, tuple[int, str]])
    """By column id: the column that it copies, and the name of the field if it copies only a field, or
    `WINDOW_TIME`."""
    groups: tuple[Column, ...] = ()
    """Columns by which an aggregation groups."""
    keys: tuple[Column, ...] = ()
    """Columns in which a deduplication's rows differ."""
    cast_by_zone: frozenset[int] = frozenset()
    """Ids of columns that are an event time without a time zone, made an instant by Spark's zone."""
    bounds: Bounds | None = None
    """Bounds of a join of two streams."""
    control: Control | None = None
    logs_source: LogsSource | None = None
    topics_source: TopicsSource | None = None
    limits: tuple[str, ...] = ()
    """Options that limit the rows of a source in one batch."""
    format_with_limits: str = ""
    """Format of a source whose batch may leave rows unread without an option for it."""
    paths: frozenset[str] = frozenset()
    """Qualified paths of a source's files, perhaps patterns; empty: not a source of files."""
    format: str = ""
    """Format of a source, or the name of its table."""
    delay_ms: int = 0
    """The delay of a `withWatermark`."""
    windows: Mapping[int, WindowGrid] = field(default_factory=dict[int, WindowGrid])
    """Columns with windows that the node computes, by column id."""
    window_times: Mapping[int, int] = field(default_factory=dict[int, int])
    """By column id of a window or session that the node computes: the column with the rows' time."""
    gaps_us: Mapping[int, int] = field(default_factory=dict[int, int])
    """Gaps (µs) of the sessions that the node computes, by column id."""
    extremes: Mapping[int, tuple[str, int]] = field(default_factory=dict[int, tuple[str, int]])
    """By column id: `Min` or `Max` of which column an aggregation computes, over all rows of a group."""
    late_of: str = ""
    """Id of the call of `split_late` whose late rows leave the node; empty: not such a node."""
    unpromised: str = ""
    """Id of the source without a strategy whose rows leave the node; empty: not such a node."""

    def walk(self) -> Iterator[Node]:
        """Yield the node and every node below."""
        yield self
        for child in self.children:
            yield from child.walk()

    @property
    def is_source(self) -> bool:
        """True for a streaming source."""
        return self.operator in _SOURCES

    @property
    def sources(self) -> int:
        """The number of streaming sources that the plan reads, one that is read twice counting twice."""
        return sum(node.is_source for node in self.walk())

    @property
    def is_control_union(self) -> bool:
        """True for the union of control source and data that `Pipeline.watermarked` makes."""
        return self.operator == "Union" and _leads_to_control(self.children[0])


def origin(path: Sequence[Node], column: int) -> tuple[int, str]:
    """Return the column of the last node that a column of the first one copies, and its field."""
    part = ""
    for node in path:
        column, of = node.copies.get(column, (column, ""))
        part = part or of
    return column, part


def followed(path: Sequence[Node], column: int) -> Iterator[tuple[Node, int]]:
    """Yield nodes of which each reads the next, each with the column's id there.

    Ends before the last node, and where a part of a column is taken.
    """
    for node, below in itertools.pairwise(path):
        yield node, column
        if node.operator == "Union":
            position = [each.id for each in node.output].index(column)
            column = below.output[position].id
            continue
        column, part = node.copies.get(column, (column, ""))
        if part:
            return


def made_in(path: Sequence[Node], column: int, made: Callable[[Node], Mapping[int, T]]) -> T | None:
    """Return the windows in a column, made by one of these nodes, of which each reads the next."""
    return next((made(node)[at] for node, at in followed(path, column) if at in made(node)), None)


def _leads_to_control(node: Node) -> bool:
    while node.operator in _CONTROL_CHAIN and len(node.children) == 1:
        node = node.children[0]
    return node.control is not None and not node.control.is_gate
