"""Twelve stages in every condition: each view names the same condition and cause in the same words."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import pytest
from playwright.sync_api import Page, expect

from tests.support.server import Service
from tests.unit.agent.test_inspection import run
from tests.web.browser import accessibility_faults
from tests.web.conftest import Opened
from tests.web.test_graph import FAULTS
from tests.web.tour import HEALTH, MARKS, STAGES, Tour

WORDS: Final = {
    stage: "active" if health == "ok" else health.replace("_", " ")
    for stage, health in HEALTH.items()
}
"""The word of each stage for people."""
CONDITIONS: Final = {
    "catalogue": "final",
    "coupons": "idle",
    "prices": "ended",
    "refunds": "no worker",
    "shipments": "no worker",
    "sessions": "active",
}
"""The condition of all ranges of a stage."""
CAUSES: Final = {"shipments": "shipments", "refunds": "refunds", "conversions": "conversions"} | {
    "revenue": "refunds"
}
"""The stage that is the root cause of another one's watermark."""


@pytest.fixture(scope="module")
def tour(service: Service) -> Iterator[Tour]:
    with Tour(service.url, "tour") as feed:
        yield feed


class Views:
    """The job in every view but the page."""

    def __init__(self, service: Service, tour: Tour) -> None:
        self.url, self.tour = service.url, tour

    def read(self, path: str) -> Any:
        return self.tour.send("GET", path)

    def command(self, name: str, *arguments: str) -> str:
        done = run(name, self.tour.job, *arguments, "--url", self.url)
        assert done.exit_code in {0, 2}, done.stderr
        return done.stdout

    def metric(self, name: str) -> Mapping[str, Sequence[str]]:
        """Return the samples of the job that are not zero: their labels, by their stage."""
        found: dict[str, list[str]] = {}
        for line in self.tour.client.get("/metrics").text.splitlines():
            if line.startswith(f"{name}{{") and 'job="tour"' in line and not line.endswith(" 0.0"):
                stage = re.findall(r'stage="([^"]*)"', line)[0]
                found.setdefault(stage, []).extend(re.findall(r'health="([^"]*)"', line))
        return found

    def causes(self) -> Mapping[str, str]:
        return {each["stage"]: each["because"] for each in self.read("/problems")["problems"]}


@pytest.fixture
def views(service: Service, tour: Tour) -> Views:
    return Views(service, tour)


def words_of(table: str) -> Mapping[str, str]:
    """Return the column `health` of a table, by the stage in its first one."""
    lines = table.splitlines()
    head = next(k for k, line in enumerate(lines) if line.startswith("stage "))
    columns = [match.start() for match in re.finditer(r"(?<=  )\S", lines[head])]
    rows = lines[head + 1 : head + 1 + len(STAGES)]
    return {row[: columns[0]].strip(): row[columns[0] : columns[1]].strip() for row in rows}


def with_marks(words: Mapping[str, str]) -> Mapping[str, str]:
    return {
        stage: f"{word}, {MARKS[stage]}" if stage in MARKS else word
        for stage, word in words.items()
    }


def test_the_api_and_the_metrics_name_the_same_health(views: Views):
    assert views.read("")["health"] == HEALTH
    assert views.tour.healths() == HEALTH
    for stage, health in HEALTH.items():
        assert views.read(f"/stages/{stage}/watermark")["health"] == health
        assert views.read(f"/stages/{stage}/explain")["health"] == health
    assert views.metric("tidegauge_stage_health") == {
        stage: [health] for stage, health in HEALTH.items()
    }
    problems = {each["stage"]: each["health"] for each in views.read("/problems")["problems"]}
    assert problems == {stage: HEALTH[stage] for stage in CAUSES if CAUSES[stage] == stage}
    assert set(views.metric("tidegauge_throttled_shards")) == {"orders"}
    assert set(views.metric("tidegauge_retired_ranges")) == {"payments"}


def test_the_commands_name_the_same_health(views: Views):
    shown = json.loads(views.command("show", "--json"))
    assert {each["stage"]: each["health"] for each in shown["stages"]} == HEALTH
    assert shown["throttled"] == {"orders": 1}
    assert words_of(views.command("show")) == with_marks(WORDS)
    assert words_of(views.command("watch", "--count", "1")) == with_marks(WORDS)
    for stage, word in WORDS.items():
        assert re.search(rf"\({word}, unchanged since ", views.command("explain", stage))
    for stage, condition in CONDITIONS.items():
        found = json.loads(views.command("ranges", stage, "--json"))["ranges"]
        assert views.command("ranges", stage).count(f"  {condition}  ") == len(found)
    assert re.search(r"e0000000-100000000 +never reported ", views.command("ranges", "conversions"))
    assert views.command("ranges", "orders").count("  throttled  ") == 1


