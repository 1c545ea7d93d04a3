"""Orphaned part files are told apart from all that anything may still need, and only they are deleted."""

from __future__ import annotations

import io
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch
from urllib.parse import quote

import pytest

from dagster_ckpt.catalog.records import StartCause
from dagster_ckpt.catalog.tables import snapshots
from dagster_ckpt.client.outputs import SinkCleaning, clean_sinks, output_files
from dagster_ckpt.errors import SharedSinkError, SinkRollbackError
from dagster_ckpt.recovery.fork import fork
from dagster_ckpt.sinks.file_sink import FileSink
from dagster_ckpt.snapshot.manifest import SnapshotHeader
from dagster_ckpt.snapshot.reuse import SourceFile
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.liveness import this_holder
from dagster_ckpt.stream.start_from import StartFrom
from dagster_ckpt.values.modes import SnapshotKind
from tests.support.as_writer import as_writer
from tests.support.executioner import Killed
from tests.support.retention_shelf import STREAM, Shelf
from tests.support.rewind_history import LAST, History
from tests.support.verbs import trigger_savepoint

HOUR_MS = 3_600_000
# After every roll-back and file of the test.
LATER_MS = 4_000_000_000_000


class Output:
    """A file sink with one part file a batch, in a partitioned folder; rewound to batch 3."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.sink = history.sink
        self.parts: list[Path] = []
        log = self.sink / "_spark_metadata"
        # The query was started at this time.
        self.began_ms = history.shelf.stream.catalog.events.after(0)[-1].at_ms
        for batch in range(LAST + 1):
            part = self.sink / f"day={batch % 2}" / f"part-00000-{uuid.uuid4()}.c000.parquet"
            part.parent.mkdir(exist_ok=True)
            (self.sink / f"part-{batch}").unlink()
            part.write_bytes(b"x" * 10)
            (part.parent / f".{part.name}.crc").write_bytes(b"crc")
            self.written_at(part, batch)
            self.parts.append(part)
        for path in log.iterdir():
            path.write_text(path.read_text().replace(f"file://{self.sink.parent}/out%20put/part-", "@"))
            for batch, part in enumerate(self.parts):
                url = f"file://{part}".replace(" ", "%20").replace("=", "%3D")
                path.write_text(path.read_text().replace(f'"@{batch}"', json.dumps(url)))
        (self.sink / "notes.txt").write_text("not Spark's")

    def written_at(self, path: Path, ms: int) -> None:
        # As a float of seconds it could come back as the millisecond before.
        ns = (self.began_ms + ms) * 1_000_000
        os.utime(path, ns=(ns, ns))

    def clean(self, *, now_ms: int = LATER_MS, **how: object) -> SinkCleaning:
        """Clean up at a time by the storage's clock."""
        with patch("dagster_ckpt.sinks.file_sink.storage_time_ms", lambda _sink: now_ms):
            return clean_sinks(self.history.shelf.stream, **how)  # type: ignore[arg-type]

    def left(self) -> list[int]:
        return [batch for batch, part in enumerate(self.parts) if part.exists()]


@pytest.fixture
def output(tmp_path: Path) -> Iterator[Output]:
    history = History(tmp_path)
    yield Output(history)
    history.close()


def batches(output: Output, cleaning: SinkCleaning) -> list[int]:
    names = [part.name for part in output.parts]
    return sorted(names.index(orphan.file.name) for orphan in cleaning.orphans)


def test_without_a_rewind_there_are_no_orphans(output: Output) -> None:
    assert output.clean(dry_run=False, grace_ms=0).orphans == ()
    assert output.left() == list(range(LAST + 1))


