"""To which snapshot an Iceberg table is rolled back: a pure function of its snapshots."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from dagster_ckpt.errors import LiveDirectoryError
from dagster_ckpt.sinks.iceberg_history import EMPTIED, FENCE, IcebergHistory, IcebergPlan, history_in
from dagster_ckpt.sinks.sink import RollBack

CASES = yaml.safe_load(Path(__file__).with_name("iceberg_roll_backs.yaml").read_text())
# The log of main tells nothing of what was committed within a minute of its first entry.
APART_MS = 100_000
WRITERS: dict[str, dict[str, str]] = {
    "other": {"operation": "append", "changed-partition-count": "1"},
    "compacted": {"operation": "replace", "changed-partition-count": "1"},
    "fence": {"operation": "append", FENCE: "token"},
    "emptied by hand": {"operation": "delete", "total-records": "0"},
    "emptied": {"operation": "delete", EMPTIED: "token"},
}


def history(case: dict[str, Any]) -> IcebergHistory:
    snapshots = []
    for at, (number, parent, writer, *batch) in enumerate(case["log"]):
        summary = WRITERS.get(writer) or {
            "operation": "append",
            "spark.sql.streaming.queryId": writer,
            "spark.sql.streaming.epochId": str(batch[0]),
        }
        snapshots.append(
            {"snapshot-id": number, "parent-snapshot-id": parent, "timestamp-ms": at * APART_MS, "summary": summary}
        )
    current = case.get("current", snapshots[-1]["snapshot-id"] if snapshots else -1)
    refs = {name: {"snapshot-id": head, "type": "branch"} for name, head in case.get("branches", {}).items()}
    refs |= {"main": {"snapshot-id": current, "type": "branch"}} if current != -1 else {}
    made_ms = {each["snapshot-id"]: each["timestamp-ms"] for each in snapshots}
    was_current = case.get("was_current", [current] if current != -1 else [])
    # A snapshot that is committed on main becomes current at its own time; [4, 6]: the fourth one, later.
    since = {
        index: (each, made_ms[each]) if isinstance(each, int) else (each[0], each[1] * APART_MS)
        for index, each in enumerate(was_current)
    }
    log = [{"snapshot-id": number, "timestamp-ms": at_ms} for number, at_ms in since.values()]
    metadata = {"current-snapshot-id": current, "snapshots": snapshots, "refs": refs, "snapshot-log": log}
    return history_in(json.dumps(metadata), "the table")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["says"])
def test_a_table_goes_back_exactly_as_far_as_the_stream_has_written(case: dict[str, Any]) -> None:
    query_id, batch_id = case["back"]

    found = history(case).plan(RollBack(batch_id, query_id=query_id, query_ids=["a", "b"]))

    target = case.get("moves_to")
    assert found == IcebergPlan(
        moves=target is not None,
        snapshot_id=case.get("head", None if target == "nothing" else target),
        others=tuple(case.get("others", ())),
        reaches_back=case.get("reaches_back", True),
        branch=case.get("branch"),
    )


def test_the_newest_batch_counts_on_each_timeline() -> None:
    left = history({"log": [[1, None, "a", 0], [2, 1, "a", 1], [3, 1, "b", 1]]})

    assert [left.last_batch(query) for query in ("a", "b", "c")] == [1, 1, None]


def test_metadata_that_cannot_be_parsed_is_told_with_its_place() -> None:
    with pytest.raises(LiveDirectoryError, match="v1 is not Iceberg metadata"):
        history_in("{", "v1")
