"""What sinks remember of the batches they were given, and what each does when a batch comes again.

Start with `guard.py`, which decides whether a start may touch a sink, and `forecast.py`.
"""
