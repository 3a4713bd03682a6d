"""Random requests to two replicas at once, and what must hold of every response.

A few actors send whatever a client may send, to a few jobs, so that nearly every request meets another
one in the middle: layouts, deletions, resets, runs, claims, reports and commits, in all orders. The
actors share what they have learnt (tokens, entity tags, runs), and use it long after, too.

What must hold: no internal error; one entity tag, one value; no watermark that goes back, for a reader
who asks either replica after somebody else was answered.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.support.api import Api, tile_ids

JOBS = ("one", "two")
SHARDS = ("a", "b", "c")
STAGES = ("s", "t", "k", "u")
NO_TIME = -(2**63)
HOLDERS = ("x", "y")


@dataclass
class Known:
    """Facts that the actors have learnt about a job: none of it need still be true."""

    etags: list[str] = field(default_factory=list[str])
    tokens: list[tuple[str, str, Sequence[str]]] = field(
        default_factory=list[tuple[str, str, Sequence[str]]]
    )
    runs: list[int] = field(default_factory=list[int])
    epoch: int = 1


class Observer:
    """Compares every watermark that anybody was shown."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, str, str], tuple[Any, ...]] = {}
        self._specs: dict[tuple[str, str], Any] = {}
        self._newest: dict[tuple[str, str], tuple[int, int, int]] = {}
        self.seen = 0

    def before(self, job: str, stage: str) -> tuple[int, int, int]:
        """Return the newest watermark shown so far: to be compared with one that is asked for now."""
        return self._newest.get((job, stage), (0, NO_TIME, NO_TIME))

    def watermark(self, shown: dict[str, Any], before: tuple[int, int, int]) -> None:
        """Check a watermark that was asked for when `before` had been shown."""
        self.seen += 1
        job, stage = shown["job"], shown["stage"]
        etag = f"{shown['generation']}-{shown['version']}"
        value = (shown["input_watermark"], shown["output_watermark"], shown["status"])
        known = self._values.setdefault((job, stage, etag), value)
        assert known == value, f"{job}/{stage}: ETag {etag} is {known} and {value}"
        now = (
            shown["generation"],
            NO_TIME if value[0] is None else value[0],
            NO_TIME if value[1] is None else value[1],
        )
        assert now[0] >= before[0], f"{job}/{stage}: generation {now[0]} after {before[0]}"
        if now[0] == before[0]:
            assert now[1] >= before[1], f"{job}/{stage}: input {now[1]} after {before[1]}"
            assert now[2] >= before[2], f"{job}/{stage}: output {now[2]} after {before[2]}"
        newest = self._newest.get((job, stage), now)
        if now[0] > newest[0]:
            self._newest[job, stage] = now
        elif now[0] == newest[0]:
            self._newest[job, stage] = (now[0], max(now[1], newest[1]), max(now[2], newest[2]))

    def spec(self, job: str, etag: str, stages: Any) -> None:
        """Check a specification against the others that were shown under its entity tag."""
        known = self._specs.setdefault((job, etag), stages)
        assert known == stages, f"{job}: ETag {etag} is {known} and {stages}"


