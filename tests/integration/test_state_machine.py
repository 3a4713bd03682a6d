"""The service against a model: whatever is done to it, in whatever order, section 2 holds.

`TIDEGAUGE_EXAMPLES=2000 pytest tests/integration/test_state_machine.py` looks for longer.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import os
import shutil
import tempfile
import time
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import httpx
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.support.api import MAX, Api, ok, problem, tile_ids
from tests.support.inprocess import InProcess, with_schema
from tests.support.model import (
    Layout,
    Lease,
    Model,
    Rank,
    Stage,
    Time,
    Word,
    bounds,
    largest,
)
from tests.support.redis_server import RedisServer
from tests.support.stores import Stores

T = TypeVar("T")

UNEVEN = (*tile_ids(4)[:1], "40000000-50000000", "50000000-100000000")
SHARDS = st.sampled_from([("0", "1"), ("0", "1", "2"), ("0",), ("0", "2")])
TILES = st.sampled_from([tile_ids(2), tile_ids(1), tile_ids(4), UNEVEN])
PUBLISHED = ("input_watermark", "output_watermark", "status")
SOON_S = 10
NOT_A_RANGE = "nope"
MAX_TTL_MS = 600_000
Problems = set[tuple[int, str]]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Two sources, a keyed stage, a flatten, and a keyed stage after it; edges come and go."""
    return {
        "a": ((), draw(SHARDS)),
        "b": ((), ("0",)),
        "k": (draw(st.sampled_from([("a",), ("a", "b")])), draw(TILES)),
        "u": (draw(st.sampled_from([("b", "k"), ("k",), ("a", "b", "k")])), ()),
        "z": (("u",), tile_ids(1)),
    }


UPHEAVALS = ("layout", "layout", "run", "graceful", "crash", "reset", "delete")
FIRST: Layout = {
    "a": ((), ("0", "1")),
    "b": ((), ("0",)),
    "k": (("a",), tile_ids(2)),
    "u": (("b", "k"), ()),
    "z": (("u",), tile_ids(1)),
}
REPORTING = ("a", "b", "k", "z")


def spec(layout: Layout) -> dict[str, Any]:
    """The layout as a pipeline that can be put."""
    stages: dict[str, Any] = {}
    for name, (inputs, keys) in layout.items():
        if not inputs:
            stages[name] = {"shards": list(keys)}
        elif keys:
            edges = sorted(bounds(key) for key in keys)
            stages[name] = {
                "inputs": list(inputs),
                "ranges": [{"start": start, "end": end} for start, end in edges],
            }
        else:
            stages[name] = {"inputs": list(inputs), "passthrough": True}
    return stages


@dataclass(frozen=True)
class Handed:
    """A token that some claim was answered with."""

    token: str
    stage: str
    keys: tuple[str, ...]
    run: int | None


NOW = ("input_watermark", "output_watermark", "status")

SOFT = {"processing_watermark", "system_lag_ms", "data_lag_ms", "records", "late", "corrections"}
"""Values that are computed at a read, so that it may differ from one reader to the next."""


def plain(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in SOFT}


