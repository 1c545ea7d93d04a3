"""A pure state machine that decides when to take a snapshot and what counts as a failure: events in, actions out.

Do not use threads, I/O, clocks, Spark, Dagster or the catalog here. Start with `coordinator.py`;
`messages.py` defines its events and actions.
"""
