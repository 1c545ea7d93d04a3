"""What every command shares."""

from __future__ import annotations

import functools
import importlib
import math
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import TYPE_CHECKING, Any, Never

import click
from click.shell_completion import CompletionItem

from dagster_ckpt import __version__
from dagster_ckpt.errors import CkptError, RequestTimeoutError
from dagster_ckpt.values.storage_path import has_scheme

if TYPE_CHECKING:
    from types import FrameType

    import dagster as dg

    from dagster_ckpt.client import Client

FAILED = 1
PROBLEM_FOUND = 3
TIMED_OUT = 4
CONFIG_NAME = "dagster_ckpt.toml"

_EPILOG = """\b
Exit status:
  0  done
  1  refused or failed; the message says what to do
  2  wrong usage
  3  verify, doctor or health found a problem; line: unproven; check: INCOMPATIBLE
  4  a running stream did not answer in time; the request was withdrawn
  5  check: MIGRATABLE
"""

# More rows than a catalog has of a stream, and fits into a column of any database.
MOST_ROWS = 1_000_000_000


class Number(click.FloatRange):
    """A range of finite numbers; below 1e9, so that it is a time in any unit."""

    def __init__(self, at_least: float) -> None:
        super().__init__(min=at_least, max=1e9)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Refuse nan, too, which is in every range."""
        number: float = super().convert(value, param, ctx)
        return self.fail("nan is no number.", param, ctx) if math.isnan(number) else number


timeout = click.option(
    "--timeout",
    "timeout_s",
    type=Number(0),
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


@dataclass(frozen=True)
class Deployment:
    """The options that name a deployment."""

    catalog: str | None = None
    storage: str | None = None
    live_root: str | None = None
    module: str | None = None

    def connect(self, *, may_create: bool = False, instead: str | None = None) -> Client:
        """Open a client. These values come before those of definitions or file.

        `instead` is the folder of a catalog to use where a SQLite one does not exist yet.
        """
        from dagster_ckpt.client import Client

        if self.catalog is None and self.module is not None:
            return self._from_definitions()
        found = self if self.catalog is not None else self._from_file()
        url = found.catalog_url()
        if (file := _missing_file(url)) is not None and not may_create:
            raise click.UsageError(
                f"The catalog {url} does not exist: there is no file {file.absolute()}. Check the path; the first "
                "start of a stream creates the file. If it was lost, rebuild it from the snapshots:\n"
                f"  dagster-ckpt --catalog {url} --storage FOLDER_OF_CHECKPOINTS rebuild"
            )
        if file is not None and instead is not None:
            url = f"sqlite:///{instead}/catalog.db"
        return Client(url, storage=found.storage, live_root=found.live_root)

    def catalog_url(self) -> str:
        """The URL of the configured catalog."""
        found = self.catalog if self.catalog is not None else self._from_file().catalog
        if found is None:
            raise click.UsageError(
                "No catalog is configured. Pass --catalog sqlite:////var/lib/streams/catalog.db, set "
                f'DAGSTER_CKPT_CATALOG, write catalog = "..." into a file {CONFIG_NAME} here or in a parent folder, '
                "or pass the module of your Dagster definitions with -m."
            )
        return found

    def _from_file(self) -> Deployment:
        here = Path.cwd()
        for folder in (here, *here.parents):
            file = folder / CONFIG_NAME
            if file.is_file():
                return replace(_read(file), **{name: value for name, value in vars(self).items() if value is not None})
        return self

    def _from_definitions(self) -> Client:
        from dagster_ckpt.client import Client
        from dagster_ckpt.orchestration.resources import (
            CheckpointCatalogResource,
            CheckpointStorageResource,
            StateBackendResource,
        )

        module = str(self.module)
        resources = resources_in(module)

        def one(kind: type[Any]) -> Any:
            keys = [key for key, resource in resources.items() if isinstance(resource, kind)]
            if len(keys) > 1:
                raise click.UsageError(
                    f"{module} has several resources of type {kind.__name__}: {', '.join(sorted(keys))}. Name the "
                    "deployment with --catalog and --storage instead of -m."
                )
            if not keys:
                return None
            try:
                return resources[keys[0]].process_config_and_initialize()
            except Exception as error:
                raise click.UsageError(f"The resource {keys[0]} of module {module} cannot be used: {error}") from error

        catalog = one(CheckpointCatalogResource)
        if catalog is None:
            raise click.UsageError(f"{module} defines no CheckpointCatalogResource. Name the catalog by --catalog.")
        return Client.from_resources(
            catalog,
            one(CheckpointStorageResource) if self.storage is None else None,
            one(StateBackendResource) if self.live_root is None else None,
            storage=self.storage,
            live_root=self.live_root,
        )


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
    """Register a function that receives a client and `as_json`, and returns the exit status.

    If it `may_create_catalog`, a SQLite catalog need not exist yet.
    """

    def register(function: Callable[..., int | None]) -> click.Command:
        @click.option("--json", "as_json", is_flag=True, help="Print JSON.")
        @click.pass_obj
        @functools.wraps(function)
        def run(deployment: Deployment, /, **arguments: Any) -> None:
            is_dry_run = bool(arguments.get("dry_run"))
            try:
                with (
                    TemporaryDirectory() if is_dry_run else nullcontext() as folder,
                    deployment.connect(may_create=may_create_catalog, instead=folder) as client,
                ):
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

        made = group.command(name, **settings)(run)
        for each in made.params:
            if each.name == "stream":
                each.type = _StreamName()
            elif each.name in ("snapshot", "savepoint", "start_from") and each.type is click.STRING:
                each.type = _SnapshotName()
        return made

    return register


class _StreamName(click.types.StringParamType):
    def shell_complete(
        self,
        ctx: click.Context,
        param: click.Parameter,  # noqa: ARG002
        incomplete: str,
    ) -> list[CompletionItem]:
        given = ctx.find_root().params
        deployment = Deployment(**{each.name: given.get(each.name) for each in fields(Deployment)})
        with suppress(Exception), deployment.connect() as client:
            return [CompletionItem(each) for each in self._names(client, ctx) if each.startswith(incomplete)]
        return []

    def _names(self, client: Client, _: click.Context) -> list[str]:
        return [each.stream_id for each in client.list_streams()]


class _SnapshotName(_StreamName):
    def _names(self, client: Client, ctx: click.Context) -> list[str]:
        # Before the value of an option, click leaves the arguments unread.
        stream = ctx.params["stream"] or ctx.args[0]
        return [each.reference for each in client.list_snapshots(stream)]


class _Unconfirmed(click.ClickException):
    """A missing confirmation, which is shown without the usage of the command."""

    exit_code = click.UsageError.exit_code


def confirm(question: str, *, yes: bool) -> None:
    """Ask, unless the answer was given as an option."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise _Unconfirmed(f"{question} No terminal is attached: confirm with --yes.")
    click.confirm(question, abort=True, err=True)


