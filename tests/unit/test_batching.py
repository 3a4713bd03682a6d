"""Requests that share a call, and that do not wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from service.errors import UnavailableError
from service.live import batching
from service.live.batching import Batcher

pytestmark = pytest.mark.anyio


class Store:
    """Answers a call once it is let go; a number asked is a weight, and is its own answer."""

    def __init__(self) -> None:
        self.calls: list[Sequence[int]] = []
        self.gates: list[asyncio.Event] = []

    async def __call__(self, asked: Sequence[int]) -> Sequence[int | Exception]:
        self.calls.append(asked)
        gate = asyncio.Event()
        self.gates.append(gate)
        await gate.wait()
        if min(asked) < 0:
            raise UnavailableError("away")
        return asked


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def batcher(store: Store) -> Batcher[int, int]:
    return Batcher(store, abs, 2)


async def ask(batcher: Batcher[int, int], *weights: int) -> list[asyncio.Task[int]]:
    asking = [asyncio.create_task(batcher.submit(weight)) for weight in weights]
    for _ in range(3):
        await asyncio.sleep(0)
    return asking


async def test_what_is_light_shares_the_next_call(batcher: Batcher[int, int], store: Store):
    one = await ask(batcher, 1)
    more = await ask(batcher, 2, 3)
    assert store.calls == [[1]]
    store.gates[0].set()
    assert await asyncio.gather(*one) == [1]
    await asyncio.sleep(0)
    assert store.calls == [[1], [2, 3]]
    store.gates[1].set()
    assert await asyncio.gather(*more) == [2, 3]


async def test_what_is_heavy_has_a_call_of_its_own(batcher: Batcher[int, int], store: Store):
    half = batching._OWN_CALL_WEIGHT // 2
    asking = await ask(batcher, 1)
    asking += await ask(batcher, half)
    assert store.calls == [[1]]
    asking += await ask(batcher, half)
    assert store.calls == [[1], [half, half]]
    asking += await ask(batcher, batching._OWN_CALL_WEIGHT)
    assert len(store.calls) == 2, "no more than two at once"
    for _ in range(3):
        for gate in store.gates:
            gate.set()
        await asyncio.sleep(0)
    assert await asyncio.gather(*asking) == [1, half, half, batching._OWN_CALL_WEIGHT]


async def test_nobody_is_forgotten_whose_call_ends_as_he_asks(
    batcher: Batcher[int, int], store: Store
):
    async def again(times: int) -> None:
        for _ in range(times):
            await batcher.submit(1)

    asking = [asyncio.create_task(again(20)) for _ in range(3)]
    while not all(task.done() for task in asking):
        for gate in store.gates:
            gate.set()
        await asyncio.sleep(0)
    assert sum(map(len, store.calls)) == 60


async def test_each_who_asked_is_told_of_a_failure(batcher: Batcher[int, int], store: Store):
    first = await ask(batcher, 1)
    both = await ask(batcher, -1, 2)
    store.gates[0].set()
    assert await first[0] == 1
    await asyncio.sleep(0)
    store.gates[1].set()
    for task in both:
        with pytest.raises(UnavailableError):
            await task


async def test_too_many_are_told_to_come_again(
    batcher: Batcher[int, int], store: Store, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(batching, "_MAX_QUEUE", 2)
    asking = await ask(batcher, 1)
    asking += await ask(batcher, 1, 1)
    with pytest.raises(UnavailableError, match="retry later"):
        await batcher.submit(1)
    for _ in range(5):
        for gate in store.gates:
            gate.set()
        await asyncio.sleep(0)
    assert await asyncio.gather(*asking) == [1, 1, 1]
