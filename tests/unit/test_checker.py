"""The checker of the chaos tests: histories that it must refuse, and their honest neighbours.

Times are milliseconds from the start; `Told` writes down what a service would have answered. Source `s`
has shards 0 and 1, `k` one key range fed by `s`, and `u` passes `k` on. `e` is a source in epochs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chaos.checker import Violation, check
from tests.chaos.history import Action, Exchange, History, Mark, MarkKind, Topology

NS = 1_000_000
TOPOLOGY = Topology({"s": ("0", "1"), "k": ("r",), "e": ("0",)}, {"k": ("s",), "u": ("k",)})
TTL_MS = 2_000


class Told:
    """A history in the making."""

    def __init__(self) -> None:
        self.history = History(TOPOLOGY)
        self._shown: dict[str, Any] = {}

    def say(
        self, action: Action, start: int, end: int, status: int | None, answer: Any, **more: Any
    ) -> None:
        kind = "application/json" if status is not None and status < 300 else ""
        members: dict[str, Any] = {
            "who": "w", "replica": "a", "job": "job", "content_type": kind,
        } | more  # fmt: skip
        self.history.add(
            Exchange(
                action=action,
                start_ns=start * NS,
                end_ns=end * NS,
                status=status,
                answer=answer,
                **members,
            )
        )

    def mark(self, kind: MarkKind, start: int, end: int, **expected: int) -> None:
        self.history.add(Mark(kind, kind, start * NS, end * NS, expected or None))

    def read(
        self, start: int, end: int, stage: str, made: int | None, given: int | None = None,
        version: int | None = None, **more: Any,
    ) -> None:  # fmt: skip
        action: Action = "watermark" if "stream" not in more else "event"
        answer = self._shown[stage] = state(stage, made, given, version)
        self.say(action, start, end, 200, answer, stage=stage, **more)

    def snapshot(self, start: int, end: int, **shown: tuple[int | None, int | None]) -> None:
        answer = {stage: state(stage, made, given) for stage, (given, made) in shown.items()}
        self.say("snapshot", start, end, 200, {"watermarks": answer})

    def unchanged(self, start: int, end: int, stage: str, etag: str) -> None:
        self.say("watermark", start, end, 304, None, stage=stage, request={"if_none_match": etag})

    def claim(
        self, start: int, end: int, token: str, fence: int, stage: str = "s",
        ranges: tuple[str, ...] = ("0",), **request: Any,
    ) -> None:  # fmt: skip
        answer = {"token": token, "fence": fence, "granted": list(ranges), "denied": []}
        wish = {"ranges": list(ranges), "holder": "w", "ttl_ms": TTL_MS} | request
        self.say("claim", start, end, 201, answer, stage=stage, request=wish)

    def report(
        self, start: int, end: int, token: str, words: dict[str, Any], stage: str = "s",
        status: int | None = 200, rejected: tuple[str, ...] = (),
        shows: Any = None, **request: Any,
    ) -> None:  # fmt: skip
        """Shows what was shown last, unless something else is asked for."""
        answer: Any = {"type": "/problems/lease-lost"} if status == 410 else None
        if status == 200:
            answer = {
                "rejected": [{"range": name, "reason": "superseded"} for name in rejected],
                "watermark": shows or self._shown.get(stage) or state(stage, None, None),
            }
        body = {"token": token, "ranges": words} | request
        kind = "application/problem+json" if status and status >= 400 else ""
        self.say("report", start, end, status, answer, stage=stage, request=body, content_type=kind)

    def promise(self, at: int, words: dict[str, int], stage: str = "s") -> None:
        """Under a lease of its own, which nobody contests."""
        self.report(at, at + 1, f"token of {at}", words, stage)

    def commit(self, start: int, end: int, epoch: int, made: int | None, **more: Any) -> None:
        shown = self._shown["e"] = state("e", made, None)
        answer = {"applied": {"e": 1}, "watermarks": {"e": shown}}
        request = {"epoch": epoch, "stages": {"e": {}}} | more
        self.say("commit", start, end, 200, answer, request=request)

    def problem(
        self, at: int, action: Action, status: int, slug: str, request: Any = None, **more: Any
    ) -> None:
        members = {"content_type": "application/problem+json", "stage": "s"} | more
        answer = {"type": f"/problems/{slug}"}
        self.say(action, at, at + 1, status, answer, request=request or {}, **members)

    def violations(self) -> list[Violation]:
        return check(self.history)

    def rules(self) -> set[str]:
        return {violation.rule for violation in self.violations()}


def state(stage: str, made: int | None, given: int | None, version: int | None = None) -> Any:
    """Versions that fit the values, unless one is asked for."""
    if version is None:
        version = 0 if made is given is None else 1 + (made or 0) + (given or 0)
    return {
        "stage": stage,
        "generation": 1,
        "version": version,
        "input_watermark": given,
        "output_watermark": made,
    }


@pytest.fixture
def told() -> Told:
    """Everybody has promised: `s` 100, `k` 80."""
    told = Told()
    told.say("define", 0, 1, 201, {})
    told.promise(2, {"0": 100, "1": 100})
    told.report(4, 5, "token k", {"r": {"holds": {"x": 80}}}, "k", input_watermark=100)
    return told


# ---- readers


def test_an_honest_history_is_taken(told: Told):
    told.read(10, 11, "s", 90)
    told.read(10, 12, "k", 80, 90)
    told.promise(13, {"0": 200, "1": 300})
    told.read(14, 15, "s", 200, replica="b")
    told.snapshot(16, 17, s=(None, 200), k=(200, 80), u=(80, 80), e=(None, None))
    told.unchanged(18, 19, "s", "1-201")
    assert told.violations() == []


@pytest.mark.parametrize("later", [99, None])
def test_a_step_back_across_replicas_and_readers(told: Told, later: int | None):
    told.read(10, 11, "s", 100, who="reader 1", replica="a")
    told.read(12, 13, "s", later, version=200, who="reader 2", replica="b")
    found = [v for v in told.violations() if v.rule == "no step back"]
    assert len(found) == 1
    assert [getattr(one, "who", "") for one in found[0].evidence] == ["reader 1", "reader 2"]


def test_answers_that_overlap_may_come_in_either_order(told: Told):
    told.read(10, 20, "s", 100, who="reader 1")
    told.read(19, 30, "s", 99, who="reader 2")
    assert told.violations() == []


def test_the_fresh_answer_need_not_be_the_newest(told: Told):
    """Between the two there is a third, which overlaps with both."""
    told.read(10, 11, "s", 100)
    told.read(10, 40, "s", 90)
    told.read(20, 21, "s", 95)
    assert told.rules() == {"no step back"}


def test_a_step_back_of_an_input(told: Told):
    told.read(10, 11, "k", 50, 90)
    told.read(12, 13, "k", 60, 89, version=200)
    assert "no step back" in told.rules()


def test_a_step_back_of_a_version_alone(told: Told):
    told.read(10, 11, "s", 90, version=8)
    told.read(12, 13, "s", 90, version=7)
    assert told.rules() == {"no step back"}


def test_an_old_version_that_is_called_unchanged(told: Told):
    told.read(10, 11, "s", 90, version=8)
    told.unchanged(12, 13, "s", "1-7")
    assert told.rules() == {"no step back"}


def test_a_report_is_answered_with_less_than_was_shown(told: Told):
    told.read(10, 11, "s", 100, version=5)
    told.report(12, 13, "token of 2", {"0": 100}, shows=state("s", 90, None, 4))
    assert told.rules() == {"no step back"}


def test_a_reader_is_shown_less_than_a_worker_was(told: Told):
    told.report(12, 13, "token of 2", {"0": 100}, shows=state("s", 90, None, 4))
    told.read(14, 15, "s", 89, version=6)
    assert told.rules() == {"no step back", "versions tell"}


def test_an_event_may_be_as_old_as_its_stream(told: Told):
    told.read(10, 30, "s", 60, stream=1)
    told.read(20, 21, "s", 100)
    told.read(10, 31, "s", 90, stream=1)
    assert told.violations() == []


def test_an_event_is_older_than_its_stream(told: Told):
    told.read(10, 11, "s", 100)
    told.read(20, 30, "s", 90, stream=1)
    assert told.rules() == {"no step back"}


def test_a_stream_goes_down(told: Told):
    told.read(10, 20, "s", 100, stream=1)
    told.read(10, 21, "s", 90, version=200, stream=1)
    assert told.rules() == {"streams in order", "versions tell"}


def test_two_streams_are_not_one(told: Told):
    told.read(10, 20, "s", 100, stream=1)
    told.read(10, 21, "s", 90, stream=2)
    assert told.violations() == []


def test_one_version_for_two_states(told: Told):
    told.read(10, 20, "s", 90, version=7)
    told.read(10, 20, "s", 91, version=7)
    assert told.rules() == {"versions tell"}


def test_generations_are_apart(told: Told):
    told.read(10, 11, "s", 100)
    after = state("s", None, None, 0) | {"generation": 2}
    told.say("watermark", 12, 13, 200, after, stage="s")
    assert told.violations() == []


def test_an_inconsistent_snapshot(told: Told):
    told.snapshot(10, 11, s=(None, 90), k=(95, 80), u=(80, 80), e=(None, None))
    assert told.rules() == {"consistent"}


def test_an_output_ahead_of_its_own_input(told: Told):
    told.read(10, 11, "k", 80, 70)
    assert told.rules() == {"consistent"}


# ---- the oracle


def test_more_than_was_promised(told: Told):
    told.read(10, 11, "s", 101)
    assert told.rules() == {"nothing ahead"}


def test_what_is_promised_after_the_answer_does_not_count(told: Told):
    told.read(10, 11, "s", 150)
    told.promise(12, {"0": 200, "1": 200})
    assert told.rules() == {"nothing ahead"}


def test_a_hole_is_not_left_out():
    told = Told()
    told.promise(1, {"0": 100})
    told.read(10, 11, "s", 50)
    assert told.rules() == {"nothing ahead"}


def test_an_input_ahead_of_what_it_is_made_of(told: Told):
    told.read(10, 11, "k", 80, 101)
    assert told.rules() == {"nothing ahead"}


def test_a_passthrough_ahead_of_what_it_passes_on(told: Told):
    told.read(10, 11, "u", 81, 81)
    assert told.rules() == {"nothing ahead"}


def test_a_keyed_output_is_bound_by_its_holds_and_by_its_input(told: Told):
    told.report(6, 7, "token k", {"r": {}}, "k", input_watermark=90)
    told.read(10, 11, "k", 90, 100)
    assert told.violations() == []
    told.read(12, 13, "k", 91, 100)
    assert told.rules() == {"nothing ahead"}


def test_a_report_without_an_answer_may_have_been_taken(told: Told):
    told.report(6, 9, "token of 2", {"0": 200, "1": 200}, status=None)
    told.read(10, 11, "s", 200)
    assert told.violations() == []


def test_a_report_that_was_never_sent_has_not_been_taken(told: Told):
    body = {"token": "token of 2", "ranges": {"0": 200, "1": 200}}
    told.say("report", 6, 9, None, None, stage="s", request=body, sent=False)
    told.read(10, 11, "s", 200)
    assert told.rules() == {"nothing ahead"}


@pytest.mark.parametrize("status", [409, 410, 422])
def test_a_report_that_was_refused_has_changed_nothing(told: Told, status: int):
    told.report(6, 9, "token of 2", {"0": 200, "1": 200}, status=status)
    told.read(10, 11, "s", 200)
    assert "nothing ahead" in told.rules()


def test_a_range_that_was_rejected_has_changed_nothing(told: Told):
    told.report(6, 9, "token of 2", {"0": 200, "1": 200}, rejected=("1",))
    told.read(10, 11, "s", 200)
    assert told.rules() == {"nothing ahead"}


def test_a_report_under_a_lost_lease_counts_for_nothing_though_nobody_was_answered(told: Told):
    told.claim(10, 11, "old", 1, ranges=("0", "1"))
    told.claim(12, 13, "new", 2, ranges=("0", "1"))
    told.report(14, 15, "old", {"0": 200, "1": 200}, status=None)
    told.read(16, 17, "s", 200)
    assert told.rules() == {"nothing ahead"}


def test_an_epoch_counts_from_its_commit_on(told: Told):
    told.claim(10, 11, "t", 1, "e", run=1)
    told.report(12, 13, "t", {"0": 50}, "e", epoch=3)
    told.commit(20, 30, 3, 50, run=1)
    told.read(21, 22, "e", 50)
    assert told.violations() == []


def test_an_epoch_counts_before_its_commit(told: Told):
    told.claim(10, 11, "t", 1, "e", run=1)
    told.report(12, 13, "t", {"0": 50}, "e", epoch=3)
    told.read(18, 19, "e", 50)
    told.commit(20, 30, 3, 50, run=1)
    assert told.rules() == {"nothing ahead"}


def test_another_epochs_commit_is_not_this_ones(told: Told):
    told.claim(10, 11, "t", 1, "e", run=1)
    told.report(12, 13, "t", {"0": 50}, "e", epoch=3)
    told.commit(14, 15, 2, None, run=1)
    told.read(18, 19, "e", 50)
    assert told.rules() == {"nothing ahead"}


# ---- leases


def test_a_report_under_a_superseded_token(told: Told):
    told.claim(10, 11, "old", 1)
    told.claim(12, 13, "new", 2)
    told.report(14, 15, "old", {"0": 1})
    found = told.violations()
    assert [v.rule for v in found] == ["fenced"]
    assert len(found[0].evidence) == 3


def test_a_report_in_flight_during_the_takeover(told: Told):
    told.claim(10, 11, "old", 1)
    told.report(12, 20, "old", {"0": 1})
    told.claim(13, 14, "new", 2)
    assert told.violations() == []


def test_a_takeover_without_an_answer_proves_nothing(told: Told):
    told.claim(10, 11, "old", 1)
    told.say("claim", 12, 13, None, None, stage="s", request={"ranges": ["0"]})
    told.report(14, 15, "old", {"0": 1})
    assert told.violations() == []


def test_of_overlapping_grants_the_higher_fence_is_the_later(told: Told):
    told.claim(10, 20, "first", 1)
    told.claim(11, 19, "second", 2)
    told.report(21, 22, "second", {"0": 1})
    assert told.violations() == []
    told.report(23, 24, "first", {"0": 1})
    assert told.rules() == {"fenced"}


def test_a_takeover_of_another_range_or_stage_takes_nothing(told: Told):
    told.claim(10, 11, "old", 1)
    told.claim(12, 13, "other", 2, ranges=("1",))
    told.claim(14, 15, "third", 3, "e", ranges=("0",))
    told.report(16, 17, "old", {"0": 1})
    assert told.violations() == []


def test_only_the_range_that_is_left_may_be_reported(told: Told):
    told.claim(10, 11, "old", 1, ranges=("0", "1"))
    told.claim(12, 13, "new", 2, ranges=("1",))
    told.report(14, 15, "old", {"0": 1, "1": 1}, rejected=("1",))
    assert told.violations() == []
    told.report(16, 17, "old", {"0": 1, "1": 1})
    assert told.rules() == {"fenced"}


def test_a_report_after_the_lease_has_run_out(told: Told):
    told.claim(10, 11, "t", 1)
    told.report(1_500, 1_510, "t", {"0": 1})
    told.report(3_900, 3_910, "t", {"0": 1})
    assert told.violations() == []
    told.report(6_500, 6_510, "t", {"0": 1})
    assert told.rules() == {"fenced"}


def test_a_report_without_an_answer_may_have_renewed_the_lease(told: Told):
    told.claim(10, 11, "t", 1)
    told.report(1_500, 1_510, "t", {"0": 1}, status=None)
    told.report(3_500, 3_510, "t", {"0": 1})
    assert told.violations() == []


def test_a_lease_is_renewed_after_it_has_run_out(told: Told):
    told.claim(10, 11, "t", 1)
    answer = {"renewed": [{"token": "t", "ranges": ["0"]}], "lost": []}
    told.say("renew", 5_000, 5_001, 200, answer, request={"tokens": ["t"]})
    assert told.rules() == {"fenced"}


def test_a_report_under_a_released_lease(told: Told):
    told.claim(10, 11, "t", 1)
    told.say("release", 12, 13, 200, {"released": 1}, request={"tokens": ["t"]})
    told.report(14, 15, "t", {"0": 1})
    assert told.rules() == {"fenced"}


def test_a_lease_that_was_lost_comes_back(told: Told):
    told.claim(10, 11, "t", 1)
    told.report(12, 13, "t", {"0": 1}, status=410)
    told.report(14, 15, "t", {"0": 1})
    assert told.rules() == {"fenced"}


def test_a_lease_from_before_the_live_store_was_lost(told: Told):
    told.claim(10, 11, "t", 1)
    told.mark("live-lost", 12, 20)
    told.report(15, 30, "t", {"0": 1})
    assert told.violations() == []
    told.report(31, 32, "t", {"0": 1})
    assert told.rules() == {"fenced"}


def test_a_report_of_a_run_that_is_over(told: Told):
    told.claim(10, 11, "t", 1, "e", run=1)
    told.say("run", 12, 20, 201, {"run": 2}, request={"stages": ["e"]})
    told.report(15, 16, "t", {"0": 1}, "e")
    assert told.violations() == []
    told.report(21, 22, "t", {"0": 1}, "e")
    assert told.rules() == {"fenced"}


def test_a_run_that_is_over_claims_and_commits(told: Told):
    told.say("run", 12, 20, 201, {"run": 2}, request={"stages": ["e"]})
    told.claim(21, 22, "t", 1, "e", run=1)
    told.commit(23, 24, 1, None, run=1)
    assert [v.rule for v in told.violations()] == ["runs rise", "runs rise"]


def test_a_run_with_an_old_number(told: Told):
    told.say("run", 10, 11, 201, {"run": 2}, request={"stages": ["e"]})
    told.say("run", 12, 13, 201, {"run": 2}, request={"stages": ["s"]})
    assert told.rules() == {"runs rise"}


@pytest.mark.parametrize("fence", [6, 7])
def test_a_fence_that_does_not_rise(told: Told, fence: int):
    told.claim(10, 11, "t", 7)
    told.claim(12, 13, "u", fence, ranges=("1",))
    assert told.rules() == {"fences rise"}


def test_fences_of_overlapping_grants_come_in_either_order(told: Told):
    told.claim(10, 20, "t", 7)
    told.claim(12, 13, "u", 6, ranges=("1",))
    assert told.violations() == []


def test_a_fence_that_is_given_twice(told: Told):
    told.claim(10, 20, "t", 7)
    told.claim(12, 13, "u", 7, ranges=("1",))
    assert told.rules() == {"fences rise"}


def test_a_report_for_an_epoch_that_is_over(told: Told):
    told.claim(10, 11, "t", 1, "e", run=1)
    told.commit(12, 20, 3, 1, run=1)
    told.report(15, 30, "t", {"0": 1}, "e", epoch=3)
    assert told.violations() == []
    told.report(31, 32, "t", {"0": 1}, "e", epoch=3)
    assert told.rules() == {"epochs end"}


def test_a_commit_that_does_not_show(told: Told):
    told.claim(10, 11, "t", 1, "e", run=1)
    told.report(12, 13, "t", {"0": 50}, "e", epoch=3)
    told.commit(20, 30, 3, 49, run=1)
    assert told.rules() == {"commits show"}


# ---- refusals


@pytest.mark.parametrize(("wanted", "rules"), [(90, {"refused for cause"}), (91, set[str]())])
def test_an_input_that_was_shown_is_called_ahead(told: Told, wanted: int, rules: set[str]):
    told.read(10, 11, "k", 80, 90)
    told.problem(
        12, "report", 409, "input-ahead", {"token": "t", "input_watermark": wanted}, stage="k"
    )
    assert told.rules() == rules


def test_a_job_is_forgotten(told: Told):
    told.problem(12, "watermark", 404, "unknown-job")
    assert told.rules() == {"refused for cause"}


def test_an_epoch_is_called_stale_for_nothing(told: Told):
    told.claim(10, 11, "t", 1, "e", run=1)
    told.commit(12, 13, 3, None, run=1)
    told.problem(14, "report", 409, "stale-epoch", {"token": "t", "epoch": 3}, stage="e")
    assert told.violations() == []
    told.problem(16, "report", 409, "stale-epoch", {"token": "t", "epoch": 4}, stage="e")
    assert told.rules() == {"stale for cause"}


def test_a_run_is_called_stale_for_nothing(told: Told):
    told.problem(16, "claim", 409, "stale-run", {"run": 1}, stage="e")
    assert told.rules() == {"stale for cause"}


def test_a_run_that_nobody_was_told_of_may_make_others_stale(told: Told):
    told.say("run", 12, 13, None, None, request={"stages": ["e"]})
    told.problem(16, "claim", 409, "stale-run", {"run": 1}, stage="e")
    assert told.violations() == []


@pytest.mark.parametrize(
    ("status", "slug", "more"),
    [
        (500, "internal", {}),
        (503, "unavailable", {}),
        (503, "unavailable", {"retry_after": "soon"}),
        (409, "lease-conflict", {"content_type": "text/plain"}),
        (409, "what", {}),
        (410, "lease-conflict", {}),
    ],
)
def test_an_answer_that_the_contract_does_not_know(
    told: Told, status: int, slug: str, more: dict[str, str]
):
    told.problem(10, "claim", status, slug, **more)
    assert told.rules() == {"well formed"}


def test_a_proper_refusal_is_none_of_its_business(told: Told):
    told.problem(10, "claim", 409, "lease-conflict")
    told.problem(12, "claim", 503, "unavailable", retry_after="1")
    assert told.violations() == []


# ---- it goes on


def went_on(told: Told, at: int, made: int) -> None:
    for stage, fed in (("s", None), ("k", 200), ("u", 200), ("e", None)):
        told.read(at, at + 1, stage, made, fed)


@pytest.fixture
def ample() -> Told:
    """Everybody has promised 200."""
    told = Told()
    told.promise(1, {"0": 200, "1": 200})
    told.promise(1, {"0": 200}, "e")
    told.report(1, 2, "token k", {"r": {}}, "k", input_watermark=200)
    went_on(told, 10, 100)
    return told


def test_progress_comes_soon_after_a_fault(ample: Told):
    ample.mark("fault", 100, 2_000)
    went_on(ample, 1_500, 150)
    went_on(ample, 11_990, 151)
    assert ample.violations() == []


@pytest.mark.parametrize(("at", "made"), [(12_100, 151), (3_000, 150)])
def test_progress_comes_late_or_never(ample: Told, at: int, made: int):
    ample.mark("fault", 100, 2_000)
    went_on(ample, 1_500, 150)
    went_on(ample, at, made)
    found = ample.violations()
    assert [v.rule for v in found] == ["resumes"] * 4


def test_one_stage_alone_does_not_go_on(ample: Told):
    ample.mark("fault", 100, 2_000)
    for stage, fed in (("s", None), ("k", 200), ("e", None)):
        ample.read(3_000, 3_001, stage, 151, fed)
    found = ample.violations()
    assert [v.rule for v in found] == ["resumes"]
    assert found[0].text.startswith("u ")


def test_the_last_of_overlapping_faults_counts(ample: Told):
    ample.mark("fault", 100, 2_000)
    ample.mark("fault", 1_000, 9_000)
    went_on(ample, 18_000, 151)
    assert ample.violations() == []


def test_it_ends_short_of_the_last_word(ample: Told):
    ample.mark("final", 3_000, 4_000, s=200, k=200, u=200, e=200)
    went_on(ample, 4_001, 199)
    assert [v.rule for v in ample.violations()] == ["ends where it must"] * 4


def test_one_replica_ends_short_of_the_last_word(ample: Told):
    ample.mark("final", 3_000, 4_000, e=200)
    ample.read(4_001, 4_010, "e", 200, replica="a")
    ample.read(4_002, 4_010, "e", 199, replica="b")
    assert ample.rules() == {"ends where it must"}


def test_nobody_looks_in_the_end(ample: Told):
    ample.mark("final", 3_000, 4_000, s=200)
    assert ample.rules() == {"ends where it must"}


def end_stream(told: Told, start: int, end: int, last_event_id: str | None = None) -> None:
    request = {"last_event_id": last_event_id}
    told.say("event", start, end, None, None, stream=1, request=request)


def test_a_stream_falls_behind(told: Told):
    told.read(10, 20, "s", 90, stream=1)
    told.read(30, 40, "s", 100)
    end_stream(told, 10, 10_030, "1-1")
    assert told.violations() == []
    end_stream(told, 10, 10_050, "1-1")
    assert told.rules() == {"streams keep up"}


def test_a_stream_that_keeps_up(told: Told):
    told.read(30, 40, "s", 90)
    told.read(10, 41, "s", 100, stream=1)
    end_stream(told, 10, 60_000, "1-1")
    assert told.violations() == []


@pytest.mark.parametrize(("cursor", "rules"), [(None, {"streams keep up"}), ("1-7", set[str]())])
def test_a_stream_that_shows_nothing_of_a_stage(told: Told, cursor: str | None, rules: set[str]):
    told.read(10, 11, "s", 90)
    end_stream(told, 20, 60_000, cursor)
    assert told.rules() == rules


# ---- in general


@st.composite
def honest_reads(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Start, end and value of reads of a register that takes the value t at the time t."""
    spans = draw(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 50)), max_size=30))
    return [(a, a + n, draw(st.integers(a, a + n))) for a, n in spans]


