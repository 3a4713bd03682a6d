"""A TCP proxy on loopback that can misbehave on demand."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

CHUNK = 1 << 16
PATIENCE_S = 30
T = TypeVar("T")


@dataclass(eq=False)
class _Connection:
    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    pumps: list[asyncio.Task[None]] = field(default_factory=list[asyncio.Task[None]])

    def cut(self) -> None:
        """Reset both ends, without an orderly close."""
        for pump in self.pumps:
            pump.cancel()
        for writer in (self.client, self.server):
            _reset(writer)


def _reset(writer: asyncio.StreamWriter) -> None:
    sock: socket.socket | None = writer.get_extra_info("socket")
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


class Proxy:
    """Forwards to one port of loopback, on a thread of its own; each method returns once it is done."""

    def __init__(self, target: int, *, seed: int = 0) -> None:
        self._target = target
        self._chance = random.Random(seed)
        self._connections: set[_Connection] = set()
        self._refusing = False
        self._cuts_left = 0
        self._cut_probability = 0.0
        self.answers_cut = 0
        self._loop = asyncio.new_event_loop()
        self._flowing: asyncio.Event
        self._server: asyncio.Server
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self.port: int = self._call(self._listen())

    # ---- what it can be made to do

    def retarget(self, port: int) -> None:
        """Forward elsewhere from now on; connections to the old target are cut."""
        self._target = port
        self.cut_all()

    def cut_answers(self, count: int = 0, *, probability: float = 0.0) -> None:
        """Let requests through, but cut the connection before all of the answer is back.

        The next `count` times that the server says something, and each time with `probability`.
        """
        self._cuts_left, self._cut_probability = count, probability

    def refuse(self) -> None:
        """Reset each new connection at once. (The port stays taken: another process could have it.)"""
        self._refusing = True

    def stall(self) -> None:
        """Forward nothing in either direction, without cutting connections."""
        self._call(self._set_flowing(on=False))

    def flow(self) -> None:
        """Forward normally."""
        self._refusing = False
        self.cut_answers(0)
        self._call(self._set_flowing(on=True))

    def cut_all(self) -> None:
        """Reset every connection that there is now."""
        self._call(self._cut_all())

    def close(self) -> None:
        if self._thread.is_alive():
            self._call(self._shut())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(PATIENCE_S)
            self._loop.close()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ---- on its own thread

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)

    async def _listen(self) -> int:
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def _set_flowing(self, *, on: bool) -> None:
        if on:
            self._flowing.set()
        else:
            self._flowing.clear()

    async def _cut_all(self) -> None:
        for connection in list(self._connections):
            connection.cut()

    async def _shut(self) -> None:
        self._refusing = True
        # A connection that is being accepted when its server is closed is dropped by asyncio, and stays
        # open until the collector finds it. So nothing is accepted any more, and then the server closes.
        for listening in self._server.sockets:
            self._loop.remove_reader(listening.fileno())
        # Not cancelled: asyncio's own callback would then complain of those that it started. Again and
        # again, since a connection that was being accepted starts a task of its own when it is.
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            await self._cut_all()
            ended, _ = await asyncio.wait(others, timeout=PATIENCE_S / 2)
            if not ended:
                break
        self._server.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            _reset(writer)
            return
        try:
            from_server, to_server = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            _reset(writer)
            return
        if to_server.get_extra_info("sockname") == to_server.get_extra_info("peername"):
            # Nobody listens there, and the kernel gave this end the very port: it talks to itself.
            _reset(to_server)
            _reset(writer)
            return
        connection = _Connection(writer, to_server)
        self._connections.add(connection)
        connection.pumps = [
            asyncio.create_task(self._pump(reader, to_server, answers=False)),
            asyncio.create_task(self._pump(from_server, writer, answers=True)),
        ]
        try:
            await asyncio.wait(connection.pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._connections.discard(connection)
            await self._part(connection)

    async def _part(self, connection: _Connection) -> None:
        """Deliver what was sent before an orderly close; after a cut nothing is left to deliver."""
        for pump in connection.pumps:
            pump.cancel()
        for writer in (connection.client, connection.server):
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, answers: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK):
                await self._flowing.wait()
                if answers and self._is_cut():
                    writer.write(data[: self._chance.randrange(len(data))])
                    # Aborted at once, the part would be thrown away with the buffer.
                    await writer.drain()
                    _reset(writer)
                    return
                writer.write(data)
                await writer.drain()

    def _is_cut(self) -> bool:
        if self._cuts_left > 0:
            self._cuts_left -= 1
        elif self._chance.random() >= self._cut_probability:
            return False
        self.answers_cut += 1
        return True
