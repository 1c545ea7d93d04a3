"""A recovery goes back from point to point by itself, as long as there is a good one, and comes to an end."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from dagster_ckpt.catalog.records import EventType, ExecutionStatus, RequestStatus, SnapshotRecord, StartCause
from dagster_ckpt.client.examination import SnapshotVerification, record_verification
from dagster_ckpt.client.preflight import start_preview
from dagster_ckpt.errors import RecoveryExhaustedError, SnapshotCorruptError
from dagster_ckpt.orchestration.jobs.inspection_jobs import started_from
from dagster_ckpt.policies.restart import RestartStrategies
from dagster_ckpt.recovery.plan import RecoveryKind
from dagster_ckpt.runtime.execution import execute_stream
from dagster_ckpt.runtime.run_request import EndKind, RunRequest
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.stream.start_from import StartFrom
from dagster_ckpt.values.durations import rounded_duration
from dagster_ckpt.values.modes import SnapshotKind
from tests.support.as_writer import as_writer
from tests.support.played_query import PlayedQuery
from tests.support.recovery_ladder import Ladder
from tests.support.retention_shelf import STREAM
from tests.support.verbs import request_start

CANNOT_LOAD = (
    "org.apache.spark.SparkException: [CANNOT_LOAD_STATE_STORE.UNCATEGORIZED] An error occurred during loading state.\n"
    "Caused by: java.util.zip.ZipException: invalid entry size (expected 7597 but got 7588 bytes)"
)


@pytest.fixture
def ladder(tmp_path: Path) -> Iterator[Ladder]:
    ladder = Ladder(tmp_path)
    yield ladder
    ladder.close()


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(bytes(content))


def folder(snapshot: SnapshotRecord) -> Path:
    return Path((snapshot.location or "").removeprefix("file://"))


def rots(ladder: Ladder) -> PlayedQuery:
    """A query that fails because its directory, which was good when it was started, is not any more."""

    def rot() -> None:
        log = Path(ladder.stage.started_in[-1].removeprefix("file://")) / "sources/0"
        entry = log / "12"
        entry.write_text(entry.read_text().replace("/in/1", "/in/7"))

    return PlayedQuery(ends=True, error=CANNOT_LOAD, before=rot)


def spoil_metadata(snapshot: SnapshotRecord) -> None:
    flip(folder(snapshot) / "_metadata")


def spoil_data(snapshot: SnapshotRecord) -> None:
    for path in folder(snapshot).rglob("*"):
        if path.is_file() and path.name != "_metadata":
            path.unlink()
            return
    spoil_metadata(snapshot)


def spoil_all(snapshot: SnapshotRecord) -> None:
    shutil.rmtree(folder(snapshot))


SPOIL = (spoil_metadata, spoil_data, spoil_all)


def test_known_defect_6_a_damaged_newest_snapshot_gives_way_to_the_one_before_in_the_same_run(ladder: Ladder) -> None:
    ladder.lose_live_directory()
    spoil_metadata(ladder.snapshots[0])

    outcome = ladder.run(PlayedQuery(ends=True))

    assert outcome.end.kind is EndKind.ENDED_BY_ITSELF
    assert ladder.batches == (10, 10)
    assert len(ladder.stage.ends()) == 2
    recovery = ladder.stream.catalog.executions.get(outcome.execution_id).recovery
    assert recovery is not None
    assert (recovery["kind"], recovery["to_batch"]) == (RecoveryKind.RESTORE.value, 10)
    assert [point["name"] for point in recovery["passed"]] == ["savepoint at 12 at batch 12"]


def test_a_start_that_is_asked_for_passes_over_a_damaged_snapshot_as_the_start_itself_does(ladder: Ladder) -> None:
    """`restart_stream_job` with `latest` refused, with the error of the damaged snapshot, what a plain run recovers."""
    flip(Path(str(ladder.snapshots[0].location).removeprefix("file://")) / "_metadata")
    ladder.lose_live_directory()

    assert start_preview(ladder.stream, StartFrom()).plan.to_batch == 10
    assert request_start(ladder.stream, StartFrom(), origin="a test").status is RequestStatus.PENDING
    with pytest.raises(SnapshotCorruptError):
        start_preview(ladder.stream, StartFrom("at 12"))


def test_known_defect_5_a_damaged_live_directory_gives_way_to_the_newest_snapshot(ladder: Ladder) -> None:
    outcome = ladder.run(rots(ladder), PlayedQuery(ends=True))

    assert outcome.end.kind is EndKind.ENDED_BY_ITSELF
    assert ladder.stage.started_in[0] == ladder.first.url
    assert ladder.batches == (12, 12)
    recovery = ladder.stream.catalog.executions.get(outcome.execution_id).recovery
    assert recovery is not None
    assert recovery["rewound_batches"] == 1
    assert f"the live directory is broken: {ladder.first.url}/sources/0/12 (CONTENT_DIFFERS)" in recovery["reason"]


def test_each_step_is_recorded_with_its_cost_in_batches_and_time(ladder: Ladder) -> None:
    def rot_everything() -> None:
        rots(ladder).before()
        spoil_data(ladder.snapshots[0])

    bad = PlayedQuery(ends=True, error=CANNOT_LOAD, before=rot_everything)
    outcome = ladder.run(bad, PlayedQuery(ends=True))

    execution = ladder.stream.catalog.executions.get(outcome.execution_id)
    recovery = execution.recovery or {}
    assert (recovery["to_batch"], recovery["rewound_batches"]) == (10, 3)
    (newest,) = recovery["passed"]
    assert newest["name"] == "savepoint at 12 at batch 12"
    assert newest["rewound_batches"] == 1
    assert 0 <= newest["rewound_ms"] <= recovery["rewound_ms"]
    assert f"3 batches, at most {rounded_duration(recovery['rewound_ms'])}" in started_from(execution)
    assert any("3 committed batches are processed again" in each and "unknown" not in each.rpartition("time")[2]
               for each in ladder.stage.reports)  # fmt: skip
    events = ladder.stream.catalog.events.after(0)
    (failed,) = [
        each.payload for each in events if each.payload.get("point") == f"snapshot:{ladder.snapshots[0].snapshot_id}"
    ]
    assert (failed["rewound_batches"], failed["rewound_ms"]) == (1, newest["rewound_ms"])
    running = [each.payload for each in events if each.type is EventType.EXECUTION_RUNNING][-1]
    assert (running["rewound_batches"], running["rewound_ms"]) == (3, recovery["rewound_ms"])


def test_a_directory_in_which_a_query_cannot_be_started_gives_way_in_the_same_start(ladder: Ladder) -> None:
    def rots_and_raises() -> None:
        rots(ladder).before()
        raise RuntimeError("JsonEOFException: Unexpected end-of-input")

    outcome = ladder.run(PlayedQuery(before=rots_and_raises), PlayedQuery(ends=True))

    assert outcome.end.kind is EndKind.ENDED_BY_ITSELF
    assert ladder.batches == (12, 12)
    assert len(ladder.stage.ends()) == 2


def test_what_is_restored_is_kept_when_a_query_fails_in_it(ladder: Ladder) -> None:
    ladder.lose_live_directory()
    bad = [PlayedQuery(ends=True, error=CANNOT_LOAD) for _ in range(4)]

    outcome = ladder.run(*bad, PlayedQuery(ends=True))

    assert outcome.end.kind is EndKind.ENDED_BY_ITSELF
    assert ladder.batches == (12, 12)
    assert len(set(ladder.stage.started_in)) == 1
    assert ladder.stream.catalog.recoveries.of_stream(STREAM) == []


def test_a_good_snapshot_is_restored_again_if_what_was_made_of_it_rots(ladder: Ladder) -> None:
    ladder.lose_live_directory()

    outcome = ladder.run(rots(ladder), rots(ladder), PlayedQuery(ends=True))

    assert outcome.end.kind is EndKind.ENDED_BY_ITSELF
    assert ladder.batches == (12, 12)
    assert len(set(ladder.stage.started_in)) == 3


def test_the_memory_is_that_of_the_catalog_and_ends_with_the_next_checkpoint(ladder: Ladder) -> None:
    stream = replace(ladder.stream, restart=RestartStrategies.no_restart())
    ladder.stage.stream = stream
    assert ladder.run(rots(ladder)).end.kind is EndKind.FAILED
    assert [each.point for each in stream.catalog.recoveries.of_stream(STREAM)] == [f"live:{ladder.first.url}"]

    # Another process.
    assert ladder.run(PlayedQuery(ends=True)).end.kind is EndKind.ENDED_BY_ITSELF
    assert ladder.batches == (12, 12)

    writer = as_writer(stream.catalog, STREAM)
    latest = stream.catalog.executions.latest(STREAM)
    assert latest is not None
    writer.snapshots.start(
        snapshot_id="new", execution_id=latest.execution_id, kind=SnapshotKind.CHECKPOINT, number=99,
        trigger=ladder.snapshots[0].trigger, timeline=stream.catalog.streams.get(STREAM).timeline,
    )  # fmt: skip
    writer.complete("new", batch_id=13)
    assert stream.catalog.recoveries.of_stream(STREAM) == []


def test_a_snapshot_that_a_person_names_is_not_replaced_by_another(ladder: Ladder) -> None:
    spoil_metadata(ladder.snapshots[0])

    with pytest.raises(SnapshotCorruptError):
        ladder.run(start_from=StartFrom("at 12"), cause=StartCause.MANUAL)

    assert ladder.batches == (13, 13)
    assert ladder.count_events(EventType.TERMINALLY_FAILED) == 0


def test_a_snapshot_known_to_be_broken_is_skipped(ladder: Ladder) -> None:
    ladder.lose_live_directory()
    record_verification(
        ladder.stream, SnapshotVerification(ladder.snapshots[0].location or "", None, True, ("truncated",))
    )

    ladder.run(PlayedQuery(ends=True))

    assert ladder.batches == (10, 10)


@pytest.mark.parametrize("cause", [StartCause.RESTART_NEW_RUN, StartCause.MANUAL])
def test_where_no_point_is_good_it_fails_for_good_with_one_alert(ladder: Ladder, cause: StartCause) -> None:
    ladder.lose_live_directory()
    for snapshot, spoil in zip(ladder.snapshots, SPOIL, strict=True):
        spoil(snapshot)

    with pytest.raises(RecoveryExhaustedError, match="cannot be recovered automatically") as refused:
        ladder.run(cause=cause)

    assert all(f"savepoint at {batch}" in str(refused.value) for batch in (12, 10, 8))
    assert ladder.last() == (ExecutionStatus.FAILED, True)
    assert ladder.count_events(EventType.TERMINALLY_FAILED) == 1
    assert ladder.stage.started_in == []
    # Nothing is left for the supervisor to restart.
    assert STREAM not in ladder.stream.catalog.executions.unsettled_runs()


def starts_until_exhausted(ladder: Ladder) -> int:
    """Start it as its cluster does, process after process, with code that fails; how many starts were not refused."""
    for start in range(12):
        try:
            ladder.run(PlayedQuery(ends=True, error=CANNOT_LOAD))
        except RecoveryExhaustedError:
            return start
    return 12


def test_a_driver_that_its_cluster_starts_again_and_again_uses_no_point_up(ladder: Ladder) -> None:
    ladder.stage.stream = replace(ladder.stream, restart=RestartStrategies.no_restart())

    assert starts_until_exhausted(ladder) == 12
    ladder.stage.started_in.clear()
    ladder.run(PlayedQuery(ends=True))

    assert ladder.stage.started_in == [ladder.first.url]
    assert ladder.batches == (13, 13)


def test_where_no_point_is_good_it_tells_once_however_often_its_cluster_starts_it(ladder: Ladder) -> None:
    ladder.stage.stream = replace(ladder.stream, restart=RestartStrategies.no_restart())
    for snapshot in ladder.snapshots:
        spoil_metadata(snapshot)

    (Path(ladder.first.url.removeprefix("file://")) / "commits/13").write_text("")
    assert [starts_until_exhausted(ladder) for _ in range(4)] == [0, 0, 0, 0]
    assert ladder.count_events(EventType.TERMINALLY_FAILED) == 1

    # A person begins with all of them, and is told as well.
    with pytest.raises(RecoveryExhaustedError):
        ladder.run(cause=StartCause.MANUAL)
    assert ladder.count_events(EventType.TERMINALLY_FAILED) == 2


def test_a_person_who_has_repaired_it_starts_it_again(ladder: Ladder) -> None:
    ladder.lose_live_directory()
    kept = folder(ladder.snapshots[0]).with_name("kept")
    shutil.copytree(folder(ladder.snapshots[0]), kept)
    for snapshot in ladder.snapshots:
        spoil_metadata(snapshot)
    with pytest.raises(RecoveryExhaustedError):
        ladder.run()
    shutil.rmtree(folder(ladder.snapshots[0]))
    kept.rename(folder(ladder.snapshots[0]))

    assert ladder.run(PlayedQuery(ends=True), cause=StartCause.MANUAL).end.kind is EndKind.ENDED_BY_ITSELF
    assert ladder.batches == (12, 12)


class Failing:
    """Spark: it fails in the first live directory a few times, which may then be damaged or not."""

    def __init__(self, ladder: Ladder, how: str) -> None:
        self._first = Path(ladder.first.url.removeprefix("file://"))
        self._times = {"rots": 1, "fails": 3}.get(how, 0)
        self._rots = how == "rots"

    def __call__(self, live: LiveDirectory) -> Any:
        path = Path(live.url.removeprefix("file://"))
        path.mkdir(parents=True, exist_ok=True)
        if path != self._first or not self._times:
            return PlayedQuery(ends=True)
        self._times -= 1
        if self._rots:
            (path / "commits/13").write_text("")
        return PlayedQuery(ends=True, error=CANNOT_LOAD)


@pytest.mark.thorough(but="[0-4]")
@pytest.mark.parametrize("seed", range(20))
def test_damaged_at_random_it_comes_back_to_the_newest_good_point_or_ends_with_one_alert(
    ladder: Ladder, seed: int
) -> None:
    random = Random(seed)
    live = random.choice(["whole", "fails", "lost", "emptied", "broken", "rots"])
    good = {12, 10, 8} | ({13} if live in ("whole", "fails") else set())
    path = Path(ladder.first.url.removeprefix("file://"))
    if live in ("lost", "emptied"):
        shutil.rmtree(path)
    if live == "emptied":
        path.mkdir()
    if live == "broken":
        shutil.rmtree(path / "commits")
    for snapshot in ladder.snapshots:
        if random.random() < 0.6:
            random.choice(SPOIL)(snapshot)
            good.discard(snapshot.batch_id or 0)

    request = RunRequest("run", Failing(ladder, live), cause=StartCause.RESTART_NEW_RUN)
    if good:
        assert execute_stream(ladder.stream, request).end.kind is EndKind.ENDED_BY_ITSELF
        assert ladder.batches == (max(good), max(good))
        assert ladder.count_events(EventType.TERMINALLY_FAILED) == 0
        return
    with pytest.raises(RecoveryExhaustedError):
        execute_stream(ladder.stream, request)
    assert ladder.last() == (ExecutionStatus.FAILED, True)
    assert ladder.count_events(EventType.TERMINALLY_FAILED) == 1
