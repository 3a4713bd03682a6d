"""Sketches of event times, as workers send them."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import Any

from service.frontier.sketches import new_sketch


def sketch_of(times: Iterable[int]) -> bytes:
    """Pack a sketch of these event times."""
    sketch = new_sketch()
    for time in times:
        sketch.update(float(time))
    return sketch.serialize()


def pending(times: Iterable[int]) -> dict[str, Any]:
    """Return the member of a report for rows in flight."""
    listed = list(times)
    return {"count": len(listed), "event_times": base64.b64encode(sketch_of(listed)).decode()}
