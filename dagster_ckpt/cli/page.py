"""The command that serves the checkpoint page: ui."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import click

from dagster_ckpt.cli.main import command
from dagster_ckpt.cli.output import print_json

if TYPE_CHECKING:
    from dagster_ckpt.client import Client

_LOCAL = ("localhost", "127.0.0.1", "::1")


@command("ui", epilog="\b\nExamples:\n  dagster-ckpt ui\n  dagster-ckpt ui --actions --port 3080")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=3080, show_default=True, type=click.IntRange(0, 65535), help="0: any free port.")
@click.option(
    "--allowed-host",
    "allowed_hosts",
    multiple=True,
    metavar="NAME",
    help="Another name under which browsers reach the page, such as that of a proxy; may be repeated.",
)
@click.option(
    "--actions", is_flag=True, help="Offer savepoint, stop and restart in browsers that have the printed token."
)
@click.option(
    "--token",
    envvar="DAGSTER_CKPT_UI_TOKEN",
    metavar="SECRET",
    help="The token of --actions; default: a new one. Prefer the environment variable to the option.",
)
def ui(
    client: Client,
    *,
    host: str,
    port: int,
    allowed_hosts: tuple[str, ...],
    actions: bool,
    token: str | None,
    as_json: bool,
) -> None:
    """Serve the checkpoint page: streams, history over all restarts, time line, percentiles, failures.

    The page is read-only unless --actions is given, and reachable from this machine only unless --host is.
    """
    try:
        import uvicorn

        from dagster_ckpt.ui.app import checkpoint_page
    except ImportError as error:
        raise click.UsageError(
            f"The page needs the extra 'ui' ({error}). Install it: pip install 'dagster-ckpt[ui]'"
        ) from error
    secret = (token or secrets.token_urlsafe(24)) if actions else None
    hosts = [*_LOCAL[:2], f"[{_LOCAL[2]}]", *([host] if host not in (*_LOCAL, "0.0.0.0", "::") else []), *allowed_hosts]
    app = checkpoint_page(client, token=secret, allowed_hosts=hosts)
    server = uvicorn.Server(uvicorn.Config(app, host=host, port=port, log_level="warning", server_header=False))
    sockets = [server.config.bind_socket()]
    # The address is printed next, and a request to it waits until the server has started.
    sockets[0].listen()
    shown_host = f"[{host}]" if ":" in host else host
    address = f"http://{shown_host}:{sockets[0].getsockname()[1]}/"
    sign_in = f"{address}sign-in?token={secret}" if secret is not None else None
    if as_json:
        print_json({"address": address, "sign_in": sign_in})
    else:
        click.echo(f"The checkpoint page is at {address}")
        if sign_in is not None:
            click.echo(f"To use its actions, open {sign_in}")
        click.echo("Press Ctrl-C to stop it.", err=True)
    server.run(sockets)
