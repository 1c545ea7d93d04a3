"""`Client`, the programmatic face of this package: every operation on the streams of a catalog.

Each module adds one kind of methods to the client. They call the verbs of `operations/` and hold no
logic of their own. Start with `client.py`.
"""

from dagster_ckpt.client.client import Client
from dagster_ckpt.spark.state.editing import StateEdit

__all__ = ["Client", "StateEdit"]
