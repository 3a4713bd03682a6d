"""The matrix's rows: what stands between `watermarked()` and `report()`, and what must come of it.

Each is said once, for Spark's batch and for its streams: the batch gives the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Literal

from pyspark.sql import Column, DataFrame, GroupedData
from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)
from pyspark.sql.streaming.state import GroupStateTimeout

from spark_agent.strategies import (
    AnyStrategy,
    Expression,
    LearnedLateness,
    NoWatermarks,
    Punctuated,
    Rows,
    WallClock,
)
from tests.spark.matrix.data import BOUND_MIN, HOUR_MS, MINUTE_MS, SCHEMA
from tests.spark.matrix.state import (
    BLOCK,
    BLOCK_MS,
    COUNTED,
    OPEN,
    BlockCounter,
    count_blocks,
    passed_through,
)

Frames = dict[str, DataFrame]
"""The sources by name."""

LIMIT: Final = 100
ROCKS_DB: Final = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


@dataclass(frozen=True)
class Operator:
    """A row of the matrix."""

    name: str
    apply: Callable[[Frames], DataFrame]
    """The operator, from what `watermarked` returned, or from the same in a batch."""
    stamp: str
    """The column that stage 2 goes by."""
    batch: Callable[[Frames], DataFrame] | None = None
    """The answer, where the operator is not for batches."""
    before_source: Callable[[DataFrame], DataFrame] | None = None
    """Operators before `source`."""
    before: Callable[[DataFrame], DataFrame] | None = None
    """Operators between `source` and `watermarked`."""
    sources: tuple[str, ...] = ("views",)
    ascending: bool = False
    """The sources are in order, and say so."""
    strategy: Callable[[], AnyStrategy] | None = None
    """The sources' strategy; None: the bound of their rows."""
    promises_less: bool = False
    """The strategy promises less than the bound, or later: it is not waited for."""
    late: Literal["pass", "drop", "aside"] = "pass"
    """Treatment of late rows. There are none, since the bound holds."""
    allowed_lateness: str | None = None
    """So long its windows may be corrected. None is, since the bound holds."""
    event_time: str | None = None
    """Event time given to `report`; None: to be found."""
    output_time: str | None = None
    longest: str | None = None
    """The longest session, given to `report`."""
    sql: str | None = None
    """The stage as a text, in place of the operator; the batch answer is the operator's."""
    delay: str | None = None
    deduplicate_within: str | None = None
    state_store: str | None = None
    sink: Literal["files", "foreachBatch"] = "files"
    mode: Literal["append", "update", "complete"] = "append"
    comes: Literal["when closed", "at once", "before the watermark"] = "when closed"
    """When its rows come: those stamped W with the watermark W; all that has been read; or those
    stamped before W with W."""
    equal: Literal["rows", "ids", "newest", "some"] = "rows"
    """To the batch answer are equal: its rows; their ids, since of duplicates any may come; the
    newest versions of its rows; or some of them stand for all (LIMIT)."""
    is_undated: bool = False
    """Some of its rows have no stamp, which is counted."""
    lag_ms: int = 0
    """Distance of its rows behind the watermark that goes in, at most."""
    refused: str | None = None
    """It does not work, and this is what its user is told to write instead: a pattern."""
    short: Literal["availableNow", "processingTime", "bounded", "cron"] = "bounded"
    """The trigger of its cell in the short version."""
    is_variation: bool = False
    """Its cell in the short version is left to `make test-slow`: another row has the same state."""
    issue: tuple[int, ...] = ()
    """The faults of issue 7 that it would have shown."""


def _only(frames: Frames) -> DataFrame:
    return frames["views"]


def _counted(frame: DataFrame, window: str = "1 hour") -> DataFrame:
    """Views by key and window."""
    return frame.groupBy(F.window("at", window), "key").agg(
        F.count("*").alias("rows"), F.sum("id").alias("ids")
    )


def _stamped(frame: DataFrame, column: str = "window") -> DataFrame:
    return frame.select("key", F.col(column)["end"].alias("closed_at"), "rows", "ids")


def _tumbling(frames: Frames) -> DataFrame:
    return _stamped(_counted(_only(frames)))


