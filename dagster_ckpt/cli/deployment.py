"""Finds the deployment that a command works on: options, environment, definitions, or `dagster_ckpt.toml`."""

from __future__ import annotations

import importlib
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from dagster_ckpt.client import Client

CONFIG_NAME = "dagster_ckpt.toml"


@dataclass(frozen=True)
class Deployment:
    """The options that name a deployment. Storage and live root are for streams that the catalog does not know."""

    catalog: str | None = None
    storage: str | None = None
    live_root: str | None = None
    module: str | None = None

    def connect(self, *, may_create: bool = False) -> Client:
        """Open a client. These values come before those of definitions or file."""
        from dagster_ckpt.client import Client

        if self.catalog is None and self.module is not None:
            return self._from_definitions()
        found = self if self.catalog is not None else self._from_file()
        url = found.catalog_url()
        if not may_create:
            _refuse_missing(url)
        return Client(url, storage=found.storage, live_root=found.live_root)

    def catalog_url(self) -> str:
        """The catalog's URL, from an option, the environment or the file."""
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
        from dagster_ckpt.orchestration.resources.resources import (
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


def _refuse_missing(url: str) -> None:
    """Refuse a SQLite catalog without a file: an empty one would only hide a wrong path."""
    found = re.match(r"sqlite(?:\+\w+)?:///([^?]+)", url)
    if found is not None and found[1] != ":memory:" and not Path(found[1]).exists():
        raise click.UsageError(
            f"The catalog {url} does not exist: there is no file {Path(found[1]).absolute()}. Check the path; the "
            "first start of a stream creates the file."
        )


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
    """Relative paths are relative to the file."""
    sqlite = "sqlite:///"
    if place.startswith(sqlite) and place != f"{sqlite}:memory:":
        return sqlite + str(folder / place.removeprefix(sqlite))
    return place if "://" in place else str(folder / place)


def resources_in(module: str) -> dict[str, Any]:
    """The resources of the Dagster definitions in a module."""
    import dagster as dg

    resources: dict[str, Any] = {}
    with imported(module) as loaded:
        for value in vars(loaded).values():
            defs = value() if type(value).__name__ == "LazyDefinitions" else value
            if isinstance(defs, dg.Definitions):
                resources |= defs.resources or {}
    if not resources:
        raise click.UsageError(f"Module {module} has no Dagster Definitions with resources.")
    return resources


@contextmanager
def imported(module: str) -> Iterator[ModuleType]:
    """A module of the user, also from this folder; what fails in it is a wrong use of the command."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        yield importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise click.UsageError(f"Module {module} cannot be imported: {_what_failed(error)}") from error


def _what_failed(error: BaseException) -> str:
    """With the line of the user's module that raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = "" if last.filename.startswith("<") else f" ({last.filename}, line {last.lineno})"
    return f"{type(error).__name__}: {error}{where}"
