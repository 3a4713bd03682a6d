"""Failures to publish: the jobs whose advances a store does not take, each with the cause."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from service.errors import ProblemError


@dataclass(frozen=True, slots=True)
class PublishFailure:
    """The failure to publish the advances of a job."""

    since_ms: int
    """Instant of the first failed round, on the wall clock."""
    detail: str
    """The error of the last one."""


def failure_by(error: Exception, since_ms: int) -> PublishFailure:
    """Return the failure by an error. The message of an unexpected one is in the log alone.

    >>> failure_by(KeyError("a"), 5)
    PublishFailure(since_ms=5, detail="KeyError: see the service's log")
    """
    is_expected = isinstance(error, ProblemError)
    return PublishFailure(
        since_ms, error.detail if is_expected else f"{type(error).__name__}: see the service's log"
    )


class PublishFailures:
    """The failures since the last round of each job that succeeded."""

    def __init__(self) -> None:
        self._found: dict[str, PublishFailure] = {}
        self._failed: set[str] = set()
        """The jobs that have failed in this round."""
        self._dropped: set[str] = set()

    def of(self, job: str) -> PublishFailure | None:
        """Return the failure of a job; None: its last round succeeded."""
        return self._found.get(job)

    def note(self, job: str, now_ms: int, error: Exception) -> None:
        """Note that this round has failed for a job, by this error."""
        failure = failure_by(error, now_ms)
        before = self._found.get(job, failure)
        self._found[job] = replace(failure, since_ms=before.since_ms)
        self._failed.add(job)

    def note_dropped(self, job: str, now_ms: int, error: Exception) -> None:
        """Note that this round has failed for a job, and that the publisher does not retry it."""
        self.note(job, now_ms, error)
        self._dropped.add(job)

    def take_dropped(self) -> frozenset[str]:
        """Return the jobs that the publisher has dropped since the last call."""
        dropped, self._dropped = frozenset(self._dropped), set()
        return dropped

    def end_round(self, jobs: Collection[str]) -> None:
        """End a round of these jobs: all that have not failed in it have succeeded."""
        for job in jobs:
            if job not in self._failed:
                self._found.pop(job, None)
        self._failed.clear()

    def keep_only(self, jobs: Collection[str]) -> None:
        """Drop the failures of deleted jobs."""
        self._found = {job: found for job, found in self._found.items() if job in jobs}
