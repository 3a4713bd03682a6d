"""Tables for a terminal of any width, and for pipes and files, where a table is whole.

A table that is too wide makes concessions, in this order: its empty columns are left out, and those that
have their usual value in each row; its sentences are wrapped, or follow below their rows; its names are
shortened; its instants lose their milliseconds; and its columns of the highest ranks are left out. The
time of day always stays.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Final, Literal

from rich.cells import cell_len, chop_cells
from rich.text import Text

_GAP: Final = "  "
_INDENT: Final = "    "
_ELLIPSIS: Final = "…"
_MILLISECONDS: Final = re.compile(r"(\d\d:\d\d:\d\d)\.\d+Z")


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its heading, and the concessions that it makes to a narrow terminal."""

    heading: str
    rank: int = 0
    """Rank 0 is always shown. Of the others, a lower rank is shown before a higher one."""
    kind: Literal["name", "text", "sentence", "value"] = "value"
    """A name is shortened in its middle, a text at its end, a sentence and a value never. A sentence is
    wrapped in the last column, or follows below its row."""
    right: bool = False
    """True: aligned to the right."""
    least: int = 14
    """Width down to which a name or a text is shortened, and a sentence is wrapped."""
    usual: str = ""
    """The value for which the column is left out, if each row has it."""
    needs: str = ""
    """The heading of the column beside which this one is shown. Empty: none."""


Cells = Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class _Layout:
    """Columns to show, by their numbers, with the widths of all columns and the text of all cells."""

    shown: Sequence[int]
    widths: Sequence[int]
    cells: Cells
    below: Sequence[int] = ()
    """Sentences that follow below their rows."""
    width: int | None = None
    """Width of the terminal."""


def plain(cell: object) -> Text:
    """Return a foreign name as text that neither is markup nor controls a terminal."""
    shown = " ".join(str(cell).splitlines())
    return Text("".join(_shown(each) for each in shown))


def _shown(character: str) -> str:
    if character.isspace():
        return " "
    # Joins the parts of one emoji, and letters of some scripts.
    is_shown = character.isprintable() or character == "\u200d"
    return character if is_shown else "\ufffd"


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
    return [heading, *(line for row in lines for line in _row_lines(columns, layout, *row))]


def left_out(
    columns: Sequence[Column], rows: Iterable[Sequence[object]], width: int | None
) -> Sequence[str]:
    """Return the headings of the columns with text for which a terminal is too narrow.

    >>> left_out([Column("stage"), Column("holder", 1)], [["taps", "driver-1"]], 10)
    ['holder']
    """
    cells = [[plain(cell).plain for cell in row] for row in rows]
    layout = _layout(columns, cells, width)
    filled = _filled(columns, cells)
    shown = {*layout.shown, *layout.below}
    return [columns[each].heading for each in filled if each not in shown]


def _row_lines(
    columns: Sequence[Column], layout: _Layout, cells: Sequence[str], style: str | None
) -> Iterator[Text]:
    """Yield a row, its wrapped sentence in the last column, and its sentences below."""
    last = layout.shown[-1]
    first, *more = cells[last], *()
    if columns[last].kind == "sentence":
        first, *more = wrap(cells[last], layout.widths[last]) or [""]
    yield _line(columns, layout, [*cells[:last], first, *cells[last + 1 :]], style or "")
    indent = sum(layout.widths[each] + len(_GAP) for each in layout.shown[:-1])
    for line in more:
        yield _whole_line(" " * indent + line, style)
    if layout.width is not None:
        below = [f"{columns[each].heading}: {cells[each]}" for each in layout.below if cells[each]]
        for line in wrap("; ".join(below), layout.width - len(_INDENT)):
            yield _whole_line(_INDENT + line, style)


def _whole_line(text: str, style: str | None) -> Text:
    return Text(text, style or "", no_wrap=True, overflow="ignore")


def wrap(text: str, width: int) -> list[str]:
    """Wrap a text into lines; a word that is longer than a line is divided.

    >>> wrap("run 7 of taps, by driver-1", 12), wrap("", 12)
    (['run 7 of', 'taps, by', 'driver-1'], [])
    """
    lines: list[str] = []
    for word in text.split():
        if lines and cell_len(f"{lines[-1]} {word}") <= width:
            lines[-1] = f"{lines[-1]} {word}"
        else:
            lines.extend(chop_cells(word, max(width, 1)))
    return lines


def _line(columns: Sequence[Column], layout: _Layout, cells: Sequence[str], style: str) -> Text:
    parts: list[str] = []
    for number in layout.shown:
        column, width = columns[number], layout.widths[number]
        text = shorten(cells[number], width, column.kind)
        space = " " * (width - cell_len(text))
        parts.append(space + text if column.right else text + space)
    return _whole_line(_GAP.join(parts).rstrip(), style)


