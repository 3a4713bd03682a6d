"""Checks a history of requests and answers against the rules, without any code of the service.

Each rule is a function from a history to violations, each with the records that prove it. A rule says
only what is certain: requests that overlap may have taken effect in either order, one without an answer
may have been done, be done later, or never.
"""

from __future__ import annotations

import bisect
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tests.chaos.combined import parts
from tests.chaos.history import Exchange, History, Mark, Record, Topology, states

MAX = 9_223_372_036_854_775_807
NEVER = -(1 << 63)
"""No watermark yet."""
NS_PER_MS = 1_000_000
MARGIN_MS = 500
"""Drift of the live store's clock from ours over the length of a lease."""
DEFAULT_TTL_MS = 10_000
RESUME_S = 10
"""Time after a fault within which every watermark must advance again."""

SLUGS: dict[str, int] = {
    "malformed-json": 400,
    "not-found": 404,
    "unknown-job": 404,
    "unknown-stage": 404,
    "method-not-allowed": 405,
    "lease-conflict": 409,
    "stale-run": 409,
    "stale-epoch": 409,
    "input-ahead": 409,
    "epochs-waiting": 409,
    "lease-lost": 410,
    "precondition-failed": 412,
    "payload-too-large": 413,
    "invalid-request": 422,
    "invalid-pipeline": 422,
    "invalid-report": 422,
    "precondition-required": 428,
    "unavailable": 503,
}


@dataclass(frozen=True, slots=True)
class Violation:
    """A violated rule, and the records that prove it."""

    rule: str
    text: str
    evidence: tuple[Record, ...]

    def __str__(self) -> str:
        return "\n".join([f"{self.rule}: {self.text}", *(f"    {one}" for one in self.evidence)])


# ---- what the records mean


class Seen(NamedTuple):
    """A stage as shown in an answer: its members, with null as `NEVER`."""

    key: tuple[str, int, str]
    values: Mapping[str, int]
    record: Exchange


class Lease(NamedTuple):
    """A grant whose answer arrived."""

    token: str
    stage: str
    ranges: frozenset[str]
    fence: int
    ttl_ms: int
    run: int
    record: Exchange


class Use(NamedTuple):
    """A use of a lease that the service accepted as current, for these ranges."""

    lease: Lease
    ranges: tuple[str, ...]
    record: Exchange


class Proof(NamedTuple):
    """Why a lease was certainly no longer current."""

    why: str
    record: Record


class Maximum:
    """Finds the record with the largest rank among those that had certainly ended by some time."""

    def __init__(self, items: Iterable[tuple[int, int, Any]]) -> None:
        """Each item: when it ended, its rank, and the item itself."""
        ordered = sorted(items, key=lambda item: item[0])
        self._ends = [end for end, _, _ in ordered]
        self._best = list(
            itertools.accumulate(ordered, lambda best, new: new if new[1] > best[1] else best)
        )

    def before(self, at_ns: int) -> tuple[int, Any] | None:
        """The largest rank and its item, among those that ended strictly before `at_ns`."""
        index = bisect.bisect_left(self._ends, at_ns)
        return None if index == 0 else self._best[index - 1][1:]


def _or_never(value: int | None) -> int:
    return NEVER if value is None else value


def _shown(value: int) -> str:
    return "null" if value == NEVER else str(value)


def _slug(record: Exchange) -> str:
    answer = record.answer if isinstance(record.answer, dict) else {}
    return str(answer.get("type", "")).removeprefix("/problems/")


@dataclass
class Facts:
    """A history, read once for all rules."""

    topology: Topology
    exchanges: list[Exchange] = field(default_factory=list[Exchange])
    marks: list[Mark] = field(default_factory=list[Mark])
    seen: list[Seen] = field(default_factory=list[Seen])
    leases: dict[str, Lease] = field(default_factory=dict[str, Lease])

    @classmethod
    def of(cls, history: History) -> Facts:
        facts = cls(history.topology)
        for record in history:
            if isinstance(record, Mark):
                facts.marks.append(record)
            else:
                facts.exchanges.extend(parts(record))
        facts.seen.extend(itertools.chain.from_iterable(map(_seen, facts._with_generation())))
        for record in facts.answered("claim", 201):
            answer = record.answer
            facts.leases[answer["token"]] = Lease(
                answer["token"],
                str(record.stage),
                frozenset(answer["granted"]),
                answer["fence"],
                record.request.get("ttl_ms", DEFAULT_TTL_MS),
                record.request.get("run", 0),
                record,
            )
        return facts

    def _with_generation(self) -> Iterator[tuple[Exchange, int]]:
        """A report's answer does not name the generation: if the job had only one, it is that one."""
        known: dict[str, set[int]] = defaultdict(set)
        for record in self.exchanges:
            for state in states(record).values():
                if "generation" in state:
                    known[record.job].add(state["generation"])
        for record in self.exchanges:
            yield record, min(known[record.job]) if len(known[record.job]) == 1 else 0

    def of_action(self, *actions: str) -> Iterator[Exchange]:
        return (record for record in self.exchanges if record.action in actions)

    def answered(self, action: str, status: int) -> Iterator[Exchange]:
        return (record for record in self.of_action(action) if record.status == status)

    def marked(self, kind: str) -> list[Mark]:
        return [mark for mark in self.marks if mark.kind == kind]

    def uses(self) -> Iterator[Use]:
        """Every time that the service accepted a lease as current."""
        for record in self.answered("report", 200):
            rejected = {one["range"] for one in record.answer["rejected"]}
            lease = self.leases.get(record.request["token"])
            if lease is not None:
                taken = tuple(r for r in record.request["ranges"] if r not in rejected)
                yield Use(lease, taken, record)
        for record in self.answered("renew", 200):
            for one in record.answer["renewed"]:
                if one["token"] in self.leases:
                    yield Use(self.leases[one["token"]], tuple(one["ranges"]), record)