def _sliding(frames: Frames) -> DataFrame:
    sliding = F.window("at", "2 hours", "30 minutes")
    return _only(frames).groupBy(sliding, "key").agg(F.count("*").alias("rows"))


def _session(frames: Frames) -> DataFrame:
    session = F.session_window("at", "1 hour")
    return _stamped(
        _only(frames)
        .groupBy(session, "key")
        .agg(F.count("*").alias("rows"), F.sum("id").alias("ids")),
        "session_window",
    )


def _dated(grouped: GroupedData, window: str, at: Column) -> DataFrame:
    """Windows that are dated by one of their rows."""
    found = grouped.agg(at.alias("dated_at"), F.count("*").alias("rows"), F.sum("id").alias("ids"))
    return found.select("key", F.col(window), "dated_at", "rows", "ids")


def _dated_windows(frames: Frames, at: Column) -> DataFrame:
    return _dated(_only(frames).groupBy(F.window("at", "1 hour"), "key"), "window", at)


def _dated_sliding(frames: Frames) -> DataFrame:
    sliding = F.window("at", "2 hours", "30 minutes")
    return _dated(_only(frames).groupBy(sliding, "key"), "window", F.min("at"))


def _dated_sliding_by_hand(frames: Frames) -> DataFrame:
    """In a window that others overlap, an element is not dated before the end of the one before."""
    before = F.col("window.end") - F.expr("INTERVAL 30 MINUTES")
    dated = F.greatest(F.col("dated_at"), before)
    return _dated_sliding(frames).withColumn("dated_at", dated)


def _dated_sessions(frames: Frames, at: Column) -> DataFrame:
    session = F.session_window("at", "1 hour")
    return _dated(_only(frames).groupBy(session, "key"), "session_window", at)


def _by_window_time(frames: Frames) -> DataFrame:
    return (
        _counted(_only(frames))
        .groupBy(F.window(F.window_time("window"), BLOCK))
        .agg(F.max("rows").alias("most"), F.count("*").alias("windows"))
        .select(F.col("window.end").alias("closed_at"), "most", "windows")
    )


def _by_window(frames: Frames) -> DataFrame:
    return (
        _counted(_only(frames))
        .groupBy(F.window("window", BLOCK), "key")
        .agg(F.max("rows").alias("most"), F.count("*").alias("windows"))
        .select(F.col("window.end").alias("closed_at"), "key", "most", "windows")
    )


def _joined(frames: Frames, how: str = "inner") -> DataFrame:
    """Clicks, each with the views of its key in the hour before."""
    views = frames["views"].select("key", F.col("id").alias("view"), F.col("at").alias("viewed_at"))
    clicks = frames["clicks"].select(
        F.col("key").alias("clicked"), F.col("id").alias("click"), F.col("at").alias("clicked_at")
    )
    within = F.expr("viewed_at BETWEEN clicked_at - INTERVAL 1 HOUR AND clicked_at")
    return views.join(clicks, (F.col("key") == F.col("clicked")) & within, how).drop("clicked")


def _join_without_bounds(frames: Frames) -> DataFrame:
    views = frames["views"].select("key", F.col("at").alias("viewed_at"))
    clicks = frames["clicks"].select(F.col("key").alias("clicked"), F.col("at").alias("clicked_at"))
    return views.join(clicks, F.expr("key = clicked AND viewed_at <= clicked_at"))


def _join_then_window(frames: Frames) -> DataFrame:
    return (
        _joined(frames)
        .groupBy(F.window("viewed_at", "2 hours"), "key")
        .agg(F.count("*").alias("rows"), F.sum("click").alias("ids"))
        .select("key", F.col("window.end").alias("closed_at"), "rows", "ids")
    )


def _static_join(frames: Frames) -> DataFrame:
    names = _only(frames).sparkSession.sql(
        "SELECT * FROM VALUES ('x', 'Xavier'), ('y', 'Yves'), ('new', 'Nina') AS names(key, name)"
    )
    return (
        _only(frames)
        .join(names, "key")
        .groupBy(F.window("at", "1 hour"), "name")
        .agg(F.count("*").alias("rows"))
        .select("name", F.col("window.end").alias("closed_at"), "rows")
    )


