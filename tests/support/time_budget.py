"""Time budget of CI: on a slow machine, tests that would begin after it are skipped.

As a pytest plugin (`-p tests.support.time_budget`) it skips each test that would begin after the Unix
time (s) in `TIDEGAUGE_TEST_UNTIL`. A run that CI cuts off has not a result at all.
"""

from __future__ import annotations

import os
import time
from typing import Final

import pytest

UNTIL: Final = "TIDEGAUGE_TEST_UNTIL"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Skip the test if the time is over, before its fixtures start."""
    if time.time() > float(os.environ[UNTIL]):
        pytest.skip(f"the time of this run is over ({UNTIL})")