def _seen(told: tuple[Exchange, int]) -> Iterator[Seen]:
    record, generation = told
    for stage, state in states(record).items():
        key = (record.job, state.get("generation", generation), stage)
        values = {
            "input": _or_never(state["input_watermark"]),
            "output": _or_never(state["output_watermark"]),
            "version": state["version"],
        }
        yield Seen(key, values, record)
    if record.action == "watermark" and record.status == 304:
        tag, _, version = str(record.request["if_none_match"]).strip('"').partition("-")
        yield Seen((record.job, int(tag), str(record.stage)), {"version": int(version)}, record)


# ---- 1 to 4: what readers are shown

MEMBERS = ("input", "output", "version")


def no_step_back(facts: Facts) -> Iterator[Violation]:
    """1. A request sent after an answer had arrived is not answered with less, whoever sent it."""
    for key, shown in _by_key(facts.seen).items():
        for member in MEMBERS:
            telling = [s for s in shown if member in s.values]
            greatest = Maximum((s.record.end_ns, s.values[member], s.record) for s in telling)
            for later in telling:
                best = greatest.before(later.record.start_ns)
                if best is not None and later.values[member] < best[0]:
                    yield Violation(
                        "no step back",
                        f"{member} of {key[2]} went from {_shown(best[0])}"
                        f" to {_shown(later.values[member])}",
                        (best[1], later.record),
                    )


def streams_in_order(facts: Facts) -> Iterator[Violation]:
    """2. Nothing goes down from one event of a stream to the next."""
    last: dict[tuple[int, tuple[str, int, str]], Seen] = {}
    for seen in facts.seen:
        if seen.record.stream is None:
            continue
        before = last.get((seen.record.stream, seen.key))
        last[seen.record.stream, seen.key] = seen
        if before is None:
            continue
        for member in MEMBERS:
            if seen.values[member] < before.values[member]:
                yield Violation(
                    "streams in order",
                    f"{member} of {seen.key[2]} went from {_shown(before.values[member])}"
                    f" to {_shown(seen.values[member])} in one stream",
                    (before.record, seen.record),
                )


def versions_tell(facts: Facts) -> Iterator[Violation]:
    """3. A version has one input and one output, and a greater version has none that is less."""
    for key, shown in _by_key(facts.seen).items():
        ordered = sorted((s for s in shown if "output" in s.values), key=_version)
        for one, other in itertools.pairwise(ordered):
            for member in ("input", "output"):
                was, now = one.values[member], other.values[member]
                if now < was or (_version(one) == _version(other) and was != now):
                    yield Violation(
                        "versions tell",
                        f"{member} of {key[2]} is {_shown(was)} in version {_version(one)},"
                        f" {_shown(now)} in version {_version(other)}",
                        (one.record, other.record),
                    )


def _version(seen: Seen) -> int:
    return seen.values["version"]


def consistent(facts: Facts) -> Iterator[Violation]:
    """4. No output is ahead of its own input and, in a snapshot, no input is ahead of its upstreams."""
    for seen in facts.seen:
        stage, values = seen.key[2], seen.values
        if not facts.topology.upstreams(stage) or "output" not in values:
            continue
        if values["output"] > values["input"]:
            yield Violation(
                "consistent",
                f"output {_shown(values['output'])} of {stage} is ahead of its input"
                f" {_shown(values['input'])}",
                (seen.record,),
            )
    for record in facts.answered("snapshot", 200):
        shown = states(record)
        for stage, upstreams in facts.topology.inputs.items():
            mine = _or_never(shown[stage]["input_watermark"])
            for upstream in upstreams:
                theirs = _or_never(shown[upstream]["output_watermark"])
                if mine > theirs:
                    yield Violation(
                        "consistent",
                        f"input {_shown(mine)} of {stage} is ahead of output {_shown(theirs)}"
                        f" of {upstream} in one snapshot",
                        (record,),
                    )


