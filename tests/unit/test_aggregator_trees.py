"""Trees of aggregators: an inner node has one shard for each child, and relays copy outputs upward.

A relay reads a child's output and delivers the reading later, repeatedly, out of order, or never. The
model consists of the rules of `service.frontier` alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from service.frontier.agreement import Member, agreement
from service.frontier.graph import StageWatermark, Status, input_agreement
from service.frontier.promises import source_promise
from service.frontier.reports import join_report
from service.frontier.timestamps import MAX, MIN

NOWHERE = StageWatermark()
times = st.one_of(st.integers(-50, 50), st.just(MAX))


@dataclass
class Aggregator:
    """A source of one service: its members by name, and the published watermark."""

    name: str
    members: dict[str, Member]
    watermark: StageWatermark = NOWHERE
    generation: int = 1
    children: list[Aggregator] = field(default_factory=list["Aggregator"])

    def report(self, shard: str, watermark: int, *, idle: bool = False) -> bool:
        """Apply a report as a service does; return whether the shard is in the layout."""
        if shard not in self.members:
            return False
        before = self.members[shard]
        promise, is_idle = join_report(before.promise, source_promise(watermark), idle=idle)
        self.members[shard] = Member(promise, is_idle)
        reached = agreement(self.members.values())
        self.watermark = self.watermark.advance(MIN, reached.watermark, idle=reached.idle)
        return True

    def reset(self, shards: list[str]) -> None:
        """Begin the next generation."""
        self.members = dict.fromkeys(shards, Member())
        self.watermark = NOWHERE
        self.generation += 1

    def descend(self) -> Iterator[Aggregator]:
        """Yield this aggregator and all below it, the lowest first."""
        for child in self.children:
            yield from child.descend()
        yield self

    def leaves(self) -> Iterator[Aggregator]:
        return (each for each in self.descend() if not each.children)


def shard_of(child: Aggregator) -> str:
    return f"{child.name}.{child.generation}"


def parent_of(name: str, children: list[Aggregator]) -> Aggregator:
    members = dict.fromkeys(map(shard_of, children), Member())
    return Aggregator(name, members, children=children)


@st.composite
def trees(draw: st.DrawFn, depth: int = 2, name: str = "root") -> Aggregator:
    """Draw a tree of up to three levels; the root is never a leaf."""
    if depth == 0 or (name != "root" and draw(st.booleans())):
        count = draw(st.integers(1, 3))
        return Aggregator(name, {str(n): Member() for n in range(count)})
    count = draw(st.integers(1, 3))
    children = [draw(trees(depth - 1, f"{name}-{n}")) for n in range(count)]
    return parent_of(name, children)


@dataclass(frozen=True)
class Reading:
    """A child's output as a relay has read it, and the shard that it is for."""

    parent: Aggregator
    shard: str
    seen: StageWatermark

    def deliver(self, *, idle: bool = False) -> bool:
        return self.parent.report(self.shard, self.seen.output, idle=idle and self.seen.idle)


def reading(parent: Aggregator, child: Aggregator) -> Reading:
    return Reading(parent, shard_of(child), child.watermark)


def edges(root: Aggregator) -> list[tuple[Aggregator, Aggregator]]:
    """Return each parent and child, the lowest first."""
    return [(parent, child) for parent in root.descend() for child in parent.children]


def flat_minimum(root: Aggregator, former: Mapping[str, Sequence[Member]] | None = None) -> int:
    """Return the watermark of one aggregator that has every shard of the tree.

    `former`: the shards of regions that were reset, as they were before.
    """
    past = former or {}
    leaves = [past.get(leaf.name) or leaf.members.values() for leaf in root.leaves()]
    return agreement(member for members in leaves for member in members).watermark


