"""Keys: who may send which request; and the audit of what they changed.

Each replica has a copy of the table of keys, so a request costs a look-up and no query. The copy is read
again every second. So a key that is revoked is refused by the replica that revoked it at once, and by
the others within a second or two. While the ledger does not answer, nobody can revoke a key through it
either, and the copy stands for `STALE_MS`: an outage of the ledger must not also lock workers out.
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
"""Time for which the last known table stands while the ledger does not answer."""

RECHECK_MS: Final = 1_000
"""Time for which a grant is remembered: a key may be used for that much longer than its expiry."""

_MOST_GRANTED: Final = 10_000
"""Number of requests that are remembered as granted."""

_NOTE_STEP_MS: Final = 60_000
"""Interval at which a replica records the use of a key."""

_SEND_A_KEY: Final = "send a key: Authorization: Bearer tg_…"

ANYONE: Final = Key("anyone (no keys)", Role.ADMIN, EVERY_JOB, b"")
"""Sender of requests as long as there are no keys."""


class Keys:
    """The keys of the ledger, and those of the operator, which are not stored."""

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
        """`open_without`: serve everyone as long as there is no key at all.

        `shared`: other replicas use the ledger too. If not, this copy of the table is always right.
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
        # Grants of the last second, and since the table last changed. Refusals are not kept,
        # so nobody without a key can fill it. Who has one can ask for any job, so it is bounded.
        self._granted: dict[tuple[bytes, Role, str | None], Key] = {}
        self._recheck_at_ms = 0
        self.version = 0
        """Rises with each change of the table."""
        self._uncertain = False
        self._noted_at_ms: dict[bytes, int] = {}
        self._uses: dict[bytes, int] = {}
        self.open = open_without and not operator
        """True if every request is served without a key: the service has none."""

    # ---- who may

    @property
    def any(self) -> bool:
        """True if there is a key at all, expired ones included: they must not open the service."""
        return bool(self._operator or self._stored)

    def admit(self, authorization: bytes | None, needed: Role, job: str | None) -> Key:
        """Return the key that a request is sent with, if it may be sent with it.

        `authorization` is the header of this name; None: there is none. `job` is the one that the
        request names; whether it exists makes no difference here. Raises `UnauthenticatedError`,
        `ForbiddenError`, and `UnavailableError` if the keys are not known.
        """
        if self.open:
            return ANYONE
        if authorization is None:
            raise UnauthenticatedError(_SEND_A_KEY)
        now_ms = self._clock.steady_ms()
        if now_ms >= self._recheck_at_ms:
            self._granted.clear()
            self._recheck_at_ms = now_ms + RECHECK_MS
        # By the header as it was sent: it is neither taken apart nor hashed for a request like the last.
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
        """Return whether a request admitted at this version would be admitted again without a check of
        its key: the table is the same, and nothing is due to be checked again.
        """
        return version == self.version and (
            self.open or self._clock.steady_ms() < self._recheck_at_ms
        )

    def confirm(self, key: Key) -> None:
        """Check that an admitted key still is one. For responses that take long: polls and streams.

        Raises `UnauthenticatedError`, and `UnavailableError` if the keys are not known.
        """
        if key is not ANYONE:
            self._find(key.digest)
        elif not self.open:
            raise UnauthenticatedError(_SEND_A_KEY)

    def _find(self, digest: bytes) -> Key:
        key = self._operator.get(digest) or self._stored.get(digest)
        if key is None:
            self._check_known()
            raise UnauthenticatedError("the key is not known: it is misspelt, or was revoked")
        self._use(key)
        return key

    def _use(self, key: Key) -> None:
        """Check what time has changed about a key, and note that it is used."""
        digest = key.digest
        if digest in self._operator:
            return
        self._check_known()
        now_ms = self._clock.wall_ms()
        if key.expires_at_ms is not None and now_ms >= key.expires_at_ms:
            raise UnauthenticatedError(f"the key {key.name!r} has expired: ask for a new one")
        if now_ms - self._noted_at_ms.get(digest, 0) >= _NOTE_STEP_MS:
            self._noted_at_ms[digest] = self._uses[digest] = now_ms

    def _check_known(self) -> None:
        if self._shared and self._clock.steady_ms() - self._read_at_ms > STALE_MS:
            raise UnavailableError(
                "the ledger does not answer, so it is not known which keys were revoked: retry"
            )

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
                    f"there is a key {name!r}: revoke it first, or choose another name"
                )
            self._replace({**self._stored, key.digest: key})
        return key, secret

    @run_to_completion
    async def revoke(self, name: str, by: Actor) -> None:
        """Revoke a key: this replica refuses it at once. Raises `UnknownKeyError`."""
        async with self._changing:
            deed = Deed(Action.REVOKE_KEY, by, self._clock.wall_ms())
            if not await self._certainly(self._ledger.delete_key(name, deed)):
                raise UnknownKeyError(f"there is no key {name!r}")
            self._replace({d: key for d, key in self._stored.items() if key.name != name})

    async def _certainly(self, change: Awaitable[bool]) -> bool:
        """Note it if the outcome of a change is not known: then the table must be read again."""
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
        """Keep the copy up to date, and write when keys were used, until the service ends."""
        while await shutdown.sleep(REFRESH_INTERVAL_S):
            try:
                await self.catch_up()
            except UnavailableError as error:
                log.debug("cannot read the keys now, retrying: %s", error.detail)

    async def catch_up(self) -> None:
        """Read the table again if it may have changed, and write when keys were last used.

        What cannot be written is noted again at the next use, a minute later. Raises `UnavailableError`.
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
    # Not a word about the job: for one that exists and one that does not, the answer is the same.
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
