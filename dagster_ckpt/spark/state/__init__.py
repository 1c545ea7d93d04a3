"""Which files of a state store hold one version of it; one module per format of Spark's providers.

A version is a number: the state after batch N has version N+1 (`IncrementalExecution`). Nothing here knows of
logs, sources or sinks. Start with `formats.py`, which chooses the format of a query.
"""

from dagster_ckpt.spark.state.formats import CommittedState, state_files
from dagster_ckpt.spark.state.growth import CHAIN, LAYOUT, grown_since, layout_of

__all__ = ["CHAIN", "LAYOUT", "CommittedState", "grown_since", "layout_of", "state_files"]
