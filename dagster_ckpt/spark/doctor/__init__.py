"""The doctor diagnoses a live directory: what is damaged, and how far back it is intact. It changes nothing.

Each module contains a kind of examination, a function from a `Subject` to findings. Start with
`diagnosis.py`, which calls them all, and `finding.py`, which lists all findings.
"""
