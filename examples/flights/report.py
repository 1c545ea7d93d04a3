"""The drill's output: the checkpoints it took and the comparison of the results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pendulum
from rich.table import Table

from dagster_ckpt.catalog.records import SnapshotRecord
from examples.flights.compare import TableComparison


def checkpoint_table(snapshots: Iterable[SnapshotRecord]) -> Table:
    """Every snapshot that was taken, oldest first, with its sizes and duration."""
    table = Table(title="Checkpoints and savepoints", title_justify="left")
    for heading in ("stream", "snapshot", "taken", "why", "status"):
        table.add_column(heading, no_wrap=True)
    for heading in ("batch", "rows", "state rows", "full", "incremental", "duration"):
        table.add_column(heading, justify="right", no_wrap=True)
    for snapshot in snapshots:
        table.add_row(
            snapshot.stream_id,
            f"chk-{snapshot.number}" if snapshot.kind == "CHECKPOINT" else f"savepoint {snapshot.label or ''}".strip(),
            pendulum.from_timestamp(snapshot.created_at_ms / 1000).format("HH:mm:ss"),
            snapshot.trigger.value.lower(),
            snapshot.status.value.lower(),
            _number(snapshot.batch_id),
            _number(snapshot.rows),
            _number(snapshot.state_rows),
            _size(snapshot.full_bytes),
            _size(snapshot.incremental_bytes),
            f"{snapshot.duration_ms} ms" if snapshot.duration_ms is not None else "",
        )
    return table


def comparison_table(comparisons: Mapping[str, TableComparison]) -> Table:
    """Each asset's table compared with that of the uninterrupted run."""
    table = Table(title="Against an uninterrupted run of the same feed", title_justify="left")
    table.add_column("asset")
    for heading in ("rows", "rows uninterrupted", "only here", "only uninterrupted"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for asset, comparison in comparisons.items():
        table.add_row(
            asset,
            _number(comparison.rows_left),
            _number(comparison.rows_right),
            _number(comparison.only_left),
            _number(comparison.only_right),
            "[green]equal[/green]" if comparison.equal else "[red]DIFFERENT[/red]",
        )
    return table


def _number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _size(value: int | None) -> str:
    if value is None:
        return ""
    amount = float(value)
    for unit in ("B", "kB", "MB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} GB"
