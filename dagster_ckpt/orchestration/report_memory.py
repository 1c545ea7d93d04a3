"""What the catalog sensor remembers of its own reports, so that it need not read them back from Dagster at each tick.

Dagster stores a tick's reports one by one, and the tick's cursor after them. A tick that is given the very cursor which
the tick before it returned in this process therefore knows that all reports of that one are stored, and that nobody has
tried to report what came after. In any other case (a new process, a daemon that died in between, a cursor that a person
has set, a try on the page) nothing is believed, and the sensor asks Dagster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import dagster as dg


@dataclass(frozen=True)
class Reported:
    """What is known of the reports that are stored.

    Attributes:
        looked_up_to: No event of a later sequence is on an asset: none was there when the first of these ticks began,
            and none of theirs is behind the cursor.
        latest: Sequence of the newest materialization that the sensor has put on an asset, as far as it has looked.
    """

    looked_up_to: int
    latest: Mapping[dg.AssetKey, int] = field(default_factory=dict)


class ReportMemory:
    """What one process knows after its last tick."""

    def __init__(self) -> None:
        self._kept: tuple[str, Reported] | None = None

    def after(self, tick: str) -> Reported | None:
        """What was known after a tick, where that was the last one of this process.

        Args:
            tick: Id of the tick that returned the cursor.
        """
        # Read once: on the page somebody may try the sensor while the daemon has it evaluated.
        kept = self._kept
        return kept[1] if kept is not None and kept[0] == tick else None

    def keep(self, tick: str, reported: Reported) -> None:
        """Remember what is known once the reports of a tick are stored."""
        self._kept = (tick, reported)
