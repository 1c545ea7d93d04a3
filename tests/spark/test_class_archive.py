"""An archive of Java's classes, written by the command and used by the session of the resource."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from dagster_ckpt.cli.main import commands
from dagster_ckpt.spark.query.class_archive import _is_archive, with_class_archive

pytestmark = [pytest.mark.spark, pytest.mark.thorough(sample="tests/spark/test_warm_up.py")]
# In a process of its own: this one may have a session already.
LOADED = """
import json, sys
from dagster_ckpt.orchestration.resources import SparkSessionResource

settings = {"spark.master": "local[1]", "spark.ui.enabled": "false"}
spark = SparkSessionResource(spark_config=settings, class_archive=sys.argv[1]).spark_session
loading = spark._jvm.java.lang.management.ManagementFactory.getRuntimeMXBean().getInputArguments()
print(json.dumps([list(loading), spark.range(3).count()]))
"""


def test_java_maps_the_classes_of_an_archive_and_ignores_one_that_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "new" / "spark.jsa"
    # Java reads another one already: it would not start to write one.
    another = f"{os.environ.get('SPARK_SUBMIT_OPTS', '')} -XX:SharedArchiveFile={tmp_path}/another.jsa"
    monkeypatch.setenv("SPARK_SUBMIT_OPTS", another)
    written = CliRunner().invoke(commands(), ["class-archive", str(archive), "--json"])
    assert written.exit_code == 0, written.output
    assert json.loads(written.stdout)["megabytes"] > 50

    arguments, rows = session_with(archive)
    assert f"-XX:SharedArchiveFile={archive}" in arguments
    assert rows == 3
    # It may be written again.
    assert _is_archive(archive)
    archive.write_bytes(archive.read_bytes()[:-10])
    assert session_with(archive)[1] == 3
    archive.unlink()
    assert session_with(archive)[1] == 3


def session_with(archive: Path) -> tuple[list[str], int]:
    done = subprocess.run([sys.executable, "-c", LOADED, str(archive)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    arguments, rows = json.loads(done.stdout.splitlines()[-1])
    return arguments, rows


def test_the_users_own_options_of_java_stay() -> None:
    given = {"spark.driver.extraJavaOptions": "-Xss4m", "spark.master": "local[1]"}
    assert with_class_archive(given, "/a.jsa") == {
        "spark.driver.extraJavaOptions": "-Xss4m -XX:SharedArchiveFile=/a.jsa -Xlog:cds=off -Xlog:cds+dynamic=off",
        "spark.master": "local[1]",
    }


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused = CliRunner().invoke(commands(), ["class-archive", str(tmp_path / "file" / "spark.jsa")])
    assert refused.exit_code != 0
    assert "cannot be written" in refused.output


def test_another_file_is_not_replaced(tmp_path: Path) -> None:
    mine = tmp_path / "rows.csv"
    mine.write_text("1,2")
    refused = CliRunner().invoke(commands(), ["class-archive", str(mine)])
    assert refused.exit_code != 0
    assert "is another file, which is not replaced" in refused.output
    assert [each.read_text() for each in tmp_path.iterdir()] == ["1,2"]
