"""Settings of Spark and of a pipeline on which a stage's promise depends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pyspark.sql import SparkSession

from spark_agent.client.spec import StageSpec, upstream
from spark_agent.exceptions import (
    UnsoundPlanError,
)
from spark_agent.jvm.nodes import Control, Node

_MOST_PERCENT: Final = 99
_DAY_MS: Final = 86_400_000


def check_settings(spark: SparkSession, controls: Sequence[Control]) -> None:
    """Check the settings of Spark that promises depend on. Raises `ValueError`."""
    several = "spark.sql.streaming.statefulOperator.allowMultiple"
    if str(spark.conf.get(several, "true")).lower() != "true":
        raise ValueError(
            f"{several} is off, so Spark does not give each operator its own watermark, which "
            f"a stage's promise relies on: leave it at true"
        )
    policy = spark.conf.get("spark.sql.streaming.multipleWatermarkPolicy", "min")
    if len(controls) > 1 and str(policy).lower() != "min":
        raise ValueError(
            f"spark.sql.streaming.multipleWatermarkPolicy is {policy!r}: with several calls of "
            f"watermarked() in one query it must be 'min'"
        )


def check_reuses_shuffles(spark: SparkSession) -> None:
    """Check that results and late rows can read one shuffle. Raises `ValueError`."""
    reuse = "spark.sql.exchange.reuse"
    if str(spark.conf.get(reuse, "true")).lower() != "true":
        raise ValueError(
            f"{reuse} is off, so Spark would read the source twice to put late rows aside, and a row "
            f"could be in both outputs, or in neither: leave it at true"
        )


def counts_state(spark: SparkSession) -> bool:
    """Return whether Spark counts the rows that its operators keep. If not, Spark reports zero."""
    counts = "spark.sql.streaming.stateStore.rocksdb.trackTotalNumberOfRows"
    return str(spark.conf.get(counts, "true")).lower() == "true"


def check_days(tree: Node, zone: str) -> None:
    """Check that a join over a day or more has days of equal length. Raises `UnsoundPlanError`."""
    longest_ms = max(
        (
            bound
            for node in tree.walk()
            if node.bounds is not None
            for bound in (node.bounds.left_ms, node.bounds.right_ms)
            if bound is not None
        ),
        default=0,
    )
    if longest_ms >= _DAY_MS and changes_offset(zone):
        raise UnsoundPlanError(
            f"a join's bounds are a day or more, and spark.sql.session.timeZone is {zone!r}, where "
            f"Spark adds a calendar day, which may have 25 hours, but drops a row after 24, so rows "
            f"that are on time would be lost. Set spark.sql.session.timeZone to UTC, or keep the bounds "
            f"below a day"
        )


def changes_offset(zone: str) -> bool:
    """Return whether clocks are changed in a time zone, in this century. Another text is a fixed offset:
    "+02:00".

    >>> [changes_offset(zone) for zone in ("America/New_York", "UTC", "Asia/Tokyo", "+02:00")]
    [True, False, False, False]
    """
    try:
        info = ZoneInfo(zone)
    except (ZoneInfoNotFoundError, ValueError):
        return False
    months = (
        datetime(year, month, 1, tzinfo=info)
        for year in range(2000, 2038)
        for month in range(1, 13)
    )
    return len({each.utcoffset() for each in months}) > 1


def check_percentile(stages: Mapping[str, StageSpec], stage: str, percentile: int) -> None:
    """Check that the upstream stages declare the percentile. Raises `ValueError`."""
    if type(percentile) is not int or not 1 <= percentile <= _MOST_PERCENT:
        raise ValueError(f"invalid percentile {percentile!r}: write 1 to {_MOST_PERCENT}")
    for above in sorted(upstream(stages, stage, ())):
        if percentile not in stages[above].percentiles:
            raise ValueError(
                f"stage {stage!r} reads {above!r}, which does not declare this percentile: add "
                f'"percentiles": [{percentile}] to {above!r} in the specification'
            )
