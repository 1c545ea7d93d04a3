"""The files of one version of a state store; after batch N, the state has version N+1 (`IncrementalExecution`).

Nothing here knows sources or sinks.
"""
