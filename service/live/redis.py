"""The live store on Redis: any number of processes see one state, and each step is one script.

What the state looks like and what each step does to it stands in `lua/`. Here, names become indices and
back, steps that arrive together share a call, and what the scripts find out becomes an answer or an
error. A step about a layout that is not the job's any more is refused by the script and made again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import msgspec
import numpy as np
from redis.exceptions import ResponseError

from service.clock import Clock
from service.errors import UnavailableError
from service.frontier.agreement import FINAL, IDLE, Agreement
from service.frontier.graph import Pipeline
from service.frontier.ranges import Layout
from service.frontier.timestamps import MAX
from service.live import redis_layout as lay
from service.live import refusals
from service.live.batching import Batcher
from service.live.port import (
    FENCE_BITS,
    Census,
    Claim,
    Commit,
    Committed,
    Denied,
    Grant,
    JobView,
    LiveHead,
    LostLease,
    RangeOrder,
    RangeView,
    Renewal,
    Report,
    Reported,
    StateLostError,
    Watch,
    new_token,
)
from service.live.redis_client import Hint, RedisClient, pack
from service.live.redis_layout import Plan
from service.live.redis_reports import Asked, asked_of, report_args, reported_of
from service.live.redis_state import (
    META_FIELDS,
    Dumped,
    LayoutChange,
    Meta,
    flat,
    fresh,
    pairs,
    read_leases,
)
from service.live.watches import Watches
from service.state import InstalledJob, PromiseChunk, StageView

log = logging.getLogger(__name__)

T = TypeVar("T")

_FLIGHTS = 2
"""Calls with reports for one job that may be under way: one is worked on while the next is packed."""

_FROZEN_PATIENCE_S = 3.0
"""How long a step waits for a layout change; then whoever was at it is taken for dead."""

_FROZEN_POLL_S = 0.01
_LOOK_AGAIN_MS = 500
"""How long a job's next deadline, as heard last, is relied upon: others may have granted since."""

_LISTEN_AGAIN_S = 0.2
_reply = msgspec.msgpack.Decoder()


class _FrozenError(Exception):
    """The job's layout is being changed."""


@dataclass(slots=True)
class _Due:
    """When the next lease of a job runs out, as heard last, on this process's clock."""

    at_ms: int | None
    """None: there was no lease."""
    heard_at_ms: int

    def is_over(self, now_ms: int) -> bool:
        return self.at_ms is not None and self.at_ms <= now_ms


@dataclass(frozen=True, slots=True)
class _Read:
    """What one call has read of a job, for all who asked."""

    view: JobView
    censuses: Mapping[str, Census]


@dataclass(slots=True)
class _Job:
    """What this process has at hand for a job."""

    reports: Batcher[tuple[Plan, Asked], Reported]
    reads: Batcher[str | None, _Read]
    plan: Plan | None = None
    due: _Due | None = None
    ended: Counter[str] = field(default_factory=Counter[str])
    """Leases, by stage, that were found to be over and that `expire` has not told of yet."""


