"""The Spark job that writes a batch: planned once for a started query, and run with the rows of each batch.

To plan it takes Spark 25 ms of processor time, which is as much as the transaction of 10,000 rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING, Any

from dagster_ckpt.errors import OptionError
from dagster_ckpt.sinks.kafka.division import division_of
from dagster_ckpt.sinks.kafka.marker import Transactions
from dagster_ckpt.sinks.kafka.share import batch_property, share_writer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_ADAPTIVE = "spark.sql.adaptive.enabled"
# Nothing reads this variable of a Python worker.
_STREAM_OF_WORKER = "DAGSTER_CKPT_KAFKA_STREAM"
_environment = Lock()


class BatchJob:
    """Writes the batches of one started query, whose columns stay as they are.

    The physical plan is kept. Each batch gets a copy of it, with its own rows at the bottom. What else differs, its
    number and the digest of its plan, goes to the tasks as a property of the job.

    Args:
        batch: Any of them.
        target: The sink and the run.

    Raises:
        OptionError: A column has another type or name than Spark's own Kafka sink takes.
    """

    def __init__(self, batch: DataFrame, target: Transactions) -> None:
        from pyspark.sql.types import StructType  # noqa: PLC0415 - see `dagster_ckpt.spark.query.description`

        self._owner = target.owner
        session, rows = batch.sparkSession, _without_rows(batch)
        with _planned_once(session), _workers_of_their_own(session, target):
            shares = division_of(rows, target.writers).of(rows)
            written = shares.mapInArrow(share_writer(target), StructType().add("none", "integer"))
            node: Any = written._jdf.queryExecution().executedPlan()
        # From top to bottom; the rows are the first child, if there are several.
        self._above: list[tuple[Any, Any]] = []
        while (children := node.children().toList()).size():
            self._above.append((node, children.tail()))
            node = children.head()
        self._scan = node
        self._output, _, *self._others = [node.productElement(number) for number in range(node.productArity())]

    def run(self, batch: DataFrame, batch_id: int, entry: str) -> None:
        """Write one batch, or those of its shares that are not written yet.

        Args:
            batch: The batch.
            batch_id: Its number.
            entry: Digest of its plan.
        """
        node = self._scan.copy(self._output, _rows_of(batch), *self._others)
        for parent, siblings in reversed(self._above):
            # Scala's name of `::`.
            node = parent.withNewChildren(getattr(siblings, "$colon$colon")(node))
        batch.sparkSession.sparkContext.setLocalProperty(*batch_property(self._owner, batch_id, entry))
        # `collect()` would be an SQL execution within that of the batch, with a description of its plan.
        node.execute().count()


def refuse_shared_threads(session: SparkSession) -> None:
    """Refuse a driver in which a property that a batch sets may become that of another thread's job.

    Raises:
        OptionError: PYSPARK_PIN_THREAD is false.
    """
    from py4j.clientserver import ClientServer  # noqa: PLC0415 - see `dagster_ckpt.spark.query.description`

    if not isinstance(session.sparkContext._gateway, ClientServer):
        raise OptionError(
            "PYSPARK_PIN_THREAD is false, so Python threads share threads of the JVM, and the number of a batch could "
            "reach another batch's tasks. Kafka's transactions need it: remove the variable, or set it "
            "to true, and start the driver again."
        )


def _without_rows(batch: DataFrame) -> DataFrame:
    """The columns of a batch, with nulls wherever another may have some.

    The rows are left out because Spark keeps the files of their shuffles for as long as something refers to them.
    """
    from pyspark.sql import DataFrame  # noqa: PLC0415 - see `dagster_ckpt.spark.query.description`

    jvm_session: Any = batch.sparkSession._jsparkSession
    no_rows = jvm_session.emptyDataFrame().queryExecution().toRdd()
    columns = batch._jdf.schema().asNullable()
    return DataFrame(jvm_session.internalCreateDataFrame(no_rows, columns, False), batch.sparkSession)


def _rows_of(batch: DataFrame) -> Any:
    """The rows of a batch. The batches of `foreachBatch` are nothing but rows, which need not be planned as a scan."""
    execution: Any = batch._jdf.queryExecution()
    plan = execution.analyzed()
    return plan.rdd() if plan.nodeName() == "LogicalRDD" else execution.toRdd()


@contextmanager
def _planned_once(session: SparkSession) -> Iterator[None]:
    """Run jobs without adaptive execution, which would plan them again after their shuffle.

    Args:
        session: That of the streaming query alone.
    """
    before = session.conf.get(_ADAPTIVE)
    session.conf.set(_ADAPTIVE, "false")
    try:
        yield
    finally:
        session.conf.set(_ADAPTIVE, str(before))


@contextmanager
def _workers_of_their_own(session: SparkSession, target: Transactions) -> Iterator[None]:
    """Let the functions that are mapped meanwhile run in Python workers that no other stream uses.

    A producer is kept in its Python worker, and Spark gives a task the worker that has been idle for longest. With one
    more worker than writers, whosesoever, a batch would rarely find its producer and begin another, in up to 0.5 s.
    Spark keeps workers apart by their environment. Its value is the same after a restart, so that a session that
    starts the stream again and again uses no more of them.
    """
    context = session.sparkContext
    # Other streams of this process start their batches in threads of their own.
    with _environment:
        before = context.environment
        context.environment = {**before, _STREAM_OF_WORKER: f"{target.prefix}.{target.stream}"}
        try:
            yield
        finally:
            context.environment = before
