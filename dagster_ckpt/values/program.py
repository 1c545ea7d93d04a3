"""Program of this process: to roll an upgrade back, you have to find the code from before."""

from __future__ import annotations

import os
import subprocess
from functools import cache

# In order of preference; the first one is Dagster's variable of a code location.
_IMAGES = ("DAGSTER_CURRENT_IMAGE", "DAGSTER_CONTAINER_IMAGE")
_COMMITS = ("DAGSTER_CLOUD_GIT_SHA", "GIT_COMMIT", "GITHUB_SHA", "CI_COMMIT_SHA")
_GIT_TIMEOUT_S = 5


@cache
def running_program() -> dict[str, str]:
    found = {"image": _first(_IMAGES), "commit": _first(_COMMITS) or _checked_out()}
    return {name: value for name, value in found.items() if value}


def _first(names: tuple[str, ...]) -> str | None:
    return next((os.environ[name] for name in names if os.environ.get(name)), None)


def _checked_out() -> str | None:
    command = ("git", "rev-parse", "HEAD")
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_GIT_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
