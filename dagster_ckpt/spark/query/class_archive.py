"""An archive of the classes that Java loads for a query (AppCDS), with which Spark starts faster.

A JVM ignores an archive that does not fit: made by another Java, or with other jars on its class path.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from dagster_ckpt.errors import StorageAccessError, UnsupportedSparkError
from dagster_ckpt.values.redaction import without_secrets

_JAVA_OPTIONS = "spark.driver.extraJavaOptions"
# Java would warn of an archive that does not fit at each start.
_QUIET = "-Xlog:cds=off -Xlog:cds+dynamic=off"
# Java does not start that is to write an archive and reads another one.
_READS_ARCHIVE = re.compile(r"\s*-XX:SharedArchiveFile=\S+")
_ENVIRONMENT = ("SPARK_SUBMIT_OPTS", "JDK_JAVA_OPTIONS", "JAVA_TOOL_OPTIONS", "_JAVA_OPTIONS")
_LIMIT_S = 600.0
# Of a dynamic archive (CDS_DYNAMIC_ARCHIVE_MAGIC of the JDK).
_MAGIC = (0xF00BABA8).to_bytes(4, "little")


def with_class_archive(settings: Mapping[str, str], archive: str) -> dict[str, str]:
    """Settings of a session whose Java reads its classes from there."""
    return _with_java_options(settings, f"-XX:SharedArchiveFile={archive} {_QUIET}")


def write_class_archive(archive: Path, settings: Mapping[str, str]) -> None:
    """Run small queries in a separate process, at whose end Java writes the classes that they needed.

    Args:
        settings: Those of the session that determine its class path, such as `spark.jars`.

    Raises:
        UnsupportedSparkError: The queries failed, or this Java writes no archive.
        StorageAccessError: The folder cannot be written, or another file is there.
    """
    unfinished = archive.with_name(f".{archive.name}.{uuid.uuid4().hex}")
    try:
        archive.parent.mkdir(parents=True, exist_ok=True)
        if archive.exists() and not _is_archive(archive):
            raise StorageAccessError(f"{archive} is another file, which is not replaced. Name another path.")
        own = {key: _READS_ARCHIVE.sub("", value) for key, value in settings.items()}
        said = _run(_with_java_options(own, f"-XX:ArchiveClassesAtExit={unfinished} {_QUIET}"))
        if not unfinished.is_file():
            raise UnsupportedSparkError(f"No archive was written to {archive}. Spark said: {without_secrets(said)}")
        # A JVM that has mapped the former one keeps it.
        unfinished.replace(archive)
    except OSError as error:
        raise StorageAccessError(f"{archive} cannot be written: {error}") from error
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)


def _is_archive(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def _run(settings: Mapping[str, str]) -> str:
    """The end of what Spark said. Its JVM has the same output, so this waits until Java has ended too."""
    # Not on the command line, which other users see.
    given = json.dumps(settings)
    command = [sys.executable, "-m", __name__]
    java = {key: _READS_ARCHIVE.sub("", os.environ[key]) for key in _ENVIRONMENT if key in os.environ}
    try:
        done = subprocess.run(
            command,
            input=given,
            env={**os.environ, **java},
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise UnsupportedSparkError(f"The queries did not end within {_LIMIT_S:.0f} s.") from error
    return done.stderr.strip()[-2_000:]


def _with_java_options(settings: Mapping[str, str], options: str) -> dict[str, str]:
    return {**settings, _JAVA_OPTIONS: f"{settings.get(_JAVA_OPTIONS, '')} {options}".strip()}


def _load_classes(settings: Mapping[str, str]) -> None:
    from dagster_ckpt.config.rocksdb import ROCKSDB
    from dagster_ckpt.config.state_backend import PROVIDER_CLASS
    from dagster_ckpt.spark.query.session import start_application, warm_up

    spark = start_application(2, {PROVIDER_CLASS: ROCKSDB, **settings})
    warm_up(spark)
    with tempfile.TemporaryDirectory() as folder:
        spark.range(10).write.json(f"{folder}/in")
        rows = spark.readStream.schema("id long").json(f"{folder}/in")
        writer = rows.writeStream.format("parquet").option("path", f"{folder}/out").trigger(availableNow=True)
        writer.option("checkpointLocation", f"{folder}/checkpoint").start().awaitTermination()
    spark.stop()


if __name__ == "__main__":
    _load_classes(json.load(sys.stdin))
