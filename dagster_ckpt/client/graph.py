"""Methods of the client for streams that read each other's output."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_ckpt.client.connection import Connection

if TYPE_CHECKING:
    from dagster_ckpt.recovery.recovery_line import RecoveryLine
    from dagster_ckpt.stream.edges import Edge


class GraphMethods(Connection):
    """The graph of the streams."""

    def stream_edges(self) -> list[Edge]:
        """Which streams read the output of which others, as their sources and sinks show."""
        from dagster_ckpt.stream.edges import edges_in

        return edges_in(self._catalog)

    def recovery_line(self, selection: str) -> RecoveryLine:
        """The newest snapshots of several streams none of which has read rows that another one lacks.

        Args:
            selection: Streams, separated by commas: `orders+` is `orders` and all that reads its output, `+summary` is
                `summary` and all that it reads.

        Raises:
            StreamNotFoundError: The catalog has no such stream.

        Example:
            >>> client.recovery_line("orders+").messages()
            ['orders: chk-7 at batch 812', 'summary: chk-4 at batch 96']
        """
        from dagster_ckpt.recovery.stream_graph import graph_of, line_of

        return line_of(self._catalog, graph_of(self._catalog, selection))