def _union(frames: Frames) -> DataFrame:
    return _stamped(_counted(frames["views"].union(frames["clicks"])))


def _filter_before(frames: Frames) -> DataFrame:
    return _stamped(_counted(_only(frames).filter(F.col("key") != "x")))


def _filter_behind(frames: Frames) -> DataFrame:
    return _tumbling(frames).filter(F.col("key") != "x")


def _having(frames: Frames) -> DataFrame:
    return _tumbling(frames).filter(F.col("rows") > 1)


def _deduplicated(frames: Frames) -> DataFrame:
    return _only(frames).select("key", "id", "at").dropDuplicates(["id", "at"])


def _deduplicated_within(frames: Frames) -> DataFrame:
    return _only(frames).select("key", "id", "at").dropDuplicatesWithinWatermark(["id"])


def _deduplicated_by_hand(frames: Frames) -> DataFrame:
    """Return the certain part of the result: each id once, at the latest with the last of its rows."""
    return _only(frames).groupBy("id").agg(F.max("key").alias("key"), F.max("at").alias("at"))


def _blocks(frames: Frames) -> DataFrame:
    """Return the result to which the state functions must come."""
    return (
        _only(frames)
        .filter("key IS NOT NULL")
        .groupBy("key", F.window("at", BLOCK))
        .agg(F.count("*").alias("rows"))
        .select(
            "key",
            F.col("window.start").alias("started_at"),
            F.col("window.end").alias("ended_at"),
            "rows",
        )
    )


def _state_function(frames: Frames) -> DataFrame:
    return (
        _only(frames)
        .filter("key IS NOT NULL")
        .groupBy("key")
        .applyInPandasWithState(
            count_blocks, COUNTED, OPEN, "append", GroupStateTimeout.EventTimeTimeout
        )
    )


def _processor(frames: Frames, event_time: str = "") -> DataFrame:
    return (
        _only(frames)
        .filter("key IS NOT NULL")
        .groupBy("key")
        .transformWithState(BlockCounter(), COUNTED, "Append", "EventTime", None, event_time)
    )


def _stateless(frames: Frames) -> DataFrame:
    return _only(frames).filter(F.col("key") != "x").select("id", F.upper("key").alias("k"), "at")


def _limited(frames: Frames) -> DataFrame:
    return _tumbling(frames).limit(LIMIT)


def _repartitioned(frames: Frames) -> DataFrame:
    return _tumbling(frames).repartition(3, "rows")


def _in_pandas(frame: DataFrame) -> DataFrame:
    """With the data frame's own schema, event time stays marked as such; SCHEMA has no marks."""
    return frame.mapInPandas(passed_through, frame.schema)


_PAIRS: Final = ("views", "clicks")
_INTERVAL_MS: Final = HOUR_MS + 10
"""A join's output is behind its input by its interval, and a millisecond or two."""


class BoundedWithState:
    """A strategy of a user's own, with a state for each shard."""

    def update(self, state: int | None, rows: Rows) -> int:
        """Keep the newest event time."""
        return max(state or 0, rows.newest_ms)

    def promise(self, state: int) -> int:
        """Stay behind it by the bound."""
        return state - BOUND_MIN * MINUTE_MS


STRATEGIES: Final[dict[str, tuple[Callable[[], AnyStrategy], bool]]] = {
    "SQL": (lambda: f"at - INTERVAL {BOUND_MIN} MINUTES", False),
    "SQL for some rows": (
        lambda: Expression(f"IF(id % 3 = 0, at - INTERVAL {BOUND_MIN} MINUTES, NULL)"),
        True,
    ),
    "punctuated": (lambda: Punctuated("key = 'x'", bound=f"{BOUND_MIN} minutes"), True),
    "with a state": (BoundedWithState, False),
    # Not one shard has enough rows: the bound is the largest that is allowed.
    "learned": (lambda: LearnedLateness(at_most=f"{BOUND_MIN} minutes"), False),
    "without watermarks": (NoWatermarks, True),
    # Until the sources are final, as far behind the clock as the rows are old.
    "wall clock": (lambda: WallClock("20000 days"), True),
}
"""By name: the strategy, and True if it promises less than the bound."""