def test_the_page_names_the_same_health(views: Views, open_page: Opened):
    with open_page("#/jobs/tour") as page:
        for stage, word in WORDS.items():
            box = page.locator(f'a[data-stage="{stage}"]')
            expect(box).to_have_attribute("aria-label", re.compile(rf"\b{stage}, {word}[,:]"))
            cell = _row(page, stage).locator('[data-label="State"]')
            expect(cell).to_have_text(re.compile(rf"^\S {word}{MARKS.get(stage, '')}$"))
            if stage in MARKS:
                expect(box).to_contain_text(MARKS[stage])
        for stage, word in WORDS.items():
            if CAUSES.get(stage) == stage:
                expect(page.locator(f'[data-problem="{stage}"]')).to_contain_text(f"{word} {stage}")
    with open_page("/") as page:
        page.goto("/?q=tour#/")
        cell = page.locator('tr[data-job="tour"] [data-label="State"]')
        expect(cell).to_contain_text("failed")
    for stage, word in WORDS.items():
        with open_page(f"#/jobs/tour/stages/{stage}?show=all") as page:
            expect(page.locator(".facts .status")).to_have_text(re.compile(rf"^\S {word}$"))
            expect(page.locator(".facts .chip")).to_have_text(
                [MARKS[stage]] if stage in MARKS else []
            )
            for cell in page.locator(".ranges td.condition").all():
                expect(cell).to_have_text(CONDITIONS.get(stage, re.compile(".")))


def _row(page: Page, stage: str) -> Any:
    name = page.get_by_role("rowheader", name=stage, exact=True)
    return page.locator("tr", has=name).last


def test_every_view_names_the_same_root_cause(views: Views, open_page: Opened):
    causes = views.causes()
    # Commands wrap long lines.
    shown = {name: " ".join(views.command(name).split()) for name in ("show", "status")}
    shown["watch"] = " ".join(views.command("watch", "--count", "1").split())
    with open_page("#/jobs/tour") as page:
        for stage, because in causes.items():
            for name, text in shown.items():
                assert f"{WORDS[stage]}: {because}" in text, name
            expect(page.locator(f'[data-problem="{stage}"]')).to_contain_text(because)
    for stage, root in CAUSES.items():
        assert causes[root] in views.read(f"/stages/{stage}/explain")["because"]
        assert causes[root] in " ".join(views.command("explain", stage).replace("│", " ").split())
        with open_page(f"#/jobs/tour/stages/{stage}") as page:
            expect(page.locator(".because")).to_contain_text(causes[root])


def test_a_waiting_stage_is_shown_with_the_cause(views: Views):
    """`show` named the state alone."""
    shown = " ".join(views.command("show", "revenue").split())
    assert f"no worker: {views.causes()['refunds']}; revenue waits for refunds" in shown


def test_a_retired_range_is_not_ahead_of_the_lowest(tour: Tour, open_page: Opened):
    """Its promise is hours behind the watermark, and was shown as 0 s ahead."""
    with open_page("#/jobs/tour/stages/payments?show=retired") as page:
        cell = page.locator('.ranges td[data-label="Ahead of the lowest"]')
        expect(cell).to_have_text("–")  # noqa: RUF001


def test_the_graph_is_whole_on_the_first_screen_of_a_laptop(tour: Tour, open_page: Opened):
    """Five of the twelve stages were in view."""
    with open_page("#/jobs/tour", width=1_366, height=768) as page:
        expect(page.locator(".problems li")).to_have_count(3)
        expect(page.locator(".because")).to_be_visible()
        expect(page.locator(".in-view")).to_have_count(0)
        assert page.evaluate(FAULTS) == []
        for stage in STAGES:
            expect(page.locator(f'a[data-stage="{stage}"] .box')).to_be_in_viewport(ratio=1)


def test_an_ended_input_does_not_cut_the_watermark_below(service: Service, open_page: Opened):
    """Its badge took the room of the watermark's line."""
    with Tour(service.url, "tour-input-ended") as feed:
        run = feed.send("POST", "/runs", {"stages": ["payments"], "holder": "driver"})["run"]
        feed.claim("payments", ["cards", "invoices"], holder="w", run=run)
        feed.send("POST", f"/runs/{run}/end", {"outcome": "finished"})
        with open_page("#/jobs/tour-input-ended", width=1_366, height=768) as page:
            badge = page.locator('a[data-stage="paid-orders"] .badge', has_text="input ended")
            expect(badge).to_be_visible()
            assert page.evaluate(FAULTS) == []


def test_a_phone_shows_throttled_and_retired_ranges(tour: Tour, open_page: Opened):
    with open_page("#/jobs/tour", width=360, height=740) as page:
        for stage, mark in MARKS.items():
            expect(_row(page, stage).get_by_text(mark)).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_the_graph_begins_on_the_first_screen_of_a_phone(tour: Tour, open_page: Opened):
    """The remedies of the problems filled it."""
    with open_page("#/jobs/tour", width=360, height=740) as page:
        expect(page.locator(".problems li")).to_have_count(3)
        expect(page.locator(".graph a.stage .name").first).to_be_visible()
        assert page.locator(".graph .canvas").evaluate(TOP) < 740 - 76
        remedies = page.locator(".problems .remedy")
        expect(remedies.first).to_be_hidden()
        page.locator(".problems summary", has_text="remedy").first.click()
        expect(remedies.first).to_be_visible()


