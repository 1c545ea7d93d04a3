"""An archive of the classes that Java loads for a query (AppCDS), with which Spark starts faster.

A JVM ignores an archive that does not fit: made by another Java, with other jars on its class path, or damaged.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from dagster_ckpt.errors import CkptError, StorageAccessError, UnsupportedSparkError
from dagster_ckpt.io.local import flush
from dagster_ckpt.values.redaction import without_secrets

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_JAVA_OPTIONS = "spark.driver.extraJavaOptions"
# Without this option, Java would not start with a damaged archive.
_CHECKED = "-XX:+VerifySharedSpaces"
# Otherwise, Java would warn of an unfit archive at each start.
_QUIET = "-Xlog:cds=off -Xlog:cds+dynamic=off"
# Java does not start if it is to write one archive and read another.
_READS_ARCHIVE = re.compile(r"\s*-XX:SharedArchiveFile=\S+")
_ENVIRONMENT = ("SPARK_SUBMIT_OPTS", "JDK_JAVA_OPTIONS", "JAVA_TOOL_OPTIONS", "_JAVA_OPTIONS")
# These variables name the JVM of `spark-submit`, in which the queries would run.
_OF_OWN_JVM = "PYSPARK_GATEWAY_"
_LIMIT_S = 1_800.0
# The start of the stream is over by then.
DELAY_S = 60.0
# A missing archive is written with these: they need no cluster, and nothing that two applications cannot share.
_OF_CLASS_PATH = re.compile(
    r"spark\.(driver\.(extraClassPath|extraJavaOptions|defaultJavaOptions|memory)|jars(\..+)?|sql\.extensions)"
)
# CDS_DYNAMIC_ARCHIVE_MAGIC of the JDK.
_MAGIC = (0xF00BABA8).to_bytes(4, "little")


def with_class_archive(settings: Mapping[str, str], archive: str) -> dict[str, str]:
    return _with_java_options(settings, f"-XX:SharedArchiveFile={archive} {_CHECKED} {_QUIET}")


def look_after_archive(
    spark: SparkSession,
    archive: Path,
    settings: Mapping[str, str],
    report: Callable[[str], object],
    *,
    delay_s: float = DELAY_S,
) -> threading.Timer | None:
    """Write a missing archive after a while, in the background; report why the session's Java can use none.

    Args:
        report: Called with a sentence, possibly by another thread.
    """
    if (reason := _folder_in_the_way(settings)) is not None:
        report(f"Spark starts without an archive of Java's classes. {reason}")
        return None
    if archive.exists():
        if _is_ignored(spark, archive):
            report(
                f"Java ignores {archive}, which is damaged or of another Java, Spark or class path: Spark starts more "
                f"slowly. `dagster-ckpt class-archive {archive}` writes it again."
            )
        return None
    of_class_path = {name: value for name, value in settings.items() if _OF_CLASS_PATH.fullmatch(name)}
    timer = threading.Timer(delay_s, _write_missing, (archive, of_class_path, report))
    timer.daemon = True
    timer.start()
    return timer


def _folder_in_the_way(settings: Mapping[str, str]) -> str | None:
    """Return why Java archives no class; None if no folder with files is on the class path."""
    import pyspark

    home = os.environ.get("SPARK_HOME") or Path(pyspark.__file__).parent
    # As Spark's launcher builds it (AbstractCommandBuilder).
    named = {name: os.environ.get(name, "") for name in ("HADOOP_CONF_DIR", "YARN_CONF_DIR", "SPARK_DIST_CLASSPATH")}
    named["SPARK_CONF_DIR"] = os.environ.get("SPARK_CONF_DIR") or f"{home}/conf"
    named["spark.driver.extraClassPath"] = settings.get("spark.driver.extraClassPath", "")
    for name, paths in named.items():
        for path in map(Path, filter(None, paths.split(os.pathsep))):
            if path.is_dir() and any(path.iterdir()):
                return (
                    f"Java makes and reads none while a folder with files is on its class path: {path} ({name}). "
                    "Take it off the class path: a file of settings such as spark-defaults.conf can be given as "
                    "PYSPARK_SUBMIT_ARGS='--properties-file FILE pyspark-shell', other files as a jar."
                )
    return None


def _is_ignored(spark: SparkSession, archive: Path) -> bool:
    """Whether the JVM was to map the archive and has not; False where that cannot be seen, as on macOS."""
    from dagster_ckpt.spark.query.query import jvm_pid

    process = Path(f"/proc/{jvm_pid(spark)}")
    try:
        # Another session of this process may have started the JVM without it.
        is_named = f"-XX:SharedArchiveFile={archive}".encode() in (process / "cmdline").read_bytes().split(b"\0")
        return is_named and str(archive.resolve()) not in (process / "maps").read_text()
    except OSError:
        return False


def _write_missing(archive: Path, settings: Mapping[str, str], report: Callable[[str], object]) -> None:
    try:
        if write_class_archive(archive, {"spark.master": "local[2]", **settings}, in_background=True):
            report(f"Wrote Java's classes to {archive}: the next start of Spark is faster.")
    except CkptError as error:
        report(f"The stream continues without an archive of Java's classes. {error}")


def write_class_archive(archive: Path, settings: Mapping[str, str], *, in_background: bool = False) -> bool:
    """Run small queries in a separate process, at whose end Java writes the classes that they needed.

    Args:
        settings: Those of the session that determine its class path, such as `spark.jars`.
        in_background: With low priority, and only if the archive is missing and no other process writes it.
    """
    try:
        archive.parent.mkdir(parents=True, exist_ok=True)
        if archive.exists() and not _is_archive(archive):
            raise StorageAccessError(f"{archive} is another file, which is not replaced. Name another path.")
        if (reason := _folder_in_the_way(settings)) is not None:
            raise UnsupportedSparkError(f"No archive was written to {archive}. {reason}")
        with _alone(archive, wait=not in_background) as unfinished:
            if unfinished is None or (in_background and archive.exists()):
                return False
            own = {key: _READS_ARCHIVE.sub("", value) for key, value in settings.items()}
            writes = _with_java_options(own, f"-XX:ArchiveClassesAtExit={unfinished} {_QUIET}")
            said = _run(writes, niceness=10 if in_background else 0)
            if not unfinished.is_file():
                raise UnsupportedSparkError(f"No archive was written to {archive}. Spark said: {without_secrets(said)}")
            flush(unfinished)
            # A JVM that has mapped the former one keeps it.
            unfinished.replace(archive)
            return True
    except OSError as error:
        raise StorageAccessError(f"{archive} cannot be written: {error}") from error


@contextmanager
def _alone(archive: Path, *, wait: bool) -> Iterator[Path | None]:
    """Yield where one process of this machine at a time may write; None if another one writes."""
    # A new name: the JVM of a process that was killed may still write to the last one.
    unfinished = archive.with_name(f".{archive.name}.{uuid.uuid4().hex}")
    with archive.with_name(f".{archive.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
            return
        try:
            for left in archive.parent.glob(f".{archive.name}.{'[0-9a-f]' * 32}"):
                left.unlink(missing_ok=True)
            yield unfinished
        finally:
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)


def _is_archive(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def _run(settings: Mapping[str, str], *, niceness: int) -> str:
    """Return the end of Spark's output. Its JVM shares it, so this waits until Java has ended too."""
    # Not on the command line, which other users see.
    given = json.dumps([settings, niceness])
    command = [sys.executable, "-m", __name__]
    own = {key: value for key, value in os.environ.items() if not key.startswith(_OF_OWN_JVM)}
    java = {key: _READS_ARCHIVE.sub("", own[key]) for key in _ENVIRONMENT if key in own}
    try:
        done = subprocess.run(
            command,
            input=given,
            env={**own, **java},
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


def _load_classes(settings: Mapping[str, str], niceness: int) -> None:
    from dagster_ckpt.config.rocksdb import ROCKSDB
    from dagster_ckpt.config.state_backend import PROVIDER_CLASS
    from dagster_ckpt.spark.query.session import start_application, warm_up

    os.nice(niceness)
    spark = start_application(2, {PROVIDER_CLASS: ROCKSDB, **settings})
    warm_up(spark)
    with tempfile.TemporaryDirectory() as folder:
        spark.range(10).write.json(f"{folder}/in")
        rows = spark.readStream.schema("id long").json(f"{folder}/in")
        writer = rows.writeStream.format("parquet").option("path", f"{folder}/out").trigger(availableNow=True)
        writer.option("checkpointLocation", f"{folder}/checkpoint").start().awaitTermination()
    spark.stop()


if __name__ == "__main__":
    _load_classes(*json.load(sys.stdin))
