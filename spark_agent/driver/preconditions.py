"""Preconditions of a query's start, given the job's specification and watermarks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Final, Protocol

from py4j.protocol import Py4JError

from spark_agent.client.client import StageWatermark
from spark_agent.client.spec import StageSpec, upstream
from spark_agent.driver.job import Commits
from spark_agent.exceptions import (
    CONTINUES,
    FinalSourceError,
    OldCheckpointError,
    final_message,
    old_checkpoint_message,
)
from spark_agent.executor.task import Reaction
from spark_agent.jvm.checkpoint import Beginning
from spark_agent.started_query import StartedQuery
from spark_agent.supervision.diagnostics import (
    forgotten_shards_message,
    generation_message,
    skips_message,
)

_log: Final = logging.getLogger("spark_agent")


class CheckpointNotes(Protocol):
    """A query's checkpoint: `spark_agent.jvm.checkpoint.Checkpoint`."""

    def read(self) -> Beginning:
        """Return what the query will begin with."""
        ...

    def note(self, generation: int, rereads_to: int | None, run: int) -> None:
        """Note of which generation and run it is, and up to which epoch it repeats batches."""
        ...

    def joined(self, generation: int, stage: str) -> Collection[str]:
        """Return the shards that are noted as having joined a dynamic source."""
        ...

    def note_joined(self, generation: int, stage: str, shards: Collection[str]) -> None:
        """Note shards that have joined a dynamic source."""
        ...

    def topic_ids(self, topic: str) -> Collection[str]:
        """Return the noted ids of a source's topic of Kafka: one, or none."""
        ...

    def note_topic_id(self, topic: str, id_: str) -> None:
        """Note the id of a source's topic."""
        ...

    def states(self, stage: str) -> tuple[int, str] | None:
        """Return the newest noted states of a source's strategy, with the epoch they are after."""
        ...

    def note_states(self, stage: str, epoch: int, states: str) -> None:
        """Note the states of a source's strategy after an epoch."""
        ...


class Resumption:
    """With which batch a query begins, and whether that goes with what the job, or its output, has.

    The job's last epoch is that of a batch which Spark had committed before. So from the checkpoint
    that the job has gone by, Spark begins with a later one, wherever the driver was killed. A batch that
    is planned but not committed is one to come: a copy may have planned it anew, with other rows than
    those that the job had in it, which a file sink would skip.

    That compares batches of one generation of the job. With a reset, they begin again, so that a
    checkpoint from before may have more of them than the job has now. Therefore it notes its generation,
    and the query fails as soon as the job is in another one. Its methods are thread-safe.

    Run numbers only rise, so a ledger that has only earlier runs than the query has had was lost, or
    restored from an older backup. Such a ledger lacks the shards that have joined a dynamic source since
    then, and the watermark would pass those that are quiet.
    """

    def __init__(self, query: StartedQuery, checkpoint: CheckpointNotes) -> None:
        """With `on_lost_checkpoint="continue"`, the query goes on even if job and checkpoint differ."""
        self._job = query.job
        self._query = query.name
        self._checkpoint = checkpoint
        self._on_lost_checkpoint: Reaction = query.on_lost_checkpoint
        self._dynamic = query.stages.dynamic
        self._lock = threading.Lock()
        self._generation: int | None = None
        self._rereads_to: int | None = None
        self._run: int | None = None
        """That was opened last; None: none yet."""
        self._opened_generation: int | None = None

    @cached_property
    def beginning(self) -> Beginning:
        """Position at which the query begins. It is read once: the query itself goes on from there."""
        return self._checkpoint.read()

    @property
    def on_lost_checkpoint(self) -> Reaction:
        """The reaction of this start: its option, or "continue" while batches are still repeated."""
        found = self.beginning
        goes_on = found.rereads_to is not None and found.next_batch <= found.rereads_to
        if goes_on:
            return "continue"
        return self._on_lost_checkpoint

    def check_output(self) -> None:
        """Check what can be checked without the service. Raises `OldCheckpointError`."""
        if self.beginning.skips:
            # A query that is to reread must not lose the rows that it reads.
            raise OldCheckpointError(skips_message(self._query, self.beginning))

    def check(self, has: Commits) -> None:
        """Compare it with what the job has, which must have been read before the checkpoint is: while
        another driver goes on, both rise. Raises `OldCheckpointError`.
        """
        found = self.beginning
        self._rereads_to = None
        if found.generation is None or found.generation == has.generation:
            self._rereads_to = self._check_epoch(has.last_epoch)
            self._check_run(has.run)
        else:
            self._refuse(
                generation_message(self._job, self._query, found.generation, has.generation)
            )
        if (other := self.other_generation(has.generation)) is not None:
            raise OldCheckpointError(other)
        self.check_output()

    def opened(self, has: Commits) -> None:
        """Note in the checkpoint what it belongs to, now that a run is open."""
        self._run = has.run or 0
        self._opened_generation = has.generation
        try:
            self._checkpoint.note(has.generation, self._rereads_to, self._run)
        except Py4JError as error:
            self._log_unnoted(error)

    def joined(self, stage: str) -> Collection[str]:
        """Return the shards that are noted for a dynamic source, in the generation of the open run."""
        if self._opened_generation is None:
            return ()
        return self._checkpoint.joined(self._opened_generation, stage)

    def note_joined(self, stage: str, shards: Collection[str]) -> None:
        """Note in the checkpoint that shards have joined a dynamic source."""
        if self._opened_generation is None:
            return
        try:
            self._checkpoint.note_joined(self._opened_generation, stage, shards)
        except Py4JError as error:
            self._log_unnoted(error)

    def topic_ids(self, topic: str) -> Collection[str]:
        """Return the noted ids of a source's topic of Kafka: one, or none."""
        return self._checkpoint.topic_ids(topic)

    def note_topic_id(self, topic: str, id_: str) -> None:
        """Note the id of a source's topic in the checkpoint. Raises `Py4JError`."""
        self._checkpoint.note_topic_id(topic, id_)

    def states(self, stage: str) -> tuple[int, str] | None:
        """Return the noted states of a source's strategy, with the epoch they are after."""
        return self._checkpoint.states(stage)

    def note_states(self, stage: str, epoch: int, states: str) -> None:
        """Note the states of a source's strategy in the checkpoint."""
        try:
            self._checkpoint.note_states(stage, epoch, states)
        except Py4JError:
            _log.warning(
                "query %s: the states of stage %s after batch %d cannot be noted in its checkpoint: if "
                "the driver ends now, its next start goes on from older ones",
                self._query,
                stage,
                epoch,
                exc_info=True,
            )

    def _log_unnoted(self, error: Py4JError) -> None:
        _log.warning(
            "query %s: nothing can be noted in its checkpoint, so its next start will not notice a "
            "reset of the job or a loss of the ledger: %s",
            self._query,
            error,
        )

    def other_generation(self, generation: int) -> str | None:
        """Return why the query has to fail if the job is in this generation; None: it is the query's.

        The query's generation is that of its checkpoint; else the first in an answer of the service.
        """
        with self._lock:
            if self._generation is None:
                continues = self._on_lost_checkpoint == "continue"
                noted = None if continues else self.beginning.generation
                self._generation = generation if noted is None else noted
            its = self._generation
        if its == generation:
            return None
        return generation_message(self._job, self._query, its, generation)

    def _check_epoch(self, last_epoch: int | None) -> int | None:
        """Return up to which epoch the query may repeat batches. Raises `OldCheckpointError`."""
        found = self.beginning
        if last_epoch is None or found.next_batch > last_epoch:
            return found.rereads_to
        does = f"begins with batch {found.next_batch}"
        message = old_checkpoint_message(self._query, does, last_epoch)
        if found.rereads_to is not None and last_epoch <= found.rereads_to:
            _log.warning(
                "%s. It goes on, by on_lost_checkpoint='continue' of an earlier start", message
            )
            return found.rereads_to
        self._refuse(message)
        return last_epoch

    def _check_run(self, run: int | None) -> None:
        found = self.beginning
        its = self._run if self._run is not None else found.run if found.next_batch else None
        if self._dynamic and its is not None and run is not None and run < its:
            self._refuse(forgotten_shards_message(self._query, self._dynamic, its, run))

    def _refuse(self, message: str) -> None:
        if self._on_lost_checkpoint == "stop":
            raise OldCheckpointError(f"{message}. {CONTINUES}")
        _log.warning("%s", message)


