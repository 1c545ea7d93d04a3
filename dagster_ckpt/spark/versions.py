"""The differences between the supported versions of Spark.

Another Spark than the installed one may have written a directory, so readers follow the version line of each file, and
refuse an unknown version: the file may refer to others that a snapshot would miss.

Sources: the class files and package metadata of pyspark 3.5.9, 4.0.5, 4.1.4, 4.2.1 and 4.3.0.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from functools import cached_property
from types import MappingProxyType

from dagster_ckpt.errors import OptionError, SparkNotFoundError, UnknownLayoutError, UnsupportedSparkError

SUPPORTED = ">=3.5,<4.4"
_MINOR = re.compile(r"(\d+)\.(\d+)(?!\d)")
_FILE_VERSION = re.compile(r"v(\d+)")
_STATE_STORE = "spark.sql.streaming.stateStore."


class Feature(StrEnum):
    _value_: str
    since: str

    def __new__(cls, value: str, since: str) -> Feature:
        feature = str.__new__(cls, value)
        feature._value_, feature.since = value, since
        return feature

    MAINTENANCE_THREADS = "a number of threads that upload state", "4.0"
    OPERATOR_METADATA = "metadata of stateful operators", "4.0"
    STATE_READER = "a reader of the state of a query", "4.0"
    TRIGGER_CONTEXT = "the start time of the current trigger", "4.0"
    CHECKPOINT_FORMAT_2 = "state checkpoint format v2", "4.0"
    TRANSFORM_WITH_STATE_IN_PANDAS = "transformWithStateInPandas", "4.0"
    TRANSFORM_WITH_STATE = "transformWithState in Python", "4.1"
    JOIN_STATE_3 = "join state format v3", "4.1"
    REAL_TIME = "real-time mode", "4.1"
    REAL_TIME_STATE = "real-time mode with state", "4.3"
    JOIN_STATE_4 = "join state format v4", "4.3"
    STATE_READER_FORMAT_2 = "a reader of state in checkpoint format v2", "4.1"
    STATE_CHECKSUMS = "checksums of state files", "4.1"
    # Queries of Spark 4.0 fail, because it expects ids for every partition.
    CHECKPOINT_FORMAT_2_OF_ONE_PARTITION = "state checkpoint format v2 of state in one partition", "4.1"
    # See `is_of_spark_4_0`.
    ONE_SNAPSHOT_VERSION = "a version of RocksDB's snapshots that other releases read", "4.1"
    UPLOAD_THREAD_SHARE = "threads that only upload state", "4.3"
    NAMED_SOURCES = "named sources", "4.2"
    NAMED_SINKS = "named sinks", "4.2"
    OFFSET_LOG_2 = "offset log v2", "4.2"
    OFFSET_LOG_2_FOR_NAMES = "offset log v2 by itself for named sources", "4.3"
    STATE_REWRITER = "StateRewriter (rewrites state)", "4.2"
    ASYNC_FOREACH = "asynchronous progress tracking with a foreach sink", "4.3"


class TableFormat(StrEnum):
    DELTA = "delta"
    ICEBERG = "iceberg"


@dataclass(frozen=True)
class SparkRelease:
    """A minor release; `requirements` are packages that pip would choose too new, `jars` Maven coordinates."""

    minor: str
    oldest_java: int
    newest_python: tuple[int, int]
    requirements: tuple[str, ...] = ()
    jars: Mapping[TableFormat, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"Spark {self.minor}"

    @cached_property
    def features(self) -> frozenset[Feature]:
        return frozenset(filter(self.has, Feature))

    def has(self, feature: Feature) -> bool:
        return _numbers(feature.since) <= _numbers(self.minor)

    def require(self, feature: Feature, what: str) -> None:
        if self.has(feature):
            return
        having = [str(release) for release in RELEASES if release.has(feature)]
        advice = f"{having[0]} is the oldest that has it" if having else "no supported Spark has it"
        raise UnsupportedSparkError(f"{what} needs {feature}, which {self} does not have: {advice}.")


def _numbers(minor: str) -> list[int]:
    return [int(part) for part in minor.split(".")]


def _jars(*, delta: str, iceberg: str | None = None) -> Mapping[TableFormat, str]:
    jars = {TableFormat.DELTA: f"io.delta:delta-spark_{delta}"}
    if iceberg is not None:
        jars[TableFormat.ICEBERG] = f"org.apache.iceberg:iceberg-spark-runtime-{iceberg}"
    return MappingProxyType(jars)


RELEASES = (
    SparkRelease(
        "3.5",
        8,
        (3, 11),
        ("numpy<2", "pandas<3", "pyarrow<20"),
        # PyPI's Spark 3.5 is built with Scala 2.12.
        _jars(delta="2.12:3.3.3", iceberg="3.5_2.12:1.12.0"),
    ),
    SparkRelease("4.0", 17, (3, 13), jars=_jars(delta="4.0_2.13:4.4.0", iceberg="4.0_2.13:1.11.0")),
    SparkRelease("4.1", 17, (3, 13), jars=_jars(delta="4.1_2.13:4.4.0", iceberg="4.1_2.13:1.12.0")),
    SparkRelease("4.2", 17, (3, 13), jars=_jars(delta="4.2_2.13:4.4.0")),
    SparkRelease("4.3", 17, (3, 13)),
)

NAMES_SOURCES = "spark.sql.streaming.queryEvolution.enableSourceEvolution"
OFFSET_LOG_VERSION = "spark.sql.streaming.offsetLog.formatVersion"
# See `refuse_unknown_settings`.
SETTINGS: Mapping[str, Feature] = MappingProxyType(
    {
        f"{_STATE_STORE}numStateStoreMaintenanceThreads": Feature.MAINTENANCE_THREADS,
        f"{_STATE_STORE}snapshotToCleanupThreadRatio": Feature.UPLOAD_THREAD_SHARE,
        f"{_STATE_STORE}checkpointFormatVersion": Feature.CHECKPOINT_FORMAT_2,
        OFFSET_LOG_VERSION: Feature.OFFSET_LOG_2,
        NAMES_SOURCES: Feature.NAMED_SOURCES,
        "spark.sql.streaming.queryEvolution.enableSinkEvolution": Feature.NAMED_SINKS,
    }
)
PINNED_SINCE_OPERATOR_METADATA = f"{_STATE_STORE}encodingFormat"


def release_of(version: str) -> SparkRelease:
    found = _MINOR.match(version)
    minor = f"{found[1]}.{found[2]}" if found else ""
    for release in RELEASES:
        if release.minor == minor:
            return release
    raise UnsupportedSparkError(
        f"This is Spark {version}, and dagster_ckpt supports {RELEASES[0].minor} to {RELEASES[-1].minor}. Another "
        "Spark may write files that a snapshot would lack. Use a supported Spark, or a version of dagster_ckpt that "
        "supports this one."
    )


def oldest_release(features: Iterable[Feature]) -> SparkRelease:
    needed = frozenset(features)
    for release in RELEASES:
        if needed <= release.features:
            return release
    raise UnsupportedSparkError(f"No supported Spark has all of: {', '.join(sorted(needed))}.")


def written_by(settings: Iterable[str], features: Iterable[Feature]) -> str:
    """Guess which Spark wrote a live directory, which does not record it."""
    oldest = oldest_release(features)
    if PINNED_SINCE_OPERATOR_METADATA not in settings:
        return f"{RELEASES[0]} or older"
    return f"{max(oldest, RELEASES[1], key=RELEASES.index)} or later"


def installed_release() -> SparkRelease:
    try:
        # A platform that brings Spark may lack the package's metadata.
        from pyspark.version import __version__
    except ImportError as error:
        raise SparkNotFoundError(
            f"PySpark cannot be imported ({error}). dagster_ckpt does not install it, so as not to replace the Spark "
            "of a cluster or a managed platform. Where the platform brings Spark, put its Python folder "
            "($SPARK_HOME/python and the py4j zip in its lib) on PYTHONPATH; anywhere else, run: "
            f'pip install "dagster-ckpt[spark]" (pyspark{SUPPORTED}).'
        ) from error
    return release_of(str(__version__))


def spark_packages(*formats: TableFormat | str) -> str:
    """Return the value of `spark.jars.packages` for table formats on the installed Spark.

    Args:
        formats: `delta`, `iceberg`, or both.

    Raises:
        SparkNotFoundError: PySpark is not installed.
        UnsupportedSparkError: No release of a format runs on the installed Spark.

    Example:
        >>> from pyspark.sql import SparkSession
        >>> builder = SparkSession.builder.config("spark.jars.packages", spark_packages("delta"))
    """
    release = installed_release()
    coordinates = []
    for name in formats:
        if name not in list(TableFormat):
            raise OptionError(f"{name!r} is not a table format: use {' or '.join(map(repr, map(str, TableFormat)))}.")
        jar = release.jars.get(TableFormat(name))
        if jar is None:
            newest = [str(each) for each in RELEASES if TableFormat(name) in each.jars][-1]
            raise UnsupportedSparkError(
                f"No release of {TableFormat(name).name.title()} runs on {release}: {newest} is the newest that has "
                "one."
            )
        coordinates.append(jar)
    return ",".join(coordinates)


def refuse_unknown_settings(version: str, settings: Iterable[str]) -> None:
    """Refuse settings that the release would silently ignore."""
    needed = {name: feature for name in settings if (feature := SETTINGS.get(name)) is not None}
    if needed:
        release = release_of(version)
        for name, feature in needed.items():
            release.require(feature, f"The setting {name}")


def refuse_names_without_offsets(version: str, setting: Callable[[str], str | None]) -> None:
    release = release_of(version)
    if not release.has(Feature.NAMED_SOURCES) or release.has(Feature.OFFSET_LOG_2_FOR_NAMES):
        return
    if str(setting(NAMES_SOURCES)).lower() == "true" and setting(OFFSET_LOG_VERSION) != "2":
        raise UnsupportedSparkError(
            f"With {NAMES_SOURCES}, {release} writes offsets by position and the logs of sources by name, so a "
            f"snapshot could not tell which belong together. Set {OFFSET_LOG_VERSION} to 2 as well; a query that has "
            "already started without it needs a new live directory."
        )


class SparkFile(Enum):
    OFFSETS = "an offset log entry", {1, 2}
    COMMITS = "a commit log entry", {1, 2, 3}
    FILE_LOG = "a file log entry", {1}
    OPERATOR_METADATA = "operator metadata", {1, 2}
    STATE_SCHEMA = "a state schema", {1, 2, 3}
    # v2 adds column families, v3 a lineage, v4 both.
    CHANGELOG = "a changelog", {1, 2, 3, 4}
    # Spark 4.0 may write 2, with the same content.
    ROCKSDB_SNAPSHOT = "a RocksDB snapshot", {1, 2}

    def __init__(self, label: str, versions: set[int]) -> None:
        self.label = label
        self.versions = frozenset(versions)

    def version_in(self, line: str, where: str) -> int | None:
        """Return the version in a line such as `v2`, None if it is none."""
        match = _FILE_VERSION.fullmatch(line.strip())
        if match is None:
            return None
        number = int(match[1])
        if number not in self.versions:
            raise UnknownLayoutError(
                f"{where} is {self.label} of version v{number}, but the versions known are "
                f"{', '.join(f'v{version}' for version in sorted(self.versions))}. Another version of Spark wrote it: "
                "upgrade dagster_ckpt to one that knows it. Nothing was copied."
            )
        return number


def main(arguments: Sequence[str]) -> int:
    """Print the releases for this Python, or what pip installs for one (for the Makefile)."""
    here = [release for release in RELEASES if sys.version_info < (*release.newest_python, sys.maxsize)]
    if not arguments:
        sys.stdout.write(" ".join(release.minor for release in here) + "\n")
        return 0
    for release in here:
        if release.minor == arguments[0]:
            sys.stdout.write(" ".join([f"pyspark[sql]=={release.minor}.*", *release.requirements]) + "\n")
            return 0
    python = ".".join(map(str, sys.version_info[:2]))
    sys.stderr.write(f"On Python {python}, Spark is one of {', '.join(map(str, here))}, not {arguments[0]}.\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
