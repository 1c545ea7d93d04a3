"""The matrix of `state_changes.yaml` on real Spark: changed state, and the rows of a batch computation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.readwriter import DataStreamWriter

from dagster_ckpt import Client, run_stream
from dagster_ckpt.client import StateMigration
from dagster_ckpt.client.launching import check_loaded_code
from dagster_ckpt.client.preflight import preflight
from dagster_ckpt.config.rocksdb import EmbeddedRocksDBStateBackend
from dagster_ckpt.config.state_backend import StateBackend
from dagster_ckpt.errors import CkptError, InputGoneError, PlanChangedError
from dagster_ckpt.recovery.compatibility_report import Compatibility
from dagster_ckpt.spark.checkpoint_dir.logs import STATE_FORMAT
from dagster_ckpt.spark.versions import Feature, installed_release
from dagster_ckpt.state.rewriter import Rewriter
from dagster_ckpt.stream.start_from import StartFrom
from tests.support.log_lines import collecting
from tests.support.lost_lease import tree
from tests.support.small_spark import lay_file, small_spark

REWRITES = installed_release().has(Feature.STATE_REWRITER) or Rewriter.find() is not None
pytestmark = [
    pytest.mark.spark,
    pytest.mark.state,
    pytest.mark.usefixtures("warm_rewriter"),
    pytest.mark.skipif(not REWRITES, reason="no Spark that rewrites state: see make test-state"),
]
CASES = yaml.safe_load(Path(__file__).with_name("state_changes.yaml").read_text())
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
SAMPLES = ("add a text", "another key", "the first operator", "dropDuplicates from its input")
Query = Callable[[DataFrame], DataFrame]
Rule = Callable[[DataFrame | None], DataFrame]


def by(*keys: str) -> Callable[..., Query]:
    return lambda *columns: lambda frame: frame.groupBy(*keys).agg(*map(F.expr, columns))


def timed(delay: str, size: str) -> Query:
    def windows(frame: DataFrame) -> DataFrame:
        marked = frame.withWatermark("t", delay) if frame.isStreaming else frame
        counted = marked.groupBy(F.window("t", size), "k").agg(F.count("*").alias("n"))
        return counted.select(F.col("window.start").alias("start"), "k", "n")

    return windows


def distinct_windows(frame: DataFrame) -> DataFrame:
    marked = frame.withWatermark("t", "30 seconds") if frame.isStreaming else frame
    counted = marked.dropDuplicates(["k", "v", "t"]).groupBy(F.window("t", "30 seconds"), "k")
    return counted.agg(F.count("*").alias("n")).select(F.col("window.start").alias("start"), "k", "n")


def two_sums(*columns: str) -> Query:
    """Two branches whose state has the same types: by k, with these columns, and by o."""

    def side(frame: DataFrame, key: str, columns: Sequence[str]) -> DataFrame:
        marked = frame.withWatermark("t", "30 seconds") if frame.isStreaming else frame
        summed = marked.groupBy(F.window("t", "30 seconds"), key).agg(*map(F.expr, columns))
        return summed.select(F.col("window.start").alias("start"), F.lit(key), key, *summed.columns[2:])

    return lambda frame: side(frame, "k", columns).union(side(getattr(frame, "again", frame), "o", (SUM_V, SUM_O)))


def selected(*columns: str) -> Query:
    """Spark keeps the sums in the order in which they are selected, and only these."""
    return lambda frame: frame.groupBy("k").agg(F.expr(SUM_O), F.expr(SUM_V)).select("k", *columns)


def sessions_with(*columns: str) -> Query:
    def sessions(frame: DataFrame) -> DataFrame:
        marked = frame.withWatermark("t", "30 seconds") if frame.isStreaming else frame
        windows = marked.groupBy(F.session_window("t", "15 seconds"), "k").agg(*map(F.expr, columns))
        return windows.select(F.col("session_window.start").alias("start"), "k", *windows.columns[2:])

    return sessions


def joined(*on: str) -> Query:
    return lambda frame: frame.join(frame.select(*on, F.col("v").alias("w")), list(on)).select("k", "v", "w")


def counted(frame: DataFrame, more: bool) -> DataFrame:
    """A function with state of its own; the later one keeps a sum too."""

    def function(key: Any, frames: Iterator[Any], state: Any) -> Iterator[Any]:
        found = list(state.get) if state.exists else [0, 0]
        for each in frames:
            found = [found[0] + len(each), (found[1] if len(found) > 1 else 0) + int(each.v.sum())]
        state.update(tuple(found if more else found[:1]))
        yield pd.DataFrame({"k": [key[0]], "n": [found[0]], "s": [found[1] if more else 0]})

    kept = "n long, s long" if more else "n long"
    return frame.groupBy("k").applyInPandasWithState(function, "k long, n long, s long", kept, "update", "NoTimeout")


SUM_V, SUM_O = "sum(v) AS sv", "sum(o) AS so"
N, S, T, A = "count(*) AS n", "sum(v) AS s", "max(site) AS t", "avg(v) AS a"
D, M = "stddev(v) AS d", "max(v) AS m"
of_k, total = by("k"), by()
QUERIES: dict[str, Query] = {
    "rows": lambda frame: frame.select("k", "v"),
    "count": of_k(N),
    "sum": of_k(S),
    "count_sum": of_k(N, S),
    "sum_count": of_k(S, N),
    "count_text": of_k(N, T),
    "count_text_sum": of_k(N, T, S),
    "count_avg": of_k(N, A),
    "avg_count": of_k(A, N),
    "count_deviation": of_k(D, N),
    "count_list": of_k(N, "size(collect_list(v)) AS l"),
    "count_sum_renamed": of_k(N, "sum(v) AS total"),
    "renamed_key": lambda frame: frame.withColumnRenamed("k", "kk").groupBy("kk").agg(F.expr(N), F.expr(S)),
    "highest": of_k(M),
    "total": total(N),
    "total_sum": total(N, S),
    "count_by_site": by("site")(N),
    "count_by_other": by("o")(N),
    "count_by_both": by("k", "site")(N),
    "sum_of_double": lambda frame: frame.withColumn("x", F.col("v") * 2).groupBy("k").agg(F.sum("x").alias("s")),
    "sum_of_triple": lambda frame: frame.withColumn("x", F.col("v") * 3).groupBy("k").agg(F.sum("x").alias("s")),
    "windows": timed("30 seconds", "30 seconds"),
    "windows_update": timed("30 seconds", "30 seconds"),
    "windows_long": timed("50 seconds", "30 seconds"),
    "longer_windows": timed("30 seconds", "60 seconds"),
    "distinct_windows": distinct_windows,
    "two_sums": two_sums(SUM_V, SUM_O),
    "two_sums_reordered": two_sums(SUM_O, SUM_V),
    "selected_v_o": selected("sv", "so"),
    "selected_o_v": selected("so", "sv"),
    "selected_v": selected("sv"),
    "selected_o": selected("so"),
    "bad_rows": of_k("sum(IF(v = 10, raise_error('no such value'), v)) AS s"),
    "sessions": sessions_with(N),
    "sessions_sum": sessions_with(N, S),
    "own": lambda frame: counted(frame, more=False) if frame.isStreaming else of_k(N, "0L AS s")(frame),
    "own_more": lambda frame: counted(frame, more=True) if frame.isStreaming else of_k(N, S)(frame),
    "distinct": lambda frame: frame.dropDuplicates(["k"]).select("k"),
    "distinct_by_both": lambda frame: frame.dropDuplicates(["k", "site"]).select("k", "site"),
    "limit": lambda frame: frame.select("k", "v").limit(3),
    "join": joined("k"),
    "join_more": joined("k", "site"),
}
BACKENDS = {
    "rocksdb": EmbeddedRocksDBStateBackend(True),
    "v2": EmbeddedRocksDBStateBackend(True, settings={STATE_FORMAT: "2"}),
}
APPEND = {"rows", "windows", "windows_long", "longer_windows", "distinct_windows", "sessions", "distinct"}
APPEND |= {"two_sums", "two_sums_reordered", "sessions_sum", "distinct_by_both", "limit", "join", "join_more"}
TIMED = {"windows", "windows_long", "longer_windows", "distinct_windows", "sessions", "sessions_sum"}
TIMED |= {"two_sums", "two_sums_reordered"}


def struct(*columns: str) -> Any:
    return F.struct(*map(F.expr, columns))


def summed(*key: str) -> Rule:
    """Groups of another key, from the counts of the former ones."""

    def summed(old: DataFrame | None) -> DataFrame:
        assert old is not None
        totals = old.groupBy(*([struct(*key).alias("key")] if key else [])).agg(F.sum("value.count").alias("n"))
        return totals.select(*(["key"] if key else []), struct("n").alias("value"))

    return summed


def changed(key: str, *value: str) -> Rule:
    """The rows, each with other columns."""

    def changed(old: DataFrame | None) -> DataFrame:
        assert old is not None
        return old.select(F.expr(key).alias("key"), *([struct(*value).alias("value")] if value else []))

    return changed


def windowed(old: DataFrame | None) -> DataFrame:
    assert old is not None
    # The function `window` needs a column.
    starts = old.select("key.k", "value", F.col("key.window.start").alias("start"))
    return starts.select("k", "value", F.window("start", "60 seconds").alias("w"))


def initial(query: str, key: str, *value: str) -> Callable[[Release], Rule]:
    """What a batch job made of the first files."""

    def of(release: Release) -> Rule:
        def initial(old: DataFrame | None) -> DataFrame:
            assert old is None
            return changed(key, *value)(release.batch(query, "long", 0, 3))

        return initial

    return of


def fails(_old: DataFrame | None) -> DataFrame:
    raise ValueError("no such site")


RULES: dict[str, Rule] = {
    "counts of k": summed("key.k"),
    "counts of sites": summed("key.site"),
    "one count": summed(),
    "longer windows": lambda old: summed("w", "k")(windowed(old)),
    "average": changed("key", "value.count", "CAST(value.sum AS double)", "value.count"),
    "narrow": changed("key", "CAST(value.max AS int)"),
    "keys": lambda old: changed("struct(key.k)")(old).distinct(),
    "first two": changed("key", "value.session_window", "value.k", "value.count"),
    "fails": fails,
    "no rows": lambda _old: 7,  # type: ignore[dict-item, return-value]
    "no value": changed("struct(key.k)"),
    "text": changed("key", "CAST(value.max AS string)"),
    "keys twice": changed("struct(key.k)", "value.count"),
    "own": changed("key", "struct(value.groupState.n, 0L)"),
}
OF_RELEASE = {"totals": initial("count_sum", "struct(k)", "n", "s"), "seen": initial("distinct", "struct(k)")}


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with small_spark() as session:
        yield session


class Release:
    """A query over files whose code changes."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark, self.folder = spark, folder
        self.files = len(list((folder / "in").glob("*.json")))
        self.batches: list[tuple[int, list[Any]]] = []
        self.backend: StateBackend | None = None
        (folder / "in").mkdir(exist_ok=True)
        self.places = {
            "catalog": f"sqlite:///{folder}/catalog.db",
            "storage": f"file://{folder}/snapshots",
            "live_root": f"{folder}/live",
        }

    def feed(self, files: int) -> None:
        for _ in range(files):
            at = NOON + timedelta(seconds=20 * self.files)
            rows = [
                {"k": (row + self.files) % 4, "o": row % 2, "v": 10 * self.files + row, "site": "abc"[row % 3]}
                for row in range(7)
            ]
            lay_file(self.folder / "in", self.files, [{**row, "t": at.isoformat()} for row in rows])
            self.files += 1

    def _schema(self, kind: str) -> str:
        return f"k long, o long, v {kind}, site string, t timestamp"

    def writer(self, query: str, kind: str = "long") -> DataStreamWriter:
        reader = self.spark.readStream.schema(self._schema(kind)).option("maxFilesPerTrigger", 1)
        read = reader.json(f"{self.folder}/in")
        # One that is read twice through one DataFrame is refused.
        read.again = reader.json(f"{self.folder}/in")  # type: ignore[attr-defined]
        frame = QUERIES[query](read)
        mode = "append" if query in APPEND else "update"
        return frame.writeStream.outputMode(mode).foreachBatch(self._keep).trigger(availableNow=True)

    def _keep(self, frame: DataFrame, batch: int) -> None:
        self.batches.append((batch, [tuple(row) for row in frame.collect()]))

    def run(self, query: str, kind: str = "long", **options: Any) -> list[str]:
        messages: list[str] = []
        with collecting(messages):
            run_stream(
                "orders",
                lambda _: self.writer(query, kind),
                **self.places,
                spark=self.spark,
                state_backend=self.backend,
                **options,
            )
        return messages

    def check(self, query: str, kind: str = "long", start: StartFrom | str = "latest", **options: Any) -> Any:
        with Client(**self.places) as client:
            return client.check("orders", lambda: self.writer(query, kind), start_from=start, **options)

    def rows_since(self, first: int) -> Counter[Any]:
        return Counter(row for _, rows in self.batches[first:] for row in rows)

    def table_since(self, query: str, first: int) -> dict[Any, dict[str, Any]]:
        """The newest row of each key."""
        return self._table(query, [row for _, rows in self.batches[first:] for row in rows])

    def _table(self, query: str, rows: Sequence[Any]) -> dict[Any, dict[str, Any]]:
        columns = self.batch(query, "long", 0, 0).columns
        keys = 0 if query.startswith("total") else 2 if query == "count_by_both" else 1
        return {row[:keys]: dict(zip(columns[keys:], row[keys:], strict=True)) for row in rows}

    def batch(self, query: str, kind: str, first: int, end: int) -> DataFrame:
        paths = [f"{self.folder}/in/{number:04}.json" for number in range(first, end)]
        read = self.spark.read.schema(self._schema(kind))
        return QUERIES[query](read.json(paths) if paths else self.spark.createDataFrame([], self._schema(kind)))

    def batch_rows(self, query: str, kind: str, first: int, end: int) -> Counter[Any]:
        return Counter(tuple(row) for row in self.batch(query, kind, first, end).collect())

    def batch_table(self, query: str, kind: str, first: int, end: int) -> dict[Any, dict[str, Any]]:
        return self._table(query, list(self.batch_rows(query, kind, first, end).elements()))


