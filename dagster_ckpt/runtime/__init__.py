"""One running stream: lease, recovery, supervision, checkpoints, restarts in place.

Start with `execution.py`; `supervision.py` is the loop around a running query.
"""
