"""The invariants of the design that are the pure core's to keep, as properties."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.frontier import ranges
from service.frontier.agreement import Agreement, Member, agree, agreement, weight
from service.frontier.graph import Pipeline, Stage, StageWatermark, input_agreement
from service.frontier.promises import keyed_promise
from service.frontier.ranges import KEY_SPACE, KeyLayout, KeyRange, ShardLayout, inherit, staying
from service.frontier.timestamps import MAX, MIN

times = st.one_of(st.just(MIN), st.integers(-50, 50), st.just(MAX))
members = st.builds(Member, times, st.booleans())
key_layouts = st.sets(st.integers(1, KEY_SPACE - 1), max_size=6).map(
    lambda cuts: KeyLayout.at((0, *sorted(cuts), KEY_SPACE))
)


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    """Draw a graph of sources, keyed stages and passthroughs."""
    stages = {"s0": Stage((), ShardLayout.of(["0", "1"]))}
    for number in range(1, draw(st.integers(2, 7))):
        kind = draw(st.sampled_from(["source", "keyed", "passthrough"]))
        some = st.lists(st.sampled_from(sorted(stages)), min_size=1, max_size=3, unique=True)
        inputs = () if kind == "source" else tuple(sorted(draw(some)))
        layout = {"source": ShardLayout.of(["0"]), "keyed": KeyLayout.tile(1)}.get(kind)
        stages[f"s{number}"] = Stage(inputs, layout)
    return Pipeline(stages)


def agreements_of(data: st.DataObject, pipeline: Pipeline) -> dict[str, Agreement]:
    found: dict[str, Agreement] = {}
    for name, stage in pipeline.stages.items():
        if stage.is_source:
            found[name] = agreement(data.draw(st.lists(members, min_size=1, max_size=3)))
        elif stage.layout is not None:
            found[name] = Agreement(data.draw(times))
    return found


def advance(
    pipeline: Pipeline, before: Mapping[str, StageWatermark], agreements: Mapping[str, Agreement]
) -> dict[str, StageWatermark]:
    return {**before, **pipeline.propagate(before, agreements, pipeline.stages)}


@given(st.data())
def test_invariant_1_monotone(data: st.DataObject) -> None:
    pipeline = data.draw(pipelines())
    published = dict.fromkeys(pipeline.stages, StageWatermark())
    for _ in range(data.draw(st.integers(1, 6))):
        agreements = agreements_of(data, pipeline)
        after = advance(pipeline, published, agreements)
        for name, was in published.items():
            assert after[name].input >= was.input
            assert after[name].output >= was.output
        published = after


@given(st.data())
def test_invariant_1_any_order_of_rounds_ends_at_the_same_watermarks(data: st.DataObject) -> None:
    """A semilattice: replicas that see advances one by one or all at once agree in the end."""
    pipeline = data.draw(pipelines())
    start = dict.fromkeys(pipeline.stages, StageWatermark())
    agreements = agreements_of(data, pipeline)
    at_once = advance(pipeline, start, agreements)
    one_by_one = dict(start)
    for name in data.draw(st.permutations(sorted(pipeline.stages))):
        known = {n: a if n == name else Agreement(MIN) for n, a in agreements.items()}
        one_by_one = {**one_by_one, **pipeline.propagate(one_by_one, known, [name])}
    settled = advance(pipeline, one_by_one, agreements)
    for name, watermark in at_once.items():
        assert settled[name].output >= watermark.output
        assert one_by_one[name].output <= settled[name].output


@given(st.lists(members, min_size=1))
def test_invariant_2_complete(some: list[Member]) -> None:
    reached = agreement(some)
    waited_for = [member for member in some if not member.idle]
    if any(member.promise == MIN for member in waited_for):
        assert reached.watermark == MIN
    assert all(reached.watermark <= member.promise for member in waited_for)
    assert agreement([*some, Member()]).watermark == MIN


@given(st.lists(members, min_size=1))
def test_invariant_2_idle_and_final_never_jump_to_the_end(some: list[Member]) -> None:
    """FLINK-38477: the end of time is reached by all being final, in no other way."""
    everyone_is_final = all(member.promise == MAX for member in some)
    assert (agreement(some).watermark == MAX) == everyone_is_final


@given(st.lists(members, min_size=1))
def test_running_figures_say_the_same_as_the_members(some: list[Member]) -> None:
    lowest = min(weight(member.promise, idle=member.idle) for member in some)
    idle = [member.promise for member in some if member.idle and member.promise != MAX]
    assert agree(lowest, len(idle), min(idle, default=MAX)) == agreement(some)


@given(times, st.dictionaries(st.text(max_size=2), st.integers(-50, 50), max_size=3))
def test_invariant_4_never_early(observed: int, holds: dict[str, int]) -> None:
    promise = keyed_promise(observed, holds.values())
    assert promise <= observed
    assert all(promise <= hold for hold in holds.values())
    assert promise in {observed, *holds.values()}


@given(st.data())
def test_invariant_4_no_input_is_ahead_of_an_upstream_that_is_waited_for(
    data: st.DataObject,
) -> None:
    pipeline = data.draw(pipelines())
    published = dict.fromkeys(pipeline.stages, StageWatermark())
    for _ in range(data.draw(st.integers(1, 4))):
        before = published
        published = advance(pipeline, published, agreements_of(data, pipeline))
        for name, stage in pipeline.stages.items():
            if stage.is_source or published[name].input == before[name].input:
                continue
            upstreams = [published[upstream] for upstream in stage.inputs]
            assert published[name].input == input_agreement(upstreams).watermark
            assert all(published[name].input <= up.output for up in upstreams if not up.idle)


@given(key_layouts, key_layouts, st.data())
def test_invariant_8_layout_changes_are_ordered(
    old: KeyLayout, new: KeyLayout, data: st.DataObject
) -> None:
    """Whatever key one looks at, the new range's promise is no more than the old one's."""
    promises = data.draw(st.lists(times, min_size=len(old), max_size=len(old)))
    inherited = inherit(old, promises, new).tolist()
    assert len(inherited) == len(new)
    for key in {0, KEY_SPACE - 1, *old.bounds[:-1].tolist(), *new.bounds[:-1].tolist()}:
        assert promise_at(new, inherited, key) <= promise_at(old, promises, key)
    assert min(inherited) == min(promises)


@given(st.sets(st.sampled_from("abcd"), min_size=1), st.sets(st.sampled_from("abcd"), min_size=1))
def test_invariant_8_a_new_shard_is_waited_for(old: set[str], new: set[str]) -> None:
    inherited = inherit(ShardLayout.of(old), [7] * len(old), ShardLayout.of(new))
    for shard, promise in zip(ShardLayout.of(new).shards, inherited, strict=True):
        assert promise == (7 if shard in old else MIN)


@given(key_layouts)
def test_a_layout_tiles_the_key_space(layout: KeyLayout) -> None:
    ranges = [KeyRange.parse(name) for name in layout.names]
    assert KeyLayout.of(reversed(ranges)) == layout
    assert sum(r.end - r.start for r in ranges) == KEY_SPACE


def promise_at(layout: KeyLayout, promises: list[int], key: int) -> int:
    for name, promise in zip(layout.names, promises, strict=True):
        key_range = KeyRange.parse(name)
        if key_range.start <= key < key_range.end:
            return promise
    raise AssertionError(f"no range holds key {key}")


@given(key_layouts, key_layouts, st.data())
def test_names_lead_to_ranges_and_back(old: KeyLayout, new: KeyLayout, data: st.DataObject) -> None:
    """One by one, by bisection, as an array, and through what two layouts have in common."""
    names = list(old.names)
    assert [old.name(index) for index in range(len(old))] == names
    assert [old.index[name] for name in names] == list(range(len(old)))
    strangers = [*new.names, "ffffffff-fffffffe", "0" * 17, "x" * 17, "é" * 17, "", names[-1] + "0"]
    asked = data.draw(st.permutations([*names, *strangers]))
    wanted = [old.index.get(name, -1) for name in asked]
    with pytest.MonkeyPatch.context() as patch:
        assert old.find(asked).tolist() == wanted
        patch.setattr(ranges, "_MANY", 0)
        patch.setattr(ranges, "_INDEXED", 0)
        large = KeyLayout.at(old.bounds.tolist())
        assert [large.index.get(name, -1) for name in asked] == wanted
        assert large.find(asked).tolist() == wanted
    from_, to = staying(old, new)
    assert {(old.name(i), new.name(k)) for i, k in zip(from_, to, strict=True)} == {
        (name, name) for name in names if name in new.index
    }