Watermarks = Mapping[str, StageWatermark]
"""By stage of the job."""


def check_not_final(query: StartedQuery, watermarks: Watermarks) -> None:
    """Refuse to run a final source again, but let an interrupted bounded run finish.

    A source of logs with a marker may be final by its complete folders. A job that runs every night over
    these finds nothing to read, which is not an error. Unread files of a final source are refused before
    they are read (`BatchWaits.note_complete`). Raises `FinalSourceError`.
    """
    sources = {stage.name for stage in query.stages.sources}
    executed = [each for each in query.stages.names if each in watermarks]
    final = [each for each in executed if each in sources and watermarks[each].final]
    # Sources, too: each is made final by a request of its own.
    unfinished = [each for each in executed if not watermarks[each].final]
    if set(final) <= query.stages.with_marker or (query.bounded and unfinished):
        return
    raise FinalSourceError(final_message(query.job, min(set(final) - query.stages.with_marker)))


def final_by_marker(query: StartedQuery, watermarks: Watermarks) -> list[str]:
    """Return the sources of a query that are final and have a marker: they may be started again."""
    found = sorted(query.stages.with_marker.intersection(watermarks))
    return [each for each in found if watermarks[each].final]


def check_inputs_final(
    query: StartedQuery, stages: Mapping[str, StageSpec], watermarks: Watermarks
) -> None:
    """Refuse a last run that reads what is there now, while the stages above it still go on.

    Raises `ValueError`.
    """
    is_last = query.bounded and query.trigger.is_available_now
    if not is_last or query.stages.sources:
        return
    for stage in query.stages.promises:
        for other in sorted(upstream(stages, stage, query.stages.promises)):
            if other in watermarks and not watermarks[other].final:
                raise ValueError(
                    f"stage {stage!r} would end too early: a bounded availableNow query reads what "
                    f"is there at its start, but its upstream stage {other!r} is not final yet. "
                    f"Start it once the query of {other!r} has ended, leave out bounded=True, or "
                    f"let it wait: trigger(processingTime='0 seconds')"
                )


def caps_ms(
    query: StartedQuery, stages: Mapping[str, StageSpec], watermarks: Watermarks | None
) -> dict[str, int | None]:
    """Cap the input watermarks of an `availableNow` run's stages that read other queries' output.

    Such a run reads what was there at its start. A watermark that another query publishes later
    covers rows that this run will not read. One published before the start does not.
    """
    caps_ms: dict[str, int | None] = {}
    if not query.trigger.is_available_now:
        return caps_ms
    for stage in query.stages.promises:
        others = upstream(stages, stage, query.stages.names)
        if not others:
            continue
        if watermarks is None:
            caps_ms[stage] = None
        elif not query.stages.sources:
            caps_ms[stage] = watermarks[stage].input_ms
        else:
            outputs = [watermarks[other].output_ms for other in others]
            known = [output for output in outputs if output is not None]
            caps_ms[stage] = min(known) if len(known) == len(outputs) else None
    return caps_ms
