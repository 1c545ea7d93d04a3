"""When a snapshot is taken and what counts as failure, as a pure state machine: events in, actions out.

No thread, I/O, clock, Spark, Dagster or catalog may be used here. Start with `coordinator.py`; `messages.py` has its
events and actions.
"""
