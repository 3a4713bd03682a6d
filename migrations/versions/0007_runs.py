"""Runs are recorded: what was executed, by whom, and its end."""

from __future__ import annotations

import json

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    runs = op.create_table(
        "runs",
        sa.Column("job", sa.String(128), primary_key=True),
        sa.Column("run", sa.BigInteger, primary_key=True),
        sa.Column("stages", sa.Text, nullable=False),
        sa.Column("holder", sa.String(128), nullable=False),
        sa.Column("program", sa.Text, nullable=True),
        sa.Column("links", sa.Text, nullable=False),
        sa.Column("started_at_ms", sa.BigInteger, nullable=True),
        sa.Column("epoch_before", sa.BigInteger, nullable=True),
        sa.Column("epoch", sa.BigInteger, nullable=True),
        sa.Column("outcome", sa.String(16), nullable=True),
        sa.Column("ended_at_ms", sa.BigInteger, nullable=True),
        sa.Column("because", sa.Text, nullable=True),
        comment="What was executed, and its end. The epoch is written once a stage leaves the run",
    )
    # Those that are under way can be ended, too. Their start was not stored (null).
    stages = sa.table("stages", *map(sa.column, ("job", "stage", "run", "run_holder")))
    going = sa.select(stages).where(stages.c.run > 0).order_by(stages.c.job, stages.c.stage)
    found: dict[tuple[str, int], tuple[str, list[str]]] = {}
    for row in op.get_bind().execute(going):
        found.setdefault((row.job, row.run), (row.run_holder or "unknown", []))[1].append(row.stage)
    if found:
        op.bulk_insert(
            runs,
            [
                {
                    "job": job,
                    "run": run,
                    "stages": json.dumps(names),
                    "holder": holder,
                    "links": "{}",
                }
                for (job, run), (holder, names) in found.items()
            ],
        )


def downgrade() -> None:
    op.drop_table("runs")