class Tree(RuleBasedStateMachine):
    """Reports, and relays with stale readings, until a region is reset; then the parents, too."""

    readings: Bundle[Reading] = Bundle("readings")

    @initialize(root=trees())
    def begin(self, root: Aggregator) -> None:
        self.root = root
        self.shown = MIN
        self.former: dict[str, Sequence[Member]] = {}
        """Members of regions that were reset since their parents were, as they were before."""

    @rule(data=st.data(), watermark=times)
    def report(self, data: st.DataObject, watermark: int) -> None:
        leaf = data.draw(st.sampled_from(list(self.root.leaves())))
        leaf.report(data.draw(st.sampled_from(sorted(leaf.members))), watermark)

    @rule(watermark=times)
    def report_everywhere(self, watermark: int) -> None:
        for leaf in self.root.leaves():
            for shard in leaf.members:
                leaf.report(shard, watermark)

    @rule(target=readings, data=st.data())
    def read(self, data: st.DataObject) -> Reading:
        return reading(*data.draw(st.sampled_from(edges(self.root))))

    @rule(one=readings)
    def deliver(self, one: Reading) -> None:
        one.deliver()

    @rule(data=st.data())
    def reset_a_region(self, data: st.DataObject) -> None:
        """Reset a leaf alone: no relay of its new generation finds a shard."""
        leaf = data.draw(st.sampled_from(list(self.root.leaves())))
        self.former.setdefault(leaf.name, list(leaf.members.values()))
        leaf.reset(sorted(leaf.members))
        [(parent, child)] = [each for each in edges(self.root) if each[1] is leaf]
        assert not reading(parent, child).deliver()

    @rule()
    def reset_all_above(self) -> None:
        """Reset every parent, with the shards of the children's present generations."""
        for each in self.root.descend():
            if each.children:
                each.reset([shard_of(child) for child in each.children])
        self.shown = MIN
        self.former.clear()

    @rule()
    def settle(self) -> None:
        """Run every relay once, the lowest first: the root reaches the flat minimum."""
        refused = [not reading(*edge).deliver() for edge in edges(self.root)]
        assert any(refused) == bool(self.former)
        if not self.former:
            assert self.root.watermark.output == flat_minimum(self.root)

    @invariant()
    def invariant_1_monotone(self) -> None:
        assert self.root.watermark.output >= self.shown
        self.shown = self.root.watermark.output

    @invariant()
    def invariant_4_never_early(self) -> None:
        """The root is at most the flat minimum, with regions as they were before they were reset."""
        assert self.root.watermark.output <= flat_minimum(self.root, self.former)


TestTree = Tree.TestCase
TestTree.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_a_region_that_was_reset_holds_its_parents_at_its_former_promise() -> None:
    """They advance up to it with the other regions, and not further."""
    west, east = (Aggregator(name, {"0": Member()}) for name in ("west", "east"))
    root = parent_of("root", [west, east])
    west.report("0", 5)
    assert reading(root, west).deliver()
    west.reset(["0"])
    for leaf in (west, east):
        leaf.report("0", 9)
    assert [reading(root, leaf).deliver() for leaf in (west, east)] == [False, True]
    assert root.watermark.output == 5


@given(trees(), st.data())
def test_invariant_2_complete_in_a_tree(root: Aggregator, data: st.DataObject) -> None:
    """A shard that has never promised holds the root, wherever in the tree it is."""
    leaves = list(root.leaves())
    silent = data.draw(st.sampled_from(leaves))
    for leaf in leaves:
        for shard in sorted(leaf.members)[leaf is silent :]:
            leaf.report(shard, 7)
    for edge in edges(root):
        reading(*edge).deliver()
    assert root.watermark.status is Status.UNKNOWN


@given(trees(), st.data())
def test_a_tree_is_final_once_each_region_is(root: Aggregator, data: st.DataObject) -> None:
    order = data.draw(st.permutations([(a, s) for a in root.leaves() for s in sorted(a.members)]))
    for leaf, shard in order:
        assert root.watermark.status is not Status.FINAL
        leaf.report(shard, MAX)
        for edge in edges(root):
            reading(*edge).deliver(idle=True)
    assert root.watermark.status is Status.FINAL


@given(st.lists(st.tuples(times, st.booleans()), min_size=1, max_size=4))
def test_a_relay_is_an_edge_of_the_graph(regions: list[tuple[int, bool]]) -> None:
    """Relayed shards, idle ones included, agree as the upstreams of a passthrough stage do."""
    children = [Aggregator(f"r{n}", {"0": Member()}) for n in range(len(regions))]
    root = parent_of("root", children)
    for child, (watermark, idle) in zip(children, regions, strict=True):
        child.report("0", watermark, idle=idle)
        reading(root, child).deliver(idle=True)
    upstreams = input_agreement(child.watermark for child in children)
    relayed = agreement(root.members.values())
    assert (relayed.watermark, relayed.idle) == (upstreams.watermark, upstreams.idle)


def test_idleness_is_not_a_promise() -> None:
    """A region returns from idleness with old rows: a stale copy of its idleness is early there."""
    west, east = (Aggregator(name, {"0": Member()}) for name in ("west", "east"))
    east.report("0", 20)
    west.report("0", 5, idle=True)
    passing, holding = parent_of("passing", [west, east]), parent_of("holding", [west, east])
    stale = [reading(passing, west), reading(passing, east), reading(holding, west)]
    west.report("0", 6)
    for each in (*stale, reading(holding, east)):
        each.deliver(idle=each.parent is passing)
    assert (passing.watermark.output, holding.watermark.output) == (20, 5)
