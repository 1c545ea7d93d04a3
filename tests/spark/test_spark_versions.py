"""The table of Spark's releases, and what is refused by the version that lacks it."""

import builtins
import contextlib
import itertools
import tomllib
from pathlib import Path
from typing import Any

import pytest
from live_files import LiveFiles, schema
from packaging.requirements import Requirement

from dagster_ckpt.errors import IncompleteCutError, OptionError, SparkNotFoundError, UnsupportedSparkError
from dagster_ckpt.spark.checkpoint_dir.cut import cut
from dagster_ckpt.spark.checkpoint_dir.inspect import LiveStatus, inspect_live_directory
from dagster_ckpt.spark.versions import (
    NAMES_SOURCES,
    OFFSET_LOG_VERSION,
    RELEASES,
    SUPPORTED,
    Feature,
    SparkRelease,
    installed_release,
    refuse_names_without_offsets,
    refuse_unknown_settings,
    release_of,
    spark_packages,
)

NO_DELTA = "No release of Delta runs on Spark 4.3: Spark 4.2 is the newest that has one."
NO_ICEBERG = "No release of Iceberg runs on Spark {}: Spark 4.1 is the newest that has one."
JARS = {
    "3.5": ["io.delta:delta-spark_2.12:3.3.3", "org.apache.iceberg:iceberg-spark-runtime-3.5_2.12:1.12.0"],
    "4.0": ["io.delta:delta-spark_4.0_2.13:4.4.0", "org.apache.iceberg:iceberg-spark-runtime-4.0_2.13:1.11.0"],
    "4.1": ["io.delta:delta-spark_4.1_2.13:4.4.0", "org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.12.0"],
    "4.2": ["io.delta:delta-spark_4.2_2.13:4.4.0", NO_ICEBERG.format("4.2")],
    "4.3": [NO_DELTA, NO_ICEBERG.format("4.3")],
}
SHARE = "spark.sql.streaming.stateStore.snapshotToCleanupThreadRatio"


@pytest.mark.parametrize(
    ("version", "minor"), [("3.5.9", "3.5"), ("3.5.6-amzn-1", "3.5"), ("4.1.0", "4.1"), ("4.3.0.dev1", "4.3")]
)
def test_a_version_belongs_to_its_release(version: str, minor: str) -> None:
    assert release_of(version).minor == minor


@pytest.mark.parametrize("version", ["3.4.4", "4.4.0", "4.10.1", "5.0.0", "unknown", ""])
def test_a_spark_out_of_range_is_refused_with_the_range(version: str) -> None:
    with pytest.raises(UnsupportedSparkError, match=r"supports 3\.5 to 4\.3"):
        release_of(version)


def test_the_range_of_the_extra_is_that_of_the_table() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]

    assert f"pyspark[sql]{SUPPORTED}" in project["optional-dependencies"]["spark"]
    assert not [needed for needed in project["dependencies"] if "spark" in needed]
    assert (RELEASES[0].minor, RELEASES[-1].minor) == ("3.5", "4.3")


def test_no_later_release_lacks_a_feature() -> None:
    for earlier, later in itertools.pairwise(RELEASES):
        assert earlier.features <= later.features


def test_what_a_release_lacks_is_refused_with_the_release_that_has_it() -> None:
    with pytest.raises(
        UnsupportedSparkError, match=r"^Reading state needs a reader .* Spark 3\.5 does not have: Spark 4\.0"
    ):
        release_of("3.5.9").require(Feature.STATE_READER, "Reading state")

    release_of("4.0.1").require(Feature.STATE_READER, "Reading state")


def test_a_setting_that_a_release_would_ignore_is_refused() -> None:
    refuse_unknown_settings("4.3.0", [SHARE])
    refuse_unknown_settings("4.1.4", ["spark.sql.shuffle.partitions"])

    with pytest.raises(UnsupportedSparkError, match=rf"The setting {SHARE} needs .* Spark 4\.1 does not have"):
        refuse_unknown_settings("4.1.4", [SHARE])


@pytest.mark.parametrize(
    ("version", "settings", "is_refused"),
    [
        pytest.param("4.2.1", {NAMES_SOURCES: "true"}, True, id="4.2"),
        pytest.param("4.2.1", {NAMES_SOURCES: "true", OFFSET_LOG_VERSION: "2"}, False, id="4.2, offset log v2"),
        pytest.param("4.2.1", {}, False, id="4.2, no names"),
        pytest.param("4.1.4", {NAMES_SOURCES: "true"}, False, id="4.1, which ignores it"),
        pytest.param("4.3.0", {NAMES_SOURCES: "true"}, False, id="4.3, which takes v2"),
    ],
)
def test_named_sources_need_an_offset_log_that_names_them(
    version: str, settings: dict[str, str], is_refused: bool
) -> None:
    refused = pytest.raises(UnsupportedSparkError, match=rf"Set {OFFSET_LOG_VERSION} to 2")
    with refused if is_refused else contextlib.nullcontext():
        refuse_names_without_offsets(version, settings.get)


