"""The client for Redis: one server, Sentinel or Cluster; scripts, retries and errors.

Each connection first asks its server for the run id, and each step passes that on. A server that was
restarted, or another one that took over, has another run id: whatever state it has kept may lack the
last writes. The step notices in the same atomic script that would have relied on that state.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol
from urllib.parse import SplitResult, parse_qsl, urlsplit

from redis.asyncio import Redis, RedisCluster, Sentinel
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import BlockingConnectionPool, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import SentinelConnectionPool
from redis.backoff import NoBackoff
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
from service.live.redis.packing import Key
from service.live.redis.rights import DENIED, DeniedError, denied
from service.live.redis.scripts import RIGHTS, script
from service.telemetry.redaction import shown

log = logging.getLogger(__name__)

CLIENT_NAME = "tidegauge"

_CONNECTIONS = 32
"""To one server. Reports and reads are batched, so even a busy process needs only a few."""

_CONNECT_TIMEOUT_S = 1.0
_TIMEOUT_S = 3.0
_POOL_TIMEOUT_S = 3.0
_SILENT_WAIT_S = 0.4
"""Timeout of a command to a server that has let one time out: a request has up to three commands."""
_PROBE_TTL_MS = 60_000

_REFUSED = re.compile(
    r"(?:^|[ -])(OOM|MISCONF|NOREPLICAS|READONLY|LOADING|MASTERDOWN|BUSY|CLUSTERDOWN|TRYAGAIN) "
)
"""Errors of a server that is up, but cannot take a write now.

