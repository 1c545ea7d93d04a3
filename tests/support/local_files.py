"""Hadoop's local file system without a process for each file, for every JVM of the tests.

Where its native library is not installed, as with PySpark from PyPI, Hadoop starts `chmod` for each file that it
creates and `readlink` for each that it renames: near half of the time of a small micro-batch. `LocalFiles.java` does
as the library does, by the JVM. It is compiled by Janino, which Spark brings, as a Java runtime has no compiler.

The classes that most JVMs of the tests load are kept in an archive (AppCDS), which saves each of them a third of the
time up to its first micro-batch. A JVM that the archive does not fit ignores it.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Mapping, MutableMapping
from importlib.metadata import version
from pathlib import Path
from zipfile import ZipFile

_SOURCE = Path(__file__).with_name("LocalFiles.java")
_COMMON_CLASSES = Path(__file__).with_name("common_classes.py")
_ARCHIVED_WITHIN_S = 300
_CLASS = "dagster_ckpt.tests.LocalFiles"
# Settings of a query that is to write its checkpoint with Hadoop's own.
HADOOPS_OWN = {"fs.AbstractFileSystem.file.impl": "org.apache.hadoop.fs.local.LocalFs"}


def use_local_files(cache: Path, environment: MutableMapping[str, str]) -> None:
    """Have every JVM that Spark starts in this environment use them.

    Args:
        cache: Where what is compiled is kept.
        environment: Environment variables.
    """
    source = _SOURCE.read_text()
    of = hashlib.sha256(f"{version('pyspark')}{source}{_COMMON_CLASSES.read_text()}".encode()).hexdigest()
    jar = cache / f"{of[:16]}.jar"
    archive = jar.with_suffix(".jsa")
    is_new = not jar.exists()
    if is_new:
        _compile(source, jar)
    environment["SPARK_DIST_CLASSPATH"] = str(jar)
    environment["SPARK_SUBMIT_OPTS"] = " ".join(
        [
            environment.get("SPARK_SUBMIT_OPTS", ""),
            f"-Dspark.hadoop.fs.file.impl={_CLASS}",
            f"-Dspark.hadoop.fs.AbstractFileSystem.file.impl={_CLASS}$Context",
        ]
    ).strip()
    if is_new:
        _archive_classes(archive, environment)
    if archive.exists():
        environment["SPARK_SUBMIT_OPTS"] += f" -XX:SharedArchiveFile={archive} -Xlog:cds*=off"


def _archive_classes(archive: Path, environment: Mapping[str, str]) -> None:
    """Without an archive, as of a JVM that cannot write one, the tests take longer, and that is all."""
    unfinished = archive.with_suffix(f".{os.getpid()}")
    options = f"{environment['SPARK_SUBMIT_OPTS']} -XX:ArchiveClassesAtExit={unfinished} -Xlog:cds*=off"
    root = str(_COMMON_CLASSES.parents[2])
    try:
        # The JVM writes it after Python's end, and closes its output then.
        subprocess.run(
            [sys.executable, "-m", "tests.support.common_classes"],
            cwd=root,
            env={**environment, "SPARK_SUBMIT_OPTS": options, "PYTHONPATH": root},
            capture_output=True,
            timeout=_ARCHIVED_WITHIN_S,
            check=True,
        )
        unfinished.replace(archive)
    except (subprocess.SubprocessError, FileNotFoundError):
        unfinished.unlink(missing_ok=True)


def _compile(source: str, jar: Path) -> None:
    # Imported here: most tests need no Spark.
    import pyspark
    from py4j.java_gateway import JavaGateway

    from tests.support.maven import java

    jars = Path(pyspark.__file__).parent / "jars"
    (py4j,) = jars.glob("py4j-*.jar")
    gateway = JavaGateway.launch_gateway(jarpath=str(py4j), classpath=f"{jars}/*", java_path=java(), die_on_exit=True)
    unfinished = jar.with_suffix(f".{os.getpid()}")
    try:
        compiler = gateway.jvm.org.codehaus.janino.SimpleCompiler()
        compiler.cook(source)
        with ZipFile(unfinished, "w") as classes:
            for name, code in dict(compiler.getBytecodes()).items():
                classes.writestr(f"{name.replace('.', '/')}.class", code)
    finally:
        gateway.shutdown()
    unfinished.replace(jar)
