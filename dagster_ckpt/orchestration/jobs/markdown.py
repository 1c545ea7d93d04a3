"""Markdown tables for Dagster's page."""

from collections.abc import Iterable, Sequence


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]], *, at_most: int | None = None) -> str:
    """A Markdown table, or "none" without rows.

    Args:
        header: Headings of the columns.
        rows: Cells.
        at_most: Maximum number of rows; the number of omitted rows is shown below the table.
    """
    every = list(rows)
    shown = every if at_most is None else every[:at_most]
    if not shown:
        return "none"
    lines = map(_row, [header, ["---"] * len(header), *shown])
    more = len(every) - len(shown)
    return "\n".join(lines) + (f"\n\nand {more} more" if more else "")


def _row(cells: Sequence[object]) -> str:
    # A vertical bar or a line break would end the cell.
    return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