def shorten(text: str, width: int, kind: Literal["name", "text", "sentence", "value"]) -> str:
    """Shorten a name in its middle, and a text at its end.

    The ends of names differ more often than their middles: shards are numbered.

    >>> shorten("mobile-events-0007", 12, "name"), shorten("it is at the limit", 12, "text")
    ('mobile…-0007', 'it is at th…')
    >>> shorten("2026-01-01T00:00:00Z", 12, "value")
    '2026-01-01T00:00:00Z'
    """
    if kind in {"sentence", "value"} or cell_len(text) <= width:
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
    in_seconds = [[_MILLISECONDS.sub(r"\1Z", cell) for cell in row] for row in cells]
    filled = _filled(columns, cells)
    below = _below(columns, filled, _natural(columns, in_seconds), width)
    beside = [each for each in filled if each not in below]
    has_sentences = any(columns[each].kind == "sentence" for each in filled)
    for form in (in_seconds,) if has_sentences else (cells, in_seconds):
        natural = _natural(columns, form)
        least = _least(columns, natural, beside[-1])
        if _total([least[each] for each in beside]) <= width:
            widths = _grown(columns, beside, least, natural, width)
            return _Layout(beside, widths, form, below, width)
    natural = _natural(columns, in_seconds)
    least = _least(columns, natural, beside[-1])
    shown = _chosen(columns, beside, least, width)
    return _Layout(shown, _grown(columns, shown, least, natural, width), in_seconds, below, width)


def _filled(columns: Sequence[Column], cells: Cells) -> Sequence[int]:
    """Return the columns that are always shown, or have any text that is not the usual one."""
    return [
        number
        for number, column in enumerate(columns)
        if not (column.rank or column.usual)
        or any(row[number] not in {"", column.usual} for row in cells)
    ]


def _below(
    columns: Sequence[Column], filled: Sequence[int], natural: Sequence[int], width: int
) -> Sequence[int]:
    """Return the sentences that follow below their rows, so that names are whole: those of the highest
    ranks first. The last column may be wrapped instead.
    """
    below: list[int] = []
    sentences = [each for each in filled if columns[each].kind == "sentence"]
    for number in sorted(sentences, key=lambda each: columns[each].rank, reverse=True):
        beside = [each for each in filled if each not in below]
        widths = _wrapped(columns, natural, beside[-1])
        if _total([widths[each] for each in beside]) <= width:
            break
        below.append(number)
    return sorted(below)


def _wrapped(columns: Sequence[Column], natural: Sequence[int], last: int) -> list[int]:
    """Return the widths if a sentence in the last column is wrapped."""
    widths, column = list(natural), columns[last]
    if column.kind == "sentence":
        widths[last] = min(widths[last], max(column.least, cell_len(column.heading)))
    return widths


def _natural(columns: Sequence[Column], cells: Cells) -> list[int]:
    return [
        max(cell_len(column.heading), *(cell_len(row[number]) for row in cells), 0)
        for number, column in enumerate(columns)
    ]


def _least(columns: Sequence[Column], natural: Sequence[int], last: int) -> list[int]:
    return [
        min(width, max(column.least, cell_len(column.heading)))
        if column.kind in {"name", "text"}
        else width
        for column, width in zip(columns, _wrapped(columns, natural, last), strict=True)
    ]


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(_GAP) * (len(widths) - 1)


def _chosen(
    columns: Sequence[Column], filled: Sequence[int], least: Sequence[int], width: int
) -> Sequence[int]:
    """Return the columns that fit, in their order: one that does not leaves room for later ones."""
    chosen: list[int] = []
    for number in sorted(filled, key=lambda each: columns[each].rank):
        column = columns[number]
        fits = _total([*(least[each] for each in chosen), least[number]]) <= width
        is_alone = column.needs and column.needs not in {columns[each].heading for each in chosen}
        if (fits and not is_alone) or not column.rank:
            chosen.append(number)
    return sorted(chosen)


def _grown(
    columns: Sequence[Column],
    shown: Sequence[int],
    least: Sequence[int],
    natural: Sequence[int],
    width: int,
) -> list[int]:
    """Return the widths, after names and texts have got the space that is left, the narrowest first, and
    then a sentence.
    """
    widths = list(least)
    spare = width - _total([widths[each] for each in shown])
    growing = {each for each in shown if least[each] < natural[each]}
    while spare > 0 and growing:
        narrowest = min(
            growing, key=lambda each: (columns[each].kind == "sentence", widths[each], each)
        )
        widths[narrowest] += 1
        spare -= 1
        if widths[narrowest] == natural[narrowest]:
            growing.remove(narrowest)
    return widths
