"""Commands that clean up and repair."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from dagster_ckpt.cli.command import FAILED, Number, cli, command, confirm, dry_run, fail, progress, stream_exists, yes
from dagster_ckpt.cli.output import moment, print_json, print_result, print_rows, print_table, working
from dagster_ckpt.errors import CatalogError, CkptError

if TYPE_CHECKING:
    from dagster_ckpt.cli.command import Deployment
    from dagster_ckpt.client import Client
    from dagster_ckpt.recovery.checkpoint_retention import RetentionReport

ENDS = click.Choice(["FINISHED", "CANCELED", "FAILED", "SUSPENDED"], case_sensitive=False)


@command(
    "retention",
    short_help="Finish interrupted deletions, remove orphaned bytes.",
    epilog="\b\nExample:\n  dagster-ckpt retention orders --dry-run\n  dagster-ckpt retention --all",
)
@click.argument("stream", required=False)
@click.option("--all", "all_streams", is_flag=True, help="Every stream in the catalog.")
@click.option("--ended", type=ENDS, help="Also apply the clean-up option, as after a run that ended with this status.")
@dry_run
@yes
def retention(
    client: Client,
    *,
    stream: str | None,
    all_streams: bool,
    ended: str | None,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> int:
    """Finish interrupted deletions and remove orphaned bytes; with --ended, apply the clean-up option too."""
    if all_streams:
        if stream is not None or ended is not None:
            raise click.UsageError("--all takes neither a stream nor --ended.")
        return _retention_of_all(client, dry_run=dry_run, yes=yes, as_json=as_json)
    if stream is None:
        raise click.UsageError("Name a stream, or give --all.")
    stream_exists(client, stream)
    confirm(
        f"Apply the clean-up option of {stream} as after {ended}?"
        if ended is not None
        else f"Finish interrupted deletions of {stream}, and delete objects that no snapshot refers to?",
        yes=yes or dry_run,
    )
    with working(f"Cleaning up {stream}"):
        report = client.apply_retention(stream, state=ended, dry_run=dry_run)
    return _report(report, as_json)


@command(
    "preview-retention",
    short_help="Show what a retention policy would keep, and why.",
    epilog="\b\nExample:\n  dagster-ckpt preview-retention orders --policy '{keep_rules: {last: 3, daily: 7}}'",
)
@click.argument("stream")
@click.option("--policy", metavar="YAML", help="A policy by its name and arguments; default: the stream's own.")
@click.option("--history", is_flag=True, help="As if it had decided after each checkpoint that the catalog remembers.")
def preview_retention(client: Client, *, stream: str, policy: str | None, history: bool, as_json: bool) -> int:
    """Show what a retention policy would keep of the checkpoints of STREAM, and why. Nothing is deleted."""
    found = client.preview_retention(stream, _policy("--policy", policy), history=history)
    print_result(found, found.messages(), as_json)
    return FAILED if found.problem else 0


def _policy(option: str, text: str | None) -> Mapping[str, object] | None:
    if text is None:
        return None
    import yaml

    try:
        read = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise click.UsageError(f"{option} is no YAML: {error}") from error
    if not isinstance(read, Mapping):
        raise click.UsageError(f"{option} is {text!r}, but must be a name with its arguments, such as '{{latest: 3}}'.")
    return read


@command(
    "replicate",
    short_help="Copy snapshots to a second bucket, and verify them there.",
    epilog="\b\nExample:\n  dagster-ckpt replicate orders all --to s3://second/checkpoints --keep '{latest: 5}'",
)
@click.argument("stream")
@click.argument("snapshot", default="latest")
@click.option("--to", required=True, metavar="PATH", help="The folder of the copies; no stream may write there.")
@click.option("--keep", metavar="YAML", help="A policy: delete the copies that it does not keep.")
@click.option("--verify", is_flag=True, help="Also read the copies that are there, and write again what differs.")
@yes
def replicate(
    client: Client, *, stream: str, snapshot: str, to: str, keep: str | None, verify: bool, yes: bool, as_json: bool
) -> int:
    """Copy snapshots to a second bucket or folder, and verify every new byte there.

    SNAPSHOT is a label, a number such as chk-7, an id, a location, latest or all.
    """
    policy = _policy("--keep", keep)
    if policy is not None:
        confirm(f"Delete the copies of {stream} in {to} that the policy does not keep?", yes=yes)
    with working(f"Copying {stream}") as objects_done:
        done = client.replicate(stream, snapshot, to=to, keep=policy, verify=verify, progress=objects_done)
    print_result(done, done.messages(), as_json)
    return 0 if done.is_complete else FAILED


@command("sweep", epilog="\b\nExample:\n  dagster-ckpt sweep orders --dry-run")
@click.argument("stream")
@click.option(
    "--older-than",
    metavar="HOURS",
    type=Number(0),
    help="Keep younger objects; default: as in housekeeping.",
)
@dry_run
@yes
def sweep(client: Client, *, stream: str, older_than: float | None, dry_run: bool, yes: bool, as_json: bool) -> int:
    """Remove bytes in the storage that no snapshot refers to."""
    stream_exists(client, stream)
    confirm(f"Delete the objects that no snapshot of {stream} refers to?", yes=yes or dry_run)
    older_than_ms = int(older_than * 3_600_000) if older_than is not None else None
    with working(f"Cleaning up {stream}"):
        report = client.sweep(stream, dry_run=dry_run, older_than_ms=older_than_ms)
    return _report(report, as_json)


@command(
    "clean-sinks",
    short_help="Delete part files that no sink's log names any more.",
    epilog="\b\nExample:\n  dagster-ckpt clean-sinks orders --dry-run",
)
@click.argument("stream")
@dry_run
@yes
def clean_sinks(client: Client, *, stream: str, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Delete part files that the logs of rolled-back file sinks no longer name."""
    stream_exists(client, stream)
    confirm(f"Delete the part files of {stream} that no log names?", yes=yes or dry_run)
    done = client.clean_sinks(stream, dry_run=dry_run)
    if as_json:
        print_json(done)
        return
    from dagster_ckpt.values.durations import size

    verb = "deleted" if done.deleted else "would be deleted"
    click.echo(f"{len(done.removable)} files, {size(done.bytes)}, {verb}")
    print_table(
        ["file", "bytes"],
        [(f"{each.sink}/{each.file.path}", each.file.size) for each in done.removable],
        empty="Nothing to delete.",
    )


