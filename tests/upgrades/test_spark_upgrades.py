"""A stream goes on under another version of Spark: from a savepoint, and in the live directory as it is.

`make test-upgrades` makes the environments. Elsewhere, `PYTHON_OF_SPARK_3_5` and so on name the interpreters.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.golden.live_directories import lay_input
from tests.support.needs import MAIN_SPARK
from tests.support.small_spark import SETTINGS
from tests.upgrades.upgraded_program import STREAMS

pytestmark = [pytest.mark.upgrades, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
# Files of the input that each leg reads.
LEGS = [3, 2, 3]
CHAINS = ["3.5 4.1 4.3", "4.0 4.1 4.2", "4.3 4.2 4.1"]


def python_of(minor: str) -> str:
    default = ROOT / (".venv" if minor == MAIN_SPARK else f".venv-spark{minor}") / "bin/python"
    return os.environ.get(f"PYTHON_OF_SPARK_{minor.replace('.', '_')}", str(default))


def play(folder: Path, chain: list[str], *, in_place: bool) -> dict[str, list[str]]:
    """Run the legs one after the other, each on its Spark; returns the rows of each stream."""
    held_back = sorted(lay_input(folder / "held-back").iterdir())
    (folder / "landing").mkdir()
    for leg, (minor, files) in enumerate(zip(chain, LEGS, strict=True)):
        for path in held_back[:files]:
            path.rename(folder / "landing" / path.name)
        held_back = held_back[files:]
        if leg and not in_place:
            shutil.rmtree(folder / "live")
        settings = SETTINGS | {"spark.sql.warehouse.dir": str(folder / "warehouse")}
        program = {"FOLDER": str(folder), "LEG": str(leg), "SETTINGS": json.dumps(settings)}
        program["START_FROM"] = "latest" if in_place or not leg else f"leg-{leg - 1}"
        done = subprocess.run(
            [python_of(minor), "-m", "tests.upgrades.upgraded_program"],
            env=os.environ | program | {"PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": python_of(minor)},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, f"Spark {minor}, leg {leg}:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return {name: rows(folder / "output" / name) for name in STREAMS}


def rows(output: Path) -> list[str]:
    """The rows of the files that the sink's log lists."""
    entries = [path for path in (output / "_spark_metadata").iterdir() if not path.name.startswith(".")]
    listed = {
        json.loads(line)["path"].rsplit("/", 1)[-1] for path in entries for line in path.read_text().splitlines()[1:]
    }
    return sorted(line for name in listed for line in (output / name).read_text().splitlines())


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What one version gives that is stopped and started where the others are."""
    return play(tmp_path_factory.mktemp("uninterrupted"), [MAIN_SPARK] * len(LEGS), in_place=True)


@pytest.mark.parametrize("in_place", [False, True], ids=["from-a-savepoint", "in-place"])
@pytest.mark.parametrize("chain", CHAINS)
def test_the_rows_are_those_of_one_version(
    uninterrupted: dict[str, list[str]], tmp_path: Path, chain: str, in_place: bool
) -> None:
    assert all(uninterrupted.values())

    assert play(tmp_path, chain.split(), in_place=in_place) == uninterrupted
