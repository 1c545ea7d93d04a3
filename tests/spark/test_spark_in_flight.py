"""A sink that has the batch in flight passes over it, unrun: the state comes along, or the sink goes back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml
from pyspark.sql import SparkSession
from spark_scenarios import (
    HEAP,
    ROCKSDB,
    ROCKSDB_CHANGELOG,
    ROCKSDB_V2,
    Workload,
    aggregation,
    run_to_the_end,
    take_snapshot,
)

from dagster_ckpt.config.state_backend import StateBackend
from dagster_ckpt.errors import LeaseLostError, RowsAtRiskError, SinkRollbackError
from dagster_ckpt.sinks.batch_in_flight import (
    InFlight,
    Unfinished,
    decide_in_flight,
    forecast_in_flight,
    settle_in_flight,
)
from dagster_ckpt.sinks.file_sink import FileSink
from dagster_ckpt.sinks.file_sink_log import begin_log
from dagster_ckpt.sinks.registry import sinks_of
from dagster_ckpt.sinks.sink import RollBack, SinkEffect
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.restore import clone, give_query_id
from dagster_ckpt.spark.doctor.diagnosis import diagnose
from dagster_ckpt.spark.doctor.finding import Code
from tests.support.needs import by_name
from tests.support.small_spark import small_spark

CASES = yaml.safe_load((Path(__file__).parent / "in_flight.yaml").read_text())
FED, END = 3, 5
QUERY = "11111111-2222"
BACKENDS = {"heap": HEAP, "rocksdb": ROCKSDB, "changelog": ROCKSDB_CHANGELOG, "format v2": ROCKSDB_V2}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["says"])
def test_the_batch_in_flight_is_decided_together_with_the_sink(case: dict[str, Any]) -> None:
    at = Unfinished(
        planned=case.get("planned", True),
        stateful=case.get("stateful", True),
        unique_ids=case.get("v2", False),
        state_is_there=case.get("state", False),
    )

    found = decide_in_flight(at, in_sink=case.get("in_sink", True), can_go_back=case.get("back", True))

    assert found is InFlight(case["then"])


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with small_spark({"spark.sql.shuffle.partitions": "2"}) as session:
        yield session


class Killed:
    """A query that was killed between the file sink's log entry of a batch and its commit; each test begins there."""

    def __init__(self, spark: SparkSession, folder: Path, backend: StateBackend) -> None:
        self.spark = spark
        self.work = Workload(aggregation, backend, folder)
        self.live = LiveDirectory(str(folder / "live-1"))
        self.fresh = LiveDirectory(str(folder / "live-2"))
        run_part(spark, self.work, self.live, 0, FED)
        self.snapshot = take_snapshot(self.live, carry_in_flight=False, output=self.work.output)
        commits = folder / "live-1/commits"
        self.cut_off = max(int(path.name) for path in commits.iterdir() if path.name.isdecimal())
        (commits / str(self.cut_off)).unlink()
        (commits / f".{self.cut_off}.crc").unlink(missing_ok=True)
        assert self.work.newest_batch() == self.cut_off
        self._saved = folder.with_name(f"{folder.name}-saved")
        shutil.copytree(folder, self._saved)

    @property
    def sinks(self) -> list[str]:
        return [f"FileSink[file:{self.work.output}]"]

    def again(self) -> None:
        shutil.rmtree(self.work.folder)
        shutil.copytree(self._saved, self.work.folder)

    def goes_on(self, live: LiveDirectory) -> list[str]:
        run_part(self.spark, self.work, live, FED, END)
        return self.work.rows(self.spark)


def run_part(spark: SparkSession, work: Workload, live: LiveDirectory, first: int, last: int) -> None:
    if first == 0:
        work.folder.mkdir(exist_ok=True)
        work.hold_back_input()
    for number in range(first, last):
        work.feed(number)
    run_to_the_end(spark, work, live)


