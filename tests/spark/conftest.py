import sys
from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    with pytest.MonkeyPatch.context() as patch:
        # Python workers must find what the tests find: pandas, pyarrow, protobuf.
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        yield from _session(tmp_path_factory)


def _session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    session = (
        SparkSession.builder.master("local[2]")
        .appName("dagster_ckpt tests")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.warehouse.dir", str(tmp_path_factory.mktemp("warehouse")))
        # Compiling costs more than it gains on a dozen rows.
        .config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
        .config("spark.sql.codegen.wholeStage", "false")
        .config("spark.sql.codegen.factoryMode", "NO_CODEGEN")
        # As hostile as it gets: nothing but the newest batches is kept, and cleaning never rests.
        .config("spark.sql.streaming.minBatchesToRetain", "2")
        .config("spark.sql.streaming.ratioExtraSpaceAllowedInCheckpoint", "0")
        .config("spark.sql.streaming.stateStore.maintenanceInterval", "1s")
        .config("spark.sql.streaming.stateStore.minDeltasForSnapshot", "3")
        .config("spark.sql.streaming.fileSource.log.compactInterval", "4")
        .config("spark.sql.streaming.fileSource.log.cleanupDelay", "0")
        .config("spark.sql.streaming.fileSink.log.compactInterval", "4")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()
