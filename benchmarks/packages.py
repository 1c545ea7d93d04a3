"""Peers that are programs: from Debian's packages, or from PyPI into environments of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path


class PeerMissingError(Exception):
    """A peer is not there; the message says how to get it."""


def require_debian_packages(*programs: str) -> None:
    """Make sure that programs are there, and install their Debian packages if this process may.

    Raises:
        PeerMissingError: They are not there and could not be installed.
    """
    missing = [program for program in programs if shutil.which(program) is None]
    if not missing:
        return
    command = ["apt-get", "install", "-y", "-qq", *missing]
    if os.geteuid() == 0 and shutil.which("apt-get"):
        print(f"Installing: {' '.join(command)}", flush=True)
        subprocess.run(command, check=False, stdout=subprocess.DEVNULL)
    missing = [program for program in missing if shutil.which(program) is None]
    if missing:
        raise PeerMissingError(f"not installed: {', '.join(missing)}; on Debian and Ubuntu `{' '.join(command)}`")


def environment(folder: Path, *requirements: str) -> Path:
    """A virtual environment with packages from PyPI, made once.

    Args:
        folder: The bench's folder.
        requirements: What is installed; the name of the first is the environment's.

    Returns:
        Its folder of programs.

    Raises:
        PeerMissingError: It could not be installed.
    """
    place = folder / "environments" / requirements[0].partition("==")[0]
    complete = place / "complete"
    if not complete.exists() or complete.read_text() != " ".join(requirements):
        print(f"Installing {' '.join(requirements)} into an environment of its own ...", flush=True)
        venv.create(place, with_pip=True, clear=True, symlinks=True)
        command = [str(place / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        if subprocess.run([*command, *requirements], check=False).returncode != 0:
            raise PeerMissingError(f"could not be installed from PyPI: {', '.join(requirements)} ({sys.version})")
        complete.write_text(" ".join(requirements))
    return place / "bin"
