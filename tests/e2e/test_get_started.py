"""docs/get-started.md, followed by the letter in an empty folder outside of this repository."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from examples.flights.dagster_dev import end_group, free_port
from tests.support.page_blocks import Block, blocks_of

pytestmark = [pytest.mark.spark, pytest.mark.dagster_dev, pytest.mark.timeout(1500)]

ROOT = Path(__file__).parents[2]
BLOCKS = blocks_of("get-started.md")
COMMANDS = [command for block in BLOCKS for command in block.commands]
DEADLINE_S = 240.0
# A reader has more patience than a test: the same steps with shorter waits.
FASTER = {"interval=10_000": "interval=1_000", '"10 seconds"': '"2 seconds"'}
ROWS_OF_A_WINDOW = 20


class Reader:
    """Somebody with an empty folder who copies what the page shows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        scripts = str(Path(sys.executable).parent)
        self.environment = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        for name in ("DAGSTER_HOME", "DAGSTER_CKPT_CATALOG", "DAGSTER_CKPT_MODULE"):
            self.environment.pop(name, None)
        self.left_running: list[subprocess.Popen[str]] = []

    def save(self, block: Block) -> None:
        assert block.file_name is not None
        text = block.text
        for slow, fast in FASTER.items():
            text = text.replace(slow, fast)
        (self.folder / block.file_name).write_text(text)

    def run(self, command: str) -> str:
        """Type a command of the page and wait for it."""
        assert command in COMMANDS
        if command.startswith("export "):
            name, _, value = command.removeprefix("export ").partition("=")
            self.environment[name] = value.replace("$PWD", str(self.folder))
            return ""
        command = command.replace("/path/to/dagster_ckpt", str(ROOT))
        done = subprocess.run(
            command, shell=True, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def leave_running(self, command: str, *further: str) -> Path:
        """Type a command of the page that does not end; returns the file with its output."""
        assert command in COMMANDS
        output = self.folder / f"{len(self.left_running)}.log"
        with output.open("w") as log:
            started = subprocess.Popen(
                [*shlex.split(command), *further],
                cwd=self.folder,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        self.left_running.append(started)
        return output

    def end(self) -> None:
        for process in self.left_running:
            end_group(process)

    def executions(self) -> list[dict[str, Any]]:
        """Of the stream, newest first."""
        shown = subprocess.run(
            ["dagster-ckpt", "show", "orders", "--json"],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        found: list[dict[str, Any]] = json.loads(shown.stdout)["executions"] if shown.returncode == 0 else []
        return sorted(found, key=lambda each: each["started_at_ms"], reverse=True)

    def await_that(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            logs = "\n".join(path.read_text()[-3000:] for path in sorted(self.folder.glob("*.log")))
            assert time.monotonic() < deadline, f"waited for {what}\n{logs}"
            time.sleep(0.3)

    def windows(self) -> Mapping[str, int]:
        """What the page's program prints of the output: rows by window; a window that is there twice is an error."""
        printed = self.run("python counts.py")
        rows = re.findall(r"\{([^,]+), [^}]+\}\s*\|(\d+)", printed)
        assert len({start for start, _ in rows}) == len(rows), printed
        return {start: int(count) for start, count in rows}


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    reader = Reader(tmp_path)
    yield reader
    reader.end()


@pytest.mark.thorough(sample="tests/e2e/test_ways_a_run_ends.py")
def test_the_page_leads_to_a_stream_that_survives_a_kill_and_a_rewind(reader: Reader) -> None:
    for block in BLOCKS:
        if block.file_name is not None:
            reader.save(block)
    assert {path.name for path in reader.folder.iterdir()} == {"definitions.py", "dagster_ckpt.toml", "counts.py"}

    reader.run("mkdir dagster_home")
    reader.run("cp /path/to/dagster_ckpt/examples/flights/dagster.yaml dagster_home/")
    reader.run("export DAGSTER_HOME=$PWD/dagster_home")
    reader.leave_running("dagster dev -f definitions.py", "--port", str(reader.port))
    reader.await_that(lambda: bool(reader.executions()), "the supervisor sensor to start the stream")
    reader.await_that(lambda: reader.run("dagster-ckpt list orders").count("chk-") > 1, "two checkpoints")

    (first,) = reader.executions()
    assert "kill -9 12345" in COMMANDS
    os.kill(first["pid"], signal.SIGKILL)
    watched = reader.leave_running("dagster-ckpt watch orders")
    reader.await_that(lambda: len(reader.executions()) == 2, "the supervisor sensor to restart the stream")
    reader.await_that(lambda: "RUNNING" in watched.read_text()[-200:], "a line of watch")

    reader.run("dagster-ckpt savepoint orders --label before-release-42")
    reader.await_that(lambda: sum(1 for _ in reader.folder.glob("data/counts/*.parquet")) > 3, "output")
    preview = reader.run("dagster-ckpt restart orders --from before-release-42 --preview")
    assert "EXACT" in preview
    reader.run("dagster-ckpt restart orders --from before-release-42 --yes")

    rewound, _, _ = reader.executions()
    assert rewound["recovery"]["kind"] == "RESTORE", rewound
    before = reader.windows()
    reader.await_that(lambda: len(reader.windows()) > len(before), "output after the rewind")
    first_window, *full = sorted(reader.windows().items())
    assert {count for _, count in full} == {ROWS_OF_A_WINDOW}
    assert first_window[1] <= ROWS_OF_A_WINDOW


def test_the_install_command_names_what_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    (install,) = [command for command in COMMANDS if command.startswith("pip install")]
    assert install.startswith("pip install '/path/to/dagster_ckpt[spark,ui]'")
    assert {"spark", "ui"} <= set(extras)
