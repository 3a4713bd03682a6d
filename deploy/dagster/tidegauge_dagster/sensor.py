"""The sensor."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from dagster import (
    DefaultSensorStatus,
    RunRequest,
    SensorDefinition,
    SensorEvaluationContext,
    SensorResult,
    SkipReason,
    TimeWindowPartitionsDefinition,
    sensor,
)

from spark_agent import Unavailable
from spark_agent.exceptions import WrongAddress
from spark_agent.times import instant_text
from tidegauge_dagster.partitions import Cursor, check_partitions, complete_partitions
from tidegauge_dagster.resource import TidegaugeResource


def _now() -> datetime:
    return datetime.now(UTC)


def watermark_sensor(
    *,
    job: str,
    stage: str,
    partitions: TimeWindowPartitionsDefinition,
    target: Any,  # noqa: ANN401  (Dagster has not a public type of all that a sensor may run)
    name: str | None = None,
    limit: int = 100,
    minimum_interval_seconds: int = 60,
    default_status: DefaultSensorStatus = DefaultSensorStatus.STOPPED,
    clock: Callable[[], datetime] = _now,
) -> SensorDefinition:
    """Return a sensor that requests a run of `target` for each partition that is in.

    A partition is in once the output watermark of `stage`, a stage of tidegauge's `job`, has reached its
    end. `partitions` are partitions of time, the ones of `target`. The sensor takes the resource
    `tidegauge`, a `TidegaugeResource`. At most `limit` runs are requested each time, the earliest first.

    Each partition is requested once in each generation of the job: a job that was reset computes its
    results anew, so its partitions are requested anew. A service that does not answer is polled again. A
    wrong job, stage or key fails the evaluation, and Dagster shows the error.

    Raises `TypeError` or `ValueError` for partitions that a watermark cannot complete, and for a limit
    below one.
    """
    checked = check_partitions(partitions)
    if limit < 1:
        raise ValueError(
            f"limit is {limit}: at least one run is requested each time, so set 1 or more"
        )

    @sensor(
        name=name or f"{job}_{stage}_watermark".replace("-", "_").replace(".", "_"),
        target=target,
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=default_status,
        description=f"Requests a run for each partition that {stage} of {job} has passed.",
    )
    def evaluate(
        context: SensorEvaluationContext, tidegauge: TidegaugeResource
    ) -> SensorResult | SkipReason:
        try:
            with tidegauge.client() as client:
                seen = client.show(job, stage)
        except WrongAddress:
            raise
        except Unavailable as error:
            return SkipReason(str(error))
        watermark_ms, generation = seen["output_watermark"], seen["generation"]
        if watermark_ms is None:
            return SkipReason(
                f"{stage} has not a watermark yet: see tidegauge explain {job} {stage}"
            )
        cursor = Cursor.read(context.cursor, generation)
        found = complete_partitions(
            checked, watermark_ms, clock(), cursor and cursor.partition, limit
        )
        if not found:
            return SkipReason(
                f"{stage} is at {instant_text(watermark_ms)}: not a further partition is in"
            )
        return SensorResult(
            run_requests=_requests(found, job, stage, generation),
            cursor=Cursor(generation, found[-1]).text(),
        )

    return evaluate


def _requests(partitions: Sequence[str], job: str, stage: str, generation: int) -> list[RunRequest]:
    return [
        RunRequest(
            run_key=f"{job}/{stage}/{generation}/{partition}",
            partition_key=partition,
            tags={"tidegauge/job": job, "tidegauge/stage": stage},
        )
        for partition in partitions
    ]
