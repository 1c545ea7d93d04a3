"""The doctor on damaged copies of real live directories: each kind of damage is recognised, named and weighed."""

from __future__ import annotations

import json
import re
import shutil
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import fsspec
import pytest
from doctor_patients import Patient, run_all, write_batches
from live_files import changelog, snapshot_zip
from pyspark.sql import SparkSession
from small_spark import small_spark
from spark_scenarios import HEAP, ROCKSDB_V2, Workload, aggregation, run_to_the_end

from dagster_ckpt.options.state_backend import StateBackend
from dagster_ckpt.spark import LiveDirectory, clone, cut, roll_back_to_own_past, start_query
from dagster_ckpt.spark.doctor import ADVICE, Code, Diagnosis, Severity, diagnose
from dagster_ckpt.spark.doctor.crc32c import crc32c

pytestmark = pytest.mark.spark

Patients = dict[str, tuple[Workload, Patient]]


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    """Spark that keeps every batch, and leaves the state to the batches themselves."""
    settings = {
        "spark.sql.streaming.stateStore.maintenanceInterval": "200ms",
        "spark.sql.streaming.stateStore.minDeltasForSnapshot": "1000",
        "spark.sql.streaming.fileSource.log.compactInterval": "4",
        "spark.sql.streaming.fileSink.log.compactInterval": "4",
    }
    with small_spark(settings) as session:
        yield session


