"""For tests of your own: `CheckpointStorageContract`, which a checkpoint storage of yours has to pass.

The only package that needs pytest, and only once a name is taken from it. See docs/custom-storage.md.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dagster_ckpt.testing.checkpoint_storage_contract import CheckpointStorageContract

__all__ = ["CheckpointStorageContract"]


def __getattr__(name: str) -> Any:
    """Import the contract when it is asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.checkpoint_storage_contract"), name)
