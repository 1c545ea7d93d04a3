"""Live directories are deleted only where the catalog says that they are this stream's, and not needed any more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.errors import LiveDirectoryError
from dagster_ckpt.recovery.checkpoint_retention import apply_terminal_retention, housekeeping
from dagster_ckpt.recovery.live_directories import delete_older_live_directories
from dagster_ckpt.runtime.execution import execute_stream
from dagster_ckpt.runtime.run_request import RunRequest
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.ownership import OWNER, disown_live_folder
from dagster_ckpt.values.modes import ExternalizedCheckpointCleanup, TerminalState
from tests.support.as_writer import keeping, set_stream
from tests.support.retention_shelf import STREAM
from tests.support.rewind_history import History


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    history = History(tmp_path)
    yield history
    history.close()


def files(folder: Path) -> list[Path]:
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


def test_housekeeping_leaves_those_of_a_lost_catalog_which_the_starts_refuse_to_forget(history: History) -> None:
    shelf = history.shelf
    before = files(shelf.live)
    shelf.stream.catalog.close()
    stream = shelf.stream = replace(shelf.stream, catalog=Catalog(f"sqlite:///{shelf.root / 'new-catalog.db'}"))
    for _ in range(2):
        with pytest.raises(LiveDirectoryError, match="its folders contain state"):
            execute_stream(stream, RunRequest(run_id="run", start_query=lambda _live: pytest.fail("it was started")))

    housekeeping(stream)

    assert files(shelf.live) == before


@pytest.fixture
def moved(history: History) -> StreamHandle:
    """Configured to a folder where another deployment has the live directories of a stream of the same id."""
    theirs = history.shelf.root / f"elsewhere/{STREAM}"
    for name in ("live-1-0", "live-2-0"):
        (theirs / name / "commits").mkdir(parents=True)
        (theirs / name / "commits/7").write_text("theirs")
    return replace(history.shelf.stream, live_root=str(theirs.parent))


def test_those_beside_which_the_query_does_not_run_are_not_its_older_ones(
    history: History, moved: StreamHandle
) -> None:
    before = files(Path(moved.live_folder))

    with keeping(moved.catalog, STREAM) as lease:
        delete_older_live_directories(moved, history.live, lease)

    assert files(Path(moved.live_folder)) == before


def test_a_clean_up_leaves_the_one_that_the_catalog_names_elsewhere(history: History, moved: StreamHandle) -> None:
    """It may be another environment's whose catalog was copied."""
    before, named = files(Path(moved.live_folder)), files(history.shelf.live)
    cleanup = ExternalizedCheckpointCleanup.DELETE_ON_CANCELLATION

    stream = replace(moved, options=replace(moved.options, cleanup=cleanup))
    report = apply_terminal_retention(stream, "first", TerminalState.CANCELED)
    housekeeping(stream)

    assert files(Path(moved.live_folder)) == before
    assert files(history.shelf.live) == named
    assert any(f"{history.shelf.live}: it is not below" in each for each in report.kept)


@pytest.fixture
def followed(history: History) -> StreamHandle:
    """The stream was canceled and its directories deleted; since then another catalog's stream runs in its folder.

    So it is after a move to another catalog whose old one is still open somewhere.
    """
    stream = history.shelf.stream
    stream = replace(
        stream, options=replace(stream.options, cleanup=ExternalizedCheckpointCleanup.DELETE_ON_CANCELLATION)
    )
    apply_terminal_retention(stream, "first", TerminalState.CANCELED)
    assert not stream.live_directories()
    theirs = history.shelf.live
    (theirs / "commits").mkdir(parents=True)
    (theirs / "commits/7").write_text("theirs")
    (theirs.parent / OWNER).write_text("their-deployment")
    return stream


def test_housekeeping_leaves_those_of_the_deployment_that_uses_the_folder_now(followed: StreamHandle) -> None:
    before = files(Path(followed.live_folder))

    report = housekeeping(followed)

    assert files(Path(followed.live_folder)) == before
    assert report.live_directory_deleted is None


def test_a_clean_up_leaves_those_of_the_deployment_that_uses_the_folder_now(
    history: History, followed: StreamHandle
) -> None:
    """Their live directory may even have the name of the one that this catalog still knows."""
    set_stream(followed.catalog, STREAM, live_directory=str(history.shelf.live), live_generation=1)
    history.shelf.execution("second")
    before = files(Path(followed.live_folder))

    preview = apply_terminal_retention(followed, "second", TerminalState.CANCELED, dry_run=True)
    report = apply_terminal_retention(followed, "second", TerminalState.CANCELED)

    # Their query is not fenced either, and the mark of the folder stays theirs.
    assert files(Path(followed.live_folder)) == before
    assert preview.live_directory_deleted is None
    assert report.live_directory_deleted is None
    assert any("belongs to deployment their-deployment" in each for each in report.kept)


def test_the_mark_of_a_folder_in_which_they_have_not_started_yet_stays(history: History) -> None:
    stream = history.shelf.stream
    history.shelf.live.parent.mkdir(parents=True, exist_ok=True)
    (history.shelf.live.parent / OWNER).write_text("their-deployment")

    disown_live_folder(stream)

    assert (history.shelf.live.parent / OWNER).read_text() == "their-deployment"
