"""The audit: the changes, with their authors, addresses and times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Action(StrEnum):
    """Actions that the audit records."""

    CREATE_JOB = "create-job"
    CHANGE_JOB = "change-job"
    RESET_JOB = "reset-job"
    DELETE_JOB = "delete-job"
    OPEN_RUN = "open-run"
    END_RUN = "end-run"
    RETIRE_RANGE = "retire-range"
    RETURN_RANGE = "return-range"
    """A retired range reports again."""
    CREATE_KEY = "create-key"
    REVOKE_KEY = "revoke-key"


ITSELF: Final = "the range itself"
"""Author of the end of a retirement: a report of the range. In older records, the author is empty."""

_RETURN: Final = "reports again"

SHOWN: Final = 1_000
"""Number of characters of a detail that are shown."""
_MOST: Final = 20_000
"""Number of characters of the detail of a specification, which names all stages that differ."""


@dataclass(frozen=True, slots=True)
class Actor:
    """Sender of a request: the name of the key, and the client's address."""

    name: str
    address: str


@dataclass(frozen=True, slots=True)
class Deed:
    """A change to be recorded in its own transaction."""

    action: Action
    by: Actor
    at_ms: int


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """A change that was made."""

    number: int
    """Rises with each record."""
    deed: Deed
    job: str | None
    key: str | None
    """The name of the key that was created or revoked."""
    detail: str
    """Description of the change, in a few words."""


def detail_of(stage: str, range_name: str, because: str) -> str:
    """Return the detail of a retirement, or of its end.

    >>> detail_of("taps", "taps-3", "the site is closed")
    'taps taps-3: the site is closed'
    """
    return f"{stage} {range_name}: {because}"


def specification_of(layout_version: int, differences: Mapping[str, str]) -> str:
    """Return the detail of a change of a specification. `differences`: in a few words, by stage.

    >>> specification_of(2, {"taps": "+ shard b", "v": "new"})
    'layout 2; taps: + shard b; v: new'

    Every stage that differs is named. Words beyond those that are shown are left out.

    >>> specification_of(2, {"taps": "+ shard b" * 1_000, "v": "new"})
    'layout 2; taps: changed; v: new'
    """
    parts, length = [f"layout {layout_version}"], 0
    for stage, words in differences.items():
        part = f"{stage}: {words}"
        is_shown = length + len(part) <= SHOWN
        parts.append(part if is_shown else f"{stage}: changed")
        length += len(parts[-1])
    return shortened("; ".join(parts), _MOST)


def shortened(detail: str, most: int = SHOWN) -> str:
    """Cut a detail that is too long.

    >>> shortened("run 7 of taps", 8)
    'run 7 o…'
    """
    return detail if len(detail) <= most else detail[: most - 1] + "…"


def differences_of(detail: str) -> Mapping[str, str]:
    """Return the differences in the detail of a change of a specification, in a few words, by stage;
    without those that were cut.

    >>> differences_of("layout 2; taps: + shard b; v: new")
    {'taps': '+ shard b', 'v': 'new'}
    """
    _, *parts = detail.split("; ")
    return {stage: words for stage, _, words in (part.partition(": ") for part in parts)}


def stages_of(detail: str) -> Sequence[str] | None:
    """Return the stages in the detail of a change of a specification; None: unknown, as in older records
    and in a detail that was cut, or all.

    >>> stages_of("layout 2; taps: + shard b; v: new"), stages_of("layout 2") is None
    (('taps', 'v'), True)
    """
    return None if detail.endswith("…") else tuple(differences_of(detail)) or None


def return_of(holder: str) -> str:
    """Return the reason in the detail of the end of a retirement. `holder`: of the lease that has
    reported; empty: unknown.

    >>> return_of("exec-3"), return_of("")
    ('reports again, by exec-3', 'reports again')
    """
    return f"{_RETURN}, by {holder}" if holder else _RETURN


def returned_by(because: str) -> str | None:
    """Return the holder in the reason of the end of a retirement; None: unknown.

    >>> returned_by("reports again, by exec-3"), returned_by("reports again")
    ('exec-3', None)
    """
    return because.removeprefix(_RETURN).removeprefix(", by ") or None


def parts_of(detail: str) -> tuple[str, str, str]:
    """Return the stage, the range and the reason in the detail of a retirement.

    >>> parts_of("taps taps-3: closed: for good")
    ('taps', 'taps-3', 'closed: for good')
    """
    # Names have neither blanks nor colons.
    names, _, because = detail.partition(": ")
    stage, _, range_name = names.partition(" ")
    return stage, range_name, because
