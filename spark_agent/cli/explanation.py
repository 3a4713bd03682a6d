"""An explanation of a watermark as a tree. Does not import Spark."""

from __future__ import annotations

from typing import Final

from rich.text import Text
from rich.tree import Tree

from spark_agent.cli.health import health_text, style_of
from spark_agent.client.responses import ExplainAnswer, HolderAnswer, RetiredAnswer
from spark_agent.times import duration_text, instant_text

_WAITS_FOR: Final = {
    "input": "waits for its input",
    "ranges": "waits for its ranges",
    "unpublished": "waits for a store to take its advance",
}
_RESTS: Final = {"ended": "has ended", "idle": "is idle", "final": "is final"}
"""Stages that do not wait, by their health."""


def explanation_tree(found: ExplainAnswer) -> Tree:
    """Return an explanation as a tree: the reason, the stages on the path, and the ranges."""
    since = f", unchanged since {found['since']}" if found["since"] else ""
    where = instant_text(found["output_watermark"])
    # As plain text throughout: names may contain markup.
    stands = found.get("health", "ok")
    shown = found["status"] if stands == "ok" else health_text(stands)
    root = Tree(Text(f"{found['stage']}: {where} ({shown}{since})", style=style_of(stands) or ""))
    reason = root.add(Text(found["because"]))
    if remedy := found.get("remedy"):
        reason.add(Text(remedy))
    branch = root
    for step in found["path"]:
        waits = _WAITS_FOR.get(step["reason"], f"is {step['reason']}")
        health = step.get("health", stands if step["stage"] == found["stage"] else "")
        branch = branch.add(Text(f"{step['stage']} {_RESTS.get(health, waits)}"))
    for holder in found["holders"]:
        leaf = branch.add(Text(f"{holder['range']}: {_reason(holder)}"))
        for line in _facts(holder):
            leaf.add(Text(line))
    more = found["holders_total"] - len(found["holders"])
    if more > 0:
        branch.add(Text(f"and {more:,} more: --limit"))
    for retired in found.get("retired", ()):
        root.add(Text(_retired(retired)))
    return root


def _retired(of: RetiredAnswer) -> str:
    """Write a retirement.

    >>> _retired({"stage": "taps", "range": "a", "because": "sold", "by": "ops", "since": "12:00Z"})
    'range a of taps is retired, since 12:00Z, by ops: sold'
    >>> _retired({"stage": "taps", "range": "a", "because": None, "by": None, "since": None})
    'range a of taps is retired'
    """
    since = f", since {of['since']}" if of["since"] else ""
    by = f", by {of['by']}" if of["by"] else ""
    because = f": {of['because']}" if of["because"] else ""
    return f"range {of['range']} of {of['stage']} is retired{since}{by}{because}"


def _reason(holder: HolderAnswer) -> str:
    component = holder.get("component")
    since = f", unchanged since {holder['since']}" if holder["since"] else ""
    named = f" by {component!r}" if component else ""
    return f"{_reason_text(holder['reason'])}{named}{since}"


def _reason_text(reason: str) -> str:
    """Write a reason in the words of the other views.

    >>> _reason_text("lease_expired"), _reason_text("never_reported")
    ('no worker', 'never reported')
    """
    return "no worker" if reason == "lease_expired" else reason.replace("_", " ")


def _facts(holder: HolderAnswer) -> list[str]:
    would_be = holder["would_be"]
    without = "" if would_be is None else f"; without it, {instant_text(would_be)}"
    reported = f", reported at {holder['reported_at']}" if holder["reported_at"] else ""
    left = holder["expires_in_ms"]
    lease = "" if left is None else f" (fence {holder['fence']}, {duration_text(left)} left)"
    return [
        f"promise {instant_text(holder['promise'])}{without}",
        f"holder {holder['holder'] or 'none'}{lease}{reported}",
    ]
