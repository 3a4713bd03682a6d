"""Installing a job in memory, and moving its ranges to the next layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from service.frontier.columns import Int64s
from service.frontier.epochs import Waiting
from service.frontier.graph import Stage
from service.frontier.ranges import Layout
from service.live.memory.leases import NOTHING, end_on, forget
from service.live.memory.range_table import EVERY, RangeTable
from service.live.memory.state import LiveJob, LiveStage
from service.live.port import FENCE_BITS
from service.model.jobs import InstalledJob, InstalledStage


def fresh(job: InstalledJob) -> LiveJob:
    """Begin a job from the ledger alone: promises as checkpointed, no leases."""
    new = LiveJob(
        name=job.name,
        pipeline=job.pipeline,
        incarnation=job.incarnation,
        generation=job.generation,
        layout_version=job.layout_version,
        revision=job.revision,
        last_run=job.last_run,
        fence=job.incarnation << FENCE_BITS,
        stages={},
        views={},
    )
    for name, installed in job.stages.items():
        new.stages[name] = _fresh_stage(job.pipeline.stages[name], installed)
    return new


def reset(old: LiveJob, job: InstalledJob) -> LiveJob:
    """Begin a job's next generation. Its ended tokens stay known, and fences go on rising."""
    for name in old.stages:
        end_on(old, name)
    new = fresh(job)
    new.ended, new.leases, new.fence = old.ended, old.leases, old.fence
    new.changes = old.changes
    return new


def change(old: LiveJob, job: InstalledJob) -> LiveJob:
    """Move a job to its next layout: ranges that stay keep their promises and leases."""
    new = replace(
        old,
        pipeline=job.pipeline,
        layout_version=job.layout_version,
        last_run=max(old.last_run, job.last_run),
        revision=max(old.revision, job.revision),
        stages={},
        views={},
    )
    for name, installed in job.stages.items():
        before = old.stages.get(name)
        layout = job.pipeline.stages[name].layout
        if before is None or not _same_layout_type(before.table, layout):
            stage = _fresh_stage(job.pipeline.stages[name], installed)
            end_on(new, name)
        else:
            stage = _carried(new, name, before, layout, installed)
        new.stages[name] = stage
    for name in old.stages.keys() - new.stages.keys():
        end_on(new, name)
    return new


def _carried(
    job: LiveJob, name: str, before: LiveStage, layout: Layout | None, installed: InstalledStage
) -> LiveStage:
    view = max(before.view, installed.view, key=lambda view: view.version)
    stage = replace(before, view=view)
    table = before.table
    if table is None or layout is None:
        return stage
    if not job.pipeline.stages[name].policy.leaves_quiet_out:
        table.end_policy_idleness()
    if table.layout == layout:
        return stage
    stage.is_source = job.pipeline.stages[name].is_source
    stage.table = table.carried_over(layout)
    # The indices of ranges that have returned are those of the former layout.
    stage.returned = {EVERY} if before.returned else set()
    stage.layout_since = installed.layout_since
    stage.waiting = _renumbered(before.waiting, table, stage.table)
    owned = _by_owner(stage.table.owner)
    for lease in [lease for lease in job.by_fence.values() if lease.stage == name]:
        lease.members = owned.get(lease.fence, NOTHING)
        lease.held = len(lease.members)
        if not lease.held:
            forget(job, lease, "superseded")
    return stage


def _same_layout_type(table: RangeTable | None, layout: Layout | None) -> bool:
    return type(None if table is None else table.layout) is type(layout)


def _fresh_stage(stage: Stage, installed: InstalledStage) -> LiveStage:
    table = None if stage.layout is None else RangeTable(stage.layout, installed.columns)
    return LiveStage(
        table=table,
        is_source=stage.is_source,
        view=installed.view,
        run=installed.progress.run,
        epoch=installed.progress.epoch,
        recorded=installed.progress.epoch,
        layout_since=installed.layout_since,
        end=installed.end,
    )


def _renumbered(
    waiting: Mapping[int, Mapping[int, Waiting]], old: RangeTable, new: RangeTable
) -> dict[int, dict[int, Waiting]]:
    """Keep the waiting reports of ranges that stay; others are void with their leases."""
    return {
        epoch: {
            new.index[name]: report
            for index, report in reports.items()
            if (name := old.name(index)) in new.index
        }
        for epoch, reports in waiting.items()
    }


def _by_owner(owner: Int64s) -> dict[int, Int64s]:
    order = np.argsort(owner, kind="stable")
    fences, starts = np.unique(owner[order], return_index=True)
    parts = np.split(order.astype(np.int64), starts[1:])
    return dict(zip(fences.tolist(), parts, strict=True))
