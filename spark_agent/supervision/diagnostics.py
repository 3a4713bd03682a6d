"""Logs what a stage whose watermark does not advance is waiting for."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Final

from spark_agent.client.client import StageWatermark
from spark_agent.client.errors import LimitReached, StaleRun, UnknownStage
from spark_agent.jvm.checkpoint import Beginning
from spark_agent.jvm.progress import cause_line
from spark_agent.started_query import StartedQuery

_log: Final = logging.getLogger("spark_agent")
_MOST_SHOWN: Final = 5


def log_missing_inputs(
    stage: str, inputs: Collection[str], watermarks: Mapping[str, StageWatermark]
) -> None:
    """Log why a stage has no input watermark. `inputs` are all stages that it depends on."""
    missing = [each for each in inputs if each in watermarks and watermarks[each].output_ms is None]
    _log.warning(
        "stage %s has no input watermark, so none of its windows close: %s has promised nothing yet. "
        "Every shard of a source must have rows or be idle (by its policy), and every stage needs a "
        "query that executes it",
        stage,
        ", ".join(sorted(missing)) or "one of its inputs",
    )


def log_silence(query: str, stages: Collection[str], epoch: int, rows: int) -> None:
    """Log that a batch has read rows, but none of its tasks has reported."""
    _log.warning(
        "query %s, batch %d: it has read %d rows, but no task has reported, so it advances no "
        "watermark. Stages: %s. In foreachBatch, read the rows, and from the thread that it is called "
        "in: the tasks of a thread of your own do not carry their query and batch",
        query,
        epoch,
        rows,
        ", ".join(stages),
    )


def log_if_unfinished(query: StartedQuery, watermarks: Mapping[str, StageWatermark]) -> None:
    """Log why stages of a query that has ended are unfinished, if that is unexpected.

    Without `watermarks`, the service is unavailable.
    """
    for stage, inputs in query.stages.inputs.items():
        here = watermarks.get(stage)
        if here is not None and here.final:
            continue
        if query.bounded:
            _log_unfinished(stage, inputs, watermarks)
        elif here is not None and here.input_ms is None:
            log_missing_inputs(stage, inputs, watermarks)


def _log_unfinished(
    stage: str, inputs: Collection[str], watermarks: Mapping[str, StageWatermark]
) -> None:
    waits = [each for each in inputs if each in watermarks and not watermarks[each].final]
    if waits:
        why = f"it waits for {', '.join(sorted(waits))}, not final yet"
    elif stage in watermarks:
        why = "the query was stopped before that"
    else:
        why = "the aggregator is unavailable"
    _log.error(
        "stage %s: its bounded query has ended, but the stage is not final, so its last windows did "
        "not come out: %s. Fix that and run the query again",
        stage,
        why,
    )


def log_unreported(query: str, stages: Collection[str]) -> None:
    """Log that the service has not taken the reports of an ended query's last batches."""
    _log.warning(
        "query %s has ended, and the service has not taken its last reports: it is away, or another "
        "query holds its stages' ranges. Nothing is early. But a shard without new rows stands "
        "still until its next row, until a bounded run makes it final, or, if its folder is complete, "
        "until the next start. Stages: %s",
        query,
        ", ".join(stages),
    )


def fenced_message(query: str, stages: Collection[str], error: StaleRun) -> str:
    """Return why a query fails whose stages another driver has taken over."""
    holder = error.problem.get("holder")
    by = f" by {holder}" if holder else ""
    return (
        f"tidegauge: query {query} is fenced: its stages ({', '.join(stages)}) were taken "
        f"over{by}. {error.problem.get('detail', error)}. The job would lack "
        f"whatever it wrote from now on. If two drivers run this pipeline, stop one of "
        f"them; with on_fenced='continue' the query would go on regardless"
    )


def newer_run_message(query: str, run: int) -> str:
    """Return the message of a query that goes on under another run of its own.

    >>> print(newer_run_message("hours", 9)[:64])
    query hours goes on as run 9: the service was slow and opened it
    """
    return (
        f"query {query} goes on as run {run}: the service was slow and opened it for a request that "
        f"was repeated meanwhile. Tasks are of the earlier run, and the driver reports in their place, "
        f"until the next start"
    )


def removed_message(query: str, error: UnknownStage) -> str:
    """Return why a query fails one of whose stages was taken out of the specification."""
    return (
        f"tidegauge: query {query} executes a stage that the job has no more: "
        f"{error}. Its specification was replaced while the query ran. Declare the stage again, "
        f"or start the query of the new pipeline"
    )


def limit_message(query: str, error: LimitReached) -> str:
    """Return why a query fails whose shards, or whose job, exceed a limit of the service."""
    return (
        f"tidegauge: query {query} cannot go on within a limit of the service: {error}. A watermark "
        f"without its shards would pass their rows, so no epoch is committed. Raise that setting of the "
        f"service, or have fewer shards or key ranges; then start the query again from its checkpoint"
    )


