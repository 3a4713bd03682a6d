"""Records of jobs for the ledger, which may reject one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from service.frontier.agreement import Agreement
from service.frontier.graph import StageWatermark
from service.ledger.port import JobRecord, Ledger, Recorded, RejectedValueError
from service.model.checkpoints import CheckpointChunk
from service.model.history import row_counts
from service.model.jobs import JobView


async def record_jobs(
    ledger: Ledger, records: Sequence[JobRecord], at_ms: int
) -> tuple[Mapping[str, Recorded], Mapping[str, RejectedValueError]]:
    """Record the jobs together; return the published states, and the errors of rejected jobs.

    If the ledger rejects a value, the jobs are recorded one by one, so that a job with such a value
    blocks none of the others.
    """
    try:
        return await ledger.record(records, at_ms), {}
    except RejectedValueError as error:
        if len(records) == 1:
            return {}, {records[0].job: error}
    taken: dict[str, Recorded] = {}
    rejected: dict[str, RejectedValueError] = {}
    for record in records:
        try:
            taken |= await ledger.record([record], at_ms)
        except RejectedValueError as error:
            rejected[record.job] = error
    return taken, rejected


def record_of(
    view: JobView,
    agreements: Mapping[str, Agreement],
    advances: Mapping[str, StageWatermark],
    epochs: Mapping[str, int],
    chunks: Sequence[CheckpointChunk],
    *,
    first: bool,
) -> JobRecord:
    """Return the record of a job that was read as `view`; `first`: at the first attempt."""
    watermarks = (*(stage.watermark for stage in view.stages.values()), *advances.values())
    return JobRecord(
        job=view.name,
        incarnation=view.incarnation,
        generation=view.generation,
        layout_version=view.layout_version,
        seen=view.revision,
        advances=advances,
        epochs=epochs,
        counts=row_counts(agreements, advances),
        chunks=chunks,
        # A record that leaves out a member must not miss that the member has returned meanwhile.
        # The first attempt takes the cheap way, which works unless another replica records.
        unless_newer=(first and not epochs)
        or any(watermark.idle for watermark in watermarks)
        or any(each.leaves_out for each in agreements.values()),
    )
