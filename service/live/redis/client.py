"""How the live store speaks to Redis: one server, Sentinel or Cluster; scripts, retries and errors.

Every connection asks the server behind it for its run id before anything else, and each step names the
server that it believes to speak to. A server that was started again, or another one that took over, has
another run id: then the state there may lack what was last written, whatever it kept, and the step finds
out in the same atomic script that would have relied on it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, Protocol
from urllib.parse import SplitResult, parse_qsl, urlsplit, urlunsplit

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
from service.live.redis.packing import Key
from service.live.redis.scripts import script

_CONNECTIONS = 32
"""To one server. Reports and reads are batched, so even a busy process needs but a few."""

_CONNECT_TIMEOUT_S = 1.0
_TIMEOUT_S = 3.0
_POOL_TIMEOUT_S = 3.0

_REFUSALS = ("OOM ", "MISCONF ", "NOREPLICAS ", "READONLY ", "LOADING ", "MASTERDOWN ", "BUSY ")
"""Answers of a server that is there, but in no state to take a write."""

Hint = tuple[str, bytes] | None
"""A channel and what was said on it; None: something may have been missed."""


class Server:
    """Stands, in the arguments of a step, for the server that the connection leads to."""


SERVER = Server()


class _Encoder:
    """Each connection has an encoder of its own, which is told of the server behind it."""

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


async def _introduce(connection: _Connection) -> None:
    await connection.on_connect()
    await connection.send_command("INFO", "server", check_health=False)
    answer = await connection.read_response()
    if not isinstance(answer, bytes):
        raise RedisConnectionError("INFO was answered with something else")
    for line in answer.splitlines():
        name, _, value = line.partition(b":")
        if name == b"run_id":
            connection.encoder.server = value.strip()
            return
    raise RedisConnectionError("the server does not tell its run id")


class RedisClient:
    """Runs steps on a server, whatever kind of deployment it belongs to."""

    def __init__(self, url: str) -> None:
        try:
            self._client = _client(url)
        except (ValueError, RedisError) as error:
            raise StoreRefusedError(
                f"TIDEGAUGE_LIVE_URL {_hidden(url)!r} cannot be used: {error}"
            ) from error
        client: Any = self._client
        pool: Any = getattr(client, "connection_pool", None)
        manager: Any = getattr(pool, "sentinel_manager", None)
        self._sentinels: Sequence[Any] = () if manager is None else manager.sentinels
        # Takes any argument that the connection's own encoder knows, `SERVER` among them.
        self._execute: Callable[..., Awaitable[Any]] = client.execute_command

    async def step(
        self, name: str, keys: Sequence[Key], *args: bytes | str, repeatable: bool = True
    ) -> Any:  # noqa: ANN401 - what a script answers
        """Run a step as one atomic script; return what it answers.

        Raises `UnavailableError`. A connection that broke is tried once more, since it may have been
        broken long ago, unless the step must not be taken twice.
        """
        tries = 2 if repeatable else 1
        while True:
            tries -= 1
            try:
                return await self._evaluate(name, keys, args)
            except RedisTimeoutError as error:
                raise _away(error) from error
            except (RedisConnectionError, OSError) as error:
                if not tries:
                    raise _away(error) from error

    async def _evaluate(self, name: str, keys: Sequence[Key], args: Sequence[bytes | str]) -> Any:  # noqa: ANN401
        source, digest = script(name)
        rest = (len(keys), *keys, SERVER, *args)
        try:
            try:
                return await self._execute("EVALSHA", digest, *rest)
            except NoScriptError:
                # Redis forgets scripts when it restarts. EVAL teaches it this one again.
                return await self._execute("EVAL", source, *rest)
        except ResponseError as error:
            if str(error).startswith(_REFUSALS):
                raise _away(error) from error
            raise
        except RedisClusterException as error:
            raise RedisConnectionError(str(error)) from error
        except RuntimeError as error:
            raise _broken(error) from error

    async def command(self, *words: bytes | str | int) -> Any:  # noqa: ANN401 - what Redis answers
        """Run a plain command. Raises `UnavailableError`."""
        try:
            return await self._execute(*words)
        except RuntimeError as error:
            raise _away(_broken(error)) from error
        except (RedisConnectionError, RedisTimeoutError, RedisClusterException, OSError) as error:
            raise _away(error) from error
        except ResponseError as error:
            if str(error).startswith(_REFUSALS):
                raise _away(error) from error
            raise

    async def ping(self, key: Key) -> None:
        """Return if the server that has `key` answers."""
        await self.command("EXISTS", key)

    async def hints(self, pattern: str) -> AsyncGenerator[Hint]:
        """Yield what is published on channels, as (channel, message); None: some may have been missed.

        Ends with an error when the connection does; then listen again.
        """
        client: Any = await self._hint_source()
        pubsub = client.pubsub()
        try:
            await pubsub.psubscribe(pattern)
            yield None
            while True:
                # Asked for in between, so that a connection that leads nowhere is noticed.
                message = await pubsub.get_message(ignore_subscribe_messages=True, timeout=5.0)
                if message is None:
                    await pubsub.ping()
                elif message["type"] == "pmessage":
                    yield message["channel"].decode(), message["data"]
        except RuntimeError as error:
            raise _away(_broken(error)) from error
        except (RedisError, OSError) as error:
            raise _away(error) from error
        finally:
            await pubsub.aclose()
            if client is not self._client:
                await client.aclose()

    async def _hint_source(self) -> Redis:
        """Choose a server to listen to: on a cluster what is published reaches every node."""
        if isinstance(self._client, Redis):
            return self._client
        try:
            await self._client.initialize()
        except (RedisError, OSError) as error:
            raise _away(error) from error
        node = self._client.get_random_node()
        options = {
            name: value
            for name, value in self._client.connection_kwargs.items()
            if name in ("username", "password", "socket_timeout", "socket_connect_timeout")
        }
        return Redis(host=node.host, port=int(node.port), **options)

    async def close(self) -> None:
        """Close every connection."""
        await self._client.aclose()
        for sentinel in self._sentinels:
            await sentinel.aclose()


def _broken(error: RuntimeError) -> RedisConnectionError:
    """Read what uvloop says of a connection that breaks in the very moment of a write.

    Raises the error itself if it is another one.
    """
    if "closed" not in str(error):
        raise error
    return RedisConnectionError(str(error))


def _away(error: BaseException) -> UnavailableError:
    return UnavailableError(f"the live store does not answer: {error or type(error).__name__}")


def _hidden(url: str) -> str:
    """Show a URL without its password."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    return urlunsplit(parts._replace(netloc=parts.netloc.replace(f":{parts.password}@", ":***@")))


