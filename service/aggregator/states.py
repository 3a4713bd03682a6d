"""A stage as readers see it."""

from __future__ import annotations

from dataclasses import dataclass

from service.model.jobs import Census, JobView, StageView


@dataclass(frozen=True, slots=True)
class StageState:
    """A stage as a reader sees it at one instant."""

    job: JobView
    name: str
    view: StageView
    census: Census

    @property
    def etag(self) -> str:
        """Changes with input, output or status, and never returns to an earlier value."""
        return f"{self.job.generation}-{self.view.version}"
