"""Find the files of one version of a state store, with one module for each format of Spark's providers.

A version is a number: the state after batch N has version N+1 (`IncrementalExecution`). Nothing
here knows logs, sources or sinks. Start with `formats.py`, which finds the format of a query.
"""