@given(honest_reads())
def test_no_honest_register_is_accused(reads: list[tuple[int, int, int]]):
    told = Told()
    told.promise(-10, {"0": 1_000, "1": 1_000})
    for start, end, value in reads:
        told.read(start, end, "s", value)
    assert told.violations() == []


@given(honest_reads(), st.integers(0, 200), st.integers(1, 50))
def test_whatever_else_is_read_a_step_back_is_found(
    reads: list[tuple[int, int, int]], at: int, back: int
):
    told = Told()
    told.promise(-10, {"0": 1_000, "1": 1_000})
    for start, end, value in reads:
        told.read(start, end, "s", value)
    told.read(at, at, "s", at)
    told.read(at + 1, at + 2, "s", at - back)
    assert "no step back" in told.rules()


# ---- soft values


def look(told: Told, start: int, end: int, **soft: Any) -> None:
    """A reader is shown `s` at 100, and these soft values."""
    answer = state("s", 100, None) | soft
    told.say("watermark", start, end, 200, answer, stage="s")


@pytest.mark.parametrize(
    ("percentiles", "rules"),
    [
        ({"33": 140, "66": 120}, set[str]()),
        ({"33": 100, "66": 100}, set[str]()),
        ({"33": None, "66": 120}, set[str]()),
        ({"33": 120, "66": 140}, {"soft values"}),
        ({"33": 120, "66": 99}, {"soft values"}),
        ({"33": 99, "66": None}, {"soft values"}),
    ],
)
def test_percentiles_are_in_order(told: Told, percentiles: dict[str, Any], rules: set[str]):
    look(told, 10, 11, percentiles=percentiles)
    assert told.rules() == rules


