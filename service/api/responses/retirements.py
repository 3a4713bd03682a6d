"""The response about a retirement."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from service.aggregator import Retiring
from service.api.responses.common import Watermark
from service.frontier.graph import StageWatermark, Status
from service.frontier.timestamps import MAX, to_wire


class StandBody(Struct, frozen=True):
    """The watermarks of a stage, before or after."""

    input_watermark: Watermark
    output_watermark: Watermark
    status: Status


class MoveBody(Struct, frozen=True):
    """A stage whose watermarks move."""

    stage: str
    before: StandBody
    after: StandBody


class RetiringBody(Struct, frozen=True):
    """The retirement of a range, with the watermarks that move by it at once."""

    job: str
    stage: str
    range: str
    retired: Annotated[
        bool, Meta(description="false: nothing was changed, by a dry run, or since it is final")
    ]
    promise: Annotated[
        int | None, Meta(description="Its own promise, which holds again with its next report")
    ]
    holder: Annotated[
        str | None, Meta(description="The worker with a lease on it: its next report ends this")
    ]
    moves: Annotated[
        list[MoveBody],
        Meta(description="Stages below move further as their own ranges report"),
    ]
    held_by: Annotated[
        str | None,
        Meta(
            description="The range of the stage that is the lowest then; null: none is left that the"
            " stage waits for, as in a final stage"
        ),
    ]


def retiring_body(job: str, stage: str, found: Retiring, *, dry_run: bool) -> RetiringBody:
    """Return a retirement."""
    view = found.view
    return RetiringBody(
        job,
        stage,
        view.name,
        view.retired or not (dry_run or view.promise == MAX),
        to_wire(view.promise),
        view.holder,
        [MoveBody(m.stage, _stand(m.before), _stand(m.after)) for m in found.moves],
        found.held_by,
    )


def _stand(watermark: StageWatermark) -> StandBody:
    return StandBody(to_wire(watermark.input), to_wire(watermark.output), watermark.status)
