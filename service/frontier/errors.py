"""Errors in a pipeline or a range, with messages for its author."""

from __future__ import annotations


class FrontierError(ValueError):
    """A value without a meaning in terms of watermarks."""


class InvalidRangeError(FrontierError):
    """A key range is not within the key space, or a set of ranges does not tile it."""


class InvalidPipelineError(FrontierError):
    """A pipeline is not a directed acyclic graph of well-formed stages."""

    def __init__(self, stage: str | None, detail: str) -> None:
        where = "the pipeline" if stage is None else f"stage {stage!r}"
        super().__init__(f"{where}: {detail}")
        self.stage = stage


class InvalidSketchError(FrontierError):
    """The bytes are not a sketch of event times."""
