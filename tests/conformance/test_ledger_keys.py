"""Contract of every ledger for keys and the audit. See `service.ledger.port`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from service.errors import UnknownJobError
from service.frontier.health import Outcome
from service.ledger.port import Ledger, NewLayout, Span
from service.model.audit import Action, Actor, AuditRecord, Deed
from service.model.checkpoints import CheckpointChunk
from service.model.keys import Key, Role, digest_of
from service.model.runs import NewRun, RunEnd

SPEC = b'{"stages":{"s":{"shards":["a","b"]}}}'
ME = Actor("me", "10.0.0.1")
KEY = Key("ci", Role.REPORT, "scores-*", digest_of("one"), 5, "me", 1_000)
MINUTE_MS = 60_000


def deed(action: Action, at_ms: int = 7) -> Deed:
    return Deed(action, ME, at_ms)


CREATE, REVOKE = deed(Action.CREATE_KEY), deed(Action.REVOKE_KEY, 8)


@pytest.fixture
def ledger(ledgers: Callable[[], Ledger], runner: asyncio.Runner) -> Ledger:
    found = ledgers()
    runner.run(found.open(exclusive=True))
    return found


def all_of(ledger: Ledger, runner: asyncio.Runner) -> Sequence[AuditRecord]:
    return runner.run(ledger.read_audit(100, None, None))


def test_a_key_comes_back_as_it_was_stored(
    ledger: Ledger, ledgers: Callable[[], Ledger], runner: asyncio.Runner
) -> None:
    assert runner.run(ledger.keys()) == []
    assert runner.run(ledger.add_key(KEY, CREATE))
    other = Key("any", Role.ADMIN, "*", digest_of("two"), 6, "me")
    assert runner.run(ledger.add_key(other, CREATE))
    again = ledgers()
    runner.run(again.open(exclusive=True))
    assert runner.run(again.keys()) == [other, KEY], "by name"


def test_a_name_is_given_once_until_it_is_free_again(
    ledger: Ledger, runner: asyncio.Runner
) -> None:
    assert runner.run(ledger.add_key(KEY, CREATE))
    second = replace(KEY, digest=digest_of("two"), role=Role.READ)
    assert not runner.run(ledger.add_key(second, CREATE))
    assert runner.run(ledger.keys()) == [KEY]
    assert runner.run(ledger.delete_key("ci", REVOKE))
    assert not runner.run(ledger.delete_key("ci", REVOKE))
    assert runner.run(ledger.add_key(second, CREATE))
    assert runner.run(ledger.keys()) == [second]
    # Refusals are not recorded.
    assert [(r.deed, r.key, r.detail) for r in all_of(ledger, runner)] == [
        (CREATE, "ci", "read for scores-*"),
        (REVOKE, "ci", ""),
        (CREATE, "ci", "report for scores-*"),
    ]


def test_uses_are_noted_once_a_minute_and_never_go_back(
    ledger: Ledger, runner: asyncio.Runner
) -> None:
    runner.run(ledger.add_key(KEY, CREATE))

    def used_at(*noted_ms: int) -> int | None:
        for at_ms in noted_ms:
            runner.run(ledger.note_uses({KEY.digest: at_ms, digest_of("unknown"): at_ms}))
        [key] = runner.run(ledger.keys())
        return key.used_at_ms

    assert used_at() is None
    assert used_at(100) == 100
    assert used_at(100 + MINUTE_MS - 1) == 100
    assert used_at(100 + MINUTE_MS) == 100 + MINUTE_MS
    assert used_at(50) == 100 + MINUTE_MS
    runner.run(ledger.note_uses({}))
    runner.run(ledger.delete_key("ci", REVOKE))
    runner.run(ledger.add_key(replace(KEY, digest=digest_of("two")), CREATE))
    assert used_at(900_000) is None, "another key of the same name"


def test_a_change_of_a_job_is_recorded_with_it(ledger: Ledger, runner: asyncio.Runner) -> None:
    layout = NewLayout("j", SPEC, ("s",))
    runner.run(ledger.create(layout, 1, deed(Action.CREATE_JOB, 1)))
    runner.run(ledger.replace(layout, 1, 1, 2, deed(Action.CHANGE_JOB, 2)))
    runner.run(ledger.open_run("j", NewRun(["s"], "driver-1"), 1, deed(Action.OPEN_RUN, 3)))
    runner.run(ledger.reset("j", 4, deed(Action.RESET_JOB, 4)))
    runner.run(ledger.delete("j", 5, deed(Action.DELETE_JOB, 5)))
    records = all_of(ledger, runner)
    assert [(r.deed.action, r.deed.at_ms, r.job, r.detail) for r in records] == [
        (Action.DELETE_JOB, 5, "j", ""),
        (Action.RESET_JOB, 4, "j", "generation 2"),
        (
            Action.END_RUN,
            4,
            "j",
            "run 1 of s was fenced: the job was reset: generation 2 began",
        ),
        (Action.OPEN_RUN, 3, "j", "run 1 of s by driver-1"),
        (Action.CHANGE_JOB, 2, "j", "layout 2"),
        (Action.CREATE_JOB, 1, "j", ""),
    ]
    assert {r.deed.by for r in records} == {ME}
    assert [r.number for r in records] == sorted((r.number for r in records), reverse=True)


def test_a_change_that_does_not_happen_is_not_recorded(
    ledger: Ledger, runner: asyncio.Runner
) -> None:
    layout = NewLayout("j", SPEC, ("s",))
    runner.run(ledger.create(layout, 1))
    assert runner.run(ledger.create(layout, 1, deed(Action.CREATE_JOB))) is None
    assert runner.run(ledger.replace(layout, 1, 9, 2, deed(Action.CHANGE_JOB))) is None
    for work in (
        lambda: ledger.reset("x", 1, deed(Action.RESET_JOB)),
        lambda: ledger.delete("x", 1, deed(Action.DELETE_JOB)),
        lambda: ledger.open_run("x", NewRun(["s"], "driver-1"), 1, deed(Action.OPEN_RUN)),
    ):
        with pytest.raises(UnknownJobError):
            runner.run(work())
    assert all_of(ledger, runner) == []


def test_the_audit_is_read_in_pages_and_by_job(ledger: Ledger, runner: asyncio.Runner) -> None:
    for name in ("a", "b", "c"):
        layout = NewLayout(name, SPEC, ("s",))
        runner.run(ledger.create(layout, 1, deed(Action.CREATE_JOB)))
    newest = runner.run(ledger.read_audit(2, None, None))
    assert [r.job for r in newest] == ["c", "b"]
    rest = runner.run(ledger.read_audit(2, newest[-1].number, None))
    assert [r.job for r in rest] == ["a"]
    assert [r.job for r in runner.run(ledger.read_audit(9, None, "b"))] == ["b"]
    assert runner.run(ledger.read_audit(9, newest[-1].number, "b")) == []


def test_the_end_of_a_retirement_is_recorded_once_for_each_retirement(
    ledger: Ledger, runner: asyncio.Runner
) -> None:
    runner.run(ledger.create(NewLayout("j", SPEC, ("s",)), 1, deed(Action.CREATE_JOB, 1)))
    columns = {"promises": bytes(16)}
    ended = CheckpointChunk("j", "s", 1, 1, 1, 0, 1, columns, returned={"a": "w"})

    def actions() -> list[tuple[str, int]]:
        records = runner.run(ledger.read_audit(50, None, "j"))
        return [(each.deed.action.value, each.deed.at_ms) for each in reversed(records)]

    for stamp, at_ms in ((1, 2), (2, 6)):
        ended = replace(ended, stamp=stamp)
        runner.run(ledger.note_deed(deed(Action.RETIRE_RANGE, at_ms), "j", "s a: gone"))
        runner.run(ledger.note_deed(deed(Action.RETIRE_RANGE, at_ms), "j", "s b: gone"))
        runner.run(ledger.checkpoint([ended], at_ms + 1))
        runner.run(ledger.checkpoint([ended], at_ms + 2))
    retired = ("retire-range", 2), ("retire-range", 2), ("return-range", 3)
    again = ("retire-range", 6), ("retire-range", 6), ("return-range", 7)
    assert actions() == [("create-job", 1), *retired, *again]
    runner.run(ledger.checkpoint([replace(ended, layout_since=9, returned={"b": ""})], 9))
    assert actions()[-1] == ("return-range", 7), "not of the stage's layout"
    runner.run(ledger.note_deed(deed(Action.RETIRE_RANGE, 10), "j", "s A: gone"))
    runner.run(ledger.note_deed(deed(Action.RETIRE_RANGE, 10), "j", "s a: gone"))
    runner.run(ledger.checkpoint([replace(ended, stamp=1)], 11))
    assert actions()[-1] == ("retire-range", 10), "a newer chunk is saved"
    runner.run(ledger.checkpoint([replace(ended, stamp=3, returned={"A": ""})], 12))
    runner.run(ledger.checkpoint([replace(ended, stamp=4, returned={"A": "", "a": ""})], 13))
    assert actions()[-2:] == [("return-range", 12), ("return-range", 13)]
    records = runner.run(ledger.read_audit(50, None, "j", Action.RETURN_RANGE))
    assert [(each.deed.by.name, each.detail) for each in records[-2:]] == [
        ("the range itself", "s a: reports again, by w")
    ] * 2
    assert (records[0].deed.by.name, records[0].detail) == ("", "s a: reports again")


def test_many_ranges_end_their_retirement_at_once(ledger: Ledger, runner: asyncio.Runner) -> None:
    """One statement searches, and one writes: the commit of an epoch is in the same transaction."""
    runner.run(ledger.create(NewLayout("j", SPEC, ("s",)), 1, deed(Action.CREATE_JOB, 1)))
    names = [f"{number:04}" for number in range(4_000)]
    for name in names[:2]:
        runner.run(ledger.note_deed(deed(Action.RETIRE_RANGE, 2), "j", f"s {name}: gone"))
    ended = CheckpointChunk(
        "j", "s", 1, 1, 1, 0, 1, {"promises": bytes(8 * 4_000)}, returned=dict.fromkeys(names, "")
    )
    runner.run(ledger.checkpoint([ended], 3))
    runner.run(ledger.checkpoint([ended], 4))
    records = runner.run(ledger.read_audit(5_000, None, "j", Action.RETURN_RANGE))
    assert {each.detail for each in records} == {f"s {name}: reports again" for name in names}
    assert len(records) == 4_000


def test_the_changes_of_a_job_are_its_runs_and_its_records(
    ledger: Ledger, runner: asyncio.Runner
) -> None:
    for name in ("j", "other"):
        layout = NewLayout(name, SPEC, ("s", "s_2"))
        runner.run(ledger.create(layout, 1, deed(Action.CREATE_JOB, 1)))
        runner.run(ledger.note_deed(deed(Action.RETIRE_RANGE, 3), name, "s a: gone"))
    runner.run(ledger.note_deed(deed(Action.RETIRE_RANGE, 4), "j", "s_2 a: gone"))
    runner.run(ledger.open_run("j", NewRun(["s"], "driver-1"), 2, deed(Action.OPEN_RUN, 2)))
    runner.run(ledger.open_run("j", NewRun(["s_2"], "driver-2"), 5, deed(Action.OPEN_RUN, 5)))
    runner.run(ledger.end_run("j", RunEnd(1, Outcome.FAILED, 6), deed(Action.END_RUN, 6)))
    runner.run(ledger.reset("j", 8, deed(Action.RESET_JOB, 8)))

    def found(
        stage: str | None = None, span: Span = (1, 9), limit: int = 9
    ) -> tuple[list[str], list[int]]:
        changes = runner.run(ledger.changes("j", stage, span, limit))
        return [r.detail for r in changes.records], [each.run for each in changes.runs]

    assert found() == (["generation 2", "s_2 a: gone", "s a: gone", ""], [2, 1])
    assert found("s") == (["generation 2", "s a: gone", ""], [1])
    assert found("_") == (["generation 2", ""], []), "a pattern of SQL is a name"
    assert found(span=(2, 5)) == (["s_2 a: gone", "s a: gone"], [2, 1]), "by their begins"
    assert found(span=(6, 7)) == ([], [1])
    assert found(limit=1) == (["generation 2"], [2]), "the reset ends the run that goes on"
    with pytest.raises(UnknownJobError):
        runner.run(ledger.changes("x", None, (1, 9), 1))


def test_old_records_are_deleted(ledger: Ledger, runner: asyncio.Runner) -> None:
    for at_ms in (10, 20, 30):
        key = replace(KEY, name=f"k{at_ms}", digest=digest_of(str(at_ms)))
        runner.run(ledger.add_key(key, deed(Action.CREATE_KEY, at_ms)))
    assert runner.run(ledger.trim_audit(20)) == 1
    assert [r.deed.at_ms for r in all_of(ledger, runner)] == [30, 20]


def test_an_endless_list_of_stages_is_cut(ledger: Ledger, runner: asyncio.Runner) -> None:
    runner.run(ledger.create(NewLayout("j", SPEC, ("s",)), 1))
    stages = [f"{number:0100}" for number in range(100)]
    runner.run(ledger.open_run("j", NewRun(stages, "driver-1"), 1, deed(Action.OPEN_RUN)))
    [record] = all_of(ledger, runner)
    assert len(record.detail) == 1_000
    assert record.detail.endswith("…")


def test_the_first_key_is_made_once(ledger: Ledger, runner: asyncio.Runner) -> None:
    """Two replicas that each know of no key."""
    other = replace(KEY, name="other", digest=b"other")

    async def both() -> list[bool]:
        return list(
            await asyncio.gather(
                ledger.add_key(KEY, CREATE, first=True), ledger.add_key(other, CREATE, first=True)
            )
        )

    assert sorted(runner.run(both())) == [False, True]
    assert not runner.run(ledger.add_key(replace(KEY, name="third"), CREATE, first=True))
