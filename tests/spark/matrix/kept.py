"""Rows of Spark's state, batch by batch: what is kept stays, until a batch takes it out.

Seen once, and not since: a start that loaded an empty snapshot of its state. Its windows never came
out, and nothing was counted. A cell compares each batch with the one before, also across starts, so
that the batch which lost the rows is known.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

_WINDOWS: Final = "stateStoreSave"
"""The operator of windows: it counts each row that it takes out. Sessions merge some uncounted."""


class KeptRows:
    """Compares the rows of a query's windows with the batch before; raises AssertionError.

    >>> kept, windows = KeptRows(), {"operatorName": "stateStoreSave"}
    >>> kept.check([{"stateOperators": [windows | {"numRowsTotal": 5, "numRowsRemoved": 0}]}])
    >>> kept.check([{"stateOperators": [windows | {"numRowsTotal": 3, "numRowsRemoved": 2}]}])
    >>> kept.check([{"stateOperators": [windows | {"numRowsTotal": 0, "numRowsRemoved": 0}]}])
    Traceback (most recent call last):
    AssertionError: state was lost: 3 rows before, 0 taken out, 0 left
    ...
    """

    def __init__(self) -> None:
        self._totals: dict[int, int] = {}
        self.compared = 0
        """Number of comparisons."""

    def check(self, batches: Iterable[Mapping[str, Any]]) -> None:
        """Go on with these progress events of a query, in their order."""
        for batch in batches:
            for number, operator in enumerate(batch["stateOperators"]):
                if operator["operatorName"] == _WINDOWS:
                    self._compare(number, operator, batch)

    def _compare(self, number: int, operator: Mapping[str, Any], batch: Mapping[str, Any]) -> None:
        was, total, removed = (
            self._totals.get(number, 0),
            operator["numRowsTotal"],
            operator["numRowsRemoved"],
        )
        assert total >= was - removed, (
            f"state was lost: {was} rows before, {removed} taken out, {total} left\n"
            f"{json.dumps(batch)}"
        )
        self._totals[number] = total
        self.compared += 1
