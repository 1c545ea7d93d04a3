"""Commands for streams that read each other's output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from dagster_ckpt.cli.command import PROBLEM_FOUND, command, confirm, label, progress, timeout, yes
from dagster_ckpt.cli.output import moment, print_result, print_rows, working

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


@command(
    "savepoint-set",
    short_help="Take savepoints of several streams that belong together.",
    epilog="\b\nExample:\n  dagster-ckpt savepoint-set orders+ --label before-release-42",
)
@click.argument("selection")
@label
@click.option("--keep", type=click.IntRange(min=1), metavar="N", help="Release older sets of SELECTION but N.")
@click.option("--accept-unproven", is_flag=True, help="Also record a set that cannot be proven to belong together.")
@timeout
def savepoint_set(client: Client, *, selection: str, as_json: bool, **options: Any) -> None:
    """Take savepoints of the streams in SELECTION that belong together: a set, or nothing. Running streams continue."""
    with working(f"Taking a savepoint set of {selection}"):
        made = client.trigger_savepoint_set(selection, **options)
    print_result(made, made.messages(), as_json)


@command("sets", epilog="\b\nExample:\n  dagster-ckpt sets")
def sets(client: Client, *, as_json: bool) -> None:
    """List the savepoint sets, newest first."""
    found = client.savepoint_sets()
    rows = [
        (each.set_id, each.label, ", ".join(each.streams), moment(each.created_at_ms), each.origin) for each in found
    ]
    print_rows(found, ("set", "label", "streams", "taken (UTC)", "by"), rows, as_json, empty="no savepoint set")


@command("release-set", epilog="\b\nExample:\n  dagster-ckpt release-set before-release-42")
@click.argument("savepoint_set")
@yes
def release_set(client: Client, *, savepoint_set: str, yes: bool, as_json: bool) -> None:
    """Dissolve a set. Its savepoints return to the retention of their streams, which may delete them."""
    confirm(f"Release the savepoint set {savepoint_set}?", yes=yes)
    found = client.release_savepoint_set(savepoint_set)
    print_result(found, found.messages(), as_json)


@command(
    "restart-set",
    short_help="Take streams that read each other back to a savepoint set.",
    epilog="\b\nExample:\n  dagster-ckpt restart-set before-release-42 --preview",
)
@click.argument("savepoint_set")
@click.option("--preview", is_flag=True, help="Only show what it would undo and what each sink would do.")
@click.option("--no-start", is_flag=True, help="Leave the streams suspended; their next starts continue there.")
@timeout
@yes
def restart_set(
    client: Client, *, savepoint_set: str, preview: bool, no_start: bool, timeout_s: float, yes: bool, as_json: bool
) -> None:
    """Suspend and restore all streams of a set with their sinks, and start them. Interrupted, it can be repeated."""
    ahead = client.preview_savepoint_set(savepoint_set)
    messages = [f"{stream}: {message}" for stream, found in ahead.items() for message in found.messages()]
    if preview:
        print_result(ahead, messages, as_json)
        return
    for message in messages:
        progress(message)
    confirm(f"Restart {', '.join(ahead)} from savepoint set {savepoint_set}?", yes=yes)
    with working(f"Restarting {', '.join(ahead)}"):
        done = client.restart_savepoint_set(savepoint_set, start=not no_start, timeout_s=timeout_s, report=progress)
    print_result(done, done.messages(), as_json)
