"""Ranges that an operator has retired, which the driver's reports of facts leave out."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

from spark_agent.client.client import Client
from spark_agent.exceptions import Unavailable

_log: Final = logging.getLogger("spark_agent")


class RetiredRanges:
    """The retired ranges of a job's stages, read from the service once in each step that needs them.

    Each report of a range ends its retirement. So the driver reports for a retired range only what a
    query has read of it: a dead shard would be waited for again within seconds. A range that is retired
    between this look-up and a report of the same step is still reported.

    A look-up that fails is not repeated in its step: it would delay the commit of an epoch.
    """

    def __init__(self, client: Client, job: str) -> None:
        self._client = client
        self._job = job
        self._counts: Mapping[str, int] | None = None
        self._names: dict[str, frozenset[str]] = {}
        self._has_failed = False
        self._is_logged = False
        """True if the present series of failures is logged."""

    def begin_step(self) -> None:
        """Forget the last step's answers."""
        self._counts = None
        self._names.clear()
        self._has_failed = False

    def of(self, stage: str) -> frozenset[str] | None:
        """Return the retired ranges of a stage; None: the service does not answer that now."""
        if stage not in self._names and not self._has_failed:
            try:
                self._names[stage] = self._look_up(stage)
                self._is_logged = False
            except Unavailable as error:
                self._has_failed = True
                if not self._is_logged:
                    _log.warning(
                        "retired ranges of stage %s cannot be looked up, so facts about ranges wait: %s",
                        stage,
                        error,
                    )
                self._is_logged = True
        return self._names.get(stage)

    def _look_up(self, stage: str) -> frozenset[str]:
        if self._counts is None:
            found = self._client.watermarks(self._job)
            self._counts = {name: each.retired for name, each in found.items()}
        if not self._counts.get(stage):
            return frozenset()
        retired = self._client.explain(self._job, stage, limit=1).get("retired", ())
        return frozenset(each["range"] for each in retired if each["stage"] == stage)
