"""The program that the peer Flink of section `recovery` submits to its cluster: it counts numbers by key."""

from pyflink.datastream import StreamExecutionEnvironment
from pyflink.table import DataTypes, StreamTableEnvironment
from pyflink.table.udf import udf

KEYS = 1_000


def main() -> None:
    """Submit the job."""
    tables = StreamTableEnvironment.create(StreamExecutionEnvironment.get_execution_environment())
    tables.create_temporary_function("key_of", udf(lambda number: number % KEYS, result_type=DataTypes.BIGINT()))
    tables.execute_sql(
        "CREATE TABLE numbers (n BIGINT) WITH ('connector'='datagen', 'rows-per-second'='1000', 'fields.n.min'='0', "
        "'fields.n.max'='1000000')"
    )
    tables.execute_sql("CREATE TABLE nowhere (k BIGINT, n BIGINT) WITH ('connector'='blackhole')")
    tables.execute_sql("INSERT INTO nowhere SELECT k, COUNT(*) FROM (SELECT key_of(n) AS k FROM numbers) GROUP BY k")


if __name__ == "__main__":
    main()
