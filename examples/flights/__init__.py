"""The flights of 2013 as streams: the example, and the drill that tests the package on it.

The example uses only what users of the package have. Start with `assets.py`; `drill.py` is `make
demo`.
"""
