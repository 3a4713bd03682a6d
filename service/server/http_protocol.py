"""One connection: uvicorn's HTTP protocol, with limits on the client's use of the process.

The limits are here, because they apply before a request exists: to headers without an end, missing
bodies, and silent connections. The parser is httptools. h11 has only a limit for headers, and takes
several times as long for a request.

Requests have no timers. `Guard.sweep` checks every connection twice a second, and the protocol only
notes its position; so a limit may apply half a second late.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Final

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

from service.api.problems import problem_response
from service.api.web import with_browser_headers
from service.errors import (
    GuardError,
    HeaderTooLargeError,
    MalformedHttpError,
    OverloadedError,
    RequestTimeoutError,
    UriTooLongError,
)
from service.server.connection_limits import Guard

_LINGER_MS: Final = 1_000
_LINGER_BYTES: Final = 2**20

# The part of a request being read. Not an `Enum`: it is compared several times for each request.
_NOTHING: Final = 0
_HEADER: Final = 1
_BODY: Final = 2


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP, with limits. The application's lifespan yields the `guard`."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.address = ""
        self.since_ms = 0
        """Instant when the current header or body began, or the connection became idle."""
        self._guard: Guard = app_state["guard"]
        self._limits = self._guard.limits
        self._reading: int = _NOTHING
        self._moved_ms = 0
        self._chunk_bytes = 0
        self._carried_bytes = 0
        """Bytes of a header, or of a body's trailers, in earlier chunks than this one."""
        self._moved = False
        """True if this chunk began a header, or had a piece of a body."""
        self._upgrades = False
        """True if this request has an `Upgrade` to another protocol."""
        self._unsent_bytes = 0
        self._unanswered: deque[RequestResponseCycle] = deque()
        """The unanswered requests; uvicorn's `cycle` is the last of them."""
        self._refusal: GuardError | None = None
        self._lingering = False
        self._drained_bytes = 0

    @property
    def idle(self) -> bool:
        """True if nothing is being read or answered."""
        return (
            self._reading == _NOTHING
            and self._refusal is None
            and (self.cycle is None or self.cycle.response_complete)  # pyright: ignore[reportUnnecessaryComparison]
        )

    # ---- the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self.since_ms = self._guard.now_ms
        try:
            self._guard.accept(self)
        except OverloadedError as error:
            self._refuse(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._guard.forget(self)
        self._disconnect_requests()
        if self._lingering:
            self._guard.end_linger()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if self._refusal is not None or self.parser is None:  # pyright: ignore[reportUnnecessaryComparison]
            self._drain(len(data))
            return
        self._unset_keepalive_if_required()
        self._chunk_bytes = len(data)
        self._moved = False
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            found = error.__context__
            self._refuse(found if isinstance(found, GuardError) else _malformed(error))
        else:
            if self._reading != _NOTHING:
                self._count_carried()

    def _feed(self, data: bytes) -> None:
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                # For httptools, the bytes after the header are of another protocol. This service has
                # no other, so the request is read again without the upgrade, and then its body.
                # Java's client requests an upgrade in its first request, of whatever kind.
                data = self._without_upgrade() + data[upgrade.args[0] :]
                self._upgrades = False
                self._reading = _NOTHING
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            else:
                return

    def _without_upgrade(self) -> bytes:
        """Return the received header without the upgrade."""
        version = self.parser.get_http_version().encode()
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
        lines += [
            name
            + b": "
            + (value if name != b"connection" else value.lower().replace(b"upgrade", b""))
            for name, value in self.headers
            if name != b"upgrade"
        ]
        return b"\r\n".join([*lines, b"", b""])

    def _count_carried(self) -> None:
        # httptools joins the pieces of a header, and copies all of them each time: the square of the
        # length. So an endless header is rejected here, by its length, and not at its end.
        self._carried_bytes = 0 if self._moved else self._carried_bytes + self._chunk_bytes
        if self._carried_bytes > self._limits.max_header_bytes:
            self._refuse(
                self._header_too_large()
                if self.headers or self._reading == _BODY
                else self._uri_too_long()
            )

    # ---- the parser's callbacks; `feed_data` raises its own error, with theirs as the context

    def on_message_begin(self) -> None:
        """See `HttpToolsProtocol`."""
        super().on_message_begin()
        self._reading = _HEADER
        self.since_ms = self._guard.now_ms
        self._moved = True
        self._carried_bytes = 0

    def on_headers_complete(self) -> None:
        """See `HttpToolsProtocol`."""
        limits = self._limits
        if len(self.url) > limits.max_url_bytes:
            raise self._uri_too_long()
        if len(self.headers) > limits.max_headers or (
            # Only a long header is summed up: a chunk bounds a short one.
            self._carried_bytes + self._chunk_bytes > limits.max_header_bytes
            and sum(len(name) + len(value) + 4 for name, value in self.headers)
            > limits.max_header_bytes
        ):
            raise self._header_too_large()
        if len(self.pipeline) >= limits.max_pipelined:
            raise OverloadedError(
                f"{limits.max_pipelined} requests of this connection wait for their answers"
                " (TIDEGAUGE_MAX_PIPELINED): read some first"
            )
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise MalformedHttpError("CONNECT is for proxies: this is an HTTP/1.1 service")
            self._upgrades = True
            return
        super().on_headers_complete()
        self._unanswered.append(self.cycle)
        # A body's trailers also pass `on_header`. They are not headers of the request.
        self.headers = []
        self._reading = _BODY
        self.since_ms = self._moved_ms = self._guard.now_ms

    def on_body(self, body: bytes) -> None:
        """See `HttpToolsProtocol`."""
        super().on_body(body)
        self._moved = True
        self._moved_ms = self._guard.now_ms

    def on_message_complete(self) -> None:
        """See `HttpToolsProtocol`."""
        if self._upgrades:
            return
        super().on_message_complete()
        self._reading = _NOTHING

    def on_response_complete(self) -> None:
        """See `HttpToolsProtocol`."""
        if self._unanswered:
            self._unanswered.popleft()
        super().on_response_complete()
        if self._reading == _NOTHING:
            self.since_ms = self._guard.now_ms
        if self._refusal is not None and self.cycle.response_complete:
            self._answer_refusal()

    def abort(self) -> None:
        """Close the connection at once."""
        self.transport.abort()

    # ---- time

    def check(self, now_ms: int) -> None:
        """End the connection, or reject the request, if it takes too long."""
        if self._lingering:
            if now_ms - self.since_ms >= _LINGER_MS:
                self.transport.abort()
        elif self.flow.write_paused or self.transport.is_closing():
            self._check_writing(now_ms)
        elif self._refusal is not None:
            return
        elif self.flow.read_paused:
            # The service does not read, so the client is not at fault.
            self.since_ms = self._moved_ms = now_ms
        elif self._reading == _HEADER:
            limit_ms = self._limits.header_timeout_ms
            if now_ms - self.since_ms > limit_ms:
                self._refuse(_timeout("header took more than", limit_ms, "HEADER_TIMEOUT_MS"))
        elif self._reading == _BODY:
            self._check_body(now_ms)
        elif self.idle and now_ms - self.since_ms > self._limits.idle_timeout_ms:
            self.transport.close()

    def _check_body(self, now_ms: int) -> None:
        stall_ms, all_ms = self._limits.body_stall_timeout_ms, self._limits.body_timeout_ms
        if now_ms - self._moved_ms > stall_ms:
            self._refuse(_timeout("body did not go on for", stall_ms, "BODY_STALL_TIMEOUT_MS"))
        elif now_ms - self.since_ms > all_ms:
            self._refuse(_timeout("body took more than", all_ms, "BODY_TIMEOUT_MS"))

    def _check_writing(self, now_ms: int) -> None:
        unsent = self.transport.get_write_buffer_size()
        if not self._unsent_bytes or unsent < self._unsent_bytes:
            self._moved_ms = now_ms
        elif now_ms - self._moved_ms > self._limits.write_timeout_ms:
            limit = f"{self._limits.write_timeout_ms} ms (TIDEGAUGE_WRITE_TIMEOUT_MS)"
            self._guard.count("slow-reader", f"{self.address} read nothing for {limit}")
            self._abandon()
        self._unsent_bytes = unsent

    def _abandon(self) -> None:
        """Close the connection at once, and disconnect its requests."""
        self._disconnect_requests()
        self.flow.resume_writing()
        self.transport.abort()

    def _disconnect_requests(self) -> None:
        """Disconnect every request. uvicorn disconnects only the last of a pipeline."""
        self.pipeline.clear()
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()
        self._unanswered.clear()

    # ---- refusals

    def _header_too_large(self) -> HeaderTooLargeError:
        return HeaderTooLargeError(
            f"the header has more than {self._limits.max_header_bytes} bytes"
            f" (TIDEGAUGE_MAX_HEADER_BYTES) or {self._limits.max_headers} fields"
            " (TIDEGAUGE_MAX_HEADERS)"
        )

    def _uri_too_long(self) -> UriTooLongError:
        return UriTooLongError(
            f"the address has more than {self._limits.max_url_bytes} bytes"
            " (TIDEGAUGE_MAX_URL_BYTES)"
        )

    def _refuse(self, error: GuardError) -> None:
        """Answer this problem, and nothing after it, on this connection."""
        self._guard.count(error.slug, f"{self.address}: {error.detail}")
        self._refusal = error
        cycle = self.cycle
        if cycle is None or cycle.response_complete:  # pyright: ignore[reportUnnecessaryComparison]
            if self._reading == _BODY:
                # The request has been answered already, and the client is still sending.
                self.transport.close()
            else:
                self._answer_refusal()
        elif self._reading != _BODY:
            # Earlier requests are answered first: `on_response_complete` continues here.
            self.flow.pause_reading()
        elif self.pipeline or cycle.response_started:
            self.transport.abort()
        else:
            # The application waits for the rest of this body. It gets a disconnect, and its answer is
            # dropped.
            cycle.disconnected = True
            cycle.message_event.set()
            self._answer_refusal()

    def _answer_refusal(self) -> None:
        if self._refusal is None or self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        answer = problem_response(self._refusal)
        lines = [STATUS_LINE[answer.status_code]]
        headers = with_browser_headers(answer.raw_headers)
        for name, value in (*self.server_state.default_headers, *headers):
            lines += [name, b": ", value, b"\r\n"]
        self.transport.write(b"".join([*lines, b"connection: close\r\n\r\n", bytes(answer.body)]))
        self._linger()

    def _linger(self) -> None:
        """Close once the client has closed, or soon.

        If data is unread when a socket is closed, the kernel resets the connection, and the client may
        lose the answer.
        """
        if not self.transport.can_write_eof() or not self._guard.let_linger():
            self.transport.close()
            return
        self._lingering = True
        self.since_ms = self._guard.now_ms
        self.flow.resume_reading()
        self.transport.write_eof()

    def _drain(self, received: int) -> None:
        self._drained_bytes += received
        if self._drained_bytes > _LINGER_BYTES:
            self.transport.abort()


def _timeout(what: str, limit_ms: int, setting: str) -> RequestTimeoutError:
    return RequestTimeoutError(f"the request's {what} {limit_ms} ms (TIDEGAUGE_{setting})")


def _malformed(error: Exception) -> MalformedHttpError:
    return MalformedHttpError(f"this is not HTTP/1.1: {str(error) or type(error).__name__}"[:200])
