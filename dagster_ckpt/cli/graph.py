"""Commands for streams that read each other's output: line."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dagster_ckpt.cli.command import PROBLEM_FOUND, command
from dagster_ckpt.cli.output import print_result

if TYPE_CHECKING:
    from dagster_ckpt.client import Client


@command(
    "line",
    short_help="Show the newest snapshots of several streams that belong together.",
    epilog="\b\nExample:\n  dagster-ckpt line orders+",
)
@click.argument("selection")
def line(client: Client, *, selection: str, as_json: bool) -> int | None:
    """Show the newest snapshots of the streams in SELECTION none of which has read rows that another one lacks.

    SELECTION is orders+ for orders and all streams that read its output, +summary for summary and all that it reads,
    or a list with commas. The exit status is 3 if the line cannot be proven.
    """
    found = client.recovery_line(selection)
    print_result(found, found.messages(), as_json)
    return None if found.is_proven else PROBLEM_FOUND
