"""What prepares a JVM for a query leaves the session of the query as it was."""

from __future__ import annotations

from pyspark.sql import SparkSession

from dagster_ckpt.spark.query.session import warm_up


def test_a_small_query_runs_beside_the_session_and_leaves_nothing_in_it(spark: SparkSession) -> None:
    def settings() -> dict[str, str]:
        return {row.key: row.value for row in spark.sql("SET").collect()}

    def jobs() -> int:
        return int(spark.sparkContext._jsc.sc().dagScheduler().numTotalJobs())  # type: ignore[union-attr]

    before, active, ran = settings(), SparkSession.getActiveSession(), jobs()
    warm_up(spark)

    assert jobs() > ran
    assert (settings(), spark.streams.active) == (before, [])
    after = SparkSession.getActiveSession()
    assert active is not None
    assert after is not None
    assert after._jsparkSession.equals(active._jsparkSession)
