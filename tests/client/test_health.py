"""What is well, what is not, and what nobody can say."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.desired_states import DesiredRecord, UpgradePhase, UpgradeRecord
from dagster_ckpt.catalog.records import (
    SOURCE_IDENTITIES,
    ExecutionStatus,
    Holder,
    SnapshotRecord,
    SnapshotStatus,
    SnapshotTrigger,
    StartCause,
)
from dagster_ckpt.client.health import HealthCheck, judge
from dagster_ckpt.client.health_facts import (
    HealthFacts,
    HealthSettings,
    SourceFacts,
    _retained_ms,
    health_facts,
    sources_of,
)
from dagster_ckpt.config.checkpoint_config import CheckpointConfig
from dagster_ckpt.errors import OptionError
from dagster_ckpt.policies.upgrade import UpgradeMode
from dagster_ckpt.runtime.stall import QueryInactivity
from dagster_ckpt.spark.query.query import TaskCounts
from dagster_ckpt.values.durations import utc_time
from dagster_ckpt.values.modes import DesiredState, SnapshotKind
from tests.support.as_writer import as_writer

CASES = yaml.safe_load((Path(__file__).parent / "health.yaml").read_text(encoding="utf-8"))
NOW_MS = 1_800_000_000_000
MINUTE_MS = 60_000


def snapshot(number: int = 7, *, age: int = 0, problem: str | None = None, **facts: Any) -> SnapshotRecord:
    at_ms = NOW_MS - age * MINUTE_MS
    return SnapshotRecord(
        f"snapshot-{number}", "orders", None, SnapshotKind.CHECKPOINT, number,
        SnapshotStatus.COMPLETED, SnapshotTrigger.PERIODIC, 0,
        batch_id=number, full_bytes=facts.get("bytes"), created_at_ms=at_ms, completed_at_ms=at_ms,
        verified_at_ms=at_ms, verified_problem=problem, properties={"records_behind": facts.get("lags")},
    )  # fmt: skip


def desired(*, upgrade: str | None = None, alert: str | None = None, broken: str | None = None) -> DesiredRecord:
    reason = "as the test says"
    phase = UpgradePhase(upgrade) if upgrade is not None else None
    under_way = UpgradeRecord(phase, "1", "2", UpgradeMode.SAVEPOINT, 1, reason) if phase is not None else None
    return DesiredRecord("orders", None, 3, 2, None, under_way, None, alert, "a test", 1, 1, broken=broken)


def inactivity(
    *, doing: str, minutes: int, is_idle: bool = False, tasks: dict[str, int] | None = None
) -> QueryInactivity:
    return QueryInactivity(doing, is_idle, minutes * MINUTE_MS, None if tasks is None else TaskCounts(**tasks))


def facts_of(case: dict[str, Any]) -> HealthFacts:
    told = dict(case["facts"])
    sources = told.pop("sources", None)
    down_for = told.pop("down_for", None)
    running, heard = told.pop("running", None), told.pop("heard", None)
    return HealthFacts(
        running_since_ms=None if running is None else NOW_MS - running * MINUTE_MS,
        newest=snapshot(**told.pop("snapshot")) if "snapshot" in told else None,
        verified=snapshot(**told.pop("verified")) if "verified" in told else None,
        broken=snapshot(**told.pop("broken")) if "broken" in told else None,
        desired=desired(**told.pop("desired")) if "desired" in told else None,
        inactivity=inactivity(**told.pop("still")) if "still" in told else None,
        heartbeat_at_ms=None if heard is None else NOW_MS - heard * MINUTE_MS,
        down_since_ms=None if down_for is None else NOW_MS - down_for * MINUTE_MS,
        process="process 4711 on ours",
        sources=None if sources is None else [SourceFacts(**source) for source in sources],
        **told,
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['check']}: {case['says']}")
def test_a_stream_is_judged(case: dict[str, Any]) -> None:
    options = CheckpointConfig(**{"interval": MINUTE_MS, **case.get("options", {})}).options
    settings = HealthSettings(**case.get("settings", {}))

    findings = {each.check: each for each in judge(facts_of(case), options, settings, now_ms=NOW_MS)}

    found = findings[HealthCheck(case["check"])]
    assert found.verdict.value == case["verdict"], found.message
    assert case.get("words", "") in found.message
    assert list(findings) == list(HealthCheck)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"max_catch_up_ms": -1}, "max_catch_up_ms is -1"),
        ({"loop_failures": 0}, "loop_failures is 0"),
        ({"failures_to_warn": 0}, "failures_to_warn is 0"),
        ({"failures_to_warn": 4}, "failures_to_warn is 4 and failures_to_fail is 3"),
    ],
)
def test_a_threshold_that_cannot_be_is_reported(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(OptionError, match=told):
        HealthSettings(**wrong)


def test_every_check_has_cases() -> None:
    assert {case["check"] for case in CASES} == set(HealthCheck)


def test_the_sources_of_an_execution_are_read_from_its_figures() -> None:
    reported = [
        {
            "source": "KafkaV2[Subscribe[t]]",
            "behind": 5,
            "read_up_to": '{"t": {"0": 7}}',
            "lags": {"t-0": 5, "t-1": "x"},
        },
        {"source": "FileStreamSource[/in]", "behind": None, "read_up_to": None},
        "nonsense",
    ]
    kafka, files = sources_of({"sources": reported}, {"t": 9, "other": 1}) or []

    assert kafka == SourceFacts("KafkaV2[Subscribe[t]]", 5, ("t",), {"t-0": 5}, retention_ms=9)
    assert files == SourceFacts("FileStreamSource[/in]")
    assert sources_of({}) is None


@pytest.mark.parametrize(
    ("retained_ms", "shortest"),
    [({"a": 5, "b": 3}, 3), ({"a": -1, "b": 3}, 3), ({"a": -1, "b": -1}, -1), ({"a": 5}, None), ({}, None)],
)
def test_the_shortest_retention_of_the_topics_counts(retained_ms: dict[str, int], shortest: int | None) -> None:
    reported = [{"source": "KafkaV2[Subscribe[a,b]]", "read_up_to": '{"a": {"0": 1}, "b": {"0": 1}}'}]

    (source,) = sources_of({"sources": reported}, retained_ms) or []

    assert source.retention_ms == shortest


@pytest.mark.parametrize(
    ("recorded", "shortest"),
    [
        (["3600000"], 3_600_000),
        (["3600000", "2592000000"], 3_600_000),
        (["2592000000", "3600000", "-1"], 3_600_000),
        (["-1", "-1"], -1),
        # A topic that is also limited by size does not tell.
        (["3600000", None], None),
    ],
)
def test_the_shortest_retention_of_a_topic_counts_if_two_clusters_have_it(
    recorded: list[str | None], shortest: int | None
) -> None:
    identities = [
        {"kind": "kafka", "identity": {"topics": "t", **({"retention.ms of topic t": each} if each else {})}}
        for each in recorded
    ]
    execution = cast("Any", SimpleNamespace(recovery={SOURCE_IDENTITIES: identities}))
    assert _retained_ms(execution).get("t") == shortest


def take(catalog: Catalog, number: int, **facts: Any) -> SnapshotRecord:
    begun = as_writer(catalog).snapshots.start(
        snapshot_id=f"snapshot-{number}",
        execution_id=None,
        kind=SnapshotKind.CHECKPOINT,
        number=number,
        trigger=SnapshotTrigger.PERIODIC,
        timeline=facts.pop("timeline", 0),
    )
    return as_writer(catalog).complete(begun.snapshot_id, batch_id=number, **facts)


@pytest.mark.parametrize(("phase", "verdict"), [("STARTING", "ERROR"), ("RESTORING", "ERROR"), ("STABLE", "PASS")])
def test_an_upgrade_whose_new_run_never_starts_is_no_good_health(tmp_path: Path, phase: str, verdict: str) -> None:
    """The definition says RUNNING, so the row says nothing, and the stream was suspended for the upgrade."""
    clock = [NOW_MS]
    catalog = Catalog(f"sqlite:///{tmp_path / 'catalog.db'}", clock=lambda: clock[0])
    catalog.streams.ensure("orders", name="orders", asset_key="orders", options={})
    holder = Holder("one", "run", "ours", 4711, 1, "boot")
    as_writer(catalog).executions.start("one", run_id="run", cause=StartCause.MANUAL, holder=holder)
    as_writer(catalog).executions.running("one", live_directory="/live", recovery={})
    as_writer(catalog).executions.end("one", ExecutionStatus.SUSPENDED, "for the upgrade", settled=True)
    row = catalog.desired_states.ensure("orders", origin="the asset's definition")
    upgrade = UpgradeRecord(UpgradePhase(phase), "1", "2", UpgradeMode.LAST_STATE, 1, "a test")
    catalog.desired_states.advance(row, upgrade=upgrade, alert=None, request_id=None)
    clock[0] += 5 * 60 * MINUTE_MS

    facts = health_facts(catalog, {"orders": HealthSettings()}, now_ms=clock[0])["orders"]
    found = judge(facts, CheckpointConfig(interval=60_000).options, HealthSettings(), now_ms=clock[0])

    assert {each.check: each.verdict for each in found}[HealthCheck.PROGRESS].value == verdict


@pytest.mark.parametrize(
    ("watermark", "verdict", "words"),
    [
        ("1970-01-01T00:00:00.000Z", "PASS", "no watermark was reported"),
        ("2027-01-15T07:59:59.999Z", "PASS", "its watermark is 2027-01-15 07:59:59 UTC"),
        ("9999-12-31T23:59:59.999Z", "WARN", "its watermark is 9999-12-31 23:59:59 UTC, ahead of the clock"),
        # As Spark prints the microseconds of 2023 that were read as milliseconds.
        ("+55840-11-08T22:13:20.000Z", "WARN", "its watermark is 1700000000000000 ms, ahead of the clock"),
        ("55840-11-08T22:13:20.000Z", "WARN", "its watermark is 1700000000000000 ms, ahead of the clock"),
        ("+292278994-08-17T07:12:55.807Z", "WARN", "its watermark is 9223372036854775807 ms, ahead of the clock"),
        ("about noon", "WARN", "its watermark is 'about noon', which cannot be read as a time"),
    ],
)
@pytest.mark.parametrize("is_running", [True, False])
def test_a_watermark_is_judged_as_spark_prints_it(
    tmp_path: Path, watermark: str, verdict: str, words: str, is_running: bool
) -> None:
    with closing(Catalog(f"sqlite:///{tmp_path / 'catalog.db'}", clock=lambda: NOW_MS)) as catalog:
        catalog.streams.ensure("orders", name="orders", asset_key="orders", options={})
        if is_running:
            holder = Holder("one", "run", "ours", 4711, 1, "boot")
            as_writer(catalog).executions.start("one", run_id="run", cause=StartCause.MANUAL, holder=holder)
            as_writer(catalog).executions.running("one", live_directory="/live", recovery={})
            as_writer(catalog).executions.heartbeat("one", {"watermark": watermark})
        else:
            take(catalog, 1, watermark=watermark)
        facts = health_facts(catalog, {"orders": HealthSettings()}, now_ms=NOW_MS)["orders"]

    found = judge(facts, CheckpointConfig(interval=60_000).options, HealthSettings(), now_ms=NOW_MS)

    (finding,) = (each for each in found if each.check is HealthCheck.EVENT_TIME)
    assert (finding.verdict.value, words in finding.message) == (verdict, True), finding.message


def test_a_time_that_no_calendar_has_is_a_number() -> None:
    assert utc_time(NOW_MS) == "2027-01-15 08:00:00 UTC"
    assert [utc_time(far) for far in (10**15, -(10**15), 10**30)] == [
        f"{far} ms" for far in (10**15, -(10**15), 10**30)
    ]


def fail(catalog: Catalog, number: int, reason: str) -> None:
    as_writer(catalog).snapshots.start(
        snapshot_id=f"snapshot-{number}",
        execution_id=None,
        kind=SnapshotKind.CHECKPOINT,
        number=number,
        trigger=SnapshotTrigger.PERIODIC,
        timeline=0,
    )
    as_writer(catalog).snapshots.fail(f"snapshot-{number}", reason)


def test_what_the_catalog_knows_of_a_stream(tmp_path: Path) -> None:
    clock = [NOW_MS]
    catalog = Catalog(f"sqlite:///{tmp_path / 'catalog.db'}", clock=lambda: clock[0])
    for stream_id in ("orders", "idle"):
        catalog.streams.ensure(stream_id, name=stream_id, asset_key=stream_id, options={})
    take(catalog, 1, full_bytes=10)
    clock[0] += 25 * 60 * MINUTE_MS
    take(catalog, 2, full_bytes=20)
    fail(catalog, 3, "an old failure")
    take(catalog, 4, full_bytes=30)
    take(catalog, 5, full_bytes=99, timeline=3)
    fail(catalog, 6, "the disk is full")
    fail(catalog, 7, "the disk is still full")
    catalog.snapshots.verified("snapshot-1", "truncated")
    clock[0] += 1
    catalog.snapshots.verified("snapshot-2", None)

    facts = health_facts(catalog, {"orders": HealthSettings(), "idle": HealthSettings()}, now_ms=clock[0])

    orders = facts["orders"]
    # Snapshot 5 is of a timeline that was left; snapshot 1 is older than the window of a day.
    assert orders.newest is not None
    assert orders.newest.number == 4
    assert orders.verified is not None
    assert (orders.verified.number, orders.verified.verified_problem) == (2, None)
    assert (orders.failures, orders.last_failure, orders.bytes_before) == (2, "the disk is still full", 20)
    assert facts["idle"] == HealthFacts()
    catalog.desired_states.put("idle", DesiredState.SUSPENDED, origin="a person")
    assert health_facts(catalog, {"idle": HealthSettings()}, now_ms=clock[0])["idle"].desired is not None
    catalog.close()


def test_what_a_running_query_was_last_heard_to_do(tmp_path: Path) -> None:
    clock = [NOW_MS]
    catalog = Catalog(f"sqlite:///{tmp_path / 'catalog.db'}", clock=lambda: clock[0])
    catalog.streams.ensure("orders", name="orders", asset_key="orders", options={})

    def known() -> tuple[int | None, str | None, QueryInactivity | None]:
        facts = health_facts(catalog, {"orders": HealthSettings()}, now_ms=clock[0])["orders"]
        return facts.heartbeat_at_ms, facts.process, facts.inactivity

    as_writer(catalog).executions.start(
        "one", run_id="run", cause=StartCause.MANUAL, holder=Holder("one", "run", "ours", 4711, 1, "boot")
    )
    where = "process 4711 on ours"
    # A restore may take hours; then the query is started, which is a sign of life.
    assert known() == (None, where, None)
    clock[0] += 60 * MINUTE_MS
    as_writer(catalog).executions.running("one", live_directory="/live", recovery={})
    assert known() == (clock[0], where, None)
    still = QueryInactivity("Processing new data", is_idle=False, stalled_for_ms=7, tasks=TaskCounts(1, 2, 3, 8))
    as_writer(catalog).executions.heartbeat("one", {"activity": still.as_record()})
    assert known() == (clock[0], where, still)
    catalog.executions.end_unheld("one", ExecutionStatus.FAILED, "as the test says")
    assert known()[0] is None
    catalog.close()


def test_a_loop_is_seen_by_the_runs_that_failed_since_the_newest_snapshot(tmp_path: Path) -> None:
    clock = [NOW_MS]
    catalog = Catalog(f"sqlite:///{tmp_path / 'catalog.db'}", clock=lambda: clock[0])
    catalog.streams.ensure("orders", name="orders", asset_key="orders", options={})

    def loop() -> tuple[int, str | None]:
        facts = health_facts(catalog, {"orders": HealthSettings()}, now_ms=clock[0])["orders"]
        return facts.failed_runs, facts.last_end

    def run_fails(name: str) -> None:
        clock[0] += MINUTE_MS
        holder = Holder(name, "run", "ours", 4711, 1, "boot")
        as_writer(catalog).executions.start(name, run_id="run", cause=StartCause.RESTART_NEW_RUN, holder=holder)
        catalog.executions.end_unheld(name, ExecutionStatus.FAILED, f"{name} failed")

    assert loop() == (0, None)
    run_fails("one")
    run_fails("two")
    assert loop() == (2, "two failed")
    clock[0] += MINUTE_MS
    take(catalog, 1)
    assert loop() == (0, None)
    run_fails("three")
    assert loop() == (1, "three failed")
    clock[0] += 61 * MINUTE_MS
    assert loop() == (0, None)
    catalog.close()
