"""The request bill of a stream: from the figures of its checkpoints, by the requests that were counted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from dagster_ckpt.catalog.tables import snapshots
from dagster_ckpt.cli.main import commands
from dagster_ckpt.client import Client
from dagster_ckpt.client.cost import Prices, QueryShape, RequestBill, Requests, StateFiles, request_bill
from dagster_ckpt.errors import NothingCommittedError, OptionError
from tests.support.as_writer import as_writer
from tests.support.golden_stream import STREAM, GoldenStream

HOUR_MS = 3_600_000
BEGAN_MS = 1_800_000_000_000


@pytest.fixture
def golden(tmp_path: Path) -> Iterator[GoldenStream]:
    """Two checkpoints an hour apart, ten batches between them; two partitions of one store, one file source."""
    golden = GoldenStream(tmp_path).make()
    for number, batches in enumerate((range(5, 6), range(6, 16))):
        for batch in batches:
            golden.commit(batch)
        taken = golden.snapshot()
        with golden.stream.catalog.database.writing() as connection:
            is_this = snapshots.c.snapshot_id == taken.snapshot_id
            at_ms = BEGAN_MS + number * HOUR_MS
            connection.execute(
                snapshots.update().where(is_this).values(completed_at_ms=at_ms, incremental_bytes=1_000_000)
            )
    yield golden
    golden.close()


def lay_in_a_bucket(golden: GoldenStream) -> None:
    as_writer(golden.stream.catalog, STREAM).streams.switch_live_directory("s3a://bucket/live/golden/live-1-0")


def by_name(bill: RequestBill) -> dict[str, Requests]:
    return {line.what: line.requests for line in bill.lines}


def test_figures_are_those_of_the_last_day_extrapolated(golden: GoldenStream) -> None:
    bill = request_bill(golden.stream, Prices())
    assert (bill.batches, bill.checkpoints, bill.written_bytes) == (240, 24, 24_000_000)
    lines = by_name(bill)
    assert lines["dagster-ckpt: checkpoints written"] == Requests(put=48, list=24)
    # One other checkpoint is in the folder.
    assert lines["dagster-ckpt: checkpoints deleted"] == Requests(put=24, list=48, get=72, delete=72)
    assert lines["Spark: offset log"].put == 240
    # One store in two partitions: a changelog and a checksum each in every batch, a state snapshot in every tenth.
    assert lines["Spark: state"].put == 2 * (2 * 240 + 3 * 24)
    assert lines["Spark: maintenance of state"] == Requests(list=2 * 1440)
    assert "Spark: log of a file sink" not in lines


def test_what_a_checkpoint_shares_with_a_deleted_one_is_stored_still(golden: GoldenStream) -> None:
    catalog = golden.stream.catalog
    newest, *older = catalog.snapshots.completed(golden.stream.stream_id)
    for each in older[:-1]:
        catalog.snapshots.mark_deleting(each.snapshot_id, lease=None)
    for each in older[:-1]:
        catalog.snapshots.deleted(each.snapshot_id, "a test", lease=None)
    assert request_bill(golden.stream, Prices()).stored_bytes >= (newest.full_bytes or 0)


def test_what_lies_on_a_disk_costs_nothing_and_has_nothing_to_lower(golden: GoldenStream) -> None:
    bill = request_bill(golden.stream, Prices())
    assert bill.usd == 0
    assert bill.savings == ()
    assert sum(line.usd for line in bill.lines) > 0
    _, live, stored = bill.messages()
    assert live.startswith("The live directory lies on a disk")
    assert stored.startswith("The snapshots lie on a disk")


def test_a_live_directory_in_a_bucket_is_paid_and_each_setting_lowers_its_own_part(golden: GoldenStream) -> None:
    lay_in_a_bucket(golden)
    prices = Prices(put=1, get=0)
    bill = request_bill(golden.stream, prices)
    paid = [line for line in bill.lines if not line.what.startswith("dagster-ckpt: checkpoints")]
    assert bill.usd == pytest.approx(sum(line.usd for line in paid))
    savings = {each.setting.split(" (")[0]: each for each in bill.savings}
    assert next(iter(savings)) == "live directory on a disk of the driver and the executors"
    assert bill.savings[0].usd == pytest.approx(bill.usd)
    state = sum(prices.of_requests(by_name(bill)[f"Spark: {what}"]) for what in ("state", "maintenance of state"))
    assert savings["half the partitions of the state"].usd == pytest.approx(state / 2)
    # The state has changelogs already.
    assert not any("changelogCheckpointing" in setting for setting in savings)
    assert [each.usd for each in bill.savings] == sorted((each.usd for each in bill.savings), reverse=True)


def test_without_changelogs_the_bill_proposes_them() -> None:
    with_, without = (
        QueryShape(1000, 200, state, source_logs=0, sink_logs=0, has_checksums=True).a_day()["Spark: state"]
        for state in (StateFiles.CHANGELOGS, StateFiles.ROCKSDB)
    )
    assert Prices().of_requests(with_) < Prices().of_requests(without)


def test_prices_are_parameters_and_wrong_ones_are_refused(golden: GoldenStream) -> None:
    with Client(golden.stream.catalog, storage=str(golden.root / "snapshots")) as client:
        lay_in_a_bucket(golden)
        default = client.cost(STREAM)
        assert client.cost(STREAM, prices={"put": 0.01, "get": 0.0008}).usd == pytest.approx(2 * default.usd)
        for wrong in ({"head": 1.0}, {"put": -1.0}, {"get": float("nan")}):
            with pytest.raises(OptionError, match=r"The price .* is not valid. Give put, get, storage, at least 0"):
                client.cost(STREAM, prices=wrong)


def test_a_stream_without_two_checkpoints_has_no_figures(tmp_path: Path) -> None:
    golden = GoldenStream(tmp_path).make()
    golden.snapshot()
    with pytest.raises(NothingCommittedError, match="has not taken two checkpoints"):
        request_bill(golden.stream, Prices())
    golden.close()


def test_the_command_prints_the_bill(golden: GoldenStream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DAGSTER_CKPT_CATALOG", f"sqlite:///{golden.root / 'catalog.db'}")
    lay_in_a_bucket(golden)
    shown = CliRunner().invoke(commands(), ["cost", STREAM, "--price", "put=0.01"])
    assert shown.exit_code == 0, shown.output
    assert "240 batches, 24 checkpoints" in shown.output
    assert "live directory on a disk" in shown.output
    told = json.loads(CliRunner().invoke(commands(), ["cost", STREAM, "--json"]).stdout)
    assert told["lines"][0]["what"] == "Spark: offset log"
    assert told["prices"]["put"] == 0.005
    wrong = CliRunner().invoke(commands(), ["cost", STREAM, "--price", "put"])
    assert wrong.exit_code == 2
    assert "'put' is not NAME=USD" in wrong.output
