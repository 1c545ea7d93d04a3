"""Commands on requests that no process has answered: requests, withdraw."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dagster_ckpt.cli.main import FAILED, command, progress
from dagster_ckpt.cli.output import moment, print_json, print_table
from dagster_ckpt.errors import CatalogError

if TYPE_CHECKING:
    from dagster_ckpt.client import Client


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
    if as_json:
        print_json(found)
        return
    print_table(
        ["request", "stream", "kind", "status", "created (UTC)", "from"],
        [
            (each.request_id, each.stream_id, each.kind, each.status, moment(each.created_at_ms), each.origin)
            for each in found
        ],
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
    if as_json:
        print_json(found)
    for request in () if as_json else found:
        click.echo(f"{request.kind.value} of {request.stream_id} is {request.status.value}")
    for message in errors:
        progress(f"Error: {message}")
    return 0 if not errors and all(request.status == "WITHDRAWN" for request in found) else FAILED
