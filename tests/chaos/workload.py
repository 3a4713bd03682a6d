"""Eight workers and eight readers that switch between replicas, whatever happens to those.

Event time is the time that has passed, so that all workers keep pace with each other, and every
watermark advances as long as every range reports. Workers are honest with one exception: they go on
reporting, far ahead of the truth, under leases that they know to be lost. One that counted would show.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from tests.chaos.changes import Changer, new_history
from tests.chaos.checker import MARGIN_MS
from tests.chaos.client import Client, Mischief
from tests.chaos.history import Exchange, History, Mark, Topology
from tests.support.api import tile_ids
from tests.support.sketches import pending

BASE_MS = 1_767_225_600_000
FINAL_MS = BASE_MS + 86_400_000
"""Every worker's final report: ahead of all its earlier ones."""
FAR_MS = 10 * 86_400_000
TTL_MS = 2_000
TURN_MS = 1_500
"""Time for which one of two rivals works before the other takes over."""
FINAL_S = 30
START_S = 30
PACE_S = (0.08, 0.16)
RETRY_S = (0.05, 0.2)

STAGES: dict[str, Any] = {
    "web": {"shards": ["0", "1", "2", "3"], "percentiles": [33, 66]},
    "keyed": {"inputs": ["web"], "ranges": 4},
    "batch": {"shards": ["0", "1"]},
    "sums": {"inputs": ["batch"], "ranges": 2},
    "both": {"inputs": ["keyed", "sums"], "passthrough": True},
}
KEYED, SUMS = tile_ids(4), tile_ids(2)
TOPOLOGY = Topology(
    {"web": ("0", "1", "2", "3"), "keyed": KEYED, "batch": ("0", "1"), "sums": SUMS},
    {"keyed": ("web",), "sums": ("batch",), "both": ("keyed", "sums")},
)


@dataclass
class Common:
    """State that all workers and readers share."""

    client: Client
    mischief: Mischief
    began_ns: int = field(default_factory=time.monotonic_ns)
    resting: bool = False
    """Workers: send the final report, and end."""
    errands: set[asyncio.Task[Exchange]] = field(default_factory=set[asyncio.Task[Exchange]])

    def elapsed_ms(self) -> int:
        return (time.monotonic_ns() - self.began_ns) // 1_000_000

    def now_ms(self) -> int:
        return FINAL_MS if self.resting else BASE_MS + self.elapsed_ms()

    async def watermark(self, who: str, stage: str) -> Exchange:
        path = f"/stages/{stage}/watermark"
        return await self.client.ask(who, "watermark", "GET", path, stage=stage)

    async def report(self, who: str, stage: str, body: Mapping[str, Any]) -> Exchange:
        path = f"/stages/{stage}/reports"
        return await self.client.ask(who, "report", "POST", path, stage=stage, body=body)

    async def claim(self, who: str, stage: str, body: Mapping[str, Any]) -> Exchange:
        path = f"/stages/{stage}/leases"
        return await self.client.ask(who, "claim", "POST", path, stage=stage, body=body)

    async def run_errands(self) -> None:
        """Wait until all delayed requests have been sent."""
        if self.errands:
            await asyncio.wait(set(self.errands))

    def send_later(
        self, who: str, stage: str, body: Mapping[str, Any], within_s: float = 0.3
    ) -> None:
        """Report concurrently, so that the report may overtake others, and be overtaken."""

        async def errand() -> Exchange:
            await asyncio.sleep(random.uniform(0, within_s))
            return await self.report(who, stage, body)

        task = asyncio.create_task(errand())
        self.errands.add(task)
        task.add_done_callback(self.errands.discard)


def slug(exchange: Exchange) -> str:
    answer = exchange.answer if isinstance(exchange.answer, dict) else {}
    return str(answer.get("type", "")).removeprefix("/problems/")


