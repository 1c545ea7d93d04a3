"""Only what is read in a recovery point makes it damaged, whatever a failure says; and what is read there counts."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from dagster_ckpt import errors
from dagster_ckpt.catalog.records import ExecutionStatus
from dagster_ckpt.client.examination import examine_live_directory
from dagster_ckpt.client.preflight import start_preview
from dagster_ckpt.policies.restart import RestartStrategies
from dagster_ckpt.recovery.examination import is_suspicious, is_suspicious_end
from dagster_ckpt.recovery.plan import RecoveryKind
from dagster_ckpt.runtime.run_request import EndKind
from dagster_ckpt.stream.start_from import StartFrom
from tests.support.golden_stream import as_zeros, with_a_flipped_bit
from tests.support.played_query import PlayedQuery
from tests.support.recovery_ladder import Ladder
from tests.support.retention_shelf import STREAM

FAILURES = yaml.safe_load((Path(__file__).parent / "failures.yaml").read_text())


@pytest.fixture
def ladder(tmp_path: Path) -> Iterator[Ladder]:
    ladder = Ladder(tmp_path)
    yield ladder
    ladder.close()


def reasons(ladder: Ladder) -> list[str]:
    """Why executions failed, the newest first."""
    executions = ladder.stream.catalog.executions.of_stream(STREAM)
    return [each.reason or "" for each in executions if each.status is ExecutionStatus.FAILED]


@pytest.mark.thorough(but=("rocks: state * flip", "changelog: * trunc", "a user's *", "a log *", "a class *"))
@pytest.mark.parametrize("case", FAILURES, ids=lambda case: case["says"])
def test_a_healthy_directory_is_resumed_whatever_a_query_failed_with(ladder: Ladder, case: dict[str, Any]) -> None:
    bad = [PlayedQuery(ends=True, error=case["trace"]) for _ in range(3)]

    outcome = ladder.run(*bad, PlayedQuery(ends=True))

    assert outcome.end.kind is EndKind.ENDED_BY_ITSELF
    assert ladder.stage.started_in == [ladder.first.url] * 4
    assert ladder.batches == (13, 13)
    assert ladder.stream.catalog.recoveries.of_stream(STREAM) == []
    for reason in reasons(ladder)[:3]:
        told = f"{ladder.first.url} was examined after the failure and is intact" in reason
        assert told == is_suspicious_end(case["trace"]), reason


@pytest.mark.thorough(but=("a user's *", "no memory"))
@pytest.mark.parametrize("case", FAILURES[::6], ids=lambda case: case["says"])
def test_it_is_resumed_too_if_the_query_cannot_be_started(ladder: Ladder, case: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError) as failed:
        ladder.run(RuntimeError(case["trace"]))

    assert "was examined after the failure and is intact" in "".join(failed.value.__notes__)
    assert reasons(ladder)[0].endswith(failed.value.__notes__[0])
    assert ladder.stream.catalog.recoveries.of_stream(STREAM) == []
    assert ladder.run(PlayedQuery(ends=True)).end.kind is EndKind.ENDED_BY_ITSELF
    assert ladder.batches == (13, 13)


def truncated(data: bytes) -> bytes:
    return data[: len(data) // 2]


def emptied(_data: bytes) -> bytes:
    return b""


def in_a_path(data: bytes) -> bytes:
    """Another file's name, of the same length and as good to parse: see D4 of the third round of trials."""
    at = data.rindex(b".json") - 1
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


DAMAGES: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "offsets truncated": ("offsets/13", truncated),
    "offsets emptied": ("offsets/13", emptied),
    "offsets as zeros": ("offsets/13", as_zeros),
    "offsets before them truncated": ("offsets/12", truncated),
    "offsets before them with a flipped bit": ("offsets/12", with_a_flipped_bit),
    "commit truncated": ("commits/13", truncated),
    "commit emptied": ("commits/13", emptied),
    "metadata with a flipped bit": ("metadata", with_a_flipped_bit),
    "metadata emptied": ("metadata", emptied),
    "source log with another path": ("sources/0/12", in_a_path),
    "source log truncated": ("sources/0/13", truncated),
    "compacted source log truncated": ("sources/0/11.compact", truncated),
}


def spoil(ladder: Ladder, name: str, damage: Callable[[bytes], bytes]) -> None:
    path = Path(ladder.first.url.removeprefix("file://")) / name
    path.write_bytes(damage(path.read_bytes()))


@pytest.mark.thorough(but=("offsets truncated", "commit emptied", "metadata *", "source log *"))
@pytest.mark.parametrize(("name", "damage"), DAMAGES.values(), ids=DAMAGES)
def test_a_start_a_preview_and_the_doctor_find_the_same_damage(
    ladder: Ladder, name: str, damage: Callable[[bytes], bytes]
) -> None:
    assert examine_live_directory(ladder.stream).diagnosis.can_resume
    assert start_preview(ladder.stream, StartFrom()).plan.kind is RecoveryKind.RESUME
    spoil(ladder, name, damage)

    examination = examine_live_directory(ladder.stream)
    assert not examination.diagnosis.can_resume
    assert name in "".join(finding.path + finding.explanation for finding in examination.diagnosis.findings)
    assert start_preview(ladder.stream, StartFrom()).plan.kind is RecoveryKind.RESTORE
    ladder.run(PlayedQuery(ends=True))

    assert ladder.first.url not in ladder.stage.started_in
    assert ladder.batches == (12, 12)


