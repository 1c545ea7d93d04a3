"""Selections of the graph of streams, its line over what the catalog lists, and what a rewind means downstream."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from dagster_ckpt.cli.main import commands
from dagster_ckpt.client.preflight import start_preview
from dagster_ckpt.errors import OptionError, StreamNotFoundError
from dagster_ckpt.recovery.stream_graph import graph_of, line_of, select
from dagster_ckpt.stream.edges import Edge, EdgeKind
from dagster_ckpt.stream.start_from import StartFrom
from tests.support.stream_graph import Stage

EDGES = [Edge(reader, "0", upstream, "sink", EdgeKind.FILES) for reader, upstream in ("ba", "ca", "db", "dc", "ed")]
STREAMS = {name: name for name in "abcdef"} | {"shop/a": "a"}


@pytest.mark.parametrize(
    ("selection", "order"),
    [
        ("a+", "abcde"),
        ("shop/a+", "abcde"),
        ("+d", "abcd"),
        ("+b+", "abcde"),
        ("b", "b"),
        ("c, b", "bc"),
        ("e,+b", "abcde"),
        ("f+", "f"),
    ],
)
def test_selection_is_ordered_upstream_first(selection: str, order: str) -> None:
    found = select(selection, STREAMS, EDGES)

    assert "".join(found.order) == order
    assert all(edge.reader in order and edge.upstream in order for edge in found.edges)


@pytest.mark.parametrize(
    ("selection", "error"), [("nobody+", StreamNotFoundError), ("a++", OptionError), ("", OptionError)]
)
def test_selection_of_nothing_is_refused(selection: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        select(selection, STREAMS, EDGES)


@pytest.fixture
def chain(tmp_path: Path) -> tuple[Stage, Stage, Stage]:
    orders = Stage(tmp_path, "orders")
    daily = Stage(tmp_path, "daily", orders)
    return orders, daily, Stage(tmp_path, "totals", daily)


def test_line_over_retained_snapshots(chain: tuple[Stage, Stage, Stage]) -> None:
    orders, daily, totals = chain
    for stage in chain:
        stage.commit()
        stage.savepoint("first-" + stage.name)
    orders.savepoint("second")
    orders.commit()
    daily.commit()
    daily.savepoint("third")
    totals.commit()
    totals.savepoint("fourth")

    messages = line_of(orders.catalog, graph_of(orders.catalog, "orders+")).messages()

    assert messages == [
        "orders: second at batch 0",
        "daily: first-daily at batch 0",
        "  not third: it has read batch 1 of orders, and second ends at batch 0",
        "totals: first-totals at batch 0",
        "  not fourth: it has read batch 1 of daily, and first-daily ends at batch 0",
    ]


def test_preview_of_a_rewind_names_the_streams_that_have_read_undone_rows(chain: tuple[Stage, Stage, Stage]) -> None:
    orders, daily, totals = chain
    for _ in range(3):
        orders.commit()
    daily.commit()
    totals.commit()
    daily.savepoint("daily-at-2")
    orders.commit()
    orders.commit()
    daily.commit()

    def told(start: str) -> list[str]:
        ahead = start_preview(orders.stream, StartFrom(start))
        return [line.removeprefix("downstream stream ") for line in ahead.messages() if line.startswith("downstream")]

    assert told("batch-2") == [
        "daily has read undone rows: it has read batch 4 of orders, and batch 2 ends at batch 2. Its next start goes "
        "back to daily-at-2 at batch 0 if its sinks can be rolled back; to let it continue, give a reason in "
        "accept_undone",
        "totals has read no undone row: it has read daily up to batch 0",
    ]
    assert told("batch-1") == [
        "daily has read undone rows: it has read batch 4 of orders, and batch 1 ends at batch 1. No snapshot of it is "
        "without them, so its next start keeps them, unless from empty state",
        "totals has read undone rows: it has read batch 0 of daily, and empty state ends at batch -1. No snapshot of "
        "it is without them, so its next start keeps them, unless from empty state",
    ]
    assert told("latest") == []
    accepted = start_preview(orders.stream, StartFrom("batch-2", accept_undone="they only count visits"))
    assert accepted.readers[0].message().endswith("ends at batch 2. It keeps them: they only count visits")


def test_preview_tells_that_a_position_is_unknown(chain: tuple[Stage, Stage, Stage]) -> None:
    orders, daily, _totals = chain
    for _ in range(2):
        orders.commit()
    daily.commit()
    (daily.live / "sources" / "0" / "0").write_text("damaged")

    first, second = start_preview(orders.stream, StartFrom("batch-0")).readers

    assert (first.stream_id, first.has_read_undone) == ("daily", None)
    assert "does not record what it has read" in first.why
    assert (second.stream_id, second.has_read_undone) == ("totals", False)


def test_command_prints_the_line_and_tells_by_its_status_whether_it_is_proven(
    chain: tuple[Stage, Stage, Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    orders, daily, _totals = chain
    monkeypatch.setenv("DAGSTER_CKPT_CATALOG", orders.catalog.database.url.render_as_string())
    orders.commit()
    daily.commit()
    orders.savepoint("one")
    daily.savepoint("two")

    proven = CliRunner().invoke(commands(), ["line", "orders+"])
    (orders.sink / "_spark_metadata" / "0").write_text("damaged")
    daily.savepoint("three")
    doubtful = CliRunner().invoke(commands(), ["line", "orders,daily"])

    assert (proven.exit_code, proven.stdout) == (
        0,
        "orders: one at batch 0\ndaily: two at batch 0\ntotals: empty state\n",
    )
    assert doubtful.exit_code == 3
    assert "not provable: how far daily has read FileSink" in doubtful.stdout
