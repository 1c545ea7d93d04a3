"""Commands that take and keep snapshots, of one stream or of streams that read each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from dagster_ckpt.cli.command import PROBLEM_FOUND, command, confirm, label, progress, target, timeout, yes
from dagster_ckpt.cli.output import moment, print_result, print_rows, span, working

if TYPE_CHECKING:
    from dagster_ckpt.catalog.records import SnapshotRecord
    from dagster_ckpt.client import Client


@command("checkpoint", epilog="\b\nExample:\n  dagster-ckpt checkpoint orders")
@click.argument("stream")
@timeout
def checkpoint(client: Client, *, stream: str, timeout_s: float, as_json: bool) -> None:
    """Take a checkpoint of a running stream now."""
    with working(f"Taking a checkpoint of {stream}{last_took(client, stream)}"):
        taken = client.trigger_checkpoint(stream, timeout_s=timeout_s)
    _report(taken, as_json)


@command("savepoint", epilog="\b\nExample:\n  dagster-ckpt savepoint orders --label before-release-42")
@click.argument("stream")
@label
@target
@timeout
def savepoint(client: Client, *, stream: str, as_json: bool, **options: Any) -> None:
    """Take a savepoint of a running, stopped or failed stream. A running stream continues."""
    with working(f"Taking a savepoint of {stream}{last_took(client, stream)}") as file_done:
        taken = client.trigger_savepoint(stream, progress=file_done, **options)
    _report(taken, as_json)


@command("tag", epilog="\b\nExample:\n  dagster-ckpt tag orders chk-7 --label end-of-june")
@click.argument("stream")
@click.argument("snapshot")
@label
def tag(client: Client, *, stream: str, snapshot: str, label: str | None, as_json: bool) -> None:
    """Keep a checkpoint until it is released."""
    _report(client.tag(stream, snapshot, label=label), as_json)


@command(
    "release",
    short_help="Return a tagged checkpoint to the stream's retention.",
    epilog="\b\nExample:\n  dagster-ckpt release orders end-of-june",
)
@click.argument("stream")
@click.argument("snapshot")
def release(client: Client, *, stream: str, snapshot: str, as_json: bool) -> None:
    """Return a tagged checkpoint to the stream's retention, which may delete it."""
    _report(client.release(stream, snapshot), as_json)


@command(
    "promote",
    short_help="Copy a checkpoint into a savepoint.",
    epilog="\b\nExample:\n  dagster-ckpt promote orders chk-7 --label end-of-june",
)
@click.argument("stream")
@click.argument("snapshot")
@label
@target
def promote(client: Client, *, stream: str, snapshot: str, as_json: bool, **options: Any) -> None:
    """Copy a checkpoint into a savepoint, which the stream never deletes."""
    with working(f"Copying {snapshot}"):
        made = client.promote(stream, snapshot, **options)
    _report(made, as_json)


@command(
    "prefer",
    short_help="Select the savepoint that preferred-savepoint means.",
    epilog="\b\nExample:\n  dagster-ckpt prefer orders before-release-42",
)
@click.argument("stream")
@click.argument("savepoint")
def prefer(client: Client, *, stream: str, savepoint: str, as_json: bool) -> None:
    """Select the savepoint that --from preferred-savepoint refers to."""
    _report(client.prefer_savepoint(stream, savepoint), as_json)


@command("verify", epilog="\b\nExample:\n  dagster-ckpt verify orders all")
@click.argument("stream")
@click.argument("snapshot", default="latest")
@click.option("--shallow", is_flag=True, help="Check lengths and completeness only, not every byte.")
def verify(client: Client, *, stream: str, snapshot: str, shallow: bool, as_json: bool) -> int:
    """Prove that snapshots can be restored. Exit status 3: one of them cannot.

    SNAPSHOT is a label, a number such as chk-7, an id, a location, latest or all.
    """
    with working(f"Verifying {stream}") as snapshot_done:
        found = client.verify(stream, snapshot, deep=not shallow, progress=snapshot_done)
    rows = [(each.location, "PASS" if each.passed else "BROKEN", "; ".join(each.problems) or None) for each in found]
    print_rows(found, ["location", "result", "problems"], rows, as_json, empty="No snapshot.")
    return 0 if all(each.passed for each in found) else PROBLEM_FOUND


def last_took(client: Client, stream: str) -> str:
    """Say how long the last snapshot took: a running stream reports no progress."""
    took = next((span(each.duration_ms) for each in client.list_snapshots(stream)), None)
    return f" (the last snapshot took {took})" if took is not None else ""


def _report(snapshot: SnapshotRecord, as_json: bool) -> None:
    kind = snapshot.kind.lower() if snapshot.label is None else f"{snapshot.kind.lower()} {snapshot.label}"
    same = " (an existing one: no batch was committed since it was taken)" if snapshot.is_renewed else ""
    message = f"{kind} of {snapshot.stream_id} at batch {snapshot.batch_id}: {snapshot.location}{same}"
    print_result(snapshot, [message], as_json)


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
