"""The folders of the tests in memory, where there is enough: what they flush has to survive no loss of power.

What a loss of power leaves is modelled (`power_loss.py`), not tried.
"""

from __future__ import annotations

import getpass
import shutil
from collections.abc import MutableMapping
from pathlib import Path

_MEMORY = Path("/dev/shm")
# Few folders are there at once (`tmp_path_retention_policy`), but those of Spark are large.
_NEEDED_BYTES = 4 * 2**30


def use_memory_for_files(environment: MutableMapping[str, str]) -> None:
    """Have pytest make its folders there, also in workers; a person's own choice stands."""
    if "PYTEST_DEBUG_TEMPROOT" in environment or not _MEMORY.is_dir():
        return
    if shutil.disk_usage(_MEMORY).free > _NEEDED_BYTES:
        root = _MEMORY / f"dagster-ckpt-{getpass.getuser()}"
        root.mkdir(exist_ok=True)
        environment["PYTEST_DEBUG_TEMPROOT"] = str(root)
