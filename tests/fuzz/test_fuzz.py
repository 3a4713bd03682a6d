"""The short version of `make fuzz`."""

from __future__ import annotations

from pathlib import Path

from tests.fuzz.requests import Maker
from tests.fuzz.runner import Fuzzer


def test_made_up_requests_find_no_internal_error(tmp_path: Path) -> None:
    fuzzer = Fuzzer(tmp_path, seed=20_260_101)
    fuzzer.run(8_000)
    # If all were refused for the same reason, it would show nothing.
    assert {200, 201, 204, 400, 403, 404, 405, 409, 410, 415, 422} <= set(fuzzer.statuses)


def test_a_seed_makes_the_same_requests() -> None:
    one, other = Maker(7, ["token"]), Maker(7, ["token"])
    assert [one.request() for _ in range(200)] == [other.request() for _ in range(200)]
