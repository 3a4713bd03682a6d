"""The ledger's tables. The migrations create their schema; a test compares the two.

Watermarks are 64-bit integers throughout, -∞ among them (`frontier.timestamps.MIN`), so that SQL
compares them like the code, without NULLs.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    text,
)

from service.model.checkpoints import COLUMNS

metadata = MetaData()

# SQLite generates numbers only for a column of exactly this type.
_Serial = BigInteger().with_variant(Integer, "sqlite")


def _watermark() -> list[Column[Any]]:
    return [
        Column("input", BigInteger, nullable=False),
        Column("output", BigInteger, nullable=False),
        Column("idle", Boolean, nullable=False),
    ]


WATERMARK: Final = tuple(each.name for each in _watermark())
"""The members of `StageWatermark`, each a column of the stages and of their history. Numbers only rise,
and the rest is as reported last: `StageWatermark.advance`. Rows and statements are made from these
names."""

COUNTS: Final = ("records", "late")
"""The members of `RowCounts`, each a column of the history."""

incarnations = Table(
    "incarnations",
    metadata,
    Column("number", _Serial, primary_key=True, autoincrement=True),
    Column("opened_at_ms", BigInteger, nullable=False),
    Column("job", String(128), nullable=True),
    comment="One row for each life of a job's live state: the upper bits of its fences",
)

jobs = Table(
    "jobs",
    metadata,
    Column("name", String(128), primary_key=True),
    Column("generation", BigInteger, nullable=False),
    Column("layout_version", BigInteger, nullable=False),
    Column("revision", BigInteger, nullable=False),
    Column("last_run", BigInteger, nullable=False),
    Column("spec", LargeBinary, nullable=False),
    Column("deleted", Boolean, nullable=False),
    Column("created_at_ms", BigInteger, nullable=False),
    Column("updated_at_ms", BigInteger, nullable=False),
    Column("incarnation", BigInteger, nullable=False, server_default=text("0")),
    comment="A deleted job keeps its row: the next one of its name must not repeat its numbers",
)

stages = Table(
    "stages",
    metadata,
    Column("job", String(128), primary_key=True),
    Column("stage", String(128), primary_key=True),
    Column("layout_since", BigInteger, nullable=False),
    Column("run", BigInteger, nullable=False),
    Column("epoch", BigInteger, nullable=True),
    *_watermark(),
    Column("version", BigInteger, nullable=False),
    Column("revision", BigInteger, nullable=False),
    Column("updated_at_ms", BigInteger, nullable=False),
    Column("run_holder", String(128), nullable=True),
    Column("advanced_at_ms", BigInteger, nullable=True),
    comment="The published watermark. A stage that was taken out keeps its row: it may come back",
)

runs = Table(
    "runs",
    metadata,
    Column("job", String(128), primary_key=True),
    Column("run", BigInteger, primary_key=True),
    Column("stages", Text, nullable=False),
    Column("holder", String(128), nullable=False),
    Column("program", Text, nullable=True),
    Column("links", Text, nullable=False),
    Column("started_at_ms", BigInteger, nullable=True),
    Column("epoch_before", BigInteger, nullable=True),
    Column("epoch", BigInteger, nullable=True),
    Column("outcome", String(16), nullable=True),
    Column("ended_at_ms", BigInteger, nullable=True),
    Column("because", Text, nullable=True),
    comment="What was executed, and its end. The epoch is written once a stage leaves the run",
)

promise_chunks = Table(
    "promise_chunks",
    metadata,
    Column("job", String(128), primary_key=True),
    Column("stage", String(128), primary_key=True),
    Column("chunk", BigInteger, primary_key=True),
    Column("generation", BigInteger, nullable=False),
    Column("layout_since", BigInteger, nullable=False),
    *(Column(name, LargeBinary, nullable=name != "promises") for name in COLUMNS),
    Column("incarnation", BigInteger, nullable=False, server_default=text("0")),
    Column("stamp", BigInteger, nullable=False, server_default=text("0")),
    comment="Checkpoints of promises, little-endian 64-bit integers in the order of the layout",
)

history = Table(
    "watermark_history",
    metadata,
    Column("id", _Serial, primary_key=True, autoincrement=True),
    Column("job", String(128), nullable=False),
    Column("stage", String(128), nullable=False),
    Column("generation", BigInteger, nullable=False),
    Column("version", BigInteger, nullable=False),
    *_watermark(),
    Column("at_ms", BigInteger, nullable=False),
    *(Column(name, BigInteger, nullable=True) for name in COUNTS),
    Index("watermark_history_by_stage", "job", "stage", "at_ms"),
    Index("watermark_history_by_age", "at_ms"),
    comment="A row for each advance, thinned by age",
)

access_keys = Table(
    "access_keys",
    metadata,
    Column("name", String(128), primary_key=True),
    Column("digest", LargeBinary, nullable=False),
    Column("role", String(16), nullable=False),
    Column("jobs", String(128), nullable=False),
    Column("created_at_ms", BigInteger, nullable=False),
    Column("created_by", String(128), nullable=False),
    Column("expires_at_ms", BigInteger, nullable=True),
    Column("used_at_ms", BigInteger, nullable=True),
    Index("access_keys_by_digest", "digest", unique=True),
    comment="Who may do what. Of a secret, only its SHA-256",
)

audit = Table(
    "audit",
    metadata,
    Column("number", _Serial, primary_key=True, autoincrement=True),
    Column("at_ms", BigInteger, nullable=False),
    Column("action", String(32), nullable=False),
    Column("actor", String(128), nullable=False),
    Column("address", String(128), nullable=False),
    Column("job", String(128), nullable=True),
    Column("key", String(128), nullable=True),
    Column("detail", Text, nullable=False),
    Index("audit_by_job", "job", "number"),
    Index("audit_by_job_and_action", "job", "action", "at_ms"),
    Index("audit_by_age", "at_ms"),
    comment="Who changed what, from where and when; deleted by age",
)
