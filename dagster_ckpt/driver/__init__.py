"""One stream in a process of its own, such as a driver that `spark-submit` or Kubernetes starts.

Start with `driver.py`; `pipes.py` reports to the Dagster run that launched the process, if one did.
"""
