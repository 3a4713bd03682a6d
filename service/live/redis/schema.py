"""Schema of a job in Redis: its keys, the formats of its values, and columns over its ranges."""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from service.frontier.epochs import MAX_WAITING_EPOCHS
from service.frontier.facts import Facts, ReportedFacts
from service.frontier.graph import StageWatermark
from service.frontier.idleness import Commits
from service.frontier.timestamps import MAX, MIN
from service.live.port import MAX_DEPARTED, REMEMBERED
from service.live.redis.packing import Key, blob
from service.model.checkpoints import CHUNK, COLUMNS
from service.model.jobs import StageView
from service.model.reports import Column, CommittedHolds, HoldColumns
from service.model.runs import RunEnd

Floats = npt.NDArray[np.float64]

NOTHING = float(MIN)

BLOCK = 64
"""Ranges under one node of the tree of minima."""

SPAN = 16
"""Blocks that one pass over a report reads and writes together."""

IDLE = float(2**62)
"""The weight of a range that is set aside, and not final: idle and of a source, or retired. It is above
any active one and below the final ones, so that the least weight of all is enough to know the agreement.
"""

JOBS: Key = "tidegauge:jobs"
"""The set of the jobs' names. A hint only: the ledger has them."""

PROBE: Key = "tidegauge:probe"
"""Written to prove that the server takes writes."""

RIGHTS_PROBE: Key = "tidegauge:rights"
"""Written and removed to find out which commands the user may run."""

KEYS = "tidegauge:*"
CHANNELS = "tidegauge:changes:*"

_VIEW = struct.Struct("<dd?dddd")
_VIEW_MEMBERS = (
    *("input", "output", "idle", "version", "revision", "updated_at_ms"),
    "advanced_at_ms",
)
_FACTS = struct.Struct("<dddddBB")
"""Reported at, interval, oldest work, backlog, quiet since, whether the sketch of what is pending
follows.
"""

_REPORTED_FACTS = struct.Struct("<ddddBB")
"""Oldest work, records, late, backlog, whether a sketch follows."""

_DOUBLE = struct.Struct("<d")
_MAX_PACKED = 4_096
"""Number of leases whose holds of packed reports a stage keeps. They are for display alone."""
_EPOCH_DIGITS = 20


COMMITS_MARK = b"#commits"
"""Field of a stage's marks with the series of its commits."""

KEPT_MARK = b"#kept"
"""Likewise, with the holds that the last commit brought."""


def read_list(value: Any) -> list[Any]:  # noqa: ANN401 - part of a reply
    """Read a list: Lua packs an empty one as a map, since to Lua they are the same."""
    return list(value) if value else []


def pairs(reply: Mapping[bytes, bytes] | Sequence[bytes]) -> dict[bytes, bytes]:
    """Read the reply to HGETALL, in either protocol."""
    if isinstance(reply, Mapping):
        return dict(reply)
    return dict(zip(reply[::2], reply[1::2], strict=True))


def channel(job: str) -> str:
    """Return the channel on which a job's changes are published."""
    return f"tidegauge:changes:{job}"


_JOB_KEYS = ("meta", "views", "leases", "deadlines", "ended", "dirty")
MOMENTS: Final = ("reported_at_ms", "raised_at_ms", "held_since_ms")
"""The columns of `moments`: when each range's last report was applied, when its promise moved last, and
since when it has been leased without a gap."""

SAVED_MOMENTS: Final = tuple(name for name in MOMENTS if name in COLUMNS)
"""Those that are saved in checkpoints."""

_STAGE_KEYS = (
    "state", "weights", "tree", "owners", "moments", "notes", "waiting", "idle", "facts", "marks",
    "packed",
)  # fmt: skip
"""In the order in which the scripts get them. The first of each has no suffix.

`moments` has the columns `MOMENTS`, one after the other. `packed` has the holds of packed reports (see
`pack_holds`) by the fence of their lease, and which ranges that lease had. They outlast the lease: the
latest holds of a range are shown until it reports others.
"""


def job_keys(job: str) -> list[Key]:
    """Return the keys of a job without those of its stages; all have one hash tag."""
    base = f"tidegauge:{{{job}}}"
    return [base, *(f"{base}:{name}" for name in _JOB_KEYS[1:])]


def stage_keys(job: str, stage: str) -> list[Key]:
    """Return the keys of a stage."""
    base = f"tidegauge:{{{job}}}:stage:{stage}"
    return [base, *(f"{base}:{name}" for name in _STAGE_KEYS[1:])]


