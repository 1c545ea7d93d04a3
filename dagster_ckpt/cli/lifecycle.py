"""Commands for the life of a stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dagster_ckpt.cli.command import command, confirm, dry_run, label, progress, stream_exists, target, timeout, yes
from dagster_ckpt.cli.output import print_json, print_result, working
from dagster_ckpt.cli.snapshots import last_took
from dagster_ckpt.stream.start_from import StartFrom, StartPoint, start_options
from dagster_ckpt.values.modes import ExternalizedCheckpointCleanup, SnapshotKind

if TYPE_CHECKING:
    from dagster_ckpt.client import Client
    from dagster_ckpt.recovery.fork import Fork

Command = TypeVar("Command", bound=Callable[..., Any])


def with_start_options(command: Command) -> Command:
    """Add the options of a start, which the command receives by their names in `StartFrom`."""
    for each in reversed(start_options()):
        flag = "--from" if each.name == "start_from" else f"--{each.name.replace('_', '-')}"
        kind: dict[str, Any] = {"type": each.kind, "show_default": bool(each.default)}
        if each.kind is bool:
            kind = {"is_flag": True}
        elif issubclass(each.kind, Enum):
            kind |= {"type": click.Choice([member.value for member in each.kind], case_sensitive=False)}
        command = click.option(flag, each.name, default=each.default, help=each.description, **kind)(command)
    return command


def _mapping(_context: click.Context, _option: click.Parameter, pairs: Sequence[str]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        old, equals, new = pair.partition("=")
        if not (old and equals and new):
            raise click.BadParameter(f"{pair!r} is not OLD=NEW, such as /data/orders=/data/orders-test.")
        found[old] = new
    return found


outputs = click.option(
    "--output",
    "outputs",
    metavar="OLD=NEW",
    multiple=True,
    callback=_mapping,
    help="A sink of the original and where the new query writes instead; once for each sink.",
)


@command("stop", epilog="\b\nExample:\n  dagster-ckpt stop orders --label before-release-42")
@click.argument("stream")
@click.option("--no-savepoint", is_flag=True, help="Stop at once, without a savepoint.")
@label
@target
@timeout
def stop(client: Client, *, stream: str, no_savepoint: bool, as_json: bool, **options: Any) -> None:
    """Stop a stream with a savepoint of its final state.

    The next start continues from there. If the savepoint fails, the stream continues. If it succeeds, the checkpoints
    are deleted, as in Flink.
    """
    expected = "" if no_savepoint else last_took(client, stream)
    with working(f"Stopping {stream}{expected}"):
        done = client.stop(stream, savepoint=not no_savepoint, **options)
    print_result(done, done.messages(), as_json)


def _after_a_cancel(client: Client, stream: str) -> str:
    options = client.describe_stream(stream, limit=1).settings.options
    if options is None:
        return "The catalog does not know its clean-up option, which decides whether its checkpoints are deleted."
    count = len(client.list_snapshots(stream, kind=SnapshotKind.CHECKPOINT))
    is_kept = options.cleanup is ExternalizedCheckpointCleanup.RETAIN_ON_CANCELLATION
    which = "1 checkpoint" if count == 1 else f"{count} checkpoints"
    end = f"{which} will be kept" if is_kept else f"{which} will be deleted; savepoints are kept"
    return f"{end} ({options.cleanup.name})."


@command("cancel", epilog="\b\nExample:\n  dagster-ckpt cancel orders")
@click.argument("stream")
@timeout
@yes
def cancel(client: Client, *, stream: str, timeout_s: float, yes: bool, as_json: bool) -> None:
    """Cancel a stream. Its clean-up option decides whether its checkpoints are kept or deleted."""
    confirm(f"Cancel {stream}? {_after_a_cancel(client, stream)}", yes=yes)
    with working(f"Canceling {stream}"):
        done = client.cancel(stream, timeout_s=timeout_s)
    print_result(done, done.messages(), as_json)


@command("retire", short_help="End a stream for good.", epilog="\b\nExample:\n  dagster-ckpt retire orders")
@click.argument("stream")
@timeout
@yes
def retire(client: Client, *, stream: str, timeout_s: float, yes: bool, as_json: bool) -> None:
    """End a stream for good, whether it runs or not, such as one that no code defines any more.

    Nothing starts it again until you set another desired state.
    """
    confirm(f"Retire {stream}? {_after_a_cancel(client, stream)}", yes=yes)
    with working(f"Retiring {stream}"):
        done = client.retire(stream, timeout_s=timeout_s)
    print_result(done, done.messages(), as_json)


@command("restart", epilog="\b\nExample:\n  dagster-ckpt restart orders --from before-release-42 --preview")
@click.argument("stream")
@with_start_options
@click.option("--preview", is_flag=True, help="Only show what it would undo and what each sink would do.")
@click.option(
    "--suspend-first", is_flag=True, help="Suspend the running query before the new run is launched and has checked."
)
@timeout
@yes
def restart(
    client: Client,
    *,
    stream: str,
    preview: bool,
    timeout_s: float,
    yes: bool,
    as_json: bool,
    suspend_first: bool,
    **options: Any,
) -> None:
    """Start a stream, suspending it first if it is running.

    The run is launched by the supervisor sensor, which must be turned on. It checks its code before it suspends the
    running query.
    """
    start = StartFrom.from_record(options)
    ahead = client.preview_rewind(stream, start_from=start)
    if preview:
        print_result(ahead, ahead.messages(), as_json)
        return
    shown: set[str] = set()
    moves = start.point is StartPoint.EMPTY or start.source_offsets or start.map_sources
    if ahead.undoes or ahead.undone_edits or moves:
        for message in ahead.messages():
            progress(message)
            shown.add(message)
        confirm(f"Restart {stream} from {start}?", yes=yes)

    def report(message: str) -> None:
        if message not in shown:
            progress(message)

    with working(f"Restarting {stream}"):
        done = client.restart(
            stream,
            start_from=start,
            ahead=ahead,
            timeout_s=timeout_s,
            report=report,
            suspend_first=suspend_first,
        )
    print_result(done, [f"{stream} is started: {done.plan.reason}"], as_json)


@command(
    "fork",
    short_help="Make a second stream that continues from a snapshot.",
    epilog="\b\nExample:\n  dagster-ckpt fork orders orders-test --output /data/orders=/data/orders-test",
)
@click.argument("stream")
@click.argument("into")
@click.option("--from", "start_from", default="latest", show_default=True, metavar="POINT", help="As of restart.")
@outputs
@click.option("--replace-state", is_flag=True, help="Discard the batches that the other stream itself has committed.")
@click.option("--accept-loss", is_flag=True, help="Fork even if files that STREAM has read since no longer exist.")
@yes
def fork(
    client: Client,
    *,
    stream: str,
    into: str,
    replace_state: bool,
    yes: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Fork STREAM into INTO, whose next start continues from there. STREAM may be running and is not changed."""
    if replace_state:
        stream_exists(client, stream)
        confirm(f"Discard the state of {into}?", yes=yes)
    made = client.fork(stream, into=into, replace_state=replace_state, **options)
    print_result(made, _fork_messages(made), as_json)


