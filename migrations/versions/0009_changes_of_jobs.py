"""Changes of a job: an index of the audit that passes over the many records of runs."""

from __future__ import annotations

from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

_INDEX = "audit_by_job_and_action"


def upgrade() -> None:
    op.create_index(_INDEX, "audit", ["job", "action", "at_ms"])


def downgrade() -> None:
    op.drop_index(_INDEX, "audit")