class Fuzzer:
    """Sends random requests, and checks the responses."""

    def __init__(self, replicas: Sequence[httpx.AsyncClient], seed: int) -> None:
        self._replicas = replicas
        self._random = random.Random(seed)
        self._known: defaultdict[str, Known] = defaultdict(Known)
        self._observer = Observer()
        self._requests = 0
        self.statuses: Counter[tuple[str, int]] = Counter()

    @property
    def watermarks_seen(self) -> int:
        return self._observer.seen

    async def run(self, requests: int, actors: int = 8) -> None:
        """Send so many requests, by so many actors at once."""
        self._requests = requests
        async with asyncio.TaskGroup() as group:
            for _ in range(actors):
                group.create_task(self._act())

    async def _act(self) -> None:
        acts: dict[Callable[[Api, Known], Awaitable[httpx.Response]], int] = {
            self._put: 6,
            self._delete: 1,
            self._reset: 2,
            self._open_run: 3,
            self._claim: 14,
            self._report: 24,
            self._commit: 8,
            self._renew: 4,
            self._release: 2,
            self._retire: 3,
            self._read: 22,
            self._read_all: 8,
            self._read_ranges: 4,
            self._read_spec: 4,
        }
        while self._requests > 0:
            self._requests -= 1
            job = self._random.choice(JOBS)
            api = Api(self._random.choice(self._replicas), job)
            [act] = self._random.choices(list(acts), list(acts.values()))
            response = await act(api, self._known[job])
            name = act.__name__.removeprefix("_")
            self.statuses[name, response.status_code] += 1
            assert response.status_code < 500 or response.status_code == 503, (
                f"{name} of {job}: {response.status_code} {response.text}"
            )

    # ---- what is drawn

    def _pick(self, values: Sequence[Any], default: Any) -> Any:
        """Mostly the newest, sometimes an old one."""
        if not values:
            return default
        return values[-1] if self._random.random() < 0.7 else self._random.choice(values[-20:])

    def _flow(self) -> dict[str, Any]:
        draw = self._random
        flow: dict[str, Any] = {
            "s": {"shards": draw.sample(SHARDS, draw.randint(1, 3))},
            "k": {"inputs": ["s"], "ranges": draw.choice([1, 2, 3, 70])},
        }
        if draw.random() < 0.5:
            flow["t"] = {"shards": draw.sample(SHARDS, draw.randint(1, 2))}
        if draw.random() < 0.5:
            flow["u"] = {
                "inputs": draw.sample(sorted(flow), draw.randint(1, 2)),
                "passthrough": True,
            }
        return flow

    # ---- what is sent

    async def _put(self, api: Api, known: Known) -> httpx.Response:
        etag = self._random.choice(["*", self._pick(known.etags, None), None])
        flow = self._flow()
        response = await api.put(flow, etag=etag)
        if response.status_code in (200, 201):
            self._note_spec(api, known, response)
        return response

    async def _read_spec(self, api: Api, known: Known) -> httpx.Response:
        response = await api.spec()
        if response.status_code == 200:
            self._note_spec(api, known, response)
        return response

    def _note_spec(self, api: Api, known: Known, response: httpx.Response) -> None:
        stages = {
            name: {
                member: sorted(value) if isinstance(value, list) else value
                for member, value in stage.items()
            }
            for name, stage in response.json()["stages"].items()
        }
        self._observer.spec(api.job, response.headers["etag"], stages)
        known.etags.append(response.headers["etag"])

    async def _delete(self, api: Api, _: Known) -> httpx.Response:
        return await api.delete()

    async def _reset(self, api: Api, known: Known) -> httpx.Response:
        response = await api.reset()
        if response.status_code == 200:
            known.etags.append(response.headers["etag"])
        return response

    async def _open_run(self, api: Api, known: Known) -> httpx.Response:
        response = await api.open_run(self._random.sample(STAGES, self._random.randint(1, 2)))
        if response.status_code == 201:
            known.runs.append(response.json()["run"])
        return response

    async def _claim(self, api: Api, known: Known) -> httpx.Response:
        draw, stage = self._random, self._random.choice(STAGES[:3])
        ranges: Any = "all"
        if draw.random() < 0.5:
            ranges = draw.sample([*SHARDS, *tile_ids(2), *tile_ids(3)], 3)
        members: dict[str, Any] = {"ttl_ms": draw.choice([1_000, 600_000])}
        if draw.random() < 0.6:
            members["run"] = self._pick(known.runs, 1)
        if draw.random() < 0.5:
            members["epoch"] = known.epoch + draw.randint(-1, 1)
        response = await api.post_claim(stage, ranges, holder=draw.choice(HOLDERS), **members)
        if response.status_code == 201:
            answer = response.json()
            known.tokens.append((stage, answer["token"], answer["granted"]))
        return response

    async def _report(self, api: Api, known: Known) -> httpx.Response:
        draw = self._random
        stage, token, granted = self._pick(known.tokens, ("s", "none", ["a"]))
        ranges = draw.sample(granted, draw.randint(1, len(granted)))
        members: dict[str, Any] = {}
        if draw.random() < 0.4:
            members["epoch"] = known.epoch + draw.randint(0, 1)
        time = draw.randint(0, 5_000)
        if stage == "k":
            members["input_watermark"] = draw.choice([None, time // 2])
            reported: dict[str, Any] = {name: {"holds": {"state": time}} for name in ranges}
        else:
            reported = {name: time + draw.randint(0, 50) for name in ranges}
            if draw.random() < 0.15:
                reported[ranges[0]] = {"watermark": time, "idle": True}
        if draw.random() < 0.4:
            return await self._report_claiming(api, known, stage, reported, members)
        return await api.post_report(stage, token, reported, **members)

    async def _report_claiming(
        self, api: Api, known: Known, stage: str, reported: dict[str, Any], members: dict[str, Any]
    ) -> httpx.Response:
        draw = self._random
        claim: dict[str, Any] = {"holder": draw.choice(HOLDERS), "ttl_ms": 600_000}
        if draw.random() < 0.6:
            claim["run"] = self._pick(known.runs, 1)
        if draw.random() < 0.5:
            claim["epoch"] = known.epoch + draw.randint(-1, 1)
        members = {**members, "release": draw.random() < 0.3}
        response = await api.post_claimed_report(stage, claim, reported, **members)
        if response.status_code == 200:
            answer = response.json()
            known.tokens.append((stage, answer["token"], answer["granted"]))
        return response

    def _committed(self) -> dict[str, Any]:
        observed = self._random.randint(0, 2_000)
        kept = {"join": observed - self._random.randint(-20, 300)}
        return {"input_watermark": observed} | (
            {"holds": kept} if self._random.random() < 0.4 else {}
        )

    async def _commit(self, api: Api, known: Known) -> httpx.Response:
        known.epoch += self._random.choice([0, 1, 1])
        stages: dict[str, Any] = {
            stage: self._committed() if stage == "k" else {}
            for stage in self._random.sample(STAGES[:3], self._random.randint(1, 2))
        }
        before = {stage: self._observer.before(api.job, stage) for stage in stages}
        members = {"run": self._pick(known.runs, 1)} if self._random.random() < 0.8 else {}
        response = await api.post_commit(known.epoch, stages, **members)
        if response.status_code == 200:
            for stage, shown in response.json()["watermarks"].items():
                self._observer.watermark(shown, before[stage])
        return response

    async def _renew(self, api: Api, known: Known) -> httpx.Response:
        tokens = [self._pick(known.tokens, ("s", "none", []))[1] for _ in range(3)]
        return await api.client.post(f"{api.root}/leases/renew", json={"tokens": tokens})

    async def _release(self, api: Api, known: Known) -> httpx.Response:
        tokens = [self._pick(known.tokens, ("s", "none", []))[1]]
        return await api.client.post(f"{api.root}/leases/release", json={"tokens": tokens})

    async def _retire(self, api: Api, _: Known) -> httpx.Response:
        stage = self._random.choice(STAGES)
        key = self._random.choice([*SHARDS, *tile_ids(2)])
        return await api.post_retire(stage, key, dry_run=self._random.random() < 0.2)

    async def _read(self, api: Api, _: Known) -> httpx.Response:
        stage = self._random.choice(STAGES)
        before = self._observer.before(api.job, stage)
        response = await api.get_watermark(stage)
        if response.status_code == 200:
            self._observer.watermark(response.json(), before)
        return response

    async def _read_all(self, api: Api, _: Known) -> httpx.Response:
        before = {stage: self._observer.before(api.job, stage) for stage in STAGES}
        response = await api.client.get(f"{api.root}/watermarks")
        if response.status_code == 200:
            for stage, shown in response.json()["watermarks"].items():
                self._observer.watermark(shown, before[stage])
        return response

    async def _read_ranges(self, api: Api, _: Known) -> httpx.Response:
        stage = self._random.choice(STAGES)
        order = self._random.choice(["range", "promise"])
        return await api.client.get(f"{api.root}/stages/{stage}/ranges?order={order}")