@pytest.fixture(scope="module")
def patients(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Patients:
    return run_all(spark, tmp_path_factory.mktemp("patients"))


@pytest.mark.parametrize("query", ["stateless", "heap", "rocksdb", "changelog", "format-v2", "join", "join-v3"])
def test_a_healthy_stopped_directory_has_no_finding_above_a_note(patients: Patients, query: str) -> None:
    _, patient = patients[query]

    diagnosis = diagnose(patient.live, sinks=patient.sinks)

    assert [item for item in diagnosis.findings if item.severity is not Severity.NOTE] == []
    assert (diagnosis.batch_id, diagnosis.good_back_to) == (patient.newest, patient.newest)
    assert diagnosis.can_resume


@dataclass(frozen=True)
class Case:
    """A damage, and what the doctor must say of it. Good back to: batches before the newest one, None: nowhere."""

    query: str
    damage: Callable[[Patient], object]
    code: Code
    path: str
    severity: Severity = Severity.ERROR
    back: int | None = 0


STATE = "state/0/1"
NOTE, WARNING = Severity.NOTE, Severity.WARNING
CASES = {
    "metadata is missing": Case("heap", lambda p: p.remove("metadata"), Code.METADATA_MISSING, "metadata", back=None),
    "metadata is empty": Case(
        "heap", lambda p: p.write("metadata", b""), Code.METADATA_UNREADABLE, "metadata", back=None
    ),
    "another query's id": Case("heap", lambda p: p.set_query_id("another"), Code.QUERY_ID_DIFFERS, "metadata"),
    "a gap in offsets": Case("heap", lambda p: p.remove("offsets/2"), Code.OFFSETS_GAP, "offsets/2", WARNING),
    "a gap in commits": Case("heap", lambda p: p.remove("commits/2"), Code.COMMITS_GAP, "commits/2", WARNING),
    "an empty old offset": Case(
        "heap", lambda p: p.write("offsets/1", b""), Code.OFFSET_UNREADABLE, "offsets/1", WARNING
    ),
    "an empty offset": Case(
        "heap", lambda p: p.write("offsets/{N}", b""), Code.OFFSET_UNREADABLE, "offsets/{N}", back=2
    ),
    "a truncated offset": Case(
        "heap", lambda p: p.truncate("offsets/{N}"), Code.OFFSET_UNREADABLE, "offsets/{N}", back=2
    ),
    "an empty planned offset": Case(
        "heap",
        lambda p: (p.root / "offsets" / str(p.newest + 1)).write_bytes(b""),
        Code.OFFSET_UNREADABLE,
        r"offsets/{V}",
    ),
    "an empty commit": Case(
        "heap", lambda p: p.write("commits/{N}", b""), Code.COMMIT_UNREADABLE, "commits/{N}", back=1
    ),
    "a truncated commit": Case(
        "rocksdb", lambda p: p.truncate("commits/{N}", 0.7), Code.COMMIT_UNREADABLE, "commits/{N}", back=1
    ),
    "a commit without its offset": Case(
        "heap", lambda p: p.remove("offsets/{N}"), Code.COMMIT_WITHOUT_OFFSET, "offsets/{N}", back=1
    ),
    "the offset before is missing": Case(
        "heap", lambda p: p.remove("offsets/{N1}"), Code.PREVIOUS_OFFSET_MISSING, "offsets/{N1}", back=2
    ),
    "offsets two ahead, with state": Case(
        "rocksdb", lambda p: (p.remove("commits/{N}"), p.remove("commits/{N}")), Code.OFFSETS_AHEAD, r"offsets/\d+"
    ),
    "offsets two ahead, without state": Case(
        "stateless",
        lambda p: p.copy_entry("offsets", p.newest, p.newest + 2),
        Code.OFFSETS_AHEAD,
        r"offsets/\d+",
        WARNING,
    ),
    "all commits are gone": Case(
        "heap", lambda p: shutil.rmtree(p.root / "commits"), Code.COMMIT_LOG_LOST, "commits", back=None
    ),
    "both logs are gone": Case(
        "heap",
        lambda p: (shutil.rmtree(p.root / "commits"), shutil.rmtree(p.root / "offsets")),
        Code.STATE_WITHOUT_BATCHES,
        "state/.*",
        back=None,
    ),
    "an unfinished repartition": Case(
        "rocksdb",
        lambda p: p.copy_entry(
            "offsets", p.newest, p.newest + 1, replace=('shuffle.partitions":"2"', 'shuffle.partitions":"3"')
        ),
        Code.REPARTITION_UNFINISHED,
        "offsets/{V}",
    ),
    "a newer offset log": Case(
        "heap",
        lambda p: p.write("offsets/{N}", b"v9\n{}\n"),
        Code.UNKNOWN_VERSION,
        "offsets/{N}",
        back=2,
    ),
    "a newer commit log": Case(
        "heap", lambda p: p.write("commits/{N}", b"v4\n{}"), Code.UNKNOWN_VERSION, "commits/{N}", back=1
    ),
    "a newer changelog": Case(
        "format-v2",
        lambda p: p.write(STATE + "/{V}_*.changelog", changelog({}, version="v9")),
        Code.UNKNOWN_VERSION,
        STATE + "/{V}_.*changelog",
        back=1,
    ),
    "newer operator metadata": Case(
        "heap",
        lambda p: p.write("state/0/_metadata/metadata", b"v3\n{}"),
        Code.UNKNOWN_VERSION,
        "state/0/_metadata/metadata",
        back=None,
    ),
    "a newer source log": Case(
        "heap", lambda p: p.write("sources/0/3.compact", b"v2\n{}"), Code.UNKNOWN_VERSION, "sources/0/3.compact", back=5
    ),
    "a source entry is missing": Case(
        "heap", lambda p: p.remove("sources/0/5"), Code.SOURCE_LOG_MISSING, "sources/0/5", back=3
    ),
    "a compact source entry is missing": Case(
        "stateless", lambda p: p.remove("sources/0/3.compact"), Code.SOURCE_LOG_MISSING, "sources/0/3", back=4
    ),
    "a truncated source entry": Case(
        "heap", lambda p: p.truncate("sources/0/3.compact"), Code.SOURCE_LOG_UNREADABLE, "sources/0/3.compact", back=5
    ),
    "an empty source entry": Case(
        "stateless", lambda p: p.write("sources/0/5", b""), Code.SOURCE_LOG_UNREADABLE, "sources/0/5", back=2
    ),
    "operator metadata is missing": Case(
        "rocksdb",
        lambda p: p.remove("state/0/_metadata/metadata"),
        Code.OPERATOR_METADATA_MISSING,
        "state/0/_metadata/metadata",
        back=None,
    ),
    "operator metadata is cut off": Case(
        "rocksdb",
        lambda p: p.truncate("state/0/_metadata/metadata"),
        Code.OPERATOR_METADATA_UNREADABLE,
        "state/0/_metadata/metadata",
        back=None,
    ),
    "a schema is missing": Case(
        "heap",
        lambda p: p.remove("state/0/0/_metadata/schema"),
        Code.SCHEMA_MISSING,
        "state/0/0/_metadata/schema",
        back=None,
    ),
    "a schema of format 3 is missing": Case(
        "join-v3",
        lambda p: p.remove("state/0/_stateSchema/*/*"),
        Code.SCHEMA_MISSING,
        "state/0/_stateSchema/.*",
        back=None,
    ),
    "a schema is damaged": Case(
        "heap",
        lambda p: p.write("state/0/0/_metadata/schema", b"\0"),
        Code.SCHEMA_UNREADABLE,
        "state/0/0/_metadata/schema",
        back=None,
    ),
    "a copied directory names schemas elsewhere": Case(
        "join-v3", lambda p: None, Code.SCHEMA_PATH_ELSEWHERE, r"state/0/_metadata/v2/\d+"
    ),
    "a delta is missing": Case(
        "heap", lambda p: p.remove(STATE + "/{V}.delta"), Code.STATE_FILE_MISSING, STATE + "/{V}.delta", back=1
    ),
    "a delta is cut off": Case(
        "heap", lambda p: p.truncate(STATE + "/{V}.delta"), Code.STATE_FILE_DAMAGED, STATE + "/{V}.delta", back=1
    ),
    "a delta is empty": Case(
        "heap", lambda p: p.write(STATE + "/{V}.delta", b""), Code.STATE_FILE_DAMAGED, STATE + "/{V}.delta", back=1
    ),
    "a store of a join misses a delta": Case(
        "join",
        lambda p: p.remove(STATE + "/right-keyWithIndexToValue/{V}.delta"),
        Code.STATE_FILE_MISSING,
        STATE + "/right-keyWithIndexToValue/{V}.delta",
        back=1,
    ),
    "a zip is missing": Case(
        "rocksdb", lambda p: p.remove(STATE + "/{V}.zip"), Code.STATE_FILE_MISSING, STATE + r"/\d+.changelog", back=1
    ),
    "a zip cannot be read": Case(
        "rocksdb", lambda p: p.truncate(STATE + "/{V}.zip"), Code.SNAPSHOT_UNREADABLE, STATE + "/{V}.zip", back=1
    ),
    "a changelog is missing": Case(
        "changelog",
        lambda p: p.remove(STATE + "/{V}.changelog"),
        Code.STATE_FILE_MISSING,
        STATE + "/{V}.changelog",
        back=1,
    ),
    "a changelog is cut off": Case(
        "changelog",
        lambda p: p.truncate(STATE + "/{V}.changelog"),
        Code.STATE_FILE_DAMAGED,
        STATE + "/{V}.changelog",
        back=1,
    ),
    "a changelog of format 2 is missing": Case(
        "format-v2",
        lambda p: p.remove(STATE + "/{V}_*.changelog"),
        Code.STATE_FILE_MISSING,
        STATE + "/{V}_.*changelog",
        back=1,
    ),
    "a changelog of format 2 is altered": Case(
        "format-v2",
        lambda p: p.flip(STATE + "/{V}_*.changelog"),
        Code.CHECKSUM_DIFFERS,
        STATE + "/{V}_.*changelog",
        back=1,
    ),
    "Spark's checksum is of another length": Case(
        "format-v2",
        lambda p: p.write(
            STATE + "/{V}_*.changelog.crc", b'{"algorithm":"CRC32C","value":1,"mainFileSize":7,"timestampMs":0}'
        ),
        Code.CHECKSUM_DIFFERS,
        STATE + "/{V}_.*changelog",
        back=1,
    ),
    "Spark's checksum cannot be read": Case(
        "format-v2",
        lambda p: p.write(STATE + "/{V}_*.changelog.crc", b"{"),
        Code.CHECKSUM_DIFFERS,
        STATE + "/{V}_.*changelog.crc",
        back=1,
    ),
    "unfinished files": Case(
        "heap",
        lambda p: (p.root / "offsets" / ".3.5b7c.tmp").write_bytes(b""),
        Code.LEFTOVER_TEMPORARY_FILES,
        "offsets/.3.5b7c.tmp",
        NOTE,
    ),
    "a checksum of Hadoop that is stale, on a zip": Case(
        "rocksdb",
        lambda p: (p.root / "state/0/1" / f".{p.newest + 1}.zip.crc").write_bytes(b"crc\0\0\0\2\0" + bytes(8)),
        Code.HADOOP_CHECKSUM_STALE,
        STATE + "/{V}.zip",
    ),
    "a checksum of Hadoop that is stale, on a delta": Case(
        "heap",
        lambda p: (p.root / "state/0/1" / f".{p.newest + 1}.delta.crc").write_bytes(b"crc\0\0\0\2\0" + bytes(8)),
        Code.HADOOP_CHECKSUM_STALE,
        STATE + "/{V}.delta",
        NOTE,
    ),
    "leftovers of a rewind by hand": Case(
        "heap",
        lambda p: [p.remove(f"{log}/{p.newest}") for _ in range(3) for log in ("offsets", "commits")],
        Code.STATE_AHEAD,
        STATE.replace("1", r"\d"),
        WARNING,
    ),
    "the sink is ahead": Case(
        "stateless",
        lambda p: [p.remove("offsets/{N}"), p.root.joinpath("commits", str(p.newest)).unlink()],
        Code.SINK_LOG_AHEAD,
        ".*output/_spark_metadata",
    ),
    "the sink is behind": Case(
        "stateless",
        lambda p: [path.unlink() for path in (p.sink / "_spark_metadata").glob(f"{p.newest}*")],
        Code.SINK_LOG_BEHIND,
        ".*output/_spark_metadata",
        WARNING,
        back=1,
    ),
    "the sink's log has a gap": Case(
        "stateless",
        lambda p: (p.sink / "_spark_metadata" / "4").unlink(),
        Code.SINK_LOG_GAP,
        ".*/_spark_metadata/4",
        back=2,
    ),
    "the sink's log is cut off": Case(
        "stateless",
        lambda p: (p.sink / "_spark_metadata" / str(p.newest)).write_bytes(b"v1\n{"),
        Code.SINK_LOG_UNREADABLE,
        r".*/_spark_metadata/\d+",
        back=1,
    ),
}


def ssts_of(snapshot: Path) -> list[Path]:
    with zipfile.ZipFile(snapshot) as archive:
        metadata = json.loads(archive.read("metadata").decode().partition("\n")[2])
    return [snapshot.parent / "SSTs" / item["dfsSstFileName"] for item in metadata["sstFiles"]]


def needed_snapshot(patient: Patient) -> Path:
    """The snapshot that the newest version of one store begins with."""
    needed = {file.path for file in cut(patient.live, carry_in_flight=False).needed}
    return patient.root / next(path for path in sorted(needed) if path.endswith(".zip"))


def an_sst_is_missing(patient: Patient) -> Path:
    sst = ssts_of(needed_snapshot(patient))[0]
    sst.unlink()
    return sst


def an_sst_is_short(patient: Patient) -> Path:
    sst = ssts_of(needed_snapshot(patient))[0]
    sst.write_bytes(sst.read_bytes()[:-1])
    return sst


def an_sst_never_reached_the_disk(patient: Patient) -> Path:
    sst = ssts_of(needed_snapshot(patient))[0]
    sst.write_bytes(sst.read_bytes()[:-64] + bytes(64))
    sst.with_name(f".{sst.name}.crc").unlink(missing_ok=True)
    return sst


def an_sst_was_exchanged(patient: Patient) -> Path:
    sst = ssts_of(needed_snapshot(patient))[0]
    data = bytearray(sst.read_bytes())
    data[9] ^= 1
    sst.write_bytes(data)
    return sst


@pytest.mark.parametrize("query", ["rocksdb", "changelog", "format-v2"])
@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (an_sst_is_missing, Code.SST_MISSING),
        (an_sst_is_short, Code.SST_WRONG_SIZE),
        (an_sst_never_reached_the_disk, Code.STATE_FILE_DAMAGED),
        (an_sst_was_exchanged, Code.HADOOP_CHECKSUM_STALE),
    ],
)
def test_damage_below_a_snapshot_is_recognised_for_each_format(
    patients: Patients, tmp_path: Path, query: str, damage: Callable[[Patient], Path], code: Code
) -> None:
    patient = patients[query][1].copy(tmp_path)

    sst = damage(patient)

    diagnosis = diagnose(patient.live, sinks=patient.sinks)
    found = [item for item in diagnosis.findings if item.code is code]
    assert [item.path for item in found] == [str(sst.relative_to(patient.root))]
    assert found[0].severity is Severity.ERROR


