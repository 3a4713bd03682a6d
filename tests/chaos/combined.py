"""Reports that bring their claim, as the claim, the report and the release that they stand for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tests.chaos.history import Exchange


def parts(record: Exchange) -> Iterator[Exchange]:
    """Yield what a record stands for: the record itself, unless it is a report with a claim.

    The parts have the record's times, one nanosecond apart, so that none is before the one it rests on.
    """
    claim = record.request.get("claim") if record.action == "report" else None
    if claim is None:
        yield record
        return
    is_conflict = record.status == 409 and record.answer["type"] == "/problems/lease-conflict"
    if is_conflict or record.may_have_happened:
        status = 201 if record.status == 200 else record.status
        request = {"ranges": list(record.request["ranges"]), **claim}
        yield replace(record, action="claim", request=request, status=status)
    if not is_conflict:
        yield replace(
            record,
            start_ns=record.start_ns + 1,
            request={**record.request, "token": token_of(record), "run": claim.get("run", 0)},
            answer=_reported(record),
        )
    if record.status == 200 and record.request.get("release"):
        request, answer = {"tokens": [token_of(record)]}, {"released": 1}
        start_ns = record.start_ns + 2
        yield replace(record, action="release", start_ns=start_ns, request=request, answer=answer)


def token_of(record: Exchange) -> str:
    """The token of the claimed lease; without an answer, one that is not known."""
    return record.answer["token"] if record.status == 200 else f"of request {record.number}"


def _reported(record: Exchange) -> Any:
    """The answer, with the denied ranges among the rejected ones: the report does not count for them."""
    if record.status != 200:
        return record.answer
    denied = [{"range": each["range"], "reason": "unknown"} for each in record.answer["denied"]]
    return {**record.answer, "rejected": [*record.answer["rejected"], *denied]}
