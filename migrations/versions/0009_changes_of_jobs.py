"""Changes of a job within a span of time: an index of the audit."""

from __future__ import annotations

from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

_INDEX = "audit_by_job_and_time"


def upgrade() -> None:
    op.create_index(_INDEX, "audit", ["job", "at_ms", "number"])


def downgrade() -> None:
    op.drop_index(_INDEX, "audit")
