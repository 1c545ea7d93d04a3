"""Tables on the pages of Dagster: Markdown, and tables that a reader can sort."""

from collections.abc import Iterable, Mapping, Sequence

import dagster as dg


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]], *, at_most: int | None = None) -> str:
    """A Markdown table, or "none" without rows.

    Args:
        at_most: Maximum number of rows; the number of others is shown below.
    """
    every = list(rows)
    shown = every if at_most is None else every[:at_most]
    if not shown:
        return "none"
    lines = map(_row, [header, ["---"] * len(header), *shown])
    more = len(every) - len(shown)
    return "\n".join(lines) + (f"\n\nand {more} more" if more else "")


def table(columns: Mapping[str, str], rows: Iterable[Mapping[str, str | int | None]]) -> dg.TableMetadataValue:
    """A sortable table on a page of Dagster.

    Args:
        columns: Types, by name.
        rows: Cells by column; a cell must not be empty there, so None and "" are shown as a dash.
    """
    records = [
        dg.TableRecord({name: "-" if value in (None, "") else value for name, value in row.items()}) for row in rows
    ]
    schema = dg.TableSchema([dg.TableColumn(name, kind) for name, kind in columns.items()])
    return dg.MetadataValue.table(records=records, schema=schema)


def _row(cells: Sequence[object]) -> str:
    # A vertical bar or a line break would end the cell.
    return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
