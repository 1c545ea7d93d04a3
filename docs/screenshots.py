"""Takes the pictures in `docs/images`: `make screenshots` runs the flights example and clicks through Dagster's page.

Look at each picture before you commit it: an empty plot is a picture too.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import click
from playwright.sync_api import sync_playwright

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.client import Client
from dagster_ckpt.errors import CkptError
from examples.flights.dagster_dev import running_dagster_dev
from examples.flights.replayer import Replayer
from examples.flights.workspace import Workspace
from tests.e2e.dagster_page import DagsterPage, browser_path, dagster_page
from tests.ui.conftest import served

IMAGES = Path(__file__).parent / "images"
DEFINITIONS = Path(__file__).parents[1] / "definitions.py"
STREAM = "departure_delays"
LABEL = "before-release-42"
# Enough for a line in every plot.
CHECKPOINTS = 12
DAYS_PER_SECOND = 2.0
TIMEOUT_S = 300.0
HEIGHT, PLOTS_HEIGHT = 900, 1320


@click.command()
@click.option("--root", default=tempfile.gettempdir() + "/flights", help="Folder of the example; the pictures show it.")
def main(root: str) -> None:
    """Run the example, take every picture, and remove what the example wrote."""
    workspace = Workspace(Path(root))
    shutil.rmtree(workspace.root, ignore_errors=True)
    workspace.create()
    enough = threading.Event()
    feed = threading.Thread(target=_feed, args=(workspace, enough))
    with running_dagster_dev(workspace, DEFINITIONS) as dev:
        feed.start()
        catalog = Catalog(workspace.catalog_url)
        try:
            with dagster_page(f"http://localhost:{dev.port}", workspace.root / "pictures") as page:
                _take_pictures(page, catalog)
                _rewind(page, catalog)
            _take_checkpoint_page(workspace)
        finally:
            enough.set()
            feed.join()
            catalog.close()
    shutil.rmtree(workspace.root)


def _rewind(page: DagsterPage, catalog: Catalog) -> None:
    """Go back to the savepoint, so that the checkpoint page has a restart to show."""
    before = max(_completed(catalog))
    page.launch("restart_stream_job", _config("restart_stream", start_from=LABEL))
    page.await_status("Success")
    _await(lambda: max(_completed(catalog)) >= before + CHECKPOINTS // 2, "checkpoints after the rewind")


def _take_checkpoint_page(workspace: Workspace) -> None:
    """The checkpoint page of the running stream, in both themes."""
    with (
        Client(workspace.catalog_url) as client,
        served(client, token=None) as address,
        sync_playwright() as playwright,
    ):
        # Until then some health checks know nothing.
        _await(lambda: client.describe_stream(STREAM).summary.batch_id is not None, "a batch after the rewind")
        browser = playwright.chromium.launch(executable_path=browser_path(), args=["--no-sandbox"])
        for theme in ("light", "dark"):
            window = browser.new_page(color_scheme=theme, viewport={"width": 1280, "height": 860})
            for name, path in (("checkpoint-page", ""), ("checkpoint-page-restarts", "/-/timeline")):
                window.goto(f"{address}/streams/{STREAM}{path}")
                taken = IMAGES / f"{name}-{theme}.png"
                window.screenshot(path=taken, full_page=True)
                click.echo(f"docs/images/{taken.name}")
        browser.close()


def _feed(workspace: Workspace, enough: threading.Event) -> None:
    for _ in Replayer(workspace.landing).replay(pace=DAYS_PER_SECOND):
        if enough.is_set():
            return


def _take_pictures(page: DagsterPage, catalog: Catalog) -> None:
    page.materialize(f"{STREAM}_stream")
    _await(lambda: len(_completed(catalog)) >= 2, "two checkpoints")

    page.launch("trigger_savepoint_job", _config("trigger_savepoint", label=LABEL))
    page.await_status("Success")
    _save(page.take_picture_of_message("savepoint-run"))

    enough = max(_completed(catalog)) + CHECKPOINTS
    _await(lambda: max(_completed(catalog)) >= enough, f"checkpoint {enough}")
    page.resize(PLOTS_HEIGHT)
    page.open_plots(STREAM)
    _save(page.take_picture("asset-page"))
    page.resize(HEIGHT)

    page.launch("preview_rewind_job", _config("preview_rewind", start_from=LABEL))
    page.await_status("Success")
    _save(page.take_picture_of_log("rewind-preview"))

    page.type_config("restart_stream_job", _config("restart_stream", start_from=LABEL))
    _save(page.take_picture("launchpad"))
    page.open_sensor("checkpoint_supervisor_sensor")
    _save(page.take_picture("sensor-page"))


def _config(op: str, **config: str) -> dict[str, object]:
    return {"ops": {op: {"config": {"stream_id": STREAM, **config}}}}


def _completed(catalog: Catalog) -> list[int]:
    return [record.number or 0 for record in catalog.snapshots.completed(STREAM)]


def _await(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() >= deadline:
            raise CkptError(f"Waited {TIMEOUT_S:.0f} s for {what}.")
        time.sleep(0.5)


def _save(taken: Path) -> None:
    shutil.copyfile(taken, IMAGES / taken.name)
    click.echo(f"docs/images/{taken.name}")


if __name__ == "__main__":
    main()
