"""PyFlink's programming face: a `StreamExecutionEnvironment` that runs Spark queries under the coordinator.

For programs without Dagster; nothing here knows it. The options themselves are in `dagster_ckpt.options`, what they
do to a session in `dagster_ckpt.spark`. Start with `stream_execution_environment.py`; `program.py` runs the queries.
"""

from dagster_ckpt.environment.program import JobExecutionResult, StreamExecution
from dagster_ckpt.environment.stream_execution_environment import StreamExecutionEnvironment

__all__ = ["JobExecutionResult", "StreamExecution", "StreamExecutionEnvironment"]
