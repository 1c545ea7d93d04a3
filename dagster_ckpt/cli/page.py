"""The command that serves the checkpoint page: ui."""

from __future__ import annotations

import signal
import socket
from contextlib import suppress
from typing import TYPE_CHECKING
from urllib.parse import quote

import click

from dagster_ckpt.cli.command import command
from dagster_ckpt.cli.output import print_json
from dagster_ckpt.errors import OptionError

if TYPE_CHECKING:
    from dagster_ckpt.client import Client

_LOCAL = ("localhost", "127.0.0.1", "::1")
_EVERYWHERE = ("0.0.0.0", "::")


@command(
    "ui",
    short_help="Serve the checkpoint page.",
    epilog="\b\nExamples:\n  dagster-ckpt ui\n  dagster-ckpt ui --actions --port 3080",
)
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
    import secrets

    secret = (token or secrets.token_urlsafe(24)) if actions else None
    reached_at = _names_of_this_machine() if host in _EVERYWHERE else [host]
    hosts = {_in_address(each) for each in (*_LOCAL, *reached_at, *allowed_hosts)}
    app = checkpoint_page(client, token=secret, allowed_hosts=sorted(hosts))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", server_header=False))
    # A request to the printed address waits for the server.
    listening = _listen(host, port)
    address = f"http://{_in_address(reached_at[0])}:{listening.getsockname()[1]}/"
    sign_in = f"{address}sign-in?token={quote(secret, safe='')}" if secret is not None else None
    if as_json:
        print_json({"address": address, "sign_in": sign_in})
    else:
        click.echo(f"The checkpoint page is at {address}")
        if sign_in is not None:
            click.echo(f"To use its actions, open {sign_in}")
        click.echo("Press Ctrl-C to stop it.", err=True)
    hangup = getattr(signal, "SIGHUP", None)
    if hangup is not None and signal.getsignal(hangup) is not signal.SIG_IGN:
        # A closed terminal is an orderly end too.
        signal.signal(hangup, server.handle_exit)
    # The server ends on Ctrl-C and raises it again.
    with suppress(KeyboardInterrupt):
        server.run([listening])


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        everywhere = host == "::" and socket.has_dualstack_ipv6()
        return socket.create_server((host, port), family=family, dualstack_ipv6=everywhere)
    except OSError as error:
        raise OptionError(
            f"The page cannot listen on port {port} of {host}: {error.strerror or error}. Choose another port with "
            "--port (0: any free one), or another address of this machine with --host."
        ) from error


def _names_of_this_machine() -> list[str]:
    """Host name first. An address is as safe as a name: no web site can take it."""
    name = socket.gethostname()
    try:
        addresses = {str(found[4][0]) for found in socket.getaddrinfo(name, None)}
    except OSError:
        # A name that does not resolve here may resolve elsewhere.
        addresses = set()
    return list(dict.fromkeys([name, socket.getfqdn(), *sorted(addresses)]))


def _in_address(host: str) -> str:
    return f"[{host}]" if ":" in host else host
