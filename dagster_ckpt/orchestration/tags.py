"""Tags that our runs carry, so that a run says by itself what it is for."""

JOB_ID_TAG = "dagster_ckpt/job_id"
# The execution whose failure this run makes good.
RESTART_OF_TAG = "dagster_ckpt/restart_of"
# The execution whose externalized retention this run applies.
RETENTION_OF_TAG = "dagster_ckpt/retention_of"
# The catalog request that asked for this run.
START_REQUEST_TAG = "dagster_ckpt/start_request"
# The step towards a desired state that this run does.
STEP_TAG = "dagster_ckpt/step"
# On the last run of a stream that is not restarted any more: why not.
GAVE_UP_TAG = "dagster_ckpt/gave_up"
# Dagster's own, on a run that it launched in place of a failed one, and on one that a person re-executed.
RETRY_NUMBER_TAG = "dagster/retry_number"
PARENT_RUN_ID_TAG = "dagster/parent_run_id"
ROOT_RUN_ID_TAG = "dagster/root_run_id"
