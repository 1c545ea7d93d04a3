"""Two deployments that report streams under the same asset keys of one Dagster instance."""

from __future__ import annotations

import logging
from collections.abc import Collection


class OtherDeployments:
    """What this process knows of streams that another deployment reports, too.

    Their reports would alternate forever. The code location that was loaded last reports a stream; the other one is
    silent about it, and says so once, until it is loaded again. So a new catalog takes over from an old one at once.
    """

    def __init__(self) -> None:
        self._reported: set[str] = set()
        self._silent: set[str] = set()

    def silence(self, stream_id: str, reported_by: Collection[object], ours: str, log: logging.Logger) -> bool:
        """Whether to report nothing of a stream.

        Args:
            reported_by: Deployments of the newest report on each of its assets or checks; None: unknown.
        """
        others = sorted({str(each) for each in reported_by if each not in (None, ours)})
        if not others or stream_id not in self._reported:
            self._reported.add(stream_id)
            self._silent.discard(stream_id)
            return False
        if stream_id not in self._silent:
            self._silent.add(stream_id)
            log.error(
                f"{stream_id}: deployment {', '.join(others)} has reported on the same asset keys since this one "
                f"({ours}) did. This sensor reports nothing of the stream any more. Give the streams of one of the two "
                "code locations a key_prefix; if the other is gone, reload this code location"
            )
        return True