@pytest.mark.thorough(but=("offsets truncated", "metadata emptied"))
@pytest.mark.parametrize(("name", "damage"), DAMAGES.values(), ids=DAMAGES)
def test_damage_is_found_after_a_failure_that_says_nothing_of_it(
    ladder: Ladder, name: str, damage: Callable[[bytes], bytes]
) -> None:
    def spoils() -> None:
        spoil(ladder, name, damage)

    outcome = ladder.run(
        PlayedQuery(ends=True, error="java.lang.RuntimeException: ?", before=spoils), PlayedQuery(ends=True)
    )

    assert outcome.end.kind is EndKind.ENDED_BY_ITSELF
    assert ladder.batches == (12, 12)
    assert "was examined after the failure and is damaged" in reasons(ladder)[0]
    (failed,) = ladder.stream.catalog.recoveries.of_stream(STREAM)
    assert (failed.point, failed.is_certain) == (f"live:{ladder.first.url}", True)


def test_a_repaired_directory_is_resumed_by_the_next_start(ladder: Ladder) -> None:
    ladder.stage.stream = replace(ladder.stream, restart=RestartStrategies.no_restart())
    path = Path(ladder.first.url.removeprefix("file://")) / "offsets/13"
    whole = path.read_bytes()
    ladder.run(PlayedQuery(ends=True, error="?", before=lambda: path.write_bytes(b"")))
    assert ladder.stream.catalog.recoveries.of_stream(STREAM)

    path.write_bytes(whole)
    ladder.run(PlayedQuery(ends=True))

    assert ladder.stage.started_in == [ladder.first.url] * 2
    assert ladder.batches == (13, 13)


def test_a_damaged_entry_that_no_start_reads_is_a_warning(ladder: Ladder) -> None:
    spoil(ladder, "offsets/9", with_a_flipped_bit)

    examination = examine_live_directory(ladder.stream)
    ladder.run(PlayedQuery(ends=True))

    assert examination.diagnosis.can_resume
    assert "offsets/9" in {finding.path for finding in examination.diagnosis.findings}
    assert ladder.batches == (13, 13)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (errors.SnapshotCorruptError("x"), True),
        (errors.SnapshotNotFoundError("x"), True),
        (errors.RestoreError("x"), True),
        (errors.IncompleteCutError("x"), True),
        (errors.SinkRollbackError("x"), False),
        (errors.RowsAtRiskError("x"), False),
        (errors.UnknownLayoutError("x"), False),
        (errors.StorageAccessError("x"), False),
        (errors.LeaseLostError("x"), False),
        (errors.CatalogError("x"), False),
        (RuntimeError("ClassNotFoundException: kafka"), True),
        (RuntimeError("java.io.InterruptedIOException: \nCaused by: java.lang.InterruptedException"), False),
    ],
)
def test_which_errors_of_a_start_make_it_look(error: Exception, expected: bool) -> None:
    assert is_suspicious(error) is expected


def test_a_start_writes_a_damaged_log_of_the_sink_back_from_the_snapshot_that_captured_it(ladder: Ladder) -> None:
    entry = ladder.history.sink / "_spark_metadata/12"
    whole = entry.read_text()
    entry.unlink()
    assert not examine_live_directory(ladder.stream).diagnosis.can_resume

    assert ladder.run(PlayedQuery(ends=True)).end.kind is EndKind.ENDED_BY_ITSELF

    assert entry.read_text() == whole
    assert ladder.first.url not in ladder.stage.started_in
    assert ladder.batches == (12, 12)


def test_a_start_does_not_continue_a_damaged_log_of_the_sink_that_no_snapshot_has(ladder: Ladder) -> None:
    entry = ladder.history.sink / "_spark_metadata/12"
    whole = entry.read_text()
    for snapshot in ladder.snapshots:
        assert snapshot.location is not None
        shutil.rmtree(snapshot.location.removeprefix("file://"))
    entry.unlink()
    assert not examine_live_directory(ladder.stream).diagnosis.can_resume

    with pytest.raises(errors.SharedSinkError, match=r"nothing was changed.*lacks an entry"):
        ladder.run(PlayedQuery(ends=True))

    assert ladder.stage.started_in == []
    assert ladder.stream.catalog.recoveries.of_stream(STREAM) == []
    # What the message advises.
    entry.write_text(whole)
    assert ladder.run(PlayedQuery(ends=True)).end.kind is EndKind.ENDED_BY_ITSELF
    assert ladder.batches == (13, 13)
