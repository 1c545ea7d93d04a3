"""`Client`, the programmatic face of this package: every operation on the streams of a catalog.

Each module adds one kind of methods to the client. They call the verbs of `operations/` and hold no
logic of their own, and each imports what it calls, so that reading a catalog is quick to start.
Start with `client.py`.
"""

from typing import TYPE_CHECKING, Any

from dagster_ckpt.client.client import Client

if TYPE_CHECKING:
    from dagster_ckpt.state.editing import StateEdit

__all__ = ["Client", "StateEdit"]


def __getattr__(name: str) -> Any:
    """Import `StateEdit` on first use: most clients edit no state."""
    if name != "StateEdit":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dagster_ckpt.state.editing import StateEdit

    return StateEdit
