"""A stage as published."""

from __future__ import annotations

from dataclasses import dataclass
from zlib import crc32

from service.aggregator.soft import SoftState
from service.frontier.timestamps import MIN
from service.model.jobs import Census, JobView, StageView


@dataclass(frozen=True, slots=True)
class StageState:
    """A stage as published, at one instant."""

    job: JobView
    name: str
    view: StageView
    census: Census
    soft: SoftState | None = None
    """None: not requested, or unavailable."""
    now_ms: int = 0
    """Instant of the read, on the wall clock."""

    @property
    def etag(self) -> str:
        """Entity tag of the watermark. Changes with input, output or status.

        A ledger that was lost, or restored from a backup, counts up to the same versions again. So the
        tag ends with a checksum of the three: equal tags of two ledgers name equal watermarks.
        """
        here = self.view.watermark
        shown = f"{here.input} {here.output} {here.status.value}"
        return f"{self.version_tag}-{crc32(shown.encode()):08x}"

    @property
    def version_tag(self) -> str:
        """The tag without its checksum, for clients that derive it from `generation` and `version`."""
        return f"{self.job.generation}-{self.view.version}"

    def percentile(self, percentage: int) -> int:
        """Return a percentile watermark, at least the output watermark; `MIN`: unknown."""
        found = None if self.soft is None else self.soft.percentiles.get(percentage)
        return MIN if found is None else max(found, self.view.watermark.output)
