"""What stands in front of a server in tests, and does with what passes as a test wants."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Self


class Front:
    """Takes connections on a port of loopback, and serves each on a thread. A context manager:
    behind it all sockets are closed. `accepted`: connections so far."""

    def __init__(self, port: int = 0) -> None:
        self._listener = socket.create_server(("127.0.0.1", port), backlog=256)
        self.port: int = self._listener.getsockname()[1]
        self.accepted = 0
        self._sockets: list[socket.socket] = [self._listener]

    def serve(self, client: socket.socket) -> None:
        """Serve a connection. Where either side goes, it may raise OSError or ValueError."""
        raise NotImplementedError

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.accepted += 1
                self._sockets.append(client)
                threading.Thread(target=self._served, args=(client,), daemon=True).start()

    def _served(self, client: socket.socket) -> None:
        # `__exit__` may close a socket while `select` is given it, which is then a ValueError.
        with contextlib.suppress(OSError, ValueError):
            self.serve(client)

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.close()
