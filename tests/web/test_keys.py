"""The page of a service with keys: it shows what the key may see, and offers what it may do."""

from __future__ import annotations

from contextlib import ExitStack

from playwright.sync_api import Browser, expect

from tests.web.browser import opened
from tests.web.flights import DAY, START, Feed, shown
from tests.web.protected import ADMIN, UNAUTHENTICATED, Protected, log_in

NO_CONNECTION = frozenset({"Failed to load resource", "ERR_"})
OUTPUT = '[data-fact="output"]'


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
        expect(page.get_by_role("dialog")).to_contain_text("Stop its queries first, and give every")
        reset = page.get_by_role("dialog").get_by_role("button", name="Reset")
        expect(reset).to_be_disabled()
        page.get_by_role("dialog").get_by_label("Type the job's name").fill("mine")
        reset.click()
        expect(page.locator('[data-stage="s"] .output')).to_have_text("no watermark yet")


def test_a_wrong_key_and_a_key_that_is_revoked(protected: Protected, browser: Browser):
    secret = protected.create("short-lived", "read", "*")
    with opened(browser, protected.url, allowed=UNAUTHENTICATED) as page:
        page.goto("/")
        log_in(page, "tg_" + "wrong" * 10)
        expect(page.get_by_role("alert")).to_contain_text("unknown key: it is misspelt")
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


def test_a_service_that_is_killed_and_comes_back(protected: Protected, browser: Browser):
    """The pages say that they are out of date, and catch up by themselves: with the same key."""
    service = protected.service
    with Feed(service.url, "interrupted", key=ADMIN) as feed, ExitStack() as pages:
        feed.define({"s": {"shards": ["0"]}})
        feed.claim("s", holder="first").promise(START)
        stage, jobs = (
            pages.enter_context(opened(browser, service.url, allowed=NO_CONNECTION))
            for _ in range(2)
        )
        for page in (stage, jobs):
            page.goto("/#/jobs/interrupted/stages/s" if page is stage else "/#/?q=interrupted")
            log_in(page, ADMIN)
        expect(stage.locator(OUTPUT)).to_have_text(shown(START))
        expect(jobs.get_by_role("status")).to_have_text("1 of 3 jobs")
        service.kill()
        expect(stage.get_by_role("status").first).to_contain_text("Connection lost")
        # A green sign of before would be taken for one of now.
        expect(stage.locator(".facts")).to_have_css("filter", "grayscale(1)")
        expect(stage.locator(OUTPUT)).to_have_text(shown(START))
        expect(jobs.get_by_role("status")).to_contain_text("out of date")
        service.start()
        expect(stage.locator('[data-state="live"]')).to_be_visible()
        expect(jobs.get_by_role("status")).to_have_text("1 of 3 jobs")
        feed.claim("s", holder="second").promise(START + DAY)
        expect(stage.locator(OUTPUT)).to_have_text(shown(START + DAY))
        feed.send("DELETE", "")
