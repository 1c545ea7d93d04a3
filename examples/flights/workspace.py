"""Local folders of the flights example."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

# Set by the process that starts the code location; everything below it belongs to the example.
HOME_VARIABLE = "FLIGHTS_HOME"
DEFAULT_HOME = ".demo/dev"


@dataclass(frozen=True)
class Workspace:
    """The folders of one instance of the example.

    Attributes:
        root: Absolute path of the folder that contains all others.
    """

    root: Path

    @staticmethod
    def from_environment() -> Workspace:
        """The workspace that the environment names, or `.demo/dev` below the working directory."""
        return Workspace(Path(os.environ.get(HOME_VARIABLE, DEFAULT_HOME)).resolve())

    @property
    def landing(self) -> Path:
        """Where the replayer writes the feed."""
        return self.root / "landing"

    @property
    def output(self) -> Path:
        """Where the assets write."""
        return self.root / "output"

    @property
    def checkpoints(self) -> Path:
        """Snapshots: checkpoints and savepoints."""
        return self.root / "checkpoints"

    @property
    def live(self) -> Path:
        """Spark's live checkpoint directories."""
        return self.root / "live"

    @property
    def dagster_home(self) -> Path:
        """Dagster's own storage."""
        return self.root / "dagster_home"

    @property
    def catalog_url(self) -> str:
        """The checkpoint catalog."""
        return f"sqlite:///{self.root / 'catalog.db'}"

    def create(self) -> None:
        """Create the folders that must exist before anything starts."""
        for folder in (self.landing, self.output, self.checkpoints, self.live, self.dagster_home):
            folder.mkdir(parents=True, exist_ok=True)
