"""Live directories in an object store: a real query, its snapshots, and every way back, beside an uninterrupted run.

The bucket is moto's. Hadoop's S3A comes from Maven Central; where that cannot be reached these tests fail and say so.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import unquote

import pytest
import s3fs

from benchmarks.slow_link import Request, slow_link
from dagster_ckpt.client.cost import OF_A_BATCH, OF_A_PURGE, OF_A_STORE, Part, Requests, StateFiles
from dagster_ckpt.config.rocksdb import ROCKSDB
from tests.support.s3a import s3a_jars
from tests.support.thorough import either

pytestmark = pytest.mark.spark

DEADLINE_S = 400.0


@pytest.fixture(scope="module")
def class_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return os.pathsep.join(map(str, s3a_jars(tmp_path_factory.mktemp("s3a"))))


def run_program(
    folder: Path, class_path: str, s3_options: dict[str, Any], program: str, *arguments: str
) -> tuple[str, list[Request]]:
    """Run a program in a process of its own, whose JVM has S3A; returns what it says, and the requests of S3A."""
    s3fs.S3FileSystem(**s3_options).mkdir(bucket_of(folder))
    with slow_link(s3_options["endpoint_url"].rpartition(":")[2]) as (port, meter):
        environment = environment_of(class_path, s3_options, f"http://127.0.0.1:{port}")
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name(program)), str(folder), *arguments],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        taken = [Request(kind, unquote(target)) for kind, target in meter.taken().requests]
    return done.stdout, taken


def bucket_of(folder: Path) -> str:
    return folder.name.replace("_", "-")


def environment_of(class_path: str, s3_options: dict[str, Any], through: str) -> dict[str, str]:
    """S3A goes through the proxy, fsspec's driver does not."""
    key, secret, endpoint = s3_options["key"], s3_options["secret"], s3_options["endpoint_url"]
    settings = {
        "endpoint": through,
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
    return {
        "AWS_ACCESS_KEY_ID": key,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_ENDPOINT_URL": endpoint,
        "PYSPARK_SUBMIT_ARGS": " ".join([*submit, "pyspark-shell"]),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")])),
    }


def of_a_batch(requests: Sequence[Request], folder: str, mark: str = "commits") -> Requests:
    """Of one folder, from one batch to the next, as a copy below `mark` ends it; the median of all batches."""
    batches: list[Counter[str]] = [Counter()]
    for kind, target in requests:
        if re.search(rf"/{folder}(/|$)", target):
            batches[-1][kind] += 1
        if kind == "COPY" and f"/{mark}/" in target:
            batches.append(Counter())
    whole = batches[1:-1]
    assert len(whole) >= 3, f"{len(whole)} batches"
    return Requests(*(median(each[kind.upper()] for each in whole) for kind in vars(Requests())))


def assert_as_recorded(found: Requests, recorded: Requests, times: int = 1) -> None:
    """What writes is exactly as recorded; looks vary a little with the timing of threads."""
    assert (found.put, found.copy) == (recorded.put * times, recorded.copy * times)
    assert found.list == pytest.approx(recorded.list * times, rel=0.15)
    assert found.head == pytest.approx(recorded.head * times, rel=0.15)


def assert_as_if_nothing_had_happened(said: str, place: str) -> None:
    """What `live_in_a_store_program.py` says."""
    *found, end = json.loads(said.splitlines()[-1])
    ran = [step for step in found if step["step"] not in ("state", "rewritten")]

    assert [(step["step"], step["began_with"]) for step in ran] == STEPS
    assert [step["is_as_uninterrupted"] for step in ran] == [True] * len(STEPS), ran
    # Each name ends with the token of the lease under which the directory was made.
    lives = [step["live"].removeprefix(f"{place}/live/").rpartition("-")[0] for step in ran]
    assert lives == LIVES[: len(STEPS)]
    if either(quick=False, thorough=True):
        _state_is_readable(found)
    assert end["can_resume"]
    assert end["checkpoints"] > 0
    # An attempt under way when there is nothing left to read ends with the query.
    assert all("is stopping or has stopped" in reason for reason in end["failures"]), end["failures"]


FIRST_STEPS = [("first run", "START_EMPTY"), ("goes on", "RESUME"), ("back to the savepoint", "RESTORE")]
MORE_STEPS = [("back to batch 4", "REWIND"), ("orphans removed", "REMOVED"), ("goes on as a fork", "FINISH_RESTORE")]
STEPS = either(quick=FIRST_STEPS, thorough=FIRST_STEPS + MORE_STEPS)
LIVES = ["sales/live-1", "sales/live-1", "sales/live-2", "sales/live-3", "sales/live-3", "copy-of-sales/live-1"]


@pytest.mark.timeout(DEADLINE_S + 200)
def test_a_stream_in_a_bucket_goes_on_and_goes_back_as_if_nothing_had_happened(
    tmp_path: Path, class_path: str, s3_options: dict[str, Any]
) -> None:
    bucket = bucket_of(tmp_path)
    places = (f"s3a://{bucket}", f"s3://{bucket}/snapshots", "{}")
    said, requests = run_program(tmp_path, class_path, s3_options, "live_in_a_store_program.py", *places)
    assert_as_if_nothing_had_happened(said, f"s3a://{bucket}")
    first = [each for each in requests if "live/sales/live-1" in each.target]
    assert_as_recorded(of_a_batch(first, "offsets"), OF_A_BATCH[Part.OFFSETS])
    assert_as_recorded(of_a_batch(first, "state/0/0"), OF_A_STORE[StateFiles.CHANGELOGS])


STATE_SETTINGS = {
    StateFiles.CHANGELOGS: {
        "spark.sql.streaming.stateStore.providerClass": ROCKSDB,
        "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    },
    StateFiles.ROCKSDB: {"spark.sql.streaming.stateStore.providerClass": ROCKSDB},
    StateFiles.HEAP: {},
}


@pytest.mark.thorough
@pytest.mark.timeout(DEADLINE_S + 200)
@pytest.mark.parametrize("state", StateFiles)
def test_the_requests_of_spark_are_those_of_the_bill(
    state: StateFiles, tmp_path: Path, class_path: str, s3_options: dict[str, Any]
) -> None:
    settings = json.dumps({"spark.sql.streaming.minBatchesToRetain": "2", **STATE_SETTINGS[state]})
    _, requests = run_program(tmp_path, class_path, s3_options, "counted_program.py", bucket_of(tmp_path), settings)
    stateful = [each for each in requests if re.search("[/=]stateful/", each.target)]
    stateless = [each for each in requests if not re.search("[/=]stateful/", each.target)]
    for query in (stateful, stateless):
        for part, folder in ((Part.OFFSETS, "offsets"), (Part.COMMITS, "commits"), (Part.SOURCES, "sources")):
            assert_as_recorded(of_a_batch(query, folder), OF_A_BATCH[part])
    assert_as_recorded(of_a_batch(stateless, "_spark_metadata"), OF_A_BATCH[Part.SINKS])
    assert_as_recorded(of_a_batch(stateful, "state/0/1"), OF_A_STORE[state])


@pytest.mark.thorough
@pytest.mark.timeout(DEADLINE_S + 200)
def test_a_version_that_spark_purges_costs_what_the_bill_says(
    tmp_path: Path, class_path: str, s3_options: dict[str, Any]
) -> None:
    settings = {
        "spark.sql.streaming.minBatchesToRetain": "2",
        "spark.sql.streaming.stateStore.maintenanceInterval": "1s",
        **STATE_SETTINGS[StateFiles.ROCKSDB],
    }
    arguments = (bucket_of(tmp_path), json.dumps(settings))
    _, requests = run_program(tmp_path, class_path, s3_options, "counted_program.py", *arguments)
    of_store = [each for each in requests if re.search("[/=]stateful/state/0/1(/|$)", each.target)]
    found = Counter(each.kind for each in of_store)
    # Its files are given their names by copies: the state and its checksums.
    versions = sum(each.kind == "COPY" and each.target.endswith(".zip") for each in of_store)
    purged = sum(each.kind == "DELETE" and re.search(r"/\d+\.zip$", each.target) is not None for each in of_store)
    written, purge = OF_A_STORE[StateFiles.ROCKSDB], OF_A_PURGE[StateFiles.ROCKSDB]

    assert versions - purged <= 3
    assert found["DELETE"] == versions * written.delete + purged * purge.delete
    # The folder is made once.
    assert found["HEAD"] == pytest.approx(versions * written.head + purged * purge.head, abs=3)
    # And each maintenance lists.
    assert found["LIST"] >= versions * written.list + purged * purge.list


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
