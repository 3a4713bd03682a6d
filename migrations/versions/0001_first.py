"""The first schema."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_serial = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    op.create_table(
        "incarnations",
        sa.Column("number", _serial, primary_key=True, autoincrement=True),
        sa.Column("opened_at_ms", sa.BigInteger, nullable=False),
        comment="One row for each life of the live store: the upper bits of its fences",
    )
    op.create_table(
        "jobs",
        sa.Column("name", sa.String(128), primary_key=True),
        sa.Column("generation", sa.BigInteger, nullable=False),
        sa.Column("layout_version", sa.BigInteger, nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.Column("last_run", sa.BigInteger, nullable=False),
        sa.Column("spec", sa.LargeBinary, nullable=False),
        sa.Column("deleted", sa.Boolean, nullable=False),
        sa.Column("created_at_ms", sa.BigInteger, nullable=False),
        sa.Column("updated_at_ms", sa.BigInteger, nullable=False),
        comment="A deleted job keeps its row: the next one of its name must not repeat its numbers",
    )
    op.create_table(
        "stages",
        sa.Column("job", sa.String(128), primary_key=True),
        sa.Column("stage", sa.String(128), primary_key=True),
        sa.Column("layout_since", sa.BigInteger, nullable=False),
        sa.Column("run", sa.BigInteger, nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=True),
        sa.Column("input", sa.BigInteger, nullable=False),
        sa.Column("output", sa.BigInteger, nullable=False),
        sa.Column("idle", sa.Boolean, nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.Column("updated_at_ms", sa.BigInteger, nullable=False),
        comment="The published watermark. A stage that was taken out keeps its row: it may come back",
    )
    op.create_table(
        "promise_chunks",
        sa.Column("job", sa.String(128), primary_key=True),
        sa.Column("stage", sa.String(128), primary_key=True),
        sa.Column("chunk", sa.BigInteger, primary_key=True),
        sa.Column("generation", sa.BigInteger, nullable=False),
        sa.Column("layout_since", sa.BigInteger, nullable=False),
        sa.Column("promises", sa.LargeBinary, nullable=False),
        comment="Checkpoints of promises, little-endian 64-bit integers in the order of the layout",
    )
    op.create_table(
        "watermark_history",
        sa.Column("id", _serial, primary_key=True, autoincrement=True),
        sa.Column("job", sa.String(128), nullable=False),
        sa.Column("stage", sa.String(128), nullable=False),
        sa.Column("generation", sa.BigInteger, nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("input", sa.BigInteger, nullable=False),
        sa.Column("output", sa.BigInteger, nullable=False),
        sa.Column("idle", sa.Boolean, nullable=False),
        sa.Column("at_ms", sa.BigInteger, nullable=False),
        comment="A row for each advance, thinned by age",
    )
    op.create_index("watermark_history_by_stage", "watermark_history", ["job", "stage", "at_ms"])
    op.create_index("watermark_history_by_age", "watermark_history", ["at_ms"])


def downgrade() -> None:
    for table in ("watermark_history", "promise_chunks", "stages", "jobs", "incarnations"):
        op.drop_table(table)
