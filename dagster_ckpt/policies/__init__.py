"""Rules as pure functions over records: when to restart, what to retain, how to upgrade.

Nothing here does I/O or reads a clock: the caller passes times and records, and gets a decision.
Start with `retention.py`.
"""
