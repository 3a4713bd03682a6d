"""Programs that are no packages of PyPI: without them tests are skipped, except where they must run."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

REQUIRE = "TIDEGAUGE_TEST_REQUIRE"
"""Set it where a test that is skipped for want of a program is a failure, as in CI."""

REQUIRE_KAFKA = "TIDEGAUGE_TEST_REQUIRE_KAFKA"
"""Likewise for Kafka's broker and Spark's connector, which are fetched with Maven."""


def program(*names: str, install: str, required: bool = True) -> Path:
    """Find a program by one of its names; skip the test if there is none.

    `install` is what it takes to have it, for the line that is printed. `required`: whether CI must have
    it.
    """
    for name in names:
        found = shutil.which(name)
        if found is not None:
            return Path(found)
    reason = f"no {names[0]} on this machine: {install}"
    if required and os.environ.get(REQUIRE):
        pytest.fail(f"{reason} ({REQUIRE} is set)")
    pytest.skip(reason)
