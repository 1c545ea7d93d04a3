"""`CheckpointStorageContract`: pytest tests that a custom checkpoint storage must pass.

The only package that needs pytest, and only when a name is imported from it. See
docs/custom-storage.md.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dagster_ckpt.testing.checkpoint_storage_contract import CheckpointStorageContract

__all__ = ["CheckpointStorageContract"]


def __getattr__(name: str) -> Any:
    """Import the contract on first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.checkpoint_storage_contract"), name)
