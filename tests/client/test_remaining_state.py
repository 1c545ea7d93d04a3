"""What still contains a forgotten key, by the ids of edits in snapshots and directories: nothing is left out."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from dagster_ckpt.catalog.records import ExecutionStatus, SnapshotTrigger
from dagster_ckpt.cli.main import commands
from dagster_ckpt.client.derived_savepoint import remaining_state
from dagster_ckpt.client.preflight import start_preview
from dagster_ckpt.errors import OptionError
from dagster_ckpt.recovery.facts import recovery_facts
from dagster_ckpt.recovery.live_directories import scratch_directory
from dagster_ckpt.recovery.planning import plan_recovery
from dagster_ckpt.recovery.rewind_preview import take_safety_savepoint
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


def test_a_savepoint_that_was_not_edited_is_refused(golden: GoldenStream) -> None:
    with pytest.raises(OptionError, match="was not edited"):
        remaining_state(golden.stream, "before")
