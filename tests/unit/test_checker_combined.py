"""The checker of histories: reports that bring their claim."""

from __future__ import annotations

from typing import Any

from tests.unit.test_checker import TTL_MS, Told, state, told

__all__ = ["told"]


def claimed(
    told: Told,
    start: int,
    end: int,
    token: str,
    fence: int,
    words: dict[str, Any],
    *,
    stage: str = "s",
    status: int | None = 200,
    denied: tuple[str, ...] = (),
    slug: str = "",
    release: bool = False,
    shows: Any = None,
    epoch: int | None = None,
    **claim: Any,
) -> None:
    answer: Any = {"type": f"/problems/{slug}"} if slug else None
    if status == 200:
        answer = {
            "token": token,
            "fence": fence,
            "granted": [name for name in words if name not in denied],
            "denied": [{"range": name, "reason": "held"} for name in denied],
            "rejected": [],
            "watermark": shows or state(stage, None, None),
        }
    request = {
        "claim": {"holder": "w", "ttl_ms": TTL_MS, **claim},
        "ranges": words,
        "release": release,
        **({} if epoch is None else {"epoch": epoch}),
    }
    kind = "application/problem+json" if slug else ""
    told.say("report", start, end, status, answer, stage=stage, request=request, content_type=kind)


def test_an_honest_one_is_taken(told: Told):
    claimed(told, 10, 11, "t", 1, {"0": 200, "1": 200}, shows=state("s", 200, None))
    told.read(12, 13, "s", 200)
    told.report(14, 15, "t", {"0": 210}, shows=state("s", 200, None))
    assert told.violations() == []


def test_it_fences_the_lease_that_it_takes(told: Told):
    told.claim(10, 11, "old", 1)
    claimed(told, 12, 13, "new", 2, {"0": 1}, shows=state("s", 100, None))
    told.report(14, 15, "old", {"0": 1}, shows=state("s", 100, None))
    assert told.rules() == {"fenced"}


def test_its_fence_rises(told: Told):
    told.claim(10, 11, "old", 5)
    claimed(told, 12, 13, "new", 4, {"0": 1}, shows=state("s", 100, None))
    assert "fences rise" in told.rules()


def test_a_denied_range_promises_nothing(told: Told):
    claimed(told, 6, 9, "t", 1, {"0": 200, "1": 200}, denied=("1",), shows=state("s", 100, None))
    told.read(10, 11, "s", 200)
    assert told.rules() == {"nothing ahead"}


def test_one_without_an_answer_may_have_been_taken(told: Told):
    claimed(told, 6, 9, "t", 1, {"0": 200, "1": 200}, status=None)
    told.read(10, 11, "s", 200)
    assert told.violations() == []


def test_one_that_was_refused_has_changed_nothing(told: Told):
    words = {"0": 200, "1": 200}
    claimed(told, 6, 9, "t", 1, words, status=409, slug="lease-conflict")
    told.read(10, 11, "s", 200)
    assert told.rules() == {"nothing ahead"}


def test_its_epoch_counts_from_the_commit_on(told: Told):
    claimed(told, 12, 13, "t", 1, {"0": 50}, stage="e", status=None, epoch=3, run=1)
    told.read(18, 19, "e", 50)
    told.commit(20, 30, 3, 50, run=1)
    assert told.rules() == {"nothing ahead"}


def test_its_run_is_that_of_its_commit_though_nobody_was_answered(told: Told):
    claimed(told, 12, 13, "t", 1, {"0": 50}, stage="e", status=None, epoch=3, run=1)
    told.commit(20, 30, 3, 50, run=1)
    told.read(31, 32, "e", 50)
    assert told.violations() == []


def test_a_report_under_a_lease_that_it_has_released(told: Told):
    shows = state("s", 100, None)
    claimed(told, 10, 11, "t", 1, {"0": 1}, release=True, shows=shows)
    told.report(12, 13, "t", {"0": 1}, shows=shows)
    assert told.rules() == {"fenced"}


def test_one_for_an_epoch_that_is_over(told: Told):
    told.claim(10, 11, "t", 1, "e", run=1)
    told.report(12, 13, "t", {"0": 50}, "e", epoch=3)
    told.commit(20, 30, 3, 50, run=1)
    claimed(told, 40, 41, "u", 2, {"0": 60}, stage="e", epoch=3, run=1, shows=state("e", 50, None))
    assert told.rules() == {"epochs end"}


def test_a_run_that_is_over_claims_with_its_report(told: Told):
    told.say("run", 10, 11, 201, {"run": 2}, request={"stages": ["s"]})
    claimed(told, 12, 13, "t", 1, {"0": 1}, run=1, shows=state("s", 100, None))
    assert "runs rise" in told.rules()
