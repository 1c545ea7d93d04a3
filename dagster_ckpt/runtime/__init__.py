"""One running stream, from its start to the record of its end.

`execution.py` is the entry point, `start.py` starts the query, `supervision.py` is the loop around it, and
`execution_end.py` records how an execution ended.
"""
