"""The page of the streams that read each other: positions, batches behind, and savepoint sets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from dagster_ckpt.client import Client
from dagster_ckpt.client.savepoint_set import restore_set
from tests.client.test_savepoint_sets import Pipeline
from tests.support.stream_graph import Stage
from tests.ui.conftest import served


@pytest.fixture
def pipeline(tmp_path: Path) -> Iterator[Pipeline]:
    made = Pipeline(tmp_path)
    made.commit(2)
    yield made
    made.catalog.close()


@pytest.fixture
def address(pipeline: Pipeline) -> Iterator[str]:
    with served(pipeline.client, None) as address:
        yield address


def shown(address: str, path: str = "/graph") -> str:
    answer = requests.get(address + path, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.text


def row(text: str, reader: str, upstream: str) -> list[str]:
    """Written, read, behind, as of; without links."""
    for line in re.findall(r"<tr>(.*?)</tr>", text, re.DOTALL):
        cells = [
            re.sub("<[^>]*>", "", cell).strip() for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", line, re.DOTALL)
        ]
        if cells[:2] == [reader, upstream]:
            return cells[2:]
    raise AssertionError(f"{reader} does not read {upstream}: {text}")


def test_positions_and_batches_behind_are_those_of_the_newest_snapshots(pipeline: Pipeline, address: str) -> None:
    pipeline.client.trigger_savepoint_set("orders+", label="june")
    for _ in range(3):
        pipeline.orders.commit()
    pipeline.orders.savepoint()

    text = shown(address)

    written, read, behind, as_of = row(text, "left", "orders")
    assert (written, read, behind) == ("4", "1", "3")
    assert as_of.startswith("savepoint june at batch 1, ")
    assert row(text, "totals", "right")[:3] == ["1", "1", "0"]
    assert "3 behind</text>" in text
    assert "Graph of 4 streams" in text
    assert re.search(r'<th scope="row">june</th>', text)
    assert text.count("savepoint june at batch 1</a>") == 4 + 4


def test_rows_that_were_undone_are_named(pipeline: Pipeline, address: str) -> None:
    alone = pipeline.client.trigger_savepoint_set("orders")
    pipeline.commit()
    pipeline.left.savepoint()
    restore_set(alone, {"orders": pipeline.orders.stream}, origin="a test", report=print)

    text = shown(address)

    assert text.count("has read rows that a rewind of orders has undone") == 1
    assert "undone</text>" in text
    assert row(text, "right", "orders")[1:3] == ["-", "-"]
    assert "no snapshot records it" in text


def test_unknown_positions_say_why(pipeline: Pipeline, address: str, tmp_path: Path) -> None:
    table = Stage(tmp_path, "table", pipeline.totals)
    table.read_as("delta")
    assert "the position in a source of kind delta is not recorded by batch" in shown(address)


def test_only_what_is_connected_with_a_stream(pipeline: Pipeline, address: str, tmp_path: Path) -> None:
    alone = Stage(tmp_path, "alone", catalog=pipeline.catalog)
    alone.commit()
    assert "Graph of 4 streams" in shown(address, "/graph?stream=totals")
    assert "No stream is known to read" in shown(address, "/graph?stream=alone")
    assert "alone" not in shown(address)
    assert 'href="/graph?stream=totals"' in shown(address, "/streams/totals")
    assert requests.get(f"{address}/graph?stream=unknown", timeout=30).status_code == 404


def test_streams_in_a_circle_are_shown(pipeline: Pipeline, address: str) -> None:
    pipeline.orders.upstream = (pipeline.totals,)
    pipeline.orders.execute(str(pipeline.orders.live))
    text = shown(address)
    assert "Graph of 4 streams" in text
    assert row(text, "orders", "totals")


def test_catalog_without_connections_says_so(tmp_path: Path) -> None:
    with Client(f"sqlite:///{tmp_path / 'empty.db'}") as client, served(client, None) as address:
        text = shown(address)
    assert "No stream is known to read the output of another one" in text
    assert "savepoint_set_job" in text
