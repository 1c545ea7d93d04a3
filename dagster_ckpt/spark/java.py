"""Find a Java that Spark supports. Run `python -m dagster_ckpt.spark.java` to check this machine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dagster_ckpt.errors import JavaNotFoundError, SparkNotFoundError
from dagster_ckpt.spark.versions import RELEASES, SparkRelease, installed_release

_VERSION = re.compile(r'version "(?:1\.)?(\d+)')
_HOW_TO = (
    "Install Java 17 (Debian: apt install openjdk-17-jre-headless; macOS: brew install openjdk@17; anywhere: "
    "https://adoptium.net), which every supported Spark runs on, and put it on the PATH or set JAVA_HOME to it."
)


@dataclass(frozen=True)
class Java:
    """A Java runtime.

    Attributes:
        executable: Path of `java`.
        version: Its feature version, such as 17.
    """

    executable: str
    version: int


def require_java(environment: Mapping[str, str] = os.environ) -> Java:
    """Find the Java that Spark will start.

    Args:
        environment: Environment variables; JAVA_HOME takes precedence over PATH, as in Spark's own
            scripts.

    Raises:
        JavaNotFoundError: No Java was found, it does not run, or it is too old.
    """
    home = environment.get("JAVA_HOME")
    found = str(Path(home) / "bin" / "java") if home else shutil.which("java", path=environment.get("PATH", ""))
    where = "JAVA_HOME" if home else "the PATH"
    if found is None:
        raise JavaNotFoundError(f"Spark needs Java, and none is on the PATH (JAVA_HOME is not set). {_HOW_TO}")
    try:
        answer = subprocess.run([found, "-version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise JavaNotFoundError(f"{found} (from {where}) does not run: {error}. {_HOW_TO}") from error
    match = _VERSION.search(answer.stderr + answer.stdout)
    if match is None:
        said = (answer.stderr or answer.stdout).strip()[:200]
        raise JavaNotFoundError(f"{found} (from {where}) does not report its version: {said!r}. {_HOW_TO}")
    version = int(match[1])
    release = _release()
    if version < release.oldest_java:
        raise JavaNotFoundError(
            f"{found} (from {where}) is Java {version}, but {release} needs {release.oldest_java} or newer. {_HOW_TO}"
        )
    return Java(found, version)


def _release() -> SparkRelease:
    try:
        return installed_release()
    except SparkNotFoundError:
        return RELEASES[-1]


def main() -> int:
    """Print the result; returns 1 if Spark cannot start."""
    try:
        java = require_java()
    except JavaNotFoundError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"Java {java.version}: {java.executable}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
