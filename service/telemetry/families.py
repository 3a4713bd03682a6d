"""Prometheus's text format for metrics that have the same labels in many families.

A stage has some forty series, all with its job and its name. These labels are escaped and written once
for each stage, while `prometheus_client` sorts, escapes and writes them for each series. With thousands
of stages, this is half of a scrape's processor time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import cast

from prometheus_client import utils

_to_go = cast("Callable[[float], str]", utils.floatToGoString)  # pyright: ignore[reportUnknownMemberType]
"""Writes a number as Go does, as in Prometheus's text: infinity is `+Inf`."""


class Labels:
    r"""Labels of a subject, such as a stage, as they are written: escaped, and sorted by name.

    >>> print(Labels({"stage": 'a"b', "job": "taxis"}))
    job="taxis",stage="a\"b"
    """

    __slots__ = ("_all", "_around", "_pairs")

    def __init__(self, values: Mapping[str, str]) -> None:
        self._pairs = {name: f'{name}="{_escaped(values[name])}"' for name in sorted(values)}
        self._all = ",".join(self._pairs.values())
        self._around: dict[str, tuple[str, str]] = {}

    def __str__(self) -> str:
        """Return all of them as they are written between braces."""
        return self._all

    def around(self, own: str) -> tuple[str, str]:
        """Return the text before and after a label with this name.

        >>> Labels({"job": "taxis", "stage": "in"}).around("kind")
        ('job="taxis",', ',stage="in"')
        """
        found = self._around.get(own)
        if found is None:
            before = "".join(f"{text}," for name, text in self._pairs.items() if name < own)
            after = "".join(f",{text}" for name, text in self._pairs.items() if name > own)
            found = self._around[own] = before, after
        return found


class Family:
    """A metric with its series.

    >>> lag = Family("lag_seconds", "gauge", "Lag of a stage", "kind")
    >>> lag.add(Labels({"stage": "in"}), 1.5, "input")
    >>> print(lag.text(), end="")
    # HELP lag_seconds Lag of a stage
    # TYPE lag_seconds gauge
    lag_seconds{kind="input",stage="in"} 1.5
    """

    def __init__(self, name: str, kind: str, about: str, label: str | None = None) -> None:
        """Begin a family whose series have one label of its own beside those of their subjects.

        The name of a counter ends with `_total`, as in the text.
        """
        self._name = name
        self._head = f"# HELP {name} {_escaped_help(about)}\n# TYPE {name} {kind}\n"
        self._label = label
        self._own: dict[str, Labels] = {}
        self._lines: list[str] = []

    def add(self, subject: Labels, value: float, own: str | None = None) -> None:
        """Add a series: its subject's labels, its value, and the value of the family's own label."""
        self._lines.append(f"{self._name}{{{self._labels(subject, own)}}} {_to_go(value)}\n")

    def text(self) -> str:
        """Return the family in the text format."""
        return self._head + "".join(self._lines)

    def _labels(self, subject: Labels, value: str | None) -> str:
        if self._label is None or value is None:
            return str(subject)
        own = self._own.get(value)
        if own is None:
            own = self._own[value] = Labels({self._label: value})
        before, after = subject.around(self._label)
        return f"{before}{own}{after}"


def text(families: Iterable[Family]) -> bytes:
    """Return families in the text format."""
    return "".join(each.text() for each in families).encode()


def _escaped(value: str) -> str:
    return _escaped_help(value).replace('"', r"\"")


def _escaped_help(about: str) -> str:
    return about.replace("\\", r"\\").replace("\n", r"\n")
