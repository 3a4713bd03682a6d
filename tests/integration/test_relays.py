"""A tree of two regional services and a parent, relayed by the program of the examples."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from spark_agent.client.client import Client
from spark_agent.client.errors import LeaseConflict, UnknownJob
from spark_agent.client.relay import RegionReset, Relay, shard_of
from spark_agent.client.reports import Lease, RangeReport, Rank
from spark_agent.exceptions import AggregatorError, Unavailable, Wrong
from spark_agent.times import MAX_MS
from tests.support.binaries import wait_until
from tests.support.documents import block
from tests.support.oracle import Oracle
from tests.support.server import ROOT, Service

JOB, STAGE = "scores", "taps"
PARENT_JOB, PARENT_STAGE = "world", "regions"
SHARDS = ("0", "1", "2")
REGIONS = ("west", "east")
NEW_YEAR = 1_767_225_600_000
TTL_MS = 3_000
SEED = 20_260_101
PATIENCE_MS = 60_000


def client(service: Service) -> Client:
    return Client(service.url, patience_ms=PATIENCE_MS, timeout_ms=10_000)


class Region:
    """A regional service, with a worker that reports for all shards of its stage."""

    def __init__(self, name: str, service: Service, oracle: Oracle) -> None:
        self.name = name
        self.service = service
        self.client = client(service)
        self._oracle = oracle
        self.reached: dict[str, int] = dict.fromkeys(SHARDS, NEW_YEAR)
        self.client.declare(JOB, {STAGE: {"shards": list(SHARDS)}})
        self._lease = self._claim()

    def _claim(self) -> Lease:
        rank = Rank(0, 0, 0)
        return self.client.claim(JOB, STAGE, None, holder="worker", ttl_ms=600_000, rank=rank)

    def report(self, shard: str, at_ms: int) -> None:
        """Report a promise, which the oracle gets first."""
        self._oracle.promise(self.name, shard, at_ms)
        self.reached[shard] = max(at_ms, self.reached[shard])
        report = RangeReport(final=True) if at_ms == MAX_MS else RangeReport(at_ms)
        self.client.report(JOB, STAGE, self._lease, {shard: report})

    def lose(self) -> None:
        """Kill the service and start it again: its leases are void."""
        self.service.kill()
        self.service.start()
        self._lease = self._claim()

    @property
    def lowest(self) -> int:
        return min(self.reached.values())


class Program:
    """The program of the examples as a process."""

    def __init__(self, region: Region, parent: Service, folder: Path) -> None:
        self._log = folder / f"relay-{region.name}-{random.random()}.log"
        places = (region.service.url, JOB, STAGE, parent.url, PARENT_JOB, PARENT_STAGE)
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "examples/relay.py", *places, region.name, str(TTL_MS)],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def end(self) -> tuple[int, str]:
        """Wait for its end; return its status and output."""
        return self.process.wait(120), self._log.read_text()


class Reader:
    """Reads the parent's watermark again and again, and has the oracle check each answer."""

    def __init__(self, parent: Client, oracle: Oracle) -> None:
        self._parent = parent
        self._oracle = oracle
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._is_over.is_set():
            floor = self._oracle.ask()
            try:
                seen = self._parent.watermark(PARENT_JOB, PARENT_STAGE)
            except Unavailable:
                continue
            except AggregatorError as error:
                self._oracle.fault(repr(error))
                return
            state = {"input_watermark": seen.input_ms, "output_watermark": seen.output_ms}
            self._oracle.answered("reader", floor, {PARENT_STAGE: state})

    def __enter__(self) -> Reader:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_over.set()
        self._thread.join(120)


