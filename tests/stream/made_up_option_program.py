"""Adds an option to `StartFrom` and prints as JSON what each interface knows of it."""

from __future__ import annotations

import json
import sys
import types
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

NAME, DESCRIPTION = "made_up", "An option that only this test has."
_DECLARATION = f'    {NAME}: Annotated[bool, Described(description="{DESCRIPTION}")] = False\n\n'
_MODULE = "dagster_ckpt.stream.start_from"


def declare() -> None:
    """Load the module with one more field, before anything else imports it."""
    spec = find_spec(_MODULE)
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text()
    above, below = source.split("    def __post_init__(self)", 1)
    module = types.ModuleType(_MODULE)
    sys.modules[_MODULE] = module
    declared = f"{above}{_DECLARATION}    def __post_init__(self){below}"
    exec(compile(declared, spec.origin, "exec"), vars(module))


def command_line() -> dict[str, Any]:
    """The options of each command, with their help."""
    from dagster_ckpt.cli.main import commands

    return {
        name: {str(option.name): getattr(option, "help", None) for option in command.params}
        for name, command in commands().commands.items()
    }


def launchpad() -> dict[str, Any]:
    """The fields of each op's config, with their descriptions."""
    import dagster as dg

    from dagster_ckpt.client.launching import DriverLaunch
    from dagster_ckpt.orchestration.definitions import stream_definitions
    from dagster_ckpt.orchestration.external_asset import external_streaming_asset
    from dagster_ckpt.orchestration.resources import (
        CheckpointCatalogResource,
        CheckpointStorageResource,
        StateBackendResource,
    )
    from dagster_ckpt.orchestration.streaming_asset import streaming_asset

    @streaming_asset()
    def orders(context: Any) -> Any: ...

    clicks = external_streaming_asset("clicks", launch=DriverLaunch(("python",), log_directory="/tmp"))
    resources = {
        "pyspark": dg.ResourceDefinition.none_resource(),
        "checkpoint_storage": CheckpointStorageResource(path="file:///checkpoints"),
        "state_backend": StateBackendResource(live_directory="/live"),
        "checkpoint_catalog": CheckpointCatalogResource(url="sqlite:////catalog.db"),
    }
    definitions = dg.Definitions.merge(stream_definitions(orders, clicks), dg.Definitions(resources=resources))
    jobs = definitions.resolve_all_job_defs()
    ops = [op for job in jobs for op in job.all_node_defs if isinstance(op, dg.OpDefinition)]
    return {
        op.name: {
            name: field.description
            for name, field in getattr(op.config_schema.as_field().config_type, "fields", {}).items()
        }
        for op in ops
    }


def page(folder: str) -> str:
    """The form of a restart."""
    from starlette.requests import Request

    from dagster_ckpt.client import Client
    from dagster_ckpt.ui.app import CheckpointPage

    with Client(f"sqlite:///{folder}/catalog.db") as client:
        client.catalog.streams.ensure("orders", name="orders", asset_key="orders", options={})
        scope = {"type": "http", "query_string": b"", "path_params": {"stream": "orders"}, "headers": []}
        shown = CheckpointPage(client, token="token", allowed_hosts=[])
        return bytes(shown._restart_form(Request(scope)).body).decode()


def main() -> None:
    """Print them."""
    declare()
    from dagster_ckpt.stream.start_from import StartFrom, set_options

    given = StartFrom("chk-7", **{NAME: True})
    row = given.as_record()
    with TemporaryDirectory() as folder:
        print(
            json.dumps(
                {
                    "command line": command_line(),
                    "launchpad": launchpad(),
                    "page": page(folder),
                    "row": row,
                    "read": StartFrom.from_record(row) == given,
                    "run": set_options({**row, "cause": "MANUAL"}),
                }
            )
        )


if __name__ == "__main__":
    main()
