"""Charts as SVG: lines and points over logarithmic or linear axes, readable on light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Final

WIDTH: Final = 640
HEIGHT: Final = 360
COLOURS: Final = ("#00897b", "#e65100", "#5c6bc0", "#8e24aa")
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 34, 44
_STYLE: Final = """
    text { font: 12px sans-serif; fill: #888 }
    .title { font-weight: bold }
    .axis { stroke: #888; fill: none }
    .grid { stroke: #888; stroke-opacity: .25; fill: none }
    .guide { stroke: #888; fill: none; stroke-dasharray: 4 3 }
"""

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis from `low` to `high`."""

    title: str
    low: float
    high: float
    ticks: Sequence[float]
    logarithmic: bool = True

    def place(self, value: float) -> float:
        """Return the place of a value: 0 at the low end, 1 at the high one.

        >>> Axis("", 1, 100, ()).place(10), Axis("", 0, 4, (), logarithmic=False).place(1)
        (0.5, 0.25)
        """
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = (math.log10(each) for each in (low, high, max(value, low)))
        return (min(value, high) - low) / (high - low)


@dataclass(frozen=True, slots=True)
class Series:
    """A line, or points, of one colour."""

    title: str
    points: Points
    colour: str
    line: bool = True
    hollow: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart, with dashed guides behind its series."""

    title: str
    across: Axis
    up: Axis
    series: Sequence[Series]
    guides: Sequence[Points] = field(default_factory=tuple[Points, ...])

    def svg(self) -> str:
        """Return the text of the file."""
        lines = "\n".join([*self._axes(), *self._series()])
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">\n'
            f"<title>{escape(self.title)}</title>\n<style>{_STYLE}</style>\n{lines}\n</svg>\n"
        )

    def _x(self, value: float) -> float:
        return round(_LEFT + self.across.place(value) * (WIDTH - _LEFT - _RIGHT), 1)

    def _y(self, value: float) -> float:
        return round(HEIGHT - _BOTTOM - self.up.place(value) * (HEIGHT - _TOP - _BOTTOM), 1)

    def _axes(self) -> Iterator[str]:
        left, bottom = _LEFT, HEIGHT - _BOTTOM
        for tick in self.across.ticks:
            at = self._x(tick)
            yield f'<path class="grid" d="M{at} {_TOP}V{bottom}"/>'
            yield _text(at, bottom + 16, number(tick), "middle")
        for tick in self.up.ticks:
            at = self._y(tick)
            yield f'<path class="grid" d="M{left} {at}H{WIDTH - _RIGHT}"/>'
            yield _text(left - 6, at + 4, number(tick), "end")
        yield f'<path class="axis" d="M{left} {_TOP}V{bottom}H{WIDTH - _RIGHT}"/>'
        yield _text((left + WIDTH - _RIGHT) / 2, HEIGHT - 8, self.across.title, "middle")
        yield _text(6, 16, self.up.title, "start")

    def _series(self) -> Iterator[str]:
        for guide in self.guides:
            yield f'<polyline class="guide" points="{self._joined(guide)}"/>'
        for place, each in enumerate(self.series):
            if each.line:
                yield (
                    f'<polyline fill="none" stroke="{each.colour}" stroke-width="2"'
                    f' points="{self._joined(each.points)}"/>'
                )
            for across, up in each.points if not each.line else ():
                fill = "none" if each.hollow else each.colour
                yield (
                    f'<circle cx="{self._x(across)}" cy="{self._y(up)}" r="3.5" fill="{fill}"'
                    f' stroke="{each.colour}"/>'
                )
            at = _TOP + 14 + 16 * place
            yield f'<rect x="{_LEFT + 10}" y="{at - 8}" width="10" height="8" fill="{each.colour}"/>'
            yield _text(_LEFT + 26, at, each.title, "start")

    def _joined(self, points: Points) -> str:
        return " ".join(f"{self._x(across)},{self._y(up)}" for across, up in points)


def number(value: float) -> str:
    """Write a number of an axis.

    >>> number(10), number(1_000), number(2_500_000), number(0.5)
    ('10', '1,000', '2.5 M', '0.5')
    """
    return f"{value / 1e6:g} M" if value >= 1e6 else f"{value:,g}"


def _text(at: float, up: float, text: str, anchor: str) -> str:
    return f'<text x="{at:g}" y="{up:g}" text-anchor="{anchor}">{escape(text)}</text>'
