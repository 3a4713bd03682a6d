"""Topics of Kafka that are deleted and made again, which Spark does not notice."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final, Protocol

from spark_agent.clock import Clock
from spark_agent.exceptions import QueryFailedError, Unavailable
from spark_agent.jvm.topics import TopicsNotDescribedError

_INTERVAL_MS: Final = 1_000
"""Interval of the checks while a query finds nothing."""


class TopicNotes(Protocol):
    """Notes in the query's checkpoint: `spark_agent.driver.preconditions.Resumption`."""

    def topic_ids(self, topic: str) -> Collection[str]:
        """Return the noted ids of a source's topic: one, or none."""
        ...

    def note_topic_id(self, topic: str, id_: str) -> None:
        """Note the id of a source's topic."""
        ...


class ReadsTopics(Protocol):
    """A running query: `spark_agent.jvm.running_query.RunningQuery`."""

    def topic_ids(self) -> Mapping[str, str]:
        """Return the ids of the topics that the query reads, by source and topic.

        Raises `TopicsNotDescribedError`.
        """
        ...

    def has_just_found_nothing(self) -> bool:
        """Return whether the latest trigger has ended, and found no new data."""
        ...


class TopicIds:
    """Keeps the watermark from passing rows of a topic that was deleted and made again.

    Spark goes by offsets alone. If the new topic has more rows than were read from the old one, Spark
    goes on behind these, and the first rows of the new topic are never read. Kafka gives each topic an
    id. So the ids are compared with those in the checkpoint before each epoch is committed, and before a
    source counts as idle or as read to its end. They are noted as soon as the query has its sources, a
    moment after its first start: a topic that is made again within this moment is not noticed.
    """

    def __init__(
        self, name: str, running: ReadsTopics, notes: TopicNotes, clock: Clock, *, active: bool
    ) -> None:
        """`active`: the query reads topics."""
        self._name = name
        self._running = running
        self._notes = notes
        self._clock = clock
        self._active = active
        self._known: dict[str, str] = {}
        self._again_ms: int | None = None

    def check(self, *, now: bool) -> None:
        """Compare the ids: `now`, while none is known, or once in a while if the query finds nothing.

        Raises `QueryFailedError` if a topic was made again, `Unavailable` if a broker does not answer.
        """
        if not self._active:
            return
        now_ms = self._clock.steady_ms()
        is_due = self._again_ms is None or now_ms >= self._again_ms
        # A trigger that waits for a broker has not found anything, and a request would wait as well.
        finds_nothing = is_due and self._running.has_just_found_nothing()
        if self._known and not now and not finds_nothing:
            return
        self._again_ms = now_ms + _INTERVAL_MS
        try:
            for topic, id_ in self._running.topic_ids().items():
                self._compare(topic, id_)
        except TopicsNotDescribedError as error:
            raise Unavailable(str(error)) from None

    def _compare(self, topic: str, id_: str) -> None:
        if topic not in self._known:
            noted = self._notes.topic_ids(topic)
            if not noted:
                self._notes.note_topic_id(topic, id_)
            self._known[topic] = next(iter(noted), id_)
        if self._known[topic] != id_:
            raise QueryFailedError(made_again_message(self._name, topic.split("-", 1)[1]))


def made_again_message(query: str, topic: str) -> str:
    """Return the message of a query whose topic was made again.

    >>> print(made_again_message("hours", "taps")[:60])
    tidegauge: query hours: topic taps was deleted and made agai
    """
    return (
        f"tidegauge: query {query}: topic {topic} was deleted and made again since the query has read "
        f"it. Spark goes on at the old offsets, and would leave out the first rows of the new topic. To "
        f"read it from its beginning, start over with Pipeline.reset(), a new checkpoint and an empty "
        f"output"
    )
