"""Commands that take and keep snapshots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from dagster_ckpt.cli.command import PROBLEM_FOUND, command, label, target, timeout
from dagster_ckpt.cli.output import print_result, print_rows, span, working

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
    """What to expect: a running stream does not report how far it is."""
    took = next((span(each.duration_ms) for each in client.list_snapshots(stream)), None)
    return f" (the last snapshot took {took})" if took is not None else ""


def _report(snapshot: SnapshotRecord, as_json: bool) -> None:
    kind = snapshot.kind.lower() if snapshot.label is None else f"{snapshot.kind.lower()} {snapshot.label}"
    same = " (an existing one: no batch was committed since it was taken)" if snapshot.is_renewed else ""
    message = f"{kind} of {snapshot.stream_id} at batch {snapshot.batch_id}: {snapshot.location}{same}"
    print_result(snapshot, [message], as_json)