def test_the_files_of_undone_batches_are_listed_and_nothing_is_deleted(output: Output) -> None:
    output.history.start("batch-3")

    cleaning = output.clean()

    assert batches(output, cleaning) == [4, 5, 6, 7, 8]
    assert (len(cleaning.removable), cleaning.bytes, cleaning.deleted) == (5, 50, False)
    (undone_by,) = {orphan.undone_by for orphan in cleaning.orphans}
    assert undone_by.startswith("the rewind that created live-2-")
    assert cleaning.orphans[0].age_ms == LATER_MS - (cleaning.orphans[0].file.modified_at_ms or 0)
    assert output.left() == list(range(LAST + 1))


@pytest.mark.parametrize(
    ("folder", "success"),
    [
        ("", "_SUCCESS"),
        ("day=1", "_SUCCESS"),
        ("day=1", "day=1/_SUCCESS"),
        ("audit/day=1", "audit/_SUCCESS"),
        ("", None),
    ],
)
def test_files_that_a_batch_job_has_appended_are_not_the_streams(
    output: Output, folder: str, success: str | None
) -> None:
    job = uuid.uuid4()
    theirs = [
        output.sink / folder / f"part-0000{number}-{job}-c000.snappy.parquet"
        for number in range(1 if success is not None else 2)
    ]
    for path in theirs:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"rows of others")
        output.written_at(path, 0)
    if success is not None:
        (output.sink / success).touch()

    cleaning = output.clean(dry_run=False, grace_ms=0)

    assert ([orphan.is_removable for orphan in cleaning.orphans], len(cleaning.orphans)) == (
        [False] * len(theirs),
        len(theirs),
    )
    assert all(path.exists() for path in theirs)
    assert "batch job" in str(cleaning.orphans[0].kept_because)


def test_asked_to_it_deletes_them_and_their_checksums_and_nothing_else(output: Output) -> None:
    output.history.start("batch-3")

    cleaning = output.clean(dry_run=False)

    assert cleaning.deleted
    assert output.left() == [0, 1, 2, 3]
    files = {path.name for path in output.sink.rglob("*") if path.is_file()}
    kept = {part.name for part in output.parts[:4]}
    assert {name for name in files if "part-" in name} == kept | {f".{name}.crc" for name in kept}
    assert "notes.txt" in files
    assert output.clean(dry_run=False).orphans == ()


