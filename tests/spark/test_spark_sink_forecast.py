"""What each sink does with batches that come again, on tables written by hand in their documented formats."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from dagster_ckpt.errors import SinkRollbackError, StorageAccessError
from dagster_ckpt.io.location import open_file_io
from dagster_ckpt.sinks import delta
from dagster_ckpt.sinks.delta import DeltaTable
from dagster_ckpt.sinks.delta_log import DeltaLog
from dagster_ckpt.sinks.delta_roll_back import ROLL_BACK_ID
from dagster_ckpt.sinks.registry import forecast, sink_of
from dagster_ckpt.sinks.sink import Replay, RollBack, SinkEffect, SinkForecast, newest_batch, roll_back
from dagster_ckpt.sinks.table import Step, verdict
from dagster_ckpt.spark.checkpoint_dir.captured_sinks import SinkEntry

QUERY = "11111111-2222"
# What the package names its roll-backs in the cases, and Delta in its log.
OF_THE_PACKAGE = {"EMPTIED": "TRUNCATE", "RESTORED": "RESTORE"}


def write_delta(table: Path, commits: Sequence[tuple[str, int] | str], *, first: int = 0) -> None:
    """Commits of a `_delta_log`: a batch of a query, or another operation."""
    log = table / "_delta_log"
    log.mkdir(parents=True)
    for version, commit in enumerate(commits, first):
        actions: list[dict[str, Any]] = [{"add": {"path": f"part-{version}", "dataChange": True}}]
        if isinstance(commit, tuple):
            actions.insert(0, {"txn": {"appId": commit[0], "version": commit[1], "lastUpdated": 1}})
            actions.insert(0, {"commitInfo": {"operation": "STREAMING UPDATE"}})
        else:
            operation, _, version_to = commit.partition(" ")
            parameters = {"version": version_to} if version_to else {}
            if operation in OF_THE_PACKAGE:
                operation = OF_THE_PACKAGE[operation]
                actions.insert(0, {"txn": {"appId": ROLL_BACK_ID, "version": version - 1}})
            actions.insert(0, {"commitInfo": {"operation": operation, "operationParameters": parameters}})
        (log / f"{version:020}.json").write_text("\n".join(map(json.dumps, actions)))
    (log / "00000000000000000000.checkpoint.parquet").write_bytes(b"PAR1")
    (log / "_last_checkpoint").write_text('{"version":0}')


CASES = yaml.safe_load((Path(__file__).parent / "sink_forecasts.yaml").read_text())


def replay(case: dict[str, Any], **more: Any) -> Replay:
    return Replay(
        case.get("to", 3),
        case.get("query", QUERY),
        keeps_query_id=not case.get("new_id", False),
        in_flight=case.get("in_flight"),
        roll_back_tables=not case.get("by_hand", False),
        **more,
    )


def assert_forecast(told: SinkForecast, case: dict[str, Any]) -> None:
    assert told.effect is SinkEffect(case["effect"]), told
    assert case.get("reason", "") in told.reason
    assert case.get("advice", "") in told.advice


@pytest.mark.parametrize("case", CASES["delta"], ids=lambda case: case["says"])
def test_delta(tmp_path: Path, case: dict[str, Any]) -> None:
    commits = [(QUERY, commit) if isinstance(commit, int) else commit for commit in case["log"]]
    write_delta(tmp_path / "table", commits, first=case.get("first", 0))

    assert_forecast(forecast(f"DeltaSink[{tmp_path}/table]", replay(case)), case)


def test_an_accepted_loss_undoes_only_what_came_after_the_restore_of_others(tmp_path: Path) -> None:
    write_delta(tmp_path, ["CREATE TABLE", (QUERY, 0), (QUERY, 1), (QUERY, 2), "RESTORE 1", (QUERY, 3)])
    sink = sink_of(f"DeltaSink[{tmp_path}]")
    assert isinstance(sink, DeltaTable)
    back = RollBack(2, query_id=QUERY, query_ids=[QUERY])

    with pytest.raises(SinkRollbackError, match="Version 4 took the table back"):
        sink.check_roll_back(back)
    accepted = replace(back, accepts_loss=True)
    plan = sink.plan(accepted)

    assert (verdict(plan, accepted).step, plan and plan.command.endswith("OF 4")) == (Step.ROLL_BACK, True)


def test_what_others_have_emptied_stays_empty_under_a_new_query_id(tmp_path: Path) -> None:
    """The stream went on from batch 1 under a second id, and goes back there."""
    write_delta(tmp_path, ["CREATE TABLE", (QUERY, 0), (QUERY, 1), "TRUNCATE", ("second", 2)])

    told = forecast(f"DeltaSink[{tmp_path}]", Replay(1, "second", query_ids=[QUERY, "second"]))

    assert (told.effect, told.reason.partition(":")[0]) == (SinkEffect.EXACT, "The table is restored to version 3")


@pytest.mark.parametrize("kind", ["DeltaSink[{}]", "IcebergTable[{}]"])
def test_a_roll_back_that_is_left_to_a_person_is_refused_until_it_is_done(tmp_path: Path, kind: str) -> None:
    if "Delta" in kind:
        write_delta(tmp_path, [(QUERY, 0), (QUERY, 1)])
    else:
        write_iceberg(tmp_path, [(QUERY, 0), (QUERY, 1)], name="v1.metadata.json", current=1)
    sink = sink_of(kind.format(tmp_path))

    with pytest.raises(SinkRollbackError, match=r"leaves to you.*Run: (RESTORE TABLE|CALL <catalog>)"):
        roll_back(sink, RollBack(0, query_id=QUERY, roll_back_tables=False), nullcontext)
    roll_back(sink, RollBack(1, query_id=QUERY, roll_back_tables=False), nullcontext)


@pytest.mark.parametrize(
    ("commits", "effect"),
    [
        ([(QUERY, batch) for batch in range(10)], SinkEffect.EXACT),
        (["CREATE TABLE", "MERGE", "MERGE"], SinkEffect.UNKNOWN),
    ],
    ids=["within delta_transaction", "outside of it"],
)
def test_a_table_that_foreach_batch_writes_to_is_exact_if_it_has_the_batches(
    tmp_path: Path, commits: Sequence[tuple[str, int] | str], effect: SinkEffect
) -> None:
    write_delta(tmp_path / "table", commits)

    assert forecast(f"ForeachBatchSink[delta:{tmp_path}/table]", Replay(3, QUERY, query_ids=[QUERY])).effect is effect


def test_each_of_several_writes_of_a_batch_is_the_streams(tmp_path: Path) -> None:
    named = f"{QUERY}/refunds"
    write_delta(tmp_path, [(QUERY, 0), (named, 0), (QUERY, 1), (named, 1), (named, 2)])

    told = forecast(f"ForeachBatchSink[delta:{tmp_path}]", Replay(0, QUERY, query_ids=[QUERY]))

    assert (told.effect, told.reason.partition(":")[0]) == (SinkEffect.EXACT, "The table is restored to version 1")
    assert newest_batch(sink_of(f"ForeachBatchSink[delta:{tmp_path}]"), QUERY) == 2


@pytest.mark.parametrize("harm", ["no log", "not JSON"])
def test_a_delta_table_that_cannot_be_read_may_lose_rows(tmp_path: Path, harm: str) -> None:
    if harm == "not JSON":
        write_delta(tmp_path, [(QUERY, batch) for batch in range(10)])
        (tmp_path / "_delta_log/00000000000000000009.json").write_text("{")

    told = forecast(f"DeltaSink[{tmp_path}]", Replay(5, QUERY))

    assert told.effect is SinkEffect.LOSE
    assert ("no such table here" if harm == "no log" else "cannot be read from here") in told.reason


def write_iceberg(table: Path, epochs: Sequence[tuple[str, int] | None], *, name: str, current: int | None) -> None:
    """Metadata of a table whose snapshot n holds the n-th epoch; its parent is the one before."""
    snapshots = [
        {
            "snapshot-id": number,
            **({"parent-snapshot-id": number - 1} if number else {}),
            "timestamp-ms": 1,
            "summary": {"operation": "append"}
            | (
                {"spark.sql.streaming.queryId": epoch[0], "spark.sql.streaming.epochId": str(epoch[1])} if epoch else {}
            ),
        }
        for number, epoch in enumerate(epochs)
    ]
    metadata = {"format-version": 2, "current-snapshot-id": current, "snapshots": snapshots}
    (table / "metadata").mkdir(parents=True, exist_ok=True)
    data = json.dumps(metadata).encode()
    (table / "metadata" / name).write_bytes(gzip.compress(data) if ".gz" in name else data)


@pytest.mark.parametrize("name", ["v3.metadata.json", "00003-6af8.metadata.json", "00003-6af8.gz.metadata.json"])
@pytest.mark.parametrize("sink", ["{}", "file:{}", "IcebergTable[{}]", "IcebergTable[lake.db.shops at {}]"])
def test_without_its_catalog_an_iceberg_table_is_known_by_its_newest_metadata(
    tmp_path: Path, name: str, sink: str
) -> None:
    write_iceberg(tmp_path, [(QUERY, 0)], name="v2.metadata.json", current=0)
    write_iceberg(tmp_path, [None, (QUERY, 0), None, (QUERY, 1), (QUERY, 2)], name=name, current=4)

    told = forecast(sink.format(tmp_path), Replay(0, QUERY))

    assert (told.effect, "Snapshot 2 of the table becomes the current one" in told.reason) == (SinkEffect.EXACT, True)


@pytest.mark.parametrize(
    ("says", "current", "replay", "effect", "because"),
    [
        ("rolled back, it has forgotten what came after", 2, Replay(0, QUERY), "EXACT", "holds no batch"),
        ("it has no newer batch", 4, Replay(2, QUERY), "EXACT", "holds no batch"),
        ("others have written since", 5, Replay(0, QUERY), "IRREVERSIBLE", "others have written snapshots 5 since"),
        ("others stay", 5, Replay(0, QUERY, keeps_query_id=False), "DUPLICATE", "not rolled back"),
        ("a person does it", 4, Replay(0, QUERY, roll_back_tables=False), "IRREVERSIBLE", "leaves to you"),
        ("it is empty", None, Replay(0, QUERY), "EXACT", "Snapshot 1 of the table"),
    ],
)
def test_iceberg(tmp_path: Path, says: str, current: int | None, replay: Replay, effect: str, because: str) -> None:
    written = [None, (QUERY, 0), None, (QUERY, 1), (QUERY, 2), None, (QUERY, 3)]
    write_iceberg(tmp_path, written, name="v1.metadata.json", current=current)

    told = forecast(str(tmp_path), replay)

    assert (told.effect, because in told.reason) == (SinkEffect(effect), True), says
    assert effect != "IRREVERSIBLE" or "set_current_snapshot" in told.advice


@pytest.mark.parametrize(
    ("sink", "effect"),
    [("IcebergTable[lake.db.shops]", "UNKNOWN"), ("IcebergTable[lake.db.shops at /nowhere]", "LOSE")],
)
def test_an_iceberg_table_that_cannot_be_found_is_not_promised_anything_of(sink: str, effect: str) -> None:
    assert forecast(sink, Replay(0, QUERY)).effect is SinkEffect(effect)


@pytest.mark.parametrize("case", CASES["named"], ids=lambda case: case["sink"])
def test_other_sinks_are_known_by_their_names(case: dict[str, Any]) -> None:
    told = forecast(case["sink"], replay(case))

    assert told.sink == case["sink"]
    assert told.reason.endswith(".")
    assert_forecast(told, case)


def entry(batch: int, *, by: str = "a") -> SinkEntry:
    line = json.dumps({"path": f"file:///out/part-{by}-{batch}", "action": "add"})
    return SinkEntry(str(batch), f"v1\n{line}".encode())


def write_sink(sink: Path, last: int, *, by: str = "a", first: int = 0) -> None:
    (sink / "_spark_metadata").mkdir(parents=True)
    for batch in range(first, last + 1):
        (sink / "_spark_metadata" / str(batch)).write_bytes(entry(batch, by=by).data)


@pytest.mark.parametrize("case", CASES["file"], ids=lambda case: case["says"])
def test_a_file_sink(tmp_path: Path, case: dict[str, Any]) -> None:
    if "log" in case:
        write_sink(tmp_path / "out", case["log"], by=case.get("by", "a"), first=case.get("first", 0))
    path = f"file:{tmp_path}/out"
    entries = {path: [entry(batch) for batch in range(case["snapshot"])]} if "snapshot" in case else None

    assert_forecast(forecast(f"FileSink[{path}]", replay(case, log_entries=entries)), case)


@pytest.mark.parametrize(("last", "effect"), [(3, "EXACT"), (4, "LOSE")])
def test_a_file_sink_that_the_snapshot_does_not_know_is_not_rolled_back(tmp_path: Path, last: int, effect: str) -> None:
    write_sink(tmp_path, last)

    assert forecast(f"FileSink[{tmp_path}]", Replay(3, QUERY, log_entries={})).effect is SinkEffect(effect)


def test_a_file_sink_that_cannot_be_reached_is_told_apart_from_one_that_loses(tmp_path: Path) -> None:
    entries = {"nowhere://bucket/out": [entry(0)]}

    told = forecast("FileSink[nowhere://bucket/out]", Replay(3, QUERY, log_entries=entries))

    assert told.effect is SinkEffect.UNREACHABLE


def test_a_path_that_spark_looks_for_in_another_file_system_is_no_table_without_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fs.defaultFS is HDFS, and this machine has no such folder: the query would skip the batch that the table has."""
    monkeypatch.setattr(delta, "default_file_system", lambda: "hdfs://name-node")

    with pytest.raises(StorageAccessError, match=rf"Let the query name it in full: hdfs://name-node{tmp_path}"):
        newest_batch(sink_of(f"DeltaSink[{tmp_path}]"), QUERY)
    assert newest_batch(sink_of(f"DeltaSink[file:{tmp_path}]"), QUERY) is None


