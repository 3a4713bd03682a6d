"""The errors with which both live stores reject a step."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from service.errors import (
    EpochsWaitingError,
    InputAheadError,
    InvalidReportError,
    InvalidRequestError,
    LeaseConflictError,
    LeaseLostError,
    PayloadTooLargeError,
    StaleEpochError,
    StaleRunError,
    UnknownRangeError,
    UnknownStageError,
)
from service.frontier.timestamps import MIN, to_wire
from service.model.leases import Denied, LostReason
from service.model.reports import MAX_REPORTED, Report


def unknown_stage(job: str, stage: str) -> UnknownStageError:
    """Return the error: the job does not have the stage."""
    return UnknownStageError(f"job {job!r} has no stage {stage!r}")


def unknown_range(stage: str, name: str) -> UnknownRangeError:
    """Return the error: the stage does not have the range."""
    return UnknownRangeError(f"stage {stage!r} has no range {name!r}")


def no_ranges(stage: str) -> InvalidRequestError:
    """Return the error: a passthrough has no ranges to claim or report for."""
    return InvalidRequestError(f"stage {stage!r} is a passthrough: it has no ranges")


def none_granted(stage: str, denied: Sequence[Denied], total: int) -> LeaseConflictError:
    """Return the error: none of the claimed ranges could be granted."""
    return LeaseConflictError(
        f"none of {total} ranges of stage {stage!r} could be granted", denied, total
    )


def unknown_lease(stage: str) -> LeaseLostError:
    """Return the error: the token is unknown."""
    return LeaseLostError(f"the token covers no range of stage {stage!r}", reason="unknown")


def lost_lease(reason: LostReason) -> LeaseLostError:
    """Return the error: the lease has ended."""
    return LeaseLostError(f"the lease is {reason}: claim the ranges again", reason=reason)


def spoken_for_all(report: Report, count: int) -> Report:
    """Return a packed report with a promise for each of the `count` ranges of its lease.

    Raises `InvalidReportError` for a wrong number of entries, `PayloadTooLargeError` for too many
    ranges, which a report without columns does not show.
    """
    promises = report.promises
    if isinstance(promises, int):
        if count > MAX_REPORTED:
            raise PayloadTooLargeError(
                f"the lease is on {count} ranges, and a report carries at most {MAX_REPORTED}: claim"
                " them under several leases, or send `ranges`"
            )
        return msgspec.structs.replace(report, promises=np.full(count, promises, dtype=np.int64))
    if len(promises) != count:
        raise InvalidReportError(
            f"the columns have {len(promises)} entries, and the lease is on {count} ranges: send one"
            " for each, in the order of `granted`; if the layout has changed since, claim again"
        )
    return report


def none_covered(stage: str, rejected: Sequence[tuple[str, LostReason]]) -> LeaseLostError:
    """Return the error: the lease covers none of the reported ranges."""
    return LeaseLostError(
        f"the token covers none of these {len(rejected)} ranges of stage {stage!r}",
        reason=rejected[0][1],
    )


def stale_run(stage: str, ours: int, theirs: int) -> StaleRunError:
    """Return the error: the stage belongs to another run (0: to none)."""
    if not ours:
        detail = f"stage {stage!r} is not of run {theirs}, since it does not have a run: open one"
    elif not theirs:
        detail = f"stage {stage!r} belongs to run {ours}: the request has to name its run"
    else:
        detail = f"stage {stage!r} belongs to run {ours}, not to run {theirs}"
    return StaleRunError(detail, ours or None)


def stale_epoch(stage: str, epoch: int, last: int | None) -> StaleEpochError:
    """Return the error: the epoch is already committed, or older than the last committed one."""
    return StaleEpochError(
        f"epoch {epoch} of stage {stage!r} is over: the last committed one is {last}",
        last_epoch=last,
    )


def epochs_waiting(stage: str, count: int) -> EpochsWaitingError:
    """Return the error: too many epochs wait."""
    return EpochsWaitingError(
        f"{count} epochs of stage {stage!r} wait for their commit; commit them first"
    )


def input_ahead(stage: str, observed: int, published: int) -> InputAheadError:
    """Return the error: this input watermark was never published."""
    where = "has none yet" if published == MIN else f"is at {published}"
    return InputAheadError(
        f"input_watermark {observed} is ahead of the input of stage {stage!r}, which {where}",
        input_watermark=to_wire(published),
    )


def uncapped(stage: str, epoch: int) -> InvalidRequestError:
    """Return the error: the commit lacks the input watermark that its reports need."""
    return InvalidRequestError(
        f"stages.{stage}.input_watermark is missing: ranges have reported epoch {epoch}"
        " without one, and it caps what they promise"
    )
