"""The catalog: a SQL record of streams, executions, leases, snapshots, requests and events.

It records, in transactions, what other packages decide, and writes an event for each change to an outbox. Start with
`catalog.py`; `records.py` has the values, `tables.py` the schema.
"""
