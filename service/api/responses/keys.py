"""Responses about keys and the audit."""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Meta, Struct

from service.api.responses.common import Count, Instant, Next
from service.frontier.timestamps import iso
from service.model.audit import Action, AuditRecord, shortened
from service.model.keys import Key, Role


class WhoAmIBody(Struct, frozen=True):
    """The key of the request."""

    name: Annotated[str | None, Meta(description="null: without keys, and everyone is served")]
    role: Role
    jobs: Annotated[str, Meta(description="The pattern of its jobs")]
    now: Annotated[int, Meta(description="The service's clock, in ms since the Unix epoch")]


class KeyLine(Struct, frozen=True):
    """A key, without its secret."""

    name: str
    role: Role
    jobs: str
    created_at: Instant
    created_by: str
    expires_at: Instant | None
    used_at: Instant | None


class KeysBody(Struct, frozen=True):
    """Keys in the ledger, by name: all of them, or a page."""

    keys: list[KeyLine]
    next: Next = UNSET


class NewKeyBody(Struct, frozen=True):
    """A key with its secret, which is shown here and nowhere else."""

    name: str
    role: Role
    jobs: str
    expires_at: Instant | None
    secret: str


class AuditLine(Struct, frozen=True):
    """A change, with its author, address and time."""

    number: Count
    at: Instant
    by: Annotated[
        str,
        Meta(
            description="The name of the key, or `the range itself`: a report has ended its retirement."
            " Empty for such an end, if its holder is unknown"
        ),
    ]
    address: str
    action: Action
    job: str | None
    key: str | None
    detail: str


class AuditBody(Struct, frozen=True):
    """Changes, the newest first."""

    records: list[AuditLine]


def key_line(key: Key) -> KeyLine:
    """Return a key, without its secret."""
    return KeyLine(
        key.name,
        key.role,
        key.jobs,
        iso(key.created_at_ms),
        key.created_by,
        None if key.expires_at_ms is None else iso(key.expires_at_ms),
        None if key.used_at_ms is None else iso(key.used_at_ms),
    )


def new_key_body(key: Key, secret: str) -> NewKeyBody:
    """Return a new key."""
    expires_at = None if key.expires_at_ms is None else iso(key.expires_at_ms)
    return NewKeyBody(key.name, key.role, key.jobs, expires_at, secret)


def audit_line(record: AuditRecord) -> AuditLine:
    """Return a record of the audit."""
    deed = record.deed
    return AuditLine(
        record.number,
        iso(deed.at_ms),
        deed.by.name,
        deed.by.address,
        deed.action,
        record.job,
        record.key,
        shortened(record.detail),
    )
