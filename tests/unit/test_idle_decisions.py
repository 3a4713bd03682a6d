"""Decisions of a policy for idleness from one observation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from service.aggregator.idleness import decide, in_turns
from service.frontier.facts import Counts, Facts
from service.frontier.idleness import NEVER_PAUSED, Commits, next_sample
from service.frontier.policies import IdlePolicy
from service.frontier.ranges import ShardLayout
from service.frontier.timestamps import MIN
from service.model.observations import Instant, Settled, StageObservation

NOW = Instant(wall_ms=50_000, lease_ms=2_000)
EXCLUDE, FOLLOW = IdlePolicy(1_000), IdlePolicy(1_000, slack_ms=5_000)
QUIET = StageObservation(
    layout=ShardLayout.of(["a"]),
    promises=np.array([7]),
    idle=np.array([False]),
    reported_at_ms=np.array([49_900]),
    raised_at_ms=np.array([48_000]),
    facts={0: Facts(49_900, 100, None, None, backlog=0, quiet_since_ms=500)},
    counts=Counts(),
    owners=np.array([3]),
    held_since_ms=np.array([100]),
    idle_by_policy=set(),
    retired=set(),
    commits=None,
)
WORD = replace(QUIET, idle=np.array([True]))
"""Its worker has said that it is idle."""
PAUSED = next_sample(None, 0, {"a"}, after_ms=1_000)


def test_a_quiet_shard_is_left_out_or_follows_the_clock() -> None:
    assert decide(EXCLUDE, QUIET, NOW, NEVER_PAUSED) == [Settled(0, 3, 500, True, MIN)]
    assert decide(FOLLOW, QUIET, NOW, NEVER_PAUSED) == [Settled(0, 3, 500, False, 45_000)]


def test_a_shard_that_was_left_out_before_the_clock_is_followed_is_waited_for() -> None:
    idle = replace(WORD, idle_by_policy={0})
    assert decide(FOLLOW, idle, NOW, NEVER_PAUSED) == [Settled(0, 3, 500, False, MIN)]


def test_a_paused_shard_is_waited_for() -> None:
    assert decide(EXCLUDE, QUIET, NOW, PAUSED) == []
    idle = replace(WORD, idle_by_policy={0})
    assert decide(EXCLUDE, idle, NOW, PAUSED) == [Settled(0, 3, 500, False, MIN)]


def test_a_pause_is_no_time_in_which_anybody_watched() -> None:
    """Its worker kept the lease and did not look: what came meanwhile, it reads only now."""
    samples = next_sample(PAUSED, 500, {"a"}, after_ms=1_000)
    for at_ms in (1_400, 2_399):
        samples = next_sample(samples, at_ms, (), after_ms=1_000)
        assert decide(EXCLUDE, QUIET, Instant(50_000, at_ms), samples) == []
        assert decide(FOLLOW, QUIET, Instant(50_000, at_ms), samples) == []
    samples = next_sample(samples, 2_400, (), after_ms=1_000)
    assert decide(EXCLUDE, QUIET, Instant(50_000, 2_400), samples) == [
        Settled(0, 3, 500, True, MIN)
    ]


def test_who_has_not_looked_for_long_decides_nothing_new_and_ends_nothing() -> None:
    """A replica that starts does not know of the pauses before, and the others may."""
    first = next_sample(None, NOW.lease_ms, (), after_ms=1_000)
    assert decide(EXCLUDE, QUIET, NOW, first) == []
    idle = replace(WORD, idle_by_policy={0})
    assert decide(EXCLUDE, idle, NOW, first) == []


def test_idle_by_its_workers_word_is_left_as_it_is() -> None:
    """Else it would be idle by policy, and a report that ends its own word would not end that."""
    for policy in (EXCLUDE, FOLLOW):
        assert decide(policy, WORD, NOW, NEVER_PAUSED) == []


def test_a_batch_that_still_runs_may_have_rows_of_a_quiet_shard() -> None:
    """Its run committed all the time, but what the batch since then has read, nobody knows yet."""
    unleased = replace(QUIET, owners=np.array([0]), held_since_ms=np.array([0]))
    recent = replace(
        unleased, commits=Commits(0, last_ms=1_400, count=9, before_ms=1_200, arrived_ms=1_500)
    )
    assert decide(EXCLUDE, recent, NOW, NEVER_PAUSED) == []
    enough = replace(
        unleased, commits=Commits(0, last_ms=1_500, count=9, before_ms=1_200, arrived_ms=1_500)
    )
    assert decide(EXCLUDE, enough, NOW, NEVER_PAUSED) == [Settled(0, 0, 500, True, MIN)]
    # The last committed batch was planned 800 ms ago at the earliest.
    follows = Settled(0, 0, 500, False, NOW.wall_ms - 800 - 5_000)
    assert decide(FOLLOW, enough, NOW, NEVER_PAUSED) == [follows]


def test_what_does_not_leave_the_minimum_comes_first() -> None:
    long_ago, lately = Settled(0, 3, 5, True, MIN), Settled(1, 3, 90, True, MIN)
    back, never = Settled(2, 3, 99, False, MIN), Settled(3, 3, None, True, MIN)
    assert in_turns([lately, long_ago, back, never]) == [[back], [long_ago, never], [lately]]
    assert in_turns([back]) == [[back]]
    assert in_turns([lately, back]) == [[back], [lately]]
    assert in_turns([never]) == [[never]]
    assert in_turns([]) == []


def test_very_many_shards_may_leave_at_once() -> None:
    """All at the same two moments, as after two packed reports."""
    many = [Settled(index, 3, index % 2, True, MIN) for index in range(200_000)]
    assert [len(turn) for turn in in_turns(many)] == [100_000, 100_000]
