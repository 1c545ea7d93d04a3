"""One stream in a separate process, such as a driver started by `spark-submit` or Kubernetes.

Imports only Dagster Pipes from Dagster. Start with `driver.py`; `pipes.py` reports to the Dagster run
that launched the process, if any.
"""