def option_of(case: dict[str, Any]) -> StartFrom:
    return StartFrom(migrate_state=case["how"] in ("migrate", "refused"), bootstrap_state=case["how"] == "bootstrap")


def rules_of(case: dict[str, Any], release: Release) -> dict[str, Any]:
    if "rule" not in case:
        return {}
    name = case["rule"]
    rule = OF_RELEASE[name](release) if name in OF_RELEASE else RULES[name]
    return {"state_migrations": [StateMigration(case.get("operator", 1), rule, case.get("former"))]}


@pytest.mark.thorough(but=SAMPLES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["case"])
def test_state_changes(spark: SparkSession, tmp_path: Path, case: dict[str, Any]) -> None:
    release = Release(spark, tmp_path)
    before, after, how = case["before"], case["after"], case["how"]
    rules = rules_of(case, release)
    if "backend" in case:
        release.backend = BACKENDS[case["backend"]]
        if case["backend"] == "v2" and not installed_release().has(Feature.CHECKPOINT_FORMAT_2):
            pytest.skip("this Spark has no checkpoint format v2")
    old_kind, kind = case.get("types", ["long", "long"])
    release.feed(3)
    release.run(before, old_kind)
    released = len(release.batches)
    release.feed(3)

    if how == "none":
        release.run(after, kind)
    else:
        with pytest.raises(PlanChangedError, match="nothing was changed"):
            release.run(after, kind)
        refused = case.get("why") if how == "refused" else case.get("refused")
        if refused is not None:
            live = sorted((tmp_path / "live/orders").iterdir())
            with pytest.raises(CkptError, match=r"[Nn]othing was changed") as raised:
                release.run(after, kind, start_from=option_of(case), **rules)
            assert refused in str(raised.value)
            assert sorted((tmp_path / "live/orders").iterdir()) == live
            release.run(before, old_kind)
            assert release.check(before, old_kind).verdict is Compatibility.SAME
            return
        asked = release.check(after, kind, option_of(case), **rules)
        assert asked.verdict is Compatibility.MIGRATABLE, asked.messages()
        if how == "migrate":
            plain = release.check(after, kind, **rules)
            assert plain.verdict is Compatibility.MIGRATABLE, plain.messages()
            assert plain.options == {"migrate_state": True}
            assert not rules or "by your function" in plain.reason
        messages = release.run(after, kind, start_from=option_of(case), **rules)
        assert any("took the savepoint" in each for each in messages), messages
    # A repeated option has nothing to do, and a plain start goes on.
    release.feed(1)
    release.run(after, kind, start_from=StartFrom() if how == "none" else option_of(case), **rules)
    if after in TIMED:
        # Closes all windows.
        at = (NOON + timedelta(days=1)).isoformat()
        lay_file(tmp_path / "in", 99, [{"k": 9, "o": 0, "v": 0, "site": "z", "t": at}])
    release.run(after, kind)
    release.run(after, kind)

    compare(release, case, kind, released)
    assert [batch for batch, _ in release.batches] == list(range(len(release.batches)))
    assert release.check(after, kind).verdict is Compatibility.SAME