def test_an_old_snapshot_without_its_files_is_called_harmless(patients: Patients, tmp_path: Path) -> None:
    patient = patients["rocksdb"][1].copy(tmp_path)
    (patient.root / STATE / "1.zip").write_bytes(snapshot_zip(("000099-gone.sst", 5)))
    (patient.root / STATE / "2.zip").write_bytes(b"no zip")

    diagnosis = diagnose(patient.live, sinks=patient.sinks)

    found = [item for item in diagnosis.findings if item.code is Code.SNAPSHOT_DANGLING]
    assert [item.path for item in found] == [f"{STATE}/1.zip", f"{STATE}/2.zip"]
    assert {item.severity for item in diagnosis.findings} == {Severity.NOTE}
    assert "harmless" in found[0].explanation


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_every_kind_of_damage_is_recognised_named_and_weighed(patients: Patients, tmp_path: Path, case: Case) -> None:
    patient = patients[case.query][1].copy(tmp_path)
    original = patient.newest
    query_id = json.loads((patient.root / "metadata").read_text())["id"]
    case.damage(patient)

    diagnosis = diagnose(patient.live, sinks=patient.sinks, expected_query_id=query_id)

    told = [(item.code.value, item.severity.value, item.path) for item in diagnosis.findings]
    newest = diagnosis.batch_id if diagnosis.batch_id is not None else original
    wanted = re.compile(
        case.path.replace("{N}", str(newest)).replace("{N1}", str(newest - 1)).replace("{V}", str(newest + 1))
    )
    found = [item for item in diagnosis.findings if item.code is case.code and wanted.fullmatch(item.path)]
    assert found, told
    assert found[0].severity is case.severity
    assert found[0].explanation
    assert diagnosis.good_back_to == (None if case.back is None else newest - case.back)