class Worker:
    """Reports for some ranges without epochs, alone or in turns with a rival."""

    def __init__(
        self, common: Common, who: str, stage: str, ranges: tuple[str, ...], turn: int | None = None
    ) -> None:
        self.common = common
        self.who = who
        self.stage = stage
        self.ranges = ranges
        self.turn = turn
        self.chance = random.Random(who)
        self.token: str | None = None
        self.observed: int | None = None
        self.lost: deque[str] = deque(maxlen=20)
        """Tokens that are certainly no longer current."""
        self.bodies: deque[dict[str, Any]] = deque(maxlen=20)

    async def run(self) -> None:
        while not self.common.resting:
            await self._step()
            await asyncio.sleep(self.chance.uniform(*PACE_S))
        # The rival sends the final report for both.
        while self.turn != 1:
            if await self._last_word():
                return
            await asyncio.sleep(self.chance.uniform(*RETRY_S))

    async def _step(self) -> None:
        if self.token is None and not self._may_work():
            await self._haunt()
            return
        if self.token is None or (self._may_work() and self.chance.random() < 0.02):
            await self._claim()
        elif self.chance.random() < 0.05:
            await self._renew(self.token)
        elif self.chance.random() < (0.02 if self._may_work() else 0.1):
            await self._release(self.token)
        if self.chance.random() < 0.001:
            # For longer than the lease lasts: what it reports then must be refused.
            await asyncio.sleep((TTL_MS + MARGIN_MS + 300) / 1_000)
        if self.token is not None:
            await self._report(self.token)
        if self.chance.random() < 0.1:
            await self._haunt()

    def _turn(self) -> int:
        return self.common.elapsed_ms() // TURN_MS

    def _may_work(self) -> bool:
        return self.turn is None or self._turn() % 2 == self.turn

    async def _claim(self) -> None:
        body: dict[str, Any] = {"ranges": list(self.ranges), "holder": self.who, "ttl_ms": TTL_MS}
        if self.turn is not None:
            body["attempt"] = self._turn()
        exchange = await self.common.claim(self.who, self.stage, body)
        if exchange.status != 201:
            return
        if exchange.answer["denied"]:
            # The rival holds some of the ranges: do not use this lease.
            self.token = None
            return
        if self.token is not None:
            self.lost.append(self.token)
        self.token = exchange.answer["token"]

    async def _renew(self, token: str) -> None:
        exchange = await self.common.client.ask(
            self.who, "renew", "POST", "/leases/renew", body={"tokens": [token]}
        )
        if exchange.status == 200 and exchange.answer["lost"]:
            self._forget(token)

    async def _release(self, token: str) -> None:
        exchange = await self.common.client.ask(
            self.who, "release", "POST", "/leases/release", body={"tokens": [token]}
        )
        if exchange.status == 200:
            self._forget(token)

    def _forget(self, token: str) -> None:
        self.lost.append(token)
        if self.token == token:
            self.token = None

    async def _look(self) -> None:
        exchange = await self.common.watermark(self.who, self.stage)
        if exchange.status == 200:
            self.observed = exchange.answer["input_watermark"]

    async def _report(self, token: str) -> bool:
        """Report; return whether all of it was accepted."""
        body = await self._body(token)
        if body is None:
            return False
        self.bodies.append(body)
        if self.chance.random() < self.common.mischief.repeat:
            self.common.send_later(self.who, self.stage, self.chance.choice(self.bodies))
        exchange = await self.common.report(self.who, self.stage, body)
        if exchange.status == 200:
            self.observed = exchange.answer["watermark"]["input_watermark"]
            if exchange.answer["rejected"]:
                self.token = None
            return not exchange.answer["rejected"]
        if exchange.status == 410:
            self._forget(token)
        elif exchange.status == 409:
            self.observed = None
        else:
            await asyncio.sleep(self.chance.uniform(*RETRY_S))
        return False

    async def _body(self, token: str) -> dict[str, Any] | None:
        if not TOPOLOGY.upstreams(self.stage):
            now = self.common.now_ms()
            return {"token": token, "ranges": {name: self._shard(now) for name in self.ranges}}
        if self.observed is None or self.common.resting or self.chance.random() < 0.3:
            await self._look()
        if self.observed is None:
            return None
        words = {name: self._key_range(self.observed) for name in self.ranges}
        return {"token": token, "input_watermark": self.observed, "ranges": words}

    def _shard(self, now: int) -> Any:
        late = 0 if self.common.resting else self.chance.randint(0, 80)
        if self.chance.random() < 0.3:
            return now - late
        return {"watermark": now, "holds": {"buffer": now - late}, "pending": self._pending(now)}

    def _pending(self, now: int) -> dict[str, Any] | None:
        if self.common.resting or self.chance.random() < 0.2:
            return None
        return pending(now + self.chance.randint(0, 100) for _ in range(self.chance.randint(1, 9)))

    def _key_range(self, observed: int) -> dict[str, Any]:
        if self.common.resting:
            return {}
        return {"holds": {"state": observed - self.chance.randint(-20, 50)}}

    async def _haunt(self) -> None:
        """Report under a lease that is lost."""
        if not self.lost:
            return
        ahead = self.common.now_ms() + FAR_MS
        body: dict[str, Any] = {
            "token": self.chance.choice(self.lost),
            "ranges": dict.fromkeys(self.ranges, ahead),
        }
        if TOPOLOGY.upstreams(self.stage):
            # No more than was observed: otherwise the refusal would not be about the lease.
            body["ranges"] = {name: {} for name in self.ranges}
            body["input_watermark"] = self.observed
        await self.common.report(self.who, self.stage, body)

    async def _last_word(self) -> bool:
        await self._claim()
        if self.token is None or not await self._report(self.token):
            return False
        # A keyed range has promised no more than what had been observed before.
        return self.bodies[-1].get("input_watermark", FINAL_MS) == FINAL_MS


