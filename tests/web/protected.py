"""A service with keys, for the tests of the page."""

from __future__ import annotations

import httpx
from playwright.sync_api import Page

from tests.support.server import Service
from tests.web.flights import START, Feed

ADMIN = "operator-" + "x" * 40
"""The operator's own key."""
UNAUTHENTICATED = frozenset({"401"})
"""Console messages of a page without a key."""


class Protected:
    """A service with two jobs, and keys for them."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.url = service.url
        for job in ("mine", "theirs"):
            with Feed(self.url, job, key=ADMIN) as feed:
                feed.define({"s": {"shards": ["0"]}})
                feed.claim("s", holder="worker").promise(START)
        self.reads_one = self.create("reads-one", "read", "mine")
        self.administers_one = self.create("administers-one", "admin", "mine")

    def create(self, name: str, role: str, jobs: str) -> str:
        response = httpx.post(
            f"{self.url}/v1/keys",
            json={"name": name, "role": role, "jobs": jobs},
            headers={"Authorization": f"Bearer {ADMIN}"},
        )
        assert response.status_code == 201, response.text
        return response.json()["secret"]

    def revoke(self, name: str) -> None:
        headers = {"Authorization": f"Bearer {ADMIN}"}
        assert httpx.delete(f"{self.url}/v1/keys/{name}", headers=headers).status_code == 204


def log_in(page: Page, secret: str) -> None:
    page.get_by_label("Key", exact=True).fill(secret)
    page.get_by_role("button", name="Log in").click()
