"""The response of a stream of server-sent events, in plain ASGI."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import ExitStack, aclosing, suppress
from typing import cast

from fastapi import Response
from starlette.types import Receive, Scope, Send

from service.api.leaving import cancel_on_disconnect
from service.errors import ClientGoneError


class EventStream(Response):
    """Sends each piece at once, until the pieces end or the client disconnects."""

    media_type = "text/event-stream"

    def __init__(self, pieces: AsyncIterator[bytes], until: ExitStack) -> None:
        """`until` is closed when the stream has ended."""
        super().__init__(headers={"X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._until = until
        self._pieces = cast("AsyncGenerator[bytes]", pieces)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """See `Response`."""
        with self._until, suppress(ClientGoneError):
            await cancel_on_disconnect(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        async with aclosing(self._pieces) as pieces:
            async for piece in pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