def compare(release: Release, case: dict[str, Any], kind: str, released: int) -> None:
    after, end = case["after"], release.files
    rows = release.rows_since(released)
    if case.get("rows") == "later":
        assert rows == release.batch_rows(after, kind, 3, end)
    elif after in TIMED:
        # What was complete before the change is not given again.
        whole_rows = release.batch_rows(after, kind, 0, end)
        assert rows == Counter({row: n for row, n in whole_rows.items() if is_open(after, row[0])})
    elif "rows" in case:
        assert rows == release.batch_rows(after, kind, 0, end) - release.batch_rows(after, kind, 0, 3)
    else:
        whole, later = release.batch_table(after, kind, 0, end), release.batch_table(after, kind, 3, end)
        found = release.table_since(after, released)
        assert found.keys() == later.keys()
        for key, row in found.items():
            for name, wanted in (("whole", whole), ("later", later)):
                for column in case.get(name, ()):
                    assert row[column] == pytest.approx(wanted[key][column]), (key, column)


def is_open(query: str, start: datetime) -> bool:
    """Whether a window was not complete at the watermark of the newest batch before the change, of NOON + 40 s."""
    seconds = {"longer_windows": 60, "sessions": 15}.get(query, 30)
    # The batch itself had the watermark of NOON + 20 s.
    return start.replace(tzinfo=UTC) + timedelta(seconds=seconds) > NOON - timedelta(seconds=10)