def test_missing_pyspark_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without_pyspark(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name.startswith("pyspark"):
            raise ModuleNotFoundError("No module named 'pyspark'")
        return original(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without_pyspark)
    with pytest.raises(SparkNotFoundError, match=r'pip install "dagster-ckpt\[spark\]"'):
        installed_release()


def spark_3_directory(tmp_path: Path, key_type: str = "long") -> LiveFiles:
    files = LiveFiles(tmp_path / "live-0", pins_encoding=False)
    files.batches(1, partitions=2)
    files.put("state/0/0/_metadata/schema", schema(has_key=True, key_type=key_type))
    for partition in (0, 1):
        files.put(f"state/0/{partition}/1.delta")
        files.put(f"state/0/{partition}/2.delta")
    return files


def test_operators_of_spark_3_are_found_without_metadata(tmp_path: Path) -> None:
    files = spark_3_directory(tmp_path)

    taken = cut(files.live, carry_in_flight=False)

    assert inspect_live_directory(files.live).status is LiveStatus.GOOD
    assert {"state/0/0/2.delta", "state/0/1/2.delta", "state/0/0/_metadata/schema"} <= {f.path for f in taken.files}
    assert taken.properties["state_operators"][0] | {"state_format": 0} == {
        "number": 0,
        "name": "unnamed",
        "stores": ["default"],
        "partitions": 2,
        "state_format": 0,
        "metadata_format": 0,
        "schema_format": 2,
    }


def test_a_limit_of_spark_3_has_one_partition(tmp_path: Path) -> None:
    files = spark_3_directory(tmp_path, key_type="void")
    files.remove("state/0/1/2.delta")

    (operator,) = cut(files.live, carry_in_flight=False).properties["state_operators"]

    assert (operator["name"], operator["partitions"]) == ("globalLimit", 1)


def test_a_join_of_spark_3_lacks_none_of_its_stores(tmp_path: Path) -> None:
    files = spark_3_directory(tmp_path)
    files.remove("state/0/0/_metadata/schema")
    stores = ["left-keyToNumValues", "left-keyWithIndexToValue", "right-keyToNumValues", "right-keyWithIndexToValue"]
    for store in stores:
        files.put(f"state/0/0/{store}/_metadata/schema", schema(has_key=True))
        for partition in (0, 1):
            files.put(f"state/0/{partition}/{store}/2.snapshot")

    (operator,) = cut(files.live, carry_in_flight=False).properties["state_operators"]
    assert (operator["name"], operator["stores"]) == ("symmetricHashJoin", stores)

    files.remove(f"state/0/0/{stores[1]}/_metadata/schema")
    with pytest.raises(IncompleteCutError, match=f"{stores[1]}/_metadata/schema is missing"):
        cut(files.live, carry_in_flight=False)


@pytest.mark.parametrize("missing", ["state/0/0/_metadata/schema", "state/0/1/2.delta"])
def test_a_damaged_directory_of_spark_3_is_refused(tmp_path: Path, missing: str) -> None:
    files = spark_3_directory(tmp_path)
    files.remove(missing)

    with pytest.raises(IncompleteCutError, match=f"{missing} is missing"):
        cut(files.live, carry_in_flight=False)


def test_a_directory_of_spark_4_without_operator_metadata_is_refused(tmp_path: Path) -> None:
    files = spark_3_directory(tmp_path)
    files.pins_encoding = True
    files.batches(1, partitions=2)

    with pytest.raises(IncompleteCutError, match="state/0/_metadata/metadata is missing"):
        cut(files.live, carry_in_flight=False)


@pytest.mark.parametrize("release", RELEASES, ids=str)
def test_jars_of_table_formats_are_built_for_their_release(
    release: SparkRelease, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyspark.version.__version__", f"{release.minor}.0")

    told = []
    for name in ("delta", "iceberg"):
        try:
            told.append(spark_packages(name))
        except UnsupportedSparkError as error:
            told.append(str(error))

    assert told == JARS[release.minor]


def test_jars_of_several_table_formats_are_one_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyspark.version.__version__", "4.1.4")

    assert spark_packages("delta", "iceberg") == ",".join(JARS["4.1"])
    with pytest.raises(OptionError, match="'hudi' is not a table format: use 'delta' or 'iceberg'"):
        spark_packages("hudi")


def test_pip_never_combines_delta_with_a_spark_that_it_does_not_run_on() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (delta,) = [Requirement(each) for each in project["optional-dependencies"]["delta"] if "delta-spark" in each]

    # These claim to run on every later Spark.
    assert not [version for version in ("4.0.0", "4.0.1", "4.1.0") if version in delta.specifier]
    assert [version for version in ("3.3.3", "4.2.0", "4.4.1") if version in delta.specifier] != []