@pytest.mark.parametrize(
    ("backend", "damage"),
    [
        pytest.param(HEAP, lambda p: p.remove(STATE + "/{N}.delta"), id="heap"),
        pytest.param(ROCKSDB_V2, lambda p: p.remove("state/0/0/{V}_*.changelog"), id="rocksdb-format-v2"),
    ],
)
def test_a_query_goes_on_exactly_from_the_batch_the_directory_is_good_back_to(
    spark: SparkSession, tmp_path: Path, backend: StateBackend, damage: Callable[[Patient], None]
) -> None:
    work = Workload(aggregation, backend, tmp_path)
    write_batches(tmp_path)
    patient = Patient(tmp_path / "live", work.output)
    run_to_the_end(spark, work, patient.live)
    expected = work.rows(spark)
    damage(patient)

    diagnosis = diagnose(patient.live, sinks=patient.sinks)

    assert not diagnosis.can_resume
    assert diagnosis.good_back_to is not None
    assert 0 < diagnosis.good_back_to < patient.newest
    fresh = LiveDirectory(str(tmp_path / "fresh"))
    clone(patient.live, fresh, at_batch=diagnosis.good_back_to)
    roll_back_to_own_past(patient.sinks, diagnosis.good_back_to)
    # In other batches than before, so that a sink that was not brought back would lose rows.
    run_to_the_end(spark, work, fresh, files_per_batch=2)
    assert work.rows(spark) == expected


