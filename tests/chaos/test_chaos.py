"""Every fault once, under load, on two replicas. `make chaos` does it five times, and mixed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.chaos.cluster import Cluster
from tests.chaos.faults import FAULTS
from tests.chaos.history import Exchange, History
from tests.chaos.runner import strike_each


def test_faults_lose_nothing(tmp_path: Path):
    with Cluster(tmp_path) as cluster:
        outcome = strike_each(cluster, "chaos", FAULTS, seed=7, hold_s=1)
        kept = tmp_path / "history.jsonl"
        outcome.history.dump(kept)
        evidence = "\n".join(str(violation) for violation in outcome.violations[:10])
        assert not outcome.violations, f"see {kept}\n{evidence}\n{cluster.logs()}"
    assert [struck.fault for struck in outcome.struck] == [fault.name for fault in FAULTS]
    assert_it_was_put_to_the_proof(outcome.history)


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
