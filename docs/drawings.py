"""Drawings of the site: `python -m docs.drawings` writes them, and the tables of measured results.

Tests run Spark for the numbers of the output times.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from docs import scaling

FOLDER: Final = Path(__file__).parent
GAP: Final = 5
"""Minutes without a play that end a session."""
WINDOW: Final = 10
"""Minutes of a window of averages."""
STEPS: Final = (4, 8, 12, 16, 21, 24, 28, 34)
"""Input watermarks of the sessions, in minutes."""
PLAYS: Final = (
    ("console", "cid", (1, 5, 9, 13, 17)),
    ("mobile", "ann", (2, 4, 6)),
    ("mobile", "bob", (14, 16)),
)
"""Source, player, and the minutes of the plays: a session each."""


@dataclass(frozen=True, slots=True)
class Session:
    """A session, in minutes."""

    player: str
    start: int
    last: int

    @property
    def end(self) -> int:
        """The end of its window."""
        return self.last + GAP

    @property
    def length(self) -> int:
        """The minutes from the first play to the last."""
        return self.last - self.start

    def dated(self, output_time: str) -> int:
        """Return its output time."""
        return self.start if output_time == "earliest" else self.end


SESSIONS: Final = tuple(Session(player, times[0], times[-1]) for _, player, times in PLAYS)


def output_watermark(output_time: str, watermark: int) -> int:
    """Return the output watermark of the sessions, by their input watermark: to a millisecond.

    A row at the watermark may belong to a session, so a session comes out when the watermark is after
    its end.

    >>> [output_watermark("end_of_window", each) for each in STEPS]
    [4, 8, 12, 16, 21, 24, 28, 34]
    >>> [output_watermark("earliest", each) for each in STEPS]
    [-1, 1, 1, 1, 1, 19, 23, 29]
    """
    if output_time != "earliest":
        return watermark
    starts = [each.start for each in SESSIONS if each.start <= watermark <= each.end]
    return min([*starts, watermark - GAP])


def averages(output_time: str) -> Mapping[int, float]:
    """Return the mean length of the sessions in each window, by its start.

    >>> averages("end_of_window"), averages("earliest")
    ({10: 4.0, 20: 9.0}, {0: 10.0, 10: 2.0})
    """
    lengths: dict[int, list[int]] = {}
    for each in sorted(SESSIONS, key=lambda session: session.dated(output_time)):
        lengths.setdefault(each.dated(output_time) // WINDOW * WINDOW, []).append(each.length)
    return {start: sum(found) / len(found) for start, found in lengths.items()}


def fires_at(output_time: str, start: int) -> int:
    """Return the step at which a window of averages fires.

    >>> [fires_at("end_of_window", start) for start in (10, 20)]
    [21, 34]
    >>> [fires_at("earliest", start) for start in (0, 10)]
    [24, 28]
    """
    passed = (step for step in STEPS if output_watermark(output_time, step) >= start + WINDOW)
    return next(passed)


_WIDTH: Final = 360
_LEFT, _BOTTOM, _SCALE, _RISE = 46, 366, 8, 9
_TITLES: Final = {"end_of_window": "END_OF_WINDOW", "earliest": "EARLIEST"}
_STYLE: Final = """
    text { font: 11px sans-serif; fill: #888 }
    .title { font-weight: bold }
    .axis { stroke: #888; fill: none }
    .input { stroke: #888; fill: none; stroke-dasharray: 4 3 }
    .output { stroke: #00897b; fill: none; stroke-width: 2.5 }
    .session { fill: #5c6bc0; fill-opacity: .55 }
    .date { fill: #e65100 }
    .average { fill: #00897b; fill-opacity: .15; stroke: #00897b }
    .value { fill: #00897b; font-weight: bold }
"""


def output_times() -> str:
    """Return the drawing of two stages, sessions and averages, by two output times."""
    parts = [part for n, each in enumerate(_TITLES) for part in _panel(each, n * _WIDTH)]
    lines = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * _WIDTH} 406" role="img">\n'
        f"<title>Watermarks of sessions and averages, by two output times</title>\n"
        f"<style>{_STYLE}</style>\n{lines}\n</svg>\n"
    )


def _panel(output_time: str, left: int) -> Iterator[str]:
    def x(minute: float) -> float:
        return left + _LEFT + minute * _SCALE

    def y(step: float) -> float:
        return _BOTTOM - step * _RISE

    yield _text(x(17), 14, _TITLES[output_time], "title", "middle")
    yield f'<path class="axis" d="M{x(0)} {y(36)}V{y(0)}H{x(36)}"/>'
    for minute in (0, 10, 20, 30):
        yield _text(x(minute), y(0) + 15, f"12:{minute:02}", "", "middle")
        yield _text(x(0) - 4, y(minute) + 4, f"12:{minute:02}", "", "end")
    yield _text(x(18), y(0) + 32, "event time", "", "middle")
    yield _text(x(0) - 36, y(36) - 8, "input watermark of the sessions", "", "start")
    for start, value in averages(output_time).items():
        step = fires_at(output_time, start)
        yield (
            f'<rect class="average" x="{x(start)}" y="{y(step) - 18}" width="{WINDOW * _SCALE}" '
            f'height="18"/>'
        )
        yield _text(x(start + 5), y(step) - 5, f"average {value:g}", "value", "middle")
    for session in SESSIONS:
        step = next(each for each in STEPS if each > session.end)
        at = y(step) + 5 + 9 * (session.player == "cid")
        yield (
            f'<rect class="session" x="{x(session.start)}" y="{at}" '
            f'width="{(session.end - session.start) * _SCALE}" height="7"/>'
        )
        yield f'<circle class="date" cx="{x(session.dated(output_time))}" cy="{at + 3.5}" r="3.5"/>'
        yield _text(x(session.start) - 4, at + 7, session.player, "", "end")
    yield _line("input", [(x(step), y(step)) for step in STEPS])
    outputs = [(max(output_watermark(output_time, step), 0), step) for step in STEPS]
    yield _line("output", _steps([(x(minute), y(step)) for minute, step in outputs]))


def _steps(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the corners of a line that goes up, then to the right: watermarks advance by jumps."""
    found = [points[0]]
    for at, up in points[1:]:
        found += [(found[-1][0], up), (at, up)]
    return found


def _line(name: str, points: Sequence[tuple[float, float]]) -> str:
    joined = " ".join(f"{at:g},{up:g}" for at, up in points)
    return f'<polyline class="{name}" points="{joined}"/>'


def _text(at: float, up: float, text: str, name: str, anchor: str) -> str:
    return f'<text class="{name}" x="{at:g}" y="{up:g}" text-anchor="{anchor}">{text}</text>'


DRAWINGS: Final = {
    "spark/output-times.svg": output_times,
    "service/scaling-checks.svg": scaling.checks,
    "service/scaling-capacity.svg": scaling.capacity,
    "service/scaling-cores.svg": scaling.cores,
    "service/scaling-failures.svg": scaling.failures,
}
"""By path of the file: the function that draws it."""

if __name__ == "__main__":
    for path, draw in DRAWINGS.items():
        (FOLDER / path).write_text(draw())
    page = FOLDER / scaling.PAGE
    page.write_text(scaling.filled(page.read_text()))
