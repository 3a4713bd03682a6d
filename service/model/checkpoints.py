"""Promises as a checkpoint keeps them."""

from __future__ import annotations

from dataclasses import dataclass

CHUNK = 4_096
"""Promises in one `PromiseChunk`: what one changed promise costs a checkpoint is 32 KiB."""


@dataclass(frozen=True, slots=True)
class PromiseChunk:
    """A run of promises of a stage, as a checkpoint keeps them."""

    job: str
    stage: str
    incarnation: int
    generation: int
    layout_since: int
    chunk: int
    stamp: int
    """Rises with each change of the chunk within an incarnation: the ledger keeps the newest."""
    promises: bytes
    """Little-endian signed 64-bit integers, in the order of the layout."""
