"""The page speaks from health and problems: the dead are not shown as alive."""

from __future__ import annotations

import re
import time

import httpx
from playwright.sync_api import expect

from tests.support.api import ok
from tests.support.server import Service
from tests.web.conftest import Opened
from tests.web.flights import START, Feed

SHARDS = [f"c-{k:02}" for k in range(24)]


def define(client: httpx.Client, job: str) -> str:
    root = f"/v1/jobs/{job}"
    spec = {
        "stages": {
            "clicks": {"shards": SHARDS},
            "both": {"inputs": ["clicks"], "passthrough": True},
        }
    }
    ok(client.put(root, json=spec), 201)
    return root


def report(client: httpx.Client, root: str, **claim: int) -> None:
    body = {"ranges": "all", "holder": "w"} | claim
    token = ok(client.post(f"{root}/stages/clicks/leases", json=body), 201)["token"]
    at = int(time.time() * 1_000)
    ranges = dict.fromkeys(SHARDS, at)
    ok(client.post(f"{root}/stages/clicks/reports", json={"token": token, "ranges": ranges}))


def test_the_dead_are_not_shown_as_alive(service: Service, open_page: Opened):
    """All leases of a stage had run out: graph, table and card said active, in green."""
    with httpx.Client(base_url=service.url, timeout=60) as client:
        root = define(client, "dead")
        report(client, root, ttl_ms=2_000)
        with open_page("#/jobs/dead") as page:
            box = page.locator('a[data-stage="clicks"]')
            problems = page.locator(".problems li")
            expect(problems).to_have_count(1)
            expect(problems).to_contain_text(
                re.compile(r"24 of 24 ranges of clicks have no worker since \d\d:\d\d")
            )
            expect(problems).to_contain_text("; both waits for clicks")
            expect(problems.locator(".remedy")).to_contain_text("Start the program again")
            expect(box).to_have_class(re.compile(r"\bno_worker\b"))
            expect(box).to_have_attribute("aria-label", re.compile("no worker"))
            expect(page.locator('a[data-stage="both"]')).to_have_class(re.compile(r"\bwaiting\b"))
            row = page.locator("tbody tr", has=page.get_by_role("rowheader", name="clicks"))
            expect(row.first).to_contain_text("no worker")
            expect(page.locator(".because")).to_contain_text("24 of 24 ranges of clicks")
            expect(page.locator(".why .remedy")).to_contain_text("Start the program again")
            # A worker is back, and nothing is left of it.
            report(client, root, ttl_ms=600_000)
            expect(problems).to_have_count(0)
            expect(box).to_have_class(re.compile(r"\bactive\b"))
        with open_page("#/jobs/dead/stages/clicks") as page:
            expect(page.locator(".facts .status")).to_contain_text("active")


def test_a_finished_run_has_ended_also_while_an_input_is_in_trouble(
    service: Service, open_page: Opened
):
    """Its ranges were `no worker` once the worker of an input had died: nobody is missing there."""
    with httpx.Client(base_url=service.url, timeout=60) as client:
        root = "/v1/jobs/finished"
        stages = {"clicks": {"shards": SHARDS}, "counts": {"inputs": ["clicks"], "ranges": 2}}
        ok(client.put(root, json={"stages": stages}), 201)
        report(client, root, ttl_ms=2_000)
        at = ok(client.get(f"{root}/stages/clicks/watermark"))["output_watermark"]
        opened = {"stages": ["counts"], "holder": "driver"}
        run = ok(client.post(f"{root}/runs", json=opened), 201)["run"]
        body = {"ranges": "all", "holder": "w", "run": run}
        lease = ok(client.post(f"{root}/stages/counts/leases", json=body), 201)
        ranges = {name: {} for name in lease["granted"]}
        observed = {"token": lease["token"], "ranges": ranges, "input_watermark": at}
        ok(client.post(f"{root}/stages/counts/reports", json=observed))
        ok(client.post(f"{root}/runs/{run}/end", json={"outcome": "finished"}))
        with open_page("#/jobs/finished/stages/counts") as page:
            expect(page.locator(".facts .status")).to_contain_text("waiting")
            expect(page.get_by_role("link", name="Ended 2")).to_be_visible()
            expect(page.locator("section.ranges td.condition")).to_have_text(["ended", "ended"])


