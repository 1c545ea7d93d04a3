"""What the threads of the JVMs do that a test has started, for the report of a test that does not end."""

from __future__ import annotations

import subprocess

import psutil

_WITHIN_S = 20


def stacks_of_own_jvms() -> str:
    """State and stacks of each JVM below this process, as `jstack` prints them."""
    jvms = [each for each in psutil.Process().children(recursive=True) if each.name() == "java"]
    return "\n".join(f"JVM {each.pid} ({each.status()}):\n{_stacks(each.pid)}" for each in jvms) or "no JVM"


def _stacks(pid: int) -> str:
    try:
        printed = subprocess.run(["jstack", str(pid)], capture_output=True, text=True, timeout=_WITHIN_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        # A JVM that does not answer is known by it: its threads do not reach a safepoint, or it is stopped.
        return f"{type(error).__name__}: {error}"
    return printed.stdout or printed.stderr
