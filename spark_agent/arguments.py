"""Checks of a pipeline's arguments."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from pyspark.sql import SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter
from pyspark.sql.types import (
    ArrayType,
    CalendarIntervalType,
    DataType,
    MapType,
    NullType,
    StructType,
)

from spark_agent.client.spec import StageSpec
from spark_agent.exceptions import NO_CONNECT
from spark_agent.firing_frames import ON_TIME, VERSION
from spark_agent.jvm.checkpoint import Checkpoint
from spark_agent.jvm.writer import (
    ONCE,
    Trigger,
    format_of,
    is_async,
    option_of,
    output_mode_of,
    trigger_of,
)
from spark_agent.late_frames import FLAG
from spark_agent.soundness.output_times import DatedBy, OutputTime
from spark_agent.sources.kafka import FORMAT as KAFKA
from spark_agent.strategies import AnyStrategy, WallClock
from spark_agent.strategies.resolved import Resolved
from spark_agent.times import Duration, duration_ms

MIN_TTL_MS, MAX_TTL_MS = 1_000, 600_000
"""The shortest and the longest lease that the service grants."""
_LONGEST_LATENESS_MS: Final = 3_650 * 86_400_000
_UNSUPPORTED_TRIGGERS: Final[Mapping[str, str]] = {
    "ContinuousTrigger": "continuous processing has no micro-batches, and tidegauge's epochs are "
    "micro-batches",
    "RealTimeTrigger": "real-time mode does not finish a batch's tasks before the next batch",
}

_ACKS: Final = "kafka.acks"
_ACKNOWLEDGED: Final = (None, "all", "-1")
"""Values of `kafka.acks` with which all replicas in sync have a row before it counts as written."""


def check_is_writer(writer: object) -> None:
    """Check that the argument is a writer. Raises `ValueError`."""
    if not isinstance(writer, DataStreamWriter):
        raise ValueError(  # noqa: TRY004  (a wrong argument, like all that start() rejects)
            f"start() takes the writer that frame.writeStream… returns, not {writer!r}"
        )


def check_writer(writer: DataStreamWriter, *, bounded: bool) -> Trigger:
    """Check a writer's options, and return its trigger. Raises `ValueError`."""
    trigger = trigger_of(writer)
    if trigger.kind in _UNSUPPORTED_TRIGGERS:
        raise ValueError(
            f"the trigger is not supported: {_UNSUPPORTED_TRIGGERS[trigger.kind]}; use processingTime "
            f"or availableNow"
        )
    if bounded and trigger.kind == ONCE:
        raise ValueError(
            "a bounded query needs more than one batch to emit its last windows: use "
            "trigger(availableNow=True) instead of once=True"
        )
    if output_mode_of(writer) == "complete":
        raise ValueError(
            "complete mode rewrites every window in each batch, however old, so no watermark can "
            "hold for the query's output: use append, or update, and let the consumer keep the newest "
            "row of each window"
        )
    if is_async(writer):
        raise ValueError(
            "asyncProgressTrackingEnabled commits batches some time after they ran: leave it out"
        )
    _check_acknowledged(writer)
    return trigger


def _check_acknowledged(writer: DataStreamWriter) -> None:
    """Check that a batch's rows are in Kafka before it is committed. Raises `ValueError`."""
    acks = option_of(writer, _ACKS)
    if format_of(writer) == KAFKA and acks not in _ACKNOWLEDGED:
        raise ValueError(
            f"{_ACKS}={acks}: a batch would be committed before its rows are safe in Kafka, and the "
            f"watermark would cover rows that can be lost: leave it out, or set it to all"
        )


def check_early_not_bounded(stage: str, *, bounded: bool) -> None:
    """Check that a query of early results is not bounded. Raises `ValueError`."""
    if bounded:
        raise ValueError(
            f"stage {stage!r}: early results make nothing final: leave out bounded=True, and "
            f"use trigger(availableNow=True) for a query that ends"
        )


def check_early_passes(stage: str, late: str, allowed_lateness_ms: int) -> None:
    """Check that a query of early results leaves late rows to Spark. Raises `ValueError`."""
    if allowed_lateness_ms:
        raise ValueError(
            f"stage {stage!r}: early results have a query that corrects them: leave out "
            f"allowed_lateness here, and set it in the query that reports"
        )
    if late != "pass":
        raise ValueError(
            f"stage {stage!r}: rows that are late for early results are not late for the results: leave "
            f"out late={late!r} here, and set it in the query that reports"
        )


def check_flag(name: str, given: object) -> None:
    """Check an argument that is True or False: a text such as "no" is true. Raises `ValueError`."""
    if type(given) is not bool:
        raise ValueError(f"invalid {name} {given!r}: write True or False")


