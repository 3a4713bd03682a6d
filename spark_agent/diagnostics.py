"""Logs what a stage whose watermark does not advance is waiting for."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Final

from spark_agent.checkpoint import Beginning
from spark_agent.client import StageWatermark

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


def log_unfinished(
    stage: str, inputs: Collection[str], watermarks: Mapping[str, StageWatermark]
) -> None:
    """Log why a stage is not final, although its bounded query has ended."""
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


def old_checkpoint_message(query: str, does: str, latest: object) -> str:
    """Return what is wrong with a query that runs a batch which the job has already.

    `does` is what the query does with which batch; `latest` is the last one that the job has.
    """
    return (
        f"tidegauge: query {query} {does}, but the job already has batches of its stages up to "
        f"{latest}: the query's checkpoint is new, was lost, or is an older copy. Rows that it rereads "
        f"are late, and windows that were closed come out again. Either restore the old checkpoint, or "
        f"call Pipeline.reset() and start over with an empty output and a new checkpoint"
    )


def skips_message(query: str, beginning: Beginning) -> str:
    """Return what is wrong with a query whose file sink has batches that its checkpoint has not."""
    return (
        f"tidegauge: query {query} begins with batch {beginning.next_batch}, but its output "
        f"{beginning.output} already has batches up to {beginning.written}, which its checkpoint has "
        f"not planned: Spark's file sink would skip them, and their rows would be lost. Either restore "
        f"the checkpoint that belongs to this output, or start over with an empty output and a new one"
    )


CONTINUES: Final = "With on_lost_checkpoint='continue' it would go on regardless"
