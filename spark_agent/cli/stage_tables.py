"""Tables of a job's stages and of a stage's ranges. Does not import Spark."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from rich.text import Text

from spark_agent.cli.common import print_table
from spark_agent.cli.health import Throttled, range_text, stage_text, style_of
from spark_agent.cli.tables import Column, table_lines
from spark_agent.client.responses import ProblemLine, RangeAnswer, SnapshotAnswer, WatermarkAnswer
from spark_agent.times import duration_text, instant_text, lag_text

NO_RANGES: Final = "none of its own"
"""The ranges of a passthrough stage, as the page writes them."""
_KEY_RANGE: Final = len("e0000000-100000000")
"""Width of the longest name of a key range: a shortened one names none."""
_HELD_BY: Final = (
    Column("slowest ranges", kind="name", least=_KEY_RANGE),
    Column("condition"),
    Column("promise"),
    Column("holds", 2),
    Column("holder", 1, kind="name", least=10),
    Column("reported at", 3),
)
_RANGES: Final = (
    Column("range", kind="name", least=_KEY_RANGE),
    Column("condition"),
    Column("promise"),
    Column("holds", 2),
    Column("holder", 1, kind="name", least=10),
    Column("lease ends in", 3, needs="holder"),
    Column("reported at", 4),
)
_STAGES: Final = (
    Column("stage", kind="name"),
    Column("state"),
    Column("input watermark", 3),
    Column("output watermark"),
    Column("lag", 1, right=True),
    Column("system lag", 2, right=True),
    Column("reported", 4, right=True),
    Column("leased", 5, right=True, needs="reported"),
    Column("late", right=True, usual="0"),
)


def stages_data(
    found: SnapshotAnswer, problems: Sequence[ProblemLine], throttled: Throttled
) -> Mapping[str, object]:
    """Return a job's stages, its problems and the numbers of throttled shards, for programs."""
    watermarks = list(found["watermarks"].values())
    return {
        "job": found["job"],
        "generation": found["generation"],
        "stages": watermarks,
        "problems": problems,
        "throttled": {stage: len(shards) for stage, shards in throttled.items()},
    }


def print_stages(
    watermarks: Mapping[str, WatermarkAnswer], throttled: Throttled, *, wide: bool
) -> None:
    """Print the stages of a job, or one of them."""
    rows = [_row(name, each, len(throttled.get(name, ()))) for name, each in watermarks.items()]
    print_table(_STAGES, rows, wide=wide)


def print_held_by(
    ranges: Iterable[RangeAnswer],
    stage_health: str | None,
    throttled: frozenset[str],
    *,
    wide: bool,
) -> None:
    """Print the ranges that hold a stage back."""
    rows = [
        (
            each["range"],
            range_text(each, stage_health, throttled),
            instant_text(each["promise"]),
            _holds(each),
            each["holder"] or "none",
            _reported(each),
        )
        for each in ranges
    ]
    print_table(_HELD_BY, rows, wide=wide)


def print_ranges(
    ranges: Iterable[RangeAnswer],
    stage_health: str | None,
    throttled: frozenset[str],
    *,
    wide: bool,
) -> None:
    """Print the ranges of a stage."""
    rows = [
        (
            each["range"],
            range_text(each, stage_health, throttled),
            instant_text(each["promise"]),
            _holds(each),
            each["holder"] or "none",
            duration_text(each["expires_in_ms"]),
            _reported(each),
        )
        for each in ranges
    ]
    print_table(_RANGES, rows, wide=wide)


def moving_lines(
    stages: Mapping[str, WatermarkAnswer],
    throttled: Throttled,
    slowest: str,
    width: int | None,
) -> list[Text]:
    """Return the stages of a job as it moves, as lines of at most `width` cells."""
    styles = [
        style_of(each.get("health")) or ("yellow" if name == slowest else None)
        for name, each in stages.items()
    ]
    rows = [_row(name, each, len(throttled.get(name, ()))) for name, each in stages.items()]
    return table_lines(_STAGES, rows, width, styles)


def _row(name: str, stage: WatermarkAnswer, throttled: int) -> Sequence[str]:
    ranges, late = stage["ranges"], stage.get("late", 0)
    total = ranges["total"]
    return (
        name,
        stage_text(stage, throttled),
        input_text(stage["input_watermark"]),
        instant_text(stage["output_watermark"]),
        lag_text(stage["output_watermark"], stage.get("data_lag_ms")),
        duration_text(stage.get("system_lag_ms")),
        f"{ranges['reported']}/{total}" if total else NO_RANGES,
        f"{ranges['leased']}/{total}" if total else "",
        "" if late is None else str(late),
    )


def input_text(input_ms: int | None) -> str:
    """Write an input watermark. A source does not have one, and does not wait for one.

    >>> input_text(None), input_text(0)
    ('none', '1970-01-01T00:00:00.000Z')
    """
    return "none" if input_ms is None else instant_text(input_ms)


def _reported(each: RangeAnswer) -> str:
    """Write the instant of a range's last report, which the live store loses without the promise."""
    return each["reported_at"] or ("never" if each["promise"] is None else "unknown")


def _holds(each: RangeAnswer) -> str:
    return ", ".join(f"{name} {instant_text(at)}" for name, at in each["holds"].items())
