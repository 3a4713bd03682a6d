"""Large responses: sent piece by piece, and counted while they are on their way."""

from __future__ import annotations

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from service.api.exchange import state
from service.api.problems import refuse
from service.errors import OverloadedError

_PIECE = 64 * 2**10


class Bulk(Response):
    """Sends a response no faster than its client reads it, and others their pieces between.

    All that are under way have a budget: whoever asks for many and reads none takes it from other large
    responses, and not from the memory of the process.
    """

    def __init__(self, request: Request, response: Response, *, shared: bool = False) -> None:
        """`shared`: the body is in memory anyway, and takes none of the budget."""
        self._request = request
        self._response = response
        self._shared = shared

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See `Response`."""
        body = bytes(self._response.body)
        with state(self._request).responses.hold() as hold:
            try:
                hold.take(0 if self._shared else len(body))
            except OverloadedError as error:
                await refuse(self._request, error)(scope, receive, send)
                return
            await self._send(body, send)

    async def _send(self, body: bytes, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self._response.status_code,
                "headers": self._response.raw_headers,
            }
        )
        pace = state(self._request).pace
        for start in range(0, len(body), _PIECE):
            await pace.next()
            # Waits while the client does not read.
            await send(
                {
                    "type": "http.response.body",
                    "body": body[start : start + _PIECE],
                    "more_body": start + _PIECE < len(body),
                }
            )
