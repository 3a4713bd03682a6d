"""Errors in a pipeline or a range, with messages that help its author to correct it."""

from __future__ import annotations


class FrontierError(ValueError):
    """Something that has no meaning in terms of watermarks."""


class InvalidRangeError(FrontierError):
    """A key range is not a range of the key space, or a set of them does not tile it."""


class InvalidPipelineError(FrontierError):
    """A pipeline is not a directed acyclic graph of well-formed stages."""

    def __init__(self, stage: str | None, detail: str) -> None:
        where = "the pipeline" if stage is None else f"stage {stage!r}"
        super().__init__(f"{where}: {detail}")
        self.stage = stage


class InvalidSketchError(FrontierError):
    """Bytes that are no sketch of event times."""
