"""A queueing model of replicas and stores, fed with measured costs.

The model has five parts. Each queue is first come, first served.

- A *replica* is an event loop. Each of its turns has a cost, and serves all that was ready at its begin.
  The reports of a job that arrive during a call to its node share the next call. A call with n reports
  costs the replica `per_call + n * per_report`.
- A *Redis node* is an event loop, too, with costs of the same form.
- A *publisher* of each replica runs one round at a time. Advances that arrive meanwhile share the next
  round. After a round with several callers it waits up to `GATHER_S` for as many to return.
- *Postgres* has a process for each replica, up to `POSTGRES_CORES` of them at work at once. Transactions
  that end at the same time share a write to the disk.
- The *host* has cores that all of these and the load share, when measured points are simulated: a
  process waits for a core. A plan has a core for each process instead.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import simpy

from benchmarks.processes import OWN_CORES, Host, Loop, Machine, Process, Server

GATHER_S: Final = 0.005
MOST_IN_CALL: Final = 128
MOST_RANGES_IN_CALL: Final = 10_000
MOST_CALLS: Final = 2
OWN_CALL_RANGES: Final = 1_000
POSTGRES_CORES: Final = 8
TIMEOUT_S: Final = 2.0
"""Length of a client's attempt, and time until a load balancer leaves out a replica."""
TURNS_OF_REPORT: Final = 3
"""Turns of a replica's loop for a report alone: it is taken, its call is sent, and answered."""
TURNS_OF_ROUND: Final = 4
"""Before the read of the agreements, the record, the publication, and the answers."""
CALLS_OF_ROUND: Final = 2
"""Calls to the node of each of a round's jobs: the agreements, and the publication."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Processor time (s) of a batch: a part for the call, and a part for each of its reports."""

    per_call: float
    per_report: float

    def of(self, count: float) -> float:
        """Return the cost of a batch.

        >>> Cost(2.0, 0.5).of(4)
        4.0
        """
        return self.per_call + count * self.per_report


