"""The folders of a source that reads logs: one for each shard."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from spark_agent.client.spec import is_name
from spark_agent.exceptions import LogsError
from spark_agent.sources.offsets import LogsOffset, ShardOffset, is_hidden

_MOST_NAMED = 3

Listing = Mapping[str, Sequence[str]]
"""By shard: the names of its files, in order."""


def find_marked(path: str, marker: str) -> frozenset[str]:
    """Return the shards whose folders have a file of this name; none if the folder is missing."""
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(path) as entries:
        shards = [each.name for each in entries if not is_hidden(each.name)]
        return frozenset(
            shard
            for shard in shards
            if os.path.isfile(os.path.join(path, shard, marker))  # noqa: PTH113, PTH118
        )
    return frozenset()


def list_folders(path: str, marker: str = "") -> dict[str, list[str]]:
    """List the files of each shard, except those with the name of the marker.

    Raises `LogsError` if the folder of folders is missing, or has an entry that would never be read.
    """
    try:
        with os.scandir(path) as entries:
            found = {each.name: each.is_dir() for each in entries if not is_hidden(each.name)}
    except (FileNotFoundError, NotADirectoryError) as error:
        raise LogsError(
            f"tidegauge: the folder {path!r}, with a folder for each shard, does not exist. If its "
            f"storage is not mounted, mount it and start the query again: nothing is lost"
        ) from error
    for name in sorted(name for name, is_folder in found.items() if not is_folder):
        raise LogsError(
            f"tidegauge: {path!r} has a file {name!r}, which belongs to no shard and would never be "
            f"read: each shard has a folder of its own. Move the file into its shard's folder, or "
            f"out, and "
            f"start the query again. A name that begins with a dot is skipped"
        )
    return {
        shard: _list(os.path.join(path, shard), marker)  # noqa: PTH118
        for shard in sorted(found)
    }


def _list(folder: str, marker: str) -> list[str]:
    """List one shard's files; none if the folder was removed since. Raises `LogsError`."""
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        found = {each.name: each.is_dir() for each in entries if not is_hidden(each.name)}
        for name in sorted(name for name, is_folder in found.items() if is_folder):
            raise LogsError(
                f"tidegauge: {folder!r} has a folder {name!r}, whose files would never be read: a "
                f"shard's files are directly in its folder. Move them up, or out; then start the "
                f"query again"
            )
        return sorted(name for name in found if name != marker)
    return []


def sizes_of(path: str, shard: str, names: Sequence[str]) -> dict[str, int]:
    """Return the sizes in bytes of the files that exist."""
    found: dict[str, int] = {}
    for name in names:
        with suppress(FileNotFoundError):
            found[name] = os.stat(os.path.join(path, shard, name)).st_size  # noqa: PTH116, PTH118
    return found


def check_names(path: str, shards: Iterable[str]) -> None:
    """Check that folders can join a dynamic source as its shards. Raises `LogsError`."""
    if wrong := [shard for shard in shards if not is_name(shard)]:
        raise LogsError(
            f"tidegauge: {path!r} has {_named(wrong)}, and a folder joins as a shard under its name, "
            f"which has up to 128 letters A-Z and a-z, digits, and . _ -, and starts with a letter or a "
            f"digit. So the watermark would not wait for its rows. Rename it, or move it out; then "
            f"start the query again"
        )


def _named(files: Sequence[str]) -> str:
    """Name the first of several files, and count the rest.

    >>> _named(["a", "b"]), _named(["a", "b", "c", "d", "e"])
    ("'a', 'b'", "'a', 'b', 'c' and 2 more")
    """
    named = ", ".join(map(repr, files[:_MOST_NAMED]))
    rest = len(files) - _MOST_NAMED
    return f"{named} and {rest} more" if rest > 0 else named


def check_order(path: str, shard: str, names: Sequence[str], at: ShardOffset) -> None:
    """Check that files came in the order of their names. Raises `LogsError`."""
    if late := at.late(names):
        raise LogsError(
            f"tidegauge: shard {shard!r} in {path!r} was read up to {at.last!r}, and after that came "
            f"{_named(late)}, with a name that sorts before it, so it would never be read. Rename it to "
            f"sort after {at.last!r} (its rows may be late), or move it out of the folder; then start "
            f"the query again from its checkpoint. Files must come in the order of their names, and "
            f"keep their names"
        )


def check_complete(path: str, shard: str, names: Sequence[str], at: ShardOffset) -> None:
    """Check that no file came into a folder after it was noticed as complete. Raises `LogsError`."""
    if added := at.added(names):
        raise LogsError(
            f"tidegauge: the folder of shard {shard!r} in {path!r} was complete, and after that came "
            f"{_named(added)}. Nothing may follow in a complete folder: its shard is final, and the "
            f"watermark does not wait for it. Move the file into the folder of a shard that is not "
            f"final, or out; then start the query again from its checkpoint. A marker must be written "
            f"after the last file of its folder"
        )


def check_sizes(
    path: str, shard: str, names: Sequence[str], at: ShardOffset, read: Mapping[str, int]
) -> None:
    """Check that files have not changed since they were read. `read` are the sizes of files when they
    were read, which may be after a repair, and so later than their batch was planned. Raises
    `LogsError`.
    """
    now = sizes_of(path, shard, at.read_of(names))
    changed = [name for name in now if name in read and read[name] != now[name]]
    changed += at.changed({name: size for name, size in now.items() if name not in read})
    for name in changed[:1]:
        if at.complete:
            raise LogsError(
                f"tidegauge: the folder of shard {shard!r} in {path!r} was complete, and {name!r} in it "
                f"has changed since: it has {now[name]} bytes now. Added or replaced rows are not read, "
                f"and nothing may follow in a complete folder: its shard is final. Restore the file, or "
                f"remove it, and put new rows into the folder of a shard that is not final; then start "
                f"the query again from its checkpoint"
            )
        raise LogsError(
            f"tidegauge: {name!r} of shard {shard!r} in {path!r} was read, and has changed since: it "
            f"has {now[name]} bytes now. Added or replaced rows are not read. Write a "
            f"file under a name that begins with a dot, and rename it once it is complete. Put the new "
            f"rows into a file that sorts after {at.last!r}, and remove this one; then start the query "
            f"again from its checkpoint"
        )


def files_of_batch(path: str, start: LogsOffset, end: LogsOffset) -> dict[str, list[str]]:
    """Return the files of a batch, by shard: the same in every call. Raises `LogsError`."""
    listing: Listing = list_folders(path)
    found: dict[str, list[str]] = {}
    for shard, until in end.shards.items():
        since = start.of(shard)
        wanted = until.files - since.files
        files = since.batch(listing.get(shard, ()), until) if wanted else []
        if files is None:
            raise LogsError(
                f"tidegauge: a batch that Spark has planned reads {wanted} files of shard {shard!r} in "
                f"{path!r}, after {since.last!r} and up to {until.last!r}, and some of them are "
                f"missing. A "
                f"file may be deleted once the query has read past it. Put them back, and start the "
                f"query again"
            )
        if files:
            found[shard] = files
    return found
