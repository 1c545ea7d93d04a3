"""What may be the id of a job: it names a folder in every kind of storage, and below the live root."""

from __future__ import annotations

import re

from dagster_ckpt.errors import OptionError

JOB_ID_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")


def checked_job_id(job_id: str) -> str:
    """A job id that stays in its folder.

    Raises:
        OptionError: It could name another place.
    """
    if not JOB_ID_PATTERN.fullmatch(job_id):
        raise OptionError(
            f"{job_id!r} cannot be the id of a job, because it names a folder: use up to 128 letters, digits, '_', '.' "
            "and '-', a letter or digit first."
        )
    return job_id
