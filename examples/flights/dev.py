"""`make dev`: flights arrive at a set pace, and Dagster's page shows the streams that read them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click

from examples.flights.dagster_dev import command, environment, prepare_home
from examples.flights.workspace import Workspace

DEFINITIONS = Path(__file__).parents[2] / "definitions.py"


@click.command()
@click.option("--port", default=3000, show_default=True, help="Port of the Dagster page.")
@click.option("--pace", default=2.0, show_default=True, help="Days of 2013 that arrive per second; 0 is all at once.")
def main(port: int, pace: float) -> None:
    """Replay the flights of 2013 and start `dagster dev` on them."""
    workspace = Workspace.from_environment()
    prepare_home(workspace)
    click.echo(f"Everything is below {workspace.root}. Remove that folder to begin again.")
    click.echo(f"The flights arrive at {pace:g} days a second. Dagster: http://localhost:{port}")
    click.echo(
        "On its page: Jobs, departure_delays_stream, Launchpad, Launch run; then Sensors, and the asset's plots."
    )
    replayer = [sys.executable, "-m", "examples.flights.replayer"]
    with (workspace.root / "replayer.log").open("ab") as log:
        subprocess.Popen(
            [*replayer, "--landing", str(workspace.landing), "--pace", str(pace)],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    arguments = command(DEFINITIONS, port)
    # Replace this process, so that Ctrl-C reaches Dagster itself.
    os.execve(arguments[0], arguments, environment(workspace))


if __name__ == "__main__":
    main()
