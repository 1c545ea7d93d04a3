"""What the code location says of a stream whose driver a run launches by `spark-submit`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import dagster as dg
import pyspark
from driver_program import CHECKPOINTING, RESTART, STREAM_ID

from dagster_ckpt import (
    CheckpointCatalogResource,
    CheckpointStorageResource,
    DriverLaunch,
    StateBackendResource,
    external_streaming_asset,
    stream_definitions,
)
from dagster_ckpt.orchestration import StreamingAsset

FOLDER = Path(os.environ["SALES_FOLDER"])
# The Spark that pip installs with pyspark.
SPARK_HOME = Path(pyspark.__file__).parent
SUBMIT = SPARK_HOME / "bin" / "spark-submit"
PROGRAM = Path(__file__).with_name("driver_program.py")


def spark_submit(folder: Path) -> list[str]:
    """A driver with little memory and no page."""
    settings = {
        "spark.ui.enabled": "false",
        "spark.driver.memory": "512m",
        "spark.log.level": "ERROR",
        "spark.sql.session.timeZone": "UTC",
        "spark.pyspark.python": sys.executable,
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }
    confs = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    return [str(SUBMIT), "--master", "local[1]", *confs, str(PROGRAM)]


def sales_stream(folder: Path) -> StreamingAsset:
    return external_streaming_asset(
        STREAM_ID,
        launch=DriverLaunch(
            spark_submit(folder),
            log_directory=str(folder / "logs"),
            environment={"SALES_FOLDER": str(folder), "SPARK_HOME": str(SPARK_HOME)},
        ),
        checkpointing=CHECKPOINTING,
        restart_strategy=RESTART,
    )


def sales_definitions(folder: Path, stream: StreamingAsset) -> dg.Definitions:
    return dg.Definitions.merge(
        # Each checkpoint is reported, not one a minute.
        stream_definitions(stream, report_interval_seconds=0),
        dg.Definitions(
            resources={
                # Only verify_state_job would start Spark here.
                "pyspark": dg.ResourceDefinition.none_resource(),
                "checkpoint_storage": CheckpointStorageResource(path=f"file://{folder}/checkpoints"),
                "state_backend": StateBackendResource(live_directory=f"{folder}/live", kind="HASHMAP"),
                "checkpoint_catalog": CheckpointCatalogResource(url=f"sqlite:///{folder}/catalog.db"),
            }
        ),
    )


defs = sales_definitions(FOLDER, sales_stream(FOLDER))
