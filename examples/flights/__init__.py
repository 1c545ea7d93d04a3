"""The flights of 2013 as streams: the example, and the drill that proves the product on it.

Everything here uses only what a user of the package has. Start with `assets.py`; `drill.py` is `make demo`.
"""
