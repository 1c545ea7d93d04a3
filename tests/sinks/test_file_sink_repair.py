"""The log of a file sink that was moved or lost is written again, exactly, or nothing is changed."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest

from dagster_ckpt.errors import IncompleteCutError, RestoreError, SinkRollbackError
from dagster_ckpt.sinks.file_sink import FileSink
from dagster_ckpt.sinks.file_sink_log import (
    begin_log,
    capture_log,
    committed_files,
    own_past,
    roll_back,
)
from dagster_ckpt.sinks.file_sink_repair import (
    LogTrouble,
    is_moved_log,
    log_trouble,
    plan_rebuilt_log,
    plan_relocation,
    rebuild_log,
    relocate,
    relocated,
)
from dagster_ckpt.spark.checkpoint_dir.captured_sinks import SinkEntry
from tests.support.file_damage import cut


class Output:
    """A folder as Spark's file sink leaves it, with an entry compacted every fourth batch."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.log = root / "_spark_metadata"
        self.log.mkdir(parents=True)
        self.lines: list[str] = []

    def batch(self, number: int) -> None:
        part = self.root / f"day=a b/part-00000-{number:08x}-0000-0000-0000-000000000000-c000.json"
        part.parent.mkdir(exist_ok=True)
        part.write_text(f"rows of batch {number}")
        path = f"file://{self.root}/day=a%20b/{part.name}"
        self.lines.append(json.dumps({"path": path, "size": part.stat().st_size, "action": "add"}))
        is_compact = number % 4 == 3
        shown = self.lines if is_compact else self.lines[-1:]
        (self.log / f"{number}{'.compact' if is_compact else ''}").write_text("\n".join(["v1", *shown]))

    def capture(self, batch_id: int) -> list[SinkEntry]:
        return [
            SinkEntry(file.source.split("/")[-1], file.read())
            for file in capture_log(str(self.root), "sinks/0", batch_id).files
        ]

    def names(self) -> set[str]:
        return {path.name for path in self.log.iterdir()}


@pytest.fixture
def output(tmp_path: Path) -> Output:
    made = Output(tmp_path / "out")
    for number in range(9):
        made.batch(number)
    return made


def test_a_moved_folder_is_noticed_and_its_log_relocated(output: Output, tmp_path: Path) -> None:
    before = {Path(path).name for path in committed_files(str(output.root))}
    moved = tmp_path / "elsewhere/moved"
    moved.parent.mkdir()
    output.root.rename(moved)
    assert log_trouble(str(moved)) is LogTrouble.ELSEWHERE

    planned = plan_relocation(str(moved))
    relocate(planned)

    assert planned.files == 9
    assert log_trouble(str(moved)) is None
    listed = committed_files(str(moved))
    assert {Path(path).name for path in listed} == before
    assert all(Path(path).is_file() and Path(path).is_relative_to(moved) for path in listed)
    assert plan_relocation(str(moved)).files == 0


def test_a_moved_log_is_known_by_the_names_of_its_files(output: Output, tmp_path: Path) -> None:
    captured = output.capture(5)
    moved = output.root.rename(tmp_path / "moved to")
    assert is_moved_log(str(moved), captured)
    relocate(plan_relocation(str(moved)))
    assert is_moved_log(str(moved), captured)
    old = f"file://{tmp_path}/out"

    entries = relocated(captured, old, str(moved))
    roll_back(str(moved), 5, entries, still_mine=nullcontext)

    listed = [Path(path) for path in committed_files(str(moved))]
    assert len(listed) == 6
    assert all(path.is_file() and path.is_relative_to(moved) for path in listed)
    # Names without a uuid are not unique.
    plain = [SinkEntry(each.name, each.data.replace(b"-0000-0000-0000-", b"-")) for each in captured]
    assert not is_moved_log(str(moved), plain)
    assert not is_moved_log(str(tmp_path / "nothing there"), captured)


