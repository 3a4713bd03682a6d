"""Tables for a terminal of any width, and for pipes and files, where a table is whole.

A table that is too wide makes concessions, in this order: its empty columns are left out, its names are
shortened, its instants lose their milliseconds, and its columns of the highest ranks are left out. The
time of day always stays.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Final, Literal

from rich.cells import cell_len
from rich.text import Text

_GAP: Final = "  "
_ELLIPSIS: Final = "…"
_MILLISECONDS: Final = re.compile(r"(\d\d:\d\d:\d\d)\.\d+Z")


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its heading, and the concessions that it makes to a narrow terminal."""

    heading: str
    rank: int = 0
    """Rank 0 is always shown. Of the others, a lower rank is shown before a higher one."""
    kind: Literal["name", "text", "value"] = "value"
    """A name is shortened in its middle, a text at its end, a value never."""
    right: bool = False
    """True: aligned to the right."""
    least: int = 14
    """Width down to which a name or a text is shortened."""


Cells = Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class _Layout:
    """Columns to show, by their numbers, with the widths of all columns and the text of all cells."""

    shown: Sequence[int]
    widths: Sequence[int]
    cells: Cells


def plain(cell: object) -> Text:
    """Return a foreign name as text that neither is markup nor controls a terminal."""
    shown = " ".join(str(cell).splitlines())
    return Text("".join(each if each.isprintable() else "\ufffd" for each in shown))


def table_lines(
    columns: Sequence[Column],
    rows: Iterable[Sequence[object]],
    width: int | None = None,
    styles: Iterable[str | None] = repeat(None),
) -> list[Text]:
    """Return the heading and the rows of a table as lines of at most `width` cells. None: any width.

    A terminal that is too narrow for the columns of rank 0 gets longer lines.
    """
    layout = _layout(columns, [[plain(cell).plain for cell in row] for row in rows], width)
    heading = _line(columns, layout, [column.heading for column in columns], "bold")
    lines = zip(layout.cells, styles, strict=False)
    return [heading, *(_line(columns, layout, cells, style or "") for cells, style in lines)]


def left_out(
    columns: Sequence[Column], rows: Iterable[Sequence[object]], width: int | None
) -> Sequence[str]:
    """Return the headings of the columns with text for which a terminal is too narrow.

    >>> left_out([Column("stage"), Column("holder", 1)], [["taps", "driver-1"]], 10)
    ['holder']
    """
    cells = [[plain(cell).plain for cell in row] for row in rows]
    shown = _layout(columns, cells, width).shown
    filled = _filled(columns, cells)
    return [columns[each].heading for each in filled if each not in shown]


def _line(columns: Sequence[Column], layout: _Layout, cells: Sequence[str], style: str) -> Text:
    parts: list[str] = []
    for number in layout.shown:
        column, width = columns[number], layout.widths[number]
        text = shorten(cells[number], width, column.kind)
        space = " " * (width - cell_len(text))
        parts.append(space + text if column.right else text + space)
    return Text(_GAP.join(parts).rstrip(), style, no_wrap=True, overflow="ignore")


def shorten(text: str, width: int, kind: Literal["name", "text", "value"]) -> str:
    """Shorten a name in its middle, and a text at its end.

    The ends of names differ more often than their middles: shards are numbered.

    >>> shorten("mobile-events-0007", 12, "name"), shorten("it is at the limit", 12, "text")
    ('mobile…-0007', 'it is at th…')
    >>> shorten("2026-01-01T00:00:00Z", 12, "value")
    '2026-01-01T00:00:00Z'
    """
    if kind == "value" or cell_len(text) <= width:
        return text
    is_wide = cell_len(text) != len(text)
    if kind == "text" or is_wide:
        whole = Text(text)
        whole.truncate(width, overflow="ellipsis")
        return whole.plain
    tail = (width - 1) // 2
    return f"{text[: width - 1 - tail]}{_ELLIPSIS}{text[len(text) - tail :]}"


def _layout(columns: Sequence[Column], cells: Cells, width: int | None) -> _Layout:
    natural = _natural(columns, cells)
    if width is None or _total(natural) <= width:
        return _Layout(range(len(columns)), natural, cells)
    filled = _filled(columns, cells)
    in_seconds = [[_MILLISECONDS.sub(r"\1Z", cell) for cell in row] for row in cells]
    for form in (cells, in_seconds):
        natural = _natural(columns, form)
        least = _least(columns, natural)
        if _total([least[each] for each in filled]) <= width:
            return _Layout(filled, _grown(filled, least, natural, width), form)
    natural = _natural(columns, in_seconds)
    least = _least(columns, natural)
    shown = _chosen(columns, filled, least, width)
    return _Layout(shown, _grown(shown, least, natural, width), in_seconds)


def _filled(columns: Sequence[Column], cells: Cells) -> Sequence[int]:
    """Return the columns that are always shown or have any text."""
    return [
        number
        for number, column in enumerate(columns)
        if not column.rank or any(row[number] for row in cells)
    ]


def _natural(columns: Sequence[Column], cells: Cells) -> list[int]:
    return [
        max(cell_len(column.heading), *(cell_len(row[number]) for row in cells), 0)
        for number, column in enumerate(columns)
    ]


def _least(columns: Sequence[Column], natural: Sequence[int]) -> list[int]:
    return [
        width if column.kind == "value" else min(width, max(column.least, cell_len(column.heading)))
        for column, width in zip(columns, natural, strict=True)
    ]


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(_GAP) * (len(widths) - 1)


def _chosen(
    columns: Sequence[Column], filled: Sequence[int], least: Sequence[int], width: int
) -> Sequence[int]:
    """Return the columns that fit, in their order: one that does not leaves room for later ones."""
    chosen: list[int] = []
    for number in sorted(filled, key=lambda each: columns[each].rank):
        fits = _total([*(least[each] for each in chosen), least[number]]) <= width
        if fits or not columns[number].rank:
            chosen.append(number)
    return sorted(chosen)


def _grown(
    shown: Sequence[int],
    least: Sequence[int],
    natural: Sequence[int],
    width: int,
) -> list[int]:
    """Return the widths, after names and texts have got the space that is left, the narrowest first."""
    widths = list(least)
    spare = width - _total([widths[each] for each in shown])
    growing = {each for each in shown if least[each] < natural[each]}
    while spare > 0 and growing:
        narrowest = min(growing, key=lambda each: (widths[each], each))
        widths[narrowest] += 1
        spare -= 1
        if widths[narrowest] == natural[narrowest]:
            growing.remove(narrowest)
    return widths
