"""Rules as pure functions over records: when to restart, what to retain, how to upgrade.

Nothing here does I/O or reads a clock: times and records come in, a decision comes out. Start with `retention.py`.
"""
