"""An archive of Java's classes, written by the command and used by the session of the resource."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
from click.testing import CliRunner

from dagster_ckpt.cli.main import commands
from dagster_ckpt.errors import StorageAccessError, UnsupportedSparkError
from dagster_ckpt.spark.query import class_archive, query
from dagster_ckpt.spark.query.class_archive import (
    _alone,
    _is_archive,
    look_after_archive,
    with_class_archive,
    write_class_archive,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# In a process of its own: this one may have a session already.
START = """
import json, sys
from pathlib import Path
from dagster_ckpt.orchestration import resources
from dagster_ckpt.spark.query import class_archive

reports, timers = [], []

def look_after(spark, archive, settings, report):
    timers.append(class_archive.look_after_archive(spark, archive, settings, reports.append, delay_s=0.0))

resources.look_after_archive = look_after
settings = {"spark.master": "local[1]", "spark.ui.enabled": "false"}
spark = resources.SparkSessionResource(spark_config=settings, class_archive=sys.argv[1]).spark_session
rows = spark.range(3).count()
[timer.join() for timer in timers if timer]
print(json.dumps([class_archive._is_ignored(spark, Path(sys.argv[1])), rows, reports]))
"""


@pytest.mark.spark
@pytest.mark.thorough
def test_a_run_writes_a_missing_archive_that_java_maps_and_one_that_does_not_fit_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "new" / "spark.jsa"
    # Java reads another one already: it would not start to write one.
    another = f"{os.environ.get('SPARK_SUBMIT_OPTS', '')} -XX:SharedArchiveFile={tmp_path}/another.jsa"
    monkeypatch.setenv("SPARK_SUBMIT_OPTS", another)
    assert session_with(archive) == (
        True,
        3,
        [f"Wrote Java's classes to {archive}: the next start of Spark is faster."],
    )
    assert session_with(archive) == (False, 3, [])

    # In the middle, where Java would not notice it by itself, and would end.
    archive.chmod(0o644)
    damaged = bytearray(archive.read_bytes())
    damaged[20_000_000:-20_000_000:50_021] = b"\xff" * len(damaged[20_000_000:-20_000_000:50_021])
    archive.write_bytes(damaged)
    is_ignored, rows, [report] = session_with(archive)
    assert (is_ignored, rows) == (True, 3)
    assert report.startswith(f"Java ignores {archive}")
    command = re.search("`dagster-ckpt (.+)`", report)
    assert command is not None
    written = CliRunner().invoke(commands(), [*command[1].split(), "--json"])
    assert written.exit_code == 0, written.output
    assert json.loads(written.stdout)["megabytes"] > 50
    assert session_with(archive) == (False, 3, [])
    assert _is_archive(archive)


def session_with(archive: Path) -> tuple[bool, int, list[str]]:
    """Whether Java ignores the archive, rows of a query, and reports."""
    done = subprocess.run([sys.executable, "-c", START, str(archive)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    is_ignored, rows, reports = json.loads(done.stdout.splitlines()[-1])
    return is_ignored, rows, reports


def test_one_process_at_a_time_writes(tmp_path: Path) -> None:
    archive = tmp_path / "spark.jsa"
    left = tmp_path / f".spark.jsa.{'0' * 32}"
    left.touch()
    with _alone(archive, wait=True) as unfinished:
        assert unfinished is not None
        assert not left.exists(), "of a process that was killed"
        assert not write_class_archive(archive, {}, in_background=True)
    with _alone(archive, wait=False) as unfinished:
        assert unfinished is not None


def test_what_a_run_writes_it_with_starts_nothing_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written_with: list[Mapping[str, str]] = []

    def write(archive: Path, settings: Mapping[str, str], *, in_background: bool) -> bool:
        written_with.append(settings)
        raise StorageAccessError("The disk is full.")

    monkeypatch.setattr(class_archive, "write_class_archive", write)
    given = {
        "spark.master": "spark://cluster:7077",
        "spark.eventLog.enabled": "true",
        "spark.jars.packages": "io.delta:delta-spark_2.13:4.0.0",
        "spark.driver.extraClassPath": "/opt/jars/*",
    }
    reports: list[str] = []
    timer = look_after_archive(cast("SparkSession", None), tmp_path / "spark.jsa", given, reports.append, delay_s=0)
    assert timer is not None
    timer.join()
    del given["spark.eventLog.enabled"]
    assert written_with == [given | {"spark.master": "local[2]"}]
    assert reports == ["The stream continues without an archive of Java's classes. The disk is full."]


def test_the_queries_do_not_run_in_the_jvm_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Mapping[str, str]] = []

    def run(command: list[str], *, env: Mapping[str, str], **_: object) -> subprocess.CompletedProcess[str]:
        seen.append(env)
        return subprocess.CompletedProcess(command, 1, "", "no Java")

    monkeypatch.setattr(class_archive.subprocess, "run", run)
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "4711")
    monkeypatch.setenv("PYSPARK_GATEWAY_SECRET", "secret")
    with pytest.raises(UnsupportedSparkError, match=r"No archive was written .* no Java"):
        write_class_archive(tmp_path / "spark.jsa", {})
    [environment] = seen
    assert environment["PATH"] == os.environ["PATH"]
    assert not [name for name in environment if name.startswith("PYSPARK_GATEWAY")]


def test_a_jvm_that_was_started_without_the_archive_does_not_ignore_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "spark.jsa"
    archive.touch()
    monkeypatch.setattr(query, "jvm_pid", lambda _spark: os.getpid())
    reports: list[str] = []
    assert look_after_archive(cast("SparkSession", None), archive, {}, reports.append) is None
    assert reports == []
    option = f"-XX:SharedArchiveFile={archive}"
    program = [sys.executable, "-c", "print(flush=True); input()", option]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as jvm:
        # Before, its command line may not be there yet.
        assert jvm.stdout is not None
        jvm.stdout.readline()
        monkeypatch.setattr(query, "jvm_pid", lambda _spark: jvm.pid)
        look_after_archive(cast("SparkSession", None), archive, {}, reports.append)
    assert [each.startswith(f"Java ignores {archive}") for each in reports] == [True]


def test_the_users_own_options_of_java_stay() -> None:
    given = {"spark.driver.extraJavaOptions": "-Xss4m", "spark.master": "local[1]"}
    assert with_class_archive(given, "/a.jsa") == {
        "spark.driver.extraJavaOptions": "-Xss4m -XX:SharedArchiveFile=/a.jsa -XX:+VerifySharedSpaces "
        "-Xlog:cds=off -Xlog:cds+dynamic=off",
        "spark.master": "local[1]",
    }


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused = CliRunner().invoke(commands(), ["class-archive", str(tmp_path / "file" / "spark.jsa")])
    assert refused.exit_code != 0
    assert "cannot be written" in refused.output


@pytest.mark.parametrize("name", ["SPARK_CONF_DIR", "HADOOP_CONF_DIR", "spark.driver.extraClassPath"])
def test_a_folder_on_the_class_path_is_named_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = tmp_path / "conf"
    folder.mkdir()
    (folder / "spark-defaults.conf").write_text("spark.executor.cores 1")
    settings = {name: f"/opt/jars/*:{folder}"} if name.startswith("spark.") else {}
    if not settings:
        monkeypatch.setenv(name, str(folder))
    monkeypatch.setattr(class_archive, "_run", lambda *_, **__: pytest.fail("it runs queries"))
    archive, reports = tmp_path / "spark.jsa", list[str]()

    given = [word for pair in settings.items() for word in ("--conf", "=".join(pair))]
    refused = CliRunner().invoke(commands(), ["class-archive", str(archive), *given])
    timer = look_after_archive(cast("SparkSession", None), archive, settings, reports.append, delay_s=0)

    assert refused.exit_code != 0
    assert f"{folder} ({name})" in refused.output.replace("\n", " ")
    assert (timer, [f"{folder} ({name})" in each for each in reports]) == (None, [True])


def test_another_file_is_not_replaced(tmp_path: Path) -> None:
    mine = tmp_path / "rows.csv"
    mine.write_text("1,2")
    refused = CliRunner().invoke(commands(), ["class-archive", str(mine)])
    assert refused.exit_code != 0
    assert "is another file, which is not replaced" in refused.output
    assert [each.read_text() for each in tmp_path.iterdir()] == ["1,2"]
