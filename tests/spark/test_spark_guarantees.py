import re
from pathlib import Path

import pytest
from live_files import LiveFiles

from dagster_ckpt.sinks.batch_in_flight import Guarantee, guarantees
from dagster_ckpt.spark.checkpoint_dir.cut import cut
from dagster_ckpt.spark.checkpoint_dir.inspect import LiveStatus, inspect_live_directory
from dagster_ckpt.spark.checkpoint_dir.operators import ExecutionMode, mode_of_execution

FILE_SINK = "FileSink[file:/out]"
DELTA = "DeltaSink[/table]"
ICEBERG = "IcebergTable[lake.db.shops at file:/table]"
HUDI = "org.apache.hudi.HoodieStreamingSink@1"
CONSOLE = "org.apache.spark.sql.execution.streaming.ConsoleTable$@1f"
EXACTLY, AT_LEAST = Guarantee.EXACTLY_ONCE, Guarantee.AT_LEAST_ONCE


@pytest.mark.parametrize(
    ("mode", "sinks", "expected", "because"),
    [
        (
            ExecutionMode.MICRO_BATCH,
            [FILE_SINK, ICEBERG],
            (EXACTLY, EXACTLY, True),
            "recognizes batches that it has written",
        ),
        (
            ExecutionMode.MICRO_BATCH,
            [ICEBERG, HUDI],
            (EXACTLY, AT_LEAST, True),
            "no test.*Hoodie",
        ),
        (ExecutionMode.MICRO_BATCH, [FILE_SINK, CONSOLE], (EXACTLY, AT_LEAST, True), "ConsoleTable.* not recognize"),
        (ExecutionMode.MICRO_BATCH, [], (EXACTLY, AT_LEAST, True), "its sinks are unknown"),
        (ExecutionMode.ASYNC_PROGRESS, [FILE_SINK], (AT_LEAST, AT_LEAST, False), "Only aligned snapshots"),
        (ExecutionMode.CONTINUOUS, [DELTA], (AT_LEAST, AT_LEAST, False), "Only aligned snapshots"),
        (ExecutionMode.REAL_TIME, [DELTA], (EXACTLY, AT_LEAST, False), "real-time.*Only aligned snapshots"),
    ],
)
def test_what_holds_depends_on_the_mode_and_the_sinks(
    mode: ExecutionMode, sinks: list[str], expected: tuple[Guarantee, Guarantee, bool], because: str
) -> None:
    found = guarantees(mode, sinks)

    assert found.mode is mode
    assert (found.state, found.sink, found.unaligned) == expected
    assert re.search(because, found.why)


@pytest.mark.parametrize(
    ("execution", "trigger", "mode"),
    [
        ("MicroBatchExecution", "ProcessingTimeTrigger", ExecutionMode.MICRO_BATCH),
        ("MicroBatchExecution", "RealTimeTrigger", ExecutionMode.REAL_TIME),
        # Its default for stateless queries in real-time mode since Spark 4.3.
        ("AsyncProgressTrackingMicroBatchExecution", "RealTimeTrigger", ExecutionMode.REAL_TIME),
        ("AsyncProgressTrackingMicroBatchExecution", "ProcessingTimeTrigger", ExecutionMode.ASYNC_PROGRESS),
        ("ContinuousExecution", "ContinuousTrigger", ExecutionMode.CONTINUOUS),
    ],
)
def test_the_mode_is_that_of_the_execution_and_its_trigger(execution: str, trigger: str, mode: ExecutionMode) -> None:
    assert mode_of_execution(execution, trigger) is mode


@pytest.fixture
def files(tmp_path: Path) -> LiveFiles:
    return LiveFiles(tmp_path / "live-0")


def test_a_snapshot_of_micro_batches_tells_their_guarantee(files: LiveFiles) -> None:
    files.batches(2)

    properties = cut(files.live, carry_in_flight=False).properties
    guarantee = guarantees(ExecutionMode(properties["mode"]), [CONSOLE]).properties()["guarantee"]

    assert properties["mode"] == "MICRO_BATCH"
    assert guarantee["state"] == "EXACTLY_ONCE"
    assert guarantee["sink"] == "AT_LEAST_ONCE"


def test_gaps_in_both_logs_show_asynchronous_progress_tracking(files: LiveFiles) -> None:
    files.batches(4)
    for batch in (2, 3):
        files.remove(f"offsets/{batch}")
        files.remove(f"commits/{batch}")

    taken = cut(files.live, carry_in_flight=False)

    assert taken.properties["mode"] == "ASYNC_PROGRESS"
    assert {"offsets/1", "offsets/4", "commits/4"} <= {file.path for file in taken.files}


def continuous(files: LiveFiles) -> None:
    files.query_id()
    for epoch in range(3):
        files.put(f"offsets/{epoch}", f'v1\n\n{{"0":{epoch}}}')
        files.put(f"commits/{epoch}", "v1\n{}")
    files.put("sources/0/0", 'v1\n{"0":{"value":0}}')


def test_empty_metadata_in_the_offset_log_shows_continuous_processing(files: LiveFiles) -> None:
    continuous(files)

    assert cut(files.live, carry_in_flight=False).properties["mode"] == "CONTINUOUS"


def test_the_running_epoch_of_continuous_processing_is_never_carried(files: LiveFiles) -> None:
    continuous(files)
    files.put("offsets/3", 'v1\n\n{"0":3}')

    taken = cut(files.live, carry_in_flight=True)

    assert taken.in_flight is None
    assert "offsets/3" not in {file.path for file in taken.files}
    assert inspect_live_directory(files.live).status is LiveStatus.GOOD
