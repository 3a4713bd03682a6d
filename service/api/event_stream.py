"""The response of a stream of server-sent events, in plain ASGI."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import ExitStack, aclosing, suppress
from typing import cast

from fastapi import Response
from starlette.types import Receive, Scope, Send


class EventStream(Response):
    """Sends each piece at once, until the pieces end or the client is gone.

    Starlette's own streams cost a task group for each reader, and there may be thousands of readers.
    """

    media_type = "text/event-stream"

    def __init__(self, pieces: AsyncIterator[bytes], until: ExitStack) -> None:
        """`until` is closed when the stream has ended."""
        super().__init__(headers={"X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._until = until
        self._pieces = cast("AsyncGenerator[bytes]", pieces)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """See `Response`."""
        with self._until:
            sending = asyncio.ensure_future(self._send(send))
            gone = asyncio.ensure_future(_gone(receive))
            try:
                await asyncio.wait((sending, gone), return_when=asyncio.FIRST_COMPLETED)
            finally:
                gone.cancel()
                if not sending.done():
                    sending.cancel()
                with suppress(asyncio.CancelledError):
                    await sending

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


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