@command(
    "relocate-output",
    short_help="Repair the log of a moved output folder.",
    epilog="\b\nExample:\n  dagster-ckpt relocate-output /data/orders --dry-run",
)
@click.argument("folder")
@dry_run
@yes
def relocate_output(client: Client, *, folder: str, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Let the log of a file sink list the files that are in FOLDER, after the folder was moved or copied."""
    confirm(f"Rewrite the paths in the log of {folder}?", yes=yes or dry_run)
    done = client.relocate_output(folder, dry_run=dry_run)
    verb = "would be relocated" if dry_run else "relocated"
    message = (
        f"{done.files} files {verb} from {done.old_place}" if done.files else "its log lists no file of another folder"
    )
    result = {"folder": done.folder, "files": done.files, "old_place": done.old_place}
    print_result(result, [f"{done.folder}: {message}"], as_json)


@command(
    "rebuild-output",
    short_help="Rebuild the lost log of a file sink.",
    epilog="\b\nExample:\n  dagster-ckpt rebuild-output orders --dry-run",
)
@click.argument("stream")
@dry_run
@yes
def rebuild_output_log(client: Client, *, stream: str, dry_run: bool, yes: bool, as_json: bool) -> int:
    """Rebuild the lost or incomplete _spark_metadata of STREAM's file sinks from the snapshots that captured it."""
    stream_exists(client, stream)
    confirm(f"Rebuild the logs of the file sinks of {stream}?", yes=yes or dry_run)
    done = client.rebuild_output_logs(stream, dry_run=dry_run)
    rebuilt = [
        {
            "folder": each.folder,
            "batch_id": each.batch_id,
            "snapshot_id": each.source.snapshot_id,
            "unknown_batches": list(each.unknown),
        }
        for each in done
    ]
    print_result(rebuilt, [text for each in done for text in each.messages()] or ["Each log is complete."], as_json)
    return FAILED if any(each.unknown for each in done) else 0


@command(
    "prune-history",
    short_help="Delete old rows from the catalog.",
    epilog="\b\nExample:\n  dagster-ckpt prune-history --older-than 30 --dry-run",
)
@click.argument("streams", nargs=-1)
@click.option("--older-than", metavar="DAYS", type=click.IntRange(1, 36_500), default=90, show_default=True)
@dry_run
@yes
def prune_history(
    client: Client, *, streams: tuple[str, ...], older_than: int, dry_run: bool, yes: bool, as_json: bool
) -> None:
    """Delete old rows from the catalog: deleted snapshots, failed attempts, ended executions, events, requests.

    No snapshot and no file is deleted. Without STREAMS, the history of every stream is pruned.
    """
    wanted = streams or tuple(each.stream_id for each in client.list_streams())
    confirm(f"Delete the history of {len(wanted)} streams before the last {older_than} days?", yes=yes or dry_run)
    pruned = []
    with working("Pruning") as progress:
        for each in wanted:
            pruned.append(client.prune_history(each, older_than_days=older_than, dry_run=dry_run))
            progress(len(pruned), len(wanted))
    print_rows(
        pruned,
        ["stream", "snapshots", "executions", "events", "requests", "recoveries"],
        [
            (each.stream_id, each.snapshots, each.executions, each.events, each.requests, each.recovery_failures)
            for each in pruned
        ],
        as_json,
        empty="The catalog has no streams.",
    )


@command(
    "upgrade-catalog",
    short_help="Bring the tables to the version of this package.",
    may_create_catalog=True,
    epilog="\b\nExample:\n  dagster-ckpt upgrade-catalog",
)
def upgrade_catalog(client: Client, *, as_json: bool) -> None:
    """Bring the catalog's tables to the version of this package. Every start does it, too."""
    url, deployment = client.catalog.database.shown_url, client.catalog.deployment_id
    print_result({"catalog": url, "deployment": deployment}, [f"{url} is up to date, deployment {deployment}"], as_json)


@cli.command(
    "accept-catalog",
    short_help="Use a catalog that was copied from another place.",
    epilog="\b\nExample:\n  dagster-ckpt --catalog sqlite:////new/catalog.db accept-catalog --yes",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@yes
@click.pass_obj
def accept_catalog(deployment: Deployment, *, yes: bool, as_json: bool) -> None:
    """Use a catalog that was copied from another place, and is refused as a copy since.

    Name it with --catalog, also if -m names your definitions.
    """
    from dagster_ckpt.catalog.catalog import Catalog
    from dagster_ckpt.values.redaction import without_secrets

    url = deployment.catalog_url()
    confirm("Use this copy from now on? No process may use the original any more.", yes=yes)
    try:
        Catalog.accept(url)
    except CkptError as error:
        fail(error)
    shown = without_secrets(url)
    print_result({"catalog": shown}, [f"{shown} is the catalog from now on"], as_json)


@command(
    "rebuild",
    short_help="Rebuild a lost catalog from the storage.",
    may_create_catalog=True,
    epilog="\b\nExample:\n  dagster-ckpt --storage s3://bucket/checkpoints rebuild --yes",
)
@click.argument("stream", required=False)
@click.option("--take-over-deployment", metavar="ID", help="The deployment whose catalog was lost.")
@click.option(
    "--continue-from",
    type=click.Choice(["live", "newest"]),
    help="If a live directory is an old copy: continue in it, or from the newest snapshot.",
)
@yes
def rebuild(
    client: Client,
    *,
    stream: str | None,
    take_over_deployment: str | None,
    yes: bool,
    as_json: bool,
    **options: Any,
) -> int:
    """Rebuild a lost catalog: register the snapshots and live directories of STREAM again.

    Without STREAM, every stream found in --storage and --live-root is rebuilt.
    """
    if take_over_deployment is not None:
        confirm(f"Take over deployment {take_over_deployment}? Nothing of it may be running.", yes=yes)
    if stream is not None:
        rebuilt = client.rebuild(stream, take_over_deployment=take_over_deployment, **options)
        print_result(rebuilt, rebuilt.messages(), as_json)
        return FAILED if rebuilt.found_only_damage else 0
    with working("Rebuilding the catalog"):
        everything = client.rebuild_all(take_over_deployment=take_over_deployment, **options)
    nothing = "No stream was found. Check --storage and --live-root."
    print_result(everything, everything.messages() or [nothing], as_json)
    is_complete = everything.streams and not any(each.found_only_damage for each in everything.streams)
    return 0 if is_complete and not everything.refused else FAILED


@command(
    "requests",
    short_help="List the requests that are not answered yet.",
    epilog="\b\nExample:\n  dagster-ckpt requests orders",
)
@click.argument("stream", required=False)
def requests(client: Client, *, stream: str | None, as_json: bool) -> None:
    """List the requests to STREAM, or to every stream, that are not answered yet.

    They are carried out once the stream's process or the supervisor sensor sees them.
    """
    found = client.list_requests(stream)
    print_rows(
        found,
        ["request", "stream", "kind", "status", "created (UTC)", "from"],
        [
            (each.request_id, each.stream_id, each.kind, each.status, moment(each.created_at_ms), each.origin)
            for each in found
        ],
        as_json,
        empty="No request waits for an answer.",
    )


@command(
    "withdraw",
    short_help="Withdraw requests, so that nothing carries them out.",
    epilog="\b\nExample:\n  dagster-ckpt withdraw 3f6c9b1e-7a52-4d0e-9c41-5b8a2f6d7e10",
)
@click.argument("request_ids", metavar="REQUEST...", nargs=-1, required=True)
def withdraw(client: Client, *, request_ids: tuple[str, ...], as_json: bool) -> int:
    """Withdraw requests, so that nothing carries them out later. Exit status 1: one is unknown or was answered."""
    found, errors = [], []
    for each in request_ids:
        try:
            found.append(client.withdraw_request(each))
        except CatalogError as error:
            errors.append(str(error))
    messages = [f"{each.kind.value} of {each.stream_id} is {each.status.value}" for each in found]
    print_result(found, messages, as_json)
    for message in errors:
        progress(f"Error: {message}")
    return 0 if not errors and all(request.status == "WITHDRAWN" for request in found) else FAILED


def _retention_of_all(client: Client, *, dry_run: bool, yes: bool, as_json: bool) -> int:
    confirm(
        "Finish interrupted deletions of every stream, and delete objects that no snapshot refers to?",
        yes=yes or dry_run,
    )
    with working("Cleaning up") as stream_done:
        reports = client.apply_retention_to_all(dry_run=dry_run, progress=stream_done)
    messages = [f"{stream}: {message}" for stream, report in reports.items() for message in report.messages()]
    print_result(reports, messages, as_json)
    return FAILED if any(report.failed for report in reports.values()) else 0


def _report(report: RetentionReport, as_json: bool) -> int:
    print_result(report, report.messages() or ["Nothing to delete."], as_json)
    return FAILED if report.failed else 0


@cli.command(
    "class-archive",
    short_help="Write Java's classes to an archive, for faster starts.",
    epilog="\b\nExample:\n  dagster-ckpt class-archive /var/cache/spark.jsa",
)
@click.argument("path")
@click.option(
    "--conf", "settings", multiple=True, metavar="NAME=VALUE", help="A setting of the session, as the stream's."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def class_archive(*, path: str, settings: tuple[str, ...], as_json: bool) -> None:
    """Write an archive of the classes that a query needs, with which Spark starts faster."""
    from pathlib import Path

    from dagster_ckpt.spark.query.class_archive import write_class_archive

    wrong = next((each for each in settings if "=" not in each), None)
    if wrong is not None:
        raise click.UsageError(f"--conf {wrong}: give NAME=VALUE.")
    archive = Path(path).absolute()
    try:
        with working("Running small queries"):
            write_class_archive(archive, dict(each.split("=", 1) for each in settings))
    except CkptError as error:
        fail(error)
    megabytes = archive.stat().st_size / 1e6
    print_result({"path": str(archive), "megabytes": megabytes}, [f"wrote {archive} ({megabytes:,.0f} MB)"], as_json)
