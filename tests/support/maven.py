"""Java libraries from Maven Central, by the Ivy that Spark brings."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pyspark
import pytest

# A jar of 50 MB, where others load the network or the machine.
DEADLINE_S = 900.0


def from_maven(folder: Path, module: tuple[str, str, str], conf: str) -> None:
    """Fetch a module (`master`), what it needs (`runtime`), or both (`default`).

    From Ivy's cache where it was fetched before.
    """
    (ivy,) = (Path(pyspark.__file__).parent / "jars").glob("ivy-*.jar")
    command = [java(), "-jar", str(ivy), "-dependency", *module, "-confs", conf]
    command += ["-notransitive"] if conf == "master" else []
    command += ["-retrieve", f"{folder}/[artifact]-[revision](-[classifier]).[ext]"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    said = done.stdout + done.stderr
    if done.returncode or "UNRESOLVED" in said or not any(folder.glob("*.jar")):
        pytest.fail(f"Maven Central does not give {':'.join(module)}, which this test needs:\n{said[-2000:]}")


def java() -> str:
    home = os.environ.get("JAVA_HOME")
    return f"{home}/bin/java" if home else "java"
