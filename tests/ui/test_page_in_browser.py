"""The checkpoint page in a real browser: both themes, keyboard only, and a long history."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from dagster_ckpt.catalog.records import ExecutionStatus
from tests.e2e.dagster_page import browser_path
from tests.support.golden_stream import STREAM, GoldenStream
from tests.ui.conftest import TOKEN
from tests.ui.history import lengthen

pytestmark = pytest.mark.browser

TABS = ("Overview", "History", "Restarts", "Summary", "Failures", "Configuration")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path(), args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(params=["light", "dark"])
def tab(request: pytest.FixtureRequest, browser: Browser) -> Iterator[Page]:
    """A browser window in each theme; an error in the console of any page fails the test."""
    problems: list[str] = []
    context = browser.new_context(color_scheme=request.param)
    window = context.new_page()
    window.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    window.on("pageerror", lambda error: problems.append(str(error)))
    yield window
    context.close()
    assert problems == []


def contrast(window: Page, selector: str) -> float:
    """Contrast of a text with the ground of the page, as WCAG computes it."""
    return float(
        window.evaluate(
            """(selector) => {
              const channels = (text) => text.match(/[\\d.]+/g).slice(0, 3).map((value) => {
                const c = value / 255;
                return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
              });
              const light = ([r, g, b]) => 0.2126 * r + 0.7152 * g + 0.0722 * b;
              const text = light(channels(getComputedStyle(document.querySelector(selector)).color));
              const ground = light(channels(getComputedStyle(document.body).backgroundColor));
              return (Math.max(text, ground) + 0.05) / (Math.min(text, ground) + 0.05);
            }""",
            selector,
        )
    )


@pytest.mark.thorough(but="light")
def test_every_page_is_reached_by_keyboard_and_readable(tab: Page, page: str, golden: GoldenStream) -> None:
    lengthen(golden.stream.catalog, STREAM, 300)
    tab.goto(page)
    tab.keyboard.press("Tab")
    expect(tab.get_by_text("Skip to content")).to_be_focused()
    tab.get_by_role("link", name=STREAM, exact=True).focus()
    tab.keyboard.press("Enter")
    for name in TABS:
        link = tab.get_by_role("navigation", name="Pages of this stream").get_by_role("link", name=name)
        link.focus()
        tab.keyboard.press("Enter")
        expect(link).to_have_attribute("aria-current", "page")
        expect(tab.get_by_role("heading", level=1)).to_contain_text(STREAM)
    tab.goto(f"{page}/streams/{STREAM}")
    charts = tab.get_by_role("img")
    expect(charts.first).to_have_attribute("aria-label", "Duration: newest 148 ms, highest 149 ms, 297 snapshots")
    for selector in ("h1", ".muted", ".status", "a", "thead th"):
        assert contrast(tab, selector) >= 4.5, selector


@pytest.mark.thorough(but="390")
@pytest.mark.parametrize("width", [390, 1280])
def test_no_page_is_wider_than_its_window(browser: Browser, page: str, golden: GoldenStream, width: int) -> None:
    lengthen(golden.stream.catalog, STREAM, 150, label="before-a-release-with-a-long-name", behind=1_234_567)
    golden.run_again(ExecutionStatus.FAILED)
    window = browser.new_page(viewport={"width": width, "height": 800})
    snapshot = golden.stream.catalog.history.page(STREAM, limit=1).snapshots[0].snapshot_id
    for path in ("", "/-/history", "/-/timeline", "/-/summary", "/-/failures", "/-/configuration",
                 f"/-/snapshots/{snapshot}", "/-/restart?start_from=latest"):  # fmt: skip
        window.goto(f"{page}/streams/{STREAM}{path}")
        main = window.locator("main")
        assert main.evaluate("main => main.scrollWidth") <= main.evaluate("main => main.clientWidth"), path
    window.close()


@pytest.mark.thorough(but="dark")
def test_an_action_is_confirmed_and_its_result_appears(tab: Page, acting: str) -> None:
    tab.goto(f"{acting}/sign-in?token={TOKEN}")
    assert TOKEN not in tab.url
    questions: list[str] = []

    def answer(dialog: object) -> None:
        questions.append(dialog.message)  # type: ignore[attr-defined]
        dialog.dismiss()  # type: ignore[attr-defined]

    tab.on("dialog", answer)
    tab.goto(f"{acting}/streams/{STREAM}")
    tab.get_by_role("button", name="Stop with savepoint").click()
    assert questions == [f"Stop {STREAM} with a savepoint? It can be started again."]
    expect(tab.get_by_text("Actions from this page")).to_have_count(0)
    tab.get_by_label("Label").fill("by-hand")
    tab.get_by_role("button", name="Take savepoint").click()
    tab.get_by_role("heading", level=1).click()
    # The page refreshes itself.
    expect(tab.locator("#actions")).to_contain_text("DONE", timeout=30_000)
    expect(tab.locator("#actions")).to_contain_text("savepoint by-hand")


def test_a_chart_shows_the_value_at_the_pointer_and_the_history_fits_a_phone(
    browser: Browser, page: str, golden: GoldenStream
) -> None:
    lengthen(golden.stream.catalog, STREAM, 100)
    window = browser.new_page(viewport={"width": 420, "height": 900})
    window.goto(f"{page}/streams/{STREAM}")
    chart = window.locator("figure.chart").first
    expect(chart.locator("output")).to_be_empty()
    chart.locator("svg").hover(position={"x": 1, "y": 30})
    expect(chart.locator("output")).to_contain_text("batch 0: 100 ms at 2023-11-14")
    window.mouse.move(0, 0)
    expect(chart.locator("output")).to_be_empty()
    window.goto(f"{page}/streams/{STREAM}/-/history")
    # Fifty snapshots; each column in a line of its own took 14,000.
    assert window.evaluate("document.documentElement.scrollHeight") < 6_000
    window.close()


def test_a_refresh_keeps_what_was_typed(browser: Browser, acting: str) -> None:
    window = browser.new_page()
    window.clock.install()
    window.goto(f"{acting}/streams/{STREAM}/-/restart?start_from=latest")
    window.get_by_label("Start from").fill("batch-3")
    window.get_by_role("heading", level=1).click()
    loads: list[str] = []
    window.on("request", lambda request: loads.append(request.url))
    window.clock.run_for(11_000)
    expect(window.get_by_label("Start from")).to_have_value("batch-3")
    assert loads == []
    window.get_by_label("Start from").fill("latest")
    window.get_by_role("heading", level=1).click()
    with window.expect_response(lambda answer: "/-/restart" in answer.url):
        window.clock.run_for(6_000)
    window.close()


def test_a_hundred_thousand_checkpoints_open_at_once(browser: Browser, page: str, golden: GoldenStream) -> None:
    lengthen(golden.stream.catalog, STREAM, 100_000)
    window = browser.new_page()
    for path in ("", "/-/history", "/-/history?status=FAILED", "/-/timeline", "/-/summary", "/-/failures"):
        window.goto(f"{page}/streams/{STREAM}{path}", timeout=10_000)
        expect(window.get_by_role("heading", level=1)).to_contain_text(STREAM)
        # What is sent does not grow with the history.
        assert len(window.content()) < 400_000, path
    window.close()
