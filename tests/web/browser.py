"""Finds Chromium, and opens pages of it that let nothing pass: no error, no other origin."""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, Final
from urllib.parse import urlsplit

from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect, sync_playwright

_NAMES: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

AXE: Final = (files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")

PATIENCE_MS: Final = 60_000
"""Longest wait for a page to show something. Only a missing element takes so long."""


def chromium() -> str | None:
    """Find Chromium; `TIDEGAUGE_TEST_CHROMIUM` names another."""
    named = os.environ.get("TIDEGAUGE_TEST_CHROMIUM")
    candidates = [named] if named else [shutil.which(name) for name in _NAMES]
    return next((path for path in candidates if path and os.access(path, os.X_OK)), None)


@contextmanager
def started(path: str) -> Generator[Browser]:
    """Start the browser. It ends with the block, and so does the event loop that drives it."""
    # Chromium refuses to sandbox what root runs; the pages are our own.
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, args=[*options, "--disable-dev-shm-usage"]
        )
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Watch:
    """Forbidden actions of a page."""

    origin: str
    allowed: set[str] = field(default_factory=set[str])
    """Parts of messages that the test brings about itself."""
    messages: list[str] = field(default_factory=list[str])
    elsewhere: list[str] = field(default_factory=list[str])
    bytes_loaded: int = 0

    def on(self, page: Page) -> None:
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.messages.append(f"error: {error}"))
        page.on("request", self._request)

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in {"error", "warning"}:
            self.messages.append(f"{message.type}: {message.text}")

    def _request(self, request: Request) -> None:
        parts = urlsplit(request.url)
        if (
            parts.scheme not in {"data", "blob"}
            and f"{parts.scheme}://{parts.netloc}" != self.origin
        ):
            self.elsewhere.append(request.url)

    def check(self) -> None:
        """Nothing was refused by the content policy, nothing failed, and nothing went elsewhere."""
        assert self.elsewhere == []
        unexpected = [m for m in self.messages if not any(part in m for part in self.allowed)]
        assert unexpected == []


@contextmanager
def opened(
    browser: Browser,
    origin: str,
    *,
    dark: bool = False,
    width: int = 1280,
    height: int = 900,
    allowed: frozenset[str] = frozenset(),
) -> Generator[Page]:
    """Open an empty page in a profile of its own, and check at the end what it did."""
    context = browser.new_context(
        base_url=origin,
        viewport={"width": width, "height": height},
        color_scheme="dark" if dark else "light",
        locale="en-GB",
        timezone_id="America/New_York",
        reduced_motion="reduce",
    )
    context.set_default_timeout(PATIENCE_MS)
    try:
        page = context.new_page()
        watch = Watch(origin, set(allowed))
        watch.on(page)
        yield page
        watch.check()
    finally:
        context.close()


def accessibility_faults(page: Page, options: str = "{}") -> list[str]:
    """Return the faults that axe finds on a page, in words, without minor ones."""
    # Evaluated by the driver, so the page's content policy stays as it is.
    page.evaluate(f"() => {{ {AXE} }}")
    found: dict[str, Any] = page.evaluate(f"axe.run({options})")
    assert found["passes"]
    return [
        f"{each['id']} ({each['impact']}): {[node['html'][:200] for node in each['nodes'][:3]]}"
        for each in found["violations"]
        if each["impact"] != "minor"
    ]
