"""Remedies: the next thing to do about a problem, for the person on call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from service.frontier.health import Health

REMEDIES: Final[Mapping[Health, str]] = {
    Health.UNPUBLISHED: "Let the store take writes again: look at its free space, its connections and"
    " its log. The service retries until then, and workers go on meanwhile.",
    Health.FAILED: "Mend the cause, and start the query again: it goes on from its checkpoint.",
    # A second program would fence the first one.
    Health.NO_WORKER: "Start the program again, unless it is running: its workers claim the ranges."
    " Retire a range that is gone for good.",
    Health.SILENT: "Start the query, if it is not running. A shard that does not exist: take it out of"
    " the specification, or retire it. A shard without rows yet: give its source an idle policy.",
    Health.STALLED: "Look for a task that hangs, in Spark's page or the stack of the worker, and for a"
    " slow system behind it.",
}
"""The next thing to do, by the root cause. The runbook has a section for each."""

_SILENT_KEYS: Final = (
    "Start the query, if it is not running. If it is, look for the task of the range: each state"
    " partition reports as one key range, so the stage needs as many ranges as the query has partitions."
)


_NAMED = 3


def remedy(
    health: Health, *, is_keyed: bool, departed: Sequence[str] = (), run_holder: str = ""
) -> str:
    """Return the next thing to do about a root cause of a stage.

    `is_keyed`: it has key ranges. `departed`: the last holders of its ranges, whose leases have run out.
    `run_holder`: the holder of its last run, if this is known and they are not.

    >>> remedy(Health.FAILED, is_keyed=True)
    'Mend the cause, and start the query again: it goes on from its checkpoint.'
    >>> remedy(Health.NO_WORKER, is_keyed=False, departed=["exec-1", "exec-2"]).rpartition(". ")[2]
    'The last holders: exec-1, exec-2.'
    >>> remedy(Health.NO_WORKER, is_keyed=False, run_holder="driver-1").rpartition(". ")[2]
    'The last run was held by driver-1.'
    """
    found = _SILENT_KEYS if is_keyed and health is Health.SILENT else REMEDIES[health]
    if not departed:
        return f"{found} The last run was held by {run_holder}." if run_holder else found
    holders = "holder" if len(departed) == 1 else "holders"
    more = f" and {len(departed) - _NAMED} more" if len(departed) > _NAMED else ""
    return f"{found} The last {holders}: {', '.join(departed[:_NAMED])}{more}."
