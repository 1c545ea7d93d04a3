"""The command check: whether code can continue from a stream's state, as an exit status for CI."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from dagster_ckpt.cli.command import Deployment, cli, definitions_in, fail
from dagster_ckpt.cli.lifecycle import with_start_options
from dagster_ckpt.cli.output import print_result
from dagster_ckpt.errors import CkptError
from dagster_ckpt.stream.start_from import StartFrom

if TYPE_CHECKING:
    from dagster_ckpt.recovery.compatibility import CompatibilityReport

# By verdict; the others are 0.
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
