"""Moments in a time zone, for the policies that follow a calendar.

They are the only ones that need pendulum, which is slow to import: it is imported once one is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_ckpt.errors import OptionError

if TYPE_CHECKING:
    import pendulum


def checked_timezone(option: str, timezone: str) -> str:
    """Validate the name of a time zone and return it.

    Args:
        option: What it is the value of, in messages.
        timezone: The name.

    Raises:
        OptionError: There is no such time zone.
    """
    import pendulum  # noqa: PLC0415
    from pendulum.tz.exceptions import InvalidTimezone  # noqa: PLC0415

    try:
        pendulum.timezone(timezone)
    except (InvalidTimezone, ValueError) as error:
        raise OptionError(f"{option} is {timezone!r}, but must be a name such as Europe/Berlin.") from error
    return timezone


def local_time(at_ms: int, timezone: str) -> pendulum.DateTime:
    """A moment, given in ms since the epoch, in a time zone."""
    import pendulum  # noqa: PLC0415

    return pendulum.from_timestamp(at_ms / 1000, tz=timezone)