class Driver:
    """Executes `batch` and `sums` in epochs, as a query with micro-batches does."""

    who = "w8"

    def __init__(self, common: Common) -> None:
        self.common = common
        self.chance = random.Random(self.who)
        self.run_number: int | None = None
        self.epoch = 0
        self.attempt = 0
        self.old: deque[tuple[str, dict[str, Any]]] = deque(maxlen=20)
        """Reports of runs and attempts that have ended."""

    async def run(self) -> None:
        while not self.common.resting:
            await self._epoch()
            await asyncio.sleep(self.chance.uniform(*PACE_S))
        while not await self._is_done():
            await self._epoch()

    async def _is_done(self) -> bool:
        exchange = await self.common.watermark(self.who, "sums")
        return exchange.status == 200 and exchange.answer["output_watermark"] == FINAL_MS

    async def _epoch(self) -> None:
        """One micro-batch; any obstacle ends it, and the next one continues."""
        if self.run_number is None or self.chance.random() < 0.03:
            await self._begin()
        run = self.run_number
        if run is None:
            return
        self.epoch += 1
        self.attempt = 0
        exchange = await self.common.watermark(self.who, "sums")
        observed = exchange.answer["input_watermark"] if exchange.status == 200 else None
        now = self.common.now_ms()
        words: dict[str, dict[str, Any]] = {"batch": {"ranges": {"0": now, "1": now + 3}}}
        caps: dict[str, dict[str, Any]] = {"batch": {}}
        if self.common.resting:
            words["batch"]["ranges"]["1"] = now
        if observed is not None:
            hold = {} if self.common.resting else {"holds": {"timer": observed - 10}}
            words["sums"] = {"ranges": dict.fromkeys(SUMS, hold)}
            caps["sums"] = {"input_watermark": observed}
            if hold and self.chance.random() < 0.5:
                # Holds of all ranges may come with the commit, too.
                caps["sums"]["holds"] = {"join": observed - self.chance.randint(-20, 50)}
            if self.chance.random() < 0.5:
                words["sums"]["input_watermark"] = observed
        for stage, word in words.items():
            if not await self._task(run, stage, word):
                return
        await self._commit(run, caps)

    async def _begin(self) -> None:
        body = {"stages": ["batch", "sums"], "holder": "driver"}
        exchange = await self.common.client.ask(self.who, "run", "POST", "/runs", body=body)
        if exchange.status == 201:
            self.run_number = exchange.answer["run"]
        else:
            await self._pause()

    async def _pause(self) -> None:
        await asyncio.sleep(self.chance.uniform(*RETRY_S))

    async def _task(self, run: int, stage: str, word: Mapping[str, Any]) -> bool:
        """Claim and report until it is accepted; False: this epoch has failed."""
        while self.run_number is not None:
            right = await self._right(run, stage)
            if right is None:
                continue
            body = {**right, "epoch": self.epoch, **word}
            if self.chance.random() < self.common.mischief.repeat:
                self.common.send_later(self.who, stage, body)
            if self.chance.random() < 0.1 and self.old:
                self.common.send_later(self.who, *self.chance.choice(self.old))
            exchange = await self.common.report(self.who, stage, body)
            self.old.append((stage, body))
            if exchange.status == 200:
                if self.chance.random() < 0.9:
                    return True
                # A speculative task, which does the same again.
                continue
            if exchange.status == 409:
                self._refused(exchange)
                return False
            await self._pause()
        return False

    async def _right(self, run: int, stage: str) -> Mapping[str, Any] | None:
        """Return a token of a lease, or a claim that the report itself brings."""
        self.attempt += 1
        claim: dict[str, Any] = {
            "holder": f"task-{self.attempt}", "ttl_ms": TTL_MS,
            "run": run, "epoch": self.epoch, "attempt": self.attempt,
        }  # fmt: skip
        if self.chance.random() < 0.5:
            return {"claim": claim, "release": self.chance.random() < 0.3}
        exchange = await self.common.claim(self.who, stage, {"ranges": "all", **claim})
        if exchange.status == 201:
            return {"token": exchange.answer["token"]}
        if exchange.status == 409:
            self._refused(exchange)
        await self._pause()
        return None

    def _refused(self, exchange: Exchange) -> None:
        if slug(exchange) == "stale-run":
            self.run_number = None

    async def _commit(self, run: int, caps: Mapping[str, Any]) -> None:
        body = {"run": run, "epoch": self.epoch, "stages": caps}
        while True:
            exchange = await self.common.client.ask(
                self.who, "commit", "POST", "/commits", body=body
            )
            if exchange.status == 200:
                return
            if exchange.status == 409:
                self._refused(exchange)
                return
            await self._pause()


