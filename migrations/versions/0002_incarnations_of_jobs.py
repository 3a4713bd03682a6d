"""Each job has incarnations of its own, and each chunk of promises says which it is from."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_WAS = "One row for each life of the live store: the upper bits of its fences"
_IS = "One row for each life of a job's live state: the upper bits of its fences"


def upgrade() -> None:
    op.add_column("incarnations", sa.Column("job", sa.String(128), nullable=True))
    # 0 is below every number ever drawn. Such a job's live state was lost with the process that held
    # it, so the next one to look draws a number before anything is granted.
    op.add_column("jobs", _number("incarnation"))
    op.add_column("promise_chunks", _number("incarnation"))
    op.add_column("promise_chunks", _number("stamp"))
    _comment(_IS, _WAS)


def downgrade() -> None:
    for table, column in (
        ("promise_chunks", "stamp"),
        ("promise_chunks", "incarnation"),
        ("jobs", "incarnation"),
        ("incarnations", "job"),
    ):
        op.drop_column(table, column)
    _comment(_WAS, _IS)


def _number(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, nullable=False, server_default=sa.text("0"))


def _comment(comment: str, existing: str) -> None:
    if op.get_bind().dialect.supports_comments:
        op.create_table_comment("incarnations", comment, existing_comment=existing)
