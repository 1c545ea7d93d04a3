"""Input files are looked for in the file system of this process. No Spark."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import s3fs

from dagster_ckpt.spark.checkpoint_dir.file_source import existing_files


@pytest.fixture
def bucket(s3_options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[s3fs.S3FileSystem]:
    """A bucket that this process reaches as a deployment does: by its environment."""
    for name, key in {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_ENDPOINT_URL": "endpoint_url",
    }.items():
        monkeypatch.setenv(name, s3_options[key])
    s3fs.S3FileSystem.clear_instance_cache()
    files = s3fs.S3FileSystem()
    files.mkdir("inputs")
    yield files
    files.rm("inputs", recursive=True)
    s3fs.S3FileSystem.clear_instance_cache()


def test_files_in_an_object_store(bucket: s3fs.S3FileSystem) -> None:
    for name in ("in/1.json", "in/b c.json", "other"):
        bucket.pipe(f"inputs/{name}", b"{}")
    named = [f"s3a://inputs/in/{name}.json" for name in ("1", "b%20c", "3")]

    found = existing_files(named, reachable_scheme="s3a")

    assert found is not None
    assert list(found) == named[:2]
    assert all(abs((each or 0) - 1_000 * time.time()) < 600_000 for each in found.values())
    bucket.rm("inputs/in/1.json")
    assert list(existing_files(named, reachable_scheme="s3a") or ()) == named[1:2]
    bucket.rm("inputs/in/b c.json")
    assert existing_files(named, reachable_scheme="s3a") == {}


@pytest.mark.parametrize(
    ("uri", "reachable"), [("s3a://inputs/in/1.json", "file"), ("s3a://of-another-endpoint/in/1.json", "s3a")]
)
def test_files_of_another_place_are_unknown(bucket: s3fs.S3FileSystem, uri: str, reachable: str) -> None:
    assert existing_files([uri], reachable_scheme=reachable) is None


def test_local_files(tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b/1.json").touch()
    os.utime(tmp_path / "a b/1.json", (1_700_000_000.5, 1_700_000_000.5))
    named = [f"file://{tmp_path}/a%20b/{name}.json" for name in (1, 2)]

    assert existing_files(named) == {named[0]: 1_700_000_000_500}
    assert existing_files([f"file://{tmp_path}/elsewhere/1.json"]) is None