def _by_key(seen: Iterable[Seen]) -> dict[tuple[str, int, str], list[Seen]]:
    found: dict[tuple[str, int, str], list[Seen]] = defaultdict(list)
    for one in seen:
        found[one.key].append(one)
    return found


# ---- 5: the oracle


class _Rising:
    """The largest promise that may have been made by some time, and the report that made it."""

    def __init__(self, promises: Iterable[tuple[int, int, Exchange]]) -> None:
        self._greatest = Maximum(promises)

    def by(self, at_ns: int) -> tuple[int, Exchange | None]:
        best = self._greatest.before(at_ns)
        return (NEVER, None) if best is None else best


class Oracle:
    """The most that a correct service may show at any time."""

    def __init__(self, facts: Facts, fences: Fences) -> None:
        self._topology = facts.topology
        found: dict[tuple[str, str, str], list[tuple[int, int, Exchange]]] = defaultdict(list)
        commits = _commits(facts)
        for record in facts.of_action("report"):
            for name, word in _counted(record, facts, fences).items():
                made = _promise(record, word, facts, commits)
                if made is not None:
                    found[record.job, str(record.stage), name].append((*made, record))
        self._promises = {key: _Rising(made) for key, made in found.items()}
        self._none = _Rising(())

    def output(self, job: str, stage: str, at_ns: int) -> tuple[int, Exchange | None]:
        """The bound on an output, and the report that sets it (None: there is none)."""
        bounds = [
            self._promises.get((job, stage, name), self._none).by(at_ns)
            for name in self._topology.ranges.get(stage, ())
        ]
        if self._topology.upstreams(stage):
            bounds.append(self.input(job, stage, at_ns))
        return min(bounds, key=lambda bound: bound[0])

    def input(self, job: str, stage: str, at_ns: int) -> tuple[int, Exchange | None]:
        """The bound on an input: the smallest of its upstreams' output bounds."""
        upstreams = self._topology.upstreams(stage)
        bounds = [self.output(job, upstream, at_ns) for upstream in upstreams]
        return min(bounds, key=lambda bound: bound[0], default=(NEVER, None))


class _Said(NamedTuple):
    """A commit that may have been accepted: the earliest time, and the highest cap."""

    start_ns: int
    cap: int


def _commits(facts: Facts) -> dict[tuple[str, str, int, int], _Said]:
    """By job, stage, run and epoch."""
    found: dict[tuple[str, str, int, int], _Said] = {}
    for record in facts.of_action("commit"):
        if not record.may_have_happened:
            continue
        for stage, word in record.request["stages"].items():
            key = (record.job, stage, record.request.get("run", 0), record.request["epoch"])
            cap = _cap(word)
            before = found.get(key, _Said(record.start_ns, cap))
            found[key] = _Said(min(before.start_ns, record.start_ns), max(before.cap, cap))
    return found


def _cap(word: Mapping[str, Any]) -> int:
    """The most that a stage's ranges may promise, by its commit: its input, and what it keeps back."""
    observed = _or_never(word["input_watermark"]) if "input_watermark" in word else MAX
    return min([observed, *word.get("holds", {}).values()])


def _counted(record: Exchange, facts: Facts, fences: Fences) -> dict[str, Any]:
    """The ranges of a report that may have been accepted."""
    if not record.may_have_happened:
        return {}
    words: dict[str, Any] = dict(record.request["ranges"])
    if record.status == 200:
        rejected = {one["range"] for one in record.answer["rejected"]}
        return {name: word for name, word in words.items() if name not in rejected}
    lease = facts.leases.get(record.request["token"])
    if lease is None:
        return words
    return {
        name: word
        for name, word in words.items()
        if fences.lost(lease, name, record.start_ns) is None
    }


def _promise(
    record: Exchange,
    word: Any,
    facts: Facts,
    commits: Mapping[tuple[str, str, int, int], _Said],
) -> tuple[int, int] | None:
    """The earliest time that a range's report may count, and the highest promise it may make."""
    start_ns, cap = record.start_ns, MAX
    epoch = record.request.get("epoch")
    if epoch is not None:
        commit = commits.get((record.job, str(record.stage), _run_of(record, facts), epoch))
        if commit is None:
            return None
        start_ns, cap = max(start_ns, commit.start_ns), commit.cap
    return start_ns, min(cap, said(record, word))