class RedisLiveStore:
    """Keeps everything in Redis. See `service.live.port.LiveStore` for what each method does."""

    shared: ClassVar[bool] = True

    def __init__(self, url: str, clock: Clock, tokens: Callable[[], str] = new_token) -> None:
        self._client = RedisClient(url)
        self._clock = clock
        self._new_token = tokens
        self._jobs: dict[str, _Job] = {}
        self._watches = Watches()
        self._listening: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """See the port."""
        self._listening = asyncio.create_task(self._listen(), name="listen")

    async def close(self) -> None:
        """See the port."""
        if self._listening is not None:
            self._listening.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._listening
        await self._client.close()

    async def ping(self) -> None:
        """See the port."""
        await self._client.ping(lay.JOBS)

    def _job(self, job: str) -> _Job:
        found = self._jobs.get(job)
        if found is None:
            found = self._jobs[job] = _Job(
                reports=Batcher(
                    self._report_all,
                    lambda asked: asked[1].looked.count,
                    _FLIGHTS,
                ),
                reads=Batcher(lambda asked: self._read_all(job, asked), lambda _: 1, 1),
            )
        return found

    # ---- steps

    async def _step(
        self,
        plan: Plan,
        name: str,
        stages: Iterable[str],
        args: object,
        *,
        at: str | None = None,
    ) -> list[Any]:
        """Run a step; return what it answers after its `ok`, or with the word that it has instead.

        Raises `StateLostError`, `_FrozenError`, and `_MovedError` if the layout is another by now.
        """
        raw = await self._run(plan.job, name, plan.keys(stages), at or plan.at, pack(args))
        return self._read_reply(plan, raw)

    async def _run(
        self, job: str, name: str, keys: Sequence[str], *args: bytes | str, repeatable: bool = True
    ) -> Any:  # noqa: ANN401 - what a script answers
        try:
            return await self._client.step(name, keys, *args, repeatable=repeatable)
        except ResponseError as error:
            if "LOST" in str(error):
                raise StateLostError(job) from error
            raise

    def _read_reply(self, plan: Plan, raw: bytes) -> list[Any]:
        due_in, word, *rest = _reply.decode(raw)
        if word == "lost":
            raise StateLostError(plan.job)
        if word == "at":
            self._job(plan.job).plan = None
            if str(rest[0]).startswith("!"):
                raise _FrozenError
            raise _MovedError
        now_ms = self._clock.steady_ms()
        self._job(plan.job).due = _Due(None if due_in < 0 else now_ms + int(due_in), now_ms)
        return [word, *rest]

    async def _on(self, job: str, use: Callable[[Plan], Awaitable[T]]) -> T:
        """Do something by the job's plan; if the layout is another by now, by the next one."""
        loop = asyncio.get_running_loop()
        until = loop.time() + _FROZEN_PATIENCE_S
        while True:
            try:
                return await use(await self._plan(job))
            except _MovedError:
                continue
            except _FrozenError:
                if loop.time() > until:
                    # Who froze it is gone. The ledger has the layout that it was about to install.
                    raise StateLostError(job) from None
                await asyncio.sleep(_FROZEN_POLL_S)

    async def _plan(self, job: str) -> Plan:
        found = self._job(job)
        if found.plan is None:
            found.plan = await self._load_plan(job)
        return found.plan

    async def _load_plan(self, job: str) -> Plan:
        at, generation, version, packed = await self._client.command(
            "HMGET", lay.job_keys(job)[0], "at", "generation", "layout_version", "pipeline"
        )
        if at is None or packed is None:
            self._forget(job)
            raise StateLostError(job)
        if at.startswith(b"!"):
            raise _FrozenError
        return Plan(job, at.decode(), int(generation), int(version), lay.read_pipeline(packed))

    def _forget(self, job: str) -> None:
        """Let go of what is at hand for a job that may not exist: anybody may ask for any name."""
        self._jobs.pop(job, None)

    # ---- jobs

    async def begin(self, job: InstalledJob) -> None:
        """See the port."""
        while True:
            now = await self._meta(job.name)
            if now.incarnation is not None and now.incarnation >= job.incarnation:
                # Of another server perhaps: then the next step finds that out, and begins a later one.
                return
            if await self._start(job, now, supersede=False):
                return

    async def install(self, job: InstalledJob) -> None:
        """See the port."""
        while True:
            now = await self._meta(job.name)
            if now.incarnation is None or now.incarnation < job.incarnation:
                raise StateLostError(job.name)
            if now.incarnation > job.incarnation:
                return
            there, wanted = now.position, (job.generation, job.layout_version)
            if there > wanted:
                return
            try:
                if now.generation < job.generation:
                    done = await self._start(job, now, supersede=True)
                elif there < wanted:
                    done = await self._relayout(job, now)
                else:
                    done = await self._catch_up(job)
            except (_MovedError, _FrozenError):
                continue
            if done:
                self._job(job.name).plan = None
                self._watches.wake_job(job.name)
                return

    async def _meta(self, job: str) -> Meta:
        return Meta.read(await self._client.command("HMGET", lay.job_keys(job)[0], *META_FIELDS))

    async def _start(self, job: InstalledJob, now: Meta, *, supersede: bool) -> bool:
        """Write a job's state afresh; False: it is not as `now` any more."""
        stages = list(job.stages)
        meta: dict[str, bytes | str | int] = {
            "incarnation": job.incarnation,
            "generation": job.generation,
            "layout_version": job.layout_version,
            "at": lay.position(job.generation, job.layout_version),
            "revision": job.revision,
            "last_run": job.last_run,
            "pipeline": lay.pack_pipeline(job.pipeline),
            "stages": msgspec.json.encode(stages).decode(),
        }
        if not supersede:
            meta |= {"fence": job.incarnation << FENCE_BITS, "stamp": 0}
        columns: list[bytes] = []
        entries: list[Any] = []
        for name in stages:
            fields, weights, tree = fresh(name, job)
            entries.append([flat(fields), name, lay.pack_view(job.stages[name].view)])
            columns += [weights, tree]
        gone = [stage for stage in now.stage_names if stage not in job.stages]
        keys = lay.job_keys(job.name)
        for name in (*stages, *gone):
            keys += lay.stage_keys(job.name, name)
        await self._client.command("SADD", lay.JOBS, job.name)
        raw = await self._run(
            job.name,
            "begin",
            keys,
            lay.position(job.generation, job.layout_version),
            pack([lay.channel(job.name), now.identity, supersede, flat(meta), entries]),
            *columns,
            # Each incarnation begins once: a second time, after a loss in between, would grant the
            # fences of the first again.
            repeatable=supersede,
        )
        self._job(job.name).plan = None
        return _reply.decode(raw)[1] == "ok"

    async def _catch_up(self, job: InstalledJob) -> bool:
        plan = await self._plan(job.name)
        stages = list(job.stages)
        entries = [
            [name, str(job.stages[name].progress.run), lay.pack_view(job.stages[name].view)]
            for name in stages
        ]
        await self._step(
            plan,
            "catch_up",
            stages,
            [lay.channel(job.name), str(job.revision), str(job.last_run), entries],
            at=lay.position(job.generation, job.layout_version),
        )
        return True

    async def _relayout(self, job: InstalledJob, now: Meta) -> bool:
        """Put the next layout in place; False: somebody else was at it, look again.

        First every step on the job is stopped: what is read then stays as it is, until it is written
        back with the ranges in their new order. Whoever dies in between leaves it to the next one.
        """
        frozen = f"!{lay.position(*now.position)}"
        plan = Plan(
            job.name, frozen, *now.position, lay.read_pipeline(await self._packed(job.name))
        )
        if now.at != frozen:
            with contextlib.suppress(_FrozenError):
                await self._step(plan, "freeze", (), [], at=now.at)
        change = LayoutChange(job, plan)
        stages = {name: await self._dump(plan, name) for name in change.carried}
        leases = read_leases(await self._client.command("HGETALL", plan.job_keys[2]))
        keys, args, columns = change.make(stages, leases)
        raw = await self._run(job.name, "relayout", keys, frozen, pack(args), *columns)
        self._read_reply(plan, raw)
        # Once more: what the ledger knows beside the layout.
        return False

    async def _packed(self, job: str) -> bytes:
        packed = await self._client.command("HGET", lay.job_keys(job)[0], "pipeline")
        if packed is None:
            raise StateLostError(job)
        return packed

    async def _dump(self, plan: Plan, stage: str) -> Dumped:
        keys = lay.stage_keys(plan.job, stage)
        fields = pairs(await self._client.command("HGETALL", keys[0]))
        weights, owners, moments = [
            np.frombuffer(await self._client.command("GET", key) or b"", dtype="<f8")
            for key in (keys[1], keys[3], keys[4])
        ]
        holds = pairs(await self._client.command("HGETALL", keys[5]))
        waiting = pairs(await self._client.command("HGETALL", keys[6]))
        idle = pairs(await self._client.command("HGETALL", keys[7]))
        layout = plan.pipeline.stages[stage].layout
        if not fields or (layout is not None and len(weights) != len(layout)):
            # As the scripts do it: what is left is no state.
            await self._client.command("DEL", plan.job_keys[0])
            raise StateLostError(plan.job)
        return Dumped(fields, weights, owners, moments, holds, waiting, idle)

    async def remove(self, job: str, generation: int) -> None:
        """See the port."""
        while True:
            now = await self._meta(job)
            keys = lay.job_keys(job)
            for name in now.stage_names:
                keys += lay.stage_keys(job, name)
            raw = await self._run(
                job, "remove", keys, "", pack([lay.channel(job), generation, now.identity])
            )
            if _reply.decode(raw)[1] == "ok":
                break
        if (await self._meta(job)).incarnation is None:
            await self._client.command("SREM", lay.JOBS, job)
        self._watches.wake_job(job)
        self._forget(job)

    async def head(self, job: str) -> LiveHead | None:
        """See the port."""
        raw = await self._run(job, "head", lay.job_keys(job), "", pack([]))
        _, word, *fields = _reply.decode(raw)
        return LiveHead(*(int(value) for value in fields)) if word == "ok" else None

    async def heads(self) -> Mapping[str, LiveHead]:
        """See the port."""
        names = await self._names()
        found = await asyncio.gather(*(self.head(name) for name in names))
        return {name: head for name, head in zip(names, found, strict=True) if head is not None}

    async def _names(self) -> list[str]:
        return sorted(name.decode() for name in await self._client.command("SMEMBERS", lay.JOBS))

    async def jobs(self) -> Sequence[JobView]:
        """See the port."""
        found = await asyncio.gather(
            *(self.job(name) for name in await self._names()), return_exceptions=True
        )
        views: list[JobView] = []
        for each in found:
            if isinstance(each, JobView):
                views.append(each)
            elif not isinstance(each, StateLostError):
                raise each
        return views

    async def pipeline(self, job: str, stage: str | None = None) -> Pipeline:
        """See the port."""
        pipeline = await self._on(job, _pipeline_of)
        if stage is not None and stage not in pipeline.stages:
            self._job(job).plan = None
            pipeline = await self._on(job, _pipeline_of)
        return pipeline

    async def job(self, job: str) -> JobView:
        """See the port."""
        return (await self._job(job).reads.ask("")).view

    async def snapshot(self, job: str) -> tuple[JobView, Mapping[str, Census]]:
        """See the port."""
        read = await self._job(job).reads.ask(None)
        return read.view, read.censuses

    async def stage(self, job: str, stage: str) -> tuple[JobView, StageView, Census]:
        """See the port."""
        read = await self._job(job).reads.ask(stage)
        if stage not in read.view.stages:
            raise refusals.unknown_stage(job, stage)
        return read.view, read.view.stages[stage], read.censuses[stage]

    async def _read_all(self, job: str, asked: Sequence[str | None]) -> Sequence[_Read | Exception]:
        """Read a job once for all who asked before the call began: each sees what was there then."""

        async def use(plan: Plan) -> _Read:
            stages = plan.pipeline.stages
            wanted = list(stages) if None in asked else [n for n in set(asked) if n in stages]
            word = await self._read(plan, [name for name in wanted if name], agreements=False)
            return _Read(word[0], word[1])

        read = await self._on(job, use)
        return [read] * len(asked)

    async def _read(
        self, plan: Plan, stages: Sequence[str], *, agreements: bool
    ) -> tuple[JobView, Mapping[str, Census], Sequence[float]]:
        word, *rest = await self._step(plan, "read", stages, [list(stages), agreements])
        if word == "due":
            raise _DueError
        incarnation, revision, views, censuses, lows = rest
        view = JobView(
            plan.job,
            plan.pipeline,
            int(incarnation),
            plan.generation,
            plan.layout_version,
            int(revision),
            {name: lay.read_view(fields) for name, fields in views},
        )
        return (
            view,
            {n: Census(*map(int, c)) for n, c in zip(stages, censuses or (), strict=True)},
            lows or (),
        )

    # ---- leases

    async def claim(self, job: str, stage: str, claim: Claim) -> Grant:
        """See the port."""
        return await self._on(job, lambda plan: self._claim(plan, stage, claim))

    async def _claim(self, plan: Plan, stage: str, claim: Claim) -> Grant:
        layout = self._layout(plan, stage)
        if claim.ranges is None:
            runs, unknown = [0, len(layout)], []
        else:
            index = plan.index(stage)
            distinct = dict.fromkeys(claim.ranges)
            unknown = [name for name in distinct if name not in index]
            known = sorted(index[name] for name in distinct if name in index)
            runs = lay.runs_of(np.array(known, dtype=np.int64))
        token = self._new_token()
        rank = "".join(
            lay.number_text(part) for part in (claim.rank.run, claim.rank.epoch, claim.rank.attempt)
        )
        word, *rest = await self._step(
            plan,
            "claim",
            (stage,),
            [runs, claim.holder, claim.ttl_ms, rank, str(claim.rank.run), token],
        )
        if word == "stale-run":
            raise refusals.stale_run(stage, int(rest[0]), claim.rank.run)
        denied = [Denied(name, "unknown") for name in unknown]
        for holder, left_ms, held in rest[-1] or ():
            denied += [
                Denied(name, "held", holder, int(left_ms)) for name in plan.names(stage, held)
            ]
        if word == "conflict":
            raise refusals.none_granted(stage, denied)
        fence, granted, _ = rest
        return Grant(token, int(fence), claim.ttl_ms, plan.names(stage, granted), denied)

    def _layout(self, plan: Plan, stage: str) -> Layout:
        found = plan.pipeline.stages.get(stage)
        if found is None:
            raise refusals.unknown_stage(plan.job, stage)
        if found.layout is None:
            raise refusals.no_ranges(stage)
        return found.layout

    async def _stages_of(self, plan: Plan, tokens: Sequence[str]) -> dict[str, str]:
        """Look up which stage each token is for. What it is worth is judged by the step that follows."""
        if not tokens:
            return {}
        records = await self._client.command(
            "HMGET", plan.job_keys[2], *(f"t{token}" for token in tokens)
        )
        stages: dict[str, str] = {}
        for token, record in zip(tokens, records, strict=True):
            if record is not None:
                stages[token] = _reply.decode(record.removeprefix(b"x"))[1]
        return {t: s for t, s in stages.items() if s in plan.pipeline.stages}

    async def renew(
        self, job: str, tokens: Sequence[str]
    ) -> tuple[Sequence[Renewal], Sequence[LostLease]]:
        """See the port."""
        return await self._on(job, lambda plan: self._renew(plan, tokens))

    async def _renew(
        self, plan: Plan, tokens: Sequence[str]
    ) -> tuple[Sequence[Renewal], Sequence[LostLease]]:
        of = await self._stages_of(plan, tokens)
        stages = list(dict.fromkeys(of.values()))
        asked = [[token, stages.index(of[token]) + 1 if token in of else 0] for token in tokens]
        _, results = await self._step(plan, "renew", stages, asked)
        renewed: list[Renewal] = []
        lost: list[LostLease] = []
        for token, (word, *rest) in zip(tokens, lay.read_list(results), strict=True):
            if word == "ok":
                ttl_ms, stage, runs = rest
                renewed.append(Renewal(token, int(ttl_ms), plan.names(stage, runs or ())))
            else:
                lost.append(LostLease(token, word))
        return renewed, lost

    async def release(self, job: str, tokens: Sequence[str]) -> int:
        """See the port."""
        return await self._on(job, lambda plan: self._release(plan, list(dict.fromkeys(tokens))))

    async def _release(self, plan: Plan, tokens: Sequence[str]) -> int:
        of = await self._stages_of(plan, tokens)
        stages = list(dict.fromkeys(of.values()))
        asked = [[token, stages.index(stage) + 1] for token, stage in of.items()]
        _, ended = await self._step(plan, "release", stages, asked)
        return int(ended)

    async def open_run(self, job: str, stages: Sequence[str], run: int) -> None:
        """See the port."""

        async def use(plan: Plan) -> None:
            known = [name for name in dict.fromkeys(stages) if name in plan.pipeline.stages]
            await self._step(plan, "open_run", known, str(run))

        await self._on(job, use)

    async def expire(self, job: str | None = None) -> Mapping[str, Mapping[str, int]]:
        """See the port."""
        now_ms = self._clock.steady_ms()
        if job is not None:
            found = self._jobs.get(job)
            due = None if found is None else found.due
            names = [job] if due is not None and due.is_over(now_ms) else []
        else:
            names = [
                name
                for name in await self._names()
                if (due := self._job(name).due) is None
                or due.is_over(now_ms)
                or due.heard_at_ms + _LOOK_AGAIN_MS <= now_ms
            ]
        for name in names:
            # One job's node that is away must not hold up the others.
            with contextlib.suppress(StateLostError, UnavailableError):
                await self._on(name, self._expire)
        told: dict[str, Mapping[str, int]] = {}
        for name in list(self._jobs) if job is None else [job]:
            found = self._jobs.get(name)
            if found is not None and found.ended:
                told[name], found.ended = found.ended, Counter()
        return told

    async def _expire(self, plan: Plan) -> None:
        ended = self._job(plan.job).ended
        stages: list[str] = []
        while True:
            _, counts, others = await self._step(plan, "expire", stages, stages)
            found = {name: int(count) for name, count in lay.read_list(counts)}
            ended.update(found)
            stages = [name for name in lay.read_list(others) if name in plan.pipeline.stages]
            if not stages and sum(found.values()) < _EXPIRED_AT_ONCE:
                return
            stages = stages or list(found)

    # ---- reports

    async def report(self, job: str, stage: str, report: Report) -> Reported:
        """See the port."""

        async def use(plan: Plan) -> Reported:
            self._layout(plan, stage)
            asked = asked_of(plan, stage, report)
            return await self._job(job).reports.ask((plan, asked))

        return await self._on(job, use)

    async def _report_all(
        self, asked: Sequence[tuple[Plan, Asked]]
    ) -> Sequence[Reported | Exception]:
        plan = asked[0][0]
        # The layout may have changed between two that were asked: those go again by the new one.
        same = [each for by, each in asked if by is plan]
        stages = list(dict.fromkeys(each.stage for each in same))
        args = [report_args(stages.index(each.stage) + 1, each) for each in same]
        _, results, ahead = await self._step(plan, "report", stages, args)
        outcomes: Iterator[Reported | Exception] = iter(
            [
                reported_of(plan, each, result, ahead=bool(ahead[stages.index(each.stage)]))
                for each, result in zip(same, results, strict=True)
            ]
        )
        return [next(outcomes) if by is plan else _MovedError() for by, _ in asked]

    async def commit(self, job: str, commit: Commit) -> Committed:
        """See the port."""
        return await self._on(job, lambda plan: self._commit(plan, commit))

    async def _commit(self, plan: Plan, commit: Commit) -> Committed:
        stages = list(commit.stages)
        for name in stages:
            if name not in plan.pipeline.stages:
                raise refusals.unknown_stage(plan.job, name)
        observed = [commit.stages[name].observed_input for name in stages]
        reply = await self._step(
            plan,
            "commit",
            stages,
            [
                str(commit.run),
                lay.epoch_text(commit.epoch),
                [False if value is None else float(value) for value in observed],
            ],
        )
        word, rest = reply[0], reply[1:]
        if word == "ok":
            applied, unrecorded = lay.read_list(rest[1]), lay.read_list(rest[2])
            return Committed(
                applied=dict(zip(stages, map(int, applied), strict=True)),
                unrecorded=[stages[int(k) - 1] for k in unrecorded],
                incarnation=int(rest[0]),
                generation=plan.generation,
            )
        k = int(rest[0]) - 1
        if word == "stale-run":
            raise refusals.stale_run(stages[k], int(rest[1]), commit.run)
        if word == "stale-epoch":
            raise refusals.stale_epoch(stages[k], commit.epoch, int(rest[1]))
        if word == "input-ahead":
            published = lay.read_view(rest[1]).watermark.input
            raise refusals.input_ahead(stages[k], observed[k] or 0, published)
        raise refusals.uncapped(stages[k], commit.epoch)

    # ---- publishing and saving

    async def agreements(
        self, job: str, touched: frozenset[str]
    ) -> tuple[JobView, Mapping[str, Agreement]]:
        """See the port."""

        async def use(plan: Plan) -> tuple[JobView, Mapping[str, Agreement]]:
            reach = plan.pipeline.reach(touched & plan.pipeline.stages.keys())
            stages = [n for n in reach if plan.pipeline.stages[n].layout is not None]
            while True:
                try:
                    view, _, lows = await self._read(plan, stages, agreements=True)
                except _DueError:
                    await self._expire(plan)
                    continue
                return view, {n: _agreed(low) for n, low in zip(stages, lows, strict=True)}

        return await self._on(job, use)

    async def publish(
        self,
        job: str,
        generation: int,
        revision: int,
        views: Mapping[str, StageView],
        epochs: Mapping[str, int],
    ) -> None:
        """See the port."""
        keys = lay.job_keys(job)
        for name in epochs:
            keys += lay.stage_keys(job, name)
        raw = await self._run(
            job,
            "publish",
            keys,
            "",
            pack(
                [
                    lay.channel(job),
                    str(generation),
                    str(revision),
                    [[name, lay.pack_view(view)] for name, view in views.items()],
                    [[k, lay.epoch_text(e)] for k, e in enumerate(epochs.values(), 1)],
                ]
            ),
        )
        if _reply.decode(raw)[1] == "lost":
            raise StateLostError(job)
        self._watches.wake(job, views)

    async def ranges(
        self, job: str, stage: str, *, limit: int, order: RangeOrder
    ) -> Sequence[RangeView]:
        """See the port."""
        return await self._on(job, lambda plan: self._ranges(plan, stage, limit, order))

    async def _ranges(
        self, plan: Plan, stage: str, limit: int, order: RangeOrder
    ) -> Sequence[RangeView]:
        found = plan.pipeline.stages.get(stage)
        if found is None:
            raise refusals.unknown_stage(plan.job, stage)
        if found.layout is None:
            return []
        if order == "range":
            indices = list(range(min(limit, len(found.layout))))
        else:
            raw = await self._client.command("GET", lay.stage_keys(plan.job, stage)[1])
            weights = np.frombuffer(raw or b"", dtype="<f8")
            # Idle ranges are not waited for: they come with the final ones.
            weights = np.where(weights == lay.IDLE, float(MAX), weights)
            indices = np.argsort(weights, kind="stable")[:limit].tolist()
        views: list[RangeView] = []
        for start in range(0, len(indices), 1_000):
            part = indices[start : start + 1_000]
            _, results = await self._step(plan, "ranges", (stage,), part)
            views += [
                _range_view(plan.name(stage, index), result)
                for index, result in zip(part, lay.read_list(results), strict=True)
            ]
        return views

    async def promises(self, job: str, stage: str) -> Sequence[int]:
        """See the port."""

        async def use(plan: Plan) -> Sequence[int]:
            found = plan.pipeline.stages.get(stage)
            if found is None:
                raise refusals.unknown_stage(job, stage)
            if found.layout is None:
                return []
            chunks = [(stage, number) for number in lay.chunks_of(found.layout)]
            saved = await self._chunks(plan, chunks)
            return np.frombuffer(b"".join(c.promises for c in saved), dtype="<i8").tolist()

        return await self._on(job, use)

    async def unsaved(self, job: str | None = None) -> Sequence[PromiseChunk]:
        """See the port."""
        if job is not None:
            return await self._on(job, self._unsaved)
        found: list[PromiseChunk] = []
        for name in await self._names():
            with contextlib.suppress(StateLostError, UnavailableError):
                found += await self._on(name, self._unsaved)
        return found

    async def _unsaved(self, plan: Plan) -> Sequence[PromiseChunk]:
        _, fields = await self._step(plan, "unsaved", (), [])
        chunks: list[tuple[str, int]] = []
        for name in (fields or ())[::2]:
            stage, _, number = name.rpartition(":")
            if stage in plan.pipeline.stages:
                chunks.append((stage, int(number)))
        return await self._chunks(plan, sorted(chunks))

    async def _chunks(
        self, plan: Plan, chunks: Sequence[tuple[str, int]]
    ) -> Sequence[PromiseChunk]:
        found: list[PromiseChunk] = []
        for start in range(0, len(chunks), _CHUNKS_AT_ONCE):
            part = chunks[start : start + _CHUNKS_AT_ONCE]
            stages = list(dict.fromkeys(stage for stage, _ in part))
            asked = [[stages.index(stage) + 1, number] for stage, number in part]
            raw = await self._run(plan.job, "unsaved", plan.keys(stages), plan.at, pack(asked))
            # One answer for the heads, then the columns as they are.
            answers: list[bytes] = raw
            head, columns = answers[0], answers[1:]
            _, heads, incarnation = self._read_reply(plan, head)
            for (stage, number), (stamp, idle, since), column in zip(
                part, heads, columns, strict=True
            ):
                weights = np.frombuffer(column, dtype="<f8")
                promises = lay.promises_of(weights, {int(i): p for i, p in idle or ()})
                found.append(
                    PromiseChunk(
                        job=plan.job,
                        stage=stage,
                        incarnation=int(incarnation),
                        generation=plan.generation,
                        layout_since=int(since),
                        chunk=number,
                        stamp=int(stamp or 0),
                        promises=promises.astype("<i8").tobytes(),
                    )
                )
        return found

    async def mark_saved(self, chunks: Sequence[PromiseChunk]) -> None:
        """See the port."""
        by_job: dict[str, list[PromiseChunk]] = {}
        for chunk in chunks:
            by_job.setdefault(chunk.job, []).append(chunk)
        for job, saved in by_job.items():
            args = [[f"{c.stage}:{c.chunk}", str(c.stamp)] for c in saved]
            # If the layout or the incarnation is another by now, so is what is dirty.
            with contextlib.suppress(StateLostError, _MovedError, _FrozenError):
                plan = await self._plan(job)
                if plan.generation == saved[0].generation:
                    await self._step(plan, "mark_saved", (), [str(saved[0].incarnation), args])

    # ---- waiting

    def watch(self, job: str, stage: str | None = None) -> AbstractContextManager[Watch]:
        """See the port."""
        return self._watches.watch(job, stage)

    def let_go(self) -> None:
        """See the port."""
        self._watches.wake_all()

    async def _listen(self) -> None:
        """Hear what other processes publish. It is a hint, no more: whoever is woken reads again."""
        while True:
            try:
                async with contextlib.aclosing(self._hints()) as hints:
                    async for hint in hints:
                        self._heed(hint)
            except UnavailableError as error:
                log.warning("not listening to other replicas: %s", error.detail)
            except Exception:
                log.exception("listening failed, and goes on")
            await asyncio.sleep(_LISTEN_AGAIN_S)

    def _hints(self) -> AsyncGenerator[Hint]:
        return self._client.hints(lay.CHANNELS)

    def _heed(self, hint: Hint) -> None:
        if hint is None:
            # Nobody knows what was said while nobody listened.
            self.let_go()
            return
        name, message = hint
        job = name.removeprefix(lay.channel(""))
        stages = _reply.decode(message)
        if stages:
            self._watches.wake(job, stages)
        elif job in self._jobs:
            self._jobs[job].plan = None
            self._watches.wake_job(job)


_CHUNKS_AT_ONCE = 64
_EXPIRED_AT_ONCE = 256


class _MovedError(Exception):
    """The job's layout is another by now."""


class _DueError(Exception):
    """Leases have run out, and must be ended first."""


async def _pipeline_of(plan: Plan) -> Pipeline:
    return plan.pipeline


def _agreed(lowest: float) -> Agreement:
    if lowest == lay.IDLE:
        return IDLE
    return FINAL if lowest >= float(MAX) else Agreement(int(lowest))


def _range_view(name: str, result: Sequence[Any]) -> RangeView:
    promise, idle, holds, moment, lease = result
    fence, holder, left_ms = lease or (None, None, None)
    return RangeView(
        name=name,
        promise=lay.as_time(promise),
        idle=bool(idle),
        holds=msgspec.json.decode(holds, type=dict[str, int]) if holds else {},
        holder=holder,
        fence=None if fence is None else int(fence),
        expires_in_ms=None if left_ms is None else int(left_ms),
        reported_at_ms=int(moment) or None,
    )