@pytest.mark.parametrize("backend", [HEAP, ROCKSDB_V2], ids=["heap", "rocksdb-format-v2"])
def test_a_directory_with_a_running_query_that_purges_has_no_finding_above_a_note(
    spark: SparkSession, tmp_path: Path, backend: StateBackend
) -> None:
    work = Workload(aggregation, backend, tmp_path)
    write_batches(tmp_path)
    patient = Patient(tmp_path / "live", work.output)
    session = work.session(spark)
    session.conf.set("spark.sql.streaming.minBatchesToRetain", "2")
    session.conf.set("spark.sql.streaming.stateStore.minDeltasForSnapshot", "2")
    session.conf.set("spark.sql.streaming.ratioExtraSpaceAllowedInCheckpoint", "0")
    diagnoses: list[Diagnosis] = []
    errors: list[Exception] = []
    done = threading.Event()

    def examine() -> None:
        while not done.is_set():
            try:
                diagnoses.append(diagnose(patient.live, sinks=patient.sinks))
            except Exception as error:  # noqa: BLE001 - looked at by the test
                errors.append(error)
                return

    thread = threading.Thread(target=examine)
    query = start_query(work.writer(session), "running", patient.live)
    thread.start()
    try:
        session.streams.get(query.query_id).processAllAvailable()
    finally:
        done.set()
        thread.join()
        query.stop()

    assert errors == []
    assert len({diagnosis.batch_id for diagnosis in diagnoses}) >= 3
    told = [item for diagnosis in diagnoses for item in diagnosis.findings if item.severity is not Severity.NOTE]
    assert told == []


