"""The client for Redis: steps and commands, with retries, rights and messages, on any deployment."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import (
    ConnectionError as RedisConnectionError,
)
from redis.exceptions import (
    NoScriptError,
    RedisClusterException,
    RedisError,
    ResponseError,
)
from redis.exceptions import (
    TimeoutError as RedisTimeoutError,
)

from service.errors import StoreRefusedError, UnavailableError
from service.live.redis import schema
from service.live.redis.deployments import CLIENT_NAME, SERVER, TIMEOUT_S, connect
from service.live.redis.errors import broken, denial, translated, unavailable
from service.live.redis.packing import Key
from service.live.redis.rights import DENIED, DeniedError
from service.telemetry.redaction import shown

log = logging.getLogger(__name__)

_SILENT_WAIT_S = 0.4
"""Timeout of a command to a server that has let one time out: a request has up to three commands."""
_PROBE_TTL_MS = 60_000

_RIGHTS_PAUSE_S = 0.5
"""Interval at which a server that has refused a command is checked for the missing rights."""

_QUIET_S = 5.0
"""Time without a message after which a subscription pings its server, and waits for the answer."""

Hint = tuple[str, bytes] | None
"""A channel and a message on it; None: messages may have been missed."""

LUA = Path(__file__).parent / "lua"
_SHARED = ("base", "stages", "ranges", "leases", "epochs", "runs", "views")
"""Files with which every script begins, in this order: each file uses those before it."""

_RIGHTS = "rights"
"""Not a step: it finds out which commands the user may run, with nothing before it."""


@cache
def _files() -> Mapping[str, str]:
    """Return the text of each Lua file, by its path without the suffix."""
    return {
        path.relative_to(LUA).with_suffix("").as_posix(): path.read_text()
        for path in LUA.rglob("*.lua")
    }


@cache
def _script(step: str) -> tuple[str, str]:
    """Return the source of a step's script and its digest. Raises `KeyError` for an unknown step.

    An error of the file system instead would be taken for a Redis that does not answer, and retried.
    """
    parts = ("rules", *(f"shared/{name}" for name in _SHARED), step)
    if step == _RIGHTS:
        parts = (step,)
    header = "" if step == _RIGHTS else schema.lua_header()
    source = header + "".join(_files()[part] for part in parts)
    return source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()


class RedisClient:
    """Runs steps and commands, on any deployment."""

    def __init__(self, url: str) -> None:
        try:
            self._client = connect(url)
        except (ValueError, RedisError) as error:
            raise StoreRefusedError(
                f"TIDEGAUGE_LIVE_URL {shown(url)} cannot be used: {error}"
            ) from None
        client: Any = self._client
        self._pool: Any = getattr(client, "connection_pool", None)
        manager: Any = getattr(self._pool, "sentinel_manager", None)
        self._sentinels: Sequence[Any] = () if manager is None else manager.sentinels
        self._url = url
        self._denied: DeniedError | None = None
        self._missed_s = -_RIGHTS_PAUSE_S
        self._granted_s = 0.0
        self._checking_rights: asyncio.Task[None] | None = None
        self._is_silent = False
        self._ping: asyncio.Future[Any] | None = None
        # Any argument that `_Encoder` takes, `SERVER` included.
        self._execute: Callable[..., Awaitable[Any]] = client.execute_command

    @property
    def is_cluster(self) -> bool:
        """True if jobs are on several nodes."""
        return self._pool is None

    async def step(
        self, name: str, keys: Sequence[Key], *args: bytes | str, repeatable: bool = True
    ) -> Any:  # noqa: ANN401 - a script's reply
        """Run a step as one atomic script; return its reply.

        Raises `UnavailableError`, `WrongTypeError`. A broken connection is retried once, since it may
        have broken long ago, unless the step must not be run twice.
        """
        await self.confirm_rights()
        await self._confirm_answers()
        return await self._retried(lambda: self._evaluate(name, keys, args), 2 if repeatable else 1)

    async def command(self, *parts: bytes | str | int) -> Any:  # noqa: ANN401 - a server's reply
        """Run a plain command, which may be repeated. Raises `UnavailableError`, `WrongTypeError`."""
        await self.confirm_rights()
        await self._confirm_answers()
        return await self._retried(lambda: self._send(*parts), 2)

    # ---- silence

    async def _confirm_answers(self) -> None:
        """Return if the server answers, as far as is known. Raises `UnavailableError`.

        After a command that has timed out, nothing but a PING is sent until that is answered. Else each
        request would wait for every timeout of its own, which is longer than clients wait. In a cluster,
        where other nodes go on, each request waits.
        """
        if not self._is_silent:
            return
        if self._ping is None:
            self._ping = asyncio.ensure_future(self._send("PING"))
            self._ping.add_done_callback(self._has_pinged)
        await asyncio.wait({self._ping}, timeout=_SILENT_WAIT_S)
        if self._is_silent:
            raise UnavailableError("the live store does not answer: it is silent, though connected")

    def _has_pinged(self, ping: asyncio.Future[Any]) -> None:
        self._ping = None
        # A server that refuses is not silent. The next command finds out more.
        self._is_silent = ping.cancelled() or isinstance(ping.exception(), RedisTimeoutError)

    # ---- rights

    async def confirm_rights(self) -> None:
        """Return if the user lacks no right, as far as is known. Raises `DeniedError`.

        After a refusal nothing is sent, until every right is there: a script that is refused a command
        in its middle is not rolled back.
        """
        if self._refusal() is None:
            return
        now_s = asyncio.get_running_loop().time()
        if self._checking_rights is not None or now_s >= self._missed_s + _RIGHTS_PAUSE_S:
            with suppress(DeniedError):
                await self.check_rights()
        refusal = self._refusal()
        if refusal is not None:
            raise DeniedError(refusal.right, refusal.words)

    def _refusal(self) -> DeniedError | None:
        return self._denied

    async def check_rights(self) -> None:
        """Try every right that is needed. Raises `DeniedError`, which names all that are missing.

        Callers share one check: an older one that ends later would deny what has been granted since.
        """
        if self._checking_rights is None:
            self._checking_rights = asyncio.ensure_future(self._check_rights())
            self._checking_rights.add_done_callback(self._rights_are_checked)
        # Shielded: a client that gives up must not cancel what others wait for.
        await asyncio.shield(self._checking_rights)

    def _rights_are_checked(self, task: asyncio.Task[None]) -> None:
        self._checking_rights = None
        if not task.cancelled():
            # Retrieved, whether or not somebody still waits for it.
            task.exception()

    async def _check_rights(self) -> None:
        missing = await self.missing_rights()
        if not missing:
            if self._denied is not None:
                log.warning("the live store's user may use %s again", self._denied.right)
            self._denied = None
            self._granted_s = asyncio.get_running_loop().time()
            return
        self._missed_s = asyncio.get_running_loop().time()
        self._denied = DeniedError(", ".join(missing), next(iter(missing.values())))
        raise self._denied

    async def missing_rights(self) -> Mapping[str, str]:
        """Try every right that is needed; return those that are missing, each with the server's words.

        Nothing is left behind, and no job is touched. Raises `UnavailableError`, or `StoreRefusedError`
        if the server is of another kind.
        """
        missing: dict[str, str] = {}
        probe = schema.RIGHTS_PROBE
        plain: tuple[tuple[bytes | str | int, ...], ...] = (
            ("INFO", "server"),
            ("PING",),
            ("CLIENT SETNAME", CLIENT_NAME),
            ("SMEMBERS", schema.JOBS),
            ("EVAL", "return 1", 1, probe),
        )
        for parts in plain:
            try:
                await self._retried(partial(self._send, *parts), 2)
            except DeniedError as error:
                missing.setdefault(error.right, error.words)
            except ResponseError:
                # Refused for another reason: in a cluster, some have no meaning.
                continue
        found: Sequence[bytes] = ()
        try:
            found = await self._retried(
                lambda: self._evaluate(_RIGHTS, [probe], [schema.channel("")]), 2
            )
        except DeniedError as error:
            missing.setdefault(error.right, error.words)
        except ResponseError as error:
            # Not even that: it is another kind of server than the URL has it.
            raise StoreRefusedError(
                f"TIDEGAUGE_LIVE_URL {shown(self._url)} cannot be used: {error}"
            ) from None
        for command, words in zip(found[::2], found[1::2], strict=True):
            said = words.decode()
            if DENIED.search(said) is not None:
                of_channel = "channel" in said or "key" in said
                right = denial(said).right if of_channel else command.decode()
                missing.setdefault(right, said)
        try:
            await self._try_listening()
        except DeniedError as error:
            missing.setdefault(error.right, error.words)
        return missing

    async def _try_listening(self) -> None:
        async with self._listening(schema.CHANNELS) as pubsub:
            await pubsub.get_message(timeout=TIMEOUT_S)

    async def _retried(self, attempt: Callable[[], Awaitable[Any]], tries: int) -> Any:  # noqa: ANN401
        while True:
            tries -= 1
            try:
                return await attempt()
            except RedisTimeoutError as error:
                # In a cluster, it is one node of several: the others go on.
                self._is_silent = self._pool is not None
                raise unavailable(error) from error
            except (RedisConnectionError, OSError) as error:
                if not tries:
                    raise unavailable(error) from error
                # A server that was restarted has closed all of them. Else the retry might get another
                # one that broke just then, and has not been found out yet either.
                await self._close_idle()

    async def _close_idle(self) -> None:
        if self._pool is not None:
            await self._pool.disconnect(inuse_connections=False)

    async def _evaluate(self, name: str, keys: Sequence[Key], args: Sequence[bytes | str]) -> Any:  # noqa: ANN401
        source, digest = _script(name)
        rest = (len(keys), *keys, SERVER, *args)
        try:
            return await self._send("EVALSHA", digest, *rest, source=source)
        except NoScriptError:
            # Redis forgets scripts when it restarts. EVAL loads this one again.
            return await self._send("EVAL", source, *rest, source=source)

    async def _send(self, *parts: object, source: str | None = None) -> Any:  # noqa: ANN401
        began_s = asyncio.get_running_loop().time()
        try:
            return await self._execute(*parts)
        except NoScriptError:
            raise
        except ResponseError as error:
            meant = translated(error, self._url, source)
            if isinstance(meant, DeniedError) and began_s >= self._granted_s:
                self._denied = meant
            raise meant from error
        except RedisClusterException as error:
            self._check_is_cluster(error)
            raise RedisConnectionError(str(error)) from error
        except (RuntimeError, AttributeError) as error:
            raise broken(error) from error

    async def probe(self, key: Key) -> None:
        """Return if the server with this key takes writes. Raises `UnavailableError`."""
        await self.command("SET", key, "", "PX", _PROBE_TTL_MS)

    async def hints(self, pattern: str) -> AsyncGenerator[Hint]:
        """Yield the messages on matching channels; None: some may have been missed.

        Raises `UnavailableError` when the connection is lost; then listen again.
        """
        now_s = asyncio.get_running_loop().time
        async with self._listening(pattern) as pubsub:
            yield None
            pinged_s: float | None = None
            while True:
                message = await pubsub.get_message(ignore_subscribe_messages=True, timeout=_QUIET_S)
                if message is not None:
                    # Also the answer to a ping.
                    pinged_s = None
                    if message["type"] == "pmessage":
                        yield message["channel"].decode(), message["data"]
                elif pinged_s is None:
                    pinged_s = now_s()
                    await pubsub.ping()
                elif now_s() - pinged_s >= _QUIET_S:
                    # Half open: what is sent is lost without an error, maybe for ever.
                    raise UnavailableError(
                        "Redis does not answer on the subscription: subscribing anew"
                    )

    @asynccontextmanager
    async def _listening(self, pattern: str) -> AsyncGenerator[Any]:
        """Subscribe to matching channels; errors are translated to those of a store."""
        client: Any = await self._hint_source()
        pubsub = client.pubsub()
        try:
            await pubsub.psubscribe(pattern)
            yield pubsub
        except ResponseError as error:
            raise translated(error, self._url) from error
        except (RuntimeError, AttributeError) as error:
            raise unavailable(broken(error)) from error
        except (RedisError, OSError) as error:
            raise unavailable(error) from error
        finally:
            await pubsub.aclose()
            if client is not self._client:
                await client.aclose()

    async def _hint_source(self) -> Redis:
        """Choose a server to listen to: in a cluster, messages reach every node."""
        if isinstance(self._client, Redis):
            return self._client
        try:
            await self._client.initialize()
        except RedisClusterException as error:
            self._check_is_cluster(error)
            raise unavailable(error) from error
        except (RedisError, OSError) as error:
            raise unavailable(error) from error
        node = self._client.get_random_node()
        options = {
            name: value
            for name, value in self._client.connection_kwargs.items()
            if name in ("username", "password", "socket_timeout", "socket_connect_timeout")
        }
        return Redis(host=node.host, port=int(node.port), **options)

    def _check_is_cluster(self, error: RedisClusterException) -> None:
        """Raise `StoreRefusedError` if the server is a single one."""
        if "Cluster mode is not enabled" in str(error):
            raise StoreRefusedError(
                f"TIDEGAUGE_LIVE_URL {shown(self._url)} cannot be used: the server is not a Cluster. Use"
                " redis://…"
            ) from None

    async def close(self) -> None:
        """Close every connection."""
        if self._ping is not None:
            self._ping.cancel()
            await asyncio.wait({self._ping})
        await self._client.aclose()
        for sentinel in self._sentinels:
            await sentinel.aclose()