def progress(message: str) -> None:
    """Print a message on stderr, apart from the result."""
    click.echo(message, err=True)


def stream_exists(client: Client, stream: str) -> None:
    """Fail for an unknown stream before a question is asked."""
    client.describe_stream(stream, limit=1)


def fail(error: CkptError, status: int = FAILED) -> Never:
    """Print an error, and the options that its Python names mean, and exit."""
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
    """Exit as after a signal, which withdraws what the command waits for."""
    # A second signal must not interrupt the clean-up.
    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    # 128 + signal, as shells do.
    sys.exit(128 + number)


def _missing_file(url: str) -> Path | None:
    """The file of a SQLite catalog if it does not exist: an empty one would hide a wrong path."""
    found = re.match(r"sqlite(?:\+\w+)?:///([^?]+)", url)
    if found is None or found[1].startswith((":memory:", "file:")) or Path(found[1]).exists():
        return None
    return Path(found[1])


def _read(file: Path) -> Deployment:
    import tomllib

    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise click.UsageError(f"{file} cannot be read: {error}") from error
    known = {each.name for each in fields(Deployment)} - {"module"}
    wrong = [name for name, value in content.items() if name not in known or not isinstance(value, str)]
    if wrong:
        raise click.UsageError(
            f"{file} sets {', '.join(sorted(wrong))}; it may set {', '.join(sorted(known))}, each to a string."
        )
    return Deployment(**{name: _below(file.parent, value) for name, value in content.items()})


def _below(folder: Path, place: str) -> str:
    sqlite = re.match(r"(sqlite(?:\+\w+)?:///)(.+)", place)
    if sqlite is not None and sqlite[2] != ":memory:":
        return sqlite[1] + str(folder / sqlite[2])
    return place if has_scheme(place) else str(folder / place)


def resources_in(module: str) -> dict[str, Any]:
    """Return the resources of the Dagster definitions in a module."""
    resources: dict[str, Any] = {}
    for each in definitions_in(module):
        resources |= each.resources or {}
    if not resources:
        raise click.UsageError(f"Module {module} has no Dagster Definitions with resources.")
    return resources


def definitions_in(module: str) -> list[dg.Definitions]:
    """Return the Dagster definitions in a module."""
    import dagster as dg

    with imported(module) as loaded:
        found = [value() if type(value).__name__ == "LazyDefinitions" else value for value in vars(loaded).values()]
    return [each for each in found if isinstance(each, dg.Definitions)]


@contextmanager
def imported(module: str) -> Iterator[ModuleType]:
    """Import a module of the user, also from this folder; an error in it is a UsageError."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        yield importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise click.UsageError(f"Module {module} cannot be imported: {_what_failed(error)}") from error


def _what_failed(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = "" if last.filename.startswith("<") else f" ({last.filename}, line {last.lineno})"
    return f"{type(error).__name__}: {error}{where}"
