"""Every fault once, under load, on two replicas. `make chaos` does it five times, and mixed.

On a cluster, only what is different there. `python -m tests.chaos --live sentinel` (or `cluster`) does
all on those; to fail over takes Sentinel too long for here.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.chaos.cluster import Cluster, Live
from tests.chaos.faults import FAULTS, Fault
from tests.chaos.history import Exchange, History
from tests.chaos.runner import Outcome, strike_each


def test_faults_lose_nothing(tmp_path: Path):
    faults = [fault for fault in FAULTS if fault.suits("redis", embedded=False)]
    outcome = strike(tmp_path, faults)
    assert [struck.fault for struck in outcome.struck] == [fault.name for fault in faults]
    assert_it_was_put_to_the_proof(outcome.history)
    changes = Counter(
        e.action for e in outcome.changes if isinstance(e, Exchange) and e.status == 200
    )
    for action in ("define", "reset", "spec", "watermark", "snapshot", "report"):
        assert changes[action] >= 1, (action, changes)


def test_a_node_of_a_cluster_comes_back_empty_and_nothing_is_lost(tmp_path: Path):
    strike(tmp_path, [f for f in FAULTS if f.name == "redis-emptied"], live="cluster")


def strike(folder: Path, faults: list[Fault], *, live: Live = "redis") -> Outcome:
    with Cluster(folder, live=live) as cluster:
        outcome = strike_each(cluster, "chaos", faults, seed=7, hold_s=1)
        kept = folder / "history.jsonl"
        outcome.history.dump(kept)
        evidence = "\n".join(str(violation) for violation in outcome.violations[:10])
        assert not outcome.violations, f"see {kept}\n{evidence}\n{cluster.logs()}"
    return outcome


def assert_it_was_put_to_the_proof(history: History) -> None:
    """For every rule of the checker the history has something to check, even on a busy machine."""
    exchanges = [record for record in history if isinstance(record, Exchange)]
    counts = Counter((e.action, e.status) for e in exchanges)
    for action, status, least in (
        ("claim", 201, 10),
        ("run", 201, 1),
        ("renew", 200, 1),
        ("release", 200, 1),
        ("report", 200, 50),
        ("report", 410, 5),
        ("report", None, 1),
        ("commit", 200, 5),
        ("watermark", 200, 50),
        ("snapshot", 200, 10),
        ("event", 200, 20),
    ):
        assert counts[action, status] >= least, (action, status, counts)
    for action in ("claim", "report", "commit", "watermark", "snapshot", "event"):
        answered = {e.replica for e in exchanges if e.action == action and e.status}
        assert answered == {"a", "b"}, action
