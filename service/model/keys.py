"""Keys: who may do what. A key has a role, and a pattern of the jobs that it is for.

The whole of authorisation is `permits`: the table of roles, and the pattern. It is pure, so that it can
be read and tested without the service.
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

    # An enumeration's own is written in Python, and every request looks roles up.
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
JOBS_PATTERN: Final = r"^[A-Za-z0-9._*?\[\]!-]{1,128}$(?!\n)"
"""Pattern of the patterns of jobs: the characters of names, and `*`, `?`, `[…]`, `[!…]`."""


def permits(role: Role, jobs: str, needed: Role, job: str | None) -> bool:
    """Return whether a key with this role, for the jobs of this pattern, has the role `needed`.

    `job` is the job that the request names; None: it names none.

    >>> permits(Role.REPORT, "scores-*", Role.REPORT, "scores-2")
    True
    >>> permits(Role.REPORT, "scores-*", Role.READ, "scores-2")
    True
    >>> permits(Role.REPORT, "scores-*", Role.DRIVE, "scores-2")
    False
    >>> permits(Role.ADMIN, "scores-*", Role.READ, "flights")
    False

    What concerns no single job (keys, the audit) needs a key for every job. The list of jobs does not:
    it has only those that the key may read.

    >>> permits(Role.ADMIN, "scores-*", Role.ADMIN, None), permits(Role.ADMIN, "*", Role.ADMIN, None)
    (False, True)
    >>> permits(Role.READ, "scores-*", Role.READ, None)
    True

    The metrics name every job. So they need a key that is for nothing else, or one that may read all.

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
    """When it was last used, to about a minute. None: never."""

    def permits(self, needed: Role, job: str | None) -> bool:
        """See `permits`."""
        return permits(self.role, self.jobs, needed, job)


# ---- secrets

_SCHEME: Final = b"bearer "
_LONGEST: Final = 300
"""No secret is longer. What is longer is not even hashed."""

SECRET_PREFIX: Final = "tg_"  # noqa: S105  (what every secret begins with)
"""Prefix of secrets, so that people and scanners of repositories recognise one."""

SECRET_PATTERN: Final = re.compile(r"[\x21-\x7e]{32,256}")
"""Pattern of a secret, of our own making or the operator's."""


def new_secret(random: Callable[[int], str] = token_urlsafe) -> str:
    """Make a secret of 256 random bits.

    >>> new_secret(lambda size: "x" * size)[:6]
    'tg_xxx'
    """
    return SECRET_PREFIX + random(32)


def digest_of(secret: str | bytes) -> bytes:
    """Return the digest by which a secret is stored and looked up.

    A slow hash, as for passwords, would make guessing expensive. Nobody guesses 256 random bits, however
    fast the hash is, and this one is computed for every request. The look-up by digest needs no
    comparison in constant time: how far a digest agrees with a stored one says nothing about the secret.
    """
    return sha256(secret.encode() if isinstance(secret, str) else secret).digest()


def secret_in(authorization: bytes) -> bytes | None:
    """Read `Authorization: Bearer …` (RFC 6750). None: it has no secret that a key could have.

    >>> secret_in(b"bearer tg_x"), secret_in(b"Basic dGc6")
    (b'tg_x', None)
    """
    if len(authorization) > _LONGEST or authorization[:7].lower() != _SCHEME:
        return None
    return authorization[7:].strip()
