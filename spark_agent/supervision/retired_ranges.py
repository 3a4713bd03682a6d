"""Ranges that an operator has retired, which the driver's reports of facts leave out."""

from __future__ import annotations

from collections.abc import Mapping

from spark_agent.client.client import Client


class RetiredRanges:
    """The retired ranges of a job's stages, read from the service once in each step that needs them.

    Each report of a range ends its retirement. So the driver reports for a retired range only what a
    query has read of it: a dead shard would be waited for again within seconds. A range that is retired
    between this look-up and a report of the same step is still reported.
    """

    def __init__(self, client: Client, job: str) -> None:
        self._client = client
        self._job = job
        self._counts: Mapping[str, int] | None = None
        self._names: dict[str, frozenset[str]] = {}

    def begin_step(self) -> None:
        """Forget the last step's answers."""
        self._counts = None
        self._names.clear()

    def of(self, stage: str) -> frozenset[str]:
        """Return the retired ranges of a stage. Raises `AggregatorError`."""
        if self._counts is None:
            found = self._client.watermarks(self._job)
            self._counts = {name: each.retired for name, each in found.items()}
        if not self._counts.get(stage):
            return frozenset()
        if stage not in self._names:
            retired = self._client.explain(self._job, stage, limit=1).get("retired", ())
            self._names[stage] = frozenset(
                each["range"] for each in retired if each["stage"] == stage
            )
        return self._names[stage]
