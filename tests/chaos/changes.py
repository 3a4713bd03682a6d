"""Layouts, resets, deletions and runs at random, on a job of its own, beside the honest workload.

Nobody here keeps pace with anybody, so little can be said about what the watermarks must be. But
whatever was shown under an entity tag stays so, and no number that must only rise ever falls.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from tests.chaos.checker import (
    Facts,
    Maximum,
    Violation,
    ill_formed,
    no_step_back,
    streams_in_order,
    versions_tell,
)
from tests.chaos.client import Client
from tests.chaos.history import Exchange, History, Record, Topology

TTL_MS = 1_000
PACE_S = (0.02, 0.1)
SHARDS = ("0", "1", "2", "3")
NO_TOPOLOGY = Topology({}, {})


class Changer:
    """Changes a job, and reports for whatever it has just now."""

    def __init__(self, client: Client, who: str) -> None:
        self._client = client
        self._who = who
        self._chance = random.Random(who)
        self._etag: str | None = None
        self._gone = True
        """True if there was not a job at the last check."""
        self._run: int | None = None
        self._epoch = 0

    async def run(self) -> None:
        """Act until cancelled."""
        acts: dict[Callable[[], Awaitable[object]], int] = {
            self._define: 5,
            self._reset: 1,
            self._delete: 1,
            self._open_run: 1,
            self._report: 10,
            self._commit: 2,
            self._look: 10,
            self._show: 5,
        }
        while True:
            [act] = self._chance.choices(list(acts), list(acts.values()))
            await (self._define if self._gone else act)()
            await asyncio.sleep(self._chance.uniform(*PACE_S))

    async def _ask(self, *args: Any, **options: Any) -> Exchange:
        exchange = await self._client.ask(self._who, *args, **options)
        if exchange.action in ("define", "spec", "reset") and exchange.etag:
            self._etag = exchange.etag
        self._gone = exchange.status == 404 and exchange.stage is None
        return exchange

    async def _define(self) -> None:
        stages: dict[str, Any] = {
            "s": {"shards": self._chance.sample(SHARDS, self._chance.randint(1, 3))},
            "k": {"inputs": ["s"], "ranges": self._chance.choice([1, 2, 3, 70])},
        }
        if self._chance.random() < 0.5:
            stages["t"] = {"inputs": ["k"], "passthrough": True}
        known = None if self._gone else self._chance.choice([self._etag, "*"])
        headers = {} if known is None else {"If-Match": known}
        await self._ask("define", "PUT", "", body={"stages": stages}, headers=headers)

    async def _reset(self) -> None:
        await self._ask("reset", "POST", "/reset")

    async def _delete(self) -> None:
        await self._ask("delete", "DELETE", "")

    async def _show(self) -> None:
        await self._ask("spec", "GET", "")

    async def _look(self) -> None:
        if self._chance.random() < 0.5:
            await self._ask("snapshot", "GET", "/watermarks")
            return
        stage = self._chance.choice(["s", "k", "t"])
        await self._ask("watermark", "GET", f"/stages/{stage}/watermark", stage=stage)

    async def _open_run(self) -> None:
        body = {"stages": ["s", "k"], "holder": self._who}
        exchange = await self._ask("run", "POST", "/runs", body=body)
        if exchange.status == 201:
            self._run = exchange.answer["run"]

    async def _report(self) -> None:
        stage = self._chance.choice(["s", "k"])
        claim: dict[str, Any] = {"ranges": "all", "holder": self._who, "ttl_ms": TTL_MS}
        if self._run is not None:
            claim["run"] = self._run
        path = f"/stages/{stage}"
        exchange = await self._ask("claim", "POST", f"{path}/leases", stage=stage, body=claim)
        if exchange.status != 201:
            return
        now = time.time_ns() // 1_000_000 - self._chance.randint(0, 100)
        body: dict[str, Any] = {"token": exchange.answer["token"]}
        if stage == "s":
            body["ranges"] = dict.fromkeys(exchange.answer["granted"], now)
        else:
            seen = await self._ask("watermark", "GET", f"{path}/watermark", stage=stage)
            if seen.status != 200:
                return
            body["input_watermark"] = seen.answer["input_watermark"]
            body["ranges"] = {name: {} for name in exchange.answer["granted"]}
        if self._run is not None and self._chance.random() < 0.3:
            body["epoch"] = self._epoch + 1
        await self._ask("report", "POST", f"{path}/reports", stage=stage, body=body)

    async def _commit(self) -> None:
        if self._run is not None:
            self._epoch += 1
            body = {"run": self._run, "epoch": self._epoch, "stages": {"s": {}}}
            await self._ask("commit", "POST", "/commits", body=body)


# ---- what must hold


def check_changes(history: History) -> list[Violation]:
    """Every violation that the history of such a job proves."""
    records = list(history)
    # The response to a report or a commit does not name its generation, and there are many.
    reads: list[Record] = [
        r for r in records if isinstance(r, Exchange) and r.action in ("watermark", "snapshot")
    ]
    facts = Facts.of(History(history.topology, reads))
    found: list[Iterator[Violation]] = [
        rule(facts) for rule in (no_step_back, streams_in_order, versions_tell)
    ]
    exchanges = [record for record in records if isinstance(record, Exchange)]
    return list(
        itertools.chain(
            *found, ill_formed(exchanges), one_value_each(exchanges), numbers_rise(exchanges)
        )
    )


def one_value_each(exchanges: list[Exchange]) -> Iterator[Violation]:
    """An entity tag always stands for the same values."""
    known: dict[tuple[str, str | None, str], tuple[str, Exchange]] = {}
    for record in exchanges:
        if record.status not in (200, 201) or not record.etag:
            continue
        kind = "spec" if record.action in ("define", "spec", "reset") else record.action
        members = (
            ("stages",) if kind == "spec" else ("input_watermark", "output_watermark", "status")
        )
        value = json.dumps([record.answer[member] for member in members], sort_keys=True)
        before = known.setdefault((kind, record.stage, record.etag), (value, record))
        if before[0] != value:
            text = f"{kind} has two values under ETag {record.etag}"
            yield Violation("one value each", text, (before[1], record))


def numbers_rise(exchanges: list[Exchange]) -> Iterator[Violation]:
    """Neither a job's generation nor, within one, its layout's version is ever seen to fall."""
    shown: dict[str, list[tuple[int, Any, Exchange]]] = defaultdict(list)
    for record in exchanges:
        if record.status not in (200, 201) or not isinstance(record.answer, dict):
            continue
        answer: dict[str, Any] = record.answer
        if "layout_version" in answer:
            both = (answer["generation"], answer["layout_version"])
            shown["layout"].append((record.end_ns, both, record))
        if "generation" in answer:
            shown["generation"].append((record.end_ns, answer["generation"], record))
    for what, items in shown.items():
        greatest = Maximum(items)
        for _, value, record in items:
            best = greatest.before(record.start_ns)
            if best is not None and value < best[0]:
                text = f"{what} {value} was shown after {best[0]}"
                yield Violation("numbers rise", text, (best[1], record))


def new_history() -> History:
    """Return an empty history for such a job."""
    return History(NO_TOPOLOGY)
