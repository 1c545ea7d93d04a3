"""Commands that run the code of a stream: debug and check."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dagster_ckpt.cli.command import Deployment, cli, command, definitions_in, fail, imported, progress, resources_in
from dagster_ckpt.cli.lifecycle import with_start_options
from dagster_ckpt.cli.output import print_json, print_result, print_table
from dagster_ckpt.cli.state import limit, start_spark
from dagster_ckpt.errors import CkptError
from dagster_ckpt.stream.start_from import StartFrom
from dagster_ckpt.values.storage_path import has_scheme

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from dagster_ckpt.client import Client
    from dagster_ckpt.client.debugging import ShownBatch, ShownRows

    Query = Callable[[SparkSession], DataStreamWriter]
    from dagster_ckpt.recovery.compatibility_report import CompatibilityReport


@command(
    "debug",
    short_help="Run one batch again without touching the stream, and compare it with the sink.",
    epilog="\b\nExample:\n  dagster-ckpt debug orders --batch 812 --query streams:orders --output /tmp/batch-812",
)
@click.argument("stream")
@click.option("--batch", required=True, type=click.IntRange(min=0), help="Number of the batch.")
@click.option(
    "--query",
    metavar="MODULE:NAME",
    help="The query: a function of a Spark session, or a streaming asset. Default: the asset in -m's module.",
)
@click.option("--output", "folder", metavar="DIR", help="Write every frame as Parquet below this folder.")
@limit
@click.pass_context
def debug(
    context: click.Context,
    client: Client,
    *,
    stream: str,
    batch: int,
    query: str | None,
    folder: str | None,
    limit: int,
    as_json: bool,
) -> None:
    """Run one batch again with its original plan and state, and show all that went in and out.

    Shown are the input of each source, the changes of the state, the output, and how that differs from the sink. The
    stream may be running and is not changed: the batch runs in a temporary copy, on this machine unless
    PYSPARK_SUBMIT_ARGS names a master.
    """
    from dagster_ckpt.client.debugging import show_batch, write_batch

    with (
        _query(context.find_object(Deployment), stream, query) as (spark, describe),
        client.debug_batch(stream, batch, describe, spark=spark, report=progress) as found,
    ):
        written = write_batch(found, _absolute(folder)) if folder is not None else []
        shown = show_batch(found, limit=limit)
    if as_json:
        print_json(shown)
    else:
        _print(shown)
    for url in written:
        progress(f"wrote {url}")


def _absolute(folder: str) -> str:
    return folder if has_scheme(folder) else str(Path(folder).absolute())


@contextmanager
def _query(deployment: Deployment | None, stream: str, named: str | None) -> Iterator[tuple[SparkSession, Query]]:
    module, _, name = (named or "").partition(":")
    module = module or (deployment.module if deployment is not None else None) or ""
    if not module or (named is not None and not name):
        raise click.UsageError(
            "The code of the query is needed: name it with --query MODULE:NAME, or the module of your Dagster "
            "definitions with -m."
        )
    with imported(module) as loaded:
        values = vars(loaded)
    if not name:
        named_so = [each for each in values.values() if hasattr(each, "is_called") and each.is_called(stream)]
        if not named_so:
            raise click.UsageError(f"Module {module} has no streaming asset {stream}. Name the query with --query.")
        found = named_so[0]
    elif name in values:
        found = values[name]
    else:
        raise click.UsageError(f"Module {module} has no {name}.")
    if hasattr(found, "is_called"):
        from dagster_ckpt.orchestration.query import query_of

        with query_of(found, resources_in(module)) as described:
            yield described
    elif callable(found):
        yield start_spark(), found
    else:
        raise click.UsageError(f"{module}:{name} is neither a function of a Spark session nor a streaming asset.")


def _print(shown: ShownBatch) -> None:
    click.echo(f"Batch {shown.batch_id}, from {shown.replayed_from}")
    for note in shown.notes:
        click.echo(f"Note: {note}")
    for source, rows in shown.inputs.items():
        _print_rows(f"Input of source {source}", rows)
    if shown.without_state is not None:
        click.echo(f"\nState: {shown.without_state}")
    for each in shown.states:
        counts = ", ".join(f"{number} {change.lower()}" for change, number in each.counts.items())
        click.echo(f"\nState {each.state} of operator {each.operator_id} ({each.operator}): {counts}")
        _print_first(each.columns, each.first, sum(each.counts.values()))
    if shown.output is None:
        click.echo(f"\nThe batch fails: {shown.error}")
        return
    _print_rows("Output", shown.output)
    if shown.difference is None:
        click.echo(f"\nNot compared with the sink {shown.sink or ''}: {shown.sink_says}")
    elif shown.difference.rows == 0:
        click.echo(f"\nThe sink has exactly the output: {shown.sink_says}")
    else:
        _print_rows(f"The sink differs ({shown.sink_says})", shown.difference)


def _print_rows(title: str, rows: ShownRows) -> None:
    click.echo(f"\n{title}: {rows.rows} rows")
    _print_first(rows.columns, rows.first, rows.rows)


def _print_first(columns: Sequence[str], first: Sequence[Sequence[Any]], rows: int) -> None:
    if first:
        print_table(columns, first, empty="")
        if rows > len(first):
            click.echo(f"{rows - len(first)} more.")


# Exit status by verdict; 0 for the others.
STATUSES = {"INCOMPATIBLE": 3, "MIGRATABLE": 5}


@cli.command(
    "check",
    short_help="Check whether code can continue from a stream's state.",
    epilog="\b\nExit status:\n"
    "  0  SAME or COMPATIBLE: a plain start continues\n"
    "  3  INCOMPATIBLE: the start is refused\n"
    "  5  MIGRATABLE: the start needs the options that are printed\n\n"
    "\b\nExample:\n  dagster-ckpt -m definitions check orders --json",
)
@click.argument("stream")
@with_start_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def check(deployment: Deployment, /, *, stream: str, as_json: bool, **options: Any) -> None:
    """Check whether the code in the module of -m can continue from the state of a stream. Starts no query.

    The verdict is the decision of a start with the same options. It needs Spark and the catalog. What it cannot
    reach of storage and sources, it reports as not compared.
    """
    if deployment.module is None:
        raise click.UsageError(
            "Name the module of your Dagster definitions with -m, before the command: its code is what is checked."
        )
    try:
        report = _report(deployment.module, stream, StartFrom.from_record(options))
    except CkptError as error:
        fail(error)
    print_result(report.as_record(), report.messages(), as_json)
    sys.exit(STATUSES.get(report.verdict.value, 0))


def _report(module: str, stream: str, start_from: StartFrom) -> CompatibilityReport:
    import dagster as dg

    from dagster_ckpt.orchestration.query import check_definitions

    return check_definitions(stream, dg.Definitions.merge(*definitions_in(module)), start_from=start_from)
