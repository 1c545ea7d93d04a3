"""What a snapshot says of where it comes from, beyond what its live directory shows."""

from dataclasses import replace
from pathlib import Path

import pytest

from dagster_ckpt.spark.checkpoint_dir.operators import ExecutionMode
from dagster_ckpt.spark.query.plan import PlanDescription, PlanOperator
from dagster_ckpt.spark.query.query import QueryFacts
from dagster_ckpt.stream.snapshotting import provenance
from tests.support.retention_shelf import Shelf
from tests.support.verbs import trigger_savepoint

PLAN = PlanDescription((PlanOperator("Deduplicate", (("id", "string"),)),), "Append")
FILE_SINK = "FileSink[file:/out]"
FACTS = QueryFacts(ExecutionMode.REAL_TIME, PLAN, "4.3.0")


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    made = Shelf.at(tmp_path)
    made.stream = replace(made.stream, code_version="release-42")
    return made


def test_the_running_query_tells_its_plan_its_spark_and_its_mode(shelf: Shelf) -> None:
    found = provenance(shelf.stream, [FILE_SINK], FACTS)

    assert found["plan_fingerprint"] == PLAN.fingerprint
    assert found["plan"] == PLAN.as_record()
    assert found["spark_version"] == "4.3.0"
    assert found["code_version"] == "release-42"
    assert found["mode"] == "REAL_TIME"


def test_the_mode_of_the_running_query_counts_more_than_what_its_logs_look_like(shelf: Shelf) -> None:
    guarantee = provenance(shelf.stream, [FILE_SINK], FACTS)["guarantee"]

    assert isinstance(guarantee, dict)
    assert (guarantee["sink"], guarantee["unaligned"]) == ("AT_LEAST_ONCE", False)
    assert "Only aligned snapshots" in guarantee["why"]


def test_what_is_not_known_is_left_out(shelf: Shelf) -> None:
    assert provenance(replace(shelf.stream, code_version=None), [], QueryFacts()) == {"timeline": 0}


def test_the_first_snapshot_has_no_parent_and_every_other_the_one_before(shelf: Shelf) -> None:
    assert "parent_snapshot_id" not in provenance(shelf.stream, [])

    first = shelf.checkpoint()
    assert provenance(shelf.stream, [])["parent_snapshot_id"] == first.snapshot_id
    second = shelf.savepoint("by-hand")
    assert provenance(shelf.stream, [])["parent_snapshot_id"] == second.snapshot_id


def test_a_savepoint_of_a_stopped_stream_names_its_parent_but_no_code(shelf: Shelf) -> None:
    before = shelf.checkpoint()

    savepoint = trigger_savepoint(shelf.stream, origin="test")

    assert savepoint.properties["parent_snapshot_id"] == before.snapshot_id
    # The code that is loaded now need not be what wrote the live directory.
    assert "code_version" not in savepoint.properties
    assert savepoint.properties["mode"] == "MICRO_BATCH"
