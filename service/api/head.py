"""HEAD: every GET without its body (RFC 9110, section 9.3.2)."""

from __future__ import annotations

import asyncio

from starlette.types import Message, Receive, Scope, Send

_GONE: Message = {"type": "http.disconnect"}


def as_get(scope: Scope, receive: Receive, send: Send) -> tuple[Scope, Receive, Send]:
    """Return a HEAD request as the GET that it stands for. The server leaves out the body.

    Once the header is sent, the client counts as gone: else a stream of events would never end.
    """
    answered = asyncio.Event()

    async def receive_until_answered() -> Message:
        receiving = asyncio.ensure_future(receive())
        answering = asyncio.ensure_future(answered.wait())
        try:
            await asyncio.wait((receiving, answering), return_when=asyncio.FIRST_COMPLETED)
            return receiving.result() if receiving.done() else _GONE
        finally:
            receiving.cancel()
            answering.cancel()

    async def send_header(message: Message) -> None:
        if message["type"] == "http.response.start":
            await send(message)
            await send({"type": "http.response.body"})
            answered.set()

    return {**scope, "method": "GET"}, receive_until_answered, send_header
