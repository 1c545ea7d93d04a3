"""Commands on the state of streams."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from dagster_ckpt.cli.command import (
    MOST_ROWS,
    PROBLEM_FOUND,
    cli,
    command,
    confirm,
    fail,
    label,
    progress,
    stream_exists,
    target,
    yes,
)
from dagster_ckpt.cli.output import print_json, print_result, print_table
from dagster_ckpt.errors import CkptError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dagster_ckpt.client import Client

_THREADS = 2


@cli.group("state", short_help="Look into the state of a stream, compare it, forget keys.")
def state() -> None:
    """Look into the state of a stream, compare it, and forget keys.

    Spark reads the state: PySpark must be installed, and an application is started on this machine unless
    PYSPARK_SUBMIT_ARGS names a master.
    """


operator = click.option("--operator", metavar="NUMBER|NAME", help="Only this operator.")
of_state = click.option("--state", metavar="NAME", help="Only this state; left or right for a join.")
limit = click.option(
    "--limit", default=20, show_default=True, type=click.IntRange(0, MOST_ROWS), help="Rows to show of each state."
)
write_to = click.option("--write-to", metavar="PATH", help="Write all rows as Parquet below this folder.")


@cli.group("rewriter", short_help="Another Spark that reads and rewrites state.")
def rewriter() -> None:
    """Another Spark that reads and rewrites the state of streams on Spark 3.5 to 4.1."""


@rewriter.command("install", epilog="\b\nExample:\n  dagster-ckpt rewriter install")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def install(*, as_json: bool) -> None:
    """Install another PySpark for it with pip. The installed one is not changed."""
    from dagster_ckpt.state.rewriter import install_rewriter

    try:
        place = str(install_rewriter(progress))
    except CkptError as error:
        fail(error)
    print_result({"place": place}, [f"installed: {place}"], as_json)


@command(
    "show",
    group=state,
    epilog='\b\nExample:\n  dagster-ckpt state show orders chk-7 --where "user_id = 7"',
)
@click.argument("stream")
@click.argument("snapshot", default="latest")
@operator
@of_state
@click.option("--where", metavar="SQL", help="Only rows that match this condition on fields of the key.")
@limit
@write_to
def show(
    client: Client,
    *,
    stream: str,
    snapshot: str,
    where: str | None,
    limit: int,
    write_to: str | None,
    as_json: bool,
    **selected: Any,
) -> None:
    """Show the rows of a stream's state.

    SNAPSHOT is a label, a number such as chk-7, an id, a location, latest, or live for the newest
    committed batch.
    """
    from dagster_ckpt.client.state_browsing import show_state, written_rows

    progress(f"{stream}: copying {snapshot}")
    with client.state(stream, snapshot, spark=start_spark(), **selected) as found:
        progress(f"{stream}: reading {found}")
        written = written_rows(found, write_to, where=where)
        shown = show_state(found, where=where, limit=limit)
    if as_json:
        print_json(shown)
        return
    if not shown:
        click.echo("The query keeps no state.")
    for each in shown:
        click.echo(f"\n{each.state} of operator {each.operator_id} ({each.operator}): {each.rows} rows")
        print_table(each.columns, each.first, empty="None.")
        if each.rows > len(each.first):
            click.echo(f"{each.rows - len(each.first)} more.")
    for url in written:
        progress(f"wrote {url}")


@command(
    "diff",
    short_help="Show which rows of state were added, removed, changed.",
    group=state,
    epilog="\b\nExample:\n  dagster-ckpt state diff orders chk-7 live",
)
@click.argument("stream")
@click.argument("before")
@click.argument("after")
@operator
@of_state
@limit
@write_to
def diff(
    client: Client,
    *,
    stream: str,
    before: str,
    after: str,
    limit: int,
    write_to: str | None,
    as_json: bool,
    **selected: Any,
) -> None:
    """Show which rows of state were added, removed and changed between two snapshots.

    BEFORE and AFTER are labels, numbers such as chk-7, ids, locations, latest, or live.
    """
    from dagster_ckpt.client.state_browsing import show_differences, written_rows

    progress(f"{stream}: copying {before} and {after}")
    with client.state_diff(stream, before, after, spark=start_spark(), **selected) as found:
        progress(f"{stream}: comparing {found.before} with {found.after}")
        written = written_rows(found, write_to)
        shown = show_differences(found, limit=limit)
    if as_json:
        print_json(shown)
        return
    print_table(
        ["operator", "state", "added", "removed", "changed", "note"],
        [(f"{each.operator_id} {each.operator}", each.state, *each.counts.values(), each.note) for each in shown],
        empty="The query keeps no state.",
    )
    for each in shown:
        if each.first:
            click.echo(f"\n{each.state} of operator {each.operator_id} ({each.operator})")
            print_table(each.columns, each.first, empty="None.")
    for url in written:
        progress(f"wrote {url}")


@command(
    "forget",
    group=state,
    epilog='\b\nExample:\n  dagster-ckpt state forget orders --where "user_id = 7" --reason "request 4711"',
)
@click.argument("stream")
@click.argument("snapshot", default="latest")
@click.option("--where", metavar="SQL", required=True, help="Which keys: a condition on fields of the key.")
@click.option("--reason", required=True, help="Why, as the savepoint records it.")
@operator
@label
@target
@yes
def forget(
    client: Client,
    *,
    stream: str,
    snapshot: str,
    where: str,
    operator: str | None,
    yes: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Make a savepoint of a snapshot without the state of some keys.

    Nothing else is changed: start the stream from the savepoint, and delete the older snapshots.
    """
    from dagster_ckpt.state.editing import StateEdit

    stream_exists(client, stream)
    confirm(f"Create a savepoint from {snapshot} of {stream} without the keys that match {where}?", yes=yes)
    edit = StateEdit(operator, forget=where)
    spark = start_spark()
    done = client.edit_state(stream, edit, snapshot=snapshot, spark=spark, report=progress, **options)
    messages = done.messages()
    print_result({"savepoint": done.savepoint, "rows": done.rows, "messages": messages}, messages, as_json)


@command(
    "remaining",
    group=state,
    epilog="\b\nExample:\n  dagster-ckpt state remaining orders forgotten-4711",
)
@click.argument("stream")
@click.argument("savepoint")
def remaining(client: Client, *, stream: str, savepoint: str, as_json: bool) -> int:
    """List what still contains the state from before an edit.

    SAVEPOINT is the savepoint that `state forget` made. Exits with 3 if anything is left. Spark is not needed.
    """
    found = client.remaining_state(stream, savepoint)
    print_result({"snapshots": found.snapshots, "directories": found.directories}, found.messages(), as_json)
    return 0 if found.is_nowhere else PROBLEM_FOUND


def start_spark() -> SparkSession:
    """Start Spark on this machine, or on the master that the environment names."""
    from dagster_ckpt.spark.query.session import start_application

    with suppress(ImportError):
        # PySpark 4 logs errors with the JVM's stack; the command prints them.
        from pyspark.logger import PySparkLogger

        for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
            PySparkLogger.getLogger(name).setLevel(logging.CRITICAL)
    settings = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false", "spark.log.level": "ERROR"}
    return start_application(_THREADS, settings)
