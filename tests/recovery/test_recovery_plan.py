"""What a start does, as a table of facts and plans."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from dagster_ckpt import errors
from dagster_ckpt.catalog.journal import PointFailure
from dagster_ckpt.catalog.pending_restore import read_pending
from dagster_ckpt.catalog.records import (
    OriginKind,
    SnapshotRecord,
    SnapshotStatus,
    SnapshotTrigger,
    StateOrigin,
    StreamRecord,
)
from dagster_ckpt.errors import OptionError
from dagster_ckpt.recovery.plan import RecoveryFacts, RecoveryKind, Restore, Rewind, UnknownState, skipped_distance
from dagster_ckpt.recovery.planning import plan_recovery, with_newer_point
from dagster_ckpt.recovery.recovery_points import point_of_origin, snapshot_of_origin
from dagster_ckpt.spark.checkpoint_dir.inspect import LiveState, LiveStatus
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.restore import Donor, DonorCheck
from dagster_ckpt.stream.snapshots import is_named
from dagster_ckpt.stream.start_from import SourceOffsets, StartFrom, StartPoint
from dagster_ckpt.values.modes import SnapshotKind

PLANS = yaml.safe_load((Path(__file__).parent / "recovery_plans.yaml").read_text())
LIVE_DIRECTORY = "file:///live/flights/live-1"
KINDS = {"cp": SnapshotKind.CHECKPOINT, "sp": SnapshotKind.SAVEPOINT, "stop": SnapshotKind.SAVEPOINT}
LIVE = {
    "never": None,
    "missing": LiveState(LiveStatus.MISSING, "it was deleted."),
    "broken": LiveState(LiveStatus.BROKEN, "the commits are gone."),
    "empty": LiveState(LiveStatus.EMPTY, "it has no batch yet."),
}


def snapshot(text: str) -> tuple[SnapshotRecord, bool]:
    """A snapshot, and whether it is on the current timeline."""
    match = re.fullmatch(r"(left:)?(cp|sp|stop)(\d+)@(\d+|unknown)(?: (\d+) rows after (\d+) ms)?( broken)?", text)
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
        batch_id=None if batch == "unknown" else int(batch),
        label=None if kind == "cp" else f"{kind}{number}",
        rows=int(rows) if rows else None,
        created_at_ms=int(after_ms) if after_ms else 0,
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
    if text.startswith("adopted "):
        return replace(of_snapshot(text.removeprefix("adopted ")), kind=OriginKind.ADOPTED, directory=LIVE_DIRECTORY)
    if text.startswith("live-"):
        directory, _, before = text.partition(" of ")
        name, _, batch = directory.partition("@")
        return StateOrigin.of_directory(f"file:///live/flights/{name}", int(batch), origin(before) if before else None)
    return of_snapshot(text)


def of_snapshot(text: str) -> StateOrigin:
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
        live_directory=None if live is None else LIVE_DIRECTORY,
        live_generation=0 if live is None else 1,
        timeline=1,
        restored_snapshot_id=None,
        preferred_savepoint_id=f"id-{case['preferred']}" if "preferred" in case else None,
        pending_restore=read_pending(case["pending"]) if "pending" in case else None,
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
        start_from=StartFrom(
            case.get("start_from", "latest"),
            new_query_id=case.get("new_query_id", False),
            claim_mode=case.get("claim_mode", "NO_CLAIM"),
            discard_state=case.get("discard_state", False),
            source_offsets=case.get("source_offsets", ""),
        ),
        retained=case.get("retained", ()),
        failures=[failure(ordinal, text) for ordinal, text in enumerate(case.get("failed", []))],
        origin_batch_is_retained=case.get("retains", False),
        origin_snapshot_is_gone=case.get("origin_snapshot_is_gone", False),
        is_automatic=case.get("is_automatic", False),
        depth=case.get("depth"),
        ended_in_order=case.get("ended_in_order", False),
        unknown=UnknownState(case.get("unknown_directories", ()), case.get("unknown_snapshots", ())),
        last_sign_ms=case.get("last_sign_ms"),
    )


def point(case: dict[str, Any]) -> str | None:
    """The name under which a failure at the point of a plan is remembered."""
    live = "" if case["live"] == "never" else LIVE_DIRECTORY
    match RecoveryKind(case["does"]):
        case RecoveryKind.RESTORE:
            return f"snapshot:id-{case['snapshot']}"
        case RecoveryKind.REWIND:
            return f"batch:{case['to']}:{case.get('directory', live)}"
        case RecoveryKind.FINISH_RESTORE:
            return f"finish:{live}"
        case RecoveryKind.START_EMPTY:
            return None
        case _:
            return f"live:{live}"


def donor(case: dict[str, Any]) -> Donor | None:
    """A start from a named point links files of an intact live directory and, by default, compares their digests."""
    is_whole = case["live"].startswith("good") and case.get("start_from", "latest") != "latest"
    if case["does"] != "RESTORE" or not is_whole:
        return None
    return Donor(LiveDirectory(LIVE_DIRECTORY), DonorCheck(case.get("compares", "DIGEST")))


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
    assert plan.point == point(case)
    assert (plan.donor if isinstance(plan, Restore) else None) == donor(case)
    assert plan.rewound_ms == case.get("rewound_ms")
    chosen = plan.source_offsets if isinstance(plan, Restore | Rewind) else None
    assert chosen == (SourceOffsets.parse(case["source_offsets"]) if "source_offsets" in case else None)
    passed = plan.passed if isinstance(plan, Restore | Rewind) else ()
    assert [point.name for point in passed] == case.get("passed", [])
    record = plan.as_record()
    assert record.pop("point") == point(case)
    assert record.pop("source_offsets", None) == case.get("source_offsets")
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


@pytest.mark.parametrize(
    ("case", "then", "whole"),
    [
        ({"prefer_checkpoint": True, "snapshots": ["sp4@8", "sp3@6", "cp2@5", "cp1@3"]}, "snapshot:id-sp4", True),
        ({"prefer_checkpoint": True, "snapshots": ["sp4@8 broken", "sp3@6", "cp2@5"]}, "snapshot:id-sp3", True),
        ({"snapshots": ["cp2@5", "cp1@3"], "origin": "live-0@7", "retains": True}, None, False),
        ({"snapshots": ["cp2@5", "sp1@3"]}, None, False),
        ({"prefer_checkpoint": True, "snapshots": ["sp2@7", "cp1@5"], "depth": 1}, None, False),
        ({"snapshots": ["sp2@7", "cp1@5"], "start_from": "chk-1"}, None, False),
        ({"live": "good@9", "snapshots": ["sp2@7"]}, None, False),
    ],
)
def test_a_point_whose_input_is_gone_gives_way_to_a_newer_one_only(
    case: dict[str, Any], then: str | None, whole: bool
) -> None:
    known = facts({"live": "missing", "last_batch": 9, "is_automatic": True, **case})

    newer = with_newer_point(known, plan_recovery(known), "Source 0: 3.json is not there.")

    assert (newer is not None) is whole
    if newer is not None:
        plan = plan_recovery(newer)
        assert plan.point == then
        assert isinstance(plan, Restore)
        assert plan.passed[0].name.startswith("chk-2")
        assert plan.passed[0].why == "its input is gone. Source 0: 3.json is not there."
        assert plan.passed[0].why in plan.reason


def test_the_table_has_a_row_for_every_kind_of_plan() -> None:
    # A start makes a replay of a restore: see test_replay_with_spark.py.
    kinds = {kind.value for kind in RecoveryKind} - {RecoveryKind.REPLAY.value}
    assert {case["does"] for case in PLANS if "does" in case} == kinds


@pytest.mark.parametrize("point", [point for point in StartPoint if point not in (StartPoint.NAMED, StartPoint.BATCH)])
def test_the_words_for_starting_points_are_read_in_any_case_and_spacing(point: StartPoint) -> None:
    start_from = StartFrom(f"  {point.value.upper()} ")

    assert start_from == StartFrom(point.value)
    assert StartFrom(str(start_from)) == start_from


@pytest.mark.parametrize(("text", "batch"), [("batch-0", 0), (" BATCH-012 ", 12)])
def test_a_batch_is_named_by_its_number(text: str, batch: int) -> None:
    start_from = StartFrom(text)

    assert (start_from.point, start_from.batch_id) == (StartPoint.BATCH, batch)
    assert StartFrom(str(start_from)) == start_from


REFUSALS = {
    "nothing": "start_from is empty. Give one of latest, latest-checkpoint, latest-savepoint, preferred-savepoint, "
    "empty, batch-<n>, or the id, number (chk-7), label or location of a snapshot.",
    "a new query": "new_query_id is for a start from a snapshot or a batch, but start_from is {word!r}: latest "
    "continues the same query, and empty always starts a new one. Leave it out.",
    "a claim": "claim_mode CLAIM is for a start from a snapshot, but start_from is {word!r}, which names none. Name "
    "the snapshot that the stream should own, or leave claim_mode out.",
    "a confirmation": "discard_state confirms an empty start, but start_from is {word!r}, which keeps state. Leave it "
    "out, or start from empty.",
    "offsets": "source_offsets is for a start from a snapshot or a batch, but start_from is {word!r}. Name the newest "
    "batch (batch-<n>) to keep the state and continue elsewhere in the source.",
    "partitions": "state_partitions rewrites existing state, but start_from is 'empty', which keeps none. Leave it "
    "out, and set spark.sql.shuffle.partitions for the new state.",
}


@pytest.mark.parametrize("word", ["latest", "Empty"])
def test_a_new_query_id_is_only_for_going_back(word: str) -> None:
    with pytest.raises(OptionError) as refusal:
        StartFrom(f" {word}", new_query_id=True)

    assert str(refusal.value) == REFUSALS["a new query"].format(word=word.lower())


@pytest.mark.parametrize("word", ["latest", "empty", "Batch-3"])
def test_only_a_snapshot_is_claimed(word: str) -> None:
    with pytest.raises(OptionError) as refusal:
        StartFrom(word, claim_mode="CLAIM")

    assert str(refusal.value) == REFUSALS["a claim"].format(word=word.lower())


@pytest.mark.parametrize(
    "name",
    ["batch-", "batch-x", "batch", "chk-7", "before the Migration", "s3://bucket/sp-1/_metadata", "latest-"],
)
def test_anything_else_is_the_name_of_a_snapshot(name: str) -> None:
    start_from = StartFrom(f" {name}\n")

    assert start_from == StartFrom(name)
    assert str(start_from) == name


@pytest.mark.parametrize("nothing", ["", "   ", "\n\t"])
def test_an_empty_starting_point_is_refused_with_the_words_there_are(nothing: str) -> None:
    with pytest.raises(OptionError) as refusal:
        StartFrom(nothing)

    assert str(refusal.value) == REFUSALS["nothing"]


@pytest.mark.parametrize(
    ("newer", "older", "told"),
    [
        ((9, 250, 61_000), (4, 9, 1_000), "5 batches, 250 rows, 1 min"),
        ((9, 1_250, 4_000), (9, None, 4_000), "0 batches, 1,250 rows, 0 ms"),
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
    with pytest.raises(OptionError) as refusal:
        StartFrom(word, discard_state=True)

    assert str(refusal.value) == REFUSALS["a confirmation"].format(word=word.lower())


@pytest.mark.parametrize("word", ["latest", "empty"])
def test_a_start_that_goes_nowhere_else_continues_where_its_sources_stopped(word: str) -> None:
    with pytest.raises(OptionError) as refusal:
        StartFrom(word, source_offsets='{"orders": {"0": 124}}')

    assert str(refusal.value) == REFUSALS["offsets"].format(word=word.lower())


def test_source_offsets_are_kept_with_times_in_utc() -> None:
    start_from = StartFrom("batch-3", source_offsets='{"orders": "2026-11-23T09:00:00+02:00"}')

    assert start_from.source_offsets == '{"orders": "2026-11-23T07:00:00Z"}'


@pytest.mark.parametrize("word", ["latest", "chk-7", "batch-3"])
def test_state_that_is_kept_may_be_rewritten_to_another_number_of_partitions(word: str) -> None:
    assert StartFrom(word, state_partitions=8).state_partitions == 8
    with pytest.raises(OptionError, match="state_partitions is 0"):
        StartFrom(word, state_partitions=0)


def test_an_empty_start_has_no_state_to_rewrite() -> None:
    with pytest.raises(OptionError) as refusal:
        StartFrom("empty", state_partitions=8)

    assert str(refusal.value) == REFUSALS["partitions"]


def test_a_location_that_contains_a_password_is_refused_without_repeating_it() -> None:
    with pytest.raises(OptionError, match=r"^start_from is ") as refusal:
        StartFrom("s3://me:hunter2@bucket/chk-7")

    assert "hunter2" not in str(refusal.value)


@pytest.mark.parametrize(
    ("came_from", "name"),
    [
        (None, None),
        (StateOrigin.empty("/live-1"), None),
        (StateOrigin(OriginKind.SNAPSHOT, batch_id=4, snapshot_id="id"), "snapshot:id"),
        (StateOrigin(OriginKind.SNAPSHOT, batch_id=4, directory="/live-1"), None),
        (StateOrigin.of_directory("/live-1", 5, None), "batch:5:/live-1"),
        (StateOrigin.of_directory("/live-1", None, None), None),
        (StateOrigin(OriginKind.DIRECTORY, batch_id=5), None),
        (StateOrigin(OriginKind.ADOPTED, batch_id=4, snapshot_id="id", directory="/adopted"), None),
        (StateOrigin(OriginKind.FORK, batch_id=4), None),
    ],
)
def test_what_a_directory_was_made_from_is_remembered_as_a_point(
    came_from: StateOrigin | None, name: str | None
) -> None:
    assert point_of_origin(came_from) == name


def test_a_snapshot_that_a_state_came_from_is_known_without_the_catalog() -> None:
    stream = facts({"live": "good@4"}).stream
    came_from = StateOrigin(
        OriginKind.SNAPSHOT,
        batch_id=4,
        snapshot_id="id",
        location="/ckpt/chk-7",
        snapshot_kind=SnapshotKind.CHECKPOINT,
        snapshot_number=7,
        query_id="query",
    )
    known = SnapshotRecord(
        snapshot_id="id",
        stream_id="flights",
        execution_id=None,
        kind=SnapshotKind.CHECKPOINT,
        number=7,
        status=SnapshotStatus.COMPLETED,
        trigger=SnapshotTrigger.UNKNOWN,
        timeline=1,
        location="/ckpt/chk-7",
        batch_id=4,
        query_id="query",
    )

    assert snapshot_of_origin(stream, came_from) == known
    assert snapshot_of_origin(stream, replace(came_from, snapshot_kind=None)) == replace(
        known, kind=SnapshotKind.SAVEPOINT
    )
    assert snapshot_of_origin(stream, replace(came_from, location=None)) is None
    assert snapshot_of_origin(stream, replace(came_from, snapshot_id=None)) is None


def test_where_state_came_from_is_kept_as_plain_data() -> None:
    of_snapshot = origin("sp1@4")
    nested = StateOrigin.of_directory("/live-2", 6, StateOrigin.of_directory("/live-1", 5, of_snapshot))

    # However often a directory was made from another one, only the last of them and the first state are kept.
    assert nested.earlier == of_snapshot
    assert StateOrigin.of_record(nested.as_record()) == nested
    for broken in ({}, {"kind": "EMPTY", "batch_id": "x"}, {"kind": "EMPTY", "what": 1}):
        with pytest.raises(ValueError, match=r"."):
            StateOrigin.of_record(broken)
