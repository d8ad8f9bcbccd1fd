"""Routers that read KV events: a real indexer, and another one's rules as they are documented."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

from tests.support.servers import free_port

PACKAGE = "ai-dynamo-runtime==1.6.1"
PYTHON = "KVTIERS_INDEXER_PYTHON"
"""Names a Python that has the indexer, if that is not this one."""
LIMIT = 30.0
"""Seconds after which an indexer that does not answer is given up: protection from hanging."""


def indexer_python() -> str | None:
    """A Python that can run the indexer."""
    if os.environ.get(PYTHON):
        return os.environ[PYTHON]
    return sys.executable if importlib.util.find_spec("dynamo") is not None else None


WITHOUT = (
    f"no Dynamo indexer here: python -m venv V && V/bin/pip install {PACKAGE}, then set "
    f"{PYTHON}=V/bin/python"
)


class Indexer:
    """The standalone KV indexer of NVIDIA Dynamo, in a process of its own, and its answers."""

    def __init__(self, python: str, block_tokens: int) -> None:
        self._url = f"http://127.0.0.1:{free_port()}"
        self._block_tokens = block_tokens
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `__exit__`
        port = self._url.rpartition(":")[2]
        command = [python, "-m", "dynamo.indexer", "--port", port, "--threads", "1"]
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log)

    def __enter__(self) -> Indexer:
        deadline = time.monotonic() + LIMIT
        while time.monotonic() < deadline:
            try:
                self._ask("/health")
                return self
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.02)
        raise TimeoutError("the indexer does not answer")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()

    def register(self, worker: int, publisher: Addresses) -> None:
        """Read the events of an engine from now on, and those before that it has yet."""
        self._ask(
            "/register",
            instance_id=worker,
            endpoint=publisher.events,
            replay_endpoint=publisher.replay,
            model_name="m",
            block_size=self._block_tokens,
            dp_rank=0,
        )

    def unregister(self, worker: int) -> None:
        """Forget an engine and all its blocks."""
        self._ask("/unregister", instance_id=worker, model_name="m")

    def query(self, tokens: Sequence[int]) -> dict[str, dict[str, int]]:
        """How many leading tokens of a prompt each engine has: `gpu`, `cpu` (with gpu), `disk`
        (with both)."""
        answer = self._ask("/query", model_name="m", token_ids=list(tokens))
        found = answer.get("instances", {})
        assert isinstance(found, dict)
        return found

    def until(self, tokens: Sequence[int], expected: dict[str, dict[str, int]]) -> None:
        """Wait until it answers so: events take a moment. Raises AssertionError otherwise."""
        deadline = time.monotonic() + LIMIT
        while (found := self.tiers(tokens)) != expected:
            assert time.monotonic() < deadline, f"{found} is not {expected}"
            time.sleep(0.02)

    def tiers(self, tokens: Sequence[int]) -> dict[str, dict[str, int]]:
        """`query` without what follows from the rest."""
        names = ("gpu", "cpu", "disk")
        found = self.query(tokens)
        return {engine: {name: said[name] for name in names} for engine, said in found.items()}

    def _ask(self, path: str, **body: Any) -> dict[str, Any]:
        data = json.dumps(body).encode() if body else None
        request = urllib.request.Request(
            self._url + path, data, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=LIMIT) as answer:
            text = answer.read()
        try:
            return dict(json.loads(text))
        except ValueError:
            return {}


class Addresses:
    """Where an engine publishes: sockets in a folder with a short name."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvev-")
        self.events = f"ipc://{self._folder.name}/ev"
        self.replay = f"ipc://{self._folder.name}/rp"

    def close(self) -> None:
        """Remove the folder."""
        self._folder.cleanup()


class LlmdRules:
    """How llm-d's indexer takes events (llm-d-kv-cache, `pkg/kvevents`, June 2026), for one pod.

    Its rules, not its code: media in lower case; a block whose parent it does not know is ignored,
    as are blocks whose tokens are missing, unless it knows them; a removal counts for its medium
    and group alone. A block is known by its tokens and its parent.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._known: dict[int, tuple[Any, ...]] = {}
        self._media: dict[tuple[Any, ...], set[tuple[str, int | None]]] = {}
        self.ignored = 0

    def take(self, events: Iterable[Any]) -> None:
        """Take in events as vLLM publishes them, decoded to mappings."""
        for event in events:
            place = ((event.get("medium") or "gpu").lower(), event.get("group_idx"))
            if event["type"] == "BlockStored":
                self._stored(event, place)
            elif event["type"] == "BlockRemoved":
                for one in event["block_hashes"]:
                    if one in self._known:
                        self._media.get(self._known[one], set()).discard(place)
            else:
                self._media.clear()

    def _stored(self, event: Any, place: tuple[str, int | None]) -> None:
        hashes, tokens, parent = (
            event["block_hashes"],
            event["token_ids"],
            event["parent_block_hash"],
        )
        if not tokens:
            names = [self._known[one] for one in hashes if one in self._known]
        elif parent is not None and parent not in self._known:
            names = []
        else:
            names = self._names(tokens, self._known[parent] if parent is not None else ())
            self._known |= dict(zip(hashes, names, strict=True))
        self.ignored += len(hashes) - len(names)
        for name in names:
            self._media.setdefault(name, set()).add(place)

    def _names(self, tokens: Sequence[int], parent: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        names = []
        for start in range(0, len(tokens) - self._block_tokens + 1, self._block_tokens):
            parent = (hash(parent), *tokens[start : start + self._block_tokens])
            names.append(parent)
        return names

    def query(self, tokens: Sequence[int], medium: str) -> int:
        """How many leading tokens of a prompt are in a medium."""
        found = 0
        for name in self._names(tokens, ()):
            if not any(place == medium for place, _ in self._media.get(name, ())):
                break
            found += self._block_tokens
        return found
