"""Retired ranges, in checkpoints: after a restart, they must not be waited for again."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # Null: a checkpoint from before, or of a replica that does not have this column. Its ranges are
    # waited for.
    op.add_column("promise_chunks", sa.Column("retired", sa.LargeBinary, nullable=True))


def downgrade() -> None:
    op.drop_column("promise_chunks", "retired")
