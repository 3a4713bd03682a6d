"""Checks that all forms of a report share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from msgspec import UNSET

from service.api.exchange import check_name
from service.api.requests import AnyReport, KeyedReport, PlainKeyedReport
from service.errors import InvalidReportError
from service.frontier.timestamps import EARLIEST, LATEST, MAX, from_wire, is_timestamp
from service.model.leases import Claim
from service.model.reports import Column

_BULK: Final = 64
"""Number of numbers from which an array is faster than a list."""


def right(read: AnyReport, ranges: Sequence[str] | None) -> tuple[str, Claim | None]:
    """Return the right to report for these ranges (None: for all of a lease): a token, or a claim.

    Raises `InvalidReportError` unless there is one of the two.
    """
    if read.claim is None:
        return _token(read), None
    if read.token is not UNSET:
        raise InvalidReportError(
            "claim and token are both there: a claim makes a lease of its own; leave out one of them"
        )
    if ranges is None:
        raise InvalidReportError(
            "claim and columns are both there: a claim names its ranges in `ranges`"
        )
    for name in ranges:
        check_name("range", name, InvalidReportError)
    return "", read.claim.claim(ranges)


def _token(read: AnyReport) -> str:
    if read.token is UNSET:
        raise InvalidReportError(
            "token is missing: send the token of a lease, or `claim` to claim the ranges"
        )
    if read.release:
        raise InvalidReportError(
            "release is true, and claim is missing: a lease with a token is released by POST"
            " /v1/jobs/{job}/leases/release"
        )
    return read.token


def as_column(values: list[int]) -> Column:
    """Return numbers as an array, if they are many and each fits."""
    if len(values) < _BULK:
        return values
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError:
        return values


def are_times(values: Column) -> bool:
    """Return whether all are instants. May be False only because MAX is among them."""
    if isinstance(values, np.ndarray):
        return bool(values.min() >= EARLIEST and values.max() <= LATEST)
    return not values or (min(values) >= EARLIEST and max(values) <= LATEST)


def check_times(where: str, times: Mapping[str, int]) -> None:
    """Raise `InvalidReportError` if a value is not a time."""
    for member, value in times.items():
        if not is_timestamp(value):
            raise InvalidReportError(
                f"{where}.{member} is {value}: it must be milliseconds since the Unix epoch within the"
                f" years 0001 to 9999 ({EARLIEST} to {LATEST}), or {MAX}"
            )


def check_shard(where: str, has_watermark: bool, idle: bool, final: bool) -> None:
    """Raise `InvalidReportError` if the report of a shard contradicts itself, or is empty."""
    if idle and final:
        raise InvalidReportError(
            f"{where} is both idle and final: idle means that more may come, final that nothing will"
        )
    if not has_watermark and not (idle or final):
        raise InvalidReportError(f"{where}.watermark is missing: send a time, null, idle or final")


def check_idle(where: str, holds: Mapping[str, int]) -> None:
    """Reject an idle key range that keeps a hold: downstream stages would advance past the hold."""
    for component, time in holds.items():
        raise InvalidReportError(
            f"{where} is idle, and keeps a hold {component!r} at {time}: an idle key range holds nothing"
            " that it has not emitted; leave out the hold, or idle"
        )


def observed_input(read: PlainKeyedReport | KeyedReport) -> int:
    """Return the input watermark that caps the promises; MAX: the commit brings it."""
    if read.input_watermark is UNSET:
        if read.epoch is None:
            raise InvalidReportError(
                "input_watermark is missing: send the input watermark that this worker has itself"
                " observed (null: none yet); only with an epoch may it be left to the commit"
            )
        return MAX
    if isinstance(read.input_watermark, int):
        check_times("the report", {"input_watermark": read.input_watermark})
    return from_wire(read.input_watermark)
