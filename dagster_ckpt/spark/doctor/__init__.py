"""The doctor diagnoses a live directory: what is damaged, and how far back it is intact. It changes nothing.

Each module examines one thing: a function from a `Subject` to findings, called by `diagnosis.py`.
"""
