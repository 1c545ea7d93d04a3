"""The Spark application of this process, its sessions and their settings, and the Java that it starts."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dagster_ckpt.config.state_backend import PROVIDER_CLASS, StateBackend
from dagster_ckpt.errors import JavaNotFoundError, OptionError, SparkNotFoundError
from dagster_ckpt.spark.checkpoint_dir.logs import SHUFFLE_PARTITIONS
from dagster_ckpt.spark.versions import RELEASES, SparkRelease, installed_release, refuse_unknown_settings
from dagster_ckpt.values.redaction import shown_settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def active_session() -> SparkSession | None:
    """Return the session of this process, without starting an application."""
    try:
        from pyspark import SparkContext
        from pyspark.sql import SparkSession as ClassicSession
    except ImportError:
        return None
    if SparkContext._active_spark_context is None:
        return None
    # Only the creating thread has an active session.
    return ClassicSession.getActiveSession() or ClassicSession.builder.getOrCreate()


def default_file_system() -> str | None:
    """Return Spark's file system for paths without a scheme; None if it is local or no application runs."""
    session = active_session()
    if session is None:
        return None
    default = str(session._jsparkSession.sessionState().newHadoopConf().get("fs.defaultFS") or "")
    return None if not default or default.startswith("file:") else default.rstrip("/")


@contextmanager
def active_in_thread(session: SparkSession) -> Iterator[None]:
    """Make the session active in this thread; no effect for Spark Connect.

    In other threads than the creating one, Spark 3.5 parses expressions with default settings, and finds neither a
    Delta table by name nor an Iceberg table by folder.
    """
    if not is_classic_session(session):
        yield
        return
    of_sessions = jvm_class(session, "SparkSession")
    before = of_sessions.getActiveSession()
    of_sessions.setActiveSession(session._jsparkSession)
    try:
        yield
    finally:
        # A JVM that has ended must not hide the original error.
        with suppress(Exception):
            if before.isDefined():
                of_sessions.setActiveSession(before.get())
            else:
                of_sessions.clearActiveSession()


def jvm_class(session: SparkSession, name: str) -> Any:
    """Return a class of the session's own package, which Spark 4 has moved."""
    found: Any = session._jvm
    package = str(session._jsparkSession.getClass().getPackageName())
    for part in f"{package}.{name}".split("."):
        found = getattr(found, part)
    return found


def is_classic_session(candidate: object) -> bool:
    from pyspark.sql import SparkSession as ClassicSession

    return isinstance(candidate, ClassicSession)


# Progress bars would bury the log.
_QUIET = {"spark.ui.showConsoleProgress": "false"}


# Ten times HotSpot's own: optimizing methods that are not used again takes a quarter of a start's CPU time.
_LATE_OPTIMIZATION = (
    "-XX:+IgnoreUnrecognizedVMOptions -XX:Tier4InvocationThreshold=50000 -XX:Tier4MinInvocationThreshold=6000 "
    "-XX:Tier4CompileThreshold=150000 -XX:Tier4BackEdgeThreshold=400000"
)
# For the short-lived Java that assembles Spark's command.
_LAUNCHER = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


@contextmanager
def quick_start(environment: MutableMapping[str, str]) -> Iterator[None]:
    """Let Java that Spark's scripts start meanwhile optimize later, unless the user has set this."""
    ours = {"SPARK_SUBMIT_OPTS": _LATE_OPTIMIZATION, "SPARK_LAUNCHER_OPTS": _LAUNCHER}
    before = {name: environment.get(name) for name in ours}
    for name, options in ours.items():
        theirs = before[name] or ""
        # Ours come first, because the last one counts.
        environment[name] = theirs if "-XX:Tier" in theirs else f"{options} {theirs}".strip()
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                environment.pop(name, None)
            else:
                environment[name] = value


def session_with(settings: Mapping[str, str]) -> SparkSession:
    installed_release()
    from pyspark.errors import PySparkRuntimeError
    from pyspark.sql import SparkSession as ClassicSession

    builder = ClassicSession.builder
    for name, value in (_QUIET | dict(settings)).items():
        builder = builder.config(name, value)
    try:
        with quick_start(os.environ):
            return builder.getOrCreate()
    except PySparkRuntimeError as error:
        # Spark only reports that its gateway exited. Not checked before: `spark-env.sh` may name a Java.
        if "JAVA_GATEWAY_EXITED" in str(error):
            require_java()
        raise


def start_application(threads: int, settings: Mapping[str, str]) -> SparkSession:
    """Start Spark with the master of `spark-submit` or PYSPARK_SUBMIT_ARGS, else locally with `threads` threads."""
    master = {} if _names_a_master(os.environ) else {"spark.master": f"local[{threads}]"}
    return session_with(master | dict(settings))


