"""Is this snapshot good, and which one to use: on snapshots of real queries, damaged in every way that matters."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import Holder, SnapshotRecord, StartCause
from dagster_ckpt.client.examination import examine_live_directory, locations_of, verify_snapshot
from dagster_ckpt.errors import DamagedCutError, NothingCommittedError, SnapshotNotFoundError
from dagster_ckpt.recovery.examination import layout_problems
from dagster_ckpt.spark.doctor.finding import Code
from dagster_ckpt.spark.query.query import start_query
from dagster_ckpt.spark.versions import Feature
from dagster_ckpt.stream.handle import StreamHandle
from tests.fuzz.snapshots import container
from tests.support import verbs
from tests.support.as_writer import as_writer
from tests.support.needs import OfEach, needs, runs_here
from tests.support.small_spark import lay_file, small_spark
from tests.support.state_bytes import lz4_blocks
from tests.support.streams import storage_at, stream_at

pytestmark = pytest.mark.spark

ROCKSDB = {
    "spark.sql.streaming.stateStore.providerClass": "org.apache.spark.sql.execution.streaming.state."
    "RocksDBStateStoreProvider"
}
CHANGELOG = {**ROCKSDB, "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true"}
FORMAT_V2 = {**CHANGELOG, "spark.sql.streaming.stateStore.checkpointFormatVersion": "2"}
JOIN_V3 = {**CHANGELOG, "spark.sql.streaming.join.stateFormatVersion": "3"}
KEYS, FILES, ROWS = 3, 3, 12


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with small_spark() as session:
        yield session


def counts(stream: DataFrame) -> DataFrame:
    return stream.groupBy("k").count()


def join(stream: DataFrame) -> DataFrame:
    return stream.alias("l").join(stream.alias("r"), F.expr("l.v = r.v AND l.at = r.at")).select("l.k", "r.v")


@dataclass
class Ward:
    """A stopped stream whose query has run, and a savepoint of it."""

    root: Path
    stream: StreamHandle
    newest: SnapshotRecord

    @property
    def live(self) -> Path:
        return self.root / "live" / self.stream.stream_id / "live-1-0"

    def savepoint(self, label: str) -> SnapshotRecord:
        return verbs.trigger_savepoint(self.stream, origin="a test", label=label)

    def objects(self, snapshot: SnapshotRecord) -> list[Path]:
        """Its data objects, the largest first."""
        folder = Path((snapshot.location or "").removeprefix("file://"))
        found = [path for path in folder.iterdir() if path.name != "_metadata"]
        return sorted(found, key=lambda path: path.stat().st_size, reverse=True)

    def metadata(self, snapshot: SnapshotRecord) -> Path:
        return Path((snapshot.location or "").removeprefix("file://")) / "_metadata"


def make_ward(
    spark: SparkSession, root: Path, build: Callable[[DataFrame], DataFrame], settings: dict[str, str], *, mode: str
) -> Ward:
    landing = root / "landing"
    landing.mkdir(parents=True)
    for number in range(FILES):
        rows = [{"at": "2024-01-01T00:00:00Z", "k": n % KEYS, "v": number * 100 + n} for n in range(ROWS)]
        lay_file(landing, number, rows)
    # So low that data lies in objects of their own, to be damaged.
    stream = stream_at(root, storage=storage_at(root, inline_bytes=16))
    stream.register()
    holder = Holder("first", "run", "host", 1, 1, "boot")
    as_writer(stream.catalog).executions.start("first", run_id="run", cause=StartCause.MANUAL, holder=holder)
    live = stream.live_directory(1, 0)
    as_writer(stream.catalog).streams.switch_live_directory(live.url)
    as_writer(stream.catalog).executions.running("first", live_directory=live.url, recovery={})
    session = spark.newSession()
    for name, value in settings.items():
        session.conf.set(name, value)
    reader = session.readStream.schema("at timestamp, k long, v long").option("maxFilesPerTrigger", 1)
    built = build(reader.json(str(landing)).withWatermark("at", "1 hour"))
    writer = built.writeStream.outputMode(mode).trigger(availableNow=True)
    query = start_query(writer.format("noop"), "orders", live)
    while not query.wait(0.5):
        pass
    assert query.exception() is None
    ward = Ward(root, stream, None)  # type: ignore[arg-type]
    ward.newest = ward.savepoint("whole")
    as_writer(stream.catalog).executions.heartbeat("first", {"batch_id": ward.newest.batch_id, "sinks": ["noop"]})
    return ward


WARDS: dict[str, tuple[Callable[[DataFrame], DataFrame], dict[str, str], str]] = {
    "heap": (counts, {}, "update"),
    "rocksdb": (counts, ROCKSDB, "update"),
    "changelog": (counts, CHANGELOG, "update"),
    "format-v2": (counts, FORMAT_V2, "update"),
    "join": (join, {}, "append"),
    "join-v3": (join, JOIN_V3, "append"),
}


@pytest.fixture(scope="module")
def wards(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Ward]]:
    root = tmp_path_factory.mktemp("wards")
    made: OfEach[Ward] = OfEach(
        (name, make_ward(spark, root / name, build, settings, mode=mode))
        for name, (build, settings, mode) in WARDS.items()
        if runs_here(name)
    )
    yield made
    for ward in made.values():
        ward.stream.catalog.close()


@pytest.mark.thorough(but=("heap", "rocksdb", "join-v3"))
@pytest.mark.core(thorough=True)
@needs(Feature.STATE_READER)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=needs(Feature.STATE_READER_FORMAT_2)) if name == "format-v2" else name for name in WARDS],
)
def test_a_good_snapshot_passes_and_its_state_is_read_with_spark(
    spark: SparkSession, wards: dict[str, Ward], name: str
) -> None:
    ward = wards[name]

    verified = verify_snapshot(ward.stream, ward.newest.location or "", spark=spark)

    assert verified.problems == ()
    assert verified.header is not None
    assert verified.header.batch_id == ward.newest.batch_id
    assert verified.state is not None
    rows = {(item.state, item.rows) for item in verified.state}
    expected = {("left", FILES * ROWS), ("right", FILES * ROWS)} if "join" in name else {("default", KEYS)}
    assert rows == expected
    # The copy is gone, and nothing else of the stream has changed.
    assert [path.name for path in ward.live.parent.iterdir()] == ["live-1-0"]


def test_the_record_of_a_verification_is_plain_data(wards: dict[str, Ward]) -> None:
    ward = wards["heap"]

    record = verify_snapshot(ward.stream, ward.newest.location or "", deep=False).as_record()

    assert json.loads(json.dumps(record)) == record
    assert (record["passed"], record["batch_id"], record["state"]) == (True, ward.newest.batch_id, None)


def put(path: Path, data: bytes) -> None:
    # Another file in its place: snapshots that have the object in common share its bytes by links.
    path.unlink()
    path.write_bytes(data)


def cut_off_the_last_byte(ward: Ward, snapshot: SnapshotRecord) -> None:
    path = ward.objects(snapshot)[0]
    put(path, path.read_bytes()[:-1])


def lose_an_object(ward: Ward, snapshot: SnapshotRecord) -> None:
    ward.objects(snapshot)[0].unlink()


def flip_a_byte(ward: Ward, snapshot: SnapshotRecord) -> None:
    path = ward.objects(snapshot)[0]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    put(path, bytes(data))


def cut_off_the_metadata(ward: Ward, snapshot: SnapshotRecord) -> None:
    path = ward.metadata(snapshot)
    put(path, path.read_bytes()[:-5])


def lose_the_metadata(ward: Ward, snapshot: SnapshotRecord) -> None:
    ward.metadata(snapshot).unlink()


def come_from_the_future(ward: Ward, snapshot: SnapshotRecord) -> None:
    path = ward.metadata(snapshot)
    with zipfile.ZipFile(path) as archive:
        members = [archive.read(name) for name in ("manifest.json", "files.jsonl.gz", "inline.bin")]
    put(path, container(members[0].replace(b'"format_version": 2', b'"format_version": 99'), *members[1:]))


@pytest.mark.parametrize(
    ("damage", "seen_without_reading", "what"),
    [
        (cut_off_the_last_byte, True, "bytes"),
        (lose_an_object, True, "missing"),
        (flip_a_byte, False, "altered"),
        (cut_off_the_metadata, True, "trusted"),
        (lose_the_metadata, True, "no snapshot"),
        (come_from_the_future, True, "version 99"),
    ],
)
def test_a_snapshot_that_was_damaged_does_not_pass(
    wards: dict[str, Ward], damage: Callable[[Ward, SnapshotRecord], None], seen_without_reading: bool, what: str
) -> None:
    ward = wards["rocksdb"]
    snapshot = ward.savepoint(damage.__name__)
    damage(ward, snapshot)

    quick = verify_snapshot(ward.stream, snapshot.location or "", deep=False)
    deep = verify_snapshot(ward.stream, snapshot.location or "", deep=True)

    assert quick.passed is not seen_without_reading
    assert not deep.passed
    assert what in deep.problems[0]


class Forgetful:
    """A store whose snapshot lacks a file that it should have: every byte that is listed is right."""

    def __init__(self, store: Any, forgotten: str) -> None:
        self._store = store
        self._forgotten = forgotten

    def manifest(self, location: str) -> Any:
        manifest = self._store.manifest(location)
        return SimpleNamespace(
            header=manifest.header, files=[entry for entry in manifest.files if entry.path != self._forgotten]
        )

    def extract(self, location: str, write: Any, *, only: Callable[[str], bool]) -> None:
        self._store.extract(location, write, only=lambda path: path != self._forgotten and only(path))

    def verify(self, location: str, *, deep: bool = True) -> list[str]:
        return list(self._store.verify(location, deep=deep))


@pytest.mark.thorough(but="rocksdb")
@pytest.mark.parametrize("name", WARDS)
def test_a_snapshot_without_any_one_of_its_files_does_not_pass(wards: dict[str, Ward], name: str) -> None:
    ward = wards[name]
    location = ward.newest.location or ""
    paths = [entry.path for entry in ward.stream.store.manifest(location).files]
    assert layout_problems(ward.stream.store, location) == []
    # Spark does without its own checksums, with a warning.
    for path in (path for path in paths if not path.endswith(".crc")):
        forgetful: Any = Forgetful(ward.stream.store, path)

        verified = verify_snapshot(replace(ward.stream, store=forgetful), location)

        assert not verified.passed, path
        # What is told missing may be another file: without a snapshot it is the changelogs before it.
        assert any(path.split("/")[0] in problem for problem in verified.problems), path


@needs(Feature.STATE_READER)
def test_a_snapshot_whose_state_spark_cannot_read_does_not_pass(spark: SparkSession, wards: dict[str, Ward]) -> None:
    ward = wards["heap"]
    delta = next(path for path in sorted((ward.live / "state/0/0").iterdir()) if path.name == "3.delta")
    whole = delta.read_bytes()
    try:
        delta.write_bytes(whole[:-25])
        with pytest.raises(DamagedCutError, match=r"3\.delta"):
            ward.savepoint("of damaged state")
        # Its checksums are right, but it announces a key of 127 bytes and ends.
        delta.write_bytes(lz4_blocks(b"\0\0\0\x7f"))
        snapshot = ward.savepoint("of senseless state")
    finally:
        delta.write_bytes(whole)

    assert verify_snapshot(ward.stream, snapshot.location or "").passed
    verified = verify_snapshot(ward.stream, snapshot.location or "", spark=spark)

    assert not verified.passed
    assert "Spark cannot read the state" in verified.problems[0]
    assert [path.name for path in ward.live.parent.iterdir()] == ["live-1-0"]


def test_snapshots_are_named_as_for_a_start(wards: dict[str, Ward]) -> None:
    ward = wards["join"]
    location = ward.newest.location or ""

    assert locations_of(ward.stream, "latest") == [location]
    assert locations_of(ward.stream, "all") == [location]
    assert locations_of(ward.stream, "whole") == [location]
    assert locations_of(ward.stream, f"{location}/_metadata") == [location]
    # Not in the catalog: it may have been moved there.
    assert locations_of(ward.stream, "/elsewhere/savepoint/_metadata") == ["/elsewhere/savepoint"]
    with pytest.raises(SnapshotNotFoundError, match="has no snapshot 'nobody'"):
        locations_of(ward.stream, "nobody")


def test_the_doctor_names_the_newest_snapshot_that_can_be_restored_and_its_price(wards: dict[str, Ward]) -> None:
    ward = wards["changelog"]
    damaged = ward.savepoint("later, and damaged")
    lose_an_object(ward, damaged)
    as_writer(ward.stream.catalog).executions.heartbeat(
        "first", {"batch_id": (ward.newest.batch_id or 0) + 4, "sinks": ["noop"]}
    )
    (ward.live / "metadata").rename(ward.live / "metadata.away")
    try:
        examination = examine_live_directory(ward.stream)
    finally:
        (ward.live / "metadata.away").rename(ward.live / "metadata")

    assert [item.code for item in examination.diagnosis.findings] == [Code.METADATA_MISSING]
    assert examination.choice.snapshot is not None
    assert examination.choice.snapshot.snapshot_id == ward.newest.snapshot_id
    assert examination.choice.replayed_batches == 4
    assert [item.snapshot.snapshot_id for item in examination.choice.skipped] == [damaged.snapshot_id]
    assert examination.messages[:2] == [
        "Spark cannot resume in the live directory as it is.",
        "No committed batch in it is intact.",
    ]
    assert json.loads(json.dumps(examination.as_record())) == examination.as_record()


def test_the_doctor_compares_the_query_with_that_of_the_streams_snapshots(wards: dict[str, Ward]) -> None:
    ward = wards["rocksdb"]
    metadata = ward.live / "metadata"
    checksum = ward.live / ".metadata.crc"
    whole, checked = metadata.read_text(), checksum.read_bytes()
    # As a process writes it that knows nothing of Hadoop's checksums.
    checksum.unlink()
    metadata.write_text('{"id":"another"}')
    try:
        examination = examine_live_directory(ward.stream)
    finally:
        metadata.write_text(whole)
        checksum.write_bytes(checked)

    assert [item.code for item in examination.diagnosis.findings] == [Code.QUERY_ID_DIFFERS]
    assert examine_live_directory(ward.stream).diagnosis.can_resume


def test_a_directory_can_be_given_that_is_not_the_streams_own(wards: dict[str, Ward], tmp_path: Path) -> None:
    examination = examine_live_directory(wards["heap"].stream, url=str(tmp_path / "lost"))

    assert [item.code for item in examination.diagnosis.findings] == [Code.DIRECTORY_MISSING]
    assert examination.choice.snapshot is not None


def test_a_stream_without_a_live_directory_is_refused(wards: dict[str, Ward], tmp_path: Path) -> None:
    stream = replace(wards["heap"].stream, catalog=Catalog(f"sqlite:///{tmp_path / 'catalog.db'}"))
    stream.register()
    try:
        with pytest.raises(NothingCommittedError, match="no live directory"):
            examine_live_directory(stream)
    finally:
        stream.catalog.close()
