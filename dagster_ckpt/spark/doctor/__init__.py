"""The doctor diagnoses a live directory, without changing it: what is damaged, and how far back it is intact.

Each module examines one thing: functions from a `Subject` to findings, called by `diagnosis.py`.
"""
