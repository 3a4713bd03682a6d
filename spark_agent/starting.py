"""What must hold when a query starts, given the job's specification and watermarks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from pyspark.sql import SparkSession

from spark_agent import plan
from spark_agent.checks import QueryStages
from spark_agent.client import StageWatermark
from spark_agent.spec import StageSpec, upstream

_MOST_PERCENT: Final = 99


class FinalSourceError(ValueError):
    """A source is final: it has promised that it emits nothing more."""


def check_not_final(
    job: str,
    query_stages: QueryStages,
    watermarks: Mapping[str, StageWatermark] | None,
    *,
    bounded: bool,
) -> None:
    """Refuse to run a final source again, but let an interrupted bounded run finish."""
    if watermarks is None:
        return
    final = [each for each in query_stages.sources if each in watermarks and watermarks[each].final]
    unfinished = [
        each for each in query_stages.promises if each in watermarks and not watermarks[each].final
    ]
    if not final or (bounded and unfinished):
        return
    raise FinalSourceError(
        f"source {final[0]!r} of job {job!r} is final: a bounded query has promised that "
        f"nothing more comes from it, so anything it read now would be late. To run it again, "
        f"start the job over with Pipeline.reset() or `tidegauge reset {job}`, with new "
        f"checkpoints and an empty output. For a job that runs every day, leave out bounded=True"
    )


def check_inputs_final(
    stages: Mapping[str, StageSpec],
    query_stages: QueryStages,
    watermarks: Mapping[str, StageWatermark] | None,
) -> None:
    """Refuse a last run that reads what is there now, while the stages above it still go on."""
    if watermarks is None or query_stages.sources:
        return
    for stage in query_stages.promises:
        for other in sorted(upstream(stages, stage, query_stages.promises)):
            if other in watermarks and not watermarks[other].final:
                raise ValueError(
                    f"stage {stage!r} would end too early: a bounded availableNow query reads what "
                    f"is there at its start, but its upstream stage {other!r} is not final yet. "
                    f"Start it once the query of {other!r} has ended, leave out bounded=True, or "
                    f"let it wait: trigger(processingTime='0 seconds')"
                )


def caps_ms(
    stages: Mapping[str, StageSpec],
    query_stages: QueryStages,
    watermarks: Mapping[str, StageWatermark] | None,
) -> dict[str, int | None]:
    """Cap the input watermarks of an `availableNow` run's stages that read other queries' output.

    Such a run reads what was there at its start. A watermark that another query publishes later
    covers rows that this run will not read. One published before the start does not.
    """
    executed = {*query_stages.sources, *query_stages.promises}
    caps_ms: dict[str, int | None] = {}
    for stage in query_stages.promises:
        others = upstream(stages, stage, executed)
        if not others:
            continue
        if watermarks is None:
            caps_ms[stage] = None
        elif not query_stages.sources:
            caps_ms[stage] = watermarks[stage].input_ms
        else:
            outputs = [watermarks[other].output_ms for other in others]
            known = [output for output in outputs if output is not None]
            caps_ms[stage] = min(known) if len(known) == len(outputs) else None
    return caps_ms


def check_settings(spark: SparkSession, controls: Sequence[plan.Control]) -> None:
    """Refuse settings of Spark by which a promise would not hold. Raises `ValueError`."""
    several = "spark.sql.streaming.statefulOperator.allowMultiple"
    if str(spark.conf.get(several, "true")).lower() != "true":
        raise ValueError(
            f"{several} is off. Then Spark does not give each operator its own watermark, which "
            f"a stage's promise relies on: leave it at true"
        )
    policy = spark.conf.get("spark.sql.streaming.multipleWatermarkPolicy", "min")
    if len(controls) > 1 and str(policy).lower() != "min":
        raise ValueError(
            f"spark.sql.streaming.multipleWatermarkPolicy is {policy!r}: with several calls of "
            f"watermarked() in one query it must be 'min'"
        )


def check_percentile(stages: Mapping[str, StageSpec], stage: str, percentile: int) -> None:
    """Refuse a percentile that the stages above do not declare. Raises `ValueError`."""
    if type(percentile) is not int or not 1 <= percentile <= _MOST_PERCENT:
        raise ValueError(f"percentile {percentile!r} is not one: write 1 to {_MOST_PERCENT}")
    for above in sorted(upstream(stages, stage, ())):
        if percentile not in stages[above].percentiles:
            raise ValueError(
                f"stage {stage!r} reads {above!r}, which does not declare this percentile: add "
                f'"percentiles": [{percentile}] to {above!r} in the specification'
            )
