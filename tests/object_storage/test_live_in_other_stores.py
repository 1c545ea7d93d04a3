"""The life of `test_live_in_s3.py` in HDFS, and with snapshots in Google Cloud Storage and Azure.

Live directories are in HDFS too; the emulators of the other two do not serve Hadoop's drivers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.object_storage.test_live_in_s3 import DEADLINE_S, assert_as_if_nothing_had_happened
from tests.support.far_stores import FAR, FarStores

pytestmark = [pytest.mark.spark, pytest.mark.timeout(DEADLINE_S + 200)]


@pytest.mark.parametrize("scheme", FAR)
def test_a_stream_goes_on_and_goes_back_as_if_nothing_had_happened(
    scheme: str, tmp_path: Path, far_stores: FarStores
) -> None:
    bucket = far_stores.new_bucket(scheme)
    place = bucket.url if scheme == "webhdfs" else f"file://{tmp_path}"
    program = str(Path(__file__).with_name("live_in_a_store_program.py"))
    arguments = [str(tmp_path), place, f"{bucket.url}/snapshots", json.dumps(bucket.options)]
    done = subprocess.run(
        [sys.executable, program, *arguments],
        env={**os.environ},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert_as_if_nothing_had_happened(done.stdout, place)
