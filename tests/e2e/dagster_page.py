"""Dagster's page in a real browser, as a person uses it: what is clicked, typed and seen."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml
from playwright.sync_api import FloatRect, Locator, Page, expect, sync_playwright

from dagster_ckpt.errors import CkptError

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# The machine may be busy, and the page waits for everything else that runs on it.
PATIENCE_MS = 240_000
WIDTH = 1440
HEIGHT_OF_ALL_JOBS = 4_000
# Of Dagster's menu.
LEFT_OF_PAGE = 240
RUN_URL = re.compile(r"/runs/([0-9a-f-]{36})")


def browser_path() -> str:
    """The browser that `make browser` sees to."""
    for name in BROWSERS:
        found = shutil.which(name)
        if found is not None:
            return found
    raise CkptError(f"None of {', '.join(BROWSERS)} is on the PATH. Run: make browser")


class DagsterPage:
    """The page of one `dagster dev`.

    Args:
        page: The browser's.
        url: Where it is.
        pictures: Folder for pictures.
    """

    def __init__(self, page: Page, url: str, pictures: Path) -> None:
        self._page = page
        self._url = url
        self._pictures = pictures

    def materialize(self, job: str) -> str:
        """Start a job of assets by its button; returns the id of the run whose page opens."""
        self._open_stream(job)
        self._button("^Materialize").click()
        self._page.get_by_text("View", exact=True).click()
        return self._await_run()

    def type_config(self, job: str, config: dict[str, object]) -> None:
        """Type a config into the launchpad of a job."""
        self._open_stream(job)
        self._page.get_by_role("tab", name="Launchpad").click()
        self._page.locator(".CodeMirror").first.click()
        self._page.keyboard.press("ControlOrMeta+A")
        self._page.keyboard.insert_text(yaml.safe_dump(config))
        expect(self._page.get_by_text("No errors")).to_be_visible()

    def launch(self, job: str, config: dict[str, object]) -> str:
        """Type a config into the launchpad of a job and launch it; returns the id of the run whose page opens."""
        self.type_config(job, config)
        button = self._button("Launch Run")
        expect(button).to_be_enabled()
        button.click()
        return self._await_run()

    def rest(self) -> None:
        """Show nothing: a page of Dagster asks and draws all the time."""
        self._page.goto("about:blank")

    def _open_stream(self, job: str) -> None:
        size = self._page.viewport_size
        assert size is not None
        # Rows of the list that are out of sight do not exist.
        self.resize(HEIGHT_OF_ALL_JOBS)
        self._page.goto(f"{self._url}/jobs")
        self._page.locator("a").filter(has_text=re.compile(f"^{job}$")).first.click()
        self.resize(size["height"])

    def _button(self, text: str) -> Locator:
        # Not by role and name: the names of Dagster's buttons begin with those of their icons.
        return self._page.locator("button").filter(has_text=re.compile(text)).last

    def _await_run(self) -> str:
        self._page.wait_for_url(RUN_URL)
        return self.run_id()

    def run_id(self) -> str:
        """The run that is shown."""
        found = RUN_URL.search(self._page.url)
        assert found is not None, self._page.url
        return found[1]

    def open_run(self, run_id: str) -> None:
        """Show a run."""
        self._page.goto(f"{self._url}/runs/{run_id}")

    def terminate(self) -> None:
        """Terminate the run that is shown, and say yes."""
        self._button("^Terminate$").click()
        self._button("^Terminate 1 run$").click()

    def await_status(self, status: str) -> None:
        """Wait until the run that is shown has a status, such as Success."""
        expect(self._page.get_by_text(status, exact=True).first).to_be_visible()

    def open_plots(self, key: str) -> None:
        """Show the plots of an asset, and wait until they are drawn."""
        self._page.goto(f"{self._url}/assets/{key}")
        expect(self._page.get_by_text("Latest check results")).to_be_visible()
        self._button("^Plots$").click()
        expect(self._page.locator("canvas").nth(1)).to_be_visible()
        expect(self._page.get_by_text("Loading")).to_have_count(0)

    def open_sensor(self, name: str) -> None:
        """Show a sensor with its ticks."""
        self._page.goto(f"{self._url}/locations/definitions.py/sensors/{name}")
        expect(self._page.get_by_text("View logs").first).to_be_visible()

    def take_picture_of_message(self, name: str) -> Path:
        """Take a picture of the output of the run that is shown, with its metadata, in the dialog for long messages."""
        path = self._pictures / f"{name}.png"
        self._page.get_by_text("View full message").first.click()
        dialog = self._page.get_by_role("dialog")
        expect(dialog).to_be_visible()
        dialog.screenshot(path=path, animations="disabled")
        self._button("^Done$").click()
        return path

    def take_picture_of_log(self, name: str) -> Path:
        """Take a picture of the log of the run that is shown."""
        path = self._pictures / f"{name}.png"
        expect(self._page.get_by_text("STEP_OUTPUT")).to_be_visible()
        header = self._page.get_by_text(re.compile("^event type$", re.IGNORECASE)).first.bounding_box()
        size = self._page.viewport_size
        assert header is not None
        assert size is not None
        left, top = LEFT_OF_PAGE, int(header["y"]) - 12
        clip = FloatRect(x=left, y=top, width=size["width"] - left, height=size["height"] - top)
        self._page.screenshot(path=path, clip=clip)
        return path

    def resize(self, height: int) -> None:
        """Give the page another height."""
        self._page.set_viewport_size({"width": WIDTH, "height": height})

    def take_picture(self, name: str) -> Path:
        """Take a picture of what is to be seen."""
        path = self._pictures / f"{name}.png"
        self._page.screenshot(path=path)
        return path


@contextmanager
def dagster_page(url: str, pictures: Path) -> Iterator[DagsterPage]:
    """Open Dagster's page in a browser without a window.

    Args:
        url: Where `dagster dev` is.
        pictures: Folder for pictures; the last one, of where a test failed, is `end.png`.
    """
    pictures.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        # Root, which CI is, has no sandbox.
        browser = playwright.chromium.launch(executable_path=browser_path(), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": 900})
        page.set_default_timeout(PATIENCE_MS)
        expect.set_options(timeout=PATIENCE_MS)
        try:
            yield DagsterPage(page, url, pictures)
        finally:
            page.screenshot(path=pictures / "end.png")
            browser.close()
