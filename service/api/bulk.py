"""Large responses: sent piece by piece, and counted while they are sent."""

from __future__ import annotations

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from service.api.exchange import state
from service.api.problems import refuse
from service.errors import OverloadedError

_PIECE = 64 * 2**10


class Bulk(Response):
    """A large response, sent no faster than its client reads it, with other responses in between.

    All large responses share a budget: a client that requests many and reads none takes the budget from
    other large responses, but no memory of the process.
    """

    def __init__(self, request: Request, response: Response, *, shared: bool = False) -> None:
        """`shared`: the body is in memory anyway, and does not count in the budget."""
        self._request = request
        self._response = response
        self._shared = shared

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See `Response`."""
        body = bytes(self._response.body)
        with state(self._request).responses.reserve() as reservation:
            try:
                reservation.take(0 if self._shared else len(body))
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
