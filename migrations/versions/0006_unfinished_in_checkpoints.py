"""Unfinished work of ranges, in checkpoints: after a restart, they must not look quiet."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # Null: a checkpoint from before, or of a replica that does not know it.
    op.add_column("promise_chunks", sa.Column("unfinished", sa.LargeBinary, nullable=True))


def downgrade() -> None:
    op.drop_column("promise_chunks", "unfinished")
