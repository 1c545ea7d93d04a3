"""A program that runs a stream until its lease is lost; tests freeze its Python process or its JVM."""

from __future__ import annotations

import sys
from pathlib import Path

from dagster_ckpt.runtime import supervision
from dagster_ckpt.runtime.execution import execute_stream
from dagster_ckpt.runtime.run_request import RunRequest
from dagster_ckpt.spark.query.query import jvm_pid
from tests.support.query_bench import Bench, make_stream
from tests.support.small_spark import small_spark

TTL_MS = 4_000


def main(root: Path, longest_call_ms: int) -> None:
    """Run the stream; say in the end how it ended."""
    supervision.LONGEST_CALL_MS = longest_call_ms
    with small_spark() as spark:
        bench = Bench(spark, root, make_stream(root, interval=600_000))
        request = RunRequest("hung", bench.start_query, ttl_ms=TTL_MS, jvm_pid=jvm_pid(spark))
        print(f"ended: {execute_stream(bench.stream, request).end.kind.name}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
