"""The link between a query's sources and the driver: a loopback socket, one line each way.

Spark runs a Python source in a process of its own next to the driver. The state that determines its
next offset is in the driver (see `spark_agent.driver.watermark_feed`), so the source requests it from
there: a control source the next watermark, a source of ours what its shards may read.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from hmac import compare_digest
from secrets import token_hex
from socketserver import StreamRequestHandler, ThreadingTCPServer
from typing import Any, Final, TypeVar
from weakref import WeakSet

from spark_agent.clock import SystemClock
from spark_agent.exceptions import NotStartedError, QueryFailedError
from spark_agent.sources.admission import Admission, Wanted

_log: Final = logging.getLogger("spark_agent")

_LONGEST_LINE: Final = 4 << 20
"""In bytes: a source may ask for ten thousand shards."""
_CLOSES_WITHIN_S: Final = 0.1
"""Interval at which the server checks for its end. The default of half a second delays each `stop()`."""

T = TypeVar("T")


class LinkError(Exception):
    """The driver does not answer."""


@dataclass(frozen=True, slots=True)
class HeldBack:
    """Delay of a batch before it ran, with its reason."""

    ms: int
    because: str


@dataclass(frozen=True, slots=True)
class Offset:
    """Position of a control source, in Spark's checkpoint.

    `watermark_ms` is the latest watermark that it has handed to Spark, in Spark's range; None: none
    yet. `turn` counts the batches that it has caused. `waited` is only shown: in the query's progress.
    """

    watermark_ms: int | None
    turn: int
    waited: HeldBack | None = field(default=None, compare=False)

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Offset:
        """Read it from the form that Spark logs."""
        waited = stored.get("waited")
        return cls(
            stored["watermark"], stored["turn"], None if waited is None else HeldBack(**waited)
        )

    def to_dict(self) -> dict[str, Any]:
        """Return it in the form that Spark logs."""
        stored: dict[str, Any] = {"watermark": self.watermark_ms, "turn": self.turn}
        return stored if self.waited is None else stored | {"waited": asdict(self.waited)}

    @staticmethod
    def is_stored(stored: object) -> bool:
        """Return whether this is an offset in the form that Spark logs.

        >>> Offset.is_stored(Offset(5, 1, HeldBack(2, "…")).to_dict()), Offset.is_stored({"turn": 1})
        (True, False)
        """
        return isinstance(stored, dict) and stored.keys() - {"waited"} == {"watermark", "turn"}


@dataclass(frozen=True, slots=True)
class RetryLater:
    """The answer to a control source that the next batch has to wait; it retries after `ms`."""

    ms: int


@dataclass(frozen=True, slots=True)
class _Request:
    """A request for the offset after another or, if `wanted` is set, for what may be read."""

    token: str
    control: str
    reader: str
    until_ms: int
    """Instant until which the source waits for the answer, on the steady clock of this machine. Spark
    goes on without an answer."""
    watermark_ms: int | None = None
    turn: int = 0
    wanted: dict[str, Any] | None = None


class LinkClient:
    """A source's end: one persistent connection. Spark polls a source from one thread."""

    def __init__(self, port: int, token: str, *, timeout_ms: int) -> None:
        self._port = port
        self._token = token
        self._timeout_ms = timeout_ms
        # A control source may be in a plan twice (a stream joined with itself).
        self._reader = token_hex(8)
        self._link: socket.socket | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Drop the connection: Spark pickles the source for `read`, which does not need it."""
        return {**self.__dict__, "_link": None}

    def next(self, control: str, at: Offset) -> Offset | RetryLater:
        """Ask the driver for the offset after `at`.

        Raises `LinkError`, `NotStartedError`, `QueryFailedError`.
        """
        request = _Request(
            self._token, control, self._reader, self._until_ms(), at.watermark_ms, at.turn
        )
        return self._ask(request, _read_offset)

    def admit(self, source: str, wanted: Wanted) -> Admission:
        """Ask the driver what the shards of a source may read in the next batch.

        Raises `LinkError`, `NotStartedError`, `QueryFailedError`.
        """
        request = _Request(
            self._token, source, self._reader, self._until_ms(), wanted=wanted.to_dict()
        )
        return self._ask(request, lambda answer: Admission.from_dict(answer["limits"]))

    def _until_ms(self) -> int:
        # The socket's timeout begins later, so the source waits at least so long.
        return SystemClock().steady_ms() + self._timeout_ms

    def _ask(self, request: _Request, read: Callable[[dict[str, Any]], T]) -> T:
        try:
            link = self._link or self._connect()
            link.sendall(json.dumps(asdict(request)).encode() + b"\n")
            answer = json.loads(_line(link))
            if "not_started" in answer:
                raise NotStartedError(answer["not_started"])
            if "failed" in answer:
                raise QueryFailedError(answer["failed"])
            return read(answer)
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.close()
            raise LinkError(str(error)) from error

    def close(self) -> None:
        """Close the connection; the next request reconnects."""
        if self._link is not None:
            self._link.close()
            self._link = None

    def _connect(self) -> socket.socket:
        address = ("127.0.0.1", self._port)
        self._link = socket.create_connection(address, timeout=self._timeout_ms / 1_000)
        return self._link


def _read_offset(answer: dict[str, Any]) -> Offset | RetryLater:
    return (
        RetryLater(answer["retry_ms"])
        if "retry_ms" in answer
        else Offset.from_dict(answer["offset"])
    )


def _line(link: socket.socket) -> bytes:
    """Read an answer, one line. Raises `ValueError` if the connection closes before its end."""
    with link.makefile("rb") as answers:
        # The driver sends one line per request, so the file buffers nothing beyond the line.
        line = answers.readline()
    if not line.endswith(b"\n"):
        raise ValueError("the driver closed the connection")
    return line


class LinkServer:
    """The driver's end. `answer` maps a control source's id, its reader's id and its offset to the next
    offset; `admit` maps the id of a source of ours and what it wants to what it may read. Both get the
    instant until which the source waits, on the steady clock, and may raise `LinkError` in place of an
    answer. Each reader has a thread of its own.
    """

    def __init__(
        self,
        token: str,
        answer: Callable[[str, str, Offset, int], Offset | RetryLater],
        admit: Callable[[str, Wanted, int], Admission] | None = None,
    ) -> None:
        links: WeakSet[socket.socket] = WeakSet()
        answered = self._answered

        class Handler(StreamRequestHandler):
            """Answers one reader."""

            def handle(self) -> None:
                """Answer line by line; close the connection if the token is wrong."""
                links.add(self.connection)
                with suppress(LinkError):
                    while (request := self._next()) is not None:
                        line = json.dumps(answered(request)).encode() + b"\n"
                        with suppress(OSError):
                            self.wfile.write(line)

            def _next(self) -> _Request | None:
                """Return the next request; None: the connection ends, or is not that of a source."""
                with suppress(OSError, ValueError, TypeError):
                    if line := self.rfile.readline(_LONGEST_LINE):
                        request = _Request(**json.loads(line))
                        return request if compare_digest(request.token, token) else None
                return None

        self._answer = answer
        self._admit = admit
        self._links = links
        self._server = ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        threading.Thread(
            target=self._server.serve_forever,
            args=(_CLOSES_WITHIN_S,),
            name="tidegauge-link",
            daemon=True,
        ).start()

    def close(self) -> None:
        """Close the connections of all readers."""
        self._server.shutdown()
        self._server.server_close()
        for link in list(self._links):
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    def _answered(self, request: _Request) -> dict[str, Any]:
        try:
            return self._found(request)
        except NotStartedError as error:
            return {"not_started": error.stage}
        except QueryFailedError as error:
            return {"failed": str(error)}
        except LinkError:
            raise
        except Exception as error:  # noqa: BLE001  (whatever it is)
            # Without an answer, the source would go on for good, as if nothing were new.
            _log.exception("the driver could not answer a source")
            cause = f"{type(error).__name__}: {error}"
            return {"failed": f"tidegauge: the driver could not answer a source: {cause}"}

    def _found(self, request: _Request) -> dict[str, Any]:
        if request.wanted is not None and self._admit is not None:
            wanted = Wanted.from_dict(request.wanted)
            admission = self._admit(request.control, wanted, request.until_ms)
            return {"limits": admission.to_dict()}
        at = Offset(request.watermark_ms, request.turn)
        found = self._answer(request.control, request.reader, at, request.until_ms)
        if isinstance(found, RetryLater):
            return {"retry_ms": found.ms}
        return {"offset": found.to_dict()}
