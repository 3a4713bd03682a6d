"""A job's whole state in Redis: how it starts, and how its ranges move to another layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from service.frontier.facts import UNFINISHED
from service.frontier.graph import Stage
from service.frontier.ranges import inherit, staying
from service.frontier.timestamps import MAX, MIN
from service.live.port import StateLostError
from service.live.redis import schema
from service.live.redis.job_layout import (
    JobLayout,
    Runs,
    indices_of,
    layout_id,
    pack_pipeline,
    runs_of,
)
from service.live.redis.packing import blob, pack
from service.model.checkpoints import chunk_numbers, joined_columns
from service.model.jobs import InstalledJob, InstalledStage
from service.model.reports import RangeNote, holds_at

_reply = msgspec.msgpack.Decoder()


@dataclass(frozen=True, slots=True)
class Meta:
    """The head of a job's state, trustworthy or not."""

    incarnation: int | None
    """None: there is no state at all."""
    layout_id: str
    """With a `!` in front while the layout is being changed."""
    generation: int
    layout_version: int
    stage_names: Sequence[str]
    identity: str
    """Changes whenever the state is begun afresh or its layout changes."""

    @classmethod
    def read(cls, fields: Sequence[bytes | None]) -> Meta:
        """Read the reply to HMGET for `META_FIELDS`."""
        server, incarnation, at, generation, layout_version, stages = fields
        return cls(
            None if incarnation is None else int(incarnation),
            (at or b"").decode(),
            int(generation or 0),
            int(layout_version or 0),
            msgspec.json.decode(stages or b"[]", type=list[str]),
            b"|".join((server or b"", incarnation or b"", at or b"")).decode(),
        )

    @property
    def version(self) -> tuple[int, int]:
        """Orders the layouts of a job."""
        return self.generation, self.layout_version


META_FIELDS = ("server", "incarnation", "at", "generation", "layout_version", "stages")


def flat(fields: Mapping[Any, Any]) -> list[Any]:
    """Flatten fields into arguments of HSET."""
    return [
        blob(each) if isinstance(each, bytes) else each for pair in fields.items() for each in pair
    ]


@dataclass(frozen=True, slots=True)
class Restored:
    """Hashes of a stage that starts from the ledger, beside its columns, as arguments of HSET."""

    facts: list[Any]
    """See `UNFINISHED`."""
    retired: list[Any]


def restored(installed: InstalledStage) -> Restored:
    """Return the hashes of a stage that starts from its checkpoint."""
    if installed.columns is None:
        return Restored([], [])
    packed = schema.pack_facts(UNFINISHED)
    unfinished = np.flatnonzero(installed.columns["unfinished"]).tolist()
    return Restored(
        flat({str(index): packed for index in unfinished}),
        flat({str(i): schema.pack_retired(p) for i, p in _retired(installed).items()}),
    )


def _retired(installed: InstalledStage) -> Mapping[int, float]:
    """Return the kept promises of the retired ranges."""
    columns = installed.columns
    if columns is None:
        return {}
    at = np.flatnonzero(columns["retired"] & (columns["promises"] != MAX)).tolist()
    return {index: float(columns["promises"][index]) for index in at}


def fresh(name: str, job: InstalledJob) -> tuple[dict[str, Any], bytes, bytes, bytes]:
    """Return the fields, weights, tree and moments of a stage that starts from the ledger."""
    stage, installed = job.pipeline.stages[name], job.stages[name]
    epoch = schema.epoch_text(installed.progress.epoch)
    fields: dict[str, Any] = {
        "name": name,
        "source": int(stage.is_source),
        "run": installed.progress.run,
        "epoch": epoch,
        "recorded": epoch,
    }
    if stage.layout is None:
        return fields | counts_of(np.zeros(0), {}, {}, 0, installed), b"", b"", b""
    columns = installed.columns or joined_columns(len(stage.layout), ())
    retired = _retired(installed)
    promises = schema.as_column(columns["promises"])
    weights = schema.weights_of(promises, (), retired, is_source=stage.is_source)
    moments = np.zeros((len(schema.MOMENTS), len(weights)))
    for saved in schema.SAVED_MOMENTS:
        moments[schema.MOMENTS.index(saved)] = columns[saved]
    fields |= counts_of(weights, {}, retired, 0, installed)
    return (
        fields,
        weights.astype("<f8").tobytes(),
        schema.tree_over(weights),
        moments.astype("<f8").tobytes(),
    )


