"""Runs one step of a query in checkpoint format v2 in a separate JVM: `format_2_program.py ACTION CHANGELOG LIVE MORE`.

ACTION is `run` (MORE is the folder of the input; prints the rows of each batch), `count` (prints how many rows the
state has) or `rescale` (to three partitions, in the directory MORE).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from dagster_ckpt.config.rocksdb import EmbeddedRocksDBStateBackend
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.logs import STATE_FORMAT
from dagster_ckpt.spark.query.session import apply_state_backend
from dagster_ckpt.state.rewriter import readers_of
from dagster_ckpt.state.rewriting import rewrite_state, shape_in
from dagster_ckpt.state.stopped_state import StateShape
from tests.golden.live_directories import Query, counts, run
from tests.support.small_spark import small_spark


def main(action: str, changelog: str, live: LiveDirectory, more: str) -> None:
    backend = EmbeddedRocksDBStateBackend(changelog == "changelog", settings={STATE_FORMAT: "2"})
    with small_spark() as spark:
        apply_state_backend(spark, backend)
        if action == "run":
            print(json.dumps(run(spark, Query(counts, backend, "update"), live, Path(more))))
        elif action == "count":
            batch = live.positions().commit or 0
            with readers_of(spark, live, [batch]) as readers:
                print(json.dumps(sum(each.rows for each in readers[batch].count())))
        else:
            shape = shape_in(live)
            assert shape is not None
            made = rewrite_state(spark, live, LiveDirectory(more), shape=StateShape(shape.provider, 3, 2))
            print(json.dumps(made.rows))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], LiveDirectory(sys.argv[3]), sys.argv[4])
