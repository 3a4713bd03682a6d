"""Rows of a stage in the history, for rates over time."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

_COUNTS = ("records", "late")


def upgrade() -> None:
    # Null: an advance from before, or of a replica that does not have these columns.
    for name in _COUNTS:
        op.add_column("watermark_history", sa.Column(name, sa.BigInteger, nullable=True))


def downgrade() -> None:
    for name in _COUNTS:
        op.drop_column("watermark_history", name)
