"""A TCP proxy before a database that can stop passing anything on, as a network does, and go on later."""

from __future__ import annotations

import contextlib
import socket
import threading

from sqlalchemy import make_url


class StallingProxy:
    """Before the PostgreSQL server of a URL; `url` leads through it, and `asked` counts what clients send."""

    def __init__(self, url: str) -> None:
        self.asked = 0
        self._servers: set[socket.socket] = set()
        direct = make_url(url)
        folder = direct.query.get("host")
        self._server: str | tuple[str, int] = (
            f"{folder}/.s.PGSQL.{direct.port or 5432}" if folder else (str(direct.host), direct.port or 5432)
        )
        self._flows = threading.Event()
        self._flows.set()
        self._listening = socket.create_server(("127.0.0.1", 0))
        port = self._listening.getsockname()[1]
        through = direct.set(host="127.0.0.1", port=port).difference_update_query(["host"])
        self.url = through.render_as_string(hide_password=False)
        threading.Thread(target=self._accept, daemon=True).start()

    def stall(self) -> None:
        """Pass nothing on from now on; connections are still taken, as a hung server's machine takes them."""
        self._flows.clear()

    def resume(self) -> None:
        """Pass on what has come, and all that comes."""
        self._flows.set()

    def close(self) -> None:
        """Take no more connections."""
        self._flows.set()
        self._listening.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                server = socket.socket(socket.AF_UNIX if isinstance(self._server, str) else socket.AF_INET)
                server.connect(self._server)
                self._servers.add(server)
                for source, target in ((client, server), (server, client)):
                    threading.Thread(target=self._pump, args=(source, target), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                self.asked += source not in self._servers
                self._flows.wait()
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)