def _client(url: str) -> Redis | RedisCluster:
    parts = urlsplit(url)
    scheme, _, kind = parts.scheme.partition("+")
    if scheme not in ("redis", "rediss") or kind not in ("", "sentinel", "cluster"):
        raise ValueError(
            "use redis://host:6379/0, rediss://…, redis+sentinel://host:26379,…/name/0 or"
            " redis+cluster://host:6379,…"
        )
    match kind:
        case "sentinel":
            return _sentinel(parts, tls=scheme == "rediss")
        case "cluster":
            return _cluster(parts, tls=scheme == "rediss")
        case _:
            options: dict[str, Any] = {**parse_url(url)} | _options()
            pool = BlockingConnectionPool(
                max_connections=_CONNECTIONS, timeout=_POOL_TIMEOUT_S, **options
            )
            try:
                pool.make_connection()
            except TypeError as error:
                raise ValueError(f"an option in it is not known: {error}") from error
            return Redis.from_pool(pool)


def _options() -> dict[str, Any]:
    return {
        "socket_connect_timeout": _CONNECT_TIMEOUT_S,
        "socket_timeout": _TIMEOUT_S,
        "socket_keepalive": True,
        # Tried again by `RedisClient.step`, which knows what may be.
        "retry": Retry(NoBackoff(), 0),
        "redis_connect_func": _introduce,
        "encoder_class": _Encoder,
        "client_name": "tidegauge",
    }


def _hosts(parts: SplitResult, port: int) -> list[tuple[str, int]]:
    hosts = parts.netloc.rpartition("@")[2].split(",")
    found: list[tuple[str, int]] = []
    for host in hosts:
        name, _, number = host.rpartition(":") if ":" in host else (host, "", str(port))
        if not name or not number.isdecimal():
            raise ValueError(f"{host!r} is no host:port")
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
    witness = {name: options.pop(name) for name in ("redis_connect_func", "encoder_class")}
    client = RedisCluster(
        startup_nodes=nodes, max_connections=_CONNECTIONS, ssl=tls, **options, **_login(parts)
    )
    # It takes these two for each of its nodes, but not as options of its own.
    client.connection_kwargs.update(witness)
    for node in client.startup_nodes:
        node.connection_kwargs.update(witness)
    return client
