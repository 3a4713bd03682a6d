"""A Spark cluster of processes that can be killed: a driver, and executors that it has started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from spark_agent.demo.session import link_spark_home
from tests.spark.cluster.data import COLUMNS, Lines, Row, Shape, answer, files, land, parse
from tests.spark.cluster.driver import JOB, STAGE, Order
from tests.spark.flow import until
from tests.spark.matrix.observer import Observer, Output
from tests.support.server import ROOT, Service

_EXECUTOR: Final = "CoarseGrainedExecutorBackend"
RUN_S: Final = 1_500


class Drivers:
    """Drivers of one query in a folder, one after the other, each with executors of its own."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        """`arguments` are those of Python: a module and its own."""
        self.folder = folder
        self._arguments = arguments
        # The workers of a local cluster write into Spark's home, too.
        self._home = link_spark_home(folder / "spark-home")
        self._drivers: list[subprocess.Popen[bytes]] = []

    @property
    def driver(self) -> subprocess.Popen[bytes]:
        """The newest."""
        return self._drivers[-1]

    def start(self) -> None:
        """Start a driver; its processes are a session of their own, by which they are found."""
        environment = os.environ | {
            "SPARK_HOME": str(self._home),
            "PYSPARK_PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT),
            "SPARK_LOCAL_IP": "127.0.0.1",
        }
        with (self.folder / f"driver-{len(self._drivers)}.log").open("wb") as log:
            self._drivers.append(
                subprocess.Popen(
                    [sys.executable, "-m", *self._arguments],
                    cwd=self.folder,
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def executors(self) -> list[int]:
        """The newest driver's executors, the oldest first."""
        return [each.pid for each in _processes(self.driver.pid) if each.is_executor]

    def kill_driver(self) -> list[int]:
        """Stop what its executors do, then kill it; return the executors and their workers that are
        still there.
        """
        processes = _processes(self.driver.pid)
        crew = {each.pid for each in processes if each.is_executor}
        while more := {each.pid for each in processes if each.parent in crew} - crew:
            crew |= more
        for pid in crew:
            end(pid, signal.SIGSTOP)
        for each in processes:
            if each.pid not in crew:
                end(each.pid)
        self.driver.wait(60)
        # A worker that had ended before the signal came has left; none can leave after it.
        return [each.pid for each in _processes(self.driver.pid) if each.pid in crew]

    def planned(self) -> int:
        """Return the number of batches planned so far."""
        return batches(self.folder / "checkpoint" / "offsets")

    def committed(self) -> int:
        """Return the number of batches done so far."""
        return batches(self.folder / "checkpoint" / "commits")

    def runs(self) -> bool:
        """Return whether the newest driver still runs. Raises AssertionError if it has failed."""
        status = self.driver.poll()
        assert status in {None, 0}, f"the driver ended with {status}\n{self.log()}"
        return status is None

    def log(self) -> str:
        """The end of what the newest driver has said."""
        path = self.folder / f"driver-{len(self._drivers) - 1}.log"
        return path.read_text(errors="replace")[-6_000:]

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for driver in self._drivers:
            for each in _processes(driver.pid):
                end(each.pid)
            driver.communicate(timeout=60)


class Cluster(Drivers):
    """A query over files on a cluster; an observer compares what comes out with the watermark."""

    def __init__(
        self, service: Service, folder: Path, shape: Shape, count: int, *, speculation: bool = False
    ) -> None:
        order = Order(shape, service.url, str(folder), speculation)
        super().__init__(folder, "tests.spark.cluster.driver", order.dump())
        self.shape = shape
        self.inputs: Mapping[str, list[list[Row]]] = {
            name: files(name, count) for name in shape.inputs
        }
        for name, rows in self.inputs.items():
            land(folder / name, rows)
        self.output = Output(folder / "output", COLUMNS[shape][1])
        self.output.folder.mkdir()
        self.observer = Observer(service.url, JOB, {STAGE: self.output})

    def written(self) -> int:
        """Return the number of files that tasks have written so far, committed or not."""
        return sum(1 for _ in self.output.folder.glob("part-*"))

    def finish(self) -> None:
        """Wait until the query has ended by itself, and compare with the batch answer."""
        until(lambda: not self.runs(), f"the query ends\n{self.log()}", RUN_S)
        whole = {name: [r for file in rows for r in file] for name, rows in self.inputs.items()}
        expected, found = answer(self.shape, whole), self.lines()
        assert not expected - found, f"missing: {sorted(map(str, expected - found))[:10]}"
        assert not found - expected, f"too much: {sorted(map(str, found - expected))[:10]}"
        self.observer.check()
        assert self.observer.judged[STAGE], "the observer has judged rows"

    def lines(self) -> Lines:
        """Return the lines of the sink."""
        return parse(self.shape, self.output.lines())

    def counts(self) -> Counter[str]:
        """Return the counts of the newest driver."""
        return Counter(json.loads((self.folder / "counts.json").read_text()))

    def __enter__(self) -> Self:
        super().__enter__()
        self.observer.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.observer.__exit__(kind, error, traceback)
        super().__exit__(kind, error, traceback)


@dataclass(frozen=True, order=True)
class _Process:
    pid: int
    parent: int
    is_executor: bool


def _processes(session: int) -> list[_Process]:
    """The processes of a session, in the order of their ids: also those whose parent is gone."""
    found: list[_Process] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, _, its_session, *_ = stat.read_text().rpartition(")")[2].split()
            line = (stat.parent / "cmdline").read_text()
        except OSError:
            continue
        if int(its_session) == session and state != "Z":
            found.append(_Process(int(stat.parent.name), int(parent), _EXECUTOR in line))
    return sorted(found)


def alive(pid: int) -> bool:
    """Return whether a process is there, and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def end(pid: int, how: signal.Signals = signal.SIGKILL) -> bool:
    """Send a signal to a process; say whether it was still there."""
    try:
        os.kill(pid, how)
    except ProcessLookupError:
        return False
    return True


def batches(folder: Path) -> int:
    """Return the number of batches in a log of a checkpoint."""
    found = [int(path.name) for path in folder.glob("[0-9]*") if path.name.isdecimal()]
    return max(found, default=-1) + 1
