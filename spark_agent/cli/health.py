"""Health and problems for the terminal, in the service's words. Does not import Spark."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from rich.text import Text

from spark_agent.client.client import Client
from spark_agent.client.errors import Refused
from spark_agent.client.responses import (
    Health,
    JobSummary,
    ProblemLine,
    RangeAnswer,
    WatermarkAnswer,
)

_WORST_FIRST: Final[Sequence[Health]] = (
    "unpublished", "failed", "no_worker", "silent", "stalled", "waiting", "ok", "idle", "ended", "final",
)  # fmt: skip
_BAD: Final = frozenset({"unpublished", "failed", "no_worker"})
_POOR: Final = frozenset({"silent", "stalled", "waiting"})
_NEEDS_NO_WORKER: Final = frozenset({"ended", "waiting"})
"""Healths of stages whose ranges without a holder are of a run that has finished. While the run goes on,
such a range makes the stage *no worker*."""


def problems_of(client: Client, job: str) -> Sequence[ProblemLine]:
    """Return the problems of a job. An older service lacks them: the result is empty then."""
    try:
        return client.job_problems(job)["problems"]
    except Refused:
        return ()


Throttled = Mapping[str, frozenset[str]]
"""The throttled shards of each source that has any."""


def throttled_shards(client: Client, job: str) -> Throttled:
    """Return the throttled shards of a job."""
    return {
        stage: frozenset(shards)
        for stage, shards in client.throttle(job)["shards"].items()
        if shards
    }


def worst(healths: Iterable[Health | None]) -> Health | None:
    """Return the worst of some healths; None: all are unknown.

    >>> worst(["ok", "no_worker", None]), worst([None]) is None
    ('no_worker', True)
    """
    reported = {each for each in healths if each}
    return next((each for each in _WORST_FIRST if each in reported), None)


def badness(health: Health | None) -> int:
    """Return the rank of a health, the worst first.

    >>> badness("failed") < badness(None) == badness("ok")
    True
    """
    return _WORST_FIRST.index(health or "ok")


def health_text(health: str | None) -> str:
    """Write a health as text.

    >>> health_text("no_worker"), health_text(None)
    ('no worker', 'unknown')
    """
    return "unknown" if health is None else health.replace("_", " ")


def style_of(health: str | None) -> str | None:
    """Return the colour in which a health is shown; None: the terminal's own."""
    if health in _BAD:
        return "red"
    return "yellow" if health in _POOR else None


def stage_text(stage: WatermarkAnswer | JobSummary, throttled: int = 0) -> str:
    """Write the condition of a stage: its status if the health is `ok` or unknown, else its health.

    Retired ranges and throttled shards are not a health, and are named behind it.

    >>> stage_text({"status": "active", "health": "no_worker"}), stage_text({"status": "active"})
    ('no worker', 'active')
    >>> stage_text({"status": "active", "ranges": {"retired": 2}}, throttled=1)
    'active, retired 2, throttled 1'

    A stage below an input that has ended, and a job whose slowest stage has ended, do not move.

    >>> stage_text({"status": "active", "input_ended": True})
    'active, input ended'
    >>> stage_text({"status": "active", "health": "ok", "slowest": "taps", "slowest_ended": True})
    'active, taps has ended'

    A range that reports again, after its retirement has made the stage final, is late.

    >>> stage_text({"status": "final", "late_ranges": 1, "ranges": {"retired": 1}})
    'final, late ranges 1, retired 1'
    """
    health = stage.get("health")
    is_sound = health in {None, "ok"}
    word = stage["status"] if is_sound else health_text(health)
    ended = ["input ended"] if stage.get("input_ended") else []
    if is_sound and stage.get("slowest_ended"):
        ended = [f"{stage.get('slowest')} has ended"]
    retired = stage.get("ranges", {}).get("retired", 0)
    late = stage.get("late_ranges", 0)
    marks = [(late, _LATE), (retired, "retired"), (throttled, "throttled")]
    return ", ".join([word, *ended, *(f"{mark} {count:,}" for count, mark in marks if count)])


_LATE: Final = "late ranges"


def late_text(count: int) -> str:
    """Write the number of late ranges, as `stage_text` does.

    >>> late_text(1_200)
    'late ranges 1,200'
    """
    return f"{_LATE} {count:,}"


def range_text(
    each: RangeAnswer, stage_health: str | None, throttled: frozenset[str] = frozenset()
) -> str:
    """Write the condition of a range. A range without a holder is not active, whatever its promise.

    `throttled`: the throttled shards of the stage.

    >>> held = {"status": "active", "holder": "w"}
    >>> range_text(held, "no_worker"), range_text(held | {"holder": None}, "no_worker")
    ('active', 'no worker')
    >>> range_text(held | {"holder": None}, "ended"), range_text(held | {"holder": None}, "waiting")
    ('ended', 'ended')
    >>> range_text(held | {"status": "final", "retired": True}, "ok")
    'retired'
    >>> unknown = held | {"status": "unknown"}
    >>> range_text(unknown | {"reported_at": None}, "silent")
    'never reported'
    >>> range_text(unknown | {"reported_at": "2026-01-01T00:00:00.000Z"}, "ok")
    'no promise yet'
    >>> range_text(held | {"stalled": True}, "stalled")
    'stalled'

    A throttled reader that is active is shown as throttled, any other one as throttled besides.

    >>> fast = held | {"range": "fast-0"}
    >>> range_text(fast, "ok", frozenset({"fast-0"}))
    'throttled'
    >>> range_text(fast | {"holder": None}, "ended", frozenset({"fast-0"}))
    'ended, throttled'
    """
    condition = _condition(each, stage_health)
    if not throttled or each["range"] not in throttled:
        return condition
    return "throttled" if condition == "active" else f"{condition}, throttled"


def _condition(each: RangeAnswer, stage_health: str | None) -> str:
    if each.get("retired"):
        return "retired"
    if each["status"] == "unknown":
        return "no promise yet" if each["reported_at"] else "never reported"
    if each["status"] != "active":
        return each["status"]
    if not each["holder"]:
        return "ended" if stage_health in _NEEDS_NO_WORKER else "no worker"
    return "stalled" if each.get("stalled") else "active"


def problem_lines(problems: Sequence[ProblemLine]) -> list[Text]:
    """Return the problems as lines, the worst first."""
    # As plain text: names may contain markup.
    return [Text(_line(each), style=style_of(each["health"]) or "") for each in problems]


def _line(problem: ProblemLine) -> str:
    held, later = problem["holds_back"], problem.get("holds_back_next", ())
    wait = "wait" if len(held) > 1 else "waits"
    waiting = f"; {', '.join(held)} {wait} for {problem['stage']}" if held else ""
    do = "do" if len(later) > 1 else "does"
    if later:
        waiting += f"; {', '.join(later)} {do} not wait for {problem['stage']} yet"
    single = problem["examples"] if problem["ranges"] == 1 else ()
    named = f" (range {single[0]})" if single else ""
    return f"{health_text(problem['health'])}: {problem['because']}{named}{waiting}"
