"""Keys in the ledger, within a transaction. See `service.ledger.port.Ledger`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import bindparam, delete, func, or_, select, update
from sqlalchemy.dialects.postgresql import insert as postgres_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.ext.asyncio import AsyncConnection

from service.ledger.audit import write_audit
from service.ledger.tables import access_keys
from service.model.audit import Deed
from service.model.keys import Key, Role

USE_STEP_MS = 60_000
"""Shortest interval at which a key's last use is written, by all replicas together."""

_FIRST_KEY_LOCK = 0x7469_6465_6B65_7931
LOCK_FIRST_KEY = select(func.pg_advisory_xact_lock(_FIRST_KEY_LOCK))
FIND_KEYS = select(access_keys).order_by(access_keys.c.name)
DELETE_KEY = (
    delete(access_keys)
    .where(access_keys.c.name == bindparam("b_name"))
    .returning(access_keys.c.name)
)
# By digest: the name may meanwhile be another key's.
NOTE_USE = (
    update(access_keys)
    .where(
        access_keys.c.digest == bindparam("b_digest"),
        or_(
            access_keys.c.used_at_ms.is_(None),
            access_keys.c.used_at_ms <= bindparam("b_used_at_ms") - USE_STEP_MS,
        ),
    )
    .values(used_at_ms=bindparam("b_used_at_ms"))
)


async def find_keys(db: AsyncConnection) -> Sequence[Key]:
    """Return all keys, by name."""
    return [
        Key(
            name=row.name,
            role=Role(row.role),
            jobs=row.jobs,
            digest=row.digest,
            created_at_ms=row.created_at_ms,
            created_by=row.created_by,
            expires_at_ms=row.expires_at_ms,
            used_at_ms=row.used_at_ms,
        )
        for row in await db.execute(FIND_KEYS)
    ]


async def add_key(db: AsyncConnection, key: Key, deed: Deed, *, first: bool) -> bool:
    """Store a key; False if its name exists or, for the `first` key, any key exists."""
    if first:
        # Two replicas without a key must not both create the first one.
        if db.dialect.name == "postgresql":
            await db.execute(LOCK_FIRST_KEY)
        if await db.scalar(select(func.count()).select_from(access_keys)):
            return False
    insert: Any = sqlite_insert if db.dialect.name == "sqlite" else postgres_insert
    added = insert(access_keys).on_conflict_do_nothing(index_elements=["name"])
    row = {
        "name": key.name,
        "digest": key.digest,
        "role": key.role.value,
        "jobs": key.jobs,
        "created_at_ms": key.created_at_ms,
        "created_by": key.created_by,
        "expires_at_ms": key.expires_at_ms,
        "used_at_ms": key.used_at_ms,
    }
    done = await db.execute(added.returning(access_keys.c.name), row)
    if done.one_or_none() is None:
        return False
    await write_audit(db, deed, key=key.name, detail=f"{key.role} for {key.jobs}")
    return True


async def delete_key(db: AsyncConnection, name: str, deed: Deed) -> bool:
    """Delete a key; False if the name does not exist."""
    if (await db.execute(DELETE_KEY, {"b_name": name})).one_or_none() is None:
        return False
    await write_audit(db, deed, key=name)
    return True


async def note_uses(db: AsyncConnection, used_at_ms: Mapping[bytes, int]) -> None:
    """Store the last uses of keys."""
    rows = [{"b_digest": d, "b_used_at_ms": at} for d, at in sorted(used_at_ms.items())]
    if rows:
        await db.execute(NOTE_USE, rows)
