"""The Spark application that a program runs in: found, or started on this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def active_session() -> SparkSession | None:
    """The session of the application that runs in this process, if any; starts nothing."""
    # Imported here: whoever only reads live directories needs no Spark.
    from pyspark import SparkContext  # noqa: PLC0415
    from pyspark.sql import SparkSession as ClassicSession  # noqa: PLC0415

    if SparkContext._active_spark_context is None:
        return None
    # In another thread than the one that made it no session is active.
    return ClassicSession.getActiveSession() or ClassicSession.builder.getOrCreate()


def is_classic_session(candidate: object) -> bool:
    """Whether this is a session whose JVM is at hand, which that of Spark Connect is not."""
    from pyspark.sql import SparkSession as ClassicSession  # noqa: PLC0415

    return isinstance(candidate, ClassicSession)


def start_application(threads: int, settings: Mapping[str, str]) -> SparkSession:
    """Start Spark, or join the application of this process.

    Where the program was started with `spark-submit`, or PYSPARK_SUBMIT_ARGS names a master, that one is used.

    Args:
        threads: Threads that run tasks, for an application on this machine.
        settings: Settings of the application, and of the session.
    """
    from pyspark.sql import SparkSession as ClassicSession  # noqa: PLC0415 - see active_session

    builder = ClassicSession.builder
    if not _names_a_master(os.environ):
        builder = builder.master(f"local[{threads}]")
    return builder.config(map=dict(settings)).getOrCreate()


@dataclass(frozen=True)
class SparkApplication:
    """A Spark application, as its cluster and its own page know it.

    Attributes:
        application_id: Its id, such as local-1700000000000 or application_1700000000000_0001.
        master: Where it runs, such as local[2], yarn or k8s://...
        page: URL of its page, where it has one.
    """

    application_id: str
    master: str
    page: str | None

    def as_record(self) -> dict[str, str | None]:
        """As the catalog keeps it."""
        return {"id": self.application_id, "master": self.master, "page": self.page}


def application_of(spark: SparkSession) -> SparkApplication | None:
    """The application of a classic session; None for Spark Connect, which does not tell."""
    if not is_classic_session(spark):
        return None
    context = spark.sparkContext
    return SparkApplication(str(context.applicationId), str(context.master), context.uiWebUrl)


def application_settings(spark: SparkSession) -> dict[str, str]:
    """Settings that the application of a session was started with."""
    return dict(spark.sparkContext.getConf().getAll())


def _names_a_master(environment: Mapping[str, str]) -> bool:
    # spark-submit tells a program the port of the JVM that it has started with the user's master.
    return "PYSPARK_GATEWAY_PORT" in environment or "--master" in environment.get("PYSPARK_SUBMIT_ARGS", "")