def test_a_repeated_remedy_names_the_stage_that_has_it(service: Service, open_page: Opened):
    """The second of two equal problems had none."""
    with Feed(service.url, "twice-lost") as feed:
        feed.define({"first": {"shards": ["0"]}, "second": {"shards": ["0"]}})
        for stage in ("first", "second"):
            lost = feed.claim(stage, holder="w")
            lost.promise(START)
            lost.release()
        for width in (1_280, 360):
            with open_page("#/jobs/twice-lost", width=width) as page:
                problems = page.locator(".problems li")
                expect(problems.first.locator(".remedy")).to_contain_text("Start the program")
                stage = problems.first.get_attribute("data-problem")
                repeated = problems.nth(1).locator(".remedy")
                expect(repeated).to_have_text(f"remedy: as for {stage}")
                expect(repeated).to_be_visible()


def test_a_job_between_two_nights_has_ended(service: Service, open_page: Opened):
    with httpx.Client(base_url=service.url, timeout=60) as client:
        root = define(client, "nightly")
        opened = {"stages": ["clicks"], "holder": "driver"}
        run = ok(client.post(f"{root}/runs", json=opened), 201)["run"]
        report(client, root, run=run)
        ok(client.post(f"{root}/runs/{run}/end", json={"outcome": "finished"}))
        with open_page("#/jobs/nightly") as page:
            expect(page.locator('a[data-stage="clicks"]')).to_have_class(re.compile(r"\bended\b"))
            expect(page.locator(".because")).to_contain_text("the last run of clicks finished at")
            expect(page.locator(".problems")).to_have_count(0)


def test_a_stage_below_an_ended_input_is_not_shown_as_moving(service: Service, open_page: Opened):
    with Feed(service.url, "below-ended") as feed:
        feed.define(
            {
                "dump": {"shards": ["0"]},
                "taps": {"shards": ["0"]},
                "both": {"inputs": ["dump", "taps"], "passthrough": True},
            }
        )
        run = feed.send("POST", "/runs", {"stages": ["dump"], "holder": "driver"})["run"]
        feed.claim("dump", holder="w", run=run).promise(START)
        feed.send("POST", f"/runs/{run}/end", {"outcome": "finished"})
        feed.claim("taps", holder="w").promise(START + 60_000)
        with open_page("#/jobs/below-ended") as page:
            box = page.locator('a[data-stage="both"]')
            expect(box.locator(".badge.input")).to_have_text("input ended")
            expect(box).to_have_attribute("aria-label", re.compile("^both, active, input ended:"))
            row = page.locator("tbody tr", has=page.get_by_role("rowheader", name="both"))
            expect(row).to_contain_text("active, input ended")
            expect(page.locator(".path")).to_have_text("The path: dump (ended) → both")
        with open_page("#/jobs/below-ended/stages/both") as page:
            expect(page.locator(".facts .status")).to_have_text("● active, input ended")
        with open_page("/?#/?q=below-ended") as page:
            state = page.locator('tr[data-job="below-ended"] [data-label="State"]')
            expect(state).to_have_text("● active, dump has ended")


def test_the_stages_that_wait_for_a_problem_or_will_are_named(service: Service, open_page: Opened):
    """The list of jobs named the slowest stage beside the cause of another one, and not who waits."""
    with Feed(service.url, "waited-for") as feed:
        stages = {
            "lost": {"shards": ["0"]},
            "slow": {"shards": ["0"]},
            "below": {"inputs": ["lost"], "passthrough": True},
            "both": {"inputs": ["lost", "slow"], "passthrough": True},
        }
        feed.define(stages)
        lost = feed.claim("lost", holder="w")
        lost.promise(START + 60_000)
        lost.release()
        feed.claim("slow", holder="w").promise(START)
        waits = "; below waits for lost; both does not wait for lost yet"
        with open_page("#/jobs/waited-for") as page:
            expect(page.locator('[data-problem="lost"]')).to_contain_text(waits)
        with open_page("/?#/?q=waited-for") as page:
            state = page.locator('tr[data-job="waited-for"] [data-label="State"]')
            expect(state).to_contain_text("1 of 1 ranges of lost has no worker since")
            expect(state).to_contain_text("(range 0); below waits; both does not wait yet")
