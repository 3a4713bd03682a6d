"""Keys: the permissions of requests; and the audit of their changes.

Each replica has a copy of the table of keys, so a request needs no query. The copy is read again every
second. So a revoked key is rejected at once by the replica that revoked it, and by the others within a
second or two. While the ledger does not answer, keys cannot be revoked through it either, and the copy
is valid for `STALE_MS`: an outage of the ledger must not also lock workers out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

from service.clock import Clock
from service.errors import (
    FirstKeyError,
    ForbiddenError,
    InvalidRequestError,
    KeyExistsError,
    UnauthenticatedError,
    UnavailableError,
    UnknownKeyError,
)
from service.ledger.port import Ledger
from service.model.audit import Action, Actor, AuditRecord, Deed
from service.model.keys import EVERY_JOB, Key, Role, digest_of, new_secret, permits, secret_in
from service.tasks import Shutdown, run_to_completion

log = logging.getLogger(__name__)

REFRESH_INTERVAL_S: Final = 1.0
"""Interval at which the table of keys is read again."""

STALE_MS: Final = 300_000
"""Time for which the copy of the table is valid while the ledger does not answer."""

RECHECK_MS: Final = 1_000
"""Time for which a grant is cached: a key may be used for this much longer than its expiry."""

_MOST_GRANTED: Final = 10_000
"""Number of cached grants."""

_NOTE_STEP_MS: Final = 60_000
"""Interval at which a replica records the use of a key."""

_SEND_A_KEY: Final = "send a key: Authorization: Bearer tg_…"

ANYONE: Final = Key("anyone (no keys)", Role.ADMIN, EVERY_JOB, b"")
"""Sender of requests as long as the service has no keys."""


class Keys:
    """The keys of the ledger, and the operator's own, which are not stored."""

    def __init__(
        self,
        ledger: Ledger,
        clock: Clock,
        *,
        operator: Sequence[Key] = (),
        open_without: bool = True,
        shared: bool = True,
        make_secret: Callable[[], str] = new_secret,
    ) -> None:
        """`open_without`: serve everyone as long as the service has no key.

        `shared`: other replicas use the ledger too. If not, this copy of the table is always current.
        """
        self._ledger = ledger
        self._clock = clock
        self._operator = {key.digest: key for key in operator}
        self._open_without = open_without
        self._shared = shared
        self._make_secret = make_secret
        self._stored: Mapping[bytes, Key] = {}
        self._read_at_ms = clock.steady_ms()
        # A table that was read before a change must not replace the one after it.
        self._changing = asyncio.Lock()
        # Grants of the last second, and since the table last changed. Rejections are not cached, so a
        # client without a key cannot fill the cache. A key may request any job, so the cache is bounded.
        self._granted: dict[tuple[bytes, Role, str | None], Key] = {}
        self._recheck_at_ms = 0
        self.version = 0
        """Number that rises with each change of the table."""
        self._uncertain = False
        self._noted_at_ms: dict[bytes, int] = {}
        self._uses: dict[bytes, int] = {}
        self.open = open_without and not operator
        """True if every request is served without a key: the service has none."""

    # ---- who may

    @property
    def any(self) -> bool:
        """True if any key exists, even an expired one, which must not open the service."""
        return bool(self._operator or self._stored)

    def authorize(self, authorization: bytes | None, needed: Role, job: str | None) -> Key:
        """Return the key of a request, if it permits the request.

        `authorization` is the header of this name, or None. `job` is the job of the request, which need
        not exist. Raises `UnauthenticatedError`, `ForbiddenError`, and `UnavailableError` if the copy
        of the keys is too old.
        """
        if self.open:
            return ANYONE
        if authorization is None:
            raise UnauthenticatedError(_SEND_A_KEY)
        now_ms = self._clock.steady_ms()
        if now_ms >= self._recheck_at_ms:
            self._granted.clear()
            self._recheck_at_ms = now_ms + RECHECK_MS
        # By the header as sent: a request like the last one needs neither parsing nor hashing.
        request = (authorization, needed, job)
        granted = self._granted.get(request)
        if granted is not None:
            return granted
        secret = secret_in(authorization)
        if secret is None:
            raise UnauthenticatedError(_SEND_A_KEY)
        key = self._find(digest_of(secret))
        if not permits(key.role, key.jobs, needed, job):
            raise _forbidden(key, needed, job)
        if len(self._granted) >= _MOST_GRANTED:
            self._granted.clear()
        self._granted[request] = key
        return key

    def stands(self, version: int) -> bool:
        """Return whether a request that was granted at this version would be granted again without a
        check of its key: the table is unchanged, and no check is due.
        """
        return version == self.version and (
            self.open or self._clock.steady_ms() < self._recheck_at_ms
        )

    def confirm(self, key: Key) -> None:
        """Check that a granted key is still valid, for long responses: polls and streams.

        Raises `UnauthenticatedError`, and `UnavailableError` if the copy of the keys is too old.
        """
        if key is not ANYONE:
            self._find(key.digest)
        elif not self.open:
            raise UnauthenticatedError(_SEND_A_KEY)

    def _find(self, digest: bytes) -> Key:
        key = self._operator.get(digest) or self._stored.get(digest)
        if key is None:
            self._check_age()
            raise UnauthenticatedError("unknown key: it is misspelt, or was revoked")
        self._use(key)
        return key

    def _use(self, key: Key) -> None:
        """Check the expiry of a key, and note its use."""
        digest = key.digest
        if digest in self._operator:
            return
        self._check_age()
        now_ms = self._clock.wall_ms()
        if key.expires_at_ms is not None and now_ms >= key.expires_at_ms:
            raise UnauthenticatedError(f"the key {key.name!r} has expired: create a new one")
        if now_ms - self._noted_at_ms.get(digest, 0) >= _NOTE_STEP_MS:
            self._noted_at_ms[digest] = self._uses[digest] = now_ms

    def _check_age(self) -> None:
        if self._shared and self._clock.steady_ms() - self._read_at_ms > STALE_MS:
            raise UnavailableError("the ledger does not answer, so revoked keys are unknown: retry")

    # ---- managing keys

    @run_to_completion
    async def create(
        self, name: str, role: Role, jobs: str, expires_in_ms: int | None, by: Actor
    ) -> tuple[Key, str]:
        """Create a key; return it with its secret, which is not stored and cannot be shown again.

        Raises `KeyExistsError`, `InvalidRequestError`, `FirstKeyError`.
        """
        if role is Role.SCRAPE and jobs != EVERY_JOB:
            raise InvalidRequestError(
                f"jobs is {jobs!r}: the metrics name every job, so a key with role scrape is for '*'"
            )
        now_ms = self._clock.wall_ms()
        secret = self._make_secret()
        key = Key(
            name=name,
            role=role,
            jobs=jobs,
            digest=digest_of(secret),
            created_at_ms=now_ms,
            created_by=by.name,
            expires_at_ms=None if expires_in_ms is None else now_ms + expires_in_ms,
        )
        async with self._changing:
            if not self.any and (role is not Role.ADMIN or jobs != EVERY_JOB):
                raise FirstKeyError(
                    f"the first key is {role} for {jobs!r}: from then on every request needs a key, and"
                    " this one could create no other. Create one with role admin for '*' first, or"
                    " start the service with TIDEGAUGE_ADMIN_KEY_FILE"
                )
            deed = Deed(Action.CREATE_KEY, by, now_ms)
            first = by.name == ANYONE.name
            if first and self.any:
                raise UnauthenticatedError(_SEND_A_KEY)
            if not await self._certainly(self._ledger.add_key(key, deed, first=first)):
                if first:
                    raise UnauthenticatedError(_SEND_A_KEY)
                raise KeyExistsError(
                    f"key {name!r} already exists: revoke it first, or choose another name"
                )
            self._replace({**self._stored, key.digest: key})
        return key, secret

    @run_to_completion
    async def revoke(self, name: str, by: Actor) -> None:
        """Revoke a key: this replica rejects it at once. Raises `UnknownKeyError`."""
        async with self._changing:
            deed = Deed(Action.REVOKE_KEY, by, self._clock.wall_ms())
            if not await self._certainly(self._ledger.delete_key(name, deed)):
                raise UnknownKeyError(f"there is no key {name!r}")
            self._replace({d: key for d, key in self._stored.items() if key.name != name})

    async def _certainly(self, change: Awaitable[bool]) -> bool:
        """Run a change. If its outcome is unknown, the table must be read again."""
        try:
            return await change
        except UnavailableError:
            self._uncertain = True
            raise

    async def all(self) -> Sequence[Key]:
        """Return the keys in the ledger."""
        return await self._ledger.keys()

    async def audit(self, limit: int, before: int | None, job: str | None) -> Sequence[AuditRecord]:
        """Return the newest records of the audit; see `Ledger.read_audit`."""
        return await self._ledger.read_audit(limit, before, job)

    # ---- the copy of the table

    async def refresh(self) -> None:
        """Read the table again. Raises `UnavailableError`."""
        async with self._changing:
            began_ms = self._clock.steady_ms()
            found = await self._ledger.keys()
            self._read_at_ms = began_ms
            self._uncertain = False
            self._replace({key.digest: key for key in found})

    async def run(self, shutdown: Shutdown) -> None:
        """Keep the copy up to date, and write the uses of keys, until the service ends."""
        while await shutdown.sleep(REFRESH_INTERVAL_S):
            try:
                await self.catch_up()
            except UnavailableError as error:
                log.debug("cannot read the keys now, retrying: %s", error.detail)

    async def catch_up(self) -> None:
        """Read the table again if it may have changed, and write the last uses of keys.

        A use that cannot be written is noted again at the next use, a minute later. Raises
        `UnavailableError`.
        """
        if self._shared or self._uncertain:
            await self.refresh()
        uses, self._uses = self._uses, {}
        if uses:
            await self._ledger.note_uses(uses)

    def _replace(self, stored: Mapping[bytes, Key]) -> None:
        if stored == self._stored:
            return
        self._stored = stored
        self._granted = {}
        self.version += 1
        self.open = self._open_without and not self.any
        self._noted_at_ms = {d: at for d, at in self._noted_at_ms.items() if d in stored}


def _forbidden(key: Key, needed: Role, job: str | None) -> ForbiddenError:
    # Without the job: the answer is the same for a missing job.
    if job is not None:
        wanted, members = f"role {needed} for the job", {"role": needed.value}
    elif needed is Role.READ:
        wanted, members = f"role {needed}", {"role": needed.value}
    else:
        wanted, members = (
            f"role {needed} for every job",
            {"role": needed.value, "jobs": EVERY_JOB},
        )
    return ForbiddenError(
        f"this needs a key with {wanted}; {key.name!r} has role {key.role} for {key.jobs!r}",
        **members,
    )
