"""Tags that our runs carry, so that a run says by itself what it is for."""

JOB_ID_TAG = "dagster_ckpt/job_id"
# The execution whose failure this run makes good.
RESTART_OF_TAG = "dagster_ckpt/restart_of"
# The execution whose externalized retention this run applies.
RETENTION_OF_TAG = "dagster_ckpt/retention_of"
# The catalog request that asked for this run.
START_REQUEST_TAG = "dagster_ckpt/start_request"