def _with_strategies(operator: Operator) -> list[Operator]:
    return [
        replace(
            operator,
            name=f"{operator.name}, {name}",
            strategy=strategy,
            promises_less=promises_less,
            is_variation=True,
            issue=(),
        )
        for name, (strategy, promises_less) in STRATEGIES.items()
    ]


FATES: Final[dict[str, Literal["drop", "aside"]]] = {"late dropped": "drop", "late aside": "aside"}
"""By name: treatment of late rows."""


def _with_fates(operator: Operator) -> list[Operator]:
    return [
        replace(operator, name=f"{operator.name}, {name}", late=late, is_variation=True, issue=())
        for name, late in FATES.items()
    ]


_OPERATORS: Final = (
    Operator("tumbling", _tumbling, "closed_at"),
    Operator(
        "tumbling, stamped with window_time",
        lambda frames: _counted(_only(frames)).select(
            "key", F.window_time("window").alias("last_instant"), "rows"
        ),
        "last_instant",
        event_time="last_instant",
        comes="before the watermark",
        is_variation=True,
    ),
    Operator(
        "tumbling, stamped with its start",
        lambda frames: _counted(_only(frames)).select(
            "key", F.col("window.start").alias("started_at"), "rows"
        ),
        "started_at",
        event_time="started_at",
        refused="delay=",
        issue=(1,),
    ),
    Operator(
        "sliding", _sliding, "window.end", event_time="window", short="cron", is_variation=True
    ),
    # To Spark a row at the very end of a session is of that session: it closes a millisecond later.
    Operator(
        "session",
        _session,
        "closed_at",
        event_time="closed_at",
        lag_ms=1,
        short="processingTime",
        issue=(5,),
    ),
    Operator("window then window by window_time", _by_window_time, "closed_at"),
    Operator(
        "window then window by window",
        _by_window,
        "closed_at",
        event_time="closed_at",
        is_variation=True,
    ),
    Operator(
        "join then window",
        _join_then_window,
        "closed_at",
        sources=_PAIRS,
        event_time="closed_at",
        lag_ms=_INTERVAL_MS,
        comes="before the watermark",
        issue=(1, 2),
        is_variation=True,
    ),
    Operator(
        "inner join",
        _joined,
        "viewed_at",
        sources=_PAIRS,
        event_time="viewed_at",
        lag_ms=_INTERVAL_MS,
        comes="at once",
        short="availableNow",
        issue=(1, 2, 5),
    ),
    Operator(
        "left outer join, stamped by the left",
        lambda frames: _joined(frames, "left"),
        "viewed_at",
        sources=_PAIRS,
        event_time="viewed_at",
        lag_ms=_INTERVAL_MS,
        comes="before the watermark",
        issue=(1, 2, 5),
        is_variation=True,
    ),
    Operator(
        "left outer join, stamped by the right",
        lambda frames: _joined(frames, "left"),
        "clicked_at",
        sources=_PAIRS,
        event_time="clicked_at",
        is_undated=True,
        lag_ms=_INTERVAL_MS,
        comes="before the watermark",
        issue=(1, 2, 5),
        is_variation=True,
    ),
    Operator(
        "join without bounds",
        _join_without_bounds,
        "viewed_at",
        sources=_PAIRS,
        event_time="viewed_at",
        refused="BETWEEN|bound",
        issue=(1,),
    ),
    Operator(
        "static join",
        _static_join,
        "closed_at",
        event_time="closed_at",
        issue=(2,),
        is_variation=True,
    ),
    Operator("union", _union, "closed_at", sources=_PAIRS, is_variation=True),
    Operator("filter before", _filter_before, "closed_at", issue=(2,), is_variation=True),
    Operator("filter behind", _filter_behind, "closed_at", issue=(2,), is_variation=True),
    Operator("having", _having, "closed_at", issue=(2,), is_variation=True),
    Operator(
        "dropDuplicates",
        _deduplicated,
        "at",
        ascending=True,
        comes="at once",
        short="processingTime",
        issue=(5,),
    ),
    Operator(
        "dropDuplicates, out of order",
        _deduplicated,
        "at",
        event_time="at",
        comes="at once",
        issue=(5,),
        is_variation=True,
    ),
    Operator(
        "dropDuplicatesWithinWatermark",
        _deduplicated_within,
        "at",
        batch=_deduplicated_by_hand,
        deduplicate_within="2 hours",
        comes="at once",
        equal="ids",
        issue=(5, 8),
    ),
    Operator(
        "dropDuplicatesWithinWatermark without a time",
        _deduplicated_within,
        "at",
        refused="deduplicate_within=",
        issue=(8,),
    ),
    Operator(
        "applyInPandasWithState",
        _state_function,
        "started_at",
        event_time="started_at",
        refused="delay=",
        issue=(1,),
    ),
    Operator(
        "applyInPandasWithState, with a delay",
        _state_function,
        "started_at",
        batch=_blocks,
        event_time="started_at",
        delay=BLOCK,
        lag_ms=BLOCK_MS + 10,
        comes="before the watermark",
        issue=(1,),
        is_variation=True,
    ),
    Operator(
        "transformWithState",
        _processor,
        "started_at",
        event_time="started_at",
        state_store=ROCKS_DB,
        refused="delay=",
        issue=(1,),
    ),
    Operator(
        "transformWithState, with a delay",
        _processor,
        "started_at",
        batch=_blocks,
        event_time="started_at",
        delay=BLOCK,
        state_store=ROCKS_DB,
        lag_ms=BLOCK_MS + 10,
        comes="before the watermark",
        issue=(1,),
        is_variation=True,
    ),
    Operator(
        "transformWithState, with an event time of its own",
        lambda frames: _processor(frames, "ended_at"),
        "ended_at",
        batch=_blocks,
        event_time="ended_at",
        state_store=ROCKS_DB,
        lag_ms=10,
        comes="before the watermark",
        issue=(1,),
    ),
    Operator("stateless", _stateless, "at", comes="at once", ascending=True, issue=(2, 7)),
    Operator(
        "limit",
        _limited,
        "closed_at",
        batch=_tumbling,
        event_time="closed_at",
        equal="some",
        is_variation=True,
    ),
    Operator("repartition", _repartitioned, "closed_at", event_time="closed_at", is_variation=True),
    Operator(
        "mapInPandas before source",
        _tumbling,
        "closed_at",
        before_source=_in_pandas,
        is_variation=True,
    ),
    Operator(
        "mapInPandas before watermarked",
        _tumbling,
        "closed_at",
        before=_in_pandas,
        refused=r"mapInPandas\) before source",
    ),
    Operator(
        "mapInPandas behind watermarked",
        lambda frames: _stamped(_counted(_in_pandas(_only(frames)))),
        "closed_at",
        event_time="closed_at",
        is_variation=True,
    ),
    Operator(
        "mapInPandas behind watermarked, without the mark",
        lambda frames: _stamped(_counted(_only(frames).mapInPandas(passed_through, SCHEMA))),
        "closed_at",
        event_time="closed_at",
        refused="watermarked",
    ),
    Operator(
        "mapInPandas behind the window",
        lambda frames: _in_pandas(_tumbling(frames)),
        "closed_at",
        event_time="closed_at",
        refused="delay=",
    ),
    Operator(
        "mapInPandas behind the window, with a delay",
        lambda frames: _in_pandas(_tumbling(frames)),
        "closed_at",
        event_time="closed_at",
        delay="0 s",
        is_variation=True,
    ),
    Operator("foreachBatch", _tumbling, "closed_at", sink="foreachBatch", is_variation=True),
    Operator(
        "update",
        _tumbling,
        "closed_at",
        sink="foreachBatch",
        mode="update",
        equal="newest",
        is_variation=True,
    ),
    Operator(
        "complete",
        _tumbling,
        "closed_at",
        sink="foreachBatch",
        mode="complete",
        refused="append|update",
        issue=(1, 7),
    ),
)


