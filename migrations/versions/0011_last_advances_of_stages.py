"""The instant at which the output watermark of each stage last rose."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # Null: a stage from before, or of a replica without this column. Its last change stands for it.
    op.add_column("stages", sa.Column("advanced_at_ms", sa.BigInteger, nullable=True))


def downgrade() -> None:
    op.drop_column("stages", "advanced_at_ms")
