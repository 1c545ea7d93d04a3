"""Commands that only read."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from dagster_ckpt.cli.command import MOST_ROWS, PROBLEM_FOUND, Number, command
from dagster_ckpt.cli.output import (
    moment,
    print_fields,
    print_json,
    print_json_line,
    print_result,
    print_rows,
    print_table,
    span,
    working,
)
from dagster_ckpt.values.durations import headline

if TYPE_CHECKING:
    from dagster_ckpt.catalog.records import ExecutionRecord, SnapshotRecord
    from dagster_ckpt.client import Client
    from dagster_ckpt.client.description import StreamSummary
    from dagster_ckpt.spark.doctor.finding import Finding

_LISTED = 50
KINDS = click.Choice(["checkpoint", "savepoint"], case_sensitive=False)


@command("streams", epilog="\b\nExample:\n  dagster-ckpt streams --json | jq -r '.[].stream_id'")
def streams(client: Client, *, as_json: bool) -> None:
    """List the streams that the catalog knows."""
    found = client.list_streams()
    print_rows(
        found,
        ["stream", "status", "batch", "newest snapshot", "assets"],
        [
            (
                *(each.stream_id, each.status, each.batch_id, _name(each.newest_snapshot)),
                each.broken or _lost_catalog(client, each) or each.asset_key,
            )
            for each in found
        ],
        as_json,
        empty="The catalog has no streams.",
    )


@command(
    "show",
    short_help="Show a stream: its status, executions and snapshots.",
    epilog="\b\nExample:\n  dagster-ckpt show orders",
)
@click.argument("stream")
@click.option(
    "--limit",
    type=click.IntRange(1, MOST_ROWS),
    default=10,
    show_default=True,
    help="Executions and snapshots to show.",
)
def show(client: Client, *, stream: str, limit: int, as_json: bool) -> None:
    """Show a stream: what it is doing, its executions and its snapshots."""
    found = client.describe_stream(stream, limit=limit)
    if as_json:
        print_json(found)
        return
    summary, record = found.summary, found.record
    print_fields(
        {
            "stream": summary.stream_id,
            "status": summary.status.value,
            "reason": summary.reason,
            "assets": summary.asset_key,
            "batch": summary.batch_id,
            "pace": ", ".join(_pace(summary)) or None,
            "timeline": record.timeline,
            "live directory": record.live_directory,
            "restart strategy": found.settings.restart,
            "desired state": found.desired.desired if found.desired else None,
            "alert": _without_known(found.desired.alert if found.desired else None, summary.reason),
            "broken": summary.broken or _lost_catalog(client, summary),
        }
    )
    click.echo("\nExecutions")
    print_table(
        ["started (UTC)", "cause", "from", "status", "ended (UTC)", "host", "pid", "reason"],
        [
            (
                *(moment(each.started_at_ms), each.shown_cause, _started_from(each, found.snapshots), each.status),
                *(moment(each.ended_at_ms), each.host, each.pid, _brief(each.reason)),
            )
            for each in found.executions
        ],
        empty="None.",
    )
    click.echo("\nSnapshots")
    _print_snapshots(found.snapshots)
    if found.requests:
        click.echo("\nUnanswered requests")
        print_table(
            ["request", "kind", "from", "created (UTC)"],
            [(each.request_id, each.kind, each.origin, moment(each.created_at_ms)) for each in found.requests],
            empty="None.",
        )


def _started_from(execution: ExecutionRecord, listed: Sequence[SnapshotRecord]) -> str | None:
    recovery = execution.recovery or {}
    restored = recovery.get("snapshot_id")
    if restored:
        return next((each.name for each in listed if each.snapshot_id == restored), str(restored))
    return execution.began_with or None


def _brief(reason: str | None) -> str | None:
    return headline(reason) if reason else None


def _without_known(alert: str | None, reason: str | None) -> str | None:
    return alert.replace(reason, headline(reason)) if alert and reason else alert


@command(
    "list",
    short_help="List the checkpoints and savepoints of a stream.",
    epilog="\b\nExample:\n  dagster-ckpt list orders --kind savepoint",
)
@click.argument("stream")
@click.option("--kind", type=KINDS, help="Only checkpoints, or only savepoints.")
@click.option("--all", "is_all", is_flag=True, help="Also failed, unfinished and deleted ones.")
@click.option("--limit", type=click.IntRange(1, MOST_ROWS), help="Snapshots to show; default: 50, and all with --json.")
def snapshots(client: Client, *, stream: str, kind: str | None, is_all: bool, limit: int | None, as_json: bool) -> None:
    """List the checkpoints and savepoints of a stream, newest first."""
    from dagster_ckpt.catalog.records import SnapshotStatus

    status = None if is_all else SnapshotStatus.COMPLETED
    found = client.list_snapshots(stream, kind=kind.upper() if kind else None, status=status)
    if as_json:
        print_json(found[:limit])
        return
    shown = found[: limit or _LISTED]
    _print_snapshots(shown)
    if not found and (lost := _lost_catalog(client, client.describe_stream(stream, limit=1).summary)):
        click.echo(lost)
    if len(found) > len(shown):
        click.echo(f"{len(found) - len(shown)} older ones: --limit {len(found)} shows them.")


@command(
    "snapshot",
    short_help="Show a snapshot: its batch, operators and sinks.",
    epilog="\b\nExample:\n  dagster-ckpt snapshot orders before-release-42",
)
@click.argument("stream")
@click.argument("snapshot", default="latest")
def snapshot(client: Client, *, stream: str, snapshot: str, as_json: bool) -> None:
    """Show a snapshot: its batch, operators, sinks, and what protects it from deletion.

    SNAPSHOT is a label, a number such as chk-7, an id, a location, or latest.
    """
    from dagster_ckpt.values.durations import size

    found = client.describe_snapshot(stream, snapshot)
    if as_json:
        print_json(found)
        return
    record = found.record
    print_fields(
        {
            "snapshot": _name(record),
            "id": record.snapshot_id,
            "status": record.status.value,
            "batch": record.batch_id,
            "location": record.location,
            "completed (UTC)": moment(record.completed_at_ms),
            "duration": span(record.duration_ms),
            "size": size(found.full_bytes),
            "new bytes": size(record.incremental_bytes),
            "files": found.file_count,
            "state rows": record.state_rows,
            "watermark (UTC)": moment(record.watermark_ms),
            "timeline": record.timeline,
            "verified (UTC)": moment(record.verified_at_ms),
            "problem": record.verified_problem,
            "held by": ", ".join(f"{hold.kind.value} ({hold.holder})" for hold in found.holds) or None,
        }
    )


@command("output-files", epilog="\b\nExample:\n  dagster-ckpt output-files orders --json")
@click.argument("stream")
def output_files(client: Client, *, stream: str, as_json: bool) -> None:
    """List the files that a stream's file sinks have committed.

    Readers that do not follow Spark's log of the folder would also read batches that a rewind has undone.
    """
    found = client.output_files(stream)
    print_result(found, found, as_json)


@command("health", epilog="\b\nExample:\n  dagster-ckpt health orders || page-someone")
@click.argument("stream")
def health(client: Client, *, stream: str, as_json: bool) -> int:
    """Evaluate the health checks of a stream. Exit status 3: one of them is red."""
    from dagster_ckpt.client.health import Verdict

    found = client.health(stream)
    rows = [(each.check, each.verdict, each.message) for each in found.findings]
    print_rows(found, ["check", "result", "why"], rows, as_json, empty="No check applies.")
    return PROBLEM_FOUND if found.verdict is Verdict.ERROR else 0


@command(
    "cost",
    short_help="Estimate the requests and the cost of a stream in S3.",
    epilog="\b\nExample:\n  dagster-ckpt cost orders --price put=0.0055 --price get=0.00044",
)
@click.argument("stream")
@click.option(
    "--price", "prices", multiple=True, metavar="NAME=USD", help="put or get (1,000 requests), storage (GB and month)."
)
def cost(client: Client, *, stream: str, prices: Sequence[str], as_json: bool) -> None:
    """Estimate the requests of a day in an object store, what they cost, and which settings lower the bill.

    Default prices: the list price of S3 Standard.
    """
    found = client.cost(stream, prices=dict(map(_price, prices)))
    print_result(found, found.messages(), as_json)
    if as_json:
        return
    print_table(
        ["a day", "PUT, COPY", "LIST", "GET, HEAD", "USD"],
        [
            (
                *(line.what, f"{line.requests.put + line.requests.copy:,.0f}", f"{line.requests.list:,.0f}"),
                *(f"{line.requests.get + line.requests.head:,.0f}", f"{line.usd:.2f}"),
            )
            for line in found.lines
        ],
        empty="No request.",
    )
    click.echo(f"\nTotal: {found.usd:.2f} USD a day")
    print_table(
        ["what lowers it", "requests", "USD a day"],
        [(each.setting, f"-{each.requests:,.0f}", f"-{each.usd:.2f}") for each in found.savings],
        empty="No setting lowers it.",
    )


def _price(given: str) -> tuple[str, float]:
    name, _, price = given.partition("=")
    try:
        return name, float(price)
    except ValueError:
        raise click.BadParameter(f"{given!r} is not NAME=USD, such as put=0.005.") from None


@command("doctor", epilog="\b\nExample:\n  dagster-ckpt doctor orders --deep-snapshots")
@click.argument("stream")
@click.option("--directory", metavar="PATH", help="Examine this directory instead of the stream's own.")
@click.option("--shallow", is_flag=True, help="Do not read the content of state files.")
@click.option("--deep-snapshots", is_flag=True, help="Compare every byte of the recommended snapshot.")
def doctor(
    client: Client, *, stream: str, directory: str | None, shallow: bool, deep_snapshots: bool, as_json: bool
) -> int:
    """Examine a live directory. Exit status 3: Spark cannot resume in it."""
    with working(f"Examining {stream}"):
        found = client.doctor(stream, directory=directory, deep=not shallow, deep_snapshots=deep_snapshots)
    print_result(found, found.messages, as_json)
    if not as_json:
        print_table(
            ["severity", "code", "path", "what was found"],
            _by_file(found.diagnosis.findings),
            empty="No finding.",
        )
    return 0 if found.diagnosis.can_resume else PROBLEM_FOUND


def _by_file(findings: Sequence[Finding]) -> list[tuple[object, ...]]:
    """One row for each file, the worst first."""
    of_file: dict[str, list[Finding]] = {}
    for each in findings:
        of_file.setdefault(each.path, []).append(each)
    return [
        (found[0].severity, ", ".join(each.code for each in found), path, " ".join(each.explanation for each in found))
        for path, found in of_file.items()
    ]


@command(
    "watch",
    short_help="Print a line at each change of a stream.",
    epilog="\b\nExample:\n  dagster-ckpt watch orders --every 5",
)
@click.argument("stream")
@click.option("--every", default=2.0, show_default=True, type=Number(0.2), help="Seconds between refreshes.")
@click.option("--times", type=click.IntRange(min=1), help="Stop after this many refreshes; default: until Ctrl-C.")
def watch(client: Client, *, stream: str, every: float, times: int | None, as_json: bool) -> None:
    """Print a line whenever a stream's status, batch or newest snapshot changes, until Ctrl-C.

    With --json, each line is an object.
    """
    before = None
    looks = itertools.count(1)
    with suppress(KeyboardInterrupt):
        while True:
            summary = client.describe_stream(stream, limit=1).summary
            newest = summary.newest_snapshot
            now = (summary.status, summary.batch_id, newest.snapshot_id if newest else None)
            if now != before:
                print_json_line(summary) if as_json else click.echo(_watched(summary))
            before = now
            if next(looks) == times:
                return
            time.sleep(every)


def _watched(summary: StreamSummary) -> str:
    at = moment(int(time.time() * 1000))
    newest = _name(summary.newest_snapshot) or "none"
    batch = "no batch" if summary.batch_id is None else f"batch {summary.batch_id}"
    return "  ".join([f"{at}  {summary.status.value:10} {batch}", f"newest {newest}", *_pace(summary)])


def _pace(summary: StreamSummary) -> list[str]:
    speed, behind = summary.rows_per_second, summary.records_behind
    return [
        *([f"{speed:,.0f} rows/s"] if speed is not None else []),
        *([f"{behind:,} records behind"] if behind is not None else []),
    ]


def _lost_catalog(client: Client, summary: StreamSummary) -> str | None:
    from dagster_ckpt.client.description import StreamStatus

    if summary.status is not StreamStatus.NEVER_STARTED:
        return None
    owner, stream_id = client.other_deployment(summary.stream_id), summary.stream_id
    if owner is None:
        return None
    return (
        f"its folder has the state of deployment {owner}. If that catalog was lost: dagster-ckpt rebuild {stream_id} "
        f"--take-over-deployment {owner}"
    )


def _name(snapshot: SnapshotRecord | None) -> str | None:
    return snapshot.name if snapshot is not None else None


def _print_snapshots(found: Sequence[SnapshotRecord]) -> None:
    from dagster_ckpt.values.durations import size

    print_table(
        ["snapshot", "batch", "status", "completed (UTC)", "size", "new", "took", "problem"],
        [
            (
                *(_name(each), each.batch_id, each.status, moment(each.completed_at_ms)),
                *(size(each.full_bytes), size(each.incremental_bytes), span(each.duration_ms)),
                each.broken or each.verified_problem or each.failure_reason,
            )
            for each in found
        ],
        empty="None.",
    )
