"""Ids of topics: compared before each commit, and while a query finds nothing."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from spark_agent.exceptions import QueryFailedError, Unavailable
from spark_agent.jvm.topics import TopicsNotDescribedError
from spark_agent.supervision.topic_ids import TopicIds
from tests.unit.agent.answers import FakeClock


class World:
    """A query that reads one topic, and its checkpoint."""

    def __init__(self) -> None:
        self.ids: dict[str, str] = {"0-taps": "first"}
        self.noted: dict[str, str] = {}
        self.finds_nothing = False
        self.answers = True
        self.requests = 0
        self.clock = FakeClock()

    def start(self, *, active: bool = True) -> TopicIds:
        return TopicIds("hours", Running(self), Notes(self), self.clock, active=active)


class Running:
    def __init__(self, world: World) -> None:
        self.world = world

    def topic_ids(self) -> dict[str, str]:
        self.world.requests += 1
        if not self.world.answers:
            raise TopicsNotDescribedError("Kafka at 127.0.0.1:9 does not describe the topics")
        return self.world.ids

    def has_just_found_nothing(self) -> bool:
        return self.world.finds_nothing


class Notes:
    def __init__(self, world: World) -> None:
        self.world = world

    def topic_ids(self, topic: str) -> Collection[str]:
        return [self.world.noted[topic]] if topic in self.world.noted else []

    def note_topic_id(self, topic: str, id_: str) -> None:
        assert topic not in self.world.noted
        self.world.noted[topic] = id_


@pytest.fixture
def world() -> World:
    return World()


def test_a_topic_that_is_made_again_while_the_query_runs(world: World) -> None:
    topics = world.start()
    topics.check(now=True)
    assert world.noted == {"0-taps": "first"}
    topics.check(now=True)
    world.ids = {"0-taps": "second"}
    with pytest.raises(QueryFailedError, match="hours: topic taps was deleted and made again"):
        topics.check(now=True)


def test_a_topic_that_is_made_again_while_the_query_is_stopped(world: World) -> None:
    world.noted = {"0-taps": "first"}
    world.ids = {"0-taps": "second"}
    with pytest.raises(QueryFailedError, match="taps was deleted"):
        world.start().check(now=True)


def test_the_same_name_in_another_cluster_is_another_topic(world: World) -> None:
    world.ids = {"0-taps": "first", "1-taps": "another"}
    topics = world.start()
    topics.check(now=True)
    topics.check(now=True)
    assert world.noted == world.ids


def test_a_query_that_finds_nothing_is_checked_once_in_a_while(world: World) -> None:
    topics = world.start()
    topics.check(now=False)
    topics.check(now=False)
    assert world.requests == 1
    world.clock.now_ms += 1_000
    topics.check(now=False)
    assert world.requests == 1
    world.finds_nothing = True
    for _ in range(3):
        topics.check(now=False)
    assert world.requests == 2
    world.clock.now_ms += 1_000
    topics.check(now=False)
    assert world.requests == 3


def test_the_ids_are_noted_before_the_first_commit(world: World) -> None:
    """As soon as the query has its sources: its first batch may take long."""
    topics = world.start()
    sources, world.ids = world.ids, {}
    topics.check(now=False)
    assert not world.noted
    world.ids = sources
    topics.check(now=False)
    assert world.noted == {"0-taps": "first"}


def test_without_an_answer_of_the_broker_nothing_is_committed(world: World) -> None:
    topics = world.start()
    world.answers = False
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:9 does not describe"):
        topics.check(now=True)


def test_a_query_without_topics_sends_nothing(world: World) -> None:
    world.start(active=False).check(now=True)
    assert world.requests == 0
