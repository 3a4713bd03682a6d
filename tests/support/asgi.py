"""An application in process: its lifespan, and a transport that streams.

`httpx.ASGITransport` collects a whole answer before it hands it out and passes no lifespan state;
server-sent events need the first and a lifespan that yields state needs the second.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

import httpx

Message = MutableMapping[str, Any]
App = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]],
    Awaitable[None],
]


@asynccontextmanager
async def running(app: App) -> AsyncGenerator[dict[str, Any]]:
    """Run the application's start-up and shutdown around the block; yields the lifespan's state."""
    state: dict[str, Any] = {}
    inbox: asyncio.Queue[Message] = asyncio.Queue()
    outbox: asyncio.Queue[Message] = asyncio.Queue()
    task = asyncio.ensure_future(
        app({"type": "lifespan", "asgi": {"version": "3.0"}, "state": state}, inbox.get, outbox.put)
    )
    try:
        await _exchange(inbox, outbox, task, "startup")
        yield state
        await _exchange(inbox, outbox, task, "shutdown")
        await task
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task])


async def _exchange(
    inbox: asyncio.Queue[Message],
    outbox: asyncio.Queue[Message],
    task: asyncio.Future[None],
    phase: str,
) -> None:
    await inbox.put({"type": f"lifespan.{phase}"})
    answer = asyncio.ensure_future(outbox.get())
    await asyncio.wait([answer, task], return_when=asyncio.FIRST_COMPLETED)
    if not answer.done():
        answer.cancel()
        task.result()
        raise RuntimeError(f"the lifespan ended during {phase}")
    if answer.result()["type"] != f"lifespan.{phase}.complete":
        raise RuntimeError(str(answer.result()))


class _Stream(httpx.AsyncByteStream):
    def __init__(self, outbox: asyncio.Queue[Message | None], task: asyncio.Task[None]) -> None:
        self._outbox = outbox
        self._task = task
        self.gone = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (message := await self._outbox.get()) is not None:
            yield message.get("body", b"")
            if not message.get("more_body", False):
                break
        await self.aclose()

    async def aclose(self) -> None:
        self.gone.set()
        await asyncio.wait([self._task], timeout=10)
        if not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])
            raise AssertionError("the application went on for 10 s after its client had gone")
        if not self._task.cancelled():
            self._task.result()


class StreamingTransport(httpx.AsyncBaseTransport):
    """Calls the application on this event loop; an exception in it is raised in the caller."""

    def __init__(self, app: App, state: dict[str, Any]) -> None:
        self._app = app
        self._state = state

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request; the answer's body streams as the application sends it."""
        body = await request.aread()
        outbox: asyncio.Queue[Message | None] = asyncio.Queue()
        sent = False
        stream: _Stream

        async def receive() -> Message:
            nonlocal sent
            if not sent:
                sent = True
                return {"type": "http.request", "body": body, "more_body": False}
            await stream.gone.wait()
            return {"type": "http.disconnect"}

        task = asyncio.ensure_future(self._run(self._scope(request), receive, outbox))
        stream = _Stream(outbox, task)
        try:
            start = await outbox.get()
        except asyncio.CancelledError:
            stream.gone.set()
            task.cancel()
            await asyncio.wait([task])
            raise
        if start is None:
            await stream.aclose()
            raise RuntimeError("the application ended without an answer")
        return httpx.Response(start["status"], headers=start["headers"], stream=stream)

    async def _run(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        outbox: asyncio.Queue[Message | None],
    ) -> None:
        try:
            await self._app(scope, receive, outbox.put)
        finally:
            outbox.put_nowait(None)

    def _scope(self, request: httpx.Request) -> Message:
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": request.method,
            "headers": [(name.lower(), value) for name, value in request.headers.raw],
            "scheme": request.url.scheme,
            "path": request.url.path,
            "raw_path": request.url.raw_path.split(b"?")[0],
            "query_string": request.url.query,
            "server": (request.url.host, request.url.port or 80),
            "client": ("127.0.0.1", 1),
            "root_path": "",
            "state": dict(self._state),
        }
