"""The note of a checkpoint on its windows: what another start of the query must not change.

A window that was begun under other rules fires at the wrong time, or with a date that the stage has
promised not to write any more.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import astuple
from typing import Any

from pyspark.sql.types import StructType

from spark_agent.soundness.firings import Firing
from spark_agent.soundness.output_times import OutputTimes


def note_of(
    firing: Firing | None, rows: StructType, outputs: Mapping[str, OutputTimes]
) -> str | None:
    """Return the note of a query; None: its windows fire once, and are dated by their ends.

    `rows` are those that the query writes. `outputs` are the other output times, by stage.
    """
    note: dict[str, Any] = {}
    if firing is not None:
        note |= {
            "allowed_lateness_ms": firing.allowed_lateness_ms,
            "windows": astuple(firing.windows),
            "columns": rows.simpleString(),
            "keys": firing.keys,
        }
    if outputs:
        note["output_times"] = {stage: _rule(each) for stage, each in sorted(outputs.items())}
    return json.dumps(note) if note else None


def _rule(output: OutputTimes) -> list[object]:
    grid = None if output.windows is None else astuple(output.windows)
    return [grid, output.reach_us, output.reads_state]


def check_note(noted: str | None, wanted: str | None) -> None:
    """Check that a query goes on with the windows of its checkpoint. Raises `ValueError`."""
    if noted == wanted:
        return
    before, now = json.loads(noted or "{}"), json.loads(wanted or "{}")
    lateness_ms, wanted_ms = (each.get("allowed_lateness_ms", 0) for each in (before, now))
    if lateness_ms != wanted_ms:
        found = (
            f"has an allowed_lateness of {lateness_ms:,} ms, and this query one of {wanted_ms:,} ms"
        )
    elif before.get("windows") != now.get("windows"):
        found = "has other windows: their size, their slide or their offset is another"
    elif before.get("output_times") != now.get("output_times"):
        found = "has other output times: output_time=, longest=, or the length of the windows is another"
    else:
        found = (
            f"keeps windows with {before['columns']} by {', '.join(before['keys'])}, and this query "
            f"writes {now['columns']} by {', '.join(now['keys'])}"
        )
    raise ValueError(
        f"the checkpoint {found}, so windows would fire at the wrong time, or with the wrong values: "
        f"start over, with Pipeline.reset(), a new checkpoint and an empty output, or go on as before"
    )
