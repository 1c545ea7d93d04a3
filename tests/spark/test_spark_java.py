import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from pyspark.errors import PySparkRuntimeError
from pyspark.sql import SparkSession

from dagster_ckpt.errors import JavaNotFoundError
from dagster_ckpt.spark.query.session import quick_start, require_java, session_with


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


def test_java_is_started_to_be_up_soon_and_the_options_of_the_user_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    started: dict[str, str] = {}
    monkeypatch.setattr(SparkSession.Builder, "getOrCreate", lambda _self: started.update(os.environ))
    monkeypatch.setenv("SPARK_SUBMIT_OPTS", "-Xss4m")
    monkeypatch.delenv("SPARK_LAUNCHER_OPTS", raising=False)

    session_with({})

    assert "-XX:Tier4InvocationThreshold=50000" in started["SPARK_SUBMIT_OPTS"]
    assert started["SPARK_SUBMIT_OPTS"].endswith(" -Xss4m")
    assert "-XX:TieredStopAtLevel=1" in started["SPARK_LAUNCHER_OPTS"]
    assert os.environ["SPARK_SUBMIT_OPTS"] == "-Xss4m"
    assert "SPARK_LAUNCHER_OPTS" not in os.environ


def test_java_compiles_as_the_user_says() -> None:
    environment = {"SPARK_SUBMIT_OPTS": "-XX:TieredStopAtLevel=1", "SPARK_LAUNCHER_OPTS": "-XX:Tier4LoadFeedback=3"}
    before = dict(environment)

    with quick_start(environment):
        assert environment == before
    assert environment == before


@pytest.mark.thorough
@pytest.mark.spark
def test_the_java_of_a_session_has_these_options() -> None:
    program = (
        "from dagster_ckpt.spark.query.session import session_with\n"
        "spark = session_with({'spark.master': 'local[1]', 'spark.ui.enabled': 'false'})\n"
        "java = spark._jvm.java.lang.management.ManagementFactory.getRuntimeMXBean()\n"
        "print('OPTIONS', *java.getInputArguments())\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "SPARK_SUBMIT_OPTS"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    [options] = [line for line in done.stdout.splitlines() if line.startswith("OPTIONS")]
    assert "-XX:Tier4InvocationThreshold=50000" in options
