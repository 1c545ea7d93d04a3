"""The guide guides/backfill-then-stream.md, with a partitioned batch asset on real Spark."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from dagster_ckpt import run_stream
from dagster_ckpt.errors import CkptError
from dagster_ckpt.stream.start_from import StartFrom
from tests.recovery.test_state_changes_with_spark import REWRITES
from tests.support.page_blocks import blocks_of
from tests.support.small_spark import lay_file, small_spark
from tests.support.small_stream import SmallStream, dedup

pytestmark = [
    pytest.mark.spark,
    pytest.mark.state,
    pytest.mark.usefixtures("warm_rewriter"),
    pytest.mark.skipif(not REWRITES, reason="no Spark that rewrites state: see make test-state"),
]
DAYS = ("2026-01-01", "2026-01-02")
LATER = "2026-01-03"


def lay(lake: Path, day: str) -> Counter[str]:
    number = int(day[-1])
    rows = [{"site": "abc"[each % 3], "amount": 10 * number + each} for each in range(7 + number)]
    (lake / "raw" / day).mkdir(parents=True)
    lay_file(lake / "raw" / day, number, rows)
    return Counter({site: sum(row["amount"] for row in rows if row["site"] == site) for site in "abc"})


@pytest.mark.parametrize("option", ["migrate_state", "bootstrap_state"])
def test_a_stream_continues_what_a_partitioned_asset_has_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.setenv("LAKE", str(tmp_path))
    blocks = blocks_of("guides/backfill-then-stream.md")
    first, batch, second = [block.text for block in blocks if block.language == "python"]
    page: dict[str, Any] = {}
    amounts = sum((lay(tmp_path, day) for day in DAYS), Counter[str]())
    with small_spark() as spark:
        pyspark = SimpleNamespace(spark_session=spark)

        def run(**options: Any) -> None:
            stream = page["orders"]
            run_stream(
                "orders",
                lambda _: stream(None, pyspark).trigger(availableNow=True),
                catalog=f"sqlite:///{tmp_path}/catalog.db",
                storage=f"file://{tmp_path}/snapshots",
                live_root=f"{tmp_path}/live",
                spark=spark,
                state_migrations=stream.spec.state_migrations,
                **options,
            )

        exec(compile(first, "first release", "exec", dont_inherit=True), page)
        run()
        exec(compile(batch, "batch asset", "exec", dont_inherit=True), page)
        for day in DAYS:
            made = dg.materialize([page["totals_by_day"]], partition_key=day, resources={"pyspark": pyspark})
            assert made.success
        exec(compile(second, "second release", "exec", dont_inherit=True), page)
        amounts += lay(tmp_path, LATER)
        run(start_from=StartFrom(**{option: True}))
        rows = [row for each in (tmp_path / "changes").iterdir() for row in spark.read.parquet(str(each)).collect()]
    assert {row.site: row.amount for row in rows} == dict(amounts)
    assert sum(row.n for row in rows) == sum(7 + number for number in (1, 2, 3))


def test_input_after_the_point_may_be_gone_if_that_is_accepted(tmp_path: Path) -> None:
    """The state is built from what is before it."""
    found: list[int] = []
    with small_spark() as spark:
        stream = SmallStream(spark, tmp_path)

        def keep(batch: DataFrame, _number: int) -> None:
            found.extend(row.a for row in batch.collect())

        def distinct(session: SparkSession) -> DataStreamWriter:
            return dedup(stream.read(session)).writeStream.foreachBatch(keep)

        stream.feed(3)
        stream.run(lambda session: stream.read(session).writeStream.foreachBatch(lambda *_: None))
        (tmp_path / "in" / "0002.json").unlink()
        with pytest.raises(CkptError, match=r"0002\.json"):
            stream.run(distinct, start_from=StartFrom("batch-1", bootstrap_state=True))
        stream.feed(1)
        stream.run(distinct, start_from=StartFrom("batch-1", bootstrap_state=True, accept_loss=True))

    # Those below 15 are in the two files that were read.
    assert sorted(found) == list(range(15, 25))