@pytest.mark.parametrize("lost", [None, (22, 25), (5, 15), (25, 31)])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"percentiles": {"66": 140}}, {"percentiles": {"66": 139}}),
        ({"processing_watermark": 50}, {"processing_watermark": 49}),
    ],
)
def test_a_soft_value_goes_back_only_with_the_live_state(
    told: Told, lost: tuple[int, int] | None, before: Any, after: Any
):
    look(told, 10, 20, **before)
    look(told, 15, 35, **after)  # they overlap: neither was first
    if lost is not None:
        told.mark("live-lost", *lost)
    assert told.rules() == set()
    look(told, 30, 40, **after)
    assert told.rules() == ({"soft values"} if lost is None else set())


def test_work_does_not_begin_in_the_future(told: Told):
    look(told, 10, 11, processing_watermark=50, system_lag_ms=-1)
    assert told.rules() == {"soft values"}


@pytest.mark.parametrize(("made", "rules"), [(90, set[str]()), (91, {"nothing ahead"})])
def test_what_a_commit_keeps_back_caps_the_stage(told: Told, made: int, rules: set[str]):
    told.claim(10, 11, "t", 1, stage="k", ranges=("r",), run=1)
    told.report(12, 13, "t", {"r": {}}, "k", epoch=1, input_watermark=100)
    kept = {"k": {"input_watermark": 100, "holds": {"join": 90}}}
    shown = state("k", made, 100)
    answer = {"applied": {"k": 1}, "watermarks": {"k": shown}}
    told.say("commit", 14, 15, 200, answer, request={"run": 1, "epoch": 1, "stages": kept})
    assert told.rules() == rules


def test_a_history_survives_its_file(told: Told, tmp_path: Path):
    told.mark("final", 3_000, 4_000, s=200)
    told.read(10, 11, "s", 101)
    told.history.dump(tmp_path / "history.jsonl")
    again = History.load(tmp_path / "history.jsonl")
    assert list(again) == list(told.history)
    assert [str(v) for v in check(again)] == [str(v) for v in told.violations()]
    assert again.shown("s") == 101
