"""Validation of stream ids. An id becomes a folder name in every storage and below the live root."""

from __future__ import annotations

import re

from dagster_ckpt.errors import OptionError

STREAM_ID_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")


def checked_stream_id(stream_id: str) -> str:
    """Validate a stream id and return it.

    Raises:
        OptionError: The id could name a path outside its folder.
    """
    if not STREAM_ID_PATTERN.fullmatch(stream_id):
        raise OptionError(
            f"{stream_id!r} cannot be the id of a stream, because it names a folder: use up to 128 letters, digits, "
            "'_', '.' "
            "and '-', a letter or digit first."
        )
    return stream_id
