"""For tests of your own: `assert_compatible` for code of streams, `CheckpointStorageContract` for a custom storage.

The contract needs pytest, and only when it is imported. See docs/guides/check-a-release.md and docs/custom-storage.md.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dagster_ckpt.testing.checkpoint_storage_contract import CheckpointStorageContract
    from dagster_ckpt.testing.compatibility import assert_compatible

_MODULES = {"CheckpointStorageContract": "checkpoint_storage_contract", "assert_compatible": "compatibility"}
__all__ = ["CheckpointStorageContract", "assert_compatible"]


def __getattr__(name: str) -> Any:
    """Import a name on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
