from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from tests.support.small_spark import small_spark

# As hostile as it gets: nothing but the newest batches is kept, and clean-up runs all the time.
HOSTILE = {
    "spark.sql.streaming.minBatchesToRetain": "2",
    "spark.sql.streaming.ratioExtraSpaceAllowedInCheckpoint": "0",
    "spark.sql.streaming.stateStore.maintenanceInterval": "1s",
    "spark.sql.streaming.stateStore.minDeltasForSnapshot": "3",
    "spark.sql.streaming.fileSource.log.compactInterval": "4",
    "spark.sql.streaming.fileSource.log.cleanupDelay": "0",
    "spark.sql.streaming.fileSink.log.compactInterval": "4",
}


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    warehouse = {"spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse"))}
    with small_spark(HOSTILE | warehouse) as session:
        yield session
