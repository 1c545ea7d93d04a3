"""Tables that Dagster's page shows as such."""

from collections.abc import Iterable, Sequence


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]], *, at_most: int | None = None) -> str:
    """A table in Markdown; "none" without rows.

    Args:
        header: Headings of the columns.
        rows: Cells.
        at_most: Rows to show; below them is said how many more there are.
    """
    every = list(rows)
    shown = every if at_most is None else every[:at_most]
    if not shown:
        return "none"
    lines = map(_row, [header, ["---"] * len(header), *shown])
    more = len(every) - len(shown)
    return "\n".join(lines) + (f"\n\nand {more} more" if more else "")


def _row(cells: Sequence[object]) -> str:
    # A bar or a line break would end the cell.
    return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
