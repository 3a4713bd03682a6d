"""Promises in a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

CHUNK = 4_096
"""Promises in one `PromiseChunk`: one changed promise adds 32 KiB to a checkpoint."""


@dataclass(frozen=True, slots=True)
class PromiseChunk:
    """Consecutive promises of a stage, in a checkpoint."""

    job: str
    stage: str
    incarnation: int
    generation: int
    layout_since: int
    chunk: int
    stamp: int
    """Rises with each change of the chunk within an incarnation. The ledger keeps the newest chunk."""
    promises: bytes
    """Little-endian signed 64-bit integers, in the order of the layout."""
