"""Changes of a job, merged from its runs and the audit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from service.ledger.port import Ledger, Span
from service.model.audit import Action, AuditRecord, parts_of, returned_by, stages_of
from service.model.changes import Change
from service.model.runs import RunRecord


class ChangesOfJobs:
    """Reads the changes of jobs."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def newest(
        self, job: str, stage: str | None, span: Span, limit: int, skip: int = 0
    ) -> Sequence[Change]:
        """Return the newest changes within a span of time, newest first, without the first `skip`."""
        found = await self._ledger.changes(job, stage, span, limit + skip)
        changes = [change_of(record) for record in found.records]
        changes += [change for run in found.runs for change in _changes_of(run, span)]
        # Within one millisecond, a run ends after its begin.
        changes.sort(
            key=lambda each: (each.at_ms, each.run or 0, each.action is Action.END_RUN),
            reverse=True,
        )
        return changes[skip : skip + limit]


def change_of(record: AuditRecord) -> Change:
    """Return a change of the audit that does not concern a run.

    >>> from service.model.audit import Actor, Deed
    >>> deed = Deed(Action.CHANGE_JOB, Actor("ci", "10.0.0.1"), 5)
    >>> change_of(AuditRecord(1, deed, "scores", None, "layout 7; taps: + shard b")).stages
    ('taps',)
    """
    at_ms, action = record.deed.at_ms, record.deed.action
    if action is Action.RETIRE_RANGE:
        stage, name, because = parts_of(record.detail)
        return Change(at_ms, action, (stage,), range=name, because=because or None)
    if action is Action.RETURN_RANGE:
        stage, name, because = parts_of(record.detail)
        return Change(at_ms, action, (stage,), holder=returned_by(because), range=name)
    if action is Action.CHANGE_JOB:
        detail = record.detail
        return Change(at_ms, action, stages_of(detail), specification=detail)
    return Change(at_ms, action)


def _changes_of(run: RunRecord, span: Span) -> Iterator[Change]:
    opened, end = run.opened, run.end
    if run.started_at_ms is not None and span[0] <= run.started_at_ms <= span[1]:
        yield Change(
            run.started_at_ms, Action.OPEN_RUN, opened.stages, run.run, holder=opened.holder
        )
    if end is not None and span[0] <= end.at_ms <= span[1]:
        yield Change(
            end.at_ms,
            Action.END_RUN,
            opened.stages,
            run.run,
            outcome=end.outcome,
            because=end.because or None,
        )
    fencing = run.fencing
    if fencing is not None and span[0] <= fencing.at_ms <= span[1]:
        yield Change(
            fencing.at_ms, Action.END_RUN, opened.stages, run.run, because=fencing.because or None
        )
