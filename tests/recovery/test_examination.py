"""When a start reads the state that its query will load, and what it finds in directories of every version of Spark."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from blake3 import blake3

from dagster_ckpt.catalog.records import ExecutionStatus
from dagster_ckpt.recovery.examination import Examiner
from dagster_ckpt.recovery.facts import recovery_facts
from dagster_ckpt.recovery.plan import RecoveryFacts, RecoveryKind
from dagster_ckpt.recovery.planning import plan_recovery
from dagster_ckpt.recovery.recovery_points import NOT_LOADABLE, live_point
from dagster_ckpt.snapshot.entries import FileEntry
from dagster_ckpt.spark.checkpoint_dir.cut import cut
from dagster_ckpt.spark.checkpoint_dir.inspect import LiveStatus
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.doctor.contents import KnownSnapshot
from dagster_ckpt.spark.doctor.diagnosis import diagnose
from dagster_ckpt.spark.versions import RELEASES
from dagster_ckpt.stream.start_from import StartFrom
from tests.golden.live_directories import unpacked
from tests.support.as_writer import keeping
from tests.support.golden_stream import STREAM, GoldenStream, alter, as_zeros, with_a_flipped_bit


@pytest.fixture
def golden(tmp_path: Path) -> Iterator[GoldenStream]:
    golden = GoldenStream(tmp_path / "stream").make()
    golden.snapshot()
    yield golden
    golden.close()


def facts(golden: GoldenStream, examiner: Examiner | None = None) -> RecoveryFacts:
    return recovery_facts(golden.stream, StartFrom(), predecessor_ended=True, examiner=examiner)


def status(golden: GoldenStream, examiner: Examiner | None = None) -> LiveStatus | None:
    found = facts(golden, examiner or Examiner(golden.stream)).live
    return found.status if found is not None else None


def rot(golden: GoldenStream) -> None:
    assert alter(golden.live.glob("state/0/*/*.zip"), with_a_flipped_bit)


def note_damage(golden: GoldenStream, point: str, error: str) -> None:
    catalog = golden.stream.catalog
    with keeping(catalog, STREAM) as lease:
        catalog.recoveries.failed(lease.record, "first", point, error=error, detail="x", batch_id=4)


@pytest.mark.parametrize("end", [ExecutionStatus.FAILED, None], ids=["failed", "no end recorded"])
def test_after_an_end_without_order_a_start_reads_the_state(golden: GoldenStream, end: ExecutionStatus | None) -> None:
    if end is not None:
        golden.end(end)
    assert status(golden) is LiveStatus.GOOD

    rot(golden)

    assert status(golden) is LiveStatus.BROKEN
    plan = plan_recovery(facts(golden, Examiner(golden.stream)))
    assert (plan.kind, plan.from_batch, plan.to_batch) == (RecoveryKind.RESTORE, 4, 4)


def test_after_an_orderly_end_it_reads_the_logs_only(golden: GoldenStream) -> None:
    golden.end()
    rot(golden)
    assert status(golden) is LiveStatus.GOOD

    alter([golden.live / "offsets/4"], lambda data: data.replace(b'"logOffset":4', b'"logOffset":3'))

    assert status(golden) is LiveStatus.BROKEN


def test_damage_on_record_makes_it_read_the_state_again_and_a_repaired_one_is_used(golden: GoldenStream) -> None:
    golden.end()
    point = live_point(golden.live_url)
    note_damage(golden, point, "SNAPSHOT_UNREADABLE")
    assert status(golden) is LiveStatus.GOOD
    assert plan_recovery(facts(golden, Examiner(golden.stream))).kind is RecoveryKind.RESUME

    rot(golden)

    assert status(golden) is LiveStatus.BROKEN


def test_what_only_spark_has_seen_counts_for_the_version_of_the_code_that_saw_it(golden: GoldenStream) -> None:
    golden.end()
    point = live_point(golden.live_url)
    note_damage(golden, point, NOT_LOADABLE)
    assert plan_recovery(facts(golden)).kind is RecoveryKind.RESTORE

    golden.stream = replace(golden.stream, code_version="the next")

    assert plan_recovery(facts(golden)).kind is RecoveryKind.RESUME


def test_what_was_read_after_a_failure_is_not_read_again_by_the_start_that_follows(golden: GoldenStream) -> None:
    golden.end(ExecutionStatus.FAILED)
    examiner = Examiner(golden.stream)
    assert examiner.damage_of_live(LiveDirectory(golden.live_url)) is None
    rot(golden)

    # Only once: the restart after that reads all of it.
    assert [status(golden, examiner) for _ in range(2)] == [LiveStatus.GOOD, LiveStatus.BROKEN]


def test_a_snapshot_is_not_blamed_for_what_its_directory_became(golden: GoldenStream) -> None:
    alter(golden.live.glob("state/0/*/*.changelog"), with_a_flipped_bit)
    examiner = Examiner(golden.stream)
    (snapshot,) = golden.stream.catalog.snapshots.restorable(STREAM)

    assert examiner.damage_of_live(LiveDirectory(golden.live_url)) is not None
    assert examiner.damage_of_snapshot(snapshot) is None


MUTATIONS: dict[str, Callable[[bytes], bytes | None]] = {
    "flipped": with_a_flipped_bit,
    "cut": lambda data: data[: len(data) // 2],
    "zeroed": as_zeros,
    "dropped": lambda _data: None,
}
# One file of each kind in each directory.
KINDS = ("metadata", "offsets", "commits", "sources", "_metadata", "schema", ".delta", ".zip", ".changelog", ".sst")


@pytest.fixture(scope="module")
def archives() -> Iterator[dict[str, Path]]:
    with ExitStack() as stack:
        yield {release.minor: stack.enter_context(unpacked(release.minor)) for release in RELEASES}


@pytest.mark.thorough(but=("3.5-pairs-heap", "4.1-*"))
@pytest.mark.parametrize("name", ["pairs-heap", "windows-rocksdb"])
@pytest.mark.parametrize("minor", [release.minor for release in RELEASES])
def test_every_mutation_of_a_file_that_a_resume_needs_is_found_and_nothing_else(
    archives: dict[str, Path], tmp_path: Path, minor: str, name: str
) -> None:
    healthy = LiveDirectory(str(archives[minor] / name))
    needed = cut(healthy, carry_in_flight=True).needed
    read = {file.source: file.read() for file in needed}
    entries = [
        FileEntry(blake3(read[each.source]).hexdigest(), each.source, each.size, each.identity, each.token, None, 0)
        for each in needed
    ]
    snapshot = KnownSnapshot("file:///snapshots/chk-2", cut(healthy, carry_in_flight=True).batch_id, entries)
    assert diagnose(healthy, snapshot=snapshot).findings == ()
    random, tried = Random(minor + name), 0
    for kind in KINDS:
        of_kind = sorted(path for path in read if (path.startswith(kind) or path.endswith(kind) or f"/{kind}/" in path))
        if not of_kind:
            continue
        path = random.choice([path for path in of_kind if read[path]] or of_kind)
        for how, mutate in MUTATIONS.items():
            if (kind, how) == ("commits", "dropped"):
                # As if the query had been killed before it committed the batch, which it runs again.
                continue
            if how == "flipped" and minor == "3.5" and path.endswith("/schema"):
                # Only Hadoop's checksum beside it could tell: a start may have widened it.
                continue
            live = tmp_path / f"{kind}-{how}"
            shutil.copytree(healthy.url, live)
            data = mutate(read[path])
            (live / path).unlink()
            if data is not None:
                (live / path).write_bytes(data)
            found = diagnose(LiveDirectory(str(live)), snapshot=snapshot, looks_back=False)
            assert not found.can_resume, (path, how, found.findings)
            tried += 1
    assert tried > 4 * 5
