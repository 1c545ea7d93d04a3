"""The guide guides/backfill-then-stream.md, with a partitioned batch asset on real Spark."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest

from dagster_ckpt import run_stream
from dagster_ckpt.stream.start_from import StartFrom
from tests.recovery.test_state_changes_with_spark import REWRITES
from tests.support.page_blocks import blocks_of
from tests.support.small_spark import lay_file, small_spark

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
