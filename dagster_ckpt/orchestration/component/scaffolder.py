"""`dg scaffold defs dagster_ckpt.StreamsComponent <name>`: writes a working stream to start from."""

import dagster as dg
from pydantic import BaseModel, Field


class ScaffoldParams(BaseModel):
    """The parameters of the scaffold command."""

    job: str = Field(default="counted_rates", description="Name of the stream.")
    data_directory: str = Field(default="/tmp/streams", description="Folder of state, checkpoints, catalog and output.")


class StreamsScaffolder(dg.Scaffolder[ScaffoldParams]):
    """Writes a defs.yaml with one stream and its resources."""

    @classmethod
    def get_scaffold_params(cls) -> type[ScaffoldParams]:
        """The parameters of the command."""
        return ScaffoldParams

    def scaffold(self, request: dg.ScaffoldRequest[ScaffoldParams]) -> None:
        """Write the file."""
        where = request.params.data_directory.rstrip("/")
        job = {
            "name": request.params.job,
            "sources": [{"name": "rates", "format": "rate", "options": {"rowsPerSecond": 10}}],
            "transform": {"sql": "SELECT timestamp, value, value % 10 AS bucket FROM rates"},
            "sink": {"format": "parquet", "path": f"{where}/output/{request.params.job}"},
            "trigger": {"processing_time": "10 seconds"},
            "checkpointing": {"interval": 60_000, "num_retained": 3, "cleanup": "RETAIN_ON_CANCELLATION"},
            "restart": {"kind": "EXPONENTIAL_DELAY"},
        }
        resources = {
            "spark_config": {"spark.master": "local[2]", "spark.sql.shuffle.partitions": 2},
            "checkpoint_storage": {"path": f"file://{where}/checkpoints"},
            "state_backend": {"live_directory": f"{where}/live"},
            "checkpoint_catalog": {"url": f"sqlite:///{where}/catalog.db"},
        }
        dg.scaffold_component(request, {"streams": [job], "resources": resources})
