"""SQL statements about runs, each named after its purpose."""

from __future__ import annotations

from sqlalchemy import (
    ColumnElement,
    and_,
    bindparam,
    delete,
    exists,
    func,
    insert,
    select,
    update,
)

from service.ledger.tables import runs, stages

FIND_RUN_HOLDER = (
    select(stages.c.run_holder)
    .where(stages.c.job == bindparam("b_job"), stages.c.run == bindparam("b_run"))
    .limit(1)
)
# An epoch from before the opening of a run is not a commit of the run.
_committed = and_(
    stages.c.job == runs.c.job,
    stages.c.run == runs.c.run,
    stages.c.epoch > func.coalesce(runs.c.epoch_before, -1),
)
SAVE_EPOCHS_OF_RUNS = (
    update(runs)
    .where(
        runs.c.job == bindparam("b_job"),
        exists().where(_committed, stages.c.epoch > func.coalesce(runs.c.epoch, -1)),
    )
    .values(epoch=select(func.max(stages.c.epoch)).where(_committed).scalar_subquery())
)
FIND_LAST_EPOCH = select(func.max(stages.c.epoch)).where(
    stages.c.job == bindparam("b_job"), stages.c.stage.in_(bindparam("b_stages", expanding=True))
)
ADD_RUN = insert(runs)
_has_stage = exists().where(stages.c.job == runs.c.job, stages.c.run == runs.c.run)
DROP_OLD_RUNS = delete(runs).where(
    runs.c.job == bindparam("b_job"), runs.c.run <= bindparam("b_until"), ~_has_stage
)
END_RUN = (
    update(runs)
    .where(runs.c.job == bindparam("b_job"), runs.c.run == bindparam("b_run"))
    .values(
        outcome=bindparam("b_outcome"),
        ended_at_ms=bindparam("b_at_ms"),
        because=bindparam("b_because"),
    )
)
# Those that go on, before a reset takes all their stages. An outcome is the program's own word.
FENCE_RUNS = (
    update(runs)
    .where(
        runs.c.job == bindparam("b_job"),
        runs.c.outcome.is_(None),
        runs.c.ended_at_ms.is_(None),
        _has_stage,
    )
    .values(ended_at_ms=bindparam("b_at_ms"), because=bindparam("b_because"))
    .returning(runs.c.run, runs.c.stages)
)
FIND_STAGES_OF_RUN = (
    select(stages.c.stage)
    .where(stages.c.job == bindparam("b_job"), stages.c.run == bindparam("b_run"))
    .order_by(stages.c.stage)
)
RUNS_OF_JOB = select(
    runs,
    func.coalesce(
        select(func.max(stages.c.epoch)).where(_committed).scalar_subquery(), runs.c.epoch
    ).label("last_epoch"),
    _has_stage.label("has_stage"),
).where(runs.c.job == bindparam("b_job"))
FIND_RUN = RUNS_OF_JOB.where(runs.c.run == bindparam("b_run"))
FIND_RUNS = (
    RUNS_OF_JOB.where(runs.c.run < bindparam("b_before"))
    .order_by(runs.c.run.desc())
    .limit(bindparam("b_limit"))
)


def opened_for(stage: str) -> ColumnElement[bool]:
    """Return the condition that a run was opened for this stage."""
    # The stages are a list in JSON. Names do not have quotes.
    return holds(runs.c.stages, f'"{stage}"')


def holds(column: ColumnElement[str], part: str) -> ColumnElement[bool]:
    """Return the condition that a text has this part. `LIKE` of SQLite ignores the case of letters."""
    return func.replace(column, part, "") != column
