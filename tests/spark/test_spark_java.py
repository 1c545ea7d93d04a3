import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from pyspark.errors import PySparkRuntimeError
from pyspark.sql import SparkSession

from dagster_ckpt.errors import JavaNotFoundError
from dagster_ckpt.spark.query.session import require_java, session_with


def java_that_says(tmp_path: Path, text: str) -> dict[str, str]:
    executable = tmp_path / "bin" / "java"
    executable.parent.mkdir()
    executable.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{text}\nEND\n")
    executable.chmod(0o755)
    return {"JAVA_HOME": str(tmp_path), "PATH": "/nowhere"}


@pytest.mark.parametrize(
    ("text", "version"), [('openjdk version "17.0.15" 2025-04-15', 17), ('java version "21" 2023-09-19 LTS', 21)]
)
def test_java_home_goes_before_the_path(tmp_path: Path, text: str, version: int) -> None:
    found = require_java(java_that_says(tmp_path, text))

    assert (found.version, found.executable) == (version, f"{tmp_path}/bin/java")


@pytest.mark.parametrize(
    ("text", "found"), [('version "1.7.0_402"', "is Java 7, but Spark"), ("no idea", "does not report")]
)
def test_a_java_that_spark_cannot_use_is_refused(tmp_path: Path, text: str, found: str) -> None:
    with pytest.raises(JavaNotFoundError, match=found):
        require_java(java_that_says(tmp_path, text))


def test_a_missing_java_is_an_error_that_says_how_to_install_it(tmp_path: Path) -> None:
    with pytest.raises(JavaNotFoundError, match="Install Java 17"):
        require_java({"PATH": str(tmp_path)})
    with pytest.raises(JavaNotFoundError, match="does not run"):
        require_java({"JAVA_HOME": str(tmp_path)})


def test_a_session_that_cannot_start_for_want_of_java_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway_exited = PySparkRuntimeError("[JAVA_GATEWAY_EXITED] Java gateway process exited before sending its port.")
    monkeypatch.setattr(SparkSession.Builder, "getOrCreate", Mock(side_effect=gateway_exited))
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))

    with pytest.raises(JavaNotFoundError, match="does not run"):
        session_with({})


def test_reading_live_directories_needs_neither_spark_nor_java() -> None:
    script = "import sys, dagster_ckpt.spark; sys.exit('pyspark' in sys.modules or 'dagster' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
