"""The rows of `streams.pending_restore`: what releases wrote is read, and what is written is read back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.pending_restore import (
    Adopting,
    Emptied,
    Forked,
    PendingRestore,
    ToBatch,
    ToSnapshot,
    ToTakeOver,
    refers_to,
    stored_pending,
)
from dagster_ckpt.errors import CatalogError
from tests.support.as_writer import as_writer, set_stream

_UNDO: dict[str, Any] = {"query_id": "q", "query_ids": ["p", "q"], "may_repeat": True}
_KNOWN: dict[str, Any] = {"query_id": "q", "query_ids": ("p", "q"), "may_repeat": True}
_FORK = {"fork_of": "orders", "batch_id": 4, "sinks": [], "parent_outputs": ["file:/a"], "outputs": ["file:/b"]}
_ADOPTS = {"adopts": "file:/query", "in_place": False, "batch_id": 4}

# As every kind of start wrote them on 2026-11-25, before they had types.
WRITTEN: dict[str, tuple[dict[str, Any], PendingRestore]] = {
    "restore": (
        {"location": "file:/chk-1", "batch_id": 4, **_UNDO},
        ToSnapshot(location="file:/chk-1", batch_id=4, **_KNOWN),
    ),
    "restore of a snapshot without a batch": (
        {"location": "file:/chk-1", "batch_id": None, "query_id": None, "query_ids": [], "may_repeat": False},
        ToSnapshot(location="file:/chk-1"),
    ),
    "rewind": (
        {"batch_id": 0, "sinks": ["FileSink[file:/out]"], **_UNDO},
        ToBatch(batch_id=0, sinks=("FileSink[file:/out]",), **_KNOWN),
    ),
    "replay up to before the first batch": ({"batch_id": -1, "sinks": []}, ToBatch(batch_id=-1)),
    "empty": (
        {"sinks": ["ForeachBatchSink"], "query_id": None, "query_ids": ["q"], "may_repeat": False},
        Emptied(sinks=("ForeachBatchSink",), query_ids=("q",)),
    ),
    "empty without anything": ({}, Emptied()),
    "fork": (
        {**_FORK, "snapshot_id": None},
        Forked(of_stream_id="orders", batch_id=4, parent_outputs=("file:/a",), outputs=("file:/b",)),
    ),
    "fork of a snapshot": (
        {**_FORK, "snapshot_id": "id-1"},
        Forked(
            of_stream_id="orders",
            batch_id=4,
            parent_outputs=("file:/a",),
            outputs=("file:/b",),
            snapshot_id="id-1",
        ),
    ),
    "import": (
        {**_FORK, "imported_from": "file:/chk-1", "of_deployment": "d", "mapped": ["file:/c", "topic"]},
        Forked(
            of_stream_id="orders",
            batch_id=4,
            parent_outputs=("file:/a",),
            outputs=("file:/b",),
            imported_from="file:/chk-1",
            mapped=("file:/c", "topic"),
        ),
    ),
    "adopted": (_ADOPTS, ToTakeOver(directory="file:/query", in_place=False)),
    "adoption begun": (
        {"adopting": "file:/query", "first_number": 3},
        Adopting(directory="file:/query", first_number=3),
    ),
    "adoption begun again": (
        {**_ADOPTS, "adopting": "file:/query", "first_number": 3},
        Adopting(directory="file:/query", first_number=3, before=ToTakeOver(directory="file:/query", in_place=False)),
    ),
}


@pytest.mark.thorough(but="sqlite-*")
@pytest.mark.parametrize("kind", WRITTEN)
def test_a_row_of_before_is_read(catalog: Catalog, kind: str) -> None:
    row, pending = WRITTEN[kind]
    set_stream(catalog, "orders", pending_restore=json.dumps(row))

    assert catalog.streams.get("orders").pending_restore == pending


@pytest.mark.thorough(but="sqlite-*")
@pytest.mark.parametrize("kind", WRITTEN)
def test_what_is_written_is_read_back_and_keeps_the_keys(catalog: Catalog, kind: str) -> None:
    row, pending = WRITTEN[kind]
    writer = as_writer(catalog)

    assert writer.streams.switch_live_directory("/live/1", pending_restore=pending).pending_restore == pending
    writer.streams.note_pending(pending)
    assert catalog.streams.get("orders").pending_restore == pending
    stored = json.loads(json.dumps(stored_pending(pending)))
    assert {name: stored[name] for name in stored.keys() & row.keys()} == {
        name: row[name] for name in stored.keys() & row.keys()
    }


@pytest.mark.parametrize(
    "row",
    [
        {"location": 5},
        {"batch_id": "x", "sinks": 3},
        {"fork_of": 1},
        {"fork_of": "orders"},
        {"adopting": "file:/query"},
        {"adopting": "file:/query", "first_number": 3, "batch_id": "x"},
        {"sinks": [[]]},
    ],
)
def test_a_row_that_is_none_of_them_is_never_taken_for_another(catalog: Catalog, row: dict[str, Any]) -> None:
    set_stream(catalog, "orders", pending_restore=json.dumps(row))

    assert "pending_restore cannot be read" in (catalog.streams.all()[0].broken or "")
    with pytest.raises(CatalogError, match=r"unfinished restore.*set streams.pending_restore to NULL"):
        catalog.streams.get("orders")


def test_a_row_holds_its_snapshot_even_if_the_rest_of_it_cannot_be_read() -> None:
    assert refers_to({"location": "x", "batch_id": []}, snapshot_id="id", location="x")
    assert refers_to({"snapshot_id": "id"}, snapshot_id="id", location=None)
    assert not refers_to({"batch_id": 5}, snapshot_id="id", location=None)
