"""What commands print."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import click

from dagster_ckpt.values.durations import rounded_duration, utc_time

# Colors only repeat the words.
_STYLES = {
    "RUNNING": "green",
    "COMPLETED": "green",
    "PASS": "green",
    "STARTING": "yellow",
    "WARN": "yellow",
    "FAILED": "red",
    "ERROR": "red",
    "BROKEN": "red",
}


_GAP = "  "
# Columns with short values, which are not folded.
_SHORT = ("snapshot", "batch", "status", "size", "new", "took", "result")


def print_json(value: object) -> None:
    """Print a value as JSON."""
    click.echo(json.dumps(plain(value), indent=2, ensure_ascii=False))


def print_result(result: object, messages: Iterable[str], as_json: bool) -> None:
    """Print a result as JSON, or else its messages."""
    if as_json:
        print_json(result)
        return
    for message in messages:
        click.echo(message)


def print_rows(
    result: object, columns: Sequence[str], rows: Iterable[Sequence[object]], as_json: bool, *, empty: str
) -> None:
    """Print a result as JSON, or else its rows as a table."""
    if as_json:
        print_json(result)
    else:
        print_table(columns, rows, empty=empty)


def print_json_line(value: object) -> None:
    """Print a value as one line of JSON."""
    click.echo(json.dumps(plain(value), ensure_ascii=False))


def plain(value: object) -> Any:
    """Convert a value to JSON's types; records become objects by field name."""
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if hasattr(value, "as_record"):
        return plain(value.as_record())
    if is_dataclass(value):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value) if not each.name.startswith("_")}
    if hasattr(value, "model_dump"):
        return plain(value.model_dump(mode="json"))
    if isinstance(value, Iterable):
        return [plain(each) for each in value]
    return str(value)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, empty: str) -> None:
    """Print rows, or the text `empty` if there are none; None is a dash."""
    shown = [[_cell(cell) for cell in row] for row in rows]
    if not shown:
        click.echo(empty)
        return
    widths = [max(map(len, column)) for column in zip(columns, *shown, strict=True)]
    if _needs_no_folding(widths, shown):
        _print_aligned(columns, shown, widths)
    else:
        _print_folded(columns, shown)


def _needs_no_folding(widths: Sequence[int], shown: Sequence[Sequence[str]]) -> bool:
    cells = [cell for row in shown for cell in row]
    if os.environ.get("FORCE_COLOR") or os.environ.get("NO_COLOR") or not all(map(str.isprintable, cells)):
        return False
    if not sys.stdout.isatty():
        # A program that reads the table needs whole lines.
        return True
    # Other characters may take two columns.
    return (
        all(map(str.isascii, cells))
        and sum(widths) + len(_GAP) * (len(widths) - 1) <= shutil.get_terminal_size().columns
    )


def _print_aligned(columns: Sequence[str], shown: Sequence[Sequence[str]], widths: Sequence[int]) -> None:
    def line(cells: Sequence[str], styled: Callable[[str, str], str]) -> str:
        padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        padded[-1] = padded[-1].rstrip()
        return _GAP.join(map(styled, cells, padded))

    click.echo(line(columns, lambda _cell, text: click.style(text, bold=True)))
    for row in shown:
        click.echo(line(row, lambda cell, text: click.style(text, fg=_STYLES[cell]) if cell in _STYLES else text))


def _print_folded(columns: Sequence[str], shown: Sequence[Sequence[str]]) -> None:
    # Slow to import.
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column in _SHORT)
    for row in shown:
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 10_000
    console.print(table)


def print_fields(values: Mapping[str, object]) -> None:
    """Print values by name, without those that are None."""
    shown = {name: str(value) for name, value in values.items() if value is not None}
    width = max(map(len, shown), default=0)
    for name, value in shown.items():
        click.echo(f"{name:{width}}  {value}")


@contextmanager
def working(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show progress on a terminal; the value reports what is done, and of how much."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        # Empty while the total is not known.
        TextColumn("{task.fields[count]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None, count="")
        yield lambda done, total: bar.update(task, completed=done, total=total, count=f"{done:,}/{total:,}")


def moment(ms: int | None) -> str | None:
    """Format a time in UTC."""
    return None if not ms else utc_time(ms).removesuffix(" UTC")


def span(ms: int | None) -> str | None:
    """Format a duration."""
    return None if ms is None else rounded_duration(ms)


def _cell(value: object) -> str:
    return "-" if value is None else str(value.value if isinstance(value, Enum) else value)