def test_the_steps_of_a_stage_are_cards_on_a_phone(tour: Tour, open_page: Opened):
    with open_page("#/jobs/tour/stages/orders?span=900000", width=360, height=740) as page:
        page.get_by_text(re.compile("The last .*as a table")).first.click()
        table = page.locator("table.steps")
        expect(table.locator('[data-label="Rows a second"]').first).to_be_visible()
        assert table.evaluate("each => each.scrollWidth") <= table.evaluate(PLACE_WIDTH)


TOP: Final = "each => each.getBoundingClientRect().top"
PLACE_WIDTH: Final = "each => each.parentElement.clientWidth"


@pytest.mark.parametrize("place", ["", "/stages/sessions", "/stages/refunds"])
def test_a_wide_table_scrolls_by_itself(tour: Tour, open_page: Opened, place: str):
    """On a tablet, its hidden headings widened the whole page."""
    with open_page(f"#/jobs/tour{place}", width=768, height=1024) as page:
        expect(page.locator("table.cards").last).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= 768


def test_an_ended_run_is_not_work_that_waits(views: Views):
    """A job between two nights made all stages below look stuck, in the system lag and its alert."""
    marks = views.read("/watermarks")["watermarks"]
    assert marks["prices"]["processing_watermark"] > marks["shipments"]["processing_watermark"]
    payments, paid = (marks[each]["processing_watermark"] for each in ("payments", "paid-orders"))
    assert paid <= payments
    views.tour.advance()
    after = views.read("/watermarks")["watermarks"]["paid-orders"]["processing_watermark"]
    assert after > paid


def test_a_silence_does_not_begin_with_the_last_input(views: Views):
    [silent] = [each for each in views.read("/problems")["problems"] if each["health"] == "silent"]
    stage = views.read(f"/stages/{silent['stage']}/watermark")
    assert stage["input_watermark"] is not None
    assert silent["since"] < stage["updated_at"]


def test_a_stage_ahead_of_the_clock_is_shown_ahead(views: Views, open_page: Opened):
    ahead = r"\d+ h( \d+ min)? ahead"
    watched = views.command("watch", "--count", "1")
    assert re.search(rf"^prices .*Z +{ahead} ", watched, re.MULTILINE)
    with open_page("#/jobs/tour") as page:
        lag = _row(page, "prices").locator('[data-label="Data lag"]')
        expect(lag).to_have_text(re.compile(ahead))


def test_an_idle_stage_holds_nothing_back(views: Views, open_page: Opened):
    because = views.read("/stages/coupons/explain")["because"]
    assert because.startswith(
        "coupons is idle, and stages below wait for it only without an active input: range "
    )
    with open_page("#/jobs/tour/stages/coupons") as page:
        expect(page.get_by_text("2 ranges are the lowest of coupons")).to_be_visible()
        expect(page.locator(".ranges .empty")).to_have_text(
            "The stage waits for none of them: each is final, idle or retired."
        )
    with open_page("#/jobs/tour/stages/payments") as page:
        expect(page.locator(".ranges caption")).to_have_text(
            "2 of 2 ranges that the stage waits for"
        )


def test_the_map_of_an_ended_stage_is_not_an_alarm(views: Views, open_page: Opened):
    with open_page("#/jobs/tour/stages/prices") as page:
        expect(page.locator(".heat button")).to_have_text(["□", "□"])
        expect(page.locator(".heat .expired")).to_have_count(0)
        expect(page.get_by_role("link", name="Ended 2")).to_be_visible()
    with open_page("#/jobs/tour/stages/refunds") as page:
        expect(page.locator(".heat button")).to_have_text(["!", "!"])


@pytest.mark.parametrize("place", ["", "/stages/shipments", "/stages/conversions"])
def test_troubles_have_no_accessibility_fault(tour: Tour, open_page: Opened, place: str):
    """The colours of an alarm are not on the page of a sound job."""
    with open_page(f"#/jobs/tour{place}") as page:
        expect(page.locator(".heat button" if place else ".because").first).to_be_visible()
        assert accessibility_faults(page) == []
        page.emulate_media(color_scheme="dark")
        assert accessibility_faults(page, "{runOnly: ['color-contrast']}") == []


def test_the_page_explains_the_worst_problem_that_a_stage_waits_for_unless_another_is_chosen(
    views: Views, open_page: Opened
):
    """It explained a stage that failed and delays none."""
    problems = views.read("/problems")["problems"]
    worst = next(each for each in problems if each["holds_back"])
    assert worst is not problems[0]
    stage = worst["holds_back"][-1]
    with open_page("#/jobs/tour") as page:
        expect(page.get_by_role("heading", name=f"Why is {stage} where it is?")).to_be_visible()
        expect(page.locator(f'a[data-stage="{worst["stage"]}"]')).to_be_in_viewport(ratio=1)
    with open_page("#/jobs/tour?why=orders") as page:
        expect(page.get_by_role("heading", name="Why is orders where it is?")).to_be_visible()
