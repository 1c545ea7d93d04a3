"""The doctor on damaged copies of real live directories: each kind of damage is recognised, named and weighed."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import fsspec
import pytest
from doctor_damages import (
    CASES,
    STATE,
    Case,
    an_sst_is_missing,
    an_sst_is_short,
    an_sst_never_reached_the_disk,
    an_sst_was_altered,
)
from doctor_patients import Patient, run_all, write_batches
from live_files import snapshot_zip
from pyspark.sql import SparkSession
from spark_scenarios import HEAP, ROCKSDB_V2, Workload, aggregation, run_to_the_end

from dagster_ckpt.config.state_backend import StateBackend
from dagster_ckpt.sinks.registry import sinks_of
from dagster_ckpt.sinks.sink import RollBack
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.restore import clone
from dagster_ckpt.spark.doctor.diagnosis import Diagnosis, diagnose
from dagster_ckpt.spark.doctor.finding import Code, Severity
from dagster_ckpt.spark.query.query import start_query
from dagster_ckpt.spark.versions import Feature
from tests.support.needs import needs
from tests.support.small_spark import small_spark

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


@pytest.mark.core(thorough=True)
@pytest.mark.parametrize("query", ["stateless", "heap", "rocksdb", "changelog", "format-v2", "join", "join-v3"])
def test_a_healthy_stopped_directory_has_no_finding_above_a_note(patients: Patients, query: str) -> None:
    _, patient = patients[query]

    diagnosis = diagnose(patient.live, sinks=sinks_of(patient.sinks))

    assert [item for item in diagnosis.findings if item.severity is not Severity.NOTE] == []
    assert (diagnosis.batch_id, diagnosis.good_back_to) == (patient.newest, patient.newest)
    assert diagnosis.can_resume


@pytest.mark.parametrize("query", ["rocksdb", "changelog", "format-v2"])
@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (an_sst_is_missing, Code.SST_MISSING),
        (an_sst_is_short, Code.SST_WRONG_SIZE),
        (an_sst_never_reached_the_disk, Code.STATE_FILE_DAMAGED),
        (an_sst_was_altered, Code.STATE_FILE_DAMAGED),
    ],
)
def test_damage_below_a_snapshot_is_recognised_for_each_format(
    patients: Patients, tmp_path: Path, query: str, damage: Callable[[Patient], Path], code: Code
) -> None:
    patient = patients[query][1].copy(tmp_path)

    sst = damage(patient)

    diagnosis = diagnose(patient.live, sinks=sinks_of(patient.sinks))
    found = [item for item in diagnosis.findings if item.code is code]
    assert [item.path for item in found] == [str(sst.relative_to(patient.root))]
    assert found[0].severity is Severity.ERROR


def test_an_old_snapshot_without_its_files_is_called_harmless(patients: Patients, tmp_path: Path) -> None:
    patient = patients["rocksdb"][1].copy(tmp_path)
    (patient.root / STATE / "1.zip").write_bytes(snapshot_zip(("000099-gone.sst", 5)))
    (patient.root / STATE / "2.zip").write_bytes(b"no zip")

    diagnosis = diagnose(patient.live, sinks=sinks_of(patient.sinks))

    found = [item for item in diagnosis.findings if item.code is Code.SNAPSHOT_DANGLING]
    assert [item.path for item in found] == [f"{STATE}/1.zip", f"{STATE}/2.zip"]
    assert {item.severity for item in diagnosis.findings} == {Severity.NOTE}
    assert "harmless" in found[0].explanation


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=name, marks=needs(*case.needed)) for name, case in CASES.items()]
)
def test_every_kind_of_damage_is_recognised_named_and_weighed(patients: Patients, tmp_path: Path, case: Case) -> None:
    patient = patients[case.query][1].copy(tmp_path)
    original = patient.newest
    query_id = json.loads((patient.root / "metadata").read_text())["id"]
    case.damage(patient)

    diagnosis = diagnose(patient.live, sinks=sinks_of(patient.sinks), expected_query_id=query_id)

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


@pytest.mark.thorough(but="rocksdb-format-v2")
@pytest.mark.core
@pytest.mark.parametrize(
    ("backend", "damage"),
    [
        pytest.param(HEAP, lambda p: p.remove(STATE + "/{N}.delta"), id="heap"),
        pytest.param(
            ROCKSDB_V2,
            lambda p: p.remove("state/0/0/{V}_*.changelog"),
            id="rocksdb-format-v2",
            marks=needs(Feature.CHECKPOINT_FORMAT_2),
        ),
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

    diagnosis = diagnose(patient.live, sinks=sinks_of(patient.sinks))

    assert not diagnosis.can_resume
    assert diagnosis.good_back_to is not None
    assert 0 < diagnosis.good_back_to < patient.newest
    fresh = LiveDirectory(str(tmp_path / "fresh"))
    clone(patient.live, fresh, at_batch=diagnosis.good_back_to)
    for sink in sinks_of(patient.sinks):
        sink.roll_back(RollBack(diagnosis.good_back_to), nullcontext)
    # In other batches than before, so that a sink that was not brought back would lose rows.
    run_to_the_end(spark, work, fresh, files_per_batch=2)
    assert work.rows(spark) == expected


@pytest.mark.thorough
@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(HEAP, id="heap"),
        pytest.param(ROCKSDB_V2, id="rocksdb-format-v2", marks=needs(Feature.CHECKPOINT_FORMAT_2)),
    ],
)
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
                diagnoses.append(diagnose(patient.live, sinks=sinks_of(patient.sinks)))
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
    page = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()

    assert all(code.advice for code in Code)
    assert [code.value for code in Code if f"`{code.value}`" not in page] == []