def check_late(late: object) -> None:
    """Check a treatment of late rows. Raises `ValueError`."""
    if late not in ("pass", "drop"):
        raise ValueError(
            f"invalid late {late!r}: write 'pass' or 'drop'. split_late() puts late rows aside"
        )


def check_tasks(tasks: object) -> None:
    """Check a number of tasks, or None. Raises `ValueError`."""
    if tasks is not None and (type(tasks) is not int or tasks < 1):
        raise ValueError(f"invalid tasks {tasks!r}: write a number of tasks, 1 or more")


def check_keeps_checkpoint(checkpoint: Checkpoint) -> None:
    """Check that a query that puts late rows aside has a checkpoint of its own. Raises `ValueError`."""
    if checkpoint.location is None:
        raise ValueError(
            "a query with late= or allowed_lateness needs a checkpoint, by which a repeated batch finds "
            "the same rows late: writer.option('checkpointLocation', …)"
        )


def check_can_fire(stage: str, rows: StructType, output_mode: str) -> None:
    """Check that windows can fire more than once, by their columns and the mode. Raises `ValueError`."""
    if output_mode != "append":
        raise ValueError(
            f"stage {stage!r}: with allowed_lateness, the agent sets the output mode, and the writer "
            f"has {output_mode!r}: leave outputMode() out"
        )
    names = {name.lower(): name for name in rows.names}
    for added in (ON_TIME, VERSION):
        if added in names:
            raise ValueError(
                f"stage {stage!r}: allowed_lateness adds a column {added!r}, and the rows have one: "
                f"rename {names[added]!r}"
            )
    for field in rows:
        if not _fits_parquet(field.dataType):
            raise ValueError(
                f"stage {stage!r}: column {field.name!r} is of type {field.dataType.simpleString()}, "
                f"which Parquet cannot keep until the window fires: cast it, or leave it out"
            )


def _fits_parquet(data_type: DataType) -> bool:
    """Return whether Parquet has a type. Names in a structure differ by more than their case."""
    match data_type:
        case StructType():
            names = {name.lower() for name in data_type.names}
            fields = [field.dataType for field in data_type]
            return bool(names) and len(names) == len(fields) and all(map(_fits_parquet, fields))
        case ArrayType():
            return _fits_parquet(data_type.elementType)
        case MapType():
            return _fits_parquet(data_type.keyType) and _fits_parquet(data_type.valueType)
        case _:
            return not isinstance(data_type, (CalendarIntervalType, NullType))


def allowed_lateness_ms(given: Duration | None) -> int:
    """Return an allowed lateness in ms. Raises `ValueError`."""
    found = 0 if given is None else duration_ms(given, name="allowed_lateness")
    if found > _LONGEST_LATENESS_MS:
        raise ValueError(
            f"invalid allowed_lateness {given!r}: at most 3,650 days are supported. To keep every "
            f"late row, put those beyond it aside with split_late()"
        )
    return found


def check_continues(stage: str, on_lost_checkpoint: str) -> None:
    """Check that versions of windows cannot begin anew. Raises `ValueError`."""
    if on_lost_checkpoint == "continue":
        raise ValueError(
            f"stage {stage!r}: with allowed_lateness, on_lost_checkpoint='continue' is not supported: a "
            f"new checkpoint would give windows versions below those that are written. Leave it out; "
            f"after a loss, start over with Pipeline.reset(), a new checkpoint and an empty output"
        )


def check_can_split(stage: str, columns: Sequence[str], *, is_random: bool) -> None:
    """Check that rows can be split, by their columns and their plan. Raises `ValueError`."""
    if FLAG in columns:
        raise ValueError(f"stage {stage!r}: split_late() adds a column {FLAG!r}: rename yours")
    if is_random:
        raise ValueError(
            f"stage {stage!r}: a random expression comes before split_late(), such as rand() or uuid(), "
            f"and Spark gives it other values for the late rows than for the rows on time: add it "
            f"after split_late(), or write it with the rows"
        )


def check_session(spark: SparkSession) -> None:
    """Refuse Spark Connect, and workers that run another Python. Raises `RuntimeError`."""
    if type(spark).__module__.startswith("pyspark.sql.connect"):
        raise RuntimeError(NO_CONNECT)
    worker = shutil.which(spark.sparkContext.pythonExec)
    if worker is None or Path(worker).parent != Path(sys.executable).parent:
        raise RuntimeError(
            f"Spark's Python workers would run {spark.sparkContext.pythonExec!r}, not "
            f"{sys.executable!r}, and lack its packages: set the environment variable "
            f"PYSPARK_PYTHON to sys.executable before the session starts"
        )


