"""Replicas on the nodes of a Redis Cluster: processor time per report, by component.

`python -m benchmarks --only scale` measures, saves the points in `benchmarks/scale.json`, and runs the
simulation on them (`benchmarks/plan.py`). `python -m benchmarks.plan` repeats the latter alone.

Six jobs are spread evenly over the replicas and over the nodes. Each job has a load of its own, whose
connections report again as soon as they are answered.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import socket
import statistics
import time
import urllib.request
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import psycopg
from redis.crc import key_slot

from benchmarks.figures import FIRST, Figure, Job, Plan
from benchmarks.load import COLUMN, VALUE, LoadFailedError, Outcome, Target, run
from benchmarks.servers import processor_seconds, service
from tests.support.postgres_server import PostgresServer
from tests.support.redis_server import SLOTS, RedisCluster
from tests.support.server import Service

SAVED: Final = Path(__file__).with_suffix(".json")
JOBS: Final = 6
REPLICAS: Final = (1, 2)
NODES: Final = (1, 3)
RANGES: Final = (1, 1_000)
CONNECTIONS: Final = (1, 4, 16)
"""Connections of each job."""
_STEP: Final = 100_000_000
_MARGIN_S: Final = 0.25
"""Time at both ends of a measurement in which loads start or end."""
_LEAST_S: Final = 2.0
_MOST_TURNS: Final = 3
_QUIET: Final = 0.3
"""Cores of other programs up to which a measurement is not repeated."""
_PINGS: Final = 1_000
_COMMITS: Final = 200
"""Transactions from which the latency of a commit is measured."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The conditions of a measurement."""

    replicas: int
    nodes: int
    ranges: int
    advancing: bool
    """True: each report advances a watermark."""
    connections: int
    """Number of connections of each job."""

    @property
    def name(self) -> str:
        """Its name in the table."""
        movement = "advancing" if self.advancing else "standing"
        return (
            f"{self.replicas} replica{'s' * (self.replicas > 1)}, {self.nodes}"
            f" node{'s' * (self.nodes > 1)}, {self.ranges:,}"
            f" range{'s' * (self.ranges > 1)}, {movement}, {JOBS * self.connections} connections"
        )


@dataclass(frozen=True, slots=True)
class Costs:
    """Processor time of a report, in seconds, in all processes of a kind."""

    replica: float
    redis: float
    postgres: float
    load: float

    @property
    def total(self) -> float:
        """Sum of all."""
        return self.replica + self.redis + self.postgres + self.load


@dataclass(frozen=True, slots=True)
class Point:
    """A measurement."""

    setting: Setting
    rate: float
    """Reports per second."""
    costs: Costs
    publications: float
    """Publications of a job's advances, per report."""
    others: float
    """Cores that other programs of the machine had meanwhile."""


@dataclass(frozen=True, slots=True)
class Measured:
    """All points of a machine."""

    cores: int
    commit_s: float
    """Median latency of a small transaction of Postgres, on its disk."""
    hint_s: float
    """Processor time of a replica for a publication of another replica."""
    hop_s: float
    """Half of the time from a request to the answer of an idle Redis."""
    points: Sequence[Point] = field(default_factory=list[Point])

    @classmethod
    def read(cls, saved: dict[str, Any]) -> Measured:
        """Decode the JSON form."""
        points = [
            Point(Setting(**each["setting"]), each["rate"], Costs(**each["costs"]), *rest)
            for each in saved["points"]
            for rest in [(each["publications"], each["others"])]
        ]
        return cls(saved["cores"], saved["commit_s"], saved["hint_s"], saved["hop_s"], points)


def load() -> Measured:
    """Return the saved points."""
    return Measured.read(json.loads(SAVED.read_text())["measured"])


def save(measured: Measured) -> None:
    """Save the points, in place of earlier ones and of the simulation's results."""
    SAVED.write_text(json.dumps({"measured": asdict(measured)}, indent=1) + "\n")


@dataclass
class Site:
    """Servers of a measurement."""

    cluster: RedisCluster
    postgres: PostgresServer
    replicas: Sequence[Service]

    def used(self) -> tuple[float, float, float, float]:
        """Return the processor time so far: replicas, Redis, Postgres, the ended loads."""
        ours = resource.getrusage(resource.RUSAGE_CHILDREN)
        return (
            sum(processor_seconds(each.pid) for each in self.replicas),
            sum(processor_seconds(node.pid) for node in self.cluster.nodes),
            processor_seconds(self.postgres.pid, family=True),
            ours.ru_utime + ours.ru_stime,
        )

    def publications(self) -> float:
        """Return the number of publications so far."""
        return sum(_sample(each.url, "tidegauge_publish_seconds_count") for each in self.replicas)

    def targets(self, setting: Setting, prefix: str = "") -> list[Target]:
        """Declare the jobs; return the reports for each."""
        found: list[Target] = []
        for number in range(JOBS):
            server = self.replicas[number % len(self.replicas)]
            base = f"job{prefix}-{setting.ranges}-{'a' if setting.advancing else 's'}-{number}"
            found.append(_reports(server, _on_node(base, number % setting.nodes, setting), setting))
        return found


