"""PyFlink's programming face: a `StreamExecutionEnvironment` that runs Spark queries under the coordinator.

For programs without Dagster; nothing here knows it, beyond what Dagster Pipes tells a process it started. The options
themselves are in `dagster_ckpt.options`, what they do to a session in `dagster_ckpt.spark`. Start with
`stream_execution_environment.py`; `program.py` runs the queries. `driver.py` is the short way: one streaming job in
one process, such as a driver that `spark-submit` starts.
"""

from dagster_ckpt.environment.driver import run_streaming_job
from dagster_ckpt.environment.program import JobExecutionResult, StreamExecution
from dagster_ckpt.environment.stream_execution_environment import StreamExecutionEnvironment

__all__ = ["JobExecutionResult", "StreamExecution", "StreamExecutionEnvironment", "run_streaming_job"]
