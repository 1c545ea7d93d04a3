"""A restore takes its bytes from the snapshot, or from a good live directory whose bytes are those of the snapshot."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dagster_ckpt.catalog.records import ExecutionStatus
from dagster_ckpt.client import examination as snapshot_verification
from dagster_ckpt.client.examination import verify_snapshot
from dagster_ckpt.client.preflight import planned_start
from dagster_ckpt.recovery import facts as recovery_look
from dagster_ckpt.recovery.facts import recovery_facts
from dagster_ckpt.recovery.plan import RecoveryKind
from dagster_ckpt.recovery.planning import plan_recovery
from dagster_ckpt.spark.checkpoint_dir.inspect import LiveStatus
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.restore import DonorCheck
from dagster_ckpt.spark.doctor.diagnosis import diagnose
from dagster_ckpt.stream.start_from import StartFrom
from tests.support.golden_stream import GoldenStream, alter, as_zeros, with_a_flipped_bit

STATE = (".sst", ".zip", ".changelog")


@pytest.fixture
def golden(tmp_path: Path) -> Iterator[GoldenStream]:
    golden = GoldenStream(tmp_path / "stream").make()
    yield golden
    golden.close()


def state_files(golden: GoldenStream) -> list[Path]:
    return [path for path in golden.live.rglob("*") if path.suffix in STATE]


def logs(golden: GoldenStream) -> list[Path]:
    return [path for log in ("offsets", "commits", "sources/0") for path in (golden.live / log).iterdir()]


def linked(golden: GoldenStream, before: Path) -> set[str]:
    """Suffixes of the files of the live directory that are those of an earlier one."""
    return {
        path.suffix
        for path in golden.live.rglob("*")
        if path.is_file()
        and (before / path.relative_to(golden.live)).exists()
        and path.samefile(before / path.relative_to(golden.live))
    }


@pytest.mark.parametrize("clean", [False, True], ids=["no end recorded", "ended in order"])
def test_a_start_from_a_named_snapshot_takes_no_bit_that_rotted_in_the_live_directory(
    golden: GoldenStream, *, clean: bool
) -> None:
    snapshot = golden.snapshot()
    if clean:
        golden.end()
    rotten = alter([*state_files(golden), *logs(golden)], with_a_flipped_bit)

    golden.start("chk-1")

    assert len(rotten) > 12
    assert golden.unlike(snapshot) == []
    assert golden.status is LiveStatus.GOOD


def test_what_is_as_the_snapshot_has_it_is_linked_and_the_rest_is_read_from_the_snapshot(golden: GoldenStream) -> None:
    snapshot = golden.snapshot()
    before = golden.live
    alter([path for path in state_files(golden) if path.suffix == ".zip"], with_a_flipped_bit)

    golden.start("chk-1")

    assert golden.unlike(snapshot) == []
    assert {".sst", ".changelog"} <= linked(golden, before)
    assert ".zip" not in linked(golden, before)


def test_after_a_loss_of_power_the_automatic_start_restores_the_snapshot_and_not_the_zeros(
    golden: GoldenStream,
) -> None:
    snapshot = golden.snapshot()
    lost = [path for path in golden.live.rglob("*") if path.suffix in (".sst", ".changelog")]
    alter([*lost, *(golden.live / "commits").iterdir()], as_zeros)
    assert golden.status is LiveStatus.BROKEN

    plan, _ = golden.start()

    assert plan.kind is RecoveryKind.RESTORE
    assert golden.unlike(snapshot) == []
    assert golden.status is LiveStatus.GOOD
    assert golden.start()[0].kind is RecoveryKind.RESUME


def test_the_doctor_finds_nothing_in_what_was_restored_after_it_found_damage(golden: GoldenStream) -> None:
    golden.snapshot()
    alter([golden.live / "state/0/0/3.zip"], with_a_flipped_bit)
    assert diagnose(LiveDirectory(str(golden.live))).findings

    golden.start("chk-1")

    assert diagnose(LiveDirectory(str(golden.live))).findings == ()


def test_a_verification_with_spark_reads_no_file_of_the_live_directory(
    golden: GoldenStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = golden.snapshot()
    ours: list[Path] = []
    read: list[Path] = []

    def reader(_spark: Any, copy: LiveDirectory, _batch: int) -> Any:
        path = copy.local_path
        assert path is not None
        for file in path.rglob("*"):
            other = golden.live / file.relative_to(path)
            read.append(file)
            ours.extend([other] if other.is_file() and other.samefile(file) else [])
        return SimpleNamespace(count=list)

    monkeypatch.setattr(snapshot_verification, "StateReader", reader)
    session: Any = object()

    assert verify_snapshot(golden.stream, snapshot.location or "", spark=session).passed
    assert len(read) > 12
    assert ours == []


@pytest.mark.parametrize(
    ("status", "boot", "text", "check"),
    [
        (ExecutionStatus.SUSPENDED, None, "latest-checkpoint", DonorCheck.IDENTITY),
        (ExecutionStatus.FINISHED, None, "latest-checkpoint", DonorCheck.IDENTITY),
        (ExecutionStatus.CANCELED, None, "latest-checkpoint", DonorCheck.IDENTITY),
        (ExecutionStatus.SUSPENDED, None, "chk-1", DonorCheck.DIGEST),
        (ExecutionStatus.FAILED, None, "latest-checkpoint", DonorCheck.DIGEST),
        (None, None, "latest-checkpoint", DonorCheck.DIGEST),
        (ExecutionStatus.SUSPENDED, "another boot", "latest-checkpoint", DonorCheck.DIGEST),
    ],
)
def test_only_after_an_end_in_order_a_large_file_is_known_by_its_identity(
    golden: GoldenStream,
    monkeypatch: pytest.MonkeyPatch,
    status: ExecutionStatus | None,
    boot: str | None,
    text: str,
    check: DonorCheck,
) -> None:
    golden.snapshot()
    if status is not None:
        golden.end(status)
    if boot is not None:
        monkeypatch.setattr(recovery_look, "boot_id", lambda: boot)

    by_itself = recovery_facts(golden.stream, StartFrom(text), predecessor_ended=True, is_automatic=True)
    donor, of_a_person = plan_recovery(by_itself).donor, planned_start(golden.stream, StartFrom(text)).donor

    assert donor is not None
    assert of_a_person is not None
    assert (donor.live.local_path, donor.check) == (golden.live, check)
    # Who goes back has a reason not to trust the files.
    assert of_a_person.check is DonorCheck.DIGEST


def test_a_cancellation_after_a_failure_is_no_end_in_order(golden: GoldenStream) -> None:
    golden.snapshot()
    golden.end(ExecutionStatus.FAILED)
    golden.run_again(ExecutionStatus.CANCELED)

    donor = planned_start(golden.stream, StartFrom("latest-checkpoint")).donor

    assert donor is not None
    assert donor.check is DonorCheck.DIGEST


def test_a_broken_live_directory_gives_nothing(golden: GoldenStream) -> None:
    golden.snapshot()
    golden.end()
    shutil.rmtree(golden.live / "sources")

    assert planned_start(golden.stream, StartFrom("latest-checkpoint")).donor is None


def test_a_restore_is_flushed_before_the_catalog_switches_to_it(
    golden: GoldenStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    golden.snapshot()
    shutil.rmtree(golden.root / "live")
    flushed: set[int] = set()
    unflushed: list[Path] = []
    flush, switch = os.fsync, golden.stream.catalog.streams.switch_live_directory

    def fsync(descriptor: int) -> None:
        flushed.add(os.fstat(descriptor).st_ino)
        flush(descriptor)

    def switch_live_directory(lease: Any, url: str, **how: Any) -> Any:
        new = LiveDirectory(url).local_path
        assert new is not None
        there = [new, new.parent, new.parent.parent, *new.rglob("*")]
        unflushed.extend(path for path in there if path.stat().st_ino not in flushed)
        return switch(lease, url, **how)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(golden.stream.catalog.streams, "switch_live_directory", switch_live_directory)
    golden.start()

    assert golden.status is LiveStatus.GOOD
    assert unflushed == []
