"""Parts of the bodies of many responses."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct, UnsetType

from service.frontier.timestamps import iso

Watermark = Annotated[
    int | None, Meta(description="Milliseconds since the Unix epoch, UTC; null: no watermark yet")
]


Count = Annotated[int, Meta(ge=0)]


Instant = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]


Next = Annotated[
    str | UnsetType,
    Meta(description="The `cursor` of the next page. Left out on the last page"),
]


HoldsBackNext = Annotated[
    list[str] | UnsetType,
    Meta(
        description="The downstream stages that do not wait for it yet: another input, or a range of"
        " their own, is lower. Once this has passed, they wait. Absent: none"
    ),
]


class ProblemBody(Struct, frozen=True):
    """An RFC 9457 problem. It may have more members."""

    type: Annotated[
        str,
        Meta(
            description="Address of the problem's page, relative to the service",
            extra_json_schema={"format": "uri-reference", "examples": ["/problems/stale-run"]},
        ),
    ]
    title: str
    status: int
    detail: str


class HealthBody(Struct, frozen=True):
    """The service answers."""

    status: Literal["ok"] = "ok"


def instant(at_ms: int | None) -> str | None:
    """Return an instant in the contract's form; None if it is None."""
    return None if at_ms is None else iso(at_ms)