def check_lease_ttl(ttl_ms: int, given: object) -> None:
    """Check that the service grants leases of this length. Raises `ValueError`."""
    if not MIN_TTL_MS <= ttl_ms <= MAX_TTL_MS:
        raise ValueError(
            f"lease_ttl {given!r} is not between {MIN_TTL_MS // 1_000} s and {MAX_TTL_MS // 1_000} s"
        )


def check_url(url: object) -> None:
    """Check that the argument is a URL of a service. Raises `ValueError`."""
    if not isinstance(url, str) or not _is_url(url):
        raise ValueError(f"invalid url {url!r}: write it like http://host:8000")


def _is_url(url: str) -> bool:
    """Return whether a URL has the scheme http or https, a host, and a valid port or none.

    >>> [_is_url(f"http://{each}") for each in ("host:8000/below", "[::1]:80", "", "host:99999", "h:x")]
    [True, True, False, False, False]
    """
    try:
        parts = urlsplit(url)
        return parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def strategy_of(stage: StageSpec, strategy: AnyStrategy | None) -> AnyStrategy | None:
    """Return a source's strategy, if it is known already. Raises `ValueError` if it is given twice."""
    if strategy is not None and stage.watermark is not None:
        raise ValueError(
            f"stage {stage.name!r} has its watermark in the specification, {stage.watermark!r}: leave "
            f"strategy={strategy!r} out, or the watermark"
        )
    return stage.watermark if strategy is None else strategy


def check_output_time(
    stage: str,
    output_time: OutputTime | str | None,
    *,
    delay: Duration | None,
    longest: Duration | None,
) -> DatedBy:
    """Check the arguments for output times. Raises `ValueError`."""
    if output_time is None:
        raise ValueError(
            f"stage {stage!r}: longest= bounds the sessions of an output time: add "
            f"output_time='earliest', or leave longest= out"
        )
    try:
        found = OutputTime(output_time)
    except ValueError:
        choices = ", ".join(repr(each.value) for each in OutputTime)
        raise ValueError(
            f"stage {stage!r}: invalid output_time {output_time!r}: write one of {choices}"
        ) from None
    if delay is not None:
        raise ValueError(
            f"stage {stage!r}: output_time='{found}' has its distance behind the watermark from the "
            f"query's plan: leave delay={delay!r} out"
        )
    longest_ms = None if longest is None else duration_ms(longest, name="longest")
    if longest_ms is not None and not 0 < longest_ms <= _LONGEST_LATENESS_MS:
        raise ValueError(
            f"stage {stage!r}: invalid longest {longest!r}: write more than 0, and 3,650 days at most"
        )
    return DatedBy(found, longest_ms)


def check_clock_strategy(stage: StageSpec, strategy: object, *, is_wall_clock: bool) -> None:
    """Check that a source may promise by the clock. `is_wall_clock`: True if its event times have not a
    time zone. Raises `ValueError`.
    """
    if is_wall_clock:
        raise ValueError(
            f"stage {stage.name!r}: {strategy!r} promises by the clock, and its event time is a "
            f"timestamp_ntz, whose distance from the clock depends on a time zone that Spark does not "
            f"have: cast it before source(), .withColumn('at', F.col('at').cast('timestamp')), or use "
            f"another strategy"
        )
    if stage.has_idle_policy:
        raise ValueError(
            f"stage {stage.name!r} has an idle policy, and {strategy!r} advances without rows: leave "
            f"one of the two out"
        )
    if stage.percentiles:
        raise ValueError(
            f"stage {stage.name!r} declares percentiles, which {strategy!r} does not have: it promises "
            f"by the clock, for all shards alike. Leave them out, or use another strategy"
        )


def check_reads_rest(*, bounded: bool, may_wait_for_more: bool) -> None:
    """Check that a query reads what is left before it is the last one. Raises `ValueError`."""
    if bounded and may_wait_for_more:
        raise ValueError(
            "a bounded query makes its sources final once a trigger finds nothing, and with "
            "minOffsetsPerTrigger rows may be unread then: leave the option out of the last run"
        )


def check_clocks(strategies: Mapping[str, Resolved], *, may_wait_for_more: bool) -> None:
    """Check that a query's sources leave nothing unread for a while. Raises `ValueError`."""
    for stage, each in strategies.items():
        if may_wait_for_more and isinstance(each.clock, WallClock):
            raise ValueError(
                f"stage {stage!r}: with minOffsetsPerTrigger, rows may be unread while a trigger finds "
                f"nothing, and WallClock would pass them: leave the option out, or use another strategy"
            )
