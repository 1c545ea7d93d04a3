"""What the drill prints: the checkpoints it took and the comparison it made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pendulum
from rich.table import Table

from dagster_ckpt.catalog.records import ImageRecord
from examples.flights.compare import TableComparison


def checkpoint_table(images: Iterable[ImageRecord]) -> Table:
    """Every image that was taken, oldest first, with its sizes and how long it took."""
    table = Table(title="Checkpoints and savepoints", title_justify="left")
    for heading in ("stream", "image", "taken", "why", "status"):
        table.add_column(heading, no_wrap=True)
    for heading in ("batch", "rows", "state rows", "full", "incremental", "duration"):
        table.add_column(heading, justify="right", no_wrap=True)
    for image in images:
        table.add_row(
            image.job_id,
            f"chk-{image.number}" if image.kind == "CHECKPOINT" else f"savepoint {image.label or ''}".strip(),
            pendulum.from_timestamp(image.created_at_ms / 1000).format("HH:mm:ss"),
            image.trigger.value.lower(),
            image.status.value.lower(),
            _number(image.batch_id),
            _number(image.rows),
            _number(image.state_rows),
            _size(image.full_bytes),
            _size(image.incremental_bytes),
            f"{image.duration_ms} ms" if image.duration_ms is not None else "",
        )
    return table


def comparison_table(comparisons: Mapping[str, TableComparison]) -> Table:
    """Each asset's table against that of the uninterrupted run."""
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