def _run_of(record: Exchange, facts: Facts) -> int:
    """The run that a report is of: that of its lease, or of the claim within it."""
    lease = facts.leases.get(record.request["token"])
    return record.request.get("run", 0) if lease is None else lease.run


def said(record: Exchange, word: Any) -> int:
    """The promise of a range's report, before the commit caps it."""
    if isinstance(word, int):
        return word
    if word is None:
        return NEVER
    if word.get("final") or word.get("idle"):
        # Idle leaves the minimum: it bounds nothing.
        return MAX
    holds = word.get("holds", {}).values()
    sources = (word.get("watermark", MAX), record.request.get("input_watermark", MAX))
    return min([_or_never(value) for value in sources] + list(holds))


def nothing_ahead(facts: Facts, fences: Fences) -> Iterator[Violation]:
    """5. Nothing shown is more than the workers may have promised by then."""
    oracle = Oracle(facts, fences)
    for seen in facts.seen:
        job, _, stage = seen.key
        for member, bound in (("output", oracle.output), ("input", oracle.input)):
            value = seen.values.get(member, NEVER)
            if value == NEVER:
                continue
            most, report = bound(job, stage, seen.record.end_ns)
            if value > most:
                evidence = (seen.record,) if report is None else (report, seen.record)
                yield Violation(
                    "nothing ahead",
                    f"{member} of {stage} is {value}, at most {_shown(most)} was promised",
                    evidence,
                )


# ---- 6 to 10: leases, runs and epochs


class Fences:
    """When a lease was certainly no longer current, according to the answers."""

    def __init__(self, facts: Facts) -> None:
        self._losses = facts.marked("live-lost")
        self._by_start: dict[tuple[str, str, str], Maximum] = {}
        self._by_fence: dict[tuple[str, str, str], Maximum] = {}
        self._ended: dict[tuple[str, str], Maximum] = {}
        self._runs: dict[tuple[str, str], Maximum] = {}
        self._activity: dict[str, Maximum] = {}
        self._doubtful: dict[str, list[int]] = {}
        self._index_grants(facts)
        self._index_ends(facts)
        self._index_activity(facts)

    def _index_grants(self, facts: Facts) -> None:
        grants: dict[tuple[str, str, str], list[Lease]] = defaultdict(list)
        for lease in facts.leases.values():
            for name in lease.ranges:
                grants[lease.record.job, lease.stage, name].append(lease)
        for key, leases in grants.items():
            self._by_start[key] = Maximum((e.record.end_ns, e.record.start_ns, e) for e in leases)
            self._by_fence[key] = Maximum((e.record.end_ns, e.fence, e) for e in leases)
        runs: dict[tuple[str, str], list[Exchange]] = defaultdict(list)
        for record in facts.answered("run", 201):
            for stage in record.request["stages"]:
                runs[record.job, stage].append(record)
        for key, records in runs.items():
            self._runs[key] = Maximum((r.end_ns, r.answer["run"], r) for r in records)

    def _index_ends(self, facts: Facts) -> None:
        ended: dict[tuple[str, str], list[tuple[int, int, Exchange]]] = defaultdict(list)
        for record in facts.answered("release", 200):
            for token in record.request["tokens"]:
                ended[token, "*"].append((record.end_ns, 0, record))
        for record in facts.answered("renew", 200):
            for one in record.answer["lost"]:
                ended[one["token"], "*"].append((record.end_ns, 0, record))
        for record in facts.of_action("report"):
            names: Iterable[str] = ()
            if record.status == 410:
                names = record.request["ranges"]
            elif record.status == 200:
                names = [one["range"] for one in record.answer["rejected"]]
            for name in names:
                ended[record.request["token"], name].append((record.end_ns, 0, record))
        self._ended = {key: Maximum(items) for key, items in ended.items()}

    def _index_activity(self, facts: Facts) -> None:
        activity: dict[str, list[tuple[int, int, Exchange]]] = defaultdict(list)
        doubtful: dict[str, list[int]] = defaultdict(list)
        for lease in facts.leases.values():
            # By its start: a request that overlaps with a use may have renewed the lease before it.
            activity[lease.token].append((lease.record.start_ns, lease.record.end_ns, lease.record))
        for record in facts.of_action("report", "renew"):
            for token in record.request.get("tokens") or [record.request["token"]]:
                if record.status == 200:
                    activity[token].append((record.start_ns, record.end_ns, record))
                elif record.may_have_happened:
                    doubtful[token].append(record.start_ns)
        self._activity = {token: Maximum(items) for token, items in activity.items()}
        self._doubtful = {token: sorted(starts) for token, starts in doubtful.items()}

    def lost(self, lease: Lease, name: str, at_ns: int) -> Proof | None:
        """Why the lease on this range was certainly not current at or after that time."""
        return (
            self._superseded(lease, name, at_ns)
            or self._told(lease, name, at_ns)
            or self._outrun(lease, at_ns)
            or self._void(lease, at_ns)
            or self._expired(lease, at_ns)
        )

    def _superseded(self, lease: Lease, name: str, at_ns: int) -> Proof | None:
        key = (lease.record.job, lease.stage, name)
        latest = self._by_start[key].before(at_ns) if key in self._by_start else None
        if latest is not None and latest[0] > lease.record.end_ns:
            return Proof("the range had been granted anew", latest[1].record)
        highest = self._by_fence[key].before(at_ns) if key in self._by_fence else None
        # The later of two grants at the same time is the one with the higher fence.
        if highest is None or highest[0] <= lease.fence:
            return None
        if highest[1].record.end_ns < lease.record.start_ns:
            return None
        return Proof("the range had been granted anew", highest[1].record)

    def _told(self, lease: Lease, name: str, at_ns: int) -> Proof | None:
        for key in ((lease.token, name), (lease.token, "*")):
            best = self._ended[key].before(at_ns) if key in self._ended else None
            if best is not None:
                return Proof("it had been released or lost", best[1])
        return None

    def _outrun(self, lease: Lease, at_ns: int) -> Proof | None:
        newest = self.newest_run(lease.record.job, lease.stage, at_ns)
        if newest is not None and newest[0] > lease.run:
            return Proof(f"run {newest[0]} had begun", newest[1])
        return None

    def newest_run(self, job: str, stage: str, at_ns: int) -> tuple[int, Exchange] | None:
        """The newest run that had certainly been opened."""
        runs = self._runs.get((job, stage))
        return None if runs is None else runs.before(at_ns)

    def _void(self, lease: Lease, at_ns: int) -> Proof | None:
        for loss in self._losses:
            if lease.record.end_ns < loss.start_ns and loss.end_ns < at_ns:
                return Proof("the live store had been lost since", loss)
        return None

    def _expired(self, lease: Lease, at_ns: int) -> Proof | None:
        last = self._activity[lease.token].before(at_ns)
        assert last is not None, "a token was used before it was asked for"
        # Each request without an answer may have renewed it once more, at the last moment.
        renewals = 1 + bisect.bisect_left(self._doubtful.get(lease.token, []), at_ns)
        deadline_ns = last[0] + (lease.ttl_ms * renewals + MARGIN_MS) * NS_PER_MS
        if at_ns > deadline_ns:
            return Proof(f"{(at_ns - last[0]) // NS_PER_MS} ms had passed", last[1])
        return None