def test_what_a_failed_attempt_left_is_told_apart_from_a_roll_back(output: Output) -> None:
    output.history.start("batch-3")
    left = output.sink / f"part-00001-{uuid.uuid4()}.c000.parquet"
    left.write_bytes(b"")
    os.utime(left, (LATER_MS // 1000 - 5, LATER_MS // 1000 - 5))

    orphan = next(each for each in output.clean().orphans if each.file.name == left.name)

    assert "a failed or interrupted task" in orphan.undone_by
    assert orphan.kept_because == "younger than the grace period of 86400 s"


def test_while_the_query_runs_what_is_not_older_than_its_newest_entry_is_kept(output: Output) -> None:
    output.history.start("batch-3")
    output.history.shelf.stream.catalog.leases.acquire(STREAM, this_holder("other", "run", None), 60_000)
    output.written_at(output.sink / "_spark_metadata/3.compact", 6)

    cleaning = output.clean(dry_run=False)

    assert output.left() == [0, 1, 2, 3, 6, 7, 8]
    kept = [orphan.kept_because for orphan in cleaning.orphans if not orphan.is_removable]
    assert kept == ["the running query may be writing it"] * 3


@pytest.mark.parametrize(("grace_ms", "left"), [(0, [0, 1, 2, 3]), (HOUR_MS, list(range(LAST + 1)))])
def test_the_grace_period_keeps_the_young(output: Output, grace_ms: int, left: list[int]) -> None:
    output.history.start("batch-3")

    output.clean(dry_run=False, grace_ms=grace_ms, now_ms=output.began_ms + 60_000)

    assert output.left() == left


def savepoint_naming(output: Output, stream: StreamHandle, batch: int) -> None:
    """A savepoint that carries the sink's log up to a batch."""
    savepoint = output.history.shelf.savepoint(f"at {batch}")
    assert savepoint.location is not None
    header = SnapshotHeader(
        snapshot_id=savepoint.snapshot_id,
        stream_id=STREAM,
        kind=SnapshotKind.SAVEPOINT,
        number=batch,
        created_at_ms=1,
        batch_id=batch,
        query_id="query",
    )
    data = "\n".join(["v1", *(json.dumps({"path": f"file://{part}"}) for part in output.parts[: batch + 1])]).encode()
    file = SourceFile(f"sinks/0/{batch}", len(data), None, lambda: io.BytesIO(data))
    stored = stream.store.write_savepoint(header, [file])
    with stream.catalog.database.writing() as connection:
        of_savepoint = snapshots.c.snapshot_id == savepoint.snapshot_id
        connection.execute(snapshots.update().where(of_savepoint).values(location=stored.location, batch_id=batch))


def test_what_a_snapshot_names_is_kept_for_a_start_from_there(output: Output) -> None:
    savepoint_naming(output, output.history.shelf.stream, 6)
    output.history.start("batch-3")

    cleaning = output.clean(dry_run=False)

    assert output.left() == [0, 1, 2, 3, 4, 5, 6]
    assert {orphan.kept_because for orphan in cleaning.orphans} == {
        "savepoint at 6 at batch 6 refers to it",
        None,
    }


def test_a_forked_output_keeps_its_own_files(output: Output) -> None:
    stream = output.history.shelf.stream
    forked = output.history.shelf.root / "forked"
    fork(
        stream,
        replace(stream, stream_id="scratch"),
        StartFrom("batch-5"),
        origin="a test",
        outputs={str(output.sink): str(forked)},
    )
    output.history.start("batch-3")

    output.clean(dry_run=False)

    assert output.left() == [0, 1, 2, 3]
    kept = {path.relative_to(forked) for path in forked.rglob("part-*")}
    assert kept == {part.relative_to(output.sink) for part in output.parts[:6]}


def test_a_folder_where_another_stream_of_the_catalog_writes_too_is_not_cleaned(output: Output) -> None:
    output.history.start("batch-3")
    other = replace(output.history.shelf.stream, stream_id="other", name="other", asset_key="other")
    other.register()
    holder = this_holder("its", "run", None)
    as_writer(other.catalog, "other").executions.start("its", run_id="run", cause=StartCause.MANUAL, holder=holder)
    as_writer(other.catalog, "other").executions.heartbeat("its", {"sinks": [f"FileSink[{output.sink}]"]})

    for dry_run in (True, False):
        with pytest.raises(SharedSinkError, match="another stream of this catalog"):
            output.clean(dry_run=dry_run, grace_ms=0)

    assert output.left() == list(range(LAST + 1))


def test_a_folder_where_another_query_began_a_log_is_not_cleaned(output: Output) -> None:
    trigger_savepoint(output.history.shelf.stream, origin="a test")
    log = output.sink / "_spark_metadata"
    for path in log.iterdir():
        path.unlink()
    for batch in range(LAST + 1):
        (log / str(batch)).write_text(
            f'v1\n{{"path":"file://{quote(str(output.sink))}/anothers-{batch}","action":"add"}}'
        )

    with pytest.raises(SharedSinkError, match="not this stream's"):
        output.clean(dry_run=False, grace_ms=0)

    assert output.left() == list(range(LAST + 1))


def test_while_a_roll_back_is_not_finished_nothing_is_cleaned(output: Output) -> None:
    for batch in (7, 8):
        for log in ("offsets", "commits"):
            (output.history.shelf.live / log / str(batch)).unlink()

    with pytest.raises(SharedSinkError, match="is not at the position"):
        output.clean(dry_run=False, grace_ms=0)

    assert output.left() == list(range(LAST + 1))


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        (["*"], "its log is missing"),
        (["8"], "its log lacks an entry"),
        (["0", "*.compact", "4", "5", "6", "8"], "its log lacks an entry"),
    ],
    ids=["no log", "a hole", "no beginning"],
)
def test_where_the_log_is_not_whole_nothing_is_told_and_nothing_deleted(
    output: Output, lost: list[str], words: str
) -> None:
    log = output.sink / "_spark_metadata"
    (log / "9").write_text((log / "8").read_text())
    for path in [path for pattern in lost for path in log.glob(pattern)]:
        path.unlink()
    if "0" in lost:
        (log / "9").unlink()
        for batch in range(3, LAST + 1):
            (output.history.shelf.live / f"commits/{batch}").unlink()

    with pytest.raises(SharedSinkError, match=words):
        output.clean(dry_run=False, grace_ms=0)

    assert output.left() == list(range(LAST + 1))


