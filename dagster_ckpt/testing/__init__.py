"""Test helpers: `run_to_completion` and `assert_compatible` for streams, `CheckpointStorageContract` for a storage.

Only the last needs pytest. See docs/guides/test-a-stream.md, docs/guides/check-a-release.md and docs/custom-storage.md.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dagster_ckpt.testing.checkpoint_storage_contract import CheckpointStorageContract
    from dagster_ckpt.testing.compatibility import assert_compatible
    from dagster_ckpt.testing.completion import CompletedStream, run_to_completion

_MODULES = {
    "CheckpointStorageContract": "checkpoint_storage_contract",
    "CompletedStream": "completion",
    "assert_compatible": "compatibility",
    "run_to_completion": "completion",
}
__all__ = ["CheckpointStorageContract", "CompletedStream", "assert_compatible", "run_to_completion"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
