"""Which files of a state store hold one version of it; one module for each format of Spark's providers.

A version is a number: the state after batch N has version N+1 (`IncrementalExecution`). Nothing here knows of logs,
sources or sinks. Start with `formats.py`, which finds the format of a query.
"""
