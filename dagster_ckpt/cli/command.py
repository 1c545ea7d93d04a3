"""What every command shares: the group and its options, confirmation, and how errors become exit statuses."""

from __future__ import annotations

import functools
import re
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Never

import click

from dagster_ckpt.cli.deployment import Deployment
from dagster_ckpt.errors import CkptError, RequestTimeoutError
from dagster_ckpt.version import __version__

if TYPE_CHECKING:
    from types import FrameType

    from dagster_ckpt.client import Client

FAILED = 1
PROBLEM_FOUND = 3
TIMED_OUT = 4

_EPILOG = """\b
Exit status:
  0  done
  1  refused or failed; the message says what to do
  2  wrong usage
  3  verify, doctor or health found a problem; check: INCOMPATIBLE
  4  a running stream did not answer in time; the request was withdrawn
  5  check: MIGRATABLE
"""


timeout = click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    default=600.0,
    help="How long to wait; default: 600.",
)
yes = click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
label = click.option("--label", metavar="NAME", help="A name for the snapshot, to start from later.")
target = click.option(
    "--target", "target_directory", metavar="PATH", help="Folder for the savepoint, instead of the configured one."
)
dry_run = click.option("--dry-run", is_flag=True, help="Only report what would be done.")


@click.group(epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--catalog", metavar="URL", envvar="DAGSTER_CKPT_CATALOG", help="SQLAlchemy URL of the catalog.")
@click.option(
    "--storage",
    metavar="PATH",
    envvar="DAGSTER_CKPT_STORAGE",
    help="Folder of checkpoints, for streams that the catalog does not know, and in place of -m's.",
)
@click.option(
    "--live-root",
    metavar="PATH",
    envvar="DAGSTER_CKPT_LIVE_ROOT",
    help="Folder of live directories, for streams that the catalog does not know, and in place of -m's.",
)
@click.option(
    "-m",
    "--module",
    metavar="MODULE",
    envvar="DAGSTER_CKPT_MODULE",
    help="Take these from the resources in this module's Dagster definitions.",
)
@click.version_option(__version__, prog_name="dagster-ckpt")
@click.pass_context
def cli(
    context: click.Context, catalog: str | None, storage: str | None, live_root: str | None, module: str | None
) -> None:
    """Checkpoints and savepoints of Spark streams.

    The deployment is named by these options, by environment variables, or by a file dagster_ckpt.toml in
    this folder or one above. Neither Dagster nor Spark has to run.

    \b
    Examples:
      dagster-ckpt --catalog sqlite:////var/lib/streams/catalog.db streams
      dagster-ckpt list orders
      dagster-ckpt savepoint orders --label before-release-42
      dagster-ckpt restart orders --from before-release-42 --preview
    """  # noqa: D301 - click's mark of a paragraph to leave as it is
    deployment = Deployment(catalog, storage, live_root, module)
    if _is_typed(context, "module"):
        if _is_typed(context, "catalog"):
            raise click.UsageError("--catalog and -m both name a catalog. Leave one of them out.")
        # Typed options override the environment.
        others = {name: None for name in ("catalog", "storage", "live_root") if not _is_typed(context, name)}
        deployment = replace(deployment, **others)
    context.obj = deployment


def _is_typed(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def command(
    name: str, *, group: click.Group = cli, may_create_catalog: bool = False, **settings: Any
) -> Callable[[Callable[..., int | None]], click.Command]:
    """Register a command that receives a client and `as_json`; what it returns is the exit status.

    One that `may_create_catalog` works on a SQLite catalog that does not exist yet.
    """

    def register(function: Callable[..., int | None]) -> click.Command:
        @click.option("--json", "as_json", is_flag=True, help="Print JSON.")
        @click.pass_obj
        @functools.wraps(function)
        def run(deployment: Deployment, /, **arguments: Any) -> None:
            try:
                with deployment.connect(may_create=may_create_catalog) as client:
                    status = function(client, **arguments)
            except RequestTimeoutError as error:
                fail(error, TIMED_OUT)
            except CkptError as error:
                fail(error)
            except (KeyboardInterrupt, SystemExit) as error:
                # Report what was withdrawn, unless the terminal is gone.
                with suppress(OSError):
                    for note in getattr(error, "__notes__", ()):
                        progress(note)
                if isinstance(error, KeyboardInterrupt):
                    # Click would exit with 1.
                    end(signal.SIGINT, None)
                raise
            sys.exit(status or 0)

        return group.command(name, **settings)(run)

    return register


def confirm(question: str, *, yes: bool) -> None:
    """Ask before something is undone or deleted, unless the answer was given as an option."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError(f"{question} No terminal is attached: confirm with --yes.")
    click.confirm(question, abort=True, err=True)


def progress(message: str) -> None:
    """Print a step of a long operation, where it does not mix with the result."""
    click.echo(message, err=True)


def stream_exists(client: Client, stream: str) -> None:
    """Check that the catalog knows a stream, before a question is asked."""
    client.describe_stream(stream, limit=1)


def fail(error: CkptError, status: int = FAILED) -> Never:
    """Print an error, with command options for Python names, and exit."""
    click.echo(f"Error: {error}{_options_meant(str(error))}", err=True)
    sys.exit(status)


def _options_meant(message: str) -> str:
    context = click.get_current_context(silent=True)
    options = [each for each in context.command.params if isinstance(each, click.Option)] if context is not None else []
    meant = [
        f"{option.name} is {option.opts[0]}"
        for option in options
        if option.name is not None and "_" in option.name and re.search(rf"\b{option.name}\b", message)
    ]
    return f"\nOn the command line, {', '.join(meant)}." if meant else ""


def end(number: int, _: FrameType | None) -> Never:
    """Exit and withdraw what the command waits for."""
    # A second signal must not interrupt the clean-up.
    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    # 128 + signal, as shells do.
    sys.exit(128 + number)
