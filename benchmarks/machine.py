"""What the page says of the machine: what makes figures comparable, and nothing that tells which one it was."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import psutil

# What needs no name beside its value; the others are versions.
HARDWARE = frozenset({"processor", "memory", "file system", "system"})


def describe_machine(folder: Path) -> dict[str, str]:
    """Processor, memory, file system and versions.

    Args:
        folder: A directory on the file system that is measured.
    """
    return {
        "processor": f"{os.cpu_count()} x {_processor()}",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "file system": _file_system(folder),
        "system": f"{_distribution()}, Linux {platform.release().partition('-')[0]}",
        "Java": _java(),
        "Python": platform.python_version(),
        "pyspark": importlib.metadata.version("pyspark"),
        "dagster-ckpt": importlib.metadata.version("dagster-ckpt"),
        "fsspec": importlib.metadata.version("fsspec"),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _file_system(folder: Path) -> str:
    mounts = [part for part in psutil.disk_partitions(all=True) if folder.resolve().is_relative_to(part.mountpoint)]
    kind = max(mounts, key=lambda part: len(part.mountpoint)).fstype
    return f"{kind}, one disk"


def _distribution() -> str:
    return platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())


def _java() -> str:
    home = os.environ.get("JAVA_HOME")
    command = str(Path(home, "bin/java")) if home else "java"
    said = subprocess.run([command, "-version"], check=True, capture_output=True, text=True).stderr
    return said.splitlines()[0].split('"')[1]