@command(
    "import-snapshot",
    may_create_catalog=True,
    epilog="\b\nExample:\n  dagster-ckpt import-snapshot s3://prod/savepoints/savepoint-orders-1f2e3d orders "
    "--output /prod/orders=/staging/orders",
)
@click.argument("location")
@click.argument("into")
@outputs
@click.option("--with-rows", is_flag=True, help="Copy the rows of the original's file sinks up to the snapshot.")
@click.option("--replace-state", is_flag=True, help="Discard the batches that the stream itself has committed.")
@yes
def import_snapshot(
    client: Client,
    *,
    location: str,
    into: str,
    replace_state: bool,
    yes: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Import a snapshot of another deployment. The original is read and not changed."""
    if replace_state:
        confirm(f"Discard the state of {into}?", yes=yes)
    with working(f"Importing into {into}") as file_done:
        made = client.import_snapshot(location, into=into, replace_state=replace_state, progress=file_done, **options)
    print_result(made, _fork_messages(made), as_json)


@command(
    "adopt",
    short_help="Manage the checkpoint directory of a plain Spark query.",
    may_create_catalog=True,
    epilog="\b\nExamples:\n  dagster-ckpt adopt orders /data/checkpoints/orders --sink /data/orders --dry-run\n"
    "  dagster-ckpt adopt orders /data/checkpoints/orders --sink /data/orders --label before-adoption",
)
@click.argument("stream")
@click.argument("checkpoint_location")
@click.option(
    "--sink",
    "sinks",
    metavar="PLACE",
    multiple=True,
    help="Where the query writes: a folder of files, a Delta table by its path, or an Iceberg table as "
    "IcebergTable[lake.sales.orders].",
)
@click.option("--in-place", is_flag=True, help="Continue in the directory itself, instead of in a copy.")
@label
@dry_run
@click.option("--undo", is_flag=True, help="Drop an adoption that no start has taken over, with its snapshots.")
@yes
def adopt(client: Client, *, stream: str, undo: bool, yes: bool, as_json: bool, **options: Any) -> None:
    """Take the checkpoint directory of a plain Spark query under management; STREAM continues it at its next start.

    The directory is only read, and the query may keep running until that start. Interrupted, it can be repeated.
    """
    if undo:
        location = options.pop("checkpoint_location")
        if any(options.values()):
            raise click.UsageError("--undo drops the adoption with its snapshots. It takes no option but --yes.")
        stream_exists(client, stream)
        confirm(f"Drop the adoption of {location} by {stream}, with its snapshots?", yes=yes)
        done = client.undo_adoption(stream, checkpoint_location=location)
        print_result(done, done, as_json)
        return
    made = client.adopt(stream, **options)
    print_result(made, made.messages(), as_json)


@command(
    "export",
    short_help="Write a snapshot as a checkpoint directory for Spark.",
    epilog="\b\nExample:\n  dagster-ckpt export orders before-release-42 --to /data/checkpoints/orders",
)
@click.argument("stream")
@click.argument("snapshot", default="latest")
@click.option("--to", required=True, metavar="PATH", help="The checkpoint directory to create.")
@outputs
def export(client: Client, *, stream: str, snapshot: str, as_json: bool, **options: Any) -> None:
    """Export SNAPSHOT as a checkpoint directory in which plain Spark continues, without this package."""
    with working(f"Exporting {snapshot} of {stream}") as file_done:
        made = client.export(stream, snapshot, progress=file_done, **options)
    print_result(made, made.messages(), as_json)


@command(
    "desired-state",
    short_help="Show or set the desired state of a stream.",
    epilog="\b\nExample:\n  dagster-ckpt desired-state orders SUSPENDED",
)
@click.argument("stream")
@click.argument(
    "state",
    required=False,
    type=click.Choice(["RUNNING", "SUSPENDED", "CANCELED", "AS_DEFINED"], case_sensitive=False),
)
@yes
def desired_state(client: Client, *, stream: str, state: str | None, yes: bool, as_json: bool) -> None:
    """Show or set the desired state of a stream, which the supervisor sensor reconciles.

    AS_DEFINED returns to the state in the asset's definition.
    """
    stream_exists(client, stream)
    if state == "CANCELED":
        confirm(f"Cancel {stream}? {_after_a_cancel(client, stream)}", yes=yes)
    if state is not None:
        client.set_desired_state(stream, None if state == "AS_DEFINED" else state)
    row = client.desired_state(stream)
    if as_json:
        print_json(row)
    elif row is None:
        click.echo(f"{stream} has no desired state: only you and its restart strategy start or stop it.")
    else:
        click.echo(f"{stream}: desired {row.desired.value if row.desired else 'as defined by its asset'}")
        if row.alert:
            click.echo(row.alert)


@command("rollback", epilog="\b\nExample:\n  dagster-ckpt rollback orders")
@click.argument("stream")
@yes
def rollback(client: Client, *, stream: str, yes: bool, as_json: bool) -> None:
    """Undo the last upgrade of a stream, with its output.

    The supervisor sensor, which must be turned on, stops the stream and restores the snapshot from before the upgrade.
    It starts the stream again when another code version than the one rolled back is loaded.

    A stream whose drivers are launched by Dagster goes back to the previous launch, which is repeated.
    """
    stream_exists(client, stream)
    if client.rolls_back_launch(stream):
        confirm(f"Launch the code again that ran before the present code of {stream}?", yes=yes)
        ahead = client.roll_back_launch(stream, report=progress)
        print_result(ahead, [f"{stream}: the previous driver has started its query"], as_json)
        return
    row = client.desired_state(stream)
    upgrade = row.upgrade if row is not None else None
    if upgrade is not None and upgrade.phase.can_be_undone and upgrade.snapshot_id is not None:
        for message in client.preview_rewind(stream, start_from=upgrade.snapshot_id).messages():
            progress(message)
        confirm(f"Roll {stream} back from code version {upgrade.to_version} to {upgrade.from_version}?", yes=yes)
    done = client.roll_back_upgrade(stream, report=_quiet)
    print_result(done, [f"{stream}: {done.phase.value}: {done.reason}"], as_json)


def _quiet(_message: str) -> None:
    """Drop a report whose content was shown before."""


def _fork_messages(made: Fork) -> list[str]:
    start = f"{made.stream_id} continues from {made.source} of {made.of_stream_id}, batch {made.batch_id}"
    outputs = (f"{old} -> {new}" for old, new in made.outputs.items())
    return [f"{start}, as query {made.query_id}, in {made.live_directory}", *outputs]