@pytest.mark.parametrize(
    ("deleted", "new_id", "effect"),
    [
        ((), False, SinkEffect.EXACT),
        (("of day 1/part-0",), False, SinkEffect.IRREVERSIBLE),
        # The example of the Delta protocol.
        (("ab/deletion_vector_d2c639aa-8816-431a-aaf6-d3fe2512ff61.bin",), False, SinkEffect.IRREVERSIBLE),
        (("of day 1/part-0",), True, SinkEffect.DUPLICATE),
        (("part-in-use", "part-2"), False, SinkEffect.EXACT),
    ],
)
def test_a_version_is_restored_only_if_its_files_are_there(
    tmp_path: Path, deleted: Sequence[str], *, new_id: bool, effect: SinkEffect
) -> None:
    files = ("of day 1/part-0", "ab/deletion_vector_d2c639aa-8816-431a-aaf6-d3fe2512ff61.bin", "part-in-use", "part-2")
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    vector = {"storageType": "u", "pathOrInlineDv": "ab^-aqEH.-t@S}K{vb[*k^"}
    file = {"path": "of%20day%201/part-0", "dataChange": True}
    changes: list[list[dict[str, Any]]] = [
        [{"add": file}, {"add": {"path": "part-in-use", "dataChange": True}}],
        [{"remove": file}, {"add": {**file, "deletionVector": vector}}],
        [{"remove": {**file, "deletionVector": vector}}, {"add": {"path": "part-2", "dataChange": True}}],
        # Elsewhere, such as of a shallow clone: the start looks for it.
        [{"remove": {"path": "s3://bucket/part-of-a-clone", "dataChange": False}}],
    ]
    (tmp_path / "_delta_log").mkdir()
    for batch, actions in enumerate(changes):
        commit = [{"txn": {"appId": QUERY, "version": batch}}, *actions]
        (tmp_path / "_delta_log" / f"{batch:020}.json").write_text("\n".join(map(json.dumps, commit)))
    for name in deleted:
        (tmp_path / name).unlink()

    found = sink_of(f"DeltaSink[{tmp_path}]").forecast(Replay(1, QUERY, query_ids=[QUERY], keeps_query_id=not new_id))

    assert found.effect is effect
    assert effect is SinkEffect.EXACT or f"such as {deleted[0]}" in found.reason


