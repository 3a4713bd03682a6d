"""Connections to Redis by the URL of a deployment: one server, Sentinel or Cluster.

Each connection first requests its server's run id, and each step passes that on. A server that was
restarted, or another one that took over, has another run id: whatever state it has kept may lack the
last writes. The step notices in the same atomic script that would have relied on that state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import SplitResult, parse_qsl, urlsplit

from redis.asyncio import Redis, RedisCluster, Sentinel
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import BlockingConnectionPool, Connection, SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from typing_extensions import override

CLIENT_NAME = "tidegauge"

_CONNECTIONS = 32
"""To one server. Reports and reads are batched, so even a busy process needs only a few."""

_CONNECT_TIMEOUT_S = 1.0
TIMEOUT_S = 3.0
"""Timeout of a command."""

_POOL_TIMEOUT_S = 3.0


class Server:
    """In the arguments of a step: a placeholder for the run id of the server it is sent to."""


SERVER = Server()


class _Encoder:
    """Encodes arguments. Each connection has its own, with the run id of its server."""

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


@dataclass(frozen=True, slots=True)
class _LatePacked:
    """A command that is packed when it is written."""

    pack: Callable[..., Iterable[bytes]]
    args: tuple[object, ...]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.pack(*self.args))


class _ClusterConnection(Connection):
    """A connection that packs a command once it is open.

    A node of the library's cluster packs first, and then connects. A step would then go out without its
    server's run id, or with the one from before the server's restart, and find the state lost.
    """

    @override
    def pack_command(self, *args: object) -> Any:
        return _LatePacked(super().pack_command, args)


class _ClusterTlsConnection(_ClusterConnection, SSLConnection):
    pass


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


def connect(url: str) -> Redis | RedisCluster:
    """Return the library's client for a URL; it connects when it is used. Raises `ValueError`."""
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
            "host and port cannot be separated: in a password, write / as %2F, @ as %40 and so on"
        ) from None
    return parts


def _options() -> dict[str, Any]:
    return {
        "socket_connect_timeout": _CONNECT_TIMEOUT_S,
        "socket_timeout": TIMEOUT_S,
        "socket_keepalive": True,
        # `RedisClient.step` retries those steps that may be.
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
    connection_class = _ClusterTlsConnection if tls else _ClusterConnection
    client = RedisCluster(
        startup_nodes=nodes, max_connections=_CONNECTIONS, ssl=tls, **options, **_login(parts)
    )
    # RedisCluster takes these for its nodes, but not as options of its own.
    client.connection_kwargs.update(ours, connection_class=connection_class)
    for node in client.startup_nodes:
        node.connection_kwargs.update(ours)
        node.connection_class = connection_class
    return client