def test_known_defect_13_the_files_with_the_rows_of_the_stream_are_named_for_readers_of_every_kind(
    output: Output,
) -> None:
    """pandas, Polars and DuckDB read whole folders, with what a rewind has undone."""
    output.history.start("batch-3")
    assert len(list(output.sink.rglob("part-*.parquet"))) == LAST + 1

    assert output_files(output.history.shelf.stream) == sorted(str(part) for part in output.parts[:4])


@pytest.mark.parametrize(
    ("lost", "advice"),
    [
        (["8"], "rebuild-output orders"),
        (["6", "7.compact"], "rebuild-output orders"),
        (["*"], "rebuild-output orders"),
        ([], "relocate-output"),
    ],
)
def test_files_are_not_listed_from_a_log_that_is_incomplete_or_elsewheres(
    output: Output, lost: list[str], advice: str
) -> None:
    """A reader would lack rows, or read those of another folder."""
    log = output.sink / "_spark_metadata"
    for path in [path for pattern in lost for path in log.glob(pattern)]:
        path.unlink()
    for path in log.iterdir() if not lost else ():
        path.write_text(path.read_text().replace("out%20put", "elsewhere"))

    with pytest.raises(SinkRollbackError, match=f"are not listed.*{advice}"):
        output_files(output.history.shelf.stream)


def test_files_are_not_listed_while_the_sinks_have_to_follow(output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileSink, "roll_back", killed)
    with pytest.raises(Killed):
        output.history.start("batch-3")

    with pytest.raises(SinkRollbackError, match=r"the stream went back.*Start it first"):
        output_files(output.history.shelf.stream)

    monkeypatch.undo()
    output.history.start()
    assert len(output_files(output.history.shelf.stream)) == 4


def killed(*_: object) -> None:
    raise Killed


def test_a_stream_that_has_not_written_yet_has_no_files(tmp_path: Path) -> None:
    shelf = Shelf.at(tmp_path)
    shutil.rmtree(shelf.live / "commits")
    as_writer(shelf.stream.catalog, STREAM).executions.heartbeat("first", {"sinks": [f"FileSink[file:{tmp_path}/out]"]})

    assert output_files(shelf.stream) == []


@pytest.mark.parametrize(
    "mark",
    ["_spark_metadata/0", "_delta_log/00000000000000000000.json", "metadata/v1.metadata.json", ".hoodie/x"],
)
@pytest.mark.parametrize("folder", ["audit", "region=eu"])
def test_the_output_of_something_else_below_is_not_cleaned(output: Output, mark: str, folder: str) -> None:
    theirs = output.sink / folder / "day=1" / f"part-00000-{uuid.uuid4()}-c000.snappy.parquet"
    ours = output.sink / "day=1" / f"part-00000-{uuid.uuid4()}-c000.snappy.parquet"
    for path in (theirs, ours, output.sink / folder / mark):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("rows of another")
        output.written_at(path, 0)

    cleaned = clean_sinks(output.history.shelf.stream, dry_run=False, grace_ms=0)

    assert theirs.exists()
    assert not ours.exists()
    assert [each.file.name for each in cleaned.orphans] == [ours.name]
