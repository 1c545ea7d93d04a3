"""Operations on a stream from any process: trigger, stop, cancel, restart, verify, upgrade, rebuild.

Decisions are pure functions; the modules around them gather facts and act. Start with
`operations.py`.
"""