@dataclass(frozen=True, slots=True)
class Profile:
    """Costs of reports of one size."""

    replica: Cost
    redis: Cost
    round_replica: float = 0.0
    """Processor time of a replica for a job in a round."""
    round_redis: float = 0.0
    round_postgres: float = 0.0
    turn_replica: float = 0.0
    """Processor time of a turn of a replica's event loop."""
    turn_redis: float = 0.0
    load: float = 0.0
    commit_s: float = 0.0
    """Latency of a commit."""
    hop_s: float = 0.0
    """Time from one process to another, in which nobody uses a core for it."""
    ranges: int = 1

    @property
    def most_calls(self) -> int:
        """Largest number of calls of a job at once: reports of many ranges do not wait for a call."""
        return MOST_CALLS if self.ranges >= OWN_CALL_RANGES else 1

    @property
    def most_in_call(self) -> int:
        """Largest number of reports in a call."""
        return max(1, min(MOST_IN_CALL, MOST_RANGES_IN_CALL // self.ranges))


@dataclass(frozen=True, slots=True)
class Outage:
    """A failure: a component is away from `at_s` for `for_s`."""

    component: str
    """`replica`, `redis` or `postgres`."""
    at_s: float
    for_s: float


@dataclass(frozen=True, slots=True)
class Site:
    """A site, and its load: closed (`connections` of each job), or open (`rate` of all jobs)."""

    replicas: int
    nodes: int
    jobs: int
    advancing: float
    """Share of the reports that advance a watermark."""
    connections: int = 0
    """Connections of each job, which report again as soon as they are answered; 0: `rate` instead."""
    rate: float = 0.0
    """Reports per second of all jobs, at random."""
    host: Host = OWN_CORES
    outage: Outage | None = None


@dataclass
class Found:
    """Results of a run."""

    latencies: list[float] = field(default_factory=list[float])
    """Seconds from a report to its answer."""
    arrivals: list[float] = field(default_factory=list[float])
    """Instant of each report in `latencies`."""
    seconds: float = 0.0
    batches: list[int] = field(default_factory=list[int])
    rounds: int = 0
    round_jobs: int = 0
    turns: dict[str, int] = field(default_factory=dict[str, int])
    """Turns of all event loops of each kind."""
    busy: dict[str, float] = field(default_factory=dict[str, float])
    """Processor time of the busiest process of each kind."""

    @property
    def rate(self) -> float:
        """Answers per second."""
        return len(self.latencies) / self.seconds

    @property
    def batch(self) -> float:
        """Mean number of reports in a call."""
        return statistics.mean(self.batches) if self.batches else 1.0

    def turns_per_report(self, kind: str) -> float:
        """Return the turns of all event loops of a kind, per report."""
        return self.turns.get(kind, 0) / max(1, len(self.latencies))

    def utilisation(self, kind: str) -> float:
        """Share of its core that the busiest process of a kind has used."""
        return self.busy.get(kind, 0.0) / self.seconds

    def quantile(self, share: float) -> float:
        """Return a quantile of the latencies, in seconds."""
        return sorted(self.latencies)[
            min(len(self.latencies) - 1, int(share * len(self.latencies)))
        ]


@dataclass
class _Report:
    job: int
    answered: simpy.Event


class _Replica:
    """An event loop with its batches, and its publisher."""

    def __init__(self, run: _Run) -> None:
        self._run = run
        self.loop = Loop(run, "replica", run.profile.turn_replica)
        self._queues: dict[int, list[_Report]] = {}
        self._calls: dict[int, int] = {}
        self._touched: dict[int, list[simpy.Event]] = {}
        self._touches = 0
        self._expected = 0
        self._is_publishing = False
        self._all_arrived: simpy.Event | None = None

    def submit(self, report: _Report) -> None:
        self._run.env.process(self._take(report))

    def _take(self, report: _Report) -> Process:
        """Decode a report; it joins the next call of its job."""
        job = report.job
        if self._run.is_away(self.loop):
            # A connection that is refused.
            return
        yield self._run.env.timeout(self._run.profile.hop_s)
        yield from self.loop.use(self._run.profile.replica.per_report)
        self._queues.setdefault(job, []).append(report)
        if self._calls.get(job, 0) < self._run.profile.most_calls:
            self._calls[job] = self._calls.get(job, 0) + 1
            self._run.env.process(self._call(job))

    def _call(self, job: int) -> Process:
        """Send a job's reports to its node, as long as there are some."""
        run = self._run
        while self._queues[job]:
            batch: list[_Report] = []
            # Other reports are decoded while the call waits for its turn.
            yield from self.loop.use(run.profile.replica.per_call, partial(self._fill, job, batch))
            if not batch:
                break
            if run.env.now >= run.warm_s:
                run.found.batches.append(len(batch))
            node = run.nodes[job % run.site.nodes]
            yield run.env.timeout(run.profile.hop_s)
            yield from node.use(run.profile.redis.of(len(batch)))
            yield run.env.timeout(run.profile.hop_s)
            # The answer waits for the next turn, and its cost is a part of the call's.
            yield from self.loop.use(0.0)
            for each in batch:
                if run.chance.random() < run.site.advancing:
                    self._touch(each)
                else:
                    each.answered.succeed()
        self._calls[job] -= 1

    def _fill(self, job: int, batch: list[_Report]) -> None:
        """Move the reports that wait for the job's next call to its batch."""
        most = self._run.profile.most_in_call
        batch += self._queues[job][:most]
        del self._queues[job][:most]

    def _touch(self, report: _Report) -> None:
        self._touched.setdefault(report.job, []).append(report.answered)
        self._touches += 1
        if self._all_arrived is not None and self._touches >= self._expected:
            self._all_arrived.succeed()
            self._all_arrived = None
        if not self._is_publishing:
            self._is_publishing = True
            self._run.env.process(self._publish())

    def _publish(self) -> Process:
        run = self._run
        while self._touched:
            if self._expected > 1 and self._touches < self._expected:
                self._all_arrived = run.env.event()
                yield run.env.any_of([self._all_arrived, run.env.timeout(GATHER_S)])
                self._all_arrived = None
            round_, self._touched = self._touched, {}
            touches, self._touches = self._touches, 0
            # Before each of the three requests of a round, its replica has work, behind that of reports.
            turn_s = run.profile.round_replica * len(round_) / TURNS_OF_ROUND
            nodes = [job % run.site.nodes for job in round_]
            yield from self.loop.use(turn_s)
            yield from self._stores(nodes)
            yield from self.loop.use(turn_s)
            yield from run.postgres.use(run.profile.round_postgres * len(round_))
            yield from run.commit()
            yield from self.loop.use(turn_s)
            yield from self._stores(nodes)
            yield from self.loop.use(turn_s)
            if run.env.now >= run.warm_s:
                run.found.rounds += 1
                run.found.round_jobs += len(round_)
            for waiting in round_.values():
                for each in waiting:
                    each.succeed()
            self._expected = touches + self._touches
            if not self._touched:
                # The callers that were just answered may return.
                yield run.env.timeout(0)
        self._is_publishing = False

    def _stores(self, nodes: Sequence[int]) -> Process:
        run = self._run
        call_s = run.profile.round_redis / CALLS_OF_ROUND
        yield run.env.timeout(2 * run.profile.hop_s)
        yield run.env.all_of([run.env.process(run.nodes[node].use(call_s)) for node in nodes])


class _Run(Machine):
    """One run of a site."""

    def __init__(self, site: Site, profile: Profile, seconds: float, seed: int) -> None:
        super().__init__(site.host, random.Random(seed))
        self.site = site
        self.profile = profile
        # Apart, so that two sites with one seed have the same arrivals.
        self._arriving = random.Random(seed)
        self.warm_s = 0.2 * seconds
        self.end_s = self.warm_s + seconds
        self.found = Found(seconds=seconds)
        self._busy: dict[Server | Loop, float] = {}
        self.nodes = [Loop(self, "redis", profile.turn_redis) for _ in range(site.nodes)]
        self.postgres = Server(self, "postgres", min(site.replicas, POSTGRES_CORES))
        self._committing: simpy.Event | None = None
        self._next_commit: simpy.Event | None = None
        self.replicas = [_Replica(self) for _ in range(site.replicas)]
        self._load = Server(self, "load", site.jobs)

    def run(self) -> Found:
        for job in range(self.site.jobs):
            for _ in range(self.site.connections):
                self.env.process(self._connection(job))
        if self.site.rate:
            self.env.process(self._arrivals())
        self.env.run(until=self.end_s)
        return self.found

    def note(self, process: Server | Loop, seconds: float) -> None:
        """Note the processor time of a process, and the turns of an event loop, after the warm-up."""
        if self.env.now < self.warm_s:
            return
        kind, found = process.kind, self.found
        self._busy[process] = self._busy.get(process, 0.0) + seconds
        found.busy[kind] = max(found.busy.get(kind, 0.0), self._busy[process])
        if isinstance(process, Loop):
            found.turns[kind] = found.turns.get(kind, 0) + 1

    def while_away(self, process: Server | Loop) -> Process:
        """Wait while the first process of a kind has failed."""
        out = self.site.outage
        if out is not None and self.is_away(process):
            yield self.env.timeout(self.warm_s + out.at_s + out.for_s - self.env.now)

    def is_away(self, process: Server | Loop) -> bool:
        """Return whether a process has failed: the first one of its kind does."""
        out = self.site.outage
        if out is None or out.component != process.kind or not self._is_first(process):
            return False
        return out.at_s <= self.env.now - self.warm_s < out.at_s + out.for_s

    def _is_first(self, process: Server | Loop) -> bool:
        return process in (self.replicas[0].loop, self.nodes[0], self.postgres)

    def _replica_of(self, job: int) -> _Replica:
        number = job % self.site.replicas
        if number == 0 and self._is_known_to_be_away():
            number = 1 + self.chance.randrange(self.site.replicas - 1)
        return self.replicas[number]

    def _is_known_to_be_away(self) -> bool:
        """Return whether the load balancer has found that the first replica is away."""
        out = self.site.outage
        if out is None or out.component != "replica" or self.site.replicas == 1:
            return False
        away_s = self.env.now - self.warm_s - out.at_s
        return TIMEOUT_S <= away_s < out.for_s

    def commit(self) -> Process:
        """Wait for a write to the disk that begins after this moment; all who wait share it."""
        if self._committing is None:
            yield from self._write()
            return
        if self._next_commit is None:
            self._next_commit = self.env.event()
            self.env.process(self._write_next(self._committing, self._next_commit))
        yield self._next_commit

    def _write(self) -> Process:
        written = self._committing = self.env.event()
        yield self.env.timeout(self.profile.commit_s)
        self._committing = None
        written.succeed()

    def _write_next(self, running: simpy.Event, waited_for: simpy.Event) -> Process:
        yield running
        self._next_commit = None
        yield from self._write()
        waited_for.succeed()

    def _report(self, job: int) -> Process:
        began = self.env.now
        replica = self._replica_of(job)
        answered = self._submit(replica, job)
        while self.site.outage is not None and replica is self.replicas[0]:
            yield self.env.any_of([answered, self.env.timeout(TIMEOUT_S)])
            if answered.triggered:
                break
            # The client's next attempt, at another replica once this one is known to be away.
            replica = self._replica_of(job)
            answered = self._submit(replica, job)
        yield answered
        yield self.env.timeout(self.profile.hop_s)
        self._note(began)

    def _submit(self, replica: _Replica, job: int) -> simpy.Event:
        report = _Report(job, self.env.event())
        replica.submit(report)
        return report.answered

    def _note(self, began: float) -> None:
        if self.env.now >= self.warm_s:
            self.found.latencies.append(self.env.now - began)
            self.found.arrivals.append(began - self.warm_s)

    def _connection(self, job: int) -> Process:
        while True:
            yield from self._load.use(self.profile.load)
            yield from self._report(job)

    def _arrivals(self) -> Process:
        while True:
            yield self.env.timeout(self._arriving.expovariate(self.site.rate))
            self.env.process(self._report(self._arriving.randrange(self.site.jobs)))


def simulate(site: Site, profile: Profile, *, seconds: float = 2.0, seed: int = 1) -> Found:
    """Run a site for some simulated seconds, after a warm-up."""
    return _Run(site, profile, seconds, seed).run()