def fenced(facts: Facts, fences: Fences) -> Iterator[Violation]:
    """6. Nothing is accepted, and no lease renewed, under a lease that is certainly not current."""
    for use in facts.uses():
        for name in use.ranges:
            proof = fences.lost(use.lease, name, use.record.start_ns)
            if proof is not None:
                yield Violation(
                    "fenced",
                    f"{use.record.action} for {use.lease.stage}/{name} under fence"
                    f" {use.lease.fence} was taken, but {proof.why}",
                    (use.lease.record, proof.record, use.record),
                )
                break


def fences_rise(facts: Facts, _fences: Fences) -> Iterator[Violation]:
    """7. A lease asked for after another had been granted has a higher fence, and no two the same."""
    by_job: dict[str, list[Lease]] = defaultdict(list)
    for lease in facts.leases.values():
        by_job[lease.record.job].append(lease)
    for leases in by_job.values():
        greatest = Maximum((e.record.end_ns, e.fence, e) for e in leases)
        for lease in leases:
            best = greatest.before(lease.record.start_ns)
            if best is not None and lease.fence <= best[0]:
                yield _fence_violation(best[1], lease)
        for one, other in itertools.pairwise(sorted(leases, key=lambda lease: lease.fence)):
            if one.fence == other.fence:
                yield _fence_violation(one, other)


def _fence_violation(first: Lease, second: Lease) -> Violation:
    text = f"fence {second.fence} was granted after fence {first.fence}"
    return Violation("fences rise", text, (first.record, second.record))


def runs_rise(facts: Facts, fences: Fences) -> Iterator[Violation]:
    """8. A newer run has a greater number, and an older one gets no lease and no commit after it."""
    by_job: dict[str, list[Exchange]] = defaultdict(list)
    for record in facts.answered("run", 201):
        by_job[record.job].append(record)
    for records in by_job.values():
        greatest = Maximum((r.end_ns, r.answer["run"], r) for r in records)
        for record in records:
            best = greatest.before(record.start_ns)
            if best is not None and record.answer["run"] <= best[0]:
                text = f"run {record.answer['run']} was opened after run {best[0]}"
                yield Violation("runs rise", text, (best[1], record))
    for record in itertools.chain(facts.answered("claim", 201), facts.answered("commit", 200)):
        mine = record.request.get("run", 0)
        for stage in record.request.get("stages", [record.stage]):
            newest = fences.newest_run(record.job, str(stage), record.start_ns)
            if newest is not None and newest[0] > mine:
                text = f"{record.action} of run {mine} was taken after run {newest[0]} had begun"
                yield Violation("runs rise", text, (newest[1], record))


