"""A rewrite of state that is killed in its first steps, or while its directory is deleted: a plain start goes on."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dagster_ckpt.client.preflight import planned_start
from dagster_ckpt.errors import LiveDirectoryError, StateRewriteError
from dagster_ckpt.io.local import LocalFileIO
from dagster_ckpt.recovery.plan import RecoveryKind
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.state_files import ROCKSDB
from dagster_ckpt.state import rewriting
from dagster_ckpt.state.stopped_state import StateShape
from dagster_ckpt.stream.ownership import check_places
from dagster_ckpt.stream.start_from import StartFrom
from tests.support.executioner import Executioner, Killed
from tests.support.golden_stream import STREAM, GoldenStream


@pytest.fixture
def golden(tmp_path: Path) -> Iterator[GoldenStream]:
    golden = GoldenStream(tmp_path).make()
    golden.end()
    yield golden
    golden.close()


def goes_on(golden: GoldenStream) -> None:
    """A plain start continues in the directory of before, under a name that is free."""
    check_places(golden.stream, StartFrom(), predecessor_ended=True)
    assert planned_start(golden.stream, StartFrom()).kind is RecoveryKind.RESUME
    assert golden.live.name == "live-1-0"
    assert not golden.stream.new_live_directory(1, 3).exists()
    shutil.rmtree(golden.stream.live_directory(2, 3).url, ignore_errors=True)


def rewrite(golden: GoldenStream, patch: pytest.MonkeyPatch, write: Callable[..., None]) -> bool:
    """Rewrite the state, with something else for Spark's part; returns whether the process was killed."""
    patch.setattr(rewriting, "rewriter_for", lambda _spark, **_: None)
    patch.setattr(rewriting, "_write_rows", write)
    target = golden.stream.live_directory(2, 3)
    spark: Any = None
    with pytest.raises((Killed, StateRewriteError)) as ended:
        rewriting.rewrite_state(spark, LiveDirectory(golden.live_url), target, shape=StateShape(ROCKSDB, 5))
    return ended.type is Killed


def fails(*_: object) -> None:
    raise StateRewriteError("Spark failed")


def test_killed_at_any_file_of_the_deletion_a_plain_start_goes_on(golden: GoldenStream) -> None:
    killed, steps = True, 0
    while killed:
        with pytest.MonkeyPatch.context() as patch:

            def kill_the_deletion(*_: object, patch: pytest.MonkeyPatch = patch, steps: int = steps) -> None:
                Executioner(patch, steps, (os, "unlink"), (os, "rmdir"))
                fails()

            killed = rewrite(golden, patch, kill_the_deletion)
        goes_on(golden)
        steps += 1
    assert steps > 10


def test_killed_at_any_file_of_the_skeleton_a_plain_start_goes_on(golden: GoldenStream) -> None:
    was_killed: list[bool] = []

    def dies(*_: object) -> None:
        was_killed[-1] = False
        raise Killed

    while was_killed[-1:] != [False]:
        was_killed.append(True)
        with pytest.MonkeyPatch.context() as patch:
            # A killed process does not tidy up either.
            patch.setattr(LiveDirectory, "delete", lambda _live: None)
            Executioner(patch, len(was_killed) - 1, (LocalFileIO, "place"), (LocalFileIO, "write"))
            rewrite(golden, patch, dies)
        goes_on(golden)
    assert len(was_killed) > 5


def test_a_directory_that_a_query_has_used_is_still_refused(golden: GoldenStream) -> None:
    used = Path(golden.stream.live_directory(2, 3).url)
    (used / "commits").mkdir(parents=True)
    (used / "metadata").write_text(f'{{"id":"{uuid.uuid4()}"}}')
    with pytest.raises(LiveDirectoryError, match="The catalog is older"):
        check_places(golden.stream, StartFrom(), predecessor_ended=True)
    assert golden.stream.catalog.streams.get(STREAM).live_generation == 1


def test_a_link_to_a_marked_directory_is_deleted_and_not_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "kept/state").mkdir(parents=True)
    (tmp_path / "kept/not-in-use").touch()
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    LiveDirectory(str(tmp_path / "link")).delete()
    assert not (tmp_path / "link").exists()
    assert (tmp_path / "kept/state").exists()
    assert (tmp_path / "kept/not-in-use").exists()
