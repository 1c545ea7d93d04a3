"""Operations on a stream from any process: trigger, stop, cancel, restart, verify, upgrade, rebuild.

Decisions are pure functions, such as those in `upgrade.py`, `health.py` and `unsettled_executions.py`;
the modules around them gather facts and act. Nothing here imports Dagster. Start with
`lifecycle.py` and `snapshots.py`.
"""