class Tidegauge(RuleBasedStateMachine):
    """Workers, drivers, operators and accidents, one step at a time."""

    second_ms = 1_000
    """Length of the machine's second: the shortest lease lasts one, and a tick some part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="tidegauge-"))
        self.runner = asyncio.Runner()
        self.gauge = InProcess(with_schema(self.folder), stores=self.make_stores())
        self.model = Model(FIRST)
        self.apart = Model({"s": ((), ("0",))})
        self.handed: list[Handed] = []
        self.last_run = 0
        self.last_fence = 0
        self.generation = 1
        self.seen: dict[str, Any] = {}
        self.before: dict[str, Any] = {}
        self.step = "start"
        self.around_an_epochs_report: tuple[Any, Any] = (None, None)
        self.do(self.gauge.start())
        self.do(self.api.define(spec(FIRST)))
        self.do(self.other.define({"s": {"shards": ["0"]}}))
        self.settle("start")
        for stage in REPORTING:
            self._claim(stage, "all", "x", MAX_TTL_MS, None, 0, 0)

    def make_stores(self) -> Stores:
        return Stores()

    # -- scaffolding -------------------------------------------------------------------------

    def do(self, call: Coroutine[Any, Any, T]) -> T:
        self.gauge.stores.stand_still()
        return self.runner.run(call)

    @property
    def api(self) -> Api:
        return self.gauge.api("job")

    @property
    def other(self) -> Api:
        return self.gauge.api("other")

    @property
    def now(self) -> int:
        return self.gauge.clock.steady_ms()

    def settle(self, step: str) -> None:
        """End a step: work out what must be, and look at what is.

        A report or commit is answered once what it did is visible; what else changes a status
        (a release, say) is answered at once, and seen soon after.
        """
        self.step = step
        self.model.settle(self.now)
        self.apart.settle(self.now)
        self.before = self.seen
        self.look()
        end = time.monotonic() + SOON_S
        while step not in {"report", "commit"} and not self.arrived() and time.monotonic() < end:
            self.look()

    def look(self) -> None:
        """See where the job is; not below where it was at the look before."""
        was, self.seen = self.seen, self.do(self.api.snapshot())
        self.rises(was, self.seen)

    def arrived(self) -> bool:
        return all(
            (seen["input_watermark"], seen["output_watermark"], seen["status"])
            == (stage.input, stage.output, stage.status)
            for stage, seen in ((s, self.seen[name]) for name, s in self.model.stages.items())
        )

    def refused(self, response: httpx.Response, problems: Problems) -> None:
        body = problem(response, response.status_code)
        slug = body["type"].removeprefix("/problems/")
        assert (response.status_code, slug) in problems, (body, problems)

    def teardown(self) -> None:
        try:
            self.do(self.gauge.stop())
        finally:
            self.runner.close()
            shutil.rmtree(self.folder)

    # -- workers -----------------------------------------------------------------------------

    @rule(
        stage=st.sampled_from(REPORTING),
        some=st.one_of(st.just("all"), st.sets(st.integers(0, 4), min_size=1)),
        holder=st.sampled_from(["x", "y"]),
        ttl=st.sampled_from([1, 600, 5, 1]),
        run=st.sampled_from(["right", "right", "right", "none", "wrong"]),
        epoch=st.integers(0, 3),
        attempt=st.integers(0, 1),
    )
    def claim(
        self,
        stage: str,
        some: set[int] | str,
        holder: str,
        ttl: int,
        run: str,
        epoch: int,
        attempt: int,
    ) -> None:
        number = {"right": self.model.stages[stage].run, "none": None, "wrong": self.last_run + 1}
        self._claim(stage, some, holder, self._ttl_ms(ttl), number[run], epoch, attempt)

    def _ttl_ms(self, seconds: int) -> int:
        return min(seconds * self.second_ms, MAX_TTL_MS)

    def _claim(
        self,
        stage: str,
        some: set[int] | str,
        holder: str,
        ttl: int,
        run: int | None,
        epoch: int,
        attempt: int,
    ) -> None:
        known = list(self.model.stages[stage].ranges)
        if isinstance(some, str):
            wanted, asked = known, some
        else:
            wanted = [(*known, NOT_A_RANGE)[i % (len(known) + 1)] for i in sorted(some)]
            wanted = list(dict.fromkeys(wanted))
            asked = wanted
        rank: Rank = (run or 0, epoch, attempt)
        members = {"ttl_ms": ttl, "epoch": epoch, "attempt": attempt}
        if run is not None:
            members["run"] = run
        response = self.do(self.api.post_claim(stage, asked, holder=holder, **members))

        granted = self.model.grantable(stage, set(wanted) - {NOT_A_RANGE}, holder, rank)
        if run != self.model.stages[stage].run:
            self.refused(response, {(409, "stale-run")})
        elif not granted:
            self.refused(response, {(409, "lease-conflict")})
        else:
            grant = ok(response, 201)
            assert set(grant["granted"]) == granted
            assert {d["range"] for d in grant["denied"]} == set(wanted) - granted
            assert grant["fence"] > self.last_fence, "fenced"
            self.last_fence = grant["fence"]
            lease = Lease(grant["token"], holder, rank, run, ttl, self.now + ttl)
            self.model.grant(stage, granted, lease)
            self.handed.append(Handed(lease.token, stage, tuple(sorted(granted)), run))
        self.settle("claim")

    @rule(data=st.data(), release=st.sampled_from([False, False, True]))
    def renew_or_release(self, data: st.DataObject, release: bool) -> None:
        handed = self._any_token(data)
        (self._release if release else self._renew)(handed)

    def _renew(self, handed: Handed) -> None:
        answer = self.do(self.api.renew(handed.token))
        held = {key for _, key in self.model.held(handed.token)}
        if held:
            (renewed,) = answer["renewed"]
            assert set(renewed["ranges"]) == held
            self.model.renew(handed.token, self.now)
        else:
            assert answer["renewed"] == []
            (lost,) = answer["lost"]
            assert lost["reason"] in {"expired", "superseded", "released", "unknown"}
        self.settle("renew")

    def _release(self, handed: Handed) -> None:
        released = self.do(self.api.release(handed.token))
        assert released == (1 if self.model.held(handed.token) else 0)
        self.model.release(handed.token)
        self.settle("release")

    def _any_token(self, data: st.DataObject) -> Handed:
        """Mostly one that is current or recent, sometimes one long gone."""
        current = [handed for handed in self.handed if self.model.held(handed.token)]
        choices = [*current[-6:], *current[-6:], *self.handed[-4:], self.handed[0]]
        return data.draw(st.sampled_from(choices), "token")

    # -- reports -----------------------------------------------------------------------------

    @rule(data=st.data(), times=st.integers(1, 3))
    def report(self, data: st.DataObject, times: int) -> None:
        """Report under some token, for what it was granted and sometimes for more."""
        for _ in range(times):
            self._report(data, self._any_token(data), None)

    @rule(data=st.data(), times=st.integers(1, 3))
    def report_in_an_epoch(self, data: st.DataObject, times: int) -> None:
        """The same, to wait for the commit of the next epoch, a later or a stale one."""
        for _ in range(times):
            ahead = data.draw(st.sampled_from([1, 1, 0, 2]), "ahead")
            self._report(data, self._any_token(data), ahead)

    @rule(
        data=st.data(),
        stage=st.sampled_from(REPORTING),
        holder=st.sampled_from("xy"),
        ttl=st.sampled_from([1, 600, 5, 1]),
        run=st.sampled_from(["right", "right", "right", "none", "wrong"]),
        rank=st.tuples(st.integers(0, 3), st.integers(0, 1)),
        ahead=st.sampled_from([None, None, 1, 1, 0, 2]),
        release=st.sampled_from([False, False, True]),
    )
    def report_with_a_claim(
        self,
        data: st.DataObject,
        stage: str,
        holder: str,
        ttl: int,
        run: str,
        rank: tuple[int, int],
        ahead: int | None,
        release: bool,
    ) -> None:
        """Claim and report in one step: as one after the other, but a refused report claims nothing."""
        this = self.model.stages[stage]
        number = {"right": this.run, "none": None, "wrong": self.last_run + 1}[run]
        epoch = None if ahead is None else self._epoch(this, ahead)
        choices = st.sampled_from([*this.ranges, *this.ranges, NOT_A_RANGE])
        keys = data.draw(st.lists(choices, min_size=1, max_size=4, unique=True), "ranges")
        handed = Handed("", stage, tuple(keys), number)
        members: dict[str, Any] = {"release": release} | ({} if epoch is None else {"epoch": epoch})
        observed: Time | str = "absent"
        if this.kind == "keyed":
            observed = self._observed(data, this, epoch, good=False)
            if not isinstance(observed, str):
                members["input_watermark"] = observed
        words = {key: self._word(data, this, key, handed, observed, epoch) for key in keys}
        body = {key: self._said(word, this) for key, word in words.items()}
        full: Rank = (number or 0, *rank)
        claim = {
            "holder": holder,
            "ttl_ms": self._ttl_ms(ttl),
            "epoch": rank[0],
            "attempt": rank[1],
        }
        claim |= {} if number is None else {"run": number}
        response = self.do(self.api.post_claimed_report(stage, claim, body, **members))

        granted = self.model.grantable(stage, set(keys) - {NOT_A_RANGE}, holder, full)
        problems = self._report_problems(handed, this, words, observed, epoch)
        if number != this.run:
            problems.add((409, "stale-run"))
        if not granted:
            problems.add((409, "lease-conflict"))
        if problems:
            self.refused(response, problems)
        else:
            answer = ok(response)
            lease = Lease(
                answer["token"],
                holder,
                full,
                number,
                self._ttl_ms(ttl),
                self.now + self._ttl_ms(ttl),
            )
            self._check_claimed(answer, set(keys), granted)
            covered = {
                key: replace(word, token=lease.token)
                for key, word in words.items()
                if key in granted
            }
            self.model.grant(stage, granted, lease)
            self._check_answer(answer | {"rejected": answer["denied"]}, this, words, covered, epoch)
            self.model.report(stage, covered, epoch)
            self.handed.append(Handed(lease.token, stage, tuple(sorted(granted)), number))
            if release:
                self.model.release(lease.token)
        self.settle("report")
        self.same_promises(stage)

    def _check_claimed(self, answer: Any, wanted: set[str], granted: set[str]) -> None:
        assert set(answer["granted"]) == granted
        assert {each["range"] for each in answer["denied"]} == wanted - granted
        assert answer["rejected"] == []
        assert answer["fence"] > self.last_fence, "fenced"
        self.last_fence = answer["fence"]

    @staticmethod
    def _epoch(stage: Stage, ahead: int) -> int:
        return max(ahead + (-1 if stage.committed is None else stage.committed), 0)

    @rule(data=st.data(), stage=st.sampled_from(REPORTING))
    def report_in_good_order(self, data: st.DataObject, stage: str) -> None:
        """Report everything under a lease that is current, if one is: so that things move."""
        current = [
            handed
            for handed in self.handed
            if handed.stage == stage and self.model.held(handed.token)
        ]
        if current:
            self._report(data, current[-1], None, everything=True)

    @rule(data=st.data(), stage=st.sampled_from(REPORTING))
    def run_a_batch(self, data: st.DataObject, stage: str) -> None:
        """Run a query's batch: claim anew for the next epoch, report in it, commit it."""
        committed = self.model.stages[stage].committed
        epoch = 0 if committed is None else committed + 1
        self._claim(stage, "all", "x", MAX_TTL_MS, self.model.stages[stage].run, epoch, 0)
        if self.handed and self.handed[-1].stage == stage:
            self._report(data, self.handed[-1], 1, everything=True)
            self._commit(data, {stage}, "right", epoch)

    def _report(
        self, data: st.DataObject, handed: Handed, ahead: int | None, *, everything: bool = False
    ) -> None:
        stage = self.model.stages[handed.stage]
        epoch = None if ahead is None else self._epoch(stage, ahead)
        keys = handed.keys
        if not everything:
            keys = data.draw(
                st.lists(
                    st.sampled_from([*handed.keys, *handed.keys, *stage.ranges, NOT_A_RANGE]),
                    min_size=1,
                    max_size=4,
                    unique=True,
                ),
                "ranges",
            )
        members: dict[str, Any] = {} if epoch is None else {"epoch": epoch}
        observed: Time | str = "absent"
        if stage.kind == "keyed":
            observed = self._observed(data, stage, epoch, good=everything)
            if not isinstance(observed, str):
                members["input_watermark"] = observed
        words = {key: self._word(data, stage, key, handed, observed, epoch) for key in keys}
        body = {key: self._said(word, stage) for key, word in words.items()}
        before = self.do(self.api.promises(handed.stage))
        response = self.do(self.api.post_report(handed.stage, handed.token, body, **members))
        if epoch is not None:
            self.around_an_epochs_report = before, self.do(self.api.promises(handed.stage))

        held = {key for _, key in self.model.held(handed.token)}
        covered = {key: word for key, word in words.items() if key in held}
        problems = self._report_problems(handed, stage, covered, observed, epoch)
        if problems:
            self.refused(response, problems)
        else:
            answer = ok(response)
            self._check_answer(answer, stage, words, covered, epoch)
            self.model.report(handed.stage, covered, epoch)
            self.model.renew(handed.token, self.now)
        self.settle("report")
        if not problems:
            mine = response.json()["watermark"]
            seen = self.seen[handed.stage]
            assert mine == {member: seen[member] for member in mine}, "answered before visible"
        self.same_promises(handed.stage)

    def _observed(
        self, data: st.DataObject, stage: Stage, epoch: int | None, *, good: bool
    ) -> Time | str:
        published = stage.input
        if published is None:
            choices: list[Time | str] = ["absent", 0] if epoch is not None else [None]
        elif published == MAX:
            choices = [MAX, 100]
        else:
            choices = [published, published, published - 1, published + 1]
        if epoch is not None:
            choices += ["absent", "absent"]
        elif not good:
            choices += ["absent"]
        return choices[0] if good else data.draw(st.sampled_from(choices), "input_watermark")

    def _word(
        self,
        data: st.DataObject,
        stage: Stage,
        key: str,
        handed: Handed,
        observed: Time | str,
        epoch: int | None,
    ) -> Word:
        """One range's word: near the promise that it has, so that behind, equal and ahead occur."""
        item = stage.ranges.get(key)
        base = 0 if item is None or item.promise in {None, MAX} else item.promise
        assert base is not None
        near = st.integers(base - 2, base + 6)
        holds = data.draw(
            st.one_of(
                st.just({}), st.just({}), st.dictionaries(st.sampled_from("pq"), near, max_size=2)
            ),
            f"holds of {key}",
        )
        if stage.kind == "keyed":
            waiting = [] if epoch is None else stage.waiting.get(epoch, {}).get(key, [])
            idle = any(word.idle for word in waiting) if waiting else data.draw(st.booleans())
            # A key range that is idle keeps no hold.
            return Word(handed.token, observed=observed, holds={} if idle else holds, idle=idle)
        how = data.draw(st.integers(0, 15), f"kind of {key}")
        # Reports of one epoch for one shard are all idle or all not: the contract leaves a mix open.
        waiting = [] if epoch is None else stage.waiting.get(epoch, {}).get(key, [])
        if any(word.idle for word in waiting):
            return Word(handed.token, watermark=data.draw(st.none() | near), idle=True)
        if how == 0:
            return Word(handed.token, final=True, holds=holds)
        if how == 1 and not waiting:
            return Word(handed.token, watermark=data.draw(near), holds=holds, idle=True)
        if how <= 3 and not waiting and not holds:
            return Word(handed.token, idle=True)
        if how == 4 and epoch is None:
            return Word(handed.token, watermark=None, holds=holds)
        return Word(handed.token, watermark=data.draw(near, f"watermark of {key}"), holds=holds)

    @staticmethod
    def _said(word: Word, stage: Stage) -> Any:
        """The word as JSON, in the shorter of its forms where there are two."""
        holds = {"holds": word.holds} if word.holds else {}
        if stage.kind == "keyed":
            return holds | ({"idle": True} if word.idle else {})
        if word.final:
            return {"final": True} | holds
        if word.idle:
            said = {} if word.watermark is None else {"watermark": word.watermark}
            return {"idle": True} | said | holds
        return {"watermark": word.watermark} | holds if holds else word.watermark

    def _report_problems(
        self,
        handed: Handed,
        stage: Stage,
        covered: dict[str, Word],
        observed: Time | str,
        epoch: int | None,
    ) -> Problems:
        problems: Problems = set()
        if not covered:
            problems.add((410, "lease-lost"))
            if handed.run != stage.run:
                problems.add((409, "stale-run"))
        if epoch is not None and stage.committed is not None and epoch <= stage.committed:
            problems.add((409, "stale-epoch"))
        if stage.kind == "keyed":
            if observed == "absent" and epoch is None:
                problems.add((422, "invalid-report"))
            if isinstance(observed, int) and (stage.input is None or observed > stage.input):
                problems.add((409, "input-ahead"))
        return problems

    @staticmethod
    def _check_answer(
        answer: Any,
        stage: Stage,
        words: dict[str, Word],
        covered: dict[str, Word],
        epoch: int | None,
    ) -> None:
        assert answer["accepted"] == len(covered)
        assert {item["range"] for item in answer["rejected"]} == set(words) - set(covered)
        if epoch is not None:
            return
        behind: set[str] = set()
        unsure: set[str] = set()
        for key, word in covered.items():
            promise, had = word.promise(stage.kind == "source"), stage.ranges[key].promise
            if promise is None:
                unsure.add(key)
            elif had is not None and promise < had:
                behind.add(key)
        assert set(answer["behind"]) - unsure == behind

    # -- drivers -----------------------------------------------------------------------------

    @rule(
        data=st.data(),
        stages=st.sets(st.sampled_from(REPORTING), min_size=1),
        run=st.sampled_from(["right", "right", "right", "wrong"]),
    )
    def commit(self, data: st.DataObject, stages: set[str], run: str) -> None:
        """Commit an epoch, preferably one in which something waits."""
        models = [self.model.stages[name] for name in sorted(stages)]
        waiting = sorted({epoch for stage in models for epoch in stage.waiting})
        last = max((-1 if s.committed is None else s.committed) for s in models)
        epoch = data.draw(
            st.sampled_from([*waiting, *waiting, max(last, 0), last + 1, max(last - 1, 0)]), "epoch"
        )
        self._commit(data, stages, run, epoch)

    def _commit(self, data: st.DataObject, stages: set[str], run: str, epoch: int) -> None:
        models = {name: self.model.stages[name] for name in sorted(stages)}
        runs = {stage.run for stage in models.values()}
        number = self.last_run + 1 if run == "wrong" else max((r or 0 for r in runs), default=0)
        caps = {
            name: self._cap(data, stage) if stage.committed != epoch else "absent"
            for name, stage in models.items()
        }
        body = {
            name: {} if isinstance(cap, str) else {"input_watermark": cap}
            for name, cap in caps.items()
        }
        members = {"run": number} if number else {}
        response = self.do(self.api.post_commit(epoch, body, **members))

        problems: Problems = set()
        for name, stage in models.items():
            problems |= self._commit_problems(stage, epoch, number or None, caps[name])
        if problems:
            self.refused(response, problems)
        else:
            answer = ok(response)
            applied = {name: self.model.commit(name, epoch, caps[name]) for name in models}
            assert answer["applied"] == applied
        self.settle("commit")
        for name in models:
            self.same_promises(name)

    def _cap(self, data: st.DataObject, stage: Stage) -> Time | str:
        if stage.kind != "keyed":
            return "absent"
        choices: list[Time | str] = ["absent"]
        if stage.input is not None:
            choices += [stage.input, stage.input, min(stage.input, 10**9) - 1]
            if stage.input != MAX:
                choices.append(stage.input + 1)
        return data.draw(st.sampled_from(choices[::-1]), "cap")

    @staticmethod
    def _commit_problems(stage: Stage, epoch: int, run: int | None, cap: Time | str) -> Problems:
        problems: Problems = set()
        if run != stage.run:
            problems.add((409, "stale-run"))
        if stage.committed is not None and epoch < stage.committed:
            problems.add((409, "stale-epoch"))
        if stage.kind == "keyed" and stage.committed != epoch:
            if isinstance(cap, int) and (stage.input is None or cap > stage.input):
                problems.add((409, "input-ahead"))
            left_out = any(
                word.observed == "absent"
                for words in stage.waiting.get(epoch, {}).values()
                for word in words
            )
            if left_out and isinstance(cap, str):
                problems.add((422, "invalid-request"))
        return problems

    def _open_run(self, stages: set[str]) -> None:
        number = self.do(self.api.run(*sorted(stages)))
        assert number > self.last_run
        self.last_run = number
        self.model.open_run(number, stages)
        self.settle("run")

    # -- operators and accidents -------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.007, 0.601, 0.601, 3.001, 61.013]))
    def tick(self, seconds: float) -> None:
        self.gauge.advance(round(seconds * self.second_ms))
        self.settle("tick")

    @rule(data=st.data(), what=st.sampled_from(UPHEAVALS))
    def upheaval(self, data: st.DataObject, what: str) -> None:
        """Do something that is rare, and changes much."""
        if what == "layout":
            self._change_layout(data.draw(layouts(), "layout"))
        elif what == "run":
            names = st.sets(st.sampled_from([*REPORTING, "u"]), min_size=1)
            self._open_run(data.draw(names, "stages"))
        elif what == "reset":
            self._reset()
        elif what == "delete":
            self._delete(data.draw(layouts(), "next"))
        else:
            self._restart(what)

    def _change_layout(self, layout: Layout) -> None:
        self.do(self.api.change(spec(layout)))
        self.model.relayout(layout, self.now)
        self.settle("layout")
        for name in REPORTING:
            self.same_promises(name)

    def _reset(self) -> None:
        ok(self.do(self.api.reset()))
        self.generation += 1
        self.model.reset()
        self.settle("reset")

    def _delete(self, layout: Layout) -> None:
        """The next of its name starts over in all, but not with the same numbers."""
        ok(self.do(self.api.delete()), 204)
        problem(self.do(self.api.get_watermark("k")), 404, "unknown-job")
        self.do(self.api.define(spec(layout)))
        self.generation += 1
        self.model = Model(layout)
        self.settle("delete")

    def _restart(self, how: str) -> None:
        self.do(self.gauge.restart() if how == "graceful" else self.gauge.crash())
        self.model.restart()
        self.apart.restart()
        if how == "crash":
            self._fall_back("job", self.model)
            self._fall_back("other", self.apart)
        self.settle(how)
        for name in REPORTING:
            self.same_promises(name)

    def _fall_back(self, job: str, model: Model) -> None:
        """After a crash the promises are some earlier ones: take them over, if they are."""
        for name, stage in model.stages.items():
            if stage.kind == "passthrough":
                continue
            promises = self.do(self.gauge.api(job).promises(name))
            assert set(promises) == set(stage.ranges)
            for key, promise in promises.items():
                had = stage.ranges[key].promise
                assert largest(promise, had) == had, "loss_costs_time_never_truth"
                stage.ranges[key].promise = promise

    @rule(data=st.data(), stage=st.sampled_from(REPORTING))
    def retire(self, data: st.DataObject, stage: str) -> None:
        """The moves are shown before, and nothing else moves."""
        this = self.model.stages[stage]
        key = data.draw(st.sampled_from(sorted(this.ranges)), "range")
        item = this.ranges[key]
        foreseen = self.do(self.api.retire(stage, key, dry_run=True))
        assert foreseen["retired"] == item.retired
        before = self.seen
        self.look()
        assert all(plain(each) == plain(before[name]) for name, each in self.seen.items())
        done = self.do(self.api.retire(stage, key))
        self.model.retire(stage, key)
        assert done == foreseen | {"retired": item.retired}
        moved = {move["stage"]: move["after"] for move in done["moves"]}
        self.settle("report")
        for name, each in self.seen.items():
            now = {member: each[member] for member in NOW}
            assert now == moved.get(name, {member: before[name][member] for member in NOW}), name
        self.same_promises(stage)

    @rule(value=st.integers(0, 50))
    def move_the_other_job(self, value: int) -> None:
        token = self.do(self.other.token("s"))
        lease = Lease(token, "worker", (0, 0, 0), None, 10_000, self.now + 10_000)
        self.apart.grant("s", ["0"], lease)
        self.do(self.other.report("s", token, {"0": value}))
        self.apart.report("s", {"0": Word(token, watermark=value)}, None)
        self.settle("other")

    @rule(stage=st.sampled_from([*REPORTING, "u"]))
    def look_closely(self, stage: str) -> None:
        """Each way to ask gives the same answer, and an unchanged one is not sent again."""
        response = self.do(self.api.get_watermark(stage))
        assert plain(ok(response)) == plain(self.seen[stage])
        again = self.do(self.api.get_watermark(stage, If_None_Match=response.headers["etag"]))
        assert again.status_code == 304
        if stage != "u":
            self.same_promises(stage)
        self.explains(stage)

    def explains(self, stage: str) -> None:
        """A range that holds a stage back is not ahead of what the stage has published."""
        found = self.do(self.api.explain(stage))
        root = self.seen[found["path"][-1]["stage"]]
        assert found["health"] != "unpublished"
        for holder in found["holders"]:
            at = root["output_watermark"]
            assert largest(holder["promise"], at) == at, (holder, root)

    def same_promises(self, stage: str) -> None:
        wanted = {key: item.promise for key, item in self.model.stages[stage].ranges.items()}
        shown = self.do(self.api.promises(stage))
        assert shown == wanted, f"{stage}: {shown}, not {wanted}"

    # -- section 2 ---------------------------------------------------------------------------

    def rises(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        """Within a generation nothing goes down; the version rises if and only if there is why."""
        for name, was in before.items():
            seen = after[name]
            if seen["generation"] != was["generation"]:
                assert seen["generation"] > was["generation"]
                continue
            for member in PUBLISHED[:2]:
                assert largest(seen[member], was[member]) == seen[member], (name, was, seen)
            changed = any(seen[member] != was[member] for member in PUBLISHED)
            if self.step in {"graceful", "crash"}:
                assert seen["version"] >= was["version"] + changed
            else:
                assert (seen["version"] > was["version"]) == changed, (name, was, seen)

    @invariant()
    def monotone(self) -> None:
        """1. Nothing that is published goes down from step to step, as from look to look."""
        self.rises(self.before, self.seen)

    @invariant()
    def complete(self) -> None:
        """2. An output has not moved while a range that counts has never promised."""
        for name, stage in self.model.stages.items():
            was = self.before.get(name)
            if was is None or was["generation"] != self.seen[name]["generation"]:
                continue
            if was["output_watermark"] != self.seen[name]["output_watermark"]:
                assert all(r.counted is not None or r.idle for r in stage.ranges.values())

    @invariant()
    def fenced(self) -> None:
        """3. Exactly the leases that are current are counted as such."""
        for name, stage in self.model.stages.items():
            leased = sum(r.lease is not None for r in stage.ranges.values())
            assert self.seen[name]["ranges"]["leased"] == leased

    @invariant()
    def never_early(self) -> None:
        """4. Nothing is ahead of what was promised; no promise of what was observed."""
        for name, stage in self.model.stages.items():
            for member, allowed in (
                ("input_watermark", stage.input),
                ("output_watermark", stage.output),
            ):
                assert largest(self.seen[name][member], allowed) == allowed
            if stage.kind == "keyed":
                shown = self.seen[name]["input_watermark"]
                for item in stage.ranges.values():
                    assert largest(item.promise, shown) == shown

    @invariant()
    def never_late(self) -> None:
        """And nothing is behind it: what may be published is, by the time of the answer."""
        for name, stage in self.model.stages.items():
            seen = self.seen[name]
            items = stage.ranges.values()
            shown = (seen["input_watermark"], seen["output_watermark"], seen["status"])
            wanted = (stage.input, stage.output, stage.status)
            assert shown == wanted, f"{name} after {self.step}: {shown}, not {wanted}"
            counts = {
                "total": len(stage.ranges),
                "reported": sum(r.counted is not None for r in items),
                "idle": sum(r.waits_for_nothing for r in items),
                "final": sum(r.promise == MAX for r in items),
                "leased": sum(r.lease is not None for r in items),
            }
            if retired := sum(r.retired for r in items):
                counts["retired"] = retired
            assert seen["ranges"] == counts, f"{name} after {self.step}: {seen}, not {counts}"

    @invariant()
    def durable_before_visible(self) -> None:
        """5. What a reader has seen is there after a crash, to the millisecond."""
        if self.step == "crash":
            for name, was in self.before.items():
                seen = self.seen[name]
                assert seen["generation"] == was["generation"]
                assert (
                    largest(seen["output_watermark"], was["output_watermark"])
                    == (seen["output_watermark"])
                )
                assert (
                    largest(seen["input_watermark"], was["input_watermark"])
                    == (seen["input_watermark"])
                )

    @invariant()
    def epochs_are_atomic(self) -> None:
        """6. What waits for an epoch that is not committed is in no range's promise."""
        before, after = self.around_an_epochs_report
        assert after == before

    @invariant()
    def loss_costs_time_never_truth(self) -> None:
        """7. After a loss no lease is current and nothing has moved ahead of its promises."""
        if self.step in {"graceful", "crash"}:
            assert all(state["ranges"]["leased"] == 0 for state in self.seen.values())

    @invariant()
    def layout_changes_are_ordered(self) -> None:
        """8. A layout change alone lifts no stage that gained a range that never promised."""
        if self.step == "layout":
            for name, stage in self.model.stages.items():
                if any(r.counted is None and not r.idle for r in stage.ranges.values()):
                    assert (
                        self.seen[name]["output_watermark"]
                        == (self.before[name]["output_watermark"])
                    )

    @invariant()
    def jobs_are_apart(self) -> None:
        """9. The other job is where its own reports have put it."""
        assert self.do(self.other.output("s")) == self.apart.stages["s"].output
        assert {state["generation"] for state in self.seen.values()} == {self.generation}


@functools.cache
def redis_server() -> RedisServer:
    """One for all examples: it ends with this process, as its folder does."""
    folder = tempfile.TemporaryDirectory(prefix="tidegauge-")
    server = RedisServer(Path(folder.name), appendonly=False)
    server.start()
    atexit.register(folder.cleanup)
    atexit.register(server.stop)
    return server


class TidegaugeOnRedis(Tidegauge):
    """The same steps on the other live store.

    Leases there run by the clock of Redis, which goes on while a busy machine pauses. A second
    of twenty makes the shortest lease longer than a pause.
    """

    second_ms = 20_000

    def make_stores(self) -> Stores:
        return Stores(redis_server())


EXAMPLES = int(os.environ.get("TIDEGAUGE_EXAMPLES", "60"))
COMMON = settings(
    max_examples=EXAMPLES,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

TestTidegauge = Tidegauge.TestCase
TestTidegauge.settings = COMMON
TestTidegaugeOnRedis = TidegaugeOnRedis.TestCase
TestTidegaugeOnRedis.settings = settings(COMMON, max_examples=max(1, EXAMPLES // 4))
