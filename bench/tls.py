"""TLS in front of a server, in a process of its own: the embedded Valkey is built without it.

python -m bench.tls PORT_BEHIND CERTIFICATE KEY
"""

from __future__ import annotations

import select
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from pathlib import Path

BUFFER_BYTES = 256 << 10

_CERTIFY = (
    "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 "
    "-subj /CN=bench -addext subjectAltName=IP:127.0.0.1"
)

ABSENT = "no openssl command here, which makes the certificate"


def available() -> bool:
    """Whether a front can be started here."""
    return shutil.which("openssl") is not None


class TlsFront:
    """Speaks TLS to clients at `port` and plain to the server at `port_behind`, byte for byte."""

    def __init__(self, port_behind: int, folder: Path) -> None:
        self.ca_file = folder / "front.pem"
        key = folder / "front.key"
        subprocess.run(
            [*_CERTIFY.split(), "-out", self.ca_file, "-keyout", key],
            check=True,
            capture_output=True,
        )
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.tls", str(port_behind), self.ca_file, key],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def connect(self) -> ssl.SSLSocket:
        """A connection to the front."""
        plain = socket.create_connection(("127.0.0.1", self.port))
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        context = ssl.create_default_context(cafile=str(self.ca_file))
        return context.wrap_socket(plain, server_hostname="127.0.0.1")

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def _main(port_behind: int, certificate: str, key: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    threading.Thread(target=_accept, args=(listener, context, port_behind), daemon=True).start()
    sys.stdin.read()  # ends with the process that started this one


def _accept(listener: socket.socket, context: ssl.SSLContext, port_behind: int) -> None:
    while True:
        plain, _ = listener.accept()
        threading.Thread(target=_serve, args=(plain, context, port_behind), daemon=True).start()


def _serve(plain: socket.socket, context: ssl.SSLContext, port_behind: int) -> None:
    server = socket.create_connection(("127.0.0.1", port_behind))
    for each in (plain, server):
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with context.wrap_socket(plain, server_side=True) as client, server:
        _pass(client, server)


def _pass(client: ssl.SSLSocket, server: socket.socket) -> None:
    """Pass on what either says, by one thread, since two must not use one TLS connection at once,
    and without waiting for one that takes nothing while it wants to be heard."""
    for each in (client, server):
        each.setblocking(False)
    waiting: dict[socket.socket, bytearray] = {client: bytearray(), server: bytearray()}
    buffer = memoryview(bytearray(BUFFER_BYTES))
    while True:
        ways: list[tuple[socket.socket, socket.socket]] = [(client, server), (server, client)]
        reads = [source for source, other in ways if len(waiting[other]) < BUFFER_BYTES]
        ready: list[socket.socket] = [client] if client.pending() and client in reads else []
        writes = [target for target, data in waiting.items() if data]
        if not ready:
            ready, _, _ = select.select(reads, writes, [])
        for source in ready:
            data = waiting[server if source is client else client]
            try:
                while len(data) < BUFFER_BYTES:  # a record of TLS is 16 KiB
                    count = source.recv_into(buffer)
                    if not count:
                        return
                    data += buffer[:count]
            except (ssl.SSLWantReadError, BlockingIOError):
                pass
        for target, data in waiting.items():
            try:
                while data:
                    del data[: target.send(data)]
            except (ssl.SSLWantWriteError, ssl.SSLWantReadError, BlockingIOError):
                pass


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
