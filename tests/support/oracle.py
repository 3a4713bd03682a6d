"""Checks whether any reader was ever shown more than was promised, or less than before.

The load generator records a promise with the oracle *before* it sends it, so at every instant the
oracle's minimum is at least what a correct service may show. A reader records when it asks and what it
was answered. An answer must not be below what any reader had been shown before the request.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

Floor = dict[tuple[str, str], int]
MEMBERS = ("input_watermark", "output_watermark")


class Oracle:
    """Safe to use from any thread."""

    def __init__(self, ranges: Mapping[str, Iterable[str]], inputs: Mapping[str, Iterable[str]]):
        self._lock = threading.Lock()
        self._ranges = {stage: tuple(names) for stage, names in ranges.items()}
        self._inputs = {stage: tuple(names) for stage, names in inputs.items()}
        self._promises: dict[tuple[str, str], int] = {}
        self._floor: Floor = {}
        self._own: dict[str, Floor] = {}
        self.violations: list[str] = []
        self.observations: dict[str, int] = {}

    def promise(self, stage: str, name: str, value: int) -> None:
        """Record a promise that is about to be sent."""
        with self._lock:
            key = (stage, name)
            self._promises[key] = max(value, self._promises.get(key, value))

    def bound(self, stage: str) -> int | None:
        """The most that the stage's output may show now."""
        with self._lock:
            return self._bound(stage)

    def _bound(self, stage: str) -> int | None:
        if stage not in self._ranges:
            return self._input_bound(stage)
        promised = [self._promises.get((stage, name)) for name in self._ranges[stage]]
        return None if None in promised else min(p for p in promised if p is not None)

    def _input_bound(self, stage: str) -> int | None:
        bounds = [self._bound(upstream) for upstream in self._inputs.get(stage, ())]
        return None if not bounds or None in bounds else min(b for b in bounds if b is not None)

    def ask(self) -> Floor:
        """A reader is about to ask. Pass the result to `answered`."""
        with self._lock:
            return dict(self._floor)

    def shown(self, stage: str) -> int | None:
        """The largest output of the stage that any reader has been shown."""
        with self._lock:
            return self._floor.get((stage, "output_watermark"))

    def answered(
        self,
        reader: str,
        floor: Floor,
        states: Mapping[str, Mapping[str, Any]],
        *,
        snapshot: bool = False,
    ) -> None:
        """A reader was shown these stages."""
        with self._lock:
            self.observations[reader] = self.observations.get(reader, 0) + 1
            for stage, state in states.items():
                for member in MEMBERS:
                    self._check(reader, floor, stage, member, state[member])
            if snapshot:
                self._check_snapshot(reader, states)

    def _check(self, reader: str, floor: Floor, stage: str, member: str, value: int | None) -> None:
        key = (stage, member)
        own = self._own.setdefault(reader, {})
        least = max((f[key] for f in (own, floor) if key in f), default=None)
        if value is None:
            if least is not None:
                self._violation(f"{reader}: {member} of {stage} went from {least} to null")
            return
        if least is not None and value < least:
            self._violation(f"{reader}: {member} of {stage} went from {least} to {value}")
        bound = self._bound(stage) if member == "output_watermark" else self._input_bound(stage)
        if bound is None or value > bound:
            self._violation(f"{reader}: {member} of {stage} is {value}, ahead of {bound}")
        own[key] = max(value, own.get(key, value))
        self._floor[key] = max(value, self._floor.get(key, value))

    def _check_snapshot(self, reader: str, states: Mapping[str, Mapping[str, Any]]) -> None:
        for stage, upstreams in self._inputs.items():
            mine = states[stage]["input_watermark"]
            for upstream in upstreams:
                theirs = states[upstream]["output_watermark"]
                if mine is not None and (theirs is None or mine > theirs):
                    self._violation(
                        f"{reader}: {stage} has input {mine}, {upstream} has output {theirs}"
                    )

    def _violation(self, text: str) -> None:
        self.violations.append(text)

    def fault(self, text: str) -> None:
        """Record another violation that was observed."""
        with self._lock:
            self._violation(text)
