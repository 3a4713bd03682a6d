"""Runs a workload, injects faults, and checks the recorded history."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.chaos.changes import check_changes, new_history
from tests.chaos.checker import RESUME_S, Violation, check
from tests.chaos.cluster import Cluster
from tests.chaos.faults import Fault, Scene
from tests.chaos.history import History, Mark
from tests.chaos.workload import Workload

PATIENCE_S = RESUME_S + 2
"""Longer than progress may take, so that the checker notices if it took too long."""


@dataclass(frozen=True, slots=True)
class Struck:
    """A fault, or several at once, and how soon afterwards everything advanced again."""

    fault: str
    lasted_s: float
    resumed_s: float | None


@dataclass
class Outcome:
    """The outcome of a workload."""

    job: str
    history: History
    changes: History = field(default_factory=new_history)
    """History of the job beside it, which is changed all the time."""
    struck: list[Struck] = field(default_factory=list[Struck])
    violations: list[Violation] = field(default_factory=list[Violation])


Say = Callable[[Struck], None]


class Run:
    """One workload on its own job, and the faults injected under it."""

    def __init__(
        self, cluster: Cluster, job: str, *, seed: int, hold_s: float, say: Say = lambda _: None
    ) -> None:
        fronts = {replica.name: replica.front_url for replica in cluster.replicas}
        self._workload = Workload(fronts, job, seed)
        self._chance = random.Random(seed)
        self._scene = Scene(cluster, self._workload, self._chance, hold_s)
        self._say = say
        self.outcome = Outcome(job, self._workload.history, self._workload.changes)

    @contextmanager
    def working(self) -> Generator[None]:
        """Run the workload around the block, and have its history checked in the end."""
        self._scene.cluster.history = self._workload.history
        try:
            with self._workload:
                yield
        finally:
            self._scene.cluster.history = None
            self.outcome.violations = [
                *check(self._workload.history),
                *check_changes(self._workload.changes),
            ]

    def strike(self, *faults: Fault) -> None:
        """Inject faults, all at once, and wait until every watermark advances again."""
        began = time.monotonic()
        errors: list[BaseException] = []
        threads = [
            threading.Thread(target=self._inject, args=(fault, errors), name=fault.name)
            for fault in faults
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        ended = time.monotonic()
        before = self._workload.shown()
        resumed = self._workload.wait(lambda: self._workload.moved(before), PATIENCE_S)
        took_s = time.monotonic() - ended if resumed else None
        name = " + ".join(fault.name for fault in faults)
        struck = Struck(name, ended - began, took_s)
        self.outcome.struck.append(struck)
        self._say(struck)

    def _inject(self, fault: Fault, errors: list[BaseException]) -> None:
        begin_ns = time.monotonic_ns()
        try:
            fault.inject(self._scene)
        except BaseException as error:  # noqa: BLE001 - raised again by `strike`
            errors.append(error)
        mark = Mark("fault", fault.name, begin_ns, time.monotonic_ns())
        self._workload.history.add(mark)

    def mix(self, faults: Sequence[Fault], seconds: float) -> None:
        """Inject random faults, often two at once."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            first = self._chance.choice(faults)
            others = [fault for fault in faults if not fault.touches & first.touches]
            both = bool(others) and self._chance.random() < 0.5
            self.strike(first, *([self._chance.choice(others)] if both else []))


def strike_each(
    cluster: Cluster, job: str, faults: Iterable[Fault], *, seed: int, hold_s: float,
    say: Say = lambda _: None,
) -> Outcome:  # fmt: skip
    """One workload, and these faults one after the other."""
    run = Run(cluster, job, seed=seed, hold_s=hold_s, say=say)
    with run.working():
        for fault in faults:
            run.strike(fault)
    return run.outcome


def strike_mixed(
    cluster: Cluster, job: str, faults: Sequence[Fault], seconds: float, *, seed: int,
    hold_s: float, say: Say = lambda _: None,
) -> Outcome:  # fmt: skip
    """One workload, and these faults in any order and together."""
    run = Run(cluster, job, seed=seed, hold_s=hold_s, say=say)
    with run.working():
        run.mix(faults, seconds)
    return run.outcome
