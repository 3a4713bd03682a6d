"""The folders of a source that reads logs: one for each shard."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress

from spark_agent.exceptions import LogsError
from spark_agent.sources.offsets import LogsOffset, ShardOffset, is_hidden

_MOST_NAMED = 3

Listing = Mapping[str, Sequence[str]]
"""By shard: the names of its files, in order."""


def list_folders(path: str) -> dict[str, list[str]]:
    """List the files of each shard. Raises `LogsError` if the folder of folders is not there, or has
    something in it that would never be read.
    """
    try:
        with os.scandir(path) as entries:
            found = {each.name: each.is_dir() for each in entries if not is_hidden(each.name)}
    except (FileNotFoundError, NotADirectoryError) as error:
        raise LogsError(
            f"tidegauge: the folder {path!r}, which has a folder for each shard, is not there. If it is "
            f"on a storage that is away, start the query again once that is back: nothing is lost"
        ) from error
    for name in sorted(name for name, is_folder in found.items() if not is_folder):
        raise LogsError(
            f"tidegauge: {path!r} has a file {name!r}, which belongs to no shard and would never be "
            f"read: each shard is a folder in there. Move the file into its shard's folder, or out, and "
            f"start the query again. A name that begins with a dot is skipped"
        )
    return {shard: _list(os.path.join(path, shard)) for shard in sorted(found)}  # noqa: PTH118


def _list(folder: str) -> list[str]:
    """List one shard's files. A folder that is removed meanwhile has none. Raises `LogsError`."""
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        found = {each.name: each.is_dir() for each in entries if not is_hidden(each.name)}
        for name in sorted(name for name, is_folder in found.items() if is_folder):
            raise LogsError(
                f"tidegauge: {folder!r} has a folder {name!r}, whose files would never be read: a "
                f"shard's files are in its own folder. Move them up, or out; then start the query again"
            )
        return sorted(found)
    return []


def sizes_of(path: str, shard: str, names: Sequence[str]) -> dict[str, int]:
    """Return the sizes in bytes of those files that are there."""
    found: dict[str, int] = {}
    for name in names:
        with suppress(FileNotFoundError):
            found[name] = os.stat(os.path.join(path, shard, name)).st_size  # noqa: PTH116, PTH118
    return found


def check_order(path: str, shard: str, names: Sequence[str], at: ShardOffset) -> None:
    """Check that no file came after one that sorts after it was read. Raises `LogsError`."""
    if late := at.late(names):
        more = f" and {len(late) - _MOST_NAMED} more" if len(late) > _MOST_NAMED else ""
        raise LogsError(
            f"tidegauge: shard {shard!r} in {path!r} was read up to {at.last!r}, and after that came "
            f"{', '.join(map(repr, late[:_MOST_NAMED]))}{more}, with a name that sorts before it, so "
            f"it would never be read. Rename it to one that sorts after {at.last!r} (its rows may be "
            f"late), or move it out of the folder; then start the query again from its checkpoint. "
            f"Files must come in the order of their names, and keep their names"
        )


def check_sizes(
    path: str, shard: str, names: Sequence[str], at: ShardOffset, read: Mapping[str, int]
) -> None:
    """Check that no file has changed since it was read. `read` are the sizes of files that were read,
    perhaps after they had been repaired, later than their batch was planned. Raises `LogsError`.
    """
    now = sizes_of(path, shard, at.read_of(names))
    changed = [name for name in now if name in read and read[name] != now[name]]
    changed += at.changed({name: size for name, size in now.items() if name not in read})
    for name in changed[:1]:
        raise LogsError(
            f"tidegauge: {name!r} of shard {shard!r} in {path!r} was read, and has changed since: it "
            f"has {now[name]} bytes now. What was added, or came in its place, is not read. Write a "
            f"file under a name that begins with a dot, and rename it once it is complete. Put what is "
            f"new into a file that sorts after {at.last!r}, and this one away; then start the query "
            f"again from its checkpoint"
        )


def files_of_batch(path: str, start: LogsOffset, end: LogsOffset) -> dict[str, list[str]]:
    """Return the files of a batch, by shard, however often it is asked. Raises `LogsError`."""
    listing: Listing = list_folders(path)
    found: dict[str, list[str]] = {}
    for shard, until in end.shards.items():
        since = start.of(shard)
        wanted = until.files - since.files
        files = since.batch(listing.get(shard, ()), until) if wanted else []
        if files is None:
            raise LogsError(
                f"tidegauge: a batch that Spark has planned reads {wanted} files of shard {shard!r} in "
                f"{path!r}, after {since.last!r} and up to {until.last!r}, and some of them are gone. A "
                f"file may be deleted once the query has read past it. Put them back, and start the "
                f"query again"
            )
        if files:
            found[shard] = files
    return found
