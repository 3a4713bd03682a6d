"""Since when promises stand, in checkpoints: it is known after a restart, too."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # Null: a checkpoint from before, or of a replica that does not know it.
    op.add_column("promise_chunks", sa.Column("raised_at_ms", sa.LargeBinary, nullable=True))


def downgrade() -> None:
    op.drop_column("promise_chunks", "raised_at_ms")
