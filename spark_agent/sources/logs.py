"""A streaming source for logs in folders: one for each shard, files read in the order of their names.

Spark plans one batch for everything that a query reads. This source limits each shard of that batch
separately: before each batch the source sends the driver the numbers of unread files by shard, and
the driver answers with limits (`spark_agent.throttle.source_throttle`). So one shard waits while others
go on.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxFiles,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from spark_agent.arrow import Batch
from spark_agent.clock import Clock, SystemClock
from spark_agent.sources.admission import Admission, Wanted
from spark_agent.sources.driver_link import LinkClient, LinkError
from spark_agent.sources.folders import (
    Listing,
    check_complete,
    check_names,
    check_order,
    check_sizes,
    files_of_batch,
    find_marked,
    list_folders,
    sizes_of,
)
from spark_agent.sources.formats import read_rows
from spark_agent.sources.offsets import LogsOffset, ShardOffset

FORMAT: Final = "tidegauge-logs"

_LONGEST_BLOCK_MS: Final = 1_000
"""Longest wait of a run that ends when nothing is new, while its shards may read nothing. Then Spark
runs a batch without them: the shards may be waiting for another source of the query."""


@dataclass(frozen=True, slots=True)
class Logs:
    """Location and contents of the files."""

    path: str
    form: str
    shard: str
    """The column with the shard."""
    zone: str
    """The time zone of instants without one."""
    event_time: str
    most: int | None
    """The largest number of files of a shard in one batch; None: without a limit."""
    complete: str = ""
    """The name of the file that marks a folder as complete; empty: none does."""
    is_dynamic: bool = False
    """True if each folder joins as a shard."""


class ShardFiles(InputPartition):
    """The files of one shard in one batch, read by one task."""

    def __init__(self, shard: str, names: Sequence[str]) -> None:
        super().__init__(shard)
        self.shard = shard
        self.names = tuple(names)


class LogsReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads a source's folders. Runs in a Python process next to the driver; tasks call only `read`.

    Its offsets are `spark_agent.sources.offsets.LogsOffset`.
    """

    def __init__(
        self,
        logs: Logs,
        link: LinkClient,
        *,
        source: str,
        schema: StructType,
        poll_ms: int,
        clock: Clock,
    ) -> None:
        self._logs = logs
        self._link = link
        self._source = source
        self._schema = schema
        self._poll_ms = poll_ms
        self._clock = clock
        self._ends: dict[str, str] | None = None
        """By shard: the last file that was there when the run started; None: the run goes on."""
        self._next_poll_ms: int | None = None
        self._checked: dict[str, tuple[ShardOffset, Sequence[str]]] = {}
        """By shard: the offset and the files that have passed the checks."""
        self._read: dict[str, dict[str, int]] = {}
        """By shard: the files of its newest batch, with their sizes when the batch was read."""
        self._sent: frozenset[str] = frozenset()
        """Shards that the driver has got as complete."""

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the driver's state: Spark pickles the reader for `read`, which does not use it."""
        return {**self.__dict__, "_checked": {}, "_ends": None, "_read": {}, "_sent": ()}

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Start before all files."""
        return LogsOffset().to_dict()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return the limit of files of each shard in a batch."""
        most = self._logs.most
        return ReadAllAvailable() if most is None else ReadMaxFiles(most)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Note the present files: the run ends when they are read."""
        _, listing = self._list()
        self._ends = {shard: names[-1] for shard, names in listing.items() if names}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Return the offset after the next batch; `start` if nothing may be read.

        An idle query calls this every 10 ms. Not every call lists the folders, unless the run ends at
        the first trigger that finds nothing new. Raises `LogsError`.
        """
        now_ms = self._clock.steady_ms()
        if self._next_poll_ms is not None and now_ms < self._next_poll_ms:
            return start
        at = LogsOffset.from_dict(start)
        marked, listing = self._list()
        self._check(at, listing)
        unread = self._unread(at, listing)
        most = limit.max_files if isinstance(limit, ReadMaxFiles) else None
        completing = _completing(at, marked, listing)
        wanted = Wanted(
            {shard: len(names) for shard, names in unread.items()},
            most,
            ends=self._ends is not None,
            complete=sorted(at.complete - self._sent),
            completing=completing,
        )
        admission = self._admitted(wanted, unread)
        if admission is None:
            # A limit is only advice, but reading nothing despite unread files could make a source
            # final. What is complete is noticed once the driver answers again.
            admission, completing = Admission(), ()
        else:
            self._sent |= at.complete
        taken = admission.take(unread, most)
        self._next_poll_ms = None
        if taken or completing:
            self._check_complete(at, listing)
            return self._after(at, listing, taken, completing, admission).to_dict()
        if self._ends is not None:
            # Returning `start` would end the run, with files unread.
            turn = LogsOffset(at.shards, at.turn + 1, admission.because)
            return turn.to_dict() if unread else start
        self._next_poll_ms = self._clock.steady_ms() + self._poll_ms
        return start

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return the files of a batch, a partition for each shard.

        A repeated batch reads the same files. Raises `LogsError`.
        """
        found = files_of_batch(
            self._logs.path, LogsOffset.from_dict(start), LogsOffset.from_dict(end)
        )
        for shard, names in found.items():
            self._read[shard] = sizes_of(self._logs.path, shard, names)
        return [ShardFiles(shard, names) for shard, names in sorted(found.items())]

    def read(self, partition: InputPartition) -> Iterator[Batch]:
        """Read the files of one shard, one after the other. Raises `LogsError`."""
        assert isinstance(partition, ShardFiles)  # noqa: S101  (from `partitions`)
        logs = self._logs
        return read_rows(
            logs.path,
            partition.shard,
            partition.names,
            form=logs.form,
            schema=self._schema,
            shard_column=logs.shard,
            zone=logs.zone,
            event_time=logs.event_time,
        )

    def stop(self) -> None:
        """Close the connection to the driver."""
        self._link.close()

    def _list(self) -> tuple[frozenset[str], Listing]:
        """Return the shards whose folders have the marker, and the files of all shards.

        The markers are read first. A writer writes the marker after the last file of the folder, so each
        file of a folder whose marker is found exists before its files are listed, and is among them. In
        the other order, a last file and its marker could be written between the two readings: the marker
        would be found without the file. A marker that is written after the first reading is found by
        the next poll.
        """
        path, marker = self._logs.path, self._logs.complete
        marked = find_marked(path, marker) if marker else frozenset[str]()
        listing = list_folders(path, marker)
        if self._logs.is_dynamic:
            check_names(path, listing)
        return marked, listing

    def _check(self, at: LogsOffset, listing: Listing) -> None:
        """Raise `LogsError` if a shard has files or rows that would never be read."""
        for shard, offset in at.shards.items():
            names = listing.get(shard, ())
            if self._checked.get(shard) != (offset, names):
                check = check_complete if offset.complete else check_order
                check(self._logs.path, shard, names, offset)
                self._check_sizes(shard, names, offset)
                self._checked[shard] = offset, names
            elif read := self._read.get(shard):
                # A check of all files at each poll would take too long; changes are mostly of the
                # newest.
                self._check_sizes(shard, [name for name in names if name in read], offset)

    def _check_complete(self, at: LogsOffset, listing: Listing) -> None:
        """Raise `LogsError` if a file of a complete folder has changed.

        Unlike those of other folders, all files are checked before each batch: nothing follows in the
        folder by which a later check would find the change.
        """
        for shard in at.complete:
            self._check_sizes(shard, listing.get(shard, ()), at.of(shard))

    def _check_sizes(self, shard: str, names: Sequence[str], offset: ShardOffset) -> None:
        check_sizes(self._logs.path, shard, names, offset, self._read.get(shard, {}))

    def _unread(self, at: LogsOffset, listing: Listing) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for shard, names in listing.items():
            unread = at.of(shard).unread(names)
            if self._ends is not None:
                last = self._ends.get(shard, "")
                unread = [name for name in unread if name <= last]
            if unread:
                found[shard] = unread
        return found

    def _admitted(self, wanted: Wanted, unread: Mapping[str, Sequence[str]]) -> Admission | None:
        """Request the shards' limits from the driver; None: the driver does not answer.

        A run that ends waits a little for files that it may not read yet.
        """
        until_ms = self._clock.steady_ms() + _LONGEST_BLOCK_MS
        while True:
            try:
                admission = self._link.admit(self._source, wanted)
            except LinkError:
                return None
            has_batch = wanted.completing or admission.take(unread, wanted.most)
            if has_batch or not unread or not wanted.ends or self._clock.steady_ms() >= until_ms:
                return admission
            self._clock.pause(self._poll_ms)

    def _after(
        self,
        at: LogsOffset,
        listing: Listing,
        taken: Mapping[str, Sequence[str]],
        completing: Sequence[str],
        admission: Admission,
    ) -> LogsOffset:
        # A shard that reads nothing keeps its offset: files that the storage has lost temporarily are
        # still in the offset when they return.
        shards = dict(at.shards)
        path = self._logs.path
        for shard in completing:
            offset = at.of(shard)
            shards[shard] = offset.completed(sizes_of(path, shard, listing[shard]))
        for shard, names in taken.items():
            offset = at.of(shard)
            present = sizes_of(path, shard, offset.read_of(listing[shard]))
            # A file that was deleted since is reported when the batch is read.
            taking = dict.fromkeys(names, 0) | sizes_of(path, shard, names)
            shards[shard] = offset.after(present, taking)
        return LogsOffset(shards, at.turn, admission.because)


def _completing(at: LogsOffset, marked: Collection[str], listing: Listing) -> list[str]:
    """Return the shards that are found as complete now: all of their files are in batches before the
    next one, which Spark has committed.

    All files count, not only those that a run with an end reads.
    """
    return [
        shard
        for shard, names in listing.items()
        if shard in marked and not at.of(shard).complete and not at.of(shard).unread(names)
    ]


class LogsSource(DataSource):
    """The source of logs in folders, for Spark's registry; `Pipeline.read_logs` makes it.

    Options: stage, source, port, token, timeoutMs, pollMs, schema, folder, files, shard, zone,
    eventTime, most, complete.
    """

    @classmethod
    def name(cls) -> str:
        """Return the format's name."""
        return FORMAT

    def schema(self) -> StructType:
        """Return the columns of the files, and the shard."""
        return StructType.fromJson(json.loads(self.options["schema"]))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """Create the reader from the options."""
        options = self.options
        link = LinkClient(
            int(options["port"]), options["token"], timeout_ms=int(options["timeoutMs"])
        )
        logs = Logs(
            path=options["folder"],
            form=options["files"],
            shard=options["shard"],
            zone=options["zone"],
            event_time=options["eventTime"],
            most=int(options["most"]) if options["most"] else None,
            complete=options["complete"],
            is_dynamic=options["dynamic"] == "true",
        )
        return LogsReader(
            logs,
            link,
            source=options["source"],
            schema=schema,
            poll_ms=int(options["pollMs"]),
            clock=SystemClock(),
        )
