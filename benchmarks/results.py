"""What a section found, as values that are kept as JSON and shown as a page."""

from __future__ import annotations

import statistics
from enum import Enum
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from benchmarks.measuring import Series


class Bound(Enum):
    """On which side of its limit a figure has to be."""

    AT_LEAST = "at least"
    AT_MOST = "at most"


class Target(BaseModel):
    """What was to be reached, and what was.

    Attributes:
        what: What is compared with what.
        bound: Whether the limit is a lower or an upper one.
        limit: The limit.
        measured: The figure; None where it could not be measured.
        unit: Unit of both; empty for a ratio.
        reason: Why it could not be measured.
    """

    model_config = ConfigDict(frozen=True)

    what: str
    bound: Bound
    limit: float
    measured: float | None
    unit: str = ""
    reason: str = ""

    @property
    def met(self) -> bool | None:
        """Whether it was reached; None where it could not be measured."""
        if self.measured is None:
            return None
        return self.measured >= self.limit if self.bound is Bound.AT_LEAST else self.measured <= self.limit


def at_least(what: str, limit: float, measured: float | None, *, unit: str = "", reason: str = "") -> Target:
    """A target with a lower limit; the arguments are those of `Target`."""
    return Target(what=what, bound=Bound.AT_LEAST, limit=limit, measured=measured, unit=unit, reason=reason)


def at_most(what: str, limit: float, measured: float | None, *, unit: str = "", reason: str = "") -> Target:
    """A target with an upper limit; the arguments are those of `Target`."""
    return Target(what=what, bound=Bound.AT_MOST, limit=limit, measured=measured, unit=unit, reason=reason)


class Table(BaseModel):
    """A table of the page. Its first column is text, the others are figures.

    Attributes:
        title: What it shows.
        headings: One a column.
        rows: Cells as they are shown.
        note: A sentence below it.
    """

    model_config = ConfigDict(frozen=True)

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


class SectionResult(BaseModel):
    """What one section found.

    Attributes:
        name: Its name on the command line.
        title: Its heading.
        method: What was measured, and how.
        measured_at: UTC time of its end, ISO 8601.
        took_s: Seconds the section took.
        load: Load averages of one minute before and after.
        machine: What it ran on, and with which versions.
        versions: Versions of the peers.
        tables: Its tables.
        targets: Its targets.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    title: str
    method: str
    measured_at: str
    took_s: float
    load: tuple[float, float]
    machine: dict[str, str]
    versions: dict[str, str]
    tables: tuple[Table, ...]
    targets: tuple[Target, ...]

    def keep(self, folder: Path) -> None:
        """Write it to the folder of results."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.name}.json").write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")


Cells = Annotated[dict[str, tuple[str, ...]], Field(description="Name of a competitor to further cells of its row.")]


def timing_table(
    title: str, series: Series, *, ours: str, headings: tuple[str, ...] = (), cells: Cells | None = None, note: str = ""
) -> Table:
    """A row for each competitor: medians, minima, CPU time, and how many times longer than ours it took.

    Args:
        title: What it shows.
        series: The samples.
        ours: The competitor that the ratios refer to.
        headings: Headings of further columns.
        cells: The further cells of each competitor's row.
        note: A sentence below it.
    """
    rows = []
    for name, samples in series.samples.items():
        walls = series.walls(name)
        rows.append(
            (
                name,
                seconds(statistics.median(walls)),
                seconds(min(walls)),
                seconds(statistics.median(sample.cpu_s for sample in samples)),
                "" if name == ours else f"{series.ratio(name, ours):.2f}",
                "" if name == ours else f"{min(walls) / min(series.walls(ours)):.2f}",
                *((cells or {}).get(name) or ("",) * len(headings)),
            )
        )
    count = max(len(samples) for samples in series.samples.values())
    return Table(
        title=f"{title} ({count} repetitions)",
        headings=("", "median s", "min s", "CPU s", "x ours", "x ours (min)", *headings),
        rows=tuple(rows),
        note=note,
    )


def seconds(value: float) -> str:
    """Seconds with three significant digits."""
    return f"{value:.{4 if value < 0.01 else 3 if value < 1 else 2}f}"


def megabytes(value: float) -> str:
    """Bytes as MB."""
    return f"{value / 1e6:.1f}"