@dataclass(frozen=True)
class SparkApplication:
    application_id: str
    master: str
    page: str | None

    def as_record(self) -> dict[str, str | None]:
        return {"id": self.application_id, "master": self.master, "page": self.page}


def application_of(spark: SparkSession) -> SparkApplication | None:
    if not is_classic_session(spark):
        return None
    context = spark.sparkContext
    return SparkApplication(str(context.applicationId), str(context.master), context.uiWebUrl)


def application_settings(spark: SparkSession) -> dict[str, str]:
    return dict(spark.sparkContext.getConf().getAll())


def unknown_classes(spark: SparkSession, names: Sequence[str]) -> list[str]:
    from py4j.protocol import Py4JJavaError

    jvm: Any = spark._jvm
    loader, unknown = jvm.java.lang.Thread.currentThread().getContextClassLoader(), []
    for name in names:
        try:
            loader.loadClass(name)
        except Py4JJavaError:
            unknown.append(name)
    return unknown


def _names_a_master(environment: Mapping[str, str]) -> bool:
    # spark-submit passes the port of the JVM that it started.
    return "PYSPARK_GATEWAY_PORT" in environment or "--master" in environment.get("PYSPARK_SUBMIT_ARGS", "")


def apply_state_backend(spark: SparkSession, backend: StateBackend) -> dict[str, str]:
    """Set the backend of new queries; return the settings that changed. Spark pins that of resumed ones."""
    return _apply(spark, backend.spark_settings(), "The state backend")


@contextmanager
def settings_for_a_while(spark: SparkSession, settings: Mapping[str, str], source: str) -> Iterator[None]:
    """Change settings during the context, for queries that start in it and keep them; messages name their `source`."""
    before = {name: spark.conf.get(name, None) for name in settings}
    try:
        _apply(spark, settings, source)
        yield
    except BaseException:
        # As in `active_in_thread`.
        with suppress(Exception):
            _restore(spark, before)
        raise
    _restore(spark, before)


def _restore(spark: SparkSession, before: Mapping[str, str | None]) -> None:
    for name, value in before.items():
        if spark.conf.get(name, None) != value:
            spark.conf.unset(name) if value is None else spark.conf.set(name, value)


def _apply(spark: SparkSession, settings: Mapping[str, str], source: str) -> dict[str, str]:
    refuse_unknown_settings(spark.version, settings)
    changed: dict[str, str] = {}
    for name, value in settings.items():
        if spark.conf.get(name, None) == value:
            continue
        if not _can_be_set(spark, name):
            raise OptionError(
                f"{source} sets {name} to {shown_settings({name: value})[name]!r}, but this session has "
                f"{shown_settings({name: spark.conf.get(name, None)})[name]!r} and Spark "
                "reads it only when the application starts. Give it to the Spark resource's configuration "
                "instead."
            )
        spark.conf.set(name, value)
        changed[name] = value
    return changed


def _can_be_set(spark: SparkSession, name: str) -> bool:
    # Spark reports the RocksDB settings as not modifiable.
    return name.startswith("spark.sql.streaming.") or spark.conf.isModifiable(name)


_VERSION = re.compile(r'version "(?:1\.)?(\d+)')
_HOW_TO = (
    "Install Java 17 (Debian: apt install openjdk-17-jre-headless; macOS: brew install openjdk@17; anywhere: "
    "https://adoptium.net), which every supported Spark runs on, and put it on the PATH or set JAVA_HOME to it."
)


@dataclass(frozen=True)
class Java:
    executable: str
    version: int


def require_java(environment: Mapping[str, str] = os.environ) -> Java:
    """Find Java in JAVA_HOME, else on the PATH, as Spark's scripts do."""
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


_WARM_UP_S = 60


def warm_up(spark: SparkSession) -> None:
    """Let the JVM load and compile what the start of a query needs, by one batch of a small query with state."""
    if not is_classic_session(spark):
        return
    session = spark.newSession()
    session.conf.set(SHUFFLE_PARTITIONS, "1")
    session.conf.set(PROVIDER_CLASS, str(spark.conf.get(PROVIDER_CLASS)))
    rows = session.readStream.format("rate-micro-batch").option("rowsPerBatch", "1").load()
    counted = rows.groupBy("value").count()
    writer = counted.writeStream.queryName("dagster_ckpt_warm_up").format("noop").outputMode("update")
    query = writer.trigger(once=True).start()
    try:
        query.awaitTermination(_WARM_UP_S)
    finally:
        query.stop()
