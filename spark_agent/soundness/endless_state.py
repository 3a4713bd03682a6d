"""Operators whose state grows for as long as their query runs."""

from __future__ import annotations

from spark_agent.jvm.nodes import Node


def endless_deduplications(plan: Node) -> list[str]:
    """Return a warning for each deduplication that keeps every key for ever."""
    return [
        f"dropDuplicates by {', '.join(key.name for key in node.keys)} keeps each key for ever, and the "
        f"state of the query grows without end, since the event time is not one of them. Add it, "
        f"if duplicates have the same one, or let Spark forget a key after a while: watermarked(…, "
        f"deduplicate_within='1 hour') and dropDuplicatesWithinWatermark"
        for node in plan.walk()
        if node.operator == "Deduplicate" and all(key.stamp is None for key in node.keys)
    ]