def lua_header() -> str:
    """Return the part of each script that is defined here: order of keys, formats and limits."""
    of_job = ", ".join(f"KEYS[{place}]" for place in range(1, len(_JOB_KEYS) + 1))
    of_stage = ", ".join(
        f"{name} = KEYS[base + {place}]" for place, name in enumerate(_STAGE_KEYS, 1)
    )
    limits = {
        "MIN": "-2^63",
        "MAX": "2^63",
        "IDLE": f"{IDLE:.0f}",
        "BLOCK": BLOCK,
        "CHUNK": CHUNK,
        "MOMENTS": len(MOMENTS),
        **{name.removesuffix("_ms").upper(): place for place, name in enumerate(MOMENTS)},
        "SAVED_MOMENTS": f"{{{', '.join(str(MOMENTS.index(name)) for name in SAVED_MOMENTS)}}}",
        "REMEMBERED": REMEMBERED,
        "MAX_DEPARTED": MAX_DEPARTED,
        "MAX_WAITING_EPOCHS": MAX_WAITING_EPOCHS,
        "MAX_PACKED": _MAX_PACKED,
        "JOB_KEYS": len(_JOB_KEYS),
        "STAGE_KEYS": len(_STAGE_KEYS),
        "COMMITS": f"'{COMMITS_MARK.decode()}'",
        "KEPT": f"'{KEPT_MARK.decode()}'",
        "VIEW": f"'{_VIEW.format.replace('?', 'B')}'",
        "VIEW_SIZE": _VIEW.size,
        "VIEW_VERSION": _VIEW_MEMBERS.index("version") + 1,
        "FACTS": f"'{_FACTS.format}'",
        "REPORTED_FACTS": f"'{_REPORTED_FACTS.format}'",
    }
    return "\n".join(
        [
            f"local {', '.join(_JOB_KEYS).upper()} = {of_job}",
            f"local function stage_keys(base) return {{{of_stage}}} end",
            *(f"local {name} = {value}" for name, value in limits.items()),
            "",
        ]
    )


def number_text(number: int) -> str:
    """Write an epoch, or a part of a rank, as text that compares as the numbers do, however large."""
    return f"{number:0{_EPOCH_DIGITS}d}"


def epoch_text(epoch: int | None) -> str:
    """Write an epoch; no epoch is the empty text, which is less than any other."""
    return "" if epoch is None else number_text(epoch)


def as_time(value: float) -> int:
    """Read a time from a double. MAX is not exactly one: it is stored as the next greater one, 2^63."""
    return MAX if value >= MAX else int(value)


def pack_view(view: StageView) -> msgspec.Raw:
    """Pack a view as doubles, which hold each instant, and both ends of time, exactly."""
    w = view.watermark
    return blob(
        _VIEW.pack(
            *(w.input, w.output, w.idle, view.version, view.revision),
            *(view.updated_at_ms, view.advanced_at_ms),
        )
    )


def pack_end(end: RunEnd | None) -> str:
    """Write the end of a stage's run; the empty text: it goes on."""
    return "" if end is None else msgspec.json.encode(end).decode()


def read_end(raw: bytes) -> RunEnd | None:
    """Read what `pack_end` wrote."""
    return msgspec.json.decode(raw, type=RunEnd) if raw else None


def read_view(fields: Sequence[float]) -> StageView:
    """Read a view from a reply."""
    input_, output, idle, version, revision, updated_at, advanced_at = fields
    return StageView(
        StageWatermark(as_time(input_), as_time(output), bool(idle)),
        int(version),
        int(revision),
        int(updated_at),
        int(advanced_at),
    )


def pack_reported_facts(facts: ReportedFacts) -> msgspec.Raw:
    """Pack a report's facts of a range's work."""
    oldest, records, pending = facts.oldest_work_ms, facts.records, facts.pending
    head = _REPORTED_FACTS.pack(
        NOTHING if oldest is None else oldest,
        -1 if records is None else records,
        facts.late,
        facts.backlog,
        pending is not None,
        facts.keeps_back,
    )
    return blob(head + (pending or b""))


def pack_holds(columns: HoldColumns, promises: Column | int) -> msgspec.Raw:
    """Pack the holds of a packed report: their names as JSON, a line feed, a column for each of them.

    If the only column is that of its promises, it is left out: the script puts it in (`whole_holds`).
    """
    names = msgspec.json.encode(list(columns))
    if len(columns) == 1 and all(column is promises for column in columns.values()):
        return blob(names + b"\n")
    packed = [column.astype("<f8").tobytes() for column in columns.values()]
    return blob(b"".join([names, b"\n", *packed]))


def read_holds(packed: bytes) -> HoldColumns:
    """Read the holds of a packed report."""
    head, _, columns = packed.partition(b"\n")
    names = msgspec.json.decode(head, type=list[str])
    if not names:
        return {}
    table = as_times(np.frombuffer(columns, dtype="<f8")).reshape(len(names), -1)
    return dict(zip(names, table, strict=True))


