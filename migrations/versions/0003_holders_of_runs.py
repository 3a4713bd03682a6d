"""Stages remember who opened the run that they belong to."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # NULL: opened before this was stored.
    op.add_column("stages", sa.Column("run_holder", sa.String(128), nullable=True))


def downgrade() -> None:
    op.drop_column("stages", "run_holder")