def epochs_end(facts: Facts, _fences: Fences) -> Iterator[Violation]:
    """9. Once an epoch is committed, no report for it, or for an earlier one, is accepted."""
    commits: dict[tuple[str, str], list[tuple[int, int, Exchange]]] = defaultdict(list)
    for record in facts.answered("commit", 200):
        for stage in record.request["stages"]:
            commits[record.job, stage].append((record.end_ns, record.request["epoch"], record))
    last = {key: Maximum(items) for key, items in commits.items()}
    for record in facts.answered("report", 200):
        epoch, known = record.request.get("epoch"), last.get((record.job, str(record.stage)))
        best = None if known is None else known.before(record.start_ns)
        if epoch is not None and best is not None and epoch <= best[0]:
            text = f"a report for epoch {epoch} was taken after the commit of epoch {best[0]}"
            yield Violation("epochs end", text, (best[1], record))


def commits_show(facts: Facts, fences: Fences) -> Iterator[Violation]:
    """10. After a commit of all ranges of a stage, its answer shows at least what they promised."""
    words: dict[tuple[str, str, int, int], dict[str, int]] = defaultdict(dict)
    for record in facts.of_action("report"):
        epoch, lease = record.request.get("epoch"), facts.leases.get(record.request["token"])
        if epoch is None or lease is None:
            continue
        least = words[record.job, str(record.stage), lease.run, epoch]
        for name, word in _counted(record, facts, fences).items():
            promise = said(record, word)
            least[name] = min(promise, least.get(name, promise))
    for record in facts.answered("commit", 200):
        for stage, word in record.request["stages"].items():
            key = (record.job, stage, record.request.get("run", 0), record.request["epoch"])
            least = words.get(key, {})
            names = facts.topology.ranges.get(stage, ())
            if record.answer["applied"].get(stage) != len(names) or set(names) - set(least):
                continue
            floor = min(_cap(word), *least.values())
            shown = _or_never(record.answer["watermarks"][stage]["output_watermark"])
            if shown < floor:
                text = f"{stage} is at {_shown(shown)} after a commit of {floor}"
                yield Violation("commits show", text, (record,))


# ---- 11 to 13: refusals


def refused_for_cause(facts: Facts, _fences: Fences) -> Iterator[Violation]:
    """11. No watermark that had been shown is refused as ahead, and no existing job as unknown."""
    shown = _greatest_inputs(facts)
    defined = Maximum((r.end_ns, 0, r) for r in facts.of_action("define") if r.status in {200, 201})
    for record in facts.exchanges:
        slug = _slug(record)
        if slug == "input-ahead" and _was_shown(record, shown):
            text = "an input watermark was called ahead that had been shown"
            yield Violation("refused for cause", text, (record,))
        created = defined.before(record.start_ns)
        if created is not None and record.status == 404:
            text = f"{slug}, of a job that had been there before"
            yield Violation("refused for cause", text, (created[1], record))


def stale_for_cause(facts: Facts, _fences: Fences) -> Iterator[Violation]:
    """12. No epoch is refused as stale unless it, or a later one, may be committed; nor any run."""
    commits, runs = list(facts.of_action("commit")), list(facts.of_action("run"))
    for record in facts.exchanges:
        slug = _slug(record)
        if slug == "stale-epoch" and not any(_makes_stale(other, record) for other in commits):
            text = "an epoch was called stale, and nobody had committed it or a later one"
            yield Violation("stale for cause", text, (record,))
        if slug == "stale-run" and not any(_makes_old(other, record, facts) for other in runs):
            text = "a run was called stale, and nobody had opened a newer one"
            yield Violation("stale for cause", text, (record,))


def _greatest_inputs(facts: Facts) -> dict[tuple[str, str], Maximum]:
    found: dict[tuple[str, str], list[tuple[int, int, Exchange]]] = defaultdict(list)
    for seen in facts.seen:
        if "input" in seen.values:
            item = (seen.record.end_ns, seen.values["input"], seen.record)
            found[seen.key[0], seen.key[2]].append(item)
    return {key: Maximum(items) for key, items in found.items()}


