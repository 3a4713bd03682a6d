"""One browser and one service for all of these tests, which end with the last of them.

Not for the session: while Playwright runs, no test of the same process can run an event loop.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from tests.support.required import REQUIRE
from tests.support.server import Service
from tests.web.browser import chromium, opened, started
from tests.web.flights import Flights
from tests.web.protected import ADMIN, Protected

Opened = Callable[..., AbstractContextManager[Page]]


MISSING = "install Chromium (Debian: apt-get install chromium)"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in ours:
        # They share a browser, so they run in one process.
        item.add_marker(pytest.mark.xdist_group("web"))
    if ours and chromium() is None and not os.environ.get(REQUIRE):
        # One of them stands for all, so that there is one line and not one for each.
        first, *others = ours
        reason = f"the {len(ours)} tests of the page: {MISSING}"
        first.add_marker(pytest.mark.skip(reason=reason))
        items[:] = [item for item in items if item not in set(others)]
        config.hook.pytest_deselected(items=others)


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    path = chromium()
    if path is None:
        pytest.fail(MISSING)
    with started(path) as running:
        yield running


@pytest.fixture(scope="package")
def service(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("web")) as running:
        yield running


@pytest.fixture(scope="package")
def flights(service: Service) -> Iterator[Flights]:
    """The job of the demonstration, on its way."""
    with Flights(service.url) as feed:
        for _ in range(3):
            feed.advance()
        yield feed


@pytest.fixture(scope="package")
def protected(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Protected]:
    environment = {"TIDEGAUGE_ADMIN_KEY": ADMIN}
    with Service(tmp_path_factory.mktemp("keys"), environment=environment) as service:
        yield Protected(service)


@pytest.fixture
def open_page(browser: Browser, service: Service) -> Opened:
    """Opens pages of the shared service."""

    @contextmanager
    def open_one(path: str = "/", **options: object) -> Generator[Page]:
        with opened(browser, service.url, **options) as page:  # pyright: ignore[reportArgumentType]
            page.goto(path)
            yield page

    return open_one