IN_SQL: Final = "in SQL"
"""In the names of stages that are written in SQL."""
_DELAY: Final = f"DELAY OF INTERVAL {BOUND_MIN} MINUTES"
_OUTPUT_TIMES: Final = tuple(
    replace(each, event_time="dated_at", comes="before the watermark", is_variation=True)
    for each in (
        Operator(
            "tumbling, by the earliest",
            lambda frames: _dated_windows(frames, F.min("at")),
            "dated_at",
            output_time="earliest",
            lag_ms=HOUR_MS,
        ),
        Operator(
            "tumbling, by the latest",
            lambda frames: _dated_windows(frames, F.max("at")),
            "dated_at",
            output_time="latest",
            lag_ms=HOUR_MS,
        ),
        Operator(
            "sliding, by the earliest",
            _dated_sliding,
            "dated_at",
            batch=_dated_sliding_by_hand,
            output_time="earliest",
            lag_ms=HOUR_MS // 2,
        ),
        Operator(
            "session, by the earliest",
            lambda frames: _dated_sessions(frames, F.min("at")),
            "dated_at",
            output_time="earliest",
            # A session may be open for as long as there are views.
            promises_less=True,
        ),
        Operator(
            "session, by the earliest, with a longest",
            lambda frames: _dated_sessions(frames, F.min("at")),
            "dated_at",
            output_time="earliest",
            longest="96 hours",
            lag_ms=96 * HOUR_MS + 10,
        ),
        Operator(
            "session, by the latest",
            lambda frames: _dated_sessions(frames, F.max("at")),
            "dated_at",
            output_time="latest",
            lag_ms=HOUR_MS + 10,
        ),
    )
)
_STAGES_IN_SQL: Final = tuple(
    replace(each, is_variation=True)
    for each in (
        Operator(
            f"tumbling, {IN_SQL}",
            _tumbling,
            "closed_at",
            event_time="closed_at",
            sql=f"""SELECT key, window.end AS closed_at, count(*) AS rows, sum(id) AS ids
                FROM views WATERMARK at {_DELAY} GROUP BY window(at, '1 hour'), key""",
        ),
        Operator(
            f"session, {IN_SQL}",
            _session,
            "closed_at",
            event_time="closed_at",
            lag_ms=1,
            sql=f"""SELECT key, session_window.end AS closed_at, count(*) AS rows, sum(id) AS ids
                FROM views WATERMARK at {_DELAY} GROUP BY session_window(at, '1 hour'), key""",
        ),
        Operator(
            f"inner join, {IN_SQL}",
            _joined,
            "viewed_at",
            sources=_PAIRS,
            event_time="viewed_at",
            lag_ms=_INTERVAL_MS,
            comes="at once",
            sql=f"""SELECT v.key, v.id AS view, v.at AS viewed_at, c.id AS click, c.at AS clicked_at
                FROM views WATERMARK at {_DELAY} AS v
                JOIN clicks WATERMARK at {_DELAY} AS c
                ON v.key = c.key AND v.at BETWEEN c.at - INTERVAL 1 HOUR AND c.at""",
        ),
        Operator(
            f"tumbling, by the latest, {IN_SQL}",
            lambda frames: _dated_windows(frames, F.max("at")),
            "dated_at",
            event_time="dated_at",
            output_time="latest",
            comes="before the watermark",
            lag_ms=HOUR_MS,
            sql=f"""SELECT key, window, max(at) AS dated_at, count(*) AS rows, sum(id) AS ids
                FROM views WATERMARK at {_DELAY} GROUP BY window(at, '1 hour'), key""",
        ),
    )
)


def _with_lateness(operator: Operator) -> Operator:
    return replace(
        operator,
        name=f"{operator.name}, late allowed",
        allowed_lateness="12 hours",
        is_variation=True,
        issue=(),
    )


OPERATORS: Final = (
    *_OPERATORS,
    *(
        each
        for operator in _OPERATORS
        if operator.name in {"tumbling", "session", "inner join"}
        for each in _with_strategies(operator)
    ),
    *(
        each
        for operator in _OPERATORS
        if operator.name in {"tumbling", "sliding", "session", "inner join", "dropDuplicates"}
        for each in _with_fates(operator)
    ),
    *_OUTPUT_TIMES,
    *_STAGES_IN_SQL,
    *(replace(each, name=f"{each.name}, late dropped", late="drop") for each in _STAGES_IN_SQL),
    *(_with_lateness(each) for each in _OPERATORS if each.name in {"tumbling", "sliding"}),
)
