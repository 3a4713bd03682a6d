"""The client for asyncio. Each call runs in a thread, so that no other package is necessary.

A cancelled call returns to its caller at once; its request ends in the background.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal, ParamSpec, Self, TypeVar

from spark_agent.client.client import Client
from spark_agent.client.responses import (
    EtaAnswer,
    ExplainAnswer,
    HistoryAnswer,
    JobAnswer,
    JobProblemsAnswer,
    JobsAnswer,
    ProblemsAnswer,
    RangesAnswer,
    RetireAnswer,
    RunOutcome,
    RunsAnswer,
    SnapshotAnswer,
    ThrottleAnswer,
    WatermarkAnswer,
)
from spark_agent.client.watermark_wait import WaitResult
from spark_agent.times import Duration, Instant

P = ParamSpec("P")
R = TypeVar("R")


class AsyncClient:
    """A client of one service for asyncio, with the methods of `Client`; use it with `async with`.

    `concurrency` is the number of calls that run at the same time, each in a thread. A `wait_until`
    occupies one for as long as it waits. A cancelled call returns at once.

    ```python
    async with AsyncClient("http://127.0.0.1:8000") as client:
        north, south = await asyncio.gather(
            client.wait_until("parcels", "north", "2026-01-01T00:00Z", timeout="1 min"),
            client.wait_until("parcels", "south", "2026-01-01T00:00Z", timeout="1 min"),
        )
    print(north.reached, south.reached)    # True False
    ```
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_ms: int = 2_000,
        patience_ms: int = 2_000,
        key: str | None = None,
        key_file: str | None = None,
        concurrency: int = 16,
    ) -> None:
        self._client = Client(
            url,
            timeout_ms=timeout_ms,
            patience_ms=patience_ms,
            key=key,
            key_file=key_file,
            connections=concurrency,
        )
        self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix="tidegauge")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Reject further calls. Calls under way end in the background."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, partial(call, *args, **kwargs))

    async def jobs(self) -> JobsAnswer:
        """See `Client`."""
        return await self._run(self._client.jobs)

    async def job(self, job: str) -> tuple[JobAnswer, str]:
        """See `Client`."""
        return await self._run(self._client.job, job)

    async def apply(
        self, job: str, spec: Mapping[str, Any], *, etag: str | None = None
    ) -> JobAnswer:
        """See `Client`."""
        return await self._run(self._client.apply, job, spec, etag=etag)

    async def check(self, job: str, spec: Mapping[str, Any]) -> None:
        """See `Client`."""
        await self._run(self._client.check, job, spec)

    async def delete(self, job: str) -> None:
        """See `Client`."""
        await self._run(self._client.delete, job)

    async def reset(self, job: str) -> None:
        """See `Client`."""
        await self._run(self._client.reset, job)

    async def snapshot(self, job: str) -> SnapshotAnswer:
        """See `Client`."""
        return await self._run(self._client.snapshot, job)

    async def show(
        self, job: str, stage: str, *, at_least_ms: int | None = None, wait_s: int = 0
    ) -> WatermarkAnswer:
        """See `Client`."""
        return await self._run(
            self._client.show, job, stage, at_least_ms=at_least_ms, wait_s=wait_s
        )

    async def ranges(
        self, job: str, stage: str, *, limit: int, order: Literal["range", "promise"] = "promise"
    ) -> RangesAnswer:
        """See `Client`."""
        return await self._run(self._client.ranges, job, stage, limit=limit, order=order)

    async def history(
        self,
        job: str,
        stage: str,
        *,
        from_ms: int | None = None,
        until_ms: int | None = None,
        points: int | None = None,
    ) -> HistoryAnswer:
        """See `Client`."""
        return await self._run(
            self._client.history, job, stage, from_ms=from_ms, until_ms=until_ms, points=points
        )

    async def eta(self, job: str, stage: str, at: Instant) -> EtaAnswer:
        """See `Client`."""
        return await self._run(self._client.eta, job, stage, at)

    async def explain(self, job: str, stage: str, *, limit: int = 10) -> ExplainAnswer:
        """See `Client`."""
        return await self._run(self._client.explain, job, stage, limit=limit)

    async def runs(self, job: str, *, stage: str | None = None, limit: int = 20) -> RunsAnswer:
        """See `Client`."""
        return await self._run(self._client.runs, job, stage=stage, limit=limit)

    async def end_run(self, job: str, run: int, outcome: RunOutcome, because: str = "") -> None:
        """See `Client`."""
        await self._run(self._client.end_run, job, run, outcome, because)

    async def job_problems(self, job: str) -> JobProblemsAnswer:
        """See `Client`."""
        return await self._run(self._client.job_problems, job)

    async def problems(self, *, limit: int = 100) -> ProblemsAnswer:
        """See `Client`."""
        return await self._run(self._client.problems, limit=limit)

    async def retire(
        self, job: str, stage: str, range_name: str, because: str, *, dry_run: bool = False
    ) -> RetireAnswer:
        """See `Client`."""
        return await self._run(
            self._client.retire, job, stage, range_name, because, dry_run=dry_run
        )

    async def throttle(self, job: str) -> ThrottleAnswer:
        """See `Client`."""
        return await self._run(self._client.throttle, job)

    async def wait_until(
        self,
        job: str,
        stage: str,
        until: Instant,
        *,
        timeout: Duration = "1h",  # noqa: ASYNC109
    ) -> WaitResult:
        """See `Client`. After a cancellation, the thread ends within a quarter of a minute."""
        over = threading.Event()
        try:
            return await self._run(
                self._client.wait_until, job, stage, until, timeout=timeout, is_over=over.is_set
            )
        except asyncio.CancelledError:
            over.set()
            raise