def _on_node(base: str, node: int, setting: Setting) -> str:
    """Return a job's name whose keys are on this node."""
    size = -(-SLOTS // setting.nodes)
    names = (f"{base}-{number}" for number in itertools.count())
    return next(name for name in names if key_slot(name.encode()) // size == node)


def _reports(server: Service, name: str, setting: Setting) -> Target:
    shards = [f"shard-{i:04d}" for i in range(setting.ranges)]
    is_packed = setting.ranges > 1
    # A shard that stays behind keeps the watermark where it is; in columns, the first one does.
    still = [] if setting.advancing or is_packed else ["slow"]
    job = Job(server, name, {"s": {"shards": [*shards, *still]}})
    token = job.claim("s")
    if still:
        job.report("s", token, {"slow": 1})
    job.close()
    ranges = f'"ranges":{{"{shards[0]}":{VALUE}}}'
    columns = f'"columns":{{"watermark":"{COLUMN}"}}'
    return Target(
        job.reports("s"),
        "POST",
        f'{{"token":"{token}",{columns if is_packed else ranges}}}',
        rows=setting.ranges if is_packed else 0,
        standing=not setting.advancing,
    )


def _sample(url: str, name: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    lines = [line for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def _busy_s() -> float:
    """Return the processor time of the whole machine so far, without idle time."""
    words = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    user, nice, system, _, _, irq, soft, steal = map(int, words)
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")


def _measure(site: Site, setting: Setting, targets: list[Target], seconds: float) -> Point:
    def go(target: Target) -> Outcome:
        return run(target, seconds, connections=setting.connections)

    before, published = site.used(), site.publications()
    with ThreadPoolExecutor(len(targets)) as pool:
        running = [pool.submit(go, each) for each in targets]
        # The loads take a moment to start.
        time.sleep(_MARGIN_S)
        first = _Usage.of(site)
        time.sleep(seconds - 2 * _MARGIN_S)
        last = _Usage.of(site)
        outcomes = [each.result() for each in running]
    requests = sum(each.requests for each in outcomes)
    rate = requests / statistics.mean(each.seconds for each in outcomes)
    used = [after - was for was, after in zip(before, site.used(), strict=True)]
    costs = Costs(*(each / requests for each in used))
    published = site.publications() - published
    others = last.others_since(first) - rate * costs.load
    return Point(setting, rate, costs, published / requests, max(0.0, others))


def _quietest(site: Site, setting: Setting, targets: list[Target], seconds: float) -> Point:
    """Measure until other programs have little; return the measurement with the least."""
    found: list[Point] = []
    for turn in range(_MOST_TURNS):
        moved = [replace(each, first=each.first + turn * _STEP // _MOST_TURNS) for each in targets]
        try:
            found.append(_measure(site, setting, moved, seconds))
        except LoadFailedError:
            # On a busy machine a store may not answer in time.
            if turn == _MOST_TURNS - 1 and not found:
                raise
            continue
        if found[-1].others < _QUIET:
            break
    return min(found, key=lambda point: point.others)


@dataclass(frozen=True, slots=True)
class _Usage:
    """Processor time (s) of the whole machine, and of the servers, until an instant."""

    at: float
    machine: float
    servers: float

    @classmethod
    def of(cls, site: Site) -> _Usage:
        return cls(time.perf_counter(), _busy_s(), sum(site.used()[:3]))

    def others_since(self, first: _Usage) -> float:
        """Return the cores that anything but the servers has had since `first`."""
        used = (self.machine - first.machine) - (self.servers - first.servers)
        return used / (self.at - first.at)


def _commit_s(url: str) -> float:
    """Return the median latency of a small transaction, without the processor time of the client."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE TABLE latency (n int)")
        found: list[float] = []
        for number in range(_COMMITS):
            began = time.perf_counter()
            connection.execute("INSERT INTO latency VALUES (%s)", [number])
            found.append(time.perf_counter() - began)
    return statistics.median(found)


@contextmanager
def _site(folder: Path, replicas: int, nodes: int) -> Generator[Site]:
    folder.mkdir()
    everysec = {"appendfsync": "everysec"}
    with ExitStack() as stack:
        cluster = stack.enter_context(RedisCluster(folder / "redis", nodes, extra=everysec))
        postgres = stack.enter_context(PostgresServer(folder / "postgres", durable=True))
        ledger = postgres.database()
        servers = [
            stack.enter_context(service(folder / f"r{n}", live_url=cluster.url, ledger_url=ledger))
            for n in range(replicas)
        ]
        yield Site(cluster, postgres, servers)


def _hint_s(site: Site, seconds: float, first: int) -> float:
    """Return the processor time of a replica for each publication of another one."""
    setting = Setting(2, 1, 1, True, 1)
    busy, quiet = site.replicas
    published = site.publications()
    rest = _rest(quiet.pid, seconds)
    targets = [
        replace(each, first=first, url=each.url.replace(quiet.url, busy.url))
        for each in site.targets(setting, "hints")
    ]
    used, began = processor_seconds(quiet.pid), time.perf_counter()

    def go(target: Target) -> Outcome:
        return run(target, seconds, connections=1)

    with ThreadPoolExecutor(len(targets)) as pool:
        list(pool.map(go, targets))
    used = processor_seconds(quiet.pid) - used - rest * (time.perf_counter() - began)
    return max(0.0, used / (site.publications() - published))


def _rest(pid: int, seconds: float) -> float:
    """Return the share of a core that a process uses while nobody sends a request."""
    before, began = processor_seconds(pid), time.perf_counter()
    time.sleep(seconds)
    return (processor_seconds(pid) - before) / (time.perf_counter() - began)


def _hop_s(port: int) -> float:
    """Return half of the median time from a PING to its answer."""
    found: list[float] = []
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(_PINGS):
            began = time.perf_counter()
            connection.sendall(b"PING\r\n")
            connection.recv(64)
            found.append(time.perf_counter() - began)
    return statistics.median(found) / 2


def constants(plan: Plan, folder: Path) -> tuple[float, float, float]:
    """Return the latency of a commit, the cost of a hint, and the time of a hop."""
    with _site(folder / "constants", 2, 1) as site:
        plain = site.postgres.database().replace("+psycopg", "")
        hop_s = _hop_s(site.cluster.nodes[0].port)
        return _commit_s(plain), _hint_s(site, plan.seconds, FIRST), hop_s


def points(plan: Plan, folder: Path) -> Iterator[Point]:
    """Yield each point."""
    firsts = itertools.count(FIRST + _STEP, _STEP)
    for nodes in NODES:
        for replicas in REPLICAS:
            with _site(folder / f"{nodes}-{replicas}", replicas, nodes) as site:
                for ranges, advancing in itertools.product(RANGES, (False, True)):
                    first = Setting(replicas, nodes, ranges, advancing, CONNECTIONS[-1])
                    targets = site.targets(first)
                    for connections in CONNECTIONS:
                        setting = replace(first, connections=connections)
                        moved = [replace(each, first=next(firsts)) for each in targets]
                        if connections == CONNECTIONS[0]:
                            _measure(site, setting, moved, 1)
                            moved = [replace(each, first=next(firsts)) for each in targets]
                        yield _quietest(site, setting, moved, max(plan.seconds, _LEAST_S))


def figures(plan: Plan, folder: Path) -> Iterator[Figure]:
    """Measure and save; yield the points, and the errors of the simulation at them."""
    from benchmarks import plan as planned  # noqa: PLC0415  (it reads the types of this module)

    found: list[Point] = []
    commit_s, hint_s, hop_s = constants(plan, folder)
    yield Figure("a commit of Postgres", 1e3 * commit_s, "ms", None, False, "median")
    yield Figure("a hop", 1e6 * hop_s, "µs", None, False, "half of a PING, median")
    detail = "of a replica, for each publication of another one"
    yield Figure("a hint", 1e6 * hint_s, "µs of processor", None, False, detail)
    for each in points(plan, folder):
        found.append(each)
        costs = each.costs
        detail = (
            f"processor time: replica {costs.replica * 1e6:.0f} µs, Redis {costs.redis * 1e6:.0f},"
            f" Postgres {costs.postgres * 1e6:.0f}, load {costs.load * 1e6:.0f};"
            f" {each.publications:.2f} publications; others had {each.others:.2f} cores"
        )
        yield Figure(each.setting.name, each.rate, "reports/s", None, True, detail)
    save(Measured(os.cpu_count() or 1, commit_s, hint_s, hop_s, found))
    yield from planned.figures()
