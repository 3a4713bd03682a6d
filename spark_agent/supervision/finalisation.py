"""Making shards final: all of a bounded query once it has read everything, which then is stopped."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final

from spark_agent.client.client import Client, StageWatermark
from spark_agent.client.reports import RangeReport
from spark_agent.client.spec import StageSpec
from spark_agent.jvm.running_query import RunningQuery
from spark_agent.started_query import StartedQuery
from spark_agent.supervision.batch_waits import BatchWaits
from spark_agent.supervision.committed import Committed
from spark_agent.supervision.diagnostics import added_shards_message
from spark_agent.supervision.driver_reporter import DriverReporter
from spark_agent.supervision.pending_reports import PendingReports
from spark_agent.times import MAX_MS

_MOST_LOOKED_UP: Final = 10_000
"""Shards of a source that one look-up returns, those that hold it back most first."""


class Finalisation:
    """Progress of a bounded query's sources towards final."""

    def __init__(
        self, query: StartedQuery, running: RunningQuery, client: Client, waits: BatchWaits
    ) -> None:
        self._query = query
        self._stages = query.stages
        self._running = running
        self._client = client
        self._waits = waits
        self.not_final: dict[str, set[str]] = {
            stage.name: set(stage.shards) for stage in query.stages.sources
        }
        """By source. The driver's watch over quiet shards reads it, too."""
        self.is_drained = False
        """True once a bounded query has read everything, and its last epoch is committed."""
        self._has_read_all = False
        self._to_look_up = [stage.name for stage in query.stages.sources if stage.is_dynamic]
        """Dynamic sources whose joined shards are still to be read from the service."""
        self._stop_requested = False
        self._confirmed = not query.stages.sources
        """True once the service shows every source as final."""
        self.obstacle: str | None = None
        """The reason why the query can never finish, once one is found."""

    @property
    def is_stopping(self) -> bool:
        """True if the query was stopped because all of its stages are final."""
        return self._stop_requested

    @property
    def are_final(self) -> bool:
        """True if the service shows all sources as final: such a watermark is durable. A report that
        was accepted, but not yet published, may be lost with its live store.
        """
        return self._confirmed and not any(self.not_final.values()) and not self._to_look_up

    @property
    def is_unfinished(self) -> bool:
        """True if everything is read, and some shard is still to be made final."""
        return (self.is_drained or self._has_read_all) and not self.are_final

    def find_joined_shards(self) -> None:
        """Find the shards that joined dynamic sources before this query was started.

        Its tasks report those that join later: `add_joined`.
        """
        while self._to_look_up:
            stage = self._to_look_up[-1]
            self.add_joined(stage, self._look_up(stage))
            self._to_look_up.pop()

    def find_lost(self, stage: str, reported: Collection[str]) -> None:
        """Find shards that were reported as final, and that the service does not have as final."""
        self.not_final[stage].update(self._look_up(stage).keys() & set(reported))

    def furthest(self, stage: str, shards: Collection[str]) -> str:
        """Return the one of some shards that has promised most."""
        if len(shards) == 1:
            return next(iter(shards))
        promises = self._look_up(stage)
        found = {shard: promises.get(shard) for shard in sorted(shards)}
        return max(found, key=lambda shard: (found[shard] is not None, found[shard] or 0))

    def _look_up(self, stage: str) -> dict[str, int | None]:
        """Return the promises of a source's shards that are not final, by the service."""
        answer = self._client.ranges(self._query.job, stage, limit=_MOST_LOOKED_UP)
        return {
            each["range"]: each["promise"] for each in answer["ranges"] if each["status"] != "final"
        }

    def add_joined(self, stage: str, shards: Iterable[str]) -> None:
        """Add shards of a dynamic source."""
        self.not_final[stage].update(shards)

    def check_drained(self, committed_epoch: int) -> None:
        """Detect whether a query without control sources has read everything, and that is committed.

        Spark notifies its listeners of a batch some time after the next trigger has found nothing. Until
        then its shards are missing here, and a dynamic source would be final too early without them.
        """
        is_unknown = self._query.bounded and not self.is_drained and self._running.has_started
        if not is_unknown or self._stages.has_control_sources:
            return
        # Also if it has run no batch: an earlier start may have read everything.
        # A trigger may find nothing because shards that have more must wait.
        self._has_read_all = self._running.has_no_new_data() and not self._waits.has_unread
        if self._has_read_all:
            newest = self._running.recent_batch()
            self.is_drained = newest is None or newest.epoch <= committed_epoch

    def finish(
        self, reporter: DriverReporter, pending: PendingReports, committed: Committed
    ) -> None:
        """Make a drained query's sources final; once all its stages are final, stop the query."""
        has_closed_all = not self._stages.keyed or committed.input_ms == MAX_MS
        may_finish = self.is_drained if self._stages.sources else has_closed_all
        if self._stop_requested or not may_finish:
            return
        for stage, shards in self.not_final.items():
            self.report_final(reporter, pending, stage, shards)
        watermarks = self._client.watermarks(self._query.job)
        self._compare(watermarks, pending)
        if not self.are_final or not has_closed_all or not self._running.has_started:
            return
        here = [watermarks.get(stage) for stage in self._stages.names]
        if all(each is None or each.final for each in here):
            self._stop_requested = True
            if not self._query.trigger.is_available_now:  # Spark ends such a run itself.
                self._running.stop()

    def _compare(self, watermarks: Mapping[str, StageWatermark], pending: PendingReports) -> None:
        """Compare the shards that are not final, by the reports, with the service's watermarks."""
        found = [watermarks.get(source.name) for source in self._stages.sources]
        self._confirmed = all(each is None or each.final for each in found)
        for source in self._stages.sources:
            here = watermarks.get(source.name)
            if here is None or here.final:
                # The others were taken out of the specification, or another driver made them final.
                self.not_final[source.name].clear()
                pending.remove_all(source.name)
            elif source.is_dynamic and not self.not_final[source.name]:
                # More have joined than one look-up returns, or since.
                self._to_look_up.append(source.name)
            elif not self.not_final[source.name]:
                self._look_again(source)

    def _look_again(self, source: StageSpec) -> None:
        """Find the reason why a source is not final, although all shards of this query were.

        A service that has lost its ledger needs the reports again. A shard that was added while the
        query ran is another one's to report: this query has never read it.
        """
        found = self._look_up(source.name)
        self.not_final[source.name].update(found.keys() & set(source.shards))
        if added := found.keys() - set(source.shards):
            self.obstacle = added_shards_message(self._query.name, source.name, added)

    def report_final(
        self, reporter: DriverReporter, pending: PendingReports, stage: str, shards: Collection[str]
    ) -> list[str]:
        """Report shards of a source as final; return the granted ones. Others are retried later.

        This is safe even if the last epoch is not committed yet: a source promises only about rows
        that it has still to emit. The stage that reads it accounts for those already emitted.
        """
        final = reporter.report_shards(stage, dict.fromkeys(shards, RangeReport(final=True)))
        self.not_final[stage].difference_update(final)
        for shard in final:
            pending.remove(stage, shard)
        return final