class Reader:
    """Reads, in one way or another, until the workload ends."""

    def __init__(self, common: Common, who: str) -> None:
        self.common = common
        self.who = who
        self.chance = random.Random(who)
        self.tags: dict[str, str] = {}

    async def look(self) -> None:
        """Read one stage, all of them, or one only if it has changed."""
        while True:
            dice = self.chance.random()
            if dice < 0.3:
                await self.common.client.ask(self.who, "snapshot", "GET", "/watermarks")
            else:
                stage = self.chance.choice(TOPOLOGY.stages)
                await self._ask(stage, conditional=dice < 0.5)
            await asyncio.sleep(self.chance.uniform(*PACE_S))

    async def poll(self) -> None:
        """Wait for changes, or for a watermark."""
        while True:
            stage = self.chance.choice(TOPOLOGY.stages)
            if self.chance.random() < 0.3:
                await self._ask(stage, at_least=self.common.now_ms() + 500, wait_s=2)
            else:
                await self._ask(stage, conditional=True, wait_s=2)
            await asyncio.sleep(self.chance.uniform(*PACE_S))

    async def _ask(
        self,
        stage: str,
        *,
        conditional: bool = False,
        at_least: int | None = None,
        wait_s: int = 0,
    ) -> None:
        query = "" if at_least is None else f"?at_least={at_least}"
        headers: dict[str, str] = {}
        request: dict[str, Any] = {"wait_s": wait_s, "at_least": at_least}
        if conditional and stage in self.tags:
            headers["If-None-Match"] = request["if_none_match"] = self.tags[stage]
        if wait_s:
            headers["Prefer"] = f"wait={wait_s}"
        exchange = await self.common.client.ask(
            self.who,
            "watermark",
            "GET",
            f"/stages/{stage}/watermark{query}",
            stage=stage,
            headers=headers,
            request=request,
            wait_s=wait_s,
        )
        if exchange.status == 200:
            answer = exchange.answer
            self.tags[stage] = f'"{answer["generation"]}-{answer["version"]}"'

    async def follow(self) -> None:
        """Follow events for as long as a stream lasts."""
        await self.listen(12_000, 30_000)

    async def listen(self, least_ms: int = 1_000, most_ms: int = 5_000) -> None:
        """Follow events for a while, then switch replicas, sometimes resuming from the last event."""
        last: str | None = None
        while True:
            replica = self.chance.choice(self.common.client.replicas)
            resumed = last if self.chance.random() < 0.7 else None
            until_ms = self.common.elapsed_ms() + self.chance.randint(least_ms, most_ms)
            stream = self.common.client.listen(self.who, replica, resumed)
            async for seen in stream:
                last = seen
                if self.common.elapsed_ms() > until_ms:
                    break
            await stream.aclose()
            await asyncio.sleep(self.chance.uniform(*RETRY_S))