class World:
    """Two regions and a parent."""

    def __init__(self, folder: Path, services: list[Service]) -> None:
        self.folder = folder
        self.oracle = Oracle(dict.fromkeys(REGIONS, SHARDS), {PARENT_STAGE: REGIONS})
        self.regions = {
            name: Region(name, service, self.oracle)
            for name, service in zip(REGIONS, services, strict=False)
        }
        self.service = services[2]
        self.parent = client(self.service)
        self.declare()

    def declare(self, *, west: int = 1, replace: bool = False) -> None:
        shards = [shard_of("west", west), shard_of("east", 1)]
        self.parent.declare(PARENT_JOB, {PARENT_STAGE: {"shards": shards}}, replace=replace)

    def relay(self, region: str) -> Relay:
        here = self.regions[region]
        return Relay(
            (here.client, JOB, STAGE),
            (self.parent, PARENT_JOB, PARENT_STAGE),
            name=region,
            ttl_ms=TTL_MS,
        )

    def program(self, region: str) -> Program:
        return Program(self.regions[region], self.service, self.folder)

    @property
    def output_ms(self) -> int | None:
        return self.parent.watermark(PARENT_JOB, PARENT_STAGE).output_ms

    @property
    def lowest(self) -> int:
        return min(region.lowest for region in self.regions.values())

    def wait_until_reached(self) -> None:
        wait_until(lambda: self.output_ms == self.lowest, "the parent reaches the flat minimum")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with ExitStack() as stack:
        services: list[Service] = []
        for name in (*REGIONS, "parent"):
            folder = tmp_path / name
            folder.mkdir()
            services.append(stack.enter_context(Service(folder)))
        yield World(tmp_path, services)


def test_invariants_1_2_4_of_a_tree_with_two_regions(world: World) -> None:
    """Random reports; a region, the parent and relays are killed; two relays at once for a region."""
    chance = random.Random(SEED)
    west, east = world.regions["west"], world.regions["east"]
    programs = [world.program("west"), world.program("west"), world.program("east")]

    def report(count: int) -> None:
        for _ in range(count):
            region = chance.choice((west, east))
            shard = chance.choice(SHARDS)
            region.report(shard, region.reached[shard] + chance.randrange(-500, 1_500))

    with Reader(world.parent, world.oracle):
        for shard in SHARDS[1:]:
            west.report(shard, NEW_YEAR)
        for shard in SHARDS:
            east.report(shard, NEW_YEAR)
        second = world.relay("east")
        wait_until(lambda: _holder(world, "east") is not None, "a relay has the shard of east")
        with pytest.raises(LeaseConflict):
            second.step()
        assert world.output_ms is None, "a shard of west has never promised"
        west.report(SHARDS[0], NEW_YEAR)
        world.wait_until_reached()
        report(100)
        world.wait_until_reached()
        programs.append(world.program("east"))
        programs[2].kill()
        report(50)
        east.lose()
        report(50)
        world.wait_until_reached()
        programs[0].pause()
        report(30)
        world.wait_until_reached()
        programs[1].kill()
        programs[0].resume()
        report(30)
        world.wait_until_reached()
        world.service.kill()
        world.service.start()
        report(30)
        world.wait_until_reached()
        for region in (west, east):
            for shard in SHARDS:
                region.report(shard, MAX_MS)
        world.wait_until_reached()
    assert world.oracle.violations == []
    assert world.oracle.observations["reader"] > 100
    assert world.parent.watermark(PARENT_JOB, PARENT_STAGE).final
    for program, name in ((programs[0], "west"), (programs[3], "east")):
        assert program.end() == (0, f"{name} is final\n")


def _holder(world: World, region: str) -> str | None:
    ranges = world.parent.ranges(PARENT_JOB, PARENT_STAGE, limit=10)["ranges"]
    return next(each["holder"] for each in ranges if each["range"] == shard_of(region, 1))


