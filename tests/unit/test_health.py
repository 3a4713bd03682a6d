"""The rule of health, on worlds that are made up."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from service.aggregator import REMEDIES
from service.frontier.graph import Pipeline, Stage, StageWatermark, Status
from service.frontier.health import (
    SEVERITIES,
    Health,
    Outcome,
    Vitals,
    badness,
    has_trouble,
    health,
    healths,
    holds_back,
    holds_back_next,
    stages_below_ended,
    waiting_stages,
    worst,
)
from service.frontier.ranges import KeyLayout, ShardLayout
from service.frontier.timestamps import MAX, MIN

counts = st.integers(0, 3)
RUNBOOK = Path(__file__).parents[2] / "docs" / "runbook.md"
vitals = st.builds(
    Vitals, counts, counts, counts, st.none() | st.sampled_from(Outcome), st.booleans()
)
statuses = st.sampled_from(Status)
TROUBLED = {*SEVERITIES, Health.WAITING}


@given(statuses, vitals, st.booleans())
def test_it_is_the_first_that_fits(status: Status, seen: Vitals, waits: bool) -> None:
    found = health(status, seen, waits=waits)
    outcome = seen.outcome
    fits = [
        status is Status.FINAL,
        seen.is_unpublished,
        outcome is Outcome.FAILED,
        seen.silent > 0,
        (seen.no_worker > 0 and outcome is None) or outcome is Outcome.STOPPED,
        seen.stalled > 0,
        waits,
        outcome is Outcome.FINISHED,
        status is Status.IDLE,
        True,
    ]
    assert list(Health)[fits.index(True)] is found


@given(statuses, vitals, st.booleans())
def test_after_a_clean_end_nobody_is_missed(status: Status, seen: Vitals, waits: bool) -> None:
    ended = Vitals(seen.silent, seen.no_worker, seen.stalled, Outcome.FINISHED)
    assert health(status, ended, waits=waits) is not Health.NO_WORKER


@given(statuses, vitals)
def test_a_range_more_in_trouble_makes_nothing_better(status: Status, seen: Vitals) -> None:
    more = Vitals(seen.silent + 1, seen.no_worker + 1, seen.stalled + 1, seen.outcome)
    before, after = (health(status, each, waits=False) for each in (seen, more))
    assert has_trouble(more)
    # A stage that never reported may be younger than one that has lost its workers.
    assert after in TROUBLED or status is Status.FINAL
    assert before not in TROUBLED or after in TROUBLED


NAMES = ("a", "b", "c", "d", "e")
times = st.sampled_from((MIN, 3, 5, 9, MAX))


@st.composite
def worlds(
    draw: st.DrawFn,
) -> tuple[Pipeline, dict[str, StageWatermark], dict[str, Vitals], dict[str, int]]:
    stages: dict[str, Stage] = {}
    for number, name in enumerate(NAMES):
        inputs = draw(st.lists(st.sampled_from(NAMES[:number]), unique=True)) if number else []
        if not inputs:
            stages[name] = Stage((), ShardLayout.of("0"))
        else:
            keyed = draw(st.booleans())
            stages[name] = Stage(tuple(inputs), KeyLayout.tile(1) if keyed else None)
    watermarks = {
        name: StageWatermark(draw(times), draw(times), draw(st.booleans())) for name in NAMES
    }
    seen = {name: draw(vitals) for name in NAMES if stages[name].layout is not None}
    return Pipeline(stages), watermarks, seen, {name: draw(times) for name in seen}


@given(worlds())
def test_whoever_waits_waits_for_a_root_cause(
    world: tuple[Pipeline, dict[str, StageWatermark], dict[str, Vitals], dict[str, int]],
) -> None:
    pipeline, watermarks, seen, lowest = world
    found = healths(pipeline, pipeline.order, watermarks, seen, lowest.get)
    waiting = waiting_stages(pipeline, watermarks, found, lowest.get)
    held = {
        root: holds_back(pipeline, root, watermarks, waiting)
        for root, each in found.items()
        if each in SEVERITIES
    }
    for name, each in found.items():
        if each is Health.WAITING:
            assert any(name in below for below in held.values())
            assert any(root in pipeline.ancestors([name]) for root in held)
    for root, below in held.items():
        assert all(found[name] is Health.WAITING or found[name] in SEVERITIES for name in below)
        assert root not in below
    assert worst(found.values()) in found.values()
    assert all(badness(worst(found.values())) <= badness(each) for each in found.values())


@given(worlds())
def test_where_nobody_is_in_trouble_nobody_waits(
    world: tuple[Pipeline, dict[str, StageWatermark], dict[str, Vitals], dict[str, int]],
) -> None:
    pipeline, watermarks, _, lowest = world
    found = healths(pipeline, pipeline.order, watermarks, {}, lowest.get)
    assert not set(found.values()) & TROUBLED


@given(worlds())
def test_a_stage_below_an_ended_input_is_sound_and_has_such_an_input_above(
    world: tuple[Pipeline, dict[str, StageWatermark], dict[str, Vitals], dict[str, int]],
) -> None:
    pipeline, watermarks, seen, lowest = world
    found = healths(pipeline, pipeline.order, watermarks, seen, lowest.get)
    for name in stages_below_ended(pipeline, watermarks, found, lowest.get):
        assert found[name] is Health.OK
        assert lowest.get(name, MAX) >= watermarks[name].input, "its own ranges do not hold it"
        assert any(found[each] is Health.ENDED for each in pipeline.ancestors([name]))


@given(worlds(), st.sampled_from(NAMES))
def test_a_stage_waits_now_or_later_and_never_both(
    world: tuple[Pipeline, dict[str, StageWatermark], dict[str, Vitals], dict[str, int]], root: str
) -> None:
    pipeline, watermarks, seen, lowest = world
    found = healths(pipeline, pipeline.order, watermarks, seen, lowest.get)
    held = holds_back(
        pipeline, root, watermarks, waiting_stages(pipeline, watermarks, found, lowest.get)
    )
    later = holds_back_next(pipeline, root, watermarks, held)
    assert not {root, *held} & {*later}
    assert {*later} < pipeline.reach([root])
    assert all(watermarks[name].status is not Status.FINAL for name in later)


def test_each_root_cause_has_a_remedy_and_a_section_of_the_runbook() -> None:
    assert REMEDIES.keys() == SEVERITIES.keys()
    sections = {
        line.removeprefix("## ")
        for line in RUNBOOK.read_text("utf-8").splitlines()
        if line.startswith("## ")
    }
    assert sections >= {
        "Publishing fails",
        "Run failed",
        "No worker",
        "Range never reported",
        "Stalled",
    }
