"""The script of docs/environment.md, as a user runs it: by itself, without Dagster, until Ctrl-C."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import ExecutionStatus, SnapshotStatus
from dagster_ckpt.spark.checkpoint_dir.inspect import pinned_partitions
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory

pytestmark = pytest.mark.spark

ROOT = Path(__file__).parents[2]
DEADLINE_S = 300.0
WITHOUT_DAGSTER = """
import sys
try:
    exec(open("script.py").read())
except KeyboardInterrupt:
    sys.exit(7 if "dagster" not in sys.modules else "Dagster was imported")
"""


def script() -> str:
    code, *_ = re.findall(r"```python\n(.*?)```", (ROOT / "docs/environment.md").read_text(), re.DOTALL)
    # Somebody who reads has more patience than a test.
    assert "env.enable_checkpointing(10_000)" in code
    return str(code).replace("10_000", "500")


def test_the_script_of_the_documentation_runs_without_dagster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "landing").mkdir()
    rows = [{"at": f"2024-01-01T00:{minute:02}:00Z", "shop": "a"} for minute in range(30)]
    (tmp_path / "landing/0.json").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "script.py").write_text(script())
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    quiet = "--conf spark.ui.enabled=false --conf spark.log.level=OFF pyspark-shell"
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", quiet)
    process = subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-c", WITHOUT_DAGSTER],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        deadline = time.monotonic() + DEADLINE_S
        while process.poll() is None and time.monotonic() < deadline and not completed(tmp_path):
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        try:
            said, _ = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            # Prints what each thread does.
            process.send_signal(signal.SIGABRT)
            said, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 7, said
    catalog = Catalog(f"sqlite:///{tmp_path}/checkpoints/catalog.db")
    (execution,) = catalog.executions.of_stream("counts")
    assert execution.status is ExecutionStatus.SUSPENDED
    assert pinned_partitions(LiveDirectory(execution.live_directory or "")) == 8
    assert list((tmp_path / "counts").glob("*.parquet")) != []


def completed(folder: Path) -> bool:
    """Whether a checkpoint is there, and the rows that its watermark lets out."""
    if not (folder / "checkpoints/catalog.db").exists() or not list((folder / "counts").glob("*.parquet")):
        return False
    catalog = Catalog(f"sqlite:///{folder}/checkpoints/catalog.db")
    return bool(catalog.snapshots.of_stream("counts", status=SnapshotStatus.COMPLETED))
