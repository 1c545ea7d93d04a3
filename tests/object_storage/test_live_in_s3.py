"""Live directories in an object store: a real query, its snapshots, and every way back, beside an uninterrupted run.

The bucket is moto's. Hadoop's S3A comes from Maven Central; where that cannot be reached these tests fail and say so.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import s3fs

from tests.support.s3a import s3a_jars
from tests.support.thorough import either

pytestmark = pytest.mark.spark

DEADLINE_S = 400.0


@pytest.fixture(scope="module")
def class_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return os.pathsep.join(map(str, s3a_jars(tmp_path_factory.mktemp("s3a"))))


def steps_of(folder: Path, class_path: str, s3_options: dict[str, Any]) -> list[dict[str, Any]]:
    """Run the program in a process of its own, whose JVM has S3A; returns what it says."""
    bucket = folder.name.replace("_", "-")
    s3fs.S3FileSystem(**s3_options).mkdir(bucket)
    key, secret, endpoint = s3_options["key"], s3_options["secret"], s3_options["endpoint_url"]
    settings = {
        "endpoint": endpoint,
        "endpoint.region": "us-east-1",
        "path.style.access": "true",
        "access.key": key,
        "secret.key": secret,
        # Moto answers the asynchronous client's upload of a local file with 100 Continue, which it takes for an error.
        "optimized.copy.from.local.enabled": "false",
    }
    submit = ["--driver-class-path", class_path]
    for name, value in settings.items():
        submit += ["--conf", f"spark.hadoop.fs.s3a.{name}={value}"]
    # fsspec's driver is told in the environment, as AWS's own tools are.
    environment = {
        "AWS_ACCESS_KEY_ID": key,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_ENDPOINT_URL": endpoint,
        "PYSPARK_SUBMIT_ARGS": " ".join([*submit, "pyspark-shell"]),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")])),
    }
    program = str(Path(__file__).with_name("live_in_s3_program.py"))
    done = subprocess.run(
        [sys.executable, program, str(folder), bucket],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    steps: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return steps


FIRST_STEPS = [("first run", "START_EMPTY"), ("goes on", "RESUME"), ("back to the savepoint", "RESTORE")]
MORE_STEPS = [("back to batch 4", "REWIND"), ("orphans removed", "REMOVED"), ("goes on as a fork", "FINISH_RESTORE")]
STEPS = either(quick=FIRST_STEPS, thorough=FIRST_STEPS + MORE_STEPS)
LIVES = ["sales/live-1", "sales/live-1", "sales/live-2", "sales/live-3", "sales/live-3", "copy-of-sales/live-1"]


@pytest.mark.timeout(DEADLINE_S + 200)
def test_a_stream_in_a_bucket_goes_on_and_goes_back_as_if_nothing_had_happened(
    tmp_path: Path, class_path: str, s3_options: dict[str, Any]
) -> None:
    *found, end = steps_of(tmp_path, class_path, s3_options)
    ran = [step for step in found if step["step"] not in ("state", "rewritten")]

    assert [(step["step"], step["began_with"]) for step in ran] == STEPS
    assert [step["is_as_uninterrupted"] for step in ran] == [True] * len(STEPS), ran
    # Each name ends with the token of the lease under which the directory was made.
    assert [step["live"].partition("/live/")[2].rpartition("-")[0] for step in ran] == LIVES[: len(STEPS)]
    assert all(step["live"].startswith("s3a://") for step in ran)
    if either(quick=False, thorough=True):
        _state_is_readable(found)
    assert end["can_resume"]
    assert end["checkpoints"] > 0
    # An attempt under way when there is nothing left to read ends with the query.
    assert all("is stopping or has stopped" in reason for reason in end["failures"]), end["failures"]


def _state_is_readable(found: list[dict[str, Any]]) -> None:
    """Copies to read are in the bucket and leave nothing there, nor does a copy of a process that was killed."""
    [state] = [step for step in found if step["step"] == "state"]
    # The last half hour is still open, and each of its windows and shops has been added since the savepoint.
    assert state["keys"] == [["window", "shop"]]
    assert state["total"] == 9
    assert state["diff"] == [{"ADDED": 3, "REMOVED": 3, "CHANGED": 0}]
    assert state["left"] == []
    for step in (step for step in found if step["step"] == "rewritten"):
        assert (step["forgotten"], step["shops"], step["partitions"], step["left"]) == (1, [0, 2], 5, [])
        assert (step["began_with"], step["is_as_uninterrupted"]) == ("RESUME", True)