def _was_shown(record: Exchange, shown: Mapping[tuple[str, str], Maximum]) -> bool:
    """Return whether every input watermark in the request had been shown to some reader before it."""
    for stage, wanted in _observed(record).items():
        known = shown.get((record.job, stage))
        best = None if known is None else known.before(record.start_ns)
        if best is None or best[0] < wanted:
            return False
    return True


def _observed(record: Exchange) -> dict[str, int]:
    if record.action == "report":
        return {str(record.stage): _or_never(record.request.get("input_watermark"))}
    words: Mapping[str, Any] = record.request.get("stages", {})
    return {
        stage: word["input_watermark"]
        for stage, word in words.items()
        if word.get("input_watermark") is not None
    }


def _makes_stale(commit: Exchange, refused: Exchange) -> bool:
    stages: Sequence[str] | Mapping[str, Any] = refused.request.get("stages", [refused.stage])
    return (
        commit.number != refused.number
        and commit.may_have_happened
        and commit.start_ns < refused.end_ns
        and commit.job == refused.job
        and commit.request["epoch"] >= refused.request["epoch"]
        and any(stage in commit.request["stages"] for stage in stages)
    )


def _makes_old(run: Exchange, refused: Exchange, facts: Facts) -> bool:
    mine = refused.request.get("run")
    if mine is None and refused.action == "report":
        lease = facts.leases.get(refused.request["token"])
        mine = None if lease is None else lease.run
    newer = run.status is None or run.status >= 500 or run.answer.get("run", 0) > (mine or 0)
    stages: Sequence[str] | Mapping[str, Any] = refused.request.get("stages", [refused.stage])
    return (
        run.may_have_happened
        and newer
        and run.start_ns < refused.end_ns
        and run.job == refused.job
        and any(stage in run.request["stages"] for stage in stages)
    )


def well_formed(facts: Facts, _fences: Fences) -> Iterator[Violation]:
    """13. Every failure is a documented problem; an unavailable service says when to retry."""
    return ill_formed(facts.exchanges)


def ill_formed(exchanges: Iterable[Exchange]) -> Iterator[Violation]:
    """Yield the failures that are no documented problem."""
    for record in exchanges:
        if record.status is None or record.status < 300 or record.status == 304:
            continue
        slug = _slug(record)
        if record.content_type.partition(";")[0] != "application/problem+json":
            yield Violation("well formed", "an error that is no problem+json", (record,))
        elif SLUGS.get(slug) != record.status:
            text = f"status {record.status} with the problem {slug!r}"
            yield Violation("well formed", text, (record,))
        elif record.status == 503 and not (record.retry_after or "").isdigit():
            yield Violation("well formed", "503 without Retry-After", (record,))


# ---- 14 to 16: it goes on


def resumes(facts: Facts, _fences: Fences) -> Iterator[Violation]:
    """14. Within `RESUME_S` after a fault every stage is seen further ahead than ever before."""
    faults = facts.marked("fault")
    for stage in facts.topology.stages:
        shown = sorted(
            (s for s in facts.seen if s.key[2] == stage and "output" in s.values),
            key=lambda s: s.record.end_ns,
        )
        for fault in faults:
            if any(other.start_ns < fault.end_ns < other.end_ns for other in faults):
                # Another fault was still active: its end is what counts.
                continue
            resumed = _resumed(shown, fault.end_ns)
            until_ns = fault.end_ns + RESUME_S * 1_000 * NS_PER_MS
            if resumed is not None and resumed.record.end_ns <= until_ns:
                continue
            if any(fault.end_ns <= other.start_ns < until_ns for other in faults if other != fault):
                # Nobody waited for it: the next one's end decides.
                continue
            took = "never" if resumed is None else f"{resumed.record.end_ns - fault.end_ns} ns"
            text = f"{stage} did not move within {RESUME_S} s of {fault.name}: {took}"
            last = [s.record for s in shown if s.record.end_ns <= until_ns][-1:]
            yield Violation("resumes", text, (fault, *last))


def _resumed(shown: Sequence[Seen], since_ns: int) -> Seen | None:
    """The first that is ahead of everything shown by then."""
    start = bisect.bisect_right(shown, since_ns, key=lambda s: s.record.end_ns)
    most = max((s.values["output"] for s in shown[:start]), default=NEVER)
    return next((s for s in shown[start:] if s.values["output"] > most), None)


def ends_where_it_must(facts: Facts, _fences: Fences) -> Iterator[Violation]:
    """15. After every worker's final report, every replica shows exactly that in every stage."""
    for final in facts.marked("final"):
        assert final.expected is not None
        last: dict[tuple[str, str], Seen] = {}
        for seen in facts.seen:
            if seen.record.start_ns >= final.end_ns and "output" in seen.values:
                last[seen.record.replica, seen.key[2]] = seen
        if not last:
            yield Violation("ends where it must", "nobody looked in the end", (final,))
        for stage, expected in final.expected.items():
            for replica in {replica for replica, _ in last}:
                seen = last.get((replica, stage))
                if seen is not None and seen.values["output"] != expected:
                    text = f"{stage} ends at {_shown(seen.values['output'])}, not at {expected}"
                    yield Violation("ends where it must", text, (final, seen.record))


