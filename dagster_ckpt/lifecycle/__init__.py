"""What happens to a streaming job in its life: run, image, stop, cancel, recover, rewind, retain.

Decisions are pure functions (`recovery.py`, `reconcile.py`); what they need is gathered, and what they say is
carried out, by thin modules around them. Start with `execution.py` for a job that runs here, and with
`operations.py` for what operators do from elsewhere.
"""
