"""Publishing to readers on Redis what the ledger has recorded."""

from __future__ import annotations

from collections.abc import Mapping

from service.live.port import StateLostError
from service.live.redis import schema
from service.live.redis.packing import pack
from service.live.redis.steps import Steps, reply
from service.model.jobs import StageView


async def publish(
    steps: Steps,
    job: str,
    generation: int,
    revision: int,
    views: Mapping[str, StageView],
    epochs: Mapping[str, int],
) -> None:
    """Run the step `LiveStore.publish`."""
    keys = schema.job_keys(job)
    for name in epochs:
        keys += schema.stage_keys(job, name)
    raw = await steps.run(
        job,
        "publish",
        keys,
        "",
        pack(
            [
                schema.channel(job),
                str(generation),
                str(revision),
                [[name, schema.pack_view(view)] for name, view in views.items()],
                [[k, schema.epoch_text(e)] for k, e in enumerate(epochs.values(), 1)],
            ]
        ),
    )
    if reply.decode(raw)[1] == "lost":
        raise StateLostError(job)
