"""Processes of a simulated host: servers and event loops that share its cores.

A process that is ready to run waits for a core, first come, first served. It gives the core back after
a time slice if it has more to do. The schedulers of operating systems are more elaborate.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import simpy
from simpy.resources.resource import Request

SLICE_S: Final = 0.003
"""Time for which a process may have a core while others wait for one."""
JITTER: Final = 0.5
"""Uses of a core differ from their mean by up to this share."""

Process = Generator[simpy.Event, Any, None]


@dataclass(frozen=True, slots=True)
class Host:
    """The cores of a machine that everything shares; None: a core for each process."""

    cores: int | None = None
    others: float = 0.0
    """Cores that other programs have."""


OWN_CORES: Final = Host()


@dataclass(frozen=True, slots=True)
class Use:
    """A use of a core."""

    seconds: float
    begin: Callable[[], None]
    """Called at the start."""
    done: simpy.Event


class Machine:
    """A host in a simulation."""

    def __init__(self, host: Host, chance: random.Random) -> None:
        self.env = simpy.Environment()
        self.chance = chance
        self._cores = None if host.cores is None else simpy.Resource(self.env, host.cores)
        if host.others:
            self.env.process(self._others(host.others))

    def while_away(self, process: Server | Loop) -> Process:
        """Wait while a process has failed."""
        del process
        yield from ()

    def note(self, process: Server | Loop, seconds: float) -> None:
        """Note that a process has ended a use of a core, or a turn."""

    def on_core(self, uses: Sequence[Use]) -> Process:
        """Run one use of a process after the other, and wait for a core before each time slice."""
        core, slice_s = yield from self._core()
        for use in uses:
            use.begin()
            left_s = use.seconds
            while left_s > slice_s:
                yield self.env.timeout(slice_s)
                left_s -= slice_s
                self._give_back(core)
                core, slice_s = yield from self._core()
            yield self.env.timeout(left_s)
            slice_s -= left_s
            use.done.succeed()
        self._give_back(core)

    def _core(self) -> Generator[simpy.Event, Any, tuple[Request | None, float]]:
        if self._cores is None:
            return None, math.inf
        core = self._cores.request()
        yield core
        return core, SLICE_S

    def _give_back(self, core: Request | None) -> None:
        if core is not None and self._cores is not None:
            self._cores.release(core)

    def use(self, seconds: float, begin: Callable[[], None] = lambda: None) -> Use:
        """Return a use of a core with about this length."""
        # Equal times would keep batches in the sizes that they began with.
        seconds *= self.chance.uniform(1 - JITTER, 1 + JITTER)
        return Use(seconds, begin, self.env.event())

    def _others(self, cores: float) -> Process:
        """Let other programs have this much of the cores."""
        while True:
            yield self.env.timeout(self.chance.expovariate(cores / SLICE_S))
            self.env.process(self.on_core([self.use(SLICE_S)]))


class Server:
    """A process with a queue: some uses of its core at a time."""

    def __init__(self, machine: Machine, kind: str, capacity: int = 1) -> None:
        self.kind = kind
        self._machine = machine
        self._own = simpy.Resource(machine.env, capacity)

    def use(self, seconds: float) -> Process:
        """Use the core."""
        mine = self._own.request()
        yield mine
        with mine:
            yield from self._machine.while_away(self)
            use = self._machine.use(seconds)
            yield from self._machine.on_core([use])
        self._machine.note(self, use.seconds)


class Loop:
    """A process with an event loop: each turn has a cost, and serves all that waited at its begin."""

    def __init__(self, machine: Machine, kind: str, turn_s: float) -> None:
        self.kind = kind
        self._machine = machine
        self._turn_s = turn_s
        self._ready: list[Use] = []
        self._woken: simpy.Event | None = None
        machine.env.process(self._turns())

    def use(self, seconds: float, begin: Callable[[], None] = lambda: None) -> Process:
        """Use the core in the next turn, and call `begin` at the start of that."""
        use = self._machine.use(seconds, begin)
        self._ready.append(use)
        if self._woken is not None:
            self._woken.succeed()
            self._woken = None
        yield use.done

    def _turns(self) -> Process:
        machine = self._machine
        while True:
            if not self._ready:
                self._woken = machine.env.event()
                yield self._woken
            yield from machine.while_away(self)
            ready, self._ready = self._ready, []
            uses = [machine.use(self._turn_s), *ready]
            yield from machine.on_core(uses)
            machine.note(self, sum(each.seconds for each in uses))
