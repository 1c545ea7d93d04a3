"""`Client`, the programmatic face of this package: every operation on the streams of a catalog, from any process.

Each verb is a method of the client and is described there; the methods are grouped by subject, a module each. Decisions
are pure functions beside them, such as those in `health.py` and `desired_state.py`. Nothing here imports Dagster. What
only some methods need is imported by them, so that reading a catalog is quick to start. Start with `client.py`.
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