def added_shards_message(query: str, stage: str, shards: Collection[str]) -> str:
    """Return why a bounded query fails below whose source shards were added."""
    shown = ", ".join(sorted(shards)[:_MOST_SHOWN]) + (", …" if len(shards) > _MOST_SHOWN else "")
    return (
        f"tidegauge: query {query} has read everything, but its source {stage} cannot become final: "
        f"shards were added to its specification while the query ran ({shown}), and the query does not "
        f"report for them. Start it again with the new specification, from its checkpoint; or take "
        f"those shards out of the specification"
    )


def reset_message(job: str) -> str:
    """Return why a query fails whose job has begun a new generation."""
    return (
        f"tidegauge: job {job!r} was reset, or declared anew, while this query ran: its watermarks "
        f"begin again, and what the query has read and written is of the time before. Start it with a "
        f"new checkpoint and an empty output"
    )


def lost_message(query: str) -> str:
    """Return what has ended a query whose JVM was killed, or has crashed.

    >>> lost_message("q")[:57]
    'tidegauge: query q has ended: the connection to Spark is '
    """
    return (
        f"tidegauge: query {query} has ended: the connection to Spark is lost, since its JVM was killed "
        f"or has crashed. Nothing else is lost: start the query again from its checkpoint"
    )


def older_ledger_message(query: str, run: int, current: int) -> str:
    """Return why a query fails whose run is later than any that the service has of its stages."""
    return (
        f"tidegauge: query {query} has run {run}, but the newest run of its stages in the service "
        f"is {current}: its ledger was restored from an older backup while this query ran. Start "
        f"the query again from its checkpoint, which is then compared with what the job has"
    )


def generation_message(job: str, query: str, its: int, now: int) -> str:
    """Return what is wrong with a query that is of another generation than its job is in now."""
    found = (
        f"tidegauge: query {query} is of generation {its} of job {job!r}, by its checkpoint, but the "
        f"job is in generation {now}: "
    )
    if its < now:
        return (
            f"{found}it was reset, or declared anew, so what the query has read and written is of the "
            f"time before. Start it with a new checkpoint and an empty output"
        )
    return (
        f"{found}the service's ledger was lost, or restored from a backup from before a reset. Its "
        f"watermarks are of other batches, so windows would close too early. Stop the job's queries and "
        f"begin the generation again, with `tidegauge reset {job} --generation {its}`. Then start them "
        f"from their checkpoints: the watermarks begin anew, and catch up with them"
    )


def forgotten_shards_message(query: str, sources: Collection[str], its: int, now: int) -> str:
    """Return why a query with dynamic sources cannot go on after the ledger was lost or restored."""
    return (
        f"tidegauge: query {query} has had run {its}, but the newest run of its stages in the "
        f"service is {now}: its ledger was lost, or restored from an older backup. So it "
        f"lacks the shards that have joined {', '.join(sorted(sources))}, and the watermark would pass "
        f"those that are quiet now. Add them to the specification's shards, with Pipeline(…, "
        f"replace=True), and start the query once with on_lost_checkpoint='continue'; or call "
        f"Pipeline.reset() and start over with an empty output and a new checkpoint"
    )


def forgotten_epochs_message(query: str, acknowledged: int, epoch: int | None) -> str:
    """Return why a query with dynamic sources fails whose ledger was restored while it runs."""
    found = "no epoch" if epoch is None else f"epoch {epoch}"
    return (
        f"tidegauge: query {query} has committed epoch {acknowledged}, but the service's ledger has "
        f"{found}: it was restored from an older backup while the query ran. Shards that have joined "
        f"since then are forgotten, and the watermark would pass those that are quiet. Start the query "
        f"again from its checkpoint, which has them: its new run claims them before anything counts"
    )


def skips_message(query: str, beginning: Beginning) -> str:
    """Return what is wrong with a query whose file sink has batches that its checkpoint has not."""
    return (
        f"tidegauge: query {query} begins with batch {beginning.next_batch}, but its output "
        f"{beginning.output} already has batches up to {beginning.written}, which its checkpoint has "
        f"not planned: Spark's file sink would skip them, and their rows would be lost. Either restore "
        f"the checkpoint that belongs to this output, or start over with an empty output and a new one"
    )


def supervisor_failed_message(query: str, error: Exception) -> str:
    """Return the message of a query whose supervisor has failed by an unexpected error.

    >>> supervisor_failed_message("q", KeyError("a"))
    "tidegauge: query q: its supervisor has failed, and nothing reports for it: KeyError: 'a'"
    """
    cause = f"{type(error).__name__}: {cause_line(str(error))}"
    return (
        f"tidegauge: query {query}: its supervisor has failed, and nothing reports for it: {cause}"
    )
