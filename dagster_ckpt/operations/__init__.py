"""Operations on a stream from any process: trigger, stop, cancel, restart, verify, upgrade, rebuild.

Decisions are pure functions, such as `desired_state.py`, `upgrade.py`, `health.py` and `reconcile.py`;
the modules around them gather facts and act. Nothing here imports Dagster. Start with
`operations.py`.
"""
