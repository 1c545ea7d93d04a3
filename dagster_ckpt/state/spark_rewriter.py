"""The bridge to Spark's `StateRewriter` (4.2.1 and 4.3.0): the only module that knows its class.

It writes the rows that a function returns for each state store. Ours ignores the offered frame, a reading of the
directory to be filled, and returns rows of the source, which may have another shape.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from dagster_ckpt.errors import CkptError, StateRewriteError, UnsupportedSparkError
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.query.session import is_classic_session
from dagster_ckpt.spark.versions import Feature, release_of
from dagster_ckpt.state.reading import cause_in
from dagster_ckpt.state.shape import StateShape
from dagster_ckpt.state.stopped_state import StateIds, state_session

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

# A state store in a plan.
_STORE_IN_PLAN = re.compile(r"\[operatorId=(\d+)\]\[storeName=([^\]]+)\]")
_ARGUMENTS = 8
_CLASS = "org.apache.spark.sql.execution.streaming.state.StateRewriter"
# Operator number and store name to rows.
RowsOf = Callable[[int, str], "DataFrame"]


def require_rewriter(spark: SparkSession) -> None:
    what = "A rewrite of state (other partitions, another backend, other rows)"
    release_of(spark.version).require(Feature.STATE_REWRITER, what)
    if not is_classic_session(spark):
        raise UnsupportedSparkError(
            f"{what} needs the JVM of the driver, which a Spark Connect session does not have. Run it in the driver."
        )
    found = _arities(spark)
    if _ARGUMENTS not in found:
        raise UnsupportedSparkError(
            f"{what} needs the StateRewriter of Spark 4.3, but that of this Spark {spark.version} "
            f"{'is missing' if not found else f'takes {found} arguments'}. Use a release of Apache Spark."
        )


class _RowsForSpark:
    """A `scala.Function1` that returns the rows of each store that Spark's rewriter asks for.

    `error` keeps what went wrong: Spark only reports that a Python function failed.
    """

    def __init__(self, rows_of: RowsOf, writing: SparkSession) -> None:
        self._rows_of = rows_of
        self._writing = writing
        self.error: Exception | None = None

    def apply(self, offered: Any) -> Any:
        try:
            return self._rows(offered)
        except Exception as error:
            self.error = error
            raise

    def _rows(self, offered: Any) -> Any:
        named = _STORE_IN_PLAN.search(offered.queryExecution().analyzed().toString())
        if named is None:
            raise StateRewriteError(
                "The plan of Spark's StateRewriter does not name the state store that it "
                "is about to write. Use a release of Apache Spark."
            )
        rows = self._rows_of(int(named[1]), named[2])
        if rows._jdf.schema().equals(offered.schema()):
            return rows._jdf
        # Nullability must match, of which internal rows say nothing. Heap state lacks the partition key, which is no
        # longer read.
        columns = [rows[name] if name in rows.columns else _null(offered, name) for name in offered.columns()]
        plain = rows.select(*columns)._jdf.queryExecution().toRdd()
        return self._writing._jsparkSession.internalCreateDataFrame(plain, offered.schema(), False)

    def toString(self) -> str:  # noqa: N802 - Java's name
        return "rows of the state to rewrite"

    class Java:
        """Read by py4j."""

        implements: ClassVar[list[str]] = ["scala.Function1"]


def _null(offered: Any, column: str) -> Column:
    from pyspark.sql import functions as F

    kind = offered.schema().apply(column).dataType()
    return F.lit(None).cast(kind.sql()).alias(column)


def run_rewriter(
    spark: SparkSession, target: LiveDirectory, batch_id: int, shape: StateShape, rows_of: RowsOf
) -> StateIds:
    """Let Spark write the state of every operator into a directory that has everything else; blocks.

    Returns the unique ids of the state, in checkpoint format v2.
    """
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException
    from pyspark.java_gateway import ensure_callback_server_started

    writing = state_session(spark, shape)
    jvm = _jvm(spark)
    some = jvm.scala.Option.apply
    rows = _RowsForSpark(rows_of, writing)
    ensure_callback_server_started(spark.sparkContext._gateway)  # type: ignore[no-untyped-call]
    location = target.spark_location
    try:
        rewriter = jvm.org.apache.spark.sql.execution.streaming.state.StateRewriter(
            writing._jsparkSession,
            batch_id,
            batch_id,
            location,
            writing._jsparkSession.sessionState().newHadoopConf(),
            some(location),
            some(rows),
            jvm.scala.Option.empty(),
        )
        return _state_ids(rewriter.run())
    except (PySparkException, Py4JError) as error:
        if isinstance(rows.error, CkptError):
            raise rows.error from error
        raise StateRewriteError(
            f"Spark could not write the state to {target.url}: {cause_in(rows.error or error)} The stream is unchanged."
        ) from error


def _state_ids(found: Any) -> StateIds:
    ids: dict[int, tuple[tuple[str, ...], ...]] = {}
    operators = found.get().iterator() if found.isDefined() else None
    while operators is not None and operators.hasNext():
        of_operator = operators.next()
        ids[int(of_operator._1())] = tuple(tuple(map(str, stores)) for stores in of_operator._2())
    return ids


def _jvm(spark: SparkSession) -> Any:
    return spark.sparkContext._jvm


def _arities(spark: SparkSession) -> list[int]:
    from py4j.protocol import Py4JError

    loader = spark._jsparkSession.getClass().getClassLoader()
    try:
        found = _jvm(spark).java.lang.Class.forName(_CLASS, True, loader)
        return [constructor.getParameterCount() for constructor in found.getConstructors()]
    except Py4JError:
        return []
