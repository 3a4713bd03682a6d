"""The changes of a job for its followers, in the order in which a stream can be resumed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from zlib import crc32

from service.aggregator.states import StageState
from service.frontier.throttle import ThrottleView


@dataclass(frozen=True, slots=True, order=True)
class Definition:
    """Definition of a job, to which its stages belong."""

    generation: int
    layout_version: int


NO_DEFINITION = Definition(-1, -1)


@dataclass(frozen=True, slots=True)
class Change:
    """A stage that has changed."""

    state: StageState
    cursor: str | None
    """Position from which a stream can be resumed after this change; None: not between changes that
    belong together."""


class Changes:
    """Changes that followers get at once, shared by all followers at the same position."""

    __slots__ = ("_written", "changes", "stages", "throttle")

    def __init__(
        self,
        changes: Sequence[Change],
        throttle: ThrottleView | None = None,
        stages: Sequence[str] | None = None,
    ) -> None:
        self.changes = changes
        self.throttle = throttle
        """Throttle advice for the shards, if it has changed."""
        self.stages = stages
        """All present stages, if stages were removed since the follower's position."""
        self._written: bytes | None = None

    def __bool__(self) -> bool:
        """Return whether anything has changed."""
        return bool(self.changes) or self.throttle is not None or self.stages is not None

    def written(self, write: Callable[[Changes], bytes]) -> bytes:
        """Return the form that `write` makes, once. All followers must use the same `write`."""
        if self._written is None:
            self._written = write(self)
        return self._written


SILENCE = Changes(())
"""Sent after a long time without a change (`feeds.HEARTBEAT_S`)."""


def health_of(state: StageState) -> str:
    """Return all that followers get of a stage without a change of its watermark, as text; empty: not
    derived.
    """
    soft = state.soft
    if soft is None:
        return ""
    return f"{soft.health} {soft.input_ended} {soft.late_ranges}"


def checksum_of(states: Iterable[StageState]) -> str:
    """Return a checksum of the healths of all stages of a job, the same on each replica.

    The ledger does not number changes of health. The checksum is a part of each cursor, so a resumed
    stream shows a health that has changed while its follower was disconnected.
    """
    healths = sorted(f"{state.name} {health_of(state)}" for state in states)
    return f"{crc32(chr(10).join(healths).encode()):08x}"


def in_order(
    fresh: Sequence[StageState],
    definition: Definition,
    present: Collection[StageState],
    still: Collection[str] = (),
) -> Sequence[Change]:
    """Put changes in order. Stages that changed in one step share a revision, and only the last of them
    has a cursor: a client that resumed after the first would miss the others. The `still` ones, with a
    change of health alone, come first and have no cursor.

    `present`: all stages. A cursor between changes already has the checksum of all healths: the stages
    that are yet to come have later revisions, and are sent again to whoever resumes there.
    """
    if not fresh:
        return ()
    checksum = checksum_of(present)
    before = [Change(state, None) for state in fresh if state.name in still]
    moved = [state for state in fresh if state.name not in still]
    ordered = sorted(moved, key=lambda state: state.view.revision)
    following = [state.view.revision for state in ordered[1:]] + [-1]

    def cursor(revision: int) -> str:
        return f"{definition.generation}-{definition.layout_version}-{revision}-{checksum}"

    return before + [
        Change(state, cursor(state.view.revision) if state.view.revision != after else None)
        for state, after in zip(ordered, following[: len(ordered)], strict=True)
    ]
