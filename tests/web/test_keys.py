"""The page of a service with keys: it shows what the key may see, and offers what it may do."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from tests.support.server import Service
from tests.web.browser import opened
from tests.web.flights import START, Feed

ADMIN = "operator-" + "x" * 40
UNAUTHENTICATED = frozenset({"401"})


class Protected:
    """A service with two jobs, and keys for them."""

    def __init__(self, service: Service) -> None:
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


@pytest.fixture(scope="module")
def protected(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Protected]:
    environment = {"TIDEGAUGE_ADMIN_KEY": ADMIN}
    with Service(tmp_path_factory.mktemp("keys"), environment=environment) as service:
        yield Protected(service)


def log_in(page: Page, secret: str) -> None:
    page.get_by_label("Key", exact=True).fill(secret)
    page.get_by_role("button", name="Log in").click()


def test_a_key_for_one_job_sees_that_job_alone(protected: Protected, browser: Browser):
    with opened(browser, protected.url, allowed=UNAUTHENTICATED | {"403"}) as page:
        page.goto("/")
        log_in(page, protected.reads_one)
        expect(page.locator("tr[data-job]")).to_have_count(1)
        expect(page.get_by_role("link", name="mine", exact=True)).to_be_visible()
        expect(page.get_by_text("reads-one (read)")).to_be_visible()
        page.goto("/#/jobs/theirs")
        expect(page.get_by_role("alert")).to_contain_text("this needs a key with role read")
        assert "theirs" not in page.get_by_role("alert").inner_text()


def test_who_may_only_read_sees_nothing_that_changes_anything(
    protected: Protected, browser: Browser
):
    with opened(browser, protected.url, allowed=UNAUTHENTICATED) as page:
        page.goto("/#/jobs/mine")
        log_in(page, protected.reads_one)
        expect(page.locator('[data-stage="s"] .output')).to_have_text("2013-01-01 05:00:00Z")
        names = page.get_by_role("button").all_inner_texts()
        assert not [name for name in names if "Reset" in name or "Delete" in name]


def test_who_may_change_it_must_say_which(protected: Protected, browser: Browser):
    with opened(browser, protected.url, allowed=UNAUTHENTICATED) as page:
        page.goto("/#/jobs/mine")
        log_in(page, protected.administers_one)
        page.get_by_role("button", name="Reset…").click()
        reset = page.get_by_role("dialog").get_by_role("button", name="Reset")
        expect(reset).to_be_disabled()
        page.get_by_label("Type the job's name").fill("mine")
        reset.click()
        expect(page.locator('[data-stage="s"] .output')).to_have_text("no watermark yet")


def test_a_wrong_key_and_a_key_that_is_revoked(protected: Protected, browser: Browser):
    secret = protected.create("short-lived", "read", "*")
    with opened(browser, protected.url, allowed=UNAUTHENTICATED) as page:
        page.goto("/")
        log_in(page, "tg_" + "wrong" * 10)
        expect(page.get_by_role("alert")).to_contain_text("the key is not known")
        log_in(page, secret)
        expect(page.locator("tr[data-job]")).to_have_count(2)
        # It is of this tab alone, and no part of any address.
        assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
        assert secret not in page.url
        page.reload()
        expect(page.locator("tr[data-job]")).to_have_count(2)
        protected.revoke("short-lived")
        expect(page.get_by_role("alert")).to_contain_text("was revoked")
        expect(page.locator("tr[data-job]")).to_have_count(0)


def test_log_out(protected: Protected, browser: Browser):
    with opened(browser, protected.url, allowed=UNAUTHENTICATED) as page:
        page.goto("/")
        log_in(page, protected.reads_one)
        page.get_by_role("button", name="Log out").click()
        expect(page.get_by_role("button", name="Log in")).to_be_visible()
        assert page.evaluate("sessionStorage.length") == 0
