"""A job as this driver has declared it: its stages, and the runs that are opened for them."""

from __future__ import annotations

import logging
import os
import re
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

from spark_agent.client.client import Client, StageWatermark
from spark_agent.client.errors import (
    DeclaredOtherwise,
    NotAllowed,
    NoUsableKey,
    Refused,
    StaleRun,
    UnknownJob,
    UnknownStage,
)
from spark_agent.client.spec import StageSpec, check_name, read_spec
from spark_agent.exceptions import AggregatorError, OldCheckpointError, Unavailable

_log: Final = logging.getLogger("spark_agent")


@dataclass(frozen=True, slots=True)
class Commits:
    """Commits that the job has of a query's stages."""

    generation: int
    """The generation that the job is in."""
    last_epoch: int | None
    """The last epoch of any of the stages, if any; None also from a service that is too old for it."""
    run: int | None = None
    """The newest run of the stages; None from a service that is too old for it."""


Check = Callable[[Commits], None]
"""Compares what the job has with a query's checkpoint, and raises if they do not belong together."""

Opened = Callable[[Commits], None]
"""Takes the commits of the job once a run is open."""


class DeclaredJob:
    """A job's specification, and the service that keeps it."""

    def __init__(
        self,
        name: str,
        spec: Mapping[str, Mapping[str, Any]],
        *,
        client: Client,
        throttle: Mapping[str, Any] | None,
        replace: bool,
        program: str | None = None,
        links: Mapping[str, str] | None = None,
    ) -> None:
        """Read the specification. Raises `ValueError`.

        `program` is its name, and `links` are addresses where more is shown of it: sent with each run.
        """
        check_name("job", name)
        self.name = name
        self._client = client
        self.stages = read_spec(spec)
        self._spec = {stage: dict(members) for stage, members in spec.items()}
        self._throttle = None if throttle is None else dict(throttle)
        self._replace = replace
        self._program = program
        self._links = dict(links or {})
        self._generation = 0
        self.is_throttled = throttle is not None
        """True if the specification lets the service throttle the job's sources."""

    @property
    def throttle(self) -> Mapping[str, Any]:
        """Its `throttle`, as it was passed."""
        return self._throttle or {}

    def stage(self, name: str, role: str) -> StageSpec:
        """Return a stage that has this role. Raises `ValueError`."""
        spec = self.stages.get(name)
        if spec is None:
            raise ValueError(
                f"stage {name!r} is not in the specification of job {self.name!r}; it has "
                f"{', '.join(sorted(self.stages))}"
            )
        if spec.role != role:
            raise ValueError(f"stage {name!r} is a {spec.role} in the specification, not a {role}")
        return spec

    def declare(self) -> None:
        """Declare it, unless the service is unavailable: each run that is opened tries again."""
        try:
            self._declare_now()
        except Unavailable as error:
            _log.warning("job %s is not declared yet: %s", self.name, error)

    def _declare_now(self) -> None:
        stored = self._client.declare(
            self.name, self._spec, throttle=self._throttle, replace=self._replace
        )
        self.is_throttled = bool(stored.get("throttle"))
        self._generation = int(stored["generation"])

    def try_open_run(
        self, stages: Sequence[str], holder: str, check: Check, opened: Opened
    ) -> int | None:
        """Open a run; None if the service does not answer, in which case the query starts anyway.

        Its tasks then report nothing. Its supervisor keeps trying to open a run, and then reports for
        them.
        """
        try:
            return self.open_run(stages, holder, check, opened)
        except Unavailable as error:
            _log.warning("starting %s without a run: %s", ", ".join(stages), error)
            return None

    def open_run(self, stages: Sequence[str], holder: str, check: Check, opened: Opened) -> int:
        """Declare the job and open a run for stages, unless `check` raises.

        `check` is called before the run is opened: a refused query must not fence another. And again if
        the job has been reset since then, because the run would be of the new generation. Raises
        `AggregatorError`.
        """
        self._declare_now()
        found = self._commits(stages)
        check(found)
        run = self._open(stages, holder)
        # A reset from now on voids the run.
        generation = self._client.generation(self.name)
        if generation != found.generation:
            check(Commits(generation, None))
        opened(Commits(generation, found.last_epoch, run))
        return run

    def newer_own_run(
        self,
        run: int,
        error: StaleRun,
        *,
        stages: Sequence[str],
        holder: str,
        other_generation: Callable[[int], str | None],
    ) -> int:
        """Return the newer run of an error if each run since `run` is this holder's; else raise `error`.

        A request to open a run that was given up goes on in the service, and may be overtaken by its
        repetition: its run is then the newer one. A holder is one start of a query, so such a run is by
        no other driver. And a driver that had a stage in between would have read what this query has
        not, so each run in between counts. Not a run is opened: another driver's stays as it is.

        Raises `StaleRun`, `AggregatorError`, and `OldCheckpointError` if the run may be of a generation
        that is not the query's, by `other_generation`.
        """
        newer: int | None = error.problem.get("run")
        if newer is None or newer <= run or error.problem.get("holder", holder) != holder:
            raise error
        for stage in stages:
            holders = self._holders(stage, error)
            since = [its for number, its in holders.items() if number >= run]
            if not {run, newer} <= holders.keys() or set(since) != {holder}:
                raise error
        # After the runs: a reset from now on voids them.
        if (message := other_generation(self._client.generation(self.name))) is not None:
            raise OldCheckpointError(message)
        return newer

    def _holders(self, stage: str, error: StaleRun) -> Mapping[int, str]:
        """Return the holders of a stage's newest runs, by run; raise `error` if they are not shown."""
        try:
            found = self._client.runs(self.name, stage=stage)
        except UnknownJob:
            raise
        except Refused:
            raise error from None
        return {each["run"]: each["holder"] for each in found["runs"]}

    def _open(self, stages: Sequence[str], holder: str) -> int:
        try:
            return self._client.open_run(
                self.name, stages, holder, program=self._program, links=self._links
            )
        except Refused as error:
            if error.status != HTTPStatus.UNPROCESSABLE_ENTITY:
                raise
            # A service that is older than this agent takes neither.
            return self._client.open_run(self.name, stages, holder)

    def _commits(self, stages: Sequence[str]) -> Commits:
        try:
            found = [self._client.commits(self.name, stage) for stage in stages]
        except (UnknownJob, UnknownStage):
            raise
        except Refused as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise
            _log.warning(
                "job %s: the service is older than this agent, and does not report its batches. "
                "So an old copy of a checkpoint is noticed only when a batch runs that the job has",
                self.name,
            )
            return Commits(self._generation, None)
        epochs = [each["epoch"] for each in found if each["epoch"] is not None]
        newest_run = max(each["run"] or 0 for each in found)
        return Commits(found[-1]["generation"], max(epochs, default=None), newest_run)

    def fetch_watermarks(self) -> Mapping[str, StageWatermark] | None:
        """Fetch all watermarks, before the query's sources fix what they will read.

        None while the service is away. Declares the job if the service lacks some of its stages.
        Raises `DeclaredOtherwise`, `NotAllowed`.
        """
        try:
            return self._declared_watermarks()
        except (DeclaredOtherwise, NotAllowed, NoUsableKey):
            raise
        except AggregatorError as error:
            _log.warning("job %s: its watermarks cannot be read yet: %s", self.name, error)
            return None

    def _declared_watermarks(self) -> Mapping[str, StageWatermark]:
        with suppress(UnknownJob):
            found = self._client.watermarks(self.name)
            if self.stages.keys() <= found.keys():
                return found
        self._declare_now()
        return self._client.watermarks(self.name)


def new_holder() -> str:
    """Return a name for one start of a query, as the holder of its runs. Not another start has it.

    >>> new_holder() == new_holder()
    False
    """
    return f"driver-{host()}-{os.getpid()}-{secrets.token_hex(4)}"


def host() -> str:
    """Return this machine's name, as a part of a holder's name."""
    return re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:40].strip("-") or "driver"