def streams_keep_up(facts: Facts, _fences: Fences) -> Iterator[Violation]:
    """16. By its end a stream has shown everything that any reader had been shown `RESUME_S` before."""
    told: dict[tuple[str, str], list[tuple[int, int, Exchange]]] = defaultdict(list)
    shown: dict[int, dict[str, int]] = defaultdict(dict)
    for seen in facts.seen:
        item = (seen.record.end_ns, _version(seen), seen.record)
        told[seen.key[0], seen.key[2]].append(item)
        if seen.record.stream is not None:
            shown[seen.record.stream][seen.key[2]] = _version(seen)
    greatest = {key: Maximum(items) for key, items in told.items()}
    for end in facts.of_action("event"):
        by_ns = end.end_ns - RESUME_S * 1_000 * NS_PER_MS
        if end.status is not None or end.stream is None or end.start_ns > by_ns:
            continue
        mine = shown[end.stream]
        # One that goes on from an id need not show again what has not changed since.
        fresh = end.request.get("last_event_id") is None
        for stage in facts.topology.stages if fresh else mine:
            best = greatest[end.job, stage].before(by_ns) if (end.job, stage) in greatest else None
            if best is not None and best[0] > mine.get(stage, -1):
                text = f"a stream did not show version {best[0]} of {stage} in {RESUME_S} s"
                yield Violation("streams keep up", text, (best[1], end))


# ---- 17: soft values


def soft_values(facts: Facts) -> Iterator[Violation]:
    """17. Percentiles are in order and not behind the output, work does not begin in the future, and
    none of it goes back while the live state lasts.
    """
    losses = facts.marked("live-lost")
    shown: dict[tuple[str, int, str, int, str], list[tuple[int, Exchange]]] = defaultdict(list)
    for record in facts.answered("watermark", 200):
        yield from _out_of_order(record)
        # Whatever overlaps with a loss may show the state before it, or the one after.
        if any(
            loss.start_ns <= record.end_ns and record.start_ns <= loss.end_ns for loss in losses
        ):
            continue
        state = record.answer
        lives = sum(loss.end_ns < record.start_ns for loss in losses)
        for name, value in _soft(state).items():
            key = (record.job, state["generation"], str(record.stage), lives, name)
            shown[key].append((value, record))
    for key, readings in shown.items():
        greatest = Maximum((record.end_ns, value, record) for value, record in readings)
        for value, record in readings:
            best = greatest.before(record.start_ns)
            if best is not None and value < best[0]:
                text = f"{key[4]} of {key[2]} went from {best[0]} to {value}"
                yield Violation("soft values", text, (best[1], record))


def _out_of_order(record: Exchange) -> Iterator[Violation]:
    state = record.answer
    percentiles = sorted((int(p), value) for p, value in state.get("percentiles", {}).items())
    line = [value for _, value in percentiles if value is not None]
    line.append(_or_never(state["output_watermark"]))
    if any(ahead < behind for ahead, behind in itertools.pairwise(line)):
        yield Violation("soft values", f"percentiles out of order, output last: {line}", (record,))
    if (state.get("system_lag_ms") or 0) < 0:
        yield Violation("soft values", "the processing watermark is in the future", (record,))


def _soft(state: Mapping[str, Any]) -> dict[str, int]:
    values = {f"percentile {p}": value for p, value in state.get("percentiles", {}).items()}
    values["processing watermark"] = state.get("processing_watermark")
    return {name: value for name, value in values.items() if value is not None}


SHOWN: tuple[Callable[[Facts], Iterator[Violation]], ...] = (
    no_step_back,
    streams_in_order,
    versions_tell,
    consistent,
    soft_values,
)
DONE: tuple[Callable[[Facts, Fences], Iterator[Violation]], ...] = (
    nothing_ahead,
    fenced,
    fences_rise,
    runs_rise,
    epochs_end,
    commits_show,
    refused_for_cause,
    stale_for_cause,
    well_formed,
    resumes,
    ends_where_it_must,
    streams_keep_up,
)


def check(history: History) -> list[Violation]:
    """Every violation that the history proves."""
    facts = Facts.of(history)
    fences = Fences(facts)
    shown = itertools.chain.from_iterable(rule(facts) for rule in SHOWN)
    done = itertools.chain.from_iterable(rule(facts, fences) for rule in DONE)
    return [*shown, *done]