@pytest.fixture(scope="module", params=by_name(BACKENDS))
def prepared(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Killed:
    return Killed(spark, tmp_path_factory.mktemp("lives") / "killed", BACKENDS[request.param])


@pytest.fixture
def killed(prepared: Killed) -> Killed:
    prepared.again()
    return prepared


@pytest.fixture(scope="module")
def expected(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What a query shows that was never killed, but stopped and started where the others are."""
    work = Workload(aggregation, HEAP, tmp_path_factory.mktemp("uninterrupted"))
    live = LiveDirectory(str(work.folder / "live-1"))
    run_part(spark, work, live, 0, FED)
    run_part(spark, work, live, FED, END)
    return work.rows(spark)


@pytest.mark.thorough(but="format v2")
@pytest.mark.spark
def test_in_place(killed: Killed, expected: list[str]) -> None:
    in_v2 = killed.work.backend is ROCKSDB_V2
    found = {finding.code for finding in diagnose(killed.live, sinks=sinks_of(killed.sinks)).findings}
    assert (Code.SINK_HAS_BATCH_IN_FLIGHT in found) is in_v2
    told = [(each.effect, "skipped" in each.reason) for each in forecast_in_flight(killed.live, killed.sinks)]

    undone: list[int] = []
    rolled_back = settle_in_flight(killed.live, killed.sinks, still_mine=nullcontext, before_roll_back=undone.append)

    assert undone == ([killed.cut_off - 1] if in_v2 else [])
    # Spark itself resumes where the state is there, but not in format v2: "CheckpointInfo length: 0".
    assert told == [(SinkEffect.EXACT, False) if in_v2 else (SinkEffect.SKIP, True)]
    assert bool(rolled_back) is in_v2
    assert killed.work.newest_batch() == killed.cut_off - in_v2
    assert killed.goes_on(killed.live) == expected


@pytest.mark.thorough(but=("heap", "format v2"))
@pytest.mark.spark
def test_adopted_in_a_fresh_directory(killed: Killed, expected: list[str]) -> None:
    made = clone(killed.live, killed.fresh, carry_state=True)

    rolled_back = settle_in_flight(killed.fresh, killed.sinks, still_mine=nullcontext)

    assert made.carries_state is not bool(rolled_back)
    assert bool(rolled_back) is (killed.work.backend is ROCKSDB_V2)
    assert killed.goes_on(killed.fresh) == expected


@pytest.mark.thorough(but=("rewound-format v2", "restored-format v2"))
@pytest.mark.spark
@pytest.mark.parametrize("prepared", ["changelog", "format v2"], indirect=True)
@pytest.mark.parametrize("how", ["adopted without its state", "rewound", "restored", "restored with it"])
def test_other_starts_bring_the_sink_back(killed: Killed, expected: list[str], how: str) -> None:
    if how == "adopted without its state":
        clone(killed.live, killed.fresh)
        settle_in_flight(killed.fresh, killed.sinks, still_mine=nullcontext)
        assert killed.work.newest_batch() == killed.cut_off - 1
    elif how == "rewound":
        clone(killed.live, killed.fresh, at_batch=killed.cut_off - 2)
        FileSink.at(str(killed.work.output)).roll_back(RollBack(killed.cut_off - 2), nullcontext)
    elif how == "restored":
        killed.snapshot.restore(killed.fresh)
    else:
        snapshot = take_snapshot(killed.live, carry_in_flight=True, output=killed.work.output)
        assert snapshot.in_flight == killed.cut_off
        snapshot.restore(killed.fresh)

    assert settle_in_flight(killed.fresh, killed.sinks, still_mine=nullcontext) == []
    assert killed.goes_on(killed.fresh) == expected


@pytest.mark.thorough(but="format v2")
@pytest.mark.spark
@pytest.mark.parametrize("prepared", ["heap", "format v2"], indirect=True)
def test_a_fork_runs_the_batch_that_only_the_originals_output_has(killed: Killed, expected: list[str]) -> None:
    clone(killed.live, killed.fresh)
    give_query_id(killed.fresh, "22222222-3333-4444-5555-666666666666")
    batch_id = killed.cut_off - 1
    # The fork's own folder: this workload always writes to the same name.
    originals = killed.work.output.rename(killed.work.output.with_name("original"))
    begin_log(str(killed.work.output), batch_id)

    assert settle_in_flight(killed.fresh, killed.sinks, still_mine=nullcontext) == []
    shown = killed.goes_on(killed.fresh)

    assert sorted(rows_up_to(originals, batch_id) + shown) == expected


def rows_up_to(output: Path, batch_id: int) -> list[str]:
    entries = [path for path in (output / "_spark_metadata").iterdir() if path.name.isdecimal()]
    lines = [line for path in entries if int(path.name) <= batch_id for line in path.read_text().splitlines()[1:]]
    parts = [output / json.loads(line)["path"].rsplit("/", 1)[-1] for line in lines]
    return [row for part in parts for row in part.read_text().splitlines()]


def live_by_hand(root: Path, *, state: bool) -> LiveDirectory:
    """Batch 0 is committed and batch 1 planned; with the state after batch 1, or without."""
    settings = {
        "spark.sql.shuffle.partitions": "1",
        "spark.sql.streaming.stateStore.providerClass": "org.apache.spark.sql.execution.streaming.state."
        "HDFSBackedStateStoreProvider",
    }
    operator = {"operatorInfo": {"operatorId": 0, "operatorName": "stateStoreSave"}}
    stores = {"stateStoreInfo": [{"storeName": "default", "numColsPrefixKey": 0, "numPartitions": 1}]}
    files = {
        "metadata": json.dumps({"id": QUERY}),
        "commits/0": 'v1\n{"nextBatchWatermarkMs":0}',
        "state/0/_metadata/metadata": f"v1\n{json.dumps(operator | stores)}",
        "state/0/0/_metadata/schema": "\0\2v1\0\35" + '{"type":"struct","fields":[]} ',
        "state/0/0/1.delta": "x",
    }
    for batch in range(2):
        files[f"offsets/{batch}"] = "\n".join(["v1", json.dumps({"batchWatermarkMs": 0, "conf": settings}), "{}"])
    if state:
        files["state/0/0/2.delta"] = "x"
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return LiveDirectory(str(root))


def delta_table(table: Path, last: int) -> str:
    (table / "_delta_log").mkdir(parents=True)
    for batch in range(last + 1):
        txn = {"txn": {"appId": QUERY, "version": batch}}
        (table / f"_delta_log/{batch:020}.json").write_text(json.dumps(txn))
    return f"DeltaSink[{table}]"


def test_a_delta_table_that_has_the_batch_without_its_state_is_restored_to_the_version_before(tmp_path: Path) -> None:
    live = live_by_hand(tmp_path / "live", state=False)
    sink = delta_table(tmp_path / "table", last=1)

    assert [each.effect for each in forecast_in_flight(live, [sink])] == [SinkEffect.EXACT]
    with pytest.raises(RowsAtRiskError, match="Restore the table"):
        settle_in_flight(live, [sink], still_mine=nullcontext, roll_back_tables=False)
    # No session of this process can do it: the refusal says what to type.
    with pytest.raises(SinkRollbackError, match="table"):
        settle_in_flight(live, [sink], still_mine=nullcontext)


def test_its_batches_under_a_former_query_id_count_also_if_its_log_does_not_reach_back(tmp_path: Path) -> None:
    live = live_by_hand(tmp_path / "live", state=False)
    log = tmp_path / "table" / "_delta_log"
    log.mkdir(parents=True)
    for version, (query, batch) in {20: ("former", 0), 21: (QUERY, 1)}.items():
        actions = [{"txn": {"appId": query, "version": batch}}, {"add": {"path": str(version), "dataChange": True}}]
        (log / f"{version:020}.json").write_text("\n".join(map(json.dumps, actions)))
    sink, forgotten = f"DeltaSink[{log.parent}]", list[int]()

    with pytest.raises(SinkRollbackError, match="the version to restore is unknown"):
        settle_in_flight(live, [sink], still_mine=nullcontext, before_roll_back=forgotten.append)
    assert forgotten == []
    with pytest.raises(SinkRollbackError, match=r"RESTORE TABLE .* TO VERSION AS OF 20"):
        settle_in_flight(live, [sink], still_mine=nullcontext, query_ids=["former", QUERY])


def test_it_is_undone_although_others_have_restored_the_table_to_an_earlier_batch_before(tmp_path: Path) -> None:
    live = live_by_hand(tmp_path / "live", state=False)
    log = tmp_path / "table" / "_delta_log"
    log.mkdir(parents=True)
    restore = {"commitInfo": {"operation": "RESTORE", "operationParameters": {"version": 0}}}
    batches = [{"txn": {"appId": QUERY, "version": batch}} for batch in range(2)]
    for version, action in enumerate([{"metaData": {}}, batches[0], restore, batches[1]]):
        (log / f"{version:020}.json").write_text(json.dumps(action))

    # As after the RESTORE, to which the query has written on.
    with pytest.raises(SinkRollbackError, match=r"RESTORE TABLE .* TO VERSION AS OF 2\b"):
        settle_in_flight(live, [f"DeltaSink[{log.parent}]"], still_mine=nullcontext, query_ids=[QUERY])


@pytest.mark.parametrize(("state", "last"), [(True, 1), (False, 0)], ids=["its state is there", "it has it not"])
def test_a_delta_table_is_started_on_where_nothing_is_missing(tmp_path: Path, state: bool, last: int) -> None:
    live = live_by_hand(tmp_path / "live", state=state)

    assert settle_in_flight(live, [delta_table(tmp_path / "table", last)], still_mine=nullcontext) == []


def test_the_sink_goes_back_only_while_the_process_is_the_writer(tmp_path: Path) -> None:
    live = live_by_hand(tmp_path / "live", state=False)
    log = tmp_path / "out/_spark_metadata"
    log.mkdir(parents=True)
    for batch in range(2):
        (log / str(batch)).write_text("v1")

    def lost() -> None:
        raise LeaseLostError("another is the writer")

    with pytest.raises(LeaseLostError):
        settle_in_flight(live, [f"FileSink[{tmp_path}/out]"], still_mine=lost)

    assert sorted(path.name for path in log.iterdir()) == ["0", "1"]
