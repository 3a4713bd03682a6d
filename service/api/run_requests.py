"""The bodies of requests about runs and retirements."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from service.frontier.health import Outcome
from service.model.pipeline_spec import MAX_STAGES, ONLY_AT_THE_END, Name

Holder = Name
_TEXT = r"^[^\x00]*$" + ONLY_AT_THE_END
"""Text that Postgres stores: any without a NUL."""
_LINE = r"^[^\x00-\x1F\x7F]*[^\x00-\x20\x7F\xA0][^\x00-\x1F\x7F]*$" + ONLY_AT_THE_END
"""One line of text, with at least one printed character: it stands within explanations."""

Address = Annotated[
    str,
    Meta(
        max_length=2_000,
        pattern=r"^https?://[^\s\x00]+$" + ONLY_AT_THE_END,
        description="An HTTP URL",
    ),
]
"""Only HTTP: the page makes links of these URLs, and a browser would run one of `javascript:`."""


class OpenRun(Struct, frozen=True, forbid_unknown_fields=True):
    """The start of a program that executes some stages."""

    stages: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=MAX_STAGES)]
    holder: Holder
    program: (
        Annotated[str, Meta(max_length=256, pattern=_TEXT, description="Its name, for display")]
        | None
    ) = None
    links: (
        Annotated[
            dict[Annotated[str, Meta(min_length=1, max_length=64, pattern=_TEXT)], Address],
            Meta(
                max_length=10,
                description="Addresses of its pages, by name",
                extra_json_schema={"examples": [{"spark": "http://driver:4040"}]},
            ),
        ]
        | None
    ) = None


class EndRun(Struct, frozen=True, forbid_unknown_fields=True):
    """The end of a run."""

    outcome: Annotated[
        Outcome,
        Meta(
            description="`finished`: it has done all its work; `stopped`: it was stopped; `failed`"
        ),
    ]
    because: (
        Annotated[str, Meta(max_length=1_000, pattern=_TEXT, description="The program's reason")]
        | None
    ) = None


class Retire(Struct, frozen=True, forbid_unknown_fields=True):
    """The retirement of a range that is gone for good."""

    because: Annotated[
        str,
        Meta(min_length=1, max_length=500, pattern=_LINE, description="The reason, for the audit"),
    ]
    dry_run: Annotated[
        bool, Meta(description="true: show the watermarks that would move, and change nothing")
    ] = False