def counts_of(
    weights: schema.Floats,
    idle: Mapping[int, float],
    retired: Mapping[int, float],
    leased: int,
    installed: InstalledStage,
) -> dict[str, Any]:
    """Count a stage's ranges, given their weights, and the promises of those that are set aside."""
    promises = schema.promises_of(weights, {**idle, **retired})
    return {
        "n": len(weights),
        "since": installed.layout_since,
        "promised": int(np.count_nonzero(promises != MIN))
        + sum(promise == schema.NOTHING for promise in retired.values()),
        "idle": len(idle),
        "final": int(np.count_nonzero(weights == float(MAX))),
        "leased": leased,
        **({"retired": len(retired)} if retired else {}),
    }


@dataclass(frozen=True, slots=True)
class Dumped:
    """A stage's state, read from Redis while its job is frozen."""

    fields: Mapping[bytes, bytes]
    weights: schema.Floats
    owners: schema.Floats
    moments: schema.Floats
    notes: Mapping[bytes, bytes]
    waiting: Mapping[bytes, bytes]
    idle: Mapping[bytes, bytes]
    facts: Mapping[bytes, bytes]
    marks: Mapping[bytes, bytes]
    packed: Mapping[bytes, bytes]


def read_leases(reply: Mapping[bytes, bytes] | Sequence[bytes]) -> dict[int, str]:
    """Return the stage of each lease, by fence."""
    fields = schema.pairs(reply)
    return {
        int(name[1:]): _reply.decode(fields[b"t" + token])[1]
        for name, token in fields.items()
        if name.startswith(b"f") and b"t" + token in fields
    }


class LayoutChange:
    """The next layout of a job, prepared from its current one."""

    def __init__(self, job: InstalledJob, old: JobLayout) -> None:
        self._job = job
        self._old = old
        before, after = old.pipeline.stages, job.pipeline.stages
        self.carried: list[str] = []
        """Stages whose ranges or idleness change, but which stay keyed, or a source."""
        self._fresh: list[str] = []
        for name, stage in after.items():
            if name not in before or type(before[name].layout) is not type(stage.layout):
                self._fresh.append(name)
            elif before[name].layout != stage.layout or _ends_policy(before[name], stage):
                self.carried.append(name)
        self._gone = [name for name in before if name not in after]

    def make(
        self, dumped: Mapping[str, Dumped], leases: Mapping[int, str]
    ) -> tuple[list[str], list[Any], list[bytes]]:
        """Return the keys, the arguments and the columns of the step that installs it."""
        job = self._job
        keys = schema.job_keys(job.name)
        entries: list[Any] = []
        columns: list[bytes] = []
        ended = {*self._fresh, *self._gone}
        held: list[list[Any]] = [
            [fence, [], 0] for fence, stage in leases.items() if stage in ended
        ]
        dirty: list[str] = []
        for name in self.carried:
            entry, own_columns, owners = self._carry(name, dumped[name])
            entries.append(entry)
            columns += own_columns
            for fence in (f for f, stage in leases.items() if stage == name):
                members = np.flatnonzero(owners == fence)
                held.append([fence, runs_of(members), len(members)])
        for name in self._fresh:
            fields, weights, tree, moments = fresh(name, job)
            view = schema.pack_view(job.stages[name].view)
            kept = restored(job.stages[name])
            entries.append([flat(fields), kept.retired, [], [], kept.facts, [], name, view])
            columns += [weights, tree, bytes(len(weights)), moments]
        for name in (*self.carried, *self._fresh):
            layout = job.pipeline.stages[name].layout
            if layout is not None:
                dirty += [f"{name}:{number}" for number in chunk_numbers(len(layout))]
        for name in (*self.carried, *self._fresh, *self._gone):
            keys += schema.stage_keys(job.name, name)
        meta = {
            "layout_version": job.layout_version,
            "at": layout_id(job.generation, job.layout_version),
            "pipeline": pack_pipeline(job.pipeline),
            "stages": msgspec.json.encode(list(job.stages)).decode(),
        }
        args: list[Any] = [schema.channel(job.name), flat(meta), self._gone, entries, held, dirty]
        return keys, args, columns

    def _carry(self, name: str, old: Dumped) -> tuple[list[Any], list[bytes], schema.Floats]:
        before, after = (
            self._old.pipeline.stages[name].layout,
            self._job.pipeline.stages[name].layout,
        )
        if before is None or after is None:
            raise StateLostError(self._job.name)
        stage = self._job.pipeline.stages[name]
        aside = {int(i): schema.idle_promise(p) for i, p in old.idle.items()}
        # Records that were computed without these are of the former layout, and the ledger rejects them.
        waited_for = {
            int(i)
            for i, p in old.idle.items()
            if schema.is_by_policy(p) and not stage.policy.leaves_quiet_out
        }
        was_retired = {int(i) for i, p in old.idle.items() if schema.is_retired(p)}
        promises = schema.as_column(inherit(before, schema.promises_of(old.weights, aside), after))
        source, target = staying(before, after)
        stays = dict(zip(source.tolist(), target.tolist(), strict=True))
        owners, moments = np.zeros(len(after)), np.zeros((len(schema.MOMENTS), len(after)))
        owners[target] = old.owners[source]
        moments[:, target] = old.moments.reshape(len(schema.MOMENTS), -1)[:, source]
        stays_aside = stays.keys() - waited_for
        kept = {i: promise for i, promise in aside.items() if i in stays_aside}
        idle = {stays[i]: promise for i, promise in kept.items() if i not in was_retired}
        retired = {stays[i]: promise for i, promise in kept.items() if i in was_retired}
        is_source = stage.is_source
        weights = schema.weights_of(promises, idle, retired, is_source=is_source)
        leased = int(np.count_nonzero(owners))
        fields: dict[str, Any] = {
            key.decode(): value
            for key, value in old.fields.items()
            if key in (b"name", b"run", b"epoch", b"recorded", b"waiting")
        }
        fields["source"] = int(is_source)
        fields |= _renumbered_ends(old.fields.get(b"ending"), stays)
        fields |= counts_of(weights, idle, retired, leased, self._job.stages[name])
        entry = [
            flat(fields),
            flat(
                {stays[int(i)]: packed for i, packed in old.idle.items() if int(i) in stays_aside}
            ),
            flat({stays[i]: note for i, note in _last_said(old).items() if i in stays}),
            flat(_renumbered(old.waiting, stays)),
            flat(_renumbered_facts(old.facts, stays)),
            flat(old.marks),
            name,
            schema.pack_view(self._job.stages[name].view),
        ]
        columns = [
            weights.astype("<f8").tobytes(),
            schema.tree_over(weights),
            owners.astype("<f8").tobytes(),
            moments.astype("<f8").tobytes(),
        ]
        return entry, columns, owners


