"""Records of several jobs, of which the ledger may reject one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from service.ledger.port import JobRecord, Ledger, Recorded, RejectedValueError


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
