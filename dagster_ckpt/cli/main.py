"""The entry point."""

from __future__ import annotations

import signal

import click

from dagster_ckpt.cli import code_check, lifecycle, maintain, page, show, snapshots, state  # noqa: F401 - they register
from dagster_ckpt.cli.command import cli, end


def commands() -> click.Group:
    """The group with all its commands."""
    return cli


def main() -> None:
    """Run a command."""
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        # Under nohup, SIGHUP is ignored and stays so.
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, end)
    cli(prog_name="dagster-ckpt")
