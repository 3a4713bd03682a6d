"""The whole service in this process, on a fake clock and real stores."""

from __future__ import annotations

import asyncio
import functools
import shutil
import sqlite3
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from service.clock import Clock
from service.server.app import create_app
from service.settings import Settings
from tests.support.api import Api
from tests.support.asgi import App, StreamingTransport, running
from tests.support.clock import FakeClock
from tests.support.stores import Stores


class InProcess:
    """One service that can be stopped, lost and reopened on the same ledger."""

    def __init__(
        self,
        folder: Path,
        clock: Clock | None = None,
        stores: Stores | None = None,
        *,
        fast_lane: bool = True,
        **settings: Any,
    ) -> None:
        """`fast_lane`: whether hot routes are served by the shortcut, as they are in a real service."""
        self._fast_lane = fast_lane
        self.clock = clock or FakeClock()
        self.stores = stores or Stores()
        self._folder = folder
        self._lives = 0
        self._ledger = folder / "0.db"
        self._stack = AsyncExitStack()
        self._settings = settings
        self.client: httpx.AsyncClient

    async def start(self) -> None:
        settings = Settings(
            _env_file=None,  # pyright: ignore[reportCallIssue]
            ledger_url=self.stores.ledger_url or f"sqlite+aiosqlite:///{self._ledger}",
            live_url=self.stores.live_url,
            **self._settings,
        )
        made = create_app(settings, clock=self.clock)
        if not self._fast_lane:
            made.open_lanes([])
        app = cast("App", made)
        state = await self._stack.enter_async_context(running(app))
        self.client = await self._stack.enter_async_context(
            httpx.AsyncClient(transport=StreamingTransport(app, state), base_url="http://127.0.0.1")
        )

    async def stop(self) -> None:
        """Shut down as on SIGTERM."""
        await self._stack.aclose()

    def advance(self, ms: int) -> None:
        """Let time pass."""
        assert isinstance(self.clock, FakeClock)
        self.clock.advance(ms)
        self.stores.hasten(ms)

    def skip_on_redis(self) -> None:
        """Skip a test that needs a clock which stands still: that of Redis goes on."""
        if self.stores.redis is not None:
            pytest.skip("the clock of Redis goes on")

    async def restart(self) -> None:
        """Shut down and start again; the live store is a new one."""
        await self.stop()
        self.stores.lose()
        await self.start()

    async def crash(self) -> None:
        """Continue from what `kill -9` would have left: the transactions committed so far.

        The old application is closed after the picture is taken, on a file that nobody reads again.
        """
        if self.stores.ledger_url is not None:
            await self.restart()
            return
        self._lives += 1
        image = self._folder / f"{self._lives}.db"
        with _connect(self._ledger) as source, _connect(image) as target:
            source.backup(target)
        source.close()
        target.close()
        await self.stop()
        self._ledger = image
        self.stores.lose()
        await self.start()

    def forget_history(self) -> None:
        """Delete the history of watermarks, as happens after a month."""
        statement = "DELETE FROM watermark_history"
        if self.stores.ledger_url is not None:
            self.stores.execute(statement)
            return
        with _connect(self._ledger) as ledger:
            ledger.execute(statement)
        ledger.close()

    def api(self, job: str = "job") -> Api:
        return Api(self.client, job)

    async def __aenter__(self) -> InProcess:
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.stop()


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path)


@functools.cache
def _template() -> bytes:
    """An empty ledger with its schema: making one takes longer than most tests."""
    folder = Path(tempfile.mkdtemp(prefix="tidegauge-"))
    try:

        async def make() -> None:
            async with InProcess(folder):
                pass

        # On a thread of its own: the caller's event loop is running.
        with ThreadPoolExecutor(1) as pool:
            pool.submit(asyncio.run, make()).result()
        return (folder / "0.db").read_bytes()
    finally:
        shutil.rmtree(folder)


def with_schema(folder: Path) -> Path:
    """Put a migrated, empty ledger where `InProcess(folder)` looks for its own."""
    (folder / "0.db").write_bytes(_template())
    return folder