def test_a_region_that_was_reset_is_not_relayed(world: World) -> None:
    """The way out of the error: reset the parent's job, and declare the shard of the new generation."""
    west, east = world.regions["west"], world.regions["east"]
    for region in (west, east):
        for shard in SHARDS:
            region.report(shard, NEW_YEAR)
    relay, running = world.relay("west"), world.program("west")
    wait_until(lambda: _holder(world, "west") is not None, "the program has the shard")
    world.relay("east").step()
    world.wait_until_reached()
    stale = west.client.watermark(JOB, STAGE)

    west.client.reset(JOB)
    status, output = running.end()
    assert status == 1
    assert output == (
        "region 'west' is in generation 2 of its job, and stage 'regions' of job 'world' has its shard"
        " west.1: the region was reset, so its watermark starts over. Reset job 'world', too, and"
        " declare its stage with shard 'west.2' instead\n"
    )
    with pytest.raises(RegionReset, match=r"west\.2"):
        relay.step()
    assert world.output_ms == stale.output_ms, "the parent is held, and has not gone back"

    world.parent.reset(PARENT_JOB)
    with pytest.raises(RegionReset):
        world.relay("west").step()
    world.declare(west=2, replace=True)
    world.relay("west").step()
    world.relay("east").step()
    assert world.output_ms is None, "the region has promised nothing in its new generation"
    # A relay that has read the old generation, and is late.
    with pytest.raises(LeaseConflict):
        world.parent.claim_and_report(
            PARENT_JOB,
            PARENT_STAGE,
            {shard_of("west", stale.generation): RangeReport(stale.output_ms)},
            holder="late",
            ttl_ms=TTL_MS,
            rank=Rank(0, 0, 0),
        )
    assert world.output_ms is None


def test_a_relay_of_an_idle_region(world: World) -> None:
    """An idle region holds the parent, unless its relay passes idleness on."""
    west, east = world.regions["west"], world.regions["east"]
    for shard in SHARDS:
        west.report(shard, NEW_YEAR)
        east.report(shard, NEW_YEAR + 5_000)
    rank = Rank(0, 0, 1)
    lease = west.client.claim(JOB, STAGE, None, holder="idle", ttl_ms=600_000, rank=rank)
    quiet = RangeReport(NEW_YEAR, idle=True)
    west.client.report(JOB, STAGE, lease, dict.fromkeys(SHARDS, quiet))
    assert world.relay("east").step().output_ms == NEW_YEAR + 5_000
    place, parent = (west.client, JOB, STAGE), (world.parent, PARENT_JOB, PARENT_STAGE)
    holder = "relay-of-west"
    assert Relay(place, parent, name="west", holder=holder).step().status == "idle"
    assert world.output_ms == NEW_YEAR
    passing = Relay(place, parent, name="west", holder=holder, idle=True)
    passing.step()
    assert world.output_ms == NEW_YEAR + 5_000
    west.client.report(JOB, STAGE, lease, dict.fromkeys(SHARDS, RangeReport(NEW_YEAR + 9_000)))
    passing.step()
    east.report(SHARDS[0], NEW_YEAR + 7_000)
    assert world.parent.show(PARENT_JOB, PARENT_STAGE)["ranges"]["idle"] == 0


def test_a_stage_of_the_parent_that_cannot_be_relayed_to(world: World) -> None:
    world.parent.declare("other", {"regions": {"shards": ["west.1"]}})
    west = (world.regions["west"].client, JOB, STAGE)
    wrong = Relay(west, (world.parent, "other", "regions"), name="north")
    with pytest.raises(Wrong, match=r"no shard 'north\.1'"):
        wrong.step()
    world.parent.declare("any", {"regions": {"shards": ["west.1"], "dynamic": True}})
    with pytest.raises(Wrong, match="dynamic"):
        Relay(west, (world.parent, "any", "regions"), name="west").step()
    with pytest.raises(UnknownJob):
        Relay((west[0], "nosuch", STAGE), (world.parent, "any", "regions"), name="west").shard()


def test_the_example_of_its_page_runs(world: World) -> None:
    for region in world.regions.values():
        for shard in SHARDS:
            region.report(shard, NEW_YEAR)
    code = block("python", "relay.step()").replace("http://world:8000", world.service.url)
    for name, region in world.regions.items():
        code = code.replace(f"http://{name}:8000", region.service.url)
    code = code.replace('"world", "regions"', '"of-the-page", "regions"')
    code = code.replace('"scores", "sessions"', f'"{JOB}", "{STAGE}"').replace(
        '"world"', '"of-the-page"'
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{NEW_YEAR}\n"
