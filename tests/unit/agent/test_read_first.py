"""Watermarks of topics that are read at a limited rate: none passes rows that are unread."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spark_agent.driver.read_first import ReadFirst
from spark_agent.jvm.progress import CommittedBatch

TOPIC = "taps"
MOST = 3
"""Rows of a partition in one batch."""


class World:
    """A topic of two partitions, and a query that reads it; watermarks cover the rows before them."""

    def __init__(self, first_epoch: int) -> None:
        self.ends = [0, 0]
        self.covered = {0: (0, 0)}
        """By watermark: the ends of the partitions when it was published."""
        self.read = [0, 0]
        self.first = ReadFirst(frozenset({TOPIC}))
        self.latest: CommittedBatch | None = None
        self.epoch = first_epoch
        self.passed: int | None = None

    def write(self, rows: tuple[int, int]) -> None:
        self.ends = [end + more for end, more in zip(self.ends, rows, strict=True)]

    def publish(self) -> None:
        self.covered[max(self.covered) + 1] = (self.ends[0], self.ends[1])

    def trigger(self, *, lists_first: bool, between: tuple[int, int]) -> None:
        """Poll and list in either order, with rows and a watermark in between; then run the batch."""
        listed = list(self.ends)
        if not lists_first:
            self.poll()
        self.write(between)
        self.publish()
        if lists_first:
            self.poll()
        else:
            listed = list(self.ends)
        self.read = [min(r + MOST, end) for r, end in zip(self.read, listed, strict=True)]
        self.latest = CommittedBatch(
            self.epoch,
            0,
            read={TOPIC: dict(enumerate(self.read))},
            latest={TOPIC: dict(enumerate(listed))},
        )
        self.epoch += 1

    def poll(self) -> None:
        self.passed = self.first.passed_ms(max(self.covered), self.latest)
        if self.passed is not None:
            covered = self.covered[self.passed]
            unread = [end for end, r in zip(covered, self.read, strict=True) if end > r]
            assert not unread, "a watermark has passed rows that are unread"


ROWS = st.tuples(st.integers(0, 7), st.integers(0, 7))


@given(
    first_epoch=st.sampled_from([0, 17]),
    steps=st.lists(st.tuples(st.booleans(), ROWS, ROWS), max_size=30),
)
def test_no_watermark_passes_unread_rows(
    first_epoch: int, steps: list[tuple[bool, tuple[int, int], tuple[int, int]]]
) -> None:
    world = World(first_epoch)
    for lists_first, before, between in steps:
        world.write(before)
        world.trigger(lists_first=lists_first, between=between)
    # Once nothing more is written, the last watermark passes with the last rows.
    last = max(world.covered) + 1
    world.publish()
    for _ in range(200):
        world.poll()
        if world.passed == last:
            break
        world.read = [min(r + MOST, end) for r, end in zip(world.read, world.ends, strict=True)]
        world.latest = CommittedBatch(
            world.epoch,
            0,
            read={TOPIC: dict(enumerate(world.read))},
            latest={TOPIC: dict(enumerate(world.ends))},
        )
        world.epoch += 1
    assert world.passed == last
    assert not world.first.is_waiting


def test_a_repeated_batch_shows_no_ends() -> None:
    """Spark repeats it after a restart, without a listing."""
    first = ReadFirst(frozenset({TOPIC}))
    assert first.passed_ms(5, None) is None
    repeated = CommittedBatch(9, 0, read={TOPIC: {0: 3}})
    assert first.passed_ms(5, repeated) is None
    begun = CommittedBatch(10, 0, read={TOPIC: {0: 4}}, latest={TOPIC: {0: 5}})
    assert first.passed_ms(5, begun) is None
    done = CommittedBatch(11, 0, read={TOPIC: {0: 5}}, latest={TOPIC: {0: 6}})
    assert first.passed_ms(5, done) == 5


def test_without_limited_topics_nothing_waits() -> None:
    assert ReadFirst(frozenset()).passed_ms(5, None) == 5