@pytest.mark.parametrize(
    ("restored", "effect"),
    [
        ({"version": 1, "timestamp": None}, SinkEffect.LOSE),
        ({"version": None, "timestamp": "2026-11-29 10:00:00"}, SinkEffect.LOSE),
        # The commits with the files that it took back are gone.
        ({"version": None, "timestamp": "2026-11-29 10:00:00", "gone": True}, SinkEffect.LOSE),
    ],
)
def test_a_restore_to_a_time_is_known_by_its_files(
    tmp_path: Path, restored: dict[str, Any], effect: SinkEffect
) -> None:
    log = tmp_path / "_delta_log"
    log.mkdir()

    def commit(version: int, *actions: dict[str, Any]) -> None:
        (log / f"{version:020}.json").write_text("\n".join(map(json.dumps, actions)))

    commit(0, {"commitInfo": {"operation": "CREATE TABLE"}}, {"metaData": {"id": "t"}})
    for batch in range(3):
        of_batch = {"txn": {"appId": QUERY, "version": batch}}
        commit(batch + 1, of_batch, {"add": {"path": f"part-{batch}", "dataChange": True}})
    # An upsert marks rows of a file as deleted.
    vectors = [{"storageType": "u", "pathOrInlineDv": each} for each in "ab"]
    commit(
        4,
        {"remove": {"path": "part-2", "dataChange": True}},
        {"add": {"path": "part-2", "dataChange": True, "deletionVector": vectors[0]}},
    )
    removed = [{"path": "part-1"}, {"path": "part-2", "deletionVector": vectors[0]}]
    by = {name: value for name, value in restored.items() if name != "gone"}
    commit(
        5,
        {"commitInfo": {"operation": "RESTORE", "operationParameters": by}},
        *({"remove": {**each, "dataChange": True}} for each in removed),
    )
    if "gone" in restored:
        for version in range(3):
            (log / f"{version:020}.json").unlink()
    sink = sink_of(f"DeltaSink[{tmp_path}]")

    told = sink.forecast(Replay(2, QUERY, query_ids=[QUERY]))

    assert told.effect is effect
    shown = DeltaLog(open_file_io(str(tmp_path))).newest_batch_shown([QUERY])
    assert shown == ((None, False) if "gone" in restored else (0, True))
