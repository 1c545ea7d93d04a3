"""What a start does, as a table of facts and plans."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from dagster_ckpt import errors
from dagster_ckpt.catalog.records import SnapshotRecord, SnapshotStatus, SnapshotTrigger, StreamRecord
from dagster_ckpt.catalog.recoveries import PointFailure
from dagster_ckpt.catalog.state_origin import OriginKind, StateOrigin
from dagster_ckpt.errors import OptionError
from dagster_ckpt.recovery.plan import RecoveryFacts, RecoveryKind, UnknownState, skipped_distance
from dagster_ckpt.recovery.planning import plan_recovery
from dagster_ckpt.spark.checkpoint_dir.inspect import LiveState, LiveStatus
from dagster_ckpt.stream.snapshots import is_named
from dagster_ckpt.stream.start_from import StartFrom, StartPoint

PLANS = yaml.safe_load((Path(__file__).parent / "recovery_plans.yaml").read_text())
KINDS = {"cp": "CHECKPOINT", "sp": "SAVEPOINT", "stop": "SAVEPOINT"}
LIVE = {
    "never": None,
    "missing": LiveState(LiveStatus.MISSING, "it was deleted."),
    "broken": LiveState(LiveStatus.BROKEN, "the commits are gone."),
    "empty": LiveState(LiveStatus.EMPTY, "it has no batch yet."),
}


def snapshot(text: str) -> tuple[SnapshotRecord, bool]:
    """A snapshot, and whether it is on the current timeline."""
    match = re.fullmatch(r"(left:)?(cp|sp|stop)(\d+)@(\d+)(?: (\d+) rows after (\d+) ms)?( broken)?", text)
    assert match, text
    left, kind, number, batch, rows, after_ms, broken = match.groups()
    name = f"chk-{number}" if kind == "cp" else f"savepoint-{number}"
    record = SnapshotRecord(
        snapshot_id=f"id-{kind}{number}",
        stream_id="flights",
        execution_id="execution",
        kind=KINDS[kind],
        number=int(number),
        status=SnapshotStatus.COMPLETED,
        trigger=SnapshotTrigger.STOP if kind == "stop" else SnapshotTrigger.PERIODIC,
        timeline=0 if left else 1,
        location=f"file:///ckpt/flights/{name}",
        batch_id=int(batch),
        label=None if kind == "cp" else f"{kind}{number}",
        rows=int(rows) if rows else None,
        completed_at_ms=int(after_ms) if after_ms else None,
        verified_problem="data object 1 is truncated" if broken else None,
    )
    return record, not left


def origin(text: str) -> StateOrigin | None:
    """Where state came from: see the table."""
    if text == "nothing":
        return StateOrigin.empty(None)
    if text in ("fork", "unknown"):
        return StateOrigin(OriginKind.FORK, batch_id=4) if text == "fork" else None
    if text.startswith("live-"):
        directory, _, before = text.partition(" of ")
        name, _, batch = directory.partition("@")
        return StateOrigin.of_directory(f"file:///live/flights/{name}", int(batch), origin(before) if before else None)
    record, _ = snapshot(text)
    return StateOrigin(
        OriginKind.SNAPSHOT,
        batch_id=record.batch_id,
        snapshot_id=record.snapshot_id,
        location=record.location,
        snapshot_kind=record.kind,
        snapshot_number=record.number,
    )


def failure(ordinal: int, text: str) -> PointFailure:
    point, _, error = text.rpartition(" ")
    return PointFailure(
        ordinal, "execution", point, error.rstrip("!"), "as the test says", error.endswith("!"), None, ordinal
    )


def facts(case: dict[str, Any]) -> RecoveryFacts:
    listed = [snapshot(text) for text in case.get("snapshots", [])]
    where, _, batch = case["live"].partition("@")
    live = LIVE[where] if where in LIVE else LiveState(LiveStatus.GOOD, "it is whole.", int(batch))
    stream = StreamRecord(
        stream_id="flights",
        name="flights",
        asset_key="flights",
        options={},
        live_directory=None if live is None else "file:///live/flights/live-1",
        live_generation=0 if live is None else 1,
        timeline=1,
        restored_snapshot_id=None,
        preferred_savepoint_id=f"id-{case['preferred']}" if "preferred" in case else None,
        pending_restore=case.get("pending"),
        next_number=100,
        created_at_ms=0,
        updated_at_ms=0,
        origin=None if live is None else origin(case.get("origin", "nothing")),
    )
    return RecoveryFacts(
        stream=stream,
        live=live,
        snapshots=[record for record, current in listed if current],
        all_snapshots=[record for record, _ in listed],
        last_batch=case.get("last_batch"),
        has_run=case.get("has_run", live is not None),
        predecessor_ended=case.get("predecessor_ended", True),
        prefer_checkpoint=case.get("prefer_checkpoint", False),
        start_from=StartFrom.parse(
            case.get("start_from", "latest"),
            new_query_id=case.get("new_query_id", False),
            claim_mode=case.get("claim_mode", "NO_CLAIM"),
            discard_state=case.get("discard_state", False),
        ),
        retained=case.get("retained", ()),
        failures=[failure(ordinal, text) for ordinal, text in enumerate(case.get("failed", []))],
        origin_batch_is_retained=case.get("retains", False),
        origin_snapshot_is_gone=case.get("origin_snapshot_is_gone", False),
        is_automatic=case.get("is_automatic", False),
        depth=case.get("depth"),
        unknown=UnknownState(case.get("unknown_directories", ()), case.get("unknown_snapshots", ())),
    )


@pytest.mark.parametrize("case", [case for case in PLANS if "does" in case], ids=lambda case: case["says"])
def test_a_start_does_what_the_table_says(case: dict[str, Any]) -> None:
    plan = plan_recovery(facts(case))

    assert plan.kind is RecoveryKind(case["does"])
    assert (plan.snapshot and plan.snapshot.snapshot_id) == (f"id-{case['snapshot']}" if "snapshot" in case else None)
    assert (plan.from_batch, plan.to_batch) == (case.get("from"), case.get("to"))
    computed = max(0, case.get("from", 0) - case.get("to", case.get("from", 0)))
    assert plan.rewound_batches == case.get("rewound", computed)
    assert plan.reason
    assert [words for words in case.get("reason", []) if words not in plan.reason] == []
    assert plan.reason == case.get("told", plan.reason)
    assert plan.directory == case.get("directory")
    assert [point.name for point in plan.passed] == case.get("passed", [])
    record = plan.as_record()
    assert (record.pop("point") is None) == (plan.kind is RecoveryKind.START_EMPTY)
    assert [point["name"] for point in record.pop("passed")] == case.get("passed", [])
    assert record.pop("rewound_batches") == plan.rewound_batches
    assert record.pop("rewound_ms") == plan.rewound_ms
    assert record == {
        "kind": case["does"],
        "reason": plan.reason,
        "snapshot_id": f"id-{case['snapshot']}" if "snapshot" in case else None,
        "from_batch": case.get("from"),
        "to_batch": case.get("to"),
        "new_query_id": case.get("new_query_id", False),
        "claims": case.get("claim_mode") == "CLAIM",
    }


@pytest.mark.parametrize("case", [case for case in PLANS if "refuses" in case], ids=lambda case: case["says"])
def test_a_start_that_would_lose_something_is_refused_in_words_that_help(case: dict[str, Any]) -> None:
    with pytest.raises(getattr(errors, case["refuses"])) as refusal:
        plan_recovery(facts(case))

    assert [word for word in case.get("words", []) if word not in str(refusal.value)] == []
    assert str(refusal.value) == case.get("told", str(refusal.value))


def test_the_table_has_a_row_for_every_kind_of_plan() -> None:
    # A start makes a replay of a restore: see test_replay_with_spark.py.
    kinds = {kind.value for kind in RecoveryKind} - {RecoveryKind.REPLAY.value}
    assert {case["does"] for case in PLANS if "does" in case} == kinds


@pytest.mark.parametrize("point", [point for point in StartPoint if point not in (StartPoint.NAMED, StartPoint.BATCH)])
def test_the_words_for_starting_points_are_read_in_any_case_and_spacing(point: StartPoint) -> None:
    start_from = StartFrom.parse(f"  {point.value.upper()} ")

    assert start_from == StartFrom(point)
    assert StartFrom.parse(str(start_from)) == start_from


@pytest.mark.parametrize(("text", "batch"), [("batch-0", 0), (" BATCH-012 ", 12)])
def test_a_batch_is_named_by_its_number(text: str, batch: int) -> None:
    start_from = StartFrom.parse(text)

    assert (start_from.point, start_from.batch_id) == (StartPoint.BATCH, batch)
    assert StartFrom.parse(str(start_from)) == start_from


REFUSALS = {
    "nothing": "start_from is empty. Give one of latest, latest-checkpoint, latest-savepoint, preferred-savepoint, "
    "empty, batch-<n>, or the id, number (chk-7), label or location of a snapshot.",
    "a new query": "new_query_id is for a start from a snapshot or a batch, but start_from is {word!r}: latest "
    "continues the same query, and empty always starts a new one. Leave it out.",
    "a claim": "claim_mode CLAIM is for a start from a snapshot, but start_from is {word!r}, which names none. Name "
    "the snapshot that the stream should own, or leave claim_mode out.",
}


@pytest.mark.parametrize("word", ["latest", "Empty"])
def test_a_new_query_id_is_only_for_going_back(word: str) -> None:
    with pytest.raises(OptionError) as refusal:
        StartFrom.parse(f" {word}", new_query_id=True)

    assert str(refusal.value) == REFUSALS["a new query"].format(word=word)


@pytest.mark.parametrize("word", ["latest", "empty", "Batch-3"])
def test_only_a_snapshot_is_claimed(word: str) -> None:
    with pytest.raises(OptionError) as refusal:
        StartFrom.parse(word, claim_mode="CLAIM")

    assert str(refusal.value) == REFUSALS["a claim"].format(word=word)


@pytest.mark.parametrize(
    "name",
    ["batch-", "batch-x", "batch", "chk-7", "before the Migration", "s3://bucket/sp-1/_metadata", "latest-"],
)
def test_anything_else_is_the_name_of_a_snapshot(name: str) -> None:
    start_from = StartFrom.parse(f" {name}\n")

    assert start_from == StartFrom(StartPoint.NAMED, name)
    assert str(start_from) == name


@pytest.mark.parametrize("nothing", ["", "   ", "\n\t"])
def test_an_empty_starting_point_is_refused_with_the_words_there_are(nothing: str) -> None:
    with pytest.raises(OptionError) as refusal:
        StartFrom.parse(nothing)

    assert str(refusal.value) == REFUSALS["nothing"]


@pytest.mark.parametrize(
    ("newer", "older", "told"),
    [
        ((9, 250, 61_000), (4, 9, 1_000), "5 batches, 250 rows, PT1M"),
        ((9, 1_250, 4_000), (9, None, 4_000), "0 batches, 1,250 rows, PT0S"),
        ((None, 1, 4_000), (4, None, None), "an unknown number of batches, 1 rows, time unknown"),
        ((9, None, None), (None, 7, 4_000), "an unknown number of batches, rows unknown, time unknown"),
    ],
)
def test_the_distance_is_reported_in_batches_rows_and_time(
    newer: tuple[int | None, ...], older: tuple[int | None, ...], told: str
) -> None:
    template, _ = snapshot("cp1@0")

    def at(name: str, batch: int | None, rows: int | None, completed_at_ms: int | None) -> SnapshotRecord:
        return replace(template, snapshot_id=name, batch_id=batch, rows=rows, completed_at_ms=completed_at_ms)

    snapshots = [at("newer", *newer), at("older", *older)]

    assert str(skipped_distance(snapshots, snapshots[1])) == told
    assert skipped_distance(snapshots, snapshots[0]) is None


def test_a_snapshot_whose_place_is_not_known_has_only_its_other_names() -> None:
    placed = replace(snapshot("sp1@0")[0], location="file:///ckpt/MAX/", label="MAX")
    lost = replace(placed, location=None)

    assert is_named(placed, "file:///ckpt/MAX")
    assert is_named(placed, "/ckpt/MAX/_metadata")
    assert is_named(lost, "MAX/")
    assert not is_named(lost, "XXXX")
    assert not is_named(lost, "MA")


@pytest.mark.parametrize("word", ["latest", "chk-7", "batch-3"])
def test_only_an_empty_start_is_confirmed(word: str) -> None:
    with pytest.raises(OptionError, match=f"discard_state confirms an empty start, but start_from is '{word}'"):
        StartFrom.parse(word, discard_state=True)


def test_where_state_came_from_is_kept_as_plain_data() -> None:
    of_snapshot = origin("sp1@4")
    nested = StateOrigin.of_directory("/live-2", 6, StateOrigin.of_directory("/live-1", 5, of_snapshot))

    # However often a directory was made from another one, only the last of them and the first state are kept.
    assert nested.earlier == of_snapshot
    assert StateOrigin.of_record(nested.as_record()) == nested
    for broken in ({}, {"kind": "EMPTY", "batch_id": "x"}, {"kind": "EMPTY", "what": 1}):
        with pytest.raises(ValueError, match=r"."):
            StateOrigin.of_record(broken)
