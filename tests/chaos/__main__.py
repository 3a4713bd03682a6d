"""Prove that faults lose nothing: each fault several times, then all mixed.

`python -m tests.chaos`; see `--help`. Exits with 1, and the evidence, if an invariant did not hold.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from tests.chaos.checker import check
from tests.chaos.cluster import LIVES, Cluster
from tests.chaos.faults import FAULTS, Fault
from tests.chaos.history import History, Mark
from tests.chaos.runner import Outcome, Struck, strike_each, strike_mixed

console = Console(soft_wrap=True, highlight=False)
EVIDENCE = 5
"""Number of each rule's violations that are shown in full."""


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    names = [fault.name for fault in FAULTS]
    parser.add_argument("--repeat", type=int, default=5, help="how often each fault strikes")
    parser.add_argument("--mixed-seconds", type=float, default=180, help="then all in disorder")
    parser.add_argument("--hold", type=float, default=2, help="seconds that a lasting fault lasts")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of all chance")
    parser.add_argument("--fault", action="append", choices=names, help="only this one; repeatable")
    parser.add_argument("--keep-history", type=Path, help="a folder for every history, as JSONL")
    parser.add_argument("--live", choices=LIVES, default="redis", help="how Redis is deployed")
    parser.add_argument("--embedded", action="store_true", help="one replica, embedded stores")
    parser.add_argument("--check", type=Path, help="only check a history that was kept")
    return parser.parse_args()


def _show(outcome: Outcome, kept: Path | None) -> None:
    history = outcome.history
    faults = sum(isinstance(record, Mark) and record.kind == "fault" for record in history)
    resumed = [s.resumed_s for s in outcome.struck if s.resumed_s is not None]
    slowest = f" resumed within {max(resumed):.2f} s," if resumed else ""
    verdict = f"{len(outcome.violations)} violations" if outcome.violations else "nothing lost"
    console.print(
        f"{outcome.job}: {faults} faults,{slowest}"
        f" {history.requests} requests, {history.reads} reads,"
        f" {outcome.changes.requests} beside, {verdict}" + (f"; {kept}" if kept else ""),
        style="red" if outcome.violations else "green",
        markup=False,
    )
    shown: Counter[str] = Counter()
    for violation in outcome.violations:
        shown[violation.rule] += 1
        if shown[violation.rule] <= EVIDENCE:
            console.print(str(violation), markup=False)
    for rule, count in shown.items():
        if count > EVIDENCE:
            console.print(f"{rule}: {count} in all", markup=False)


def _say(struck: Struck) -> None:
    moved = "not resumed" if struck.resumed_s is None else f"resumed after {struck.resumed_s:.2f} s"
    console.print(f"  {struck.fault:<40} {struck.lasted_s:6.2f} s, {moved}", markup=False)


def _keep(outcome: Outcome, cluster: Cluster, folder: Path | None) -> Path | None:
    """Keep history and logs if that was requested, or if they show a failure."""
    if folder is None:
        if not outcome.violations:
            return None
        folder = Path(tempfile.mkdtemp(prefix="tidegauge-chaos-kept-"))
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / f"{outcome.job}.jsonl"
    outcome.history.dump(kept)
    outcome.changes.dump(folder / f"{outcome.job}-changed.jsonl")
    if outcome.violations:
        for replica in cluster.replicas:
            shutil.copy(replica.log_file, folder / f"{outcome.job}-{replica.name}.log")
    return kept


def _run(options: argparse.Namespace, faults: Sequence[Fault], folder: Path) -> bool:
    """Return whether every invariant held."""
    held = True

    def over(outcome: Outcome, cluster: Cluster) -> None:
        nonlocal held
        _show(outcome, _keep(outcome, cluster, options.keep_history))
        held = held and not outcome.violations

    chance: dict[str, Any] = {"seed": options.seed, "hold_s": options.hold, "say": _say}
    with Cluster(folder, embedded=options.embedded, live=options.live) as cluster:
        for fault in faults if options.repeat else ():
            over(strike_each(cluster, fault.name, [fault] * options.repeat, **chance), cluster)
        if options.mixed_seconds:
            mixed = strike_mixed(cluster, "mixed", faults, options.mixed_seconds, **chance)
            over(mixed, cluster)
    return held


def main() -> int:
    """Run what was requested; return the exit code."""
    options = _options()
    if options.check is not None:
        history = History.load(options.check)
        outcome = Outcome(options.check.stem, history, violations=check(history))
        _show(outcome, None)
        return bool(outcome.violations)
    faults = [
        fault
        for fault in FAULTS
        if (not options.fault or fault.name in options.fault)
        and fault.suits(options.live, embedded=options.embedded)
    ]
    console.print(f"{len(faults)} faults, seed {options.seed}")
    with tempfile.TemporaryDirectory(prefix="tidegauge-chaos-") as folder:
        return not _run(options, faults, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
