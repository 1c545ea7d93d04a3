"""A start that migrates or builds state, killed with its JVM by SIGKILL at one point after the other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.streams import StreamRecords
from dagster_ckpt.recovery import live_directories, state_migration
from dagster_ckpt.runtime import start
from dagster_ckpt.spark.versions import Feature
from dagster_ckpt.state import rewriting
from dagster_ckpt.stream.start_from import StartFrom
from tests.recovery.test_state_changes_with_spark import Release
from tests.support.needs import needs
from tests.support.small_spark import small_spark

pytestmark = [pytest.mark.spark, pytest.mark.state, pytest.mark.timeout(3600), needs(Feature.STATE_REWRITER)]
ROOT = Path(__file__).parents[2]
# In the order of a start; the process is killed before the call, or after it has returned.
POINTS: dict[str, tuple[Any, str, bool]] = {
    "before the savepoint": (start, "take_safety_savepoint", False),
    "after the savepoint": (start, "take_safety_savepoint", True),
    "as the new code runs": (state_migration, "run_trial", False),
    "when the new code has run": (state_migration, "make_fresh_state", True),
    "before the rewrite": (live_directories, "rewrite_state", False),
    "before the rows": (rewriting, "_write_rows", False),
    "after the rows": (rewriting, "_write_rows", True),
    "after the proof": (live_directories, "rewrite_state", True),
    "before the switch": (StreamRecords, "switch_live_directory", False),
    "after the switch": (StreamRecords, "switch_live_directory", True),
}
FORMER, NEW = "count", "count_sum"


def process(root: Path, query: str, feeds: int, *, how: str = "", killed: str = "", was_built: bool = False) -> int:
    """Another process, with a JVM of its own, in a group of its own; returns its status."""
    with (root / "log").open("ab") as log:
        command = [sys.executable, "-m", "tests.recovery.test_state_migration_sigkill"]
        arguments = [str(root), query, str(feeds), how, killed, str(int(was_built))]
        ran = subprocess.Popen([*command, *arguments], cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
        return ran.wait()


@pytest.mark.parametrize("how", ["migrate_state", "bootstrap_state"])
def test_a_plain_start_goes_on_wherever_the_process_was_killed(tmp_path: Path, how: str) -> None:
    assert process(tmp_path, FORMER, 3) == 0, (tmp_path / "log").read_text()
    catalog = Catalog(f"sqlite:///{tmp_path}/catalog.db")
    former = catalog.streams.get("orders").live_directory
    for point in POINTS:
        assert process(tmp_path, NEW, 0, how=how, killed=point) == -signal.SIGKILL, (tmp_path / "log").read_text()
        record = catalog.streams.get("orders")
        is_former = record.live_directory == former
        assert is_former == (point != "after the switch"), point
        if point == "before the rows":
            # Further input of the former code.
            assert process(tmp_path, FORMER, 1) == 0, (tmp_path / "log").read_text()
            former = catalog.streams.get("orders").live_directory
    labels = [each.label for each in catalog.snapshots.completed("orders") if each.label is not None]
    assert any(label.startswith("before-rewind-") for label in labels)
    assert process(tmp_path, FORMER, 0) != 0
    assert process(tmp_path, NEW, 1, was_built=how == "bootstrap_state") == 0, (tmp_path / "log").read_text()
    catalog.close()


def _in_a_process(root: Path, query: str, feeds: int, how: str, killed: str, *, was_built: bool) -> None:
    with small_spark() as spark:
        release = Release(spark, root)
        release.feed(feeds)
        if killed:
            owner, name, is_after = POINTS[killed]
            call = getattr(owner, name)

            def kill(*arguments: Any, **named: Any) -> None:
                if is_after:
                    call(*arguments, **named)
                os.killpg(0, signal.SIGKILL)

            setattr(owner, name, kill)
        release.run(query, start_from=StartFrom(**{how: True}) if how else StartFrom())
        if not feeds:
            return
        whole, found = release.batch_table(query, "long", 0, release.files), release.table_since(query, 0)
        later = release.batch_table(query, "long", 4, release.files)
        for key, row in found.items():
            assert row["n"] == whole[key]["n"], (key, row)
            if query == NEW:
                assert row["s"] == (whole if was_built else later)[key]["s"], (key, row)


if __name__ == "__main__":
    _in_a_process(
        Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5], was_built=sys.argv[6] == "1"
    )
