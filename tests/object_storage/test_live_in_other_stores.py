"""The life of `test_live_in_s3.py` in HDFS and Google Cloud Storage, and with snapshots in Azure.

The emulator of Azure does not serve Hadoop's driver, so live directories are on a disk there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.object_storage.test_live_in_s3 import DEADLINE_S, assert_as_if_nothing_had_happened
from tests.support.far_stores import FAR, FETCHED, Bucket, FarStores
from tests.support.maven import classified_from_maven

pytestmark = [pytest.mark.spark, pytest.mark.timeout(DEADLINE_S + 200)]

CONNECTOR = ("com.google.cloud.bigdataoss", "gcs-connector", "3.0.4")


@pytest.mark.parametrize("scheme", FAR)
def test_a_stream_goes_on_and_goes_back_as_if_nothing_had_happened(
    scheme: str, tmp_path: Path, far_stores: FarStores
) -> None:
    bucket = far_stores.new_bucket(scheme)
    place = f"file://{tmp_path}" if scheme == "abfs" else bucket.url
    program = str(Path(__file__).with_name("live_in_a_store_program.py"))
    arguments = [str(tmp_path), place, f"{bucket.url}/snapshots", json.dumps(bucket.options)]
    done = subprocess.run(
        [sys.executable, program, *arguments],
        env=os.environ | (settings_of_google_cloud(bucket) if scheme == "gs" else {}),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert_as_if_nothing_had_happened(done.stdout, place)


def settings_of_google_cloud(bucket: Bucket) -> dict[str, str]:
    """Settings by which Spark, and fsspec for live directories, find the bucket's server."""
    url, project = bucket.options["endpoint_url"], bucket.options["project"]
    settings = {
        "fs.gs.impl": "com.google.cloud.hadoop.fs.gcs.GoogleHadoopFileSystem",
        "fs.AbstractFileSystem.gs.impl": "com.google.cloud.hadoop.fs.gcs.GoogleHadoopFS",
        "fs.gs.auth.type": "UNAUTHENTICATED",
        "fs.gs.storage.root.url": f"{url}/",
        "fs.gs.project.id": project,
        # It calls a method that Hadoop 3.4.2 no longer has.
        "parquet.hadoop.vectored.io.enabled": "false",
    }
    submit = ["--driver-class-path", str(classified_from_maven(FETCHED, CONNECTOR, "shaded"))]
    for name, value in settings.items():
        submit += ["--conf", f"spark.hadoop.{name}={value}"]
    return {
        "PYSPARK_SUBMIT_ARGS": " ".join([*submit, "pyspark-shell"]),
        "FSSPEC_GS_TOKEN": bucket.options["token"],
        "FSSPEC_GS_ENDPOINT_URL": url,
        "FSSPEC_GS_PROJECT": project,
    }