class Workload:
    """All of them on one event loop, in a thread of its own."""

    def __init__(self, fronts: Mapping[str, str], job: str, seed: int = 0) -> None:
        self.history = History(TOPOLOGY)
        self.changes = new_history()
        """History of a job beside it, which is changed all the time."""
        self.mischief = Mischief()
        self._fronts = fronts
        self._job = job
        self._seed = seed
        self._resting = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="workload", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self.wait(lambda: self.moved({}), START_S)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.finish()

    def finish(self) -> None:
        """Let every worker send its final report and every reader see it; then end."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                # It has ended early, with an error.
                self._loop.call_soon_threadsafe(self._resting.set)
        self._thread.join(2 * FINAL_S + START_S)
        assert not self._thread.is_alive(), "the workload does not end"
        if self._error is not None:
            raise self._error

    def shown(self) -> dict[str, int]:
        """The largest output of each stage that any reader has seen."""
        outputs = {stage: self.history.shown(stage) for stage in TOPOLOGY.stages}
        return {stage: output for stage, output in outputs.items() if output is not None}

    def moved(self, before: Mapping[str, int]) -> bool:
        """Return whether every stage has been seen ahead of that."""
        now = self.shown()
        return all(s in now and now[s] > before.get(s, now[s] - 1) for s in TOPOLOGY.stages)

    def wait(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait for a condition; False: it did not become true."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self._error is not None:
                raise self._error
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:  # noqa: BLE001 - raised again by `finish`
            self._error = error

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        client = Client(self.history, self._job, self._fronts, self.mischief, self._seed)
        beside = Client(
            self.changes, f"{self._job}-changed", self._fronts, self.mischief, self._seed
        )
        common = Common(client, self.mischief)
        try:
            await self._define(client)
            async with asyncio.TaskGroup() as group:
                working = [group.create_task(work()) for work in self._workers(common)]
                reading = [group.create_task(read()) for read in self._readers(common)]
                reading += [group.create_task(Changer(beside, f"c{n}").run()) for n in range(2)]
                await self._resting.wait()
                await self._finale(common, working)
                # Nothing happens any more that could wake them.
                for task in reading:
                    task.cancel()
        finally:
            await client.close()
            await beside.close()

    async def _define(self, client: Client) -> None:
        while True:
            exchange = await client.ask("author", "define", "PUT", "", body={"stages": STAGES})
            if exchange.status in {200, 201}:
                return
            await asyncio.sleep(0.1)

    def _workers(self, common: Common) -> list[Any]:
        return [
            Worker(common, "w1", "web", ("0", "1")).run,
            Worker(common, "w2", "web", ("2",)).run,
            Worker(common, "w3", "web", ("3",), turn=0).run,
            Worker(common, "w4", "web", ("3",), turn=1).run,
            Worker(common, "w5", "keyed", KEYED[:2]).run,
            Worker(common, "w6", "keyed", KEYED[2:], turn=0).run,
            Worker(common, "w7", "keyed", KEYED[2:], turn=1).run,
            Driver(common).run,
        ]

    def _readers(self, common: Common) -> list[Any]:
        return [
            *(Reader(common, f"r{n}").look for n in range(1, 6)),
            Reader(common, "r6").poll,
            Reader(common, "r7").listen,
            Reader(common, "r8").follow,
        ]

    async def _finale(self, common: Common, working: list[asyncio.Task[None]]) -> None:
        self.mischief.cancel = self.mischief.repeat = 0
        # A late repetition does the watermark no harm, but could replace the last lease.
        await common.run_errands()
        common.resting = True
        begin_ns = time.monotonic_ns()
        _, unfinished = await asyncio.wait(working, timeout=FINAL_S)
        for task in unfinished:
            task.cancel()
        await common.run_errands()
        expected = dict.fromkeys(TOPOLOGY.stages, FINAL_MS)
        self.history.add(Mark("final", "final", begin_ns, time.monotonic_ns(), expected))
        # A report is accepted, too, while its replica waits to publish again after a fault.
        await asyncio.to_thread(self.wait, lambda: self.shown() == expected, FINAL_S)
        for replica in common.client.replicas:
            await common.client.ask("author", "snapshot", "GET", "/watermarks", replica=replica)
