"""Examinations of a live directory: what is damaged and how far back it is whole. Nothing here changes one.

Each module is a kind of examination, a function from a `Subject` to findings. Start with `diagnosis.py`, which calls
them all, and `finding.py`, which names everything they can find.
"""