def read_kept(raw: bytes | str | None) -> CommittedHolds | None:
    """Read the holds of a stage's last commit; None: it brought none."""
    return msgspec.json.decode(raw, type=CommittedHolds) if raw else None


def read_departed(raw: bytes) -> Sequence[tuple[int, str]]:
    """Read the last holders of leases that have run out: see `StageObservation.departed`."""
    found = msgspec.msgpack.decode(raw, type=list[tuple[float, str]]) if raw else []
    return [(int(at_ms), holder) for at_ms, holder in found]


def read_facts(packed: bytes) -> Facts:
    """Read the facts that a range has reported so far."""
    *moments, has_pending, keeps_back = _FACTS.unpack_from(packed)
    pending = packed[_FACTS.size :] if has_pending else None
    return facts_of(moments, pending, keeps_back=bool(keeps_back))


def pack_facts(facts: Facts) -> bytes:
    """Pack the facts that a range has reported so far, but for a sketch of pending rows."""
    oldest, interval = facts.oldest_work_ms, facts.interval_ms
    return _FACTS.pack(
        facts.reported_at_ms,
        -1 if interval is None else interval,
        NOTHING if oldest is None else oldest,
        facts.backlog,
        facts.quiet_since_ms,
        False,
        facts.keeps_back,
    )


def facts_of(fields: Sequence[float], pending: bytes | None, *, keeps_back: bool) -> Facts:
    """Return the facts that a range has reported so far, from the numbers in `_FACTS`."""
    reported_at, interval, oldest, backlog, quiet_since = fields
    return Facts(
        int(reported_at),
        None if interval < 0 else int(interval),
        None if oldest == NOTHING else int(oldest),
        pending,
        int(backlog),
        int(quiet_since),
        keeps_back,
    )


_POLICY, _RETIRED = b"p", b"r"
"""Marks behind the promise of a range that is set aside."""


def is_by_policy(packed: bytes) -> bool:
    """Return whether a range is idle by policy, by the mark behind its promise."""
    return packed[_DOUBLE.size :] == _POLICY


def is_retired(packed: bytes) -> bool:
    """Return whether a range is retired, by the mark behind its promise."""
    return packed[_DOUBLE.size :] == _RETIRED


def pack_retired(promise: float) -> bytes:
    """Pack the promise of a retired range."""
    return _DOUBLE.pack(promise) + _RETIRED


def idle_promise(packed: bytes) -> float:
    """Read the promise of a range that is set aside."""
    return _DOUBLE.unpack_from(packed)[0]


def read_commits(packed: bytes) -> Commits | None:
    """Read the series of a stage's commits; None: there is none."""
    if not packed:
        return None
    members = [int(each) for (each,) in _DOUBLE.iter_unpack(packed)]
    since, last, count = members[:3]
    # Earlier versions of the service have written the first three or four alone.
    before = members[3] if len(members) > 3 else since
    arrived = members[4] if len(members) > 4 else last
    return Commits(since, last, count, before, arrived)


def tree_over(weights: Floats) -> bytes:
    """Build the levels of minima over the weights, the lowest first; the last is one node."""
    levels: list[Floats] = []
    level = weights
    while not levels or len(level) > 1:
        padded = np.full(-(-len(level) // BLOCK) * BLOCK, float(MAX))
        padded[: len(level)] = level
        level = padded.reshape(-1, BLOCK).min(axis=1)
        levels.append(level)
    return np.concatenate(levels).astype("<f8").tobytes()


def as_column(values: Sequence[int] | npt.NDArray[np.int64]) -> Floats:
    """Write times as doubles."""
    return np.asarray(values, dtype=np.int64).astype(np.float64)


def as_times(column: Floats) -> npt.NDArray[np.int64]:
    """Read times back from doubles."""
    ends = column >= float(MAX)
    times = np.where(ends, 0.0, column).astype(np.int64)
    times[ends] = MAX
    return times


def weights_of(
    promises: Floats, idle: Collection[int], retired: Collection[int], *, is_source: bool
) -> Floats:
    """Turn promises into weights, given the ranges that are set aside."""
    weights = promises.copy()
    for index in (*(idle if is_source else ()), *retired):
        if promises[index] < float(MAX):
            weights[index] = IDLE
    return weights


def promises_of(weights: Floats, aside: Mapping[int, float]) -> npt.NDArray[np.int64]:
    """Turn weights into promises, given the promises of the ranges that are set aside."""
    column = weights.copy()
    for index, promise in aside.items():
        if column[index] == IDLE:
            column[index] = promise
    return as_times(column)