def test_a_directory_that_is_not_there_is_one_finding(tmp_path: Path) -> None:
    diagnosis = diagnose(LiveDirectory(str(tmp_path / "nowhere")))

    assert [item.code for item in diagnosis.findings] == [Code.DIRECTORY_MISSING]
    assert not diagnosis.can_resume


def test_a_directory_before_its_first_batch_is_healthy(tmp_path: Path) -> None:
    (tmp_path / "live").mkdir()

    diagnosis = diagnose(LiveDirectory(str(tmp_path / "live")))

    assert [(item.code, item.severity) for item in diagnosis.findings] == [(Code.NOTHING_COMMITTED, Severity.NOTE)]


def test_a_directory_behind_fsspec_is_examined_alike(patients: Patients) -> None:
    _, patient = patients["changelog"]
    memory = fsspec.filesystem("memory")
    memory.put(str(patient.root), "/doctor/live", recursive=True)
    live = LiveDirectory("memory://doctor/live")
    healthy = diagnose(live)
    assert {item.severity for item in healthy.findings} <= {Severity.NOTE}

    memory.rm(f"/doctor/live/offsets/{patient.newest - 1}")
    memory.touch("/doctor/live/offsets/.9.uuid.tmp")

    diagnosis = diagnose(live)
    codes = [item.code for item in diagnosis.findings]
    assert Code.PREVIOUS_OFFSET_MISSING in codes
    assert Code.LEFTOVER_TEMPORARY_FILES in codes
    assert diagnosis.good_back_to == patient.newest - 2


def test_the_documentation_lists_every_code_and_each_has_advice() -> None:
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()

    assert set(ADVICE) == set(Code)
    assert [code.value for code in Code if f"`{code.value}`" not in page] == []


def test_a_checksum_is_that_of_the_standard() -> None:
    # RFC 3720, appendix B.4.
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"123456789") == 0xE3069283
