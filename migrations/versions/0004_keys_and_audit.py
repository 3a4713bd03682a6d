"""Keys, and the audit of what was changed with them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_serial = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    op.create_table(
        "access_keys",
        sa.Column("name", sa.String(128), primary_key=True),
        sa.Column("digest", sa.LargeBinary, nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("jobs", sa.String(128), nullable=False),
        sa.Column("created_at_ms", sa.BigInteger, nullable=False),
        sa.Column("created_by", sa.String(128), nullable=False),
        sa.Column("expires_at_ms", sa.BigInteger, nullable=True),
        sa.Column("used_at_ms", sa.BigInteger, nullable=True),
        comment="Who may do what. Of a secret, only its SHA-256",
    )
    op.create_index("access_keys_by_digest", "access_keys", ["digest"], unique=True)
    op.create_table(
        "audit",
        sa.Column("number", _serial, primary_key=True, autoincrement=True),
        sa.Column("at_ms", sa.BigInteger, nullable=False),
        sa.Column("action", sa.String(32), nullable=False),
        sa.Column("actor", sa.String(128), nullable=False),
        sa.Column("address", sa.String(128), nullable=False),
        sa.Column("job", sa.String(128), nullable=True),
        sa.Column("key", sa.String(128), nullable=True),
        sa.Column("detail", sa.Text, nullable=False),
        comment="Who changed what, from where and when; deleted by age",
    )
    op.create_index("audit_by_job", "audit", ["job", "number"])
    op.create_index("audit_by_age", "audit", ["at_ms"])


def downgrade() -> None:
    op.drop_table("audit")
    op.drop_table("access_keys")