@pytest.mark.parametrize(("after", "passes"), [("count_sum", True), ("bad_rows", False), ("count_by_site", False)])
def test_a_preflight_migrates_a_copy(spark: SparkSession, tmp_path: Path, after: str, passes: bool) -> None:
    release = Release(spark, tmp_path)
    release.feed(2)
    release.run("count")
    before = tree(tmp_path / "live/orders")
    messages: list[str] = []
    with Client(**release.places) as client:
        stream = client._open("orders")
        found = preflight(
            stream,
            lambda: release.writer(after),
            start_from=StartFrom(migrate_state=True),
            report=messages.append,
        )
        assert found.passed is passes, found.reason
        if passes:
            assert "batch 1 was replayed on a copy of the state" in found.reason
            assert any("in a copy" in each for each in messages), messages
        # What is missing for a plain start is still missing.
        assert not preflight(stream, lambda: release.writer(after)).passed
    assert tree(tmp_path / "live/orders") == before
    assert not [path for path in (tmp_path / "live/.scratch").rglob("*") if path.is_file()]
    release.run("count")


def test_a_preview_and_a_hand_over_know_of_the_migration(spark: SparkSession, tmp_path: Path) -> None:
    release = Release(spark, tmp_path)
    release.feed(2)
    release.run("count")
    messages: list[str] = []
    with Client(**release.places) as client:
        told = client.preview_rewind("orders", start_from=StartFrom(migrate_state=True)).messages()
        assert any("savepoint before-rewind-<n> of batch 1 is taken" in each for each in told), told
        assert any("the state is migrated if the code differs" in each for each in told), told
        stream = client._open("orders")
        for start in (StartFrom(migrate_state=True), StartFrom(bootstrap_state=True)):
            # As a run does before it suspends the running query.
            check_loaded_code(stream, lambda: release.writer("count_sum"), start, messages.append)
        assert any("aggregation by k: migrate" in each for each in messages), messages
        for after, start in (("count_sum", StartFrom()), ("count_by_site", StartFrom(migrate_state=True))):
            with pytest.raises(PlanChangedError, match="nothing was changed"):
                check_loaded_code(stream, lambda after=after: release.writer(after), start, messages.append)
        (tmp_path / "in" / "0000.json").unlink()
        with pytest.raises(InputGoneError, match="nothing was changed"):
            check_loaded_code(
                stream, lambda: release.writer("count_sum"), StartFrom(bootstrap_state=True), messages.append
            )
