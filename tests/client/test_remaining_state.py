"""What still contains a forgotten key, by the ids of edits in snapshots and directories: nothing is left out."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dagster_ckpt.catalog.records import ExecutionStatus, SnapshotTrigger
from dagster_ckpt.cli.main import commands
from dagster_ckpt.client.derived_savepoint import remaining_state
from dagster_ckpt.client.preflight import start_preview
from dagster_ckpt.config.checkpoint_storage import FileSystemCheckpointStorage
from dagster_ckpt.errors import OptionError, StorageAccessError
from dagster_ckpt.recovery.checkpoint_retention import discard
from dagster_ckpt.recovery.facts import recovery_facts
from dagster_ckpt.recovery.live_directories import scratch_directory
from dagster_ckpt.recovery.planning import plan_recovery
from dagster_ckpt.recovery.rewind_preview import take_safety_savepoint
from dagster_ckpt.snapshot.object_store import ObjectSnapshotStore
from dagster_ckpt.snapshot.opening import open_store
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.start_from import StartFrom
from dagster_ckpt.values.modes import SnapshotKind
from tests.support.as_writer import keeping
from tests.support.edited_savepoint import edited_savepoint
from tests.support.golden_stream import STREAM, GoldenStream
from tests.support.verbs import trigger_savepoint


@pytest.fixture
def golden(tmp_path: Path) -> Iterator[GoldenStream]:
    """A stopped stream after batch 5, with a checkpoint, and a savepoint at batch 4 that was edited."""
    golden = GoldenStream(tmp_path).make()
    golden.snapshot(SnapshotKind.SAVEPOINT, label="before")
    edited_savepoint(golden, "before", "forgotten")
    golden.commit(5)
    golden.snapshot()
    golden.end(ExecutionStatus.SUSPENDED)
    yield golden
    golden.close()


def places(golden: GoldenStream) -> list[str]:
    found = remaining_state(golden.stream, "forgotten")
    return [each.partition(",")[0].replace(str(golden.root), "") for each in (*found.snapshots, *found.directories)]


def test_a_start_from_the_savepoint_says_that_its_safety_savepoint_has_the_key(golden: GoldenStream) -> None:
    asked = StartFrom("forgotten", accept_loss=True)
    assert places(golden) == [
        "chk-3 at batch 5",
        "savepoint before at batch 4",
        "the live directory /live/golden/live-1-0",
    ]
    assert any(
        "contains the state from before the edit" in each for each in start_preview(golden.stream, asked).messages()
    )

    with keeping(golden.stream.catalog, STREAM) as lease:
        facts = recovery_facts(golden.stream, asked, predecessor_ended=True)
        message = take_safety_savepoint(golden.stream, facts, plan_recovery(facts), asked, lease.record)
    assert message is not None
    assert "it contains the state from before the edit of savepoint forgotten at batch 4: delete it" in message
    golden.start("forgotten", accept_loss=True)

    assert places(golden) == [
        "savepoint before-rewind-4 at batch 5",
        "chk-3 at batch 5",
        "savepoint before at batch 4",
        "the live directory /live/golden/live-1-0",
    ]

    # What the stream leaves now has the edit.
    golden.commit(5)
    again = start_preview(golden.stream, asked)
    assert again.safety_savepoint is not None
    assert "before the edit" not in again.safety_savepoint


def test_a_snapshot_that_the_edited_stream_takes_is_not_listed(golden: GoldenStream) -> None:
    def begin(number: int) -> None:
        golden._writer.snapshots.start(
            snapshot_id=f"attempt-{number}",
            execution_id="first",
            kind=SnapshotKind.CHECKPOINT,
            number=number,
            trigger=SnapshotTrigger.PERIODIC,
            timeline=golden.stream.catalog.streams.get(STREAM).timeline,
        )

    begin(20)
    golden.start("forgotten", accept_loss=True)
    begin(21)
    assert [each for each in places(golden) if "2" in each] == ["chk-20"]


def test_the_list_ends_once_everything_is_deleted(golden: GoldenStream) -> None:
    golden.start("forgotten", accept_loss=True)
    later = trigger_savepoint(golden.stream, origin="a test", label="later")
    assert later.state_edits == ("forgotten",)
    shutil.rmtree(golden.root / "live/golden/live-1-0")
    [before] = [each for each in golden.stream.catalog.snapshots.of_stream(STREAM) if each.label == "before"]
    shutil.rmtree((before.location or "").removeprefix("file://"))
    shutil.move(golden.root / "snapshots/golden/chk-3", golden.root / "snapshots/golden/chk-99")

    with scratch_directory(golden.stream) as scratch:
        scratch.folder.write("metadata", [b'{"id":"q"}'])
        [unlisted, copy] = places(golden)
    assert unlisted == "a snapshot that the catalog does not list"
    assert copy.startswith("the temporary copy /live/.scratch/golden/")
    run = ["state", "remaining", STREAM, "forgotten"]
    environment = {"DAGSTER_CKPT_CATALOG": f"sqlite:///{golden.root / 'catalog.db'}"}
    result = CliRunner().invoke(commands(), run, env=environment)
    assert (result.exit_code, result.output.count("contains the state from before")) == (3, 1), result.output

    shutil.rmtree(golden.root / "snapshots/golden/chk-99")
    assert remaining_state(golden.stream, "forgotten").is_nowhere
    result = CliRunner().invoke(commands(), run, env=environment)
    assert result.exit_code == 0
    assert "no snapshot and no directory of the stream" in result.output


@pytest.mark.parametrize("is_subsumed", [False, True])
def test_a_checkpoint_in_the_storage_from_before_is_listed_also_after_retention_left_it_there(
    golden: GoldenStream, is_subsumed: bool
) -> None:
    golden.start("forgotten", accept_loss=True)
    [checkpoint] = golden.stream.catalog.snapshots.of_stream(STREAM, kind=SnapshotKind.CHECKPOINT)
    [before] = [each for each in golden.stream.catalog.snapshots.of_stream(STREAM) if each.label == "before"]
    shutil.rmtree((before.location or "").removeprefix("file://"))
    shutil.rmtree(golden.root / "live/golden/live-1-0")
    moved = move(golden)
    if is_subsumed:
        assert "but not its bytes" in discard(moved, [checkpoint], reason="subsumed", lease=None).deleted[0]

    left = remaining_state(moved, "forgotten")

    folder = f"file://{golden.root}/snapshots/golden"
    who = f"which you delete with the stream's folder {folder}, in a storage used before"
    assert left.snapshots == (f"chk-3 at batch 5, {who}: {folder}/chk-3",)
    shutil.rmtree(golden.root / "snapshots/golden")
    assert remaining_state(moved, "forgotten").is_nowhere


def test_a_storage_from_before_that_cannot_be_read_hides_nothing_else(
    golden: GoldenStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    golden.snapshot()
    [*checkpoints] = golden.stream.catalog.snapshots.of_stream(STREAM, kind=SnapshotKind.CHECKPOINT)
    moved = move(golden)
    discard(moved, checkpoints, reason="subsumed", lease=None)
    real = ObjectSnapshotStore.manifest

    def manifest(store: ObjectSnapshotStore, location: str) -> Any:
        if location in {each.location for each in checkpoints}:
            raise StorageAccessError("access denied")
        return real(store, location)

    monkeypatch.setattr(ObjectSnapshotStore, "manifest", manifest)
    assert [each.partition(",")[0] for each in remaining_state(moved, "forgotten").snapshots] == [
        f"perhaps checkpoints in file://{golden.root}/snapshots/golden",
        "savepoint before at batch 4",
    ]


def move(golden: GoldenStream) -> StreamHandle:
    storage = FileSystemCheckpointStorage(
        f"file://{golden.root}/new", savepoint_path=f"file://{golden.root}/savepoints"
    )
    return replace(golden.stream, storage=storage, store=open_store(storage, STREAM))


def test_a_savepoint_that_was_not_edited_is_refused(golden: GoldenStream) -> None:
    with pytest.raises(OptionError, match="was not edited"):
        remaining_state(golden.stream, "before")