Of a plain command the code is the first word, or is taken off (then it is the error's `status_code`).
Of a command within a script, older servers put it into the middle: `Error running script …: -OOM …`.
"""

_WRONG_DATABASE = re.compile(r"DB index is out of range|invalid DB index|SELECT is not allowed")

_RIGHTS_PAUSE_S = 0.5
"""Interval at which a server that has refused a command is checked for the missing rights."""

_WRONG_TYPE = re.compile(r"(?:^|[ -])WRONGTYPE ")

Hint = tuple[str, bytes] | None
"""A channel and a message on it; None: messages may have been missed."""


class WrongTypeError(Exception):
    """A key holds something else than what this program writes there."""


class Server:
    """In the arguments of a step: a placeholder for the run id of the server it is sent to."""


SERVER = Server()


class _Encoder:
    """Encodes arguments. Each connection has its own, which knows the run id of its server."""

    def __init__(self, encoding: str, encoding_errors: str, decode_responses: bool) -> None:
        self.encoding = encoding
        self.encoding_errors = encoding_errors
        self.decode_responses = decode_responses
        self.server = b""

    def encode(self, value: object) -> bytes:
        if isinstance(value, bytes):
            return value
        if value is SERVER:
            return self.server
        return str(value).encode()

    def decode(self, value: bytes, force: bool = False) -> bytes | str:
        return value.decode(self.encoding, self.encoding_errors) if force else value


class _Connection(Protocol):
    encoder: _Encoder

    async def on_connect(self) -> None: ...
    async def send_command(self, *args: object, **options: object) -> None: ...
    async def read_response(self) -> bytes | str | dict[str, object]: ...


async def _ask_run_id(connection: _Connection) -> None:
    await connection.on_connect()
    await connection.send_command("INFO", "server", check_health=False)
    answer = await connection.read_response()
    if not isinstance(answer, bytes):
        raise RedisConnectionError("the server gave an unexpected reply to INFO")
    for line in answer.splitlines():
        name, _, value = line.partition(b":")
        if name == b"run_id":
            connection.encoder.server = value.strip()
            return
    raise RedisConnectionError("the server does not report its run id")


class RedisClient:
    """Runs steps and commands, on any deployment."""

    def __init__(self, url: str) -> None:
        try:
            self._client = _client(url)
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
        # Any argument that `_Encoder` knows, `SERVER` included.
        self._execute: Callable[..., Awaitable[Any]] = client.execute_command

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
                lambda: self._evaluate(RIGHTS, [probe], [schema.channel("")]), 2
            )
        except DeniedError as error:
            missing.setdefault(error.right, error.words)
        except ResponseError as error:
            # Not even that: it is another kind of server than the URL has it.
            raise StoreRefusedError(
                f"TIDEGAUGE_LIVE_URL {shown(self._url)} cannot be used: Redis says: {error}"
            ) from None
        for command, words in zip(found[::2], found[1::2], strict=True):
            said = words.decode()
            if DENIED.search(said) is not None:
                of_channel = "channel" in said or "key" in said
                right = _denied(said).right if of_channel else command.decode()
                missing.setdefault(right, said)
        try:
            await self._try_listening()
        except DeniedError as error:
            missing.setdefault(error.right, error.words)
        return missing

    async def _try_listening(self) -> None:
        client: Any = await self._hint_source()
        pubsub = client.pubsub()
        try:
            await pubsub.psubscribe(schema.CHANNELS)
            await pubsub.get_message(timeout=_TIMEOUT_S)
        except ResponseError as error:
            raise _translated(error, self._url) from error
        except (RuntimeError, AttributeError) as error:
            raise _unavailable(_broken(error)) from error
        except (RedisError, OSError) as error:
            raise _unavailable(error) from error
        finally:
            await pubsub.aclose()
            if client is not self._client:
                await client.aclose()

    async def _retried(self, attempt: Callable[[], Awaitable[Any]], tries: int) -> Any:  # noqa: ANN401
        while True:
            tries -= 1
            try:
                return await attempt()
            except RedisTimeoutError as error:
                # In a cluster, it is one node of several: the others go on.
                self._is_silent = self._pool is not None
                raise _unavailable(error) from error
            except (RedisConnectionError, OSError) as error:
                if not tries:
                    raise _unavailable(error) from error
                # A server that was restarted has closed all of them. Else the retry might get another
                # one that broke just then, and has not been found out yet either.
                await self._close_idle()

    async def _close_idle(self) -> None:
        if self._pool is not None:
            await self._pool.disconnect(inuse_connections=False)

    async def _evaluate(self, name: str, keys: Sequence[Key], args: Sequence[bytes | str]) -> Any:  # noqa: ANN401
        source, digest = script(name)
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
            translated = _translated(error, self._url, source)
            if isinstance(translated, DeniedError) and began_s >= self._granted_s:
                self._denied = translated
            raise translated from error
        except RedisClusterException as error:
            self._check_is_cluster(error)
            raise RedisConnectionError(str(error)) from error
        except (RuntimeError, AttributeError) as error:
            raise _broken(error) from error

    async def probe(self, key: Key) -> None:
        """Return if the server with this key takes writes. Raises `UnavailableError`."""
        await self.command("SET", key, "", "PX", _PROBE_TTL_MS)

    async def hints(self, pattern: str) -> AsyncGenerator[Hint]:
        """Yield the messages on matching channels; None: some may have been missed.

        Raises `UnavailableError` when the connection is lost; then listen again.
        """
        client: Any = await self._hint_source()
        pubsub = client.pubsub()
        try:
            await pubsub.psubscribe(pattern)
            yield None
            while True:
                # A ping when nothing comes, so that a dead connection is noticed.
                message = await pubsub.get_message(ignore_subscribe_messages=True, timeout=5.0)
                if message is None:
                    await pubsub.ping()
                elif message["type"] == "pmessage":
                    yield message["channel"].decode(), message["data"]
        except ResponseError as error:
            raise _translated(error, self._url) from error
        except (RuntimeError, AttributeError) as error:
            raise _unavailable(_broken(error)) from error
        except (RedisError, OSError) as error:
            raise _unavailable(error) from error
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
            raise _unavailable(error) from error
        except (RedisError, OSError) as error:
            raise _unavailable(error) from error
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


def _broken(error: RuntimeError | AttributeError) -> RedisConnectionError:
    """Translate the error for a connection that breaks during a write; raise any other.

    uvloop's is a `RuntimeError`. And when a node of a cluster fails, redis-py closes all connections to
    it, those in use included, whose streams then are None.
    """
    closed = "closed" in str(error) if isinstance(error, RuntimeError) else error.obj is None
    if not closed:
        raise error
    return RedisConnectionError(str(error))


def _denied(words: str, source: str | None = None) -> DeniedError:
    return denied(words, schema.CHANNELS, schema.KEYS, source=source)


def _translated(error: ResponseError, url: str, source: str | None = None) -> Exception:
    """Return the error that a server's reply means; the reply itself if it was not foreseen.

    `source` is the script that failed; None: it was a plain command.
    """
    message = f"{error.status_code or ''} {error}"
    if DENIED.search(message):
        return _denied(str(error), source)
    if _WRONG_DATABASE.search(message):
        return StoreRefusedError(
            f"TIDEGAUGE_LIVE_URL {shown(url)} cannot be used: {error}. Choose another database"
            " (…/0), or raise `databases` in Redis"
        )
    if _WRONG_TYPE.search(message):
        return WrongTypeError(str(error))
    refused = _REFUSED.search(message)
    if refused is None:
        return error
    return UnavailableError(f"the live store refuses commands now: {message[refused.start(1) :]}")


def _unavailable(error: BaseException) -> UnavailableError:
    return UnavailableError(f"the live store does not answer: {error or type(error).__name__}")


def _client(url: str) -> Redis | RedisCluster:
    parts = _split(url)
    scheme, _, deployment = parts.scheme.partition("+")
    if scheme not in ("redis", "rediss") or deployment not in ("", "sentinel", "cluster"):
        raise ValueError(
            "use redis://host:6379/0, rediss://…, redis+sentinel://host:26379,…/name/0 or"
            " redis+cluster://host:6379,…"
        )
    match deployment:
        case "sentinel":
            return _sentinel(parts, tls=scheme == "rediss")
        case "cluster":
            return _cluster(parts, tls=scheme == "rediss")
        case _:
            database = parts.path.strip("/")
            if database and not database.isdecimal():
                raise ValueError(f"{database!r} is not the number of a database: write …/0")
            options: dict[str, Any] = {**parse_url(url)} | _options()
            pool = BlockingConnectionPool(
                max_connections=_CONNECTIONS, timeout=_POOL_TIMEOUT_S, **options
            )
            try:
                pool.make_connection()
            except TypeError as error:
                raise ValueError(f"unknown option: {error}") from error
            return Redis.from_pool(pool)


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        if "," not in parts.netloc:
            _ = parts.port
    except ValueError:
        # Python's own message would quote what it took for the port: half of a password, say.
        raise ValueError(
            "host and port cannot be told apart: in a password, write / as %2F, @ as %40 and so on"
        ) from None
    return parts


def _options() -> dict[str, Any]:
    return {
        "socket_connect_timeout": _CONNECT_TIMEOUT_S,
        "socket_timeout": _TIMEOUT_S,
        "socket_keepalive": True,
        # `RedisClient.step` retries: it knows which steps may be.
        "retry": Retry(NoBackoff(), 0),
        "redis_connect_func": _ask_run_id,
        "encoder_class": _Encoder,
        "client_name": CLIENT_NAME,
    }


def _hosts(parts: SplitResult, port: int) -> list[tuple[str, int]]:
    hosts = parts.netloc.rpartition("@")[2].split(",")
    found: list[tuple[str, int]] = []
    for host in hosts:
        name, _, number = host.rpartition(":") if ":" in host else (host, "", str(port))
        if not name or not number.isdecimal():
            raise ValueError(f"{host!r} is not host:port")
        found.append((name.strip("[]"), int(number)))
    return found


def _login(parts: SplitResult) -> dict[str, Any]:
    return {
        name: value
        for name, value in (("username", parts.username), ("password", parts.password))
        if value
    }


def _sentinel(parts: SplitResult, *, tls: bool) -> Redis:
    name, _, database = parts.path.strip("/").partition("/")
    if not name or (database and not database.isdecimal()):
        raise ValueError("name the primary: redis+sentinel://host:26379/name or …/name/0")
    query = dict(parse_qsl(parts.query))
    sentinel = Sentinel(
        _hosts(parts, 26_379),
        sentinel_kwargs={
            "socket_timeout": _CONNECT_TIMEOUT_S,
            "password": query.get("sentinel_password"),
        },
    )
    options = _options() | _login(parts) | {"db": int(database or 0), "ssl": tls}
    pool = SentinelConnectionPool(name, sentinel, max_connections=_CONNECTIONS, **options)
    return Redis.from_pool(pool)


def _cluster(parts: SplitResult, *, tls: bool) -> RedisCluster:
    nodes = [ClusterNode(host, port) for host, port in _hosts(parts, 6_379)]
    options = _options()
    ours = {name: options.pop(name) for name in ("redis_connect_func", "encoder_class")}
    client = RedisCluster(
        startup_nodes=nodes, max_connections=_CONNECTIONS, ssl=tls, **options, **_login(parts)
    )
    # RedisCluster takes these two for its nodes, but not as options of its own.
    client.connection_kwargs.update(ours)
    for node in client.startup_nodes:
        node.connection_kwargs.update(ours)
    return client