def _ends_policy(before: Stage, after: Stage) -> bool:
    """Return whether quiet shards were left out, and no longer are."""
    return before.policy.leaves_quiet_out and not after.policy.leaves_quiet_out


def _last_said(old: Dumped) -> Mapping[int, bytes]:
    """Return the latest holds of each range, also of packed reports, as notes."""
    notes = {int(i): note for i, note in old.notes.items()}
    fences = sorted((int(name[1:]) for name in old.packed if name.startswith(b"h")), reverse=True)
    for fence in fences:
        runs: Runs = _reply.decode(old.packed[b"m%d" % fence]) or ()
        columns = schema.read_holds(old.packed[b"h%d" % fence])
        for row, index in enumerate(indices_of(runs).tolist()):
            if index not in notes:
                notes[index] = msgspec.json.encode(RangeNote(holds_at(columns, row)))
    return notes


def _renumbered_ends(ending: bytes | None, stays: Mapping[int, int]) -> dict[str, bytes]:
    """Keep the ends of retirements that are not saved, of ranges that stay."""
    ends = [[stays[i], *rest] for i, *rest in _reply.decode(ending or b"\x90") if i in stays]
    return {"ending": pack(ends)} if ends else {}


def _renumbered_facts(facts: Mapping[bytes, bytes], stays: Mapping[int, int]) -> dict[str, bytes]:
    """Keep the facts of ranges that stay, and what is counted for the stage."""
    return {
        name.decode() if name.startswith(b"#") else str(stays[int(name)]): packed
        for name, packed in facts.items()
        if name.startswith(b"#") or int(name) in stays
    }


def _renumbered(waiting: Mapping[bytes, bytes], stays: Mapping[int, int]) -> dict[str, bytes]:
    """Keep the waiting reports of ranges that stay; others are void with their leases."""
    blocks: dict[str, dict[int, list[Any]]] = {}
    fields: dict[str, bytes] = {}
    for name, packed in waiting.items():
        epoch, colon, of = name.decode().partition(":")
        if of.startswith("f"):
            index = int(of[1:])
            if index in stays:
                fields[f"{epoch}:f{stays[index]}"] = packed
            continue
        by_block = blocks.setdefault(epoch, {})
        for entry in (_reply.decode(packed) or ()) if colon else ():
            if entry[0] in stays:
                index = stays[entry[0]]
                by_block.setdefault(index // schema.BLOCK, []).append([index, *entry[1:]])
    for epoch, by_block in blocks.items():
        fields[epoch] = pack(list(by_block))
        for block, entries in by_block.items():
            fields[f"{epoch}:{block}"] = pack(entries)
    return fields
