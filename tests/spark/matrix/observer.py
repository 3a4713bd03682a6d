"""A reader that believes nobody: it asks the service for watermarks and looks at what files come.

It knows neither the agent nor Spark. Each turn it first asks for the watermarks, and then lists the
files that are there. A file that one turn does not find and the next one does, came after the first
one had been told its watermark: a row in it that is older was promised not to come.
"""

from __future__ import annotations

import json
import re
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Hashable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, Self
from urllib.parse import unquote, urlparse

from tests.spark.matrix.data import iso

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_PAUSE_S: Final = 0.015
_FIRST: Final = re.compile(r',"on_time":true,"version":[0-9]+}$')
"""The firing of a row; one of a correction stays, and is not expected."""


def stamp_ms(line: str, column: str) -> int | None:
    """The time of a row of JSON, in ms; None if it has none. A dot leads into a structure.

    >>> stamp_ms('{"window": {"end": "1970-01-01T00:00:01.500Z"}}', "window.end")
    1500
    """
    value: Any = json.loads(line)
    for name in column.split("."):
        value = value.get(name) if value is not None else None
    if value is None:
        return None
    return (datetime.fromisoformat(value) - _EPOCH) // timedelta(milliseconds=1)


class Piece(Hashable, Protocol):
    """A piece of an output: a file, or a row of a topic."""

    @property
    def name(self) -> str:
        """Its name, for people."""
        ...

    def __lt__(self, other: Any, /) -> bool: ...


class Watched(Protocol):
    """The output of one stage."""

    def committed(self) -> AbstractSet[Piece]:
        """Every piece that a reader may read now. Raises `ConnectionError` if it cannot be read."""
        ...

    def stamps_ms(self, piece: Any, /) -> list[int]:
        """The times of a piece's rows."""
        ...


@dataclass
class Output:
    """The files of one stage, and the column of theirs that carries event time downstream.

    `logged`: they are a file sink's, and are there once its log says so. Else each file is there
    when it has got its name.
    """

    folder: Path
    stamp: str
    logged: bool = True
    fires: bool = False
    """Its rows have the columns of their firing, and each is the first one."""
    _logged: dict[str, list[Path]] = field(default_factory=dict[str, list[Path]])

    def committed(self) -> set[Path]:
        """Every file that a reader may read now."""
        if not self.logged:
            return {path for path in self.folder.glob("*.json") if path.name[0] not in "._"}
        for entry in self.folder.glob("_spark_metadata/[0-9]*"):
            if entry.name not in self._logged:
                self._logged[entry.name] = _paths(entry)
        return {path for paths in self._logged.values() for path in paths}

    def lines(self) -> Counter[str]:
        """Every row that a reader may read now, as it was written, but without its firing."""
        lines = Counter(line for path in self.committed() for line in _lines(path))
        if not self.fires:
            return lines
        found = Counter({_FIRST.sub("}", line): times for line, times in lines.items()})
        assert found.total() == lines.total(), "a window fires on time once"
        return found

    def stamps_ms(self, path: Path) -> list[int]:
        """The times of a file's rows."""
        found = (stamp_ms(line, self.stamp) for line in _lines(path))
        return [ms for ms in found if ms is not None]


@dataclass(frozen=True)
class Violation:
    """A row that came although a reader had been told that nothing so old would come."""

    stage: str
    row_ms: int
    watermark_ms: int
    file: str

    def __str__(self) -> str:
        return (
            f"{self.stage}: a row of {iso(self.row_ms)} came in {self.file} after a reader had "
            f"seen the watermark {_shown(self.watermark_ms)}"
        )


class Observer:
    """Watches a job's outputs by stage, on a thread of its own while used as a context manager."""

    def __init__(self, url: str, job: str, outputs: Mapping[str, Watched]) -> None:
        self._url = f"{url}/v1/jobs/{job}/watermarks"
        self._outputs = outputs
        self._known = {stage: output.committed() for stage, output in outputs.items()}
        self._told: dict[str, int] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="observer", daemon=True)
        self.seen: dict[str, int] = {}
        """The greatest output watermark of each stage that it has been told, in ms."""
        self.inputs: dict[str, int] = {}
        """Likewise the greatest input watermark."""
        self.turns = 0
        self.judged: Counter[str] = Counter()
        """Rows that came after a watermark of their stage had been seen."""
        self.violations: list[Violation] = []
        self.error: BaseException | None = None

    def turn(self) -> None:
        """Ask, then look. What is new is judged by what the turn before had been told."""
        told = self._ask()
        try:
            committed = {stage: output.committed() for stage, output in self._outputs.items()}
        except ConnectionError:
            # An answer counts only together with a look that came after it.
            return
        for stage, found in committed.items():
            for piece in sorted(found - self._known[stage]):
                self._judge(stage, piece)
            self._known[stage] = found
        self._told |= told
        self.turns += 1

    def _judge(self, stage: str, piece: Piece) -> None:
        if (promised := self._told.get(stage)) is None:
            return
        for row_ms in self._outputs[stage].stamps_ms(piece):
            self.judged[stage] += 1
            if row_ms < promised:
                self.violations.append(Violation(stage, row_ms, promised, piece.name))

    def _ask(self) -> dict[str, int]:
        try:
            with urllib.request.urlopen(self._url, timeout=10) as answer:
                found = json.load(answer)["watermarks"]
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return {}  # nobody has declared the job yet
            raise
        for kind, greatest in (("output", self.seen), ("input", self.inputs)):
            for stage, watermark in found.items():
                if (ms := watermark[f"{kind}_watermark"]) is not None:
                    greatest[stage] = max(ms, greatest.get(stage, ms))
        return {stage: self.seen[stage] for stage in self._outputs if stage in self.seen}

    def _watch(self) -> None:
        try:
            while not self._end.wait(_PAUSE_S):
                self.turn()
        except BaseException as error:  # noqa: BLE001  (whoever stops it is told)
            self.error = error

    def check(self) -> None:
        """Raise if it has stopped watching, or has seen a row that was promised not to come."""
        if self.error is not None:
            raise AssertionError("the observer has failed") from self.error
        first = "\n".join(str(violation) for violation in self.violations[:10])
        assert not self.violations, f"{len(self.violations)} rows came too late:\n{first}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end.set()
        self._thread.join(30)
        if error is None and self.error is None:
            self.turn()


def _paths(entry: Path) -> list[Path]:
    """The files that one entry of a file sink's log adds: a line for the version, one for each."""
    try:
        lines = entry.read_text().splitlines()[1:]
    except FileNotFoundError:  # compacted meanwhile: the entry that has taken it in is there
        return []
    return [Path(unquote(urlparse(json.loads(line)["path"]).path)) for line in lines]


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line]


def _shown(ms: int) -> str:
    return iso(ms) if ms < 2**47 else "of the end of time"
