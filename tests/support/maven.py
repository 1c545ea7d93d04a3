"""Java libraries from Maven Central, by the Ivy that Spark brings."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pyspark
import pytest

# A jar of 50 MB, where others load the network or the machine.
DEADLINE_S = 900.0


def from_maven(folder: Path, module: tuple[str, str, str], conf: str) -> None:
    """Fetch a module (`master`), what it needs (`runtime`), or both (`default`).

    From Ivy's cache where it was fetched before.
    """
    _fetched(folder, module, "-dependency", *module, "-confs", conf, *(["-notransitive"] if conf == "master" else []))


def classified_from_maven(folder: Path, module: tuple[str, str, str], classifier: str) -> Path:
    """Fetch the jar of a module that has a classifier, such as one with all that it needs."""
    group, name, version = module
    jar = folder / f"{name}-{version}-{classifier}.jar"
    if jar.exists():
        return jar
    artifact = f'<artifact name="{name}" type="jar" m:classifier="{classifier}"/>'
    with tempfile.TemporaryDirectory() as temporary:
        described = Path(temporary, "ivy.xml")
        described.write_text(
            '<ivy-module version="2.0" xmlns:m="http://ant.apache.org/ivy/maven"><info organisation="tests" '
            f'module="{name}"/><dependencies><dependency org="{group}" name="{name}" rev="{version}" '
            f'transitive="false">{artifact}</dependency></dependencies></ivy-module>'
        )
        _fetched(folder, module, "-ivy", str(described))
    return jar


def _fetched(folder: Path, module: tuple[str, str, str], *what: str) -> None:
    (ivy,) = (Path(pyspark.__file__).parent / "jars").glob("ivy-*.jar")
    command = [java(), "-jar", str(ivy), *what, "-retrieve", f"{folder}/[artifact]-[revision](-[classifier]).[ext]"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    said = done.stdout + done.stderr
    if done.returncode or "UNRESOLVED" in said or not any(folder.glob("*.jar")):
        pytest.fail(f"Maven Central does not give {':'.join(module)}, which this test needs:\n{said[-2000:]}")


def java() -> str:
    home = os.environ.get("JAVA_HOME")
    return f"{home}/bin/java" if home else "java"