def test_a_moved_folder_without_one_of_its_files_is_left_as_it_is(output: Output, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    output.root.rename(moved)
    next(moved.glob("day=a b/*00000002-*")).unlink()
    log = {path.name: path.read_bytes() for path in (moved / "_spark_metadata").iterdir()}
    with pytest.raises(SinkRollbackError, match="1 files that it lists are not there"):
        plan_relocation(str(moved))
    assert log == {path.name: path.read_bytes() for path in (moved / "_spark_metadata").iterdir()}


def test_a_folder_through_a_symbolic_link_was_not_moved(output: Output, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(output.root)
    assert log_trouble(str(tmp_path / "link")) is None


@pytest.mark.parametrize("lost", ["everything", "compact"])
def test_a_lost_log_is_rebuilt_from_a_snapshot_of_its_newest_batch(output: Output, lost: str) -> None:
    captured, files = output.capture(8), set(committed_files(str(output.root)))
    if lost == "everything":
        shutil.rmtree(output.log)
    else:
        for path in output.log.glob("*.compact"):
            path.unlink()
        (output.log / "0").unlink()
        assert log_trouble(str(output.root)) is LogTrouble.GAP
        with pytest.raises(IncompleteCutError, match="rebuild-output"):
            output.capture(8)

    rebuilt = plan_rebuilt_log(str(output.root), captured, 8)
    rebuild_log(rebuilt, nullcontext)

    assert (rebuilt.batch_id, list(rebuilt.unknown)) == (8, [])
    assert log_trouble(str(output.root)) is None
    assert set(committed_files(str(output.root))) == files


def test_entries_that_are_left_complete_what_a_snapshot_captured(output: Output) -> None:
    captured = output.capture(5)
    for name in ("3.compact", "7.compact", "0", "1", "2", "4", "5"):
        (output.log / name).unlink()
    rebuilt = plan_rebuilt_log(str(output.root), captured, 8)
    # Entry 7 is gone, and with it what it alone lists.
    assert (rebuilt.batch_id, list(rebuilt.unknown)) == (6, [7, 8])
    rebuild_log(rebuilt, nullcontext)
    # Nothing is deleted: a start from the snapshot rolls the sink back.
    assert output.names() == {"3.compact", "4", "5", "6", "8"}


@pytest.mark.parametrize("batch_id", [8, 5], ids=["that the snapshot has", "after the snapshot"])
def test_an_entry_that_cannot_be_read_counts_as_lost(output: Output, batch_id: int) -> None:
    captured = output.capture(batch_id)
    cut(output.log / "8")

    rebuilt = plan_rebuilt_log(str(output.root), captured, 8)
    rebuild_log(rebuilt, nullcontext)

    assert rebuilt.batch_id == (8 if batch_id == 8 else 7)
    if batch_id == 8:
        assert len(committed_files(str(output.root))) == 9


def test_a_log_is_not_rebuilt_if_a_file_is_missing_or_another_run_wrote_there(output: Output) -> None:
    captured = output.capture(8)
    shutil.rmtree(output.log)
    part = next(output.root.glob("day=a b/*00000002-*"))
    part.write_text("short")
    with pytest.raises(SinkRollbackError, match="nothing was changed"):
        plan_rebuilt_log(str(output.root), captured, 8)
    assert not output.log.exists()
    part.unlink()
    output.log.mkdir()
    (output.log / "8").write_text('v1\n{"path":"file:///x/part","size":1,"action":"add"}')
    with pytest.raises((SinkRollbackError, RestoreError), match="another run"):
        plan_rebuilt_log(str(output.root), captured, 8)


def test_a_sink_that_began_later_goes_back_to_before_its_beginning(tmp_path: Path) -> None:
    folder = tmp_path / "later"
    begin_log(str(folder), 6)
    assert {path.name for path in (folder / "_spark_metadata").iterdir()} == {"6.compact"}
    assert own_past(str(folder), 4) == [SinkEntry("4.compact", b"v1")]
    assert log_trouble(str(folder)) is None
    assert FileSink.at(str(folder)).last_batch(None) == 6
