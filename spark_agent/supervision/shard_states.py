"""States of a query's strategies, by shard, in the driver and beside the query's checkpoint."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

from spark_agent.exceptions import StrategyError
from spark_agent.executor.tally import Tallies, pop_rows
from spark_agent.jvm.progress import CommittedBatch
from spark_agent.started_query import StartedQuery
from spark_agent.strategies import Rows, StatefulStrategy
from spark_agent.strategies.resolved import checked_ms, shown
from spark_agent.supervision.learned_bounds import LearnedBounds

_log: Final = logging.getLogger("spark_agent")


_LOST: Final = (
    "The batch is committed and its rows are written, but they are missing in the states. Mend the "
    "strategy, and start the query again"
)


class StateNotes(Protocol):
    """Notes in the query's checkpoint: `spark_agent.driver.preconditions.Resumption`."""

    def states(self, stage: str) -> tuple[int, str] | None:
        """Return the newest noted states of a source's shards, as text, and the epoch they are after;
        None: not one is noted.
        """
        ...

    def note_states(self, stage: str, epoch: int, states: str) -> None:
        """Note the states after an epoch."""
        ...


@dataclass(slots=True)
class _Source:
    """A source with a strategy that has state."""

    strategy: StatefulStrategy
    epoch: int = -1
    """The latest batch that the states include."""
    states: dict[str, Any] = field(default_factory=dict[str, Any])
    promised: dict[str, int] = field(default_factory=dict[str, int])
    """The latest promises."""


class ShardStates:
    """Updates the state of each shard, batch by batch, and derives the promises.

    A batch is counted after Spark has committed it, from what its tasks have sent, and once: the states
    are noted together with the batch's number. A driver that is killed right after Spark's commit loses
    what the tasks of this one batch have sent, since Spark does not repeat the batch. Its rows are
    missing in the state then, as if the shard had been quiet.
    """

    def __init__(self, query: StartedQuery, notes: StateNotes, tallies: Tallies) -> None:
        self._query = query.name
        self._notes = notes
        self._tallies = tallies
        self.bounds = LearnedBounds(query)
        self._to_load = dict(query.stateful)
        self._sources: dict[str, _Source] = {}

    def promised(self, stage: str) -> Mapping[str, int]:
        """Return the latest promises of a source's shards; empty for any other strategy."""
        return self._sources[stage].promised if stage in self._sources else {}

    def update(self, batch: CommittedBatch) -> dict[str, dict[str, int]]:
        """Count a committed batch; return the promises that follow, by source and shard.

        Raises `StrategyError`.
        """
        for stage in list(self._to_load):
            self._sources[stage] = self._load(stage, self._to_load[stage])
            del self._to_load[stage]
        return {
            stage: self._update(stage, source, batch) for stage, source in self._sources.items()
        }

    def _update(self, stage: str, source: _Source, batch: CommittedBatch) -> dict[str, int]:
        popped = pop_rows(self._tallies, self._query, stage, batch.epoch)
        batches = [rows for epoch, rows in popped if epoch > source.epoch]
        # After a start, also those of the noted states: the driver before may not have reported them.
        changed = set(source.states).difference(source.promised)
        for rows_of in batches:
            for shard, rows in rows_of.items():
                dated = replace(rows, read_at_ms=batch.triggered_ms)
                source.states[shard] = _updated(stage, source, shard, dated)
                changed.add(shard)
        if batches:
            source.epoch = batch.epoch
            self._notes.note_states(stage, batch.epoch, _to_text(stage, source))
        found = {shard: _promise(stage, source, shard) for shard in sorted(changed)}
        promises = {shard: promise for shard, promise in found.items() if promise is not None}
        source.promised |= promises
        states = ((shard, source.states[shard]) for shard in sorted(changed))
        self.bounds.note(stage, source.strategy, states)
        return promises

    def _load(self, stage: str, strategy: StatefulStrategy) -> _Source:
        noted = self._notes.states(stage)
        if noted is None:
            return _Source(strategy)
        epoch, text = noted
        try:
            stored = json.loads(text)
        except ValueError as error:
            raise StrategyError(
                f"stage {stage!r}: the states of its strategy after batch {epoch}, in the checkpoint's "
                f"folder tidegauge/states/{stage}, cannot be read: {error}. Restore the file, or remove "
                f"it: then the strategy starts without a state"
            ) from error
        if stored["strategy"] != _name(strategy):
            _log.warning(
                "stage %s: the checkpoint has states of %s, and the strategy is %s now: it starts "
                "without a state",
                stage,
                stored["strategy"],
                _name(strategy),
            )
            return _Source(strategy, epoch)
        return _Source(strategy, epoch, stored["states"])


def _name(strategy: StatefulStrategy) -> str:
    return type(strategy).__qualname__


def _updated(stage: str, source: _Source, shard: str, rows: Rows) -> Any:  # noqa: ANN401
    try:
        return source.strategy.update(source.states.get(shard), rows)
    except BaseException as error:  # `sys.exit()`, too, would end this thread without a word
        raise StrategyError(_failed(stage, source, shard, "update", error)) from error


def _promise(stage: str, source: _Source, shard: str) -> int | None:
    try:
        promise: object = source.strategy.promise(source.states[shard])
    except BaseException as error:  # likewise
        raise StrategyError(_failed(stage, source, shard, "promise", error)) from error
    return checked_ms(promise, f"{_where(stage, shard)}: {_name(source.strategy)}.promise")


def _failed(stage: str, source: _Source, shard: str, method: str, error: BaseException) -> str:
    return (
        f"{_where(stage, shard)}: {_name(source.strategy)}.{method} has failed with "
        f"{type(error).__name__}: {error}. {_LOST}"
    )


def _where(stage: str, shard: str) -> str:
    return f"stage {stage!r}, shard {shard!r}"


def _to_text(stage: str, source: _Source) -> str:
    stored: Mapping[str, Any] = {"strategy": _name(source.strategy), "states": source.states}
    if _is_json(stored):
        return json.dumps(stored)
    shard = next(each for each in source.states if not _is_json(source.states[each]))
    raise StrategyError(
        f"{_where(stage, shard)}: {_name(source.strategy)}.update has returned "
        f"{shown(source.states[shard])}, which JSON cannot keep: use numbers, text, booleans, None, "
        f"lists, and dictionaries with text as keys. {_LOST}"
    )


def _is_json(state: object) -> bool:
    """Return whether JSON keeps a state as it is.

    >>> [_is_json(each) for each in (5, {"a": [1, None]}, (1, 2), {1: 2}, float("nan"), {1}, 10**5_000)]
    [True, True, False, False, False, False, False]
    """
    try:
        return bool(json.loads(json.dumps(state, allow_nan=False)) == state)
    except Exception:  # noqa: BLE001  (too deep, too long, circular, or a type that JSON lacks)
        return False
