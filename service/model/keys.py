"""Keys, and their permissions. A key has a role, and a pattern of the jobs that it is for.

Authorisation is `permits` alone: the table of roles, and the pattern. It is pure, so it can be read and
tested without the service.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from hashlib import sha256
from secrets import token_urlsafe
from typing import Final

from service.model.pipeline_spec import ONLY_AT_THE_END


class Role(StrEnum):
    """Roles of keys, and of the requests that need them."""

    READ = "read"
    """Read jobs, watermarks, ranges and events."""
    REPORT = "report"
    """For workers: read; claim, renew and release leases; report."""
    DRIVE = "drive"
    """For drivers: report; open runs and commit epochs."""
    ADMIN = "admin"
    """Everything: also define, reset and delete jobs, manage keys, read the audit."""
    SCRAPE = "scrape"
    """Only the metrics."""

    # The hash of an enumeration is written in Python, and every request needs the hash of a role.
    __hash__ = str.__hash__


_TABLE: Final = {
    Role.READ: frozenset({Role.READ}),
    Role.REPORT: frozenset({Role.READ, Role.REPORT}),
    Role.DRIVE: frozenset({Role.READ, Role.REPORT, Role.DRIVE}),
    Role.ADMIN: frozenset(Role),
    Role.SCRAPE: frozenset({Role.SCRAPE}),
}
"""Permissions of each role, by the role that a request needs."""

EVERY_JOB: Final = "*"
JOBS_PATTERN: Final = r"^[A-Za-z0-9._*?\[\]!-]{1,128}$" + ONLY_AT_THE_END
"""Pattern of the patterns of jobs: the characters of names, and `*`, `?`, `[…]`, `[!…]`."""


def permits(role: Role, jobs: str, needed: Role, job: str | None) -> bool:
    """Return whether a key with this role, for the jobs of this pattern, has the role `needed`.

    `job` is the job of the request; None: it is not about a job.

    >>> permits(Role.REPORT, "scores-*", Role.REPORT, "scores-2")
    True
    >>> permits(Role.REPORT, "scores-*", Role.READ, "scores-2")
    True
    >>> permits(Role.REPORT, "scores-*", Role.DRIVE, "scores-2")
    False
    >>> permits(Role.ADMIN, "scores-*", Role.READ, "flights")
    False

    Requests that are not about a single job (keys, the audit) need a key for every job. The list of jobs
    is an exception: it has only the jobs that the key may read.

    >>> permits(Role.ADMIN, "scores-*", Role.ADMIN, None), permits(Role.ADMIN, "*", Role.ADMIN, None)
    (False, True)
    >>> permits(Role.READ, "scores-*", Role.READ, None)
    True

    The metrics name every job. So they need a key for metrics alone, or a key that may read every job.

    >>> [permits(role, "*", Role.SCRAPE, None) for role in (Role.SCRAPE, Role.READ, Role.DRIVE)]
    [True, True, True]
    >>> permits(Role.READ, "scores-*", Role.SCRAPE, None)
    False
    >>> permits(Role.SCRAPE, "*", Role.READ, None)
    False
    """
    if needed is Role.SCRAPE:
        return jobs == EVERY_JOB
    if needed not in _TABLE[role]:
        return False
    if jobs == EVERY_JOB:
        return True
    return needed is Role.READ if job is None else fnmatchcase(job, jobs)


@dataclass(frozen=True, slots=True)
class Key:
    """A key, without its secret: the ledger and the service have only the secret's digest."""

    name: str
    role: Role
    jobs: str
    digest: bytes = field(repr=False)
    created_at_ms: int = 0
    created_by: str = ""
    expires_at_ms: int | None = None
    used_at_ms: int | None = None
    """Instant of its last use, to about a minute. None: never."""

    def permits(self, needed: Role, job: str | None) -> bool:
        """See `permits`."""
        return permits(self.role, self.jobs, needed, job)


# ---- secrets

_SCHEME: Final = b"bearer "
_LONGEST: Final = 300
"""The longest secret. A longer text is not even hashed."""

SECRET_PREFIX: Final = "tg_"  # noqa: S105  (the begin of every secret)
"""Prefix of secrets, so that people and scanners of repositories recognise one."""

SECRET_PATTERN: Final = re.compile(r"[\x21-\x7e]{32,256}")
"""Pattern of a secret, whether the service's or the operator's."""


def new_secret(random: Callable[[int], str] = token_urlsafe) -> str:
    """Make a secret of 256 random bits.

    >>> new_secret(lambda size: "x" * size)[:6]
    'tg_xxx'
    """
    return SECRET_PREFIX + random(32)


def digest_of(secret: str | bytes) -> bytes:
    """Return the digest by which a secret is stored and found.

    A slow hash, as for passwords, would make guessing expensive. 256 random bits cannot be guessed even
    with a fast hash, and every request computes this one. The search by digest needs no comparison in
    constant time: the agreement of a digest with a stored one reveals nothing about the secret.
    """
    return sha256(secret.encode() if isinstance(secret, str) else secret).digest()


def secret_in(authorization: bytes) -> bytes | None:
    """Read `Authorization: Bearer …` (RFC 6750). None: it cannot contain a key's secret.

    >>> secret_in(b"bearer tg_x"), secret_in(b"Basic dGc6")
    (b'tg_x', None)
    """
    if len(authorization) > _LONGEST or authorization[:7].lower() != _SCHEME:
        return None
    return authorization[7:].strip()
