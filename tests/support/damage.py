"""Damage to blocks of a disk tier, behind the engine's back, and to what an engine runs on."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import redis

from tiers.block import HEADER_BYTES, parse_header
from tiers.disk.disk_store import DiskStore
from tiers.disk.slab import PAGE
from tiers.errors import RecordError
from tiers.remote.packs.pack import INDEX_BYTES, name_of
from tiers.store import Block


def pause(seconds: float) -> None:
    """Nothing breaks; whoever is to hear of an engine has time to connect to it."""
    time.sleep(seconds)


def replace(folder: str, other: str) -> None:
    """Write the files of another folder over those of this one, as a trainer does."""
    shutil.copytree(other, folder, copy_function=shutil.copyfile, dirs_exist_ok=True)


def damage_blocks(folder: Path, chosen: Callable[[bytes], bool]) -> int:
    """Flip a bit in the payload of each block whose whole key is `chosen`; how many there were."""
    count = 0
    for slab, start, key in list(_records(folder)):
        if chosen(key):
            with slab.open("r+b") as file:
                file.seek(start + PAGE + 100)
                (byte,) = file.read(1)
                file.seek(-1, 1)
                file.write(bytes([byte ^ 1]))
            count += 1
    return count


class SlabMedium:
    """The records of a disk tier's blocks in its slabs, as `tiers.testing.harness` reaches them;
    `name`: what the disk calls a block."""

    def __init__(self, folder: Path, name: Callable[[bytes], bytes] = lambda key: key) -> None:
        self._folder = folder
        self._name = name
        self._places: dict[bytes, tuple[Path, int, int]] = {}

    def read(self, key: bytes) -> bytes:
        """The header and the payload, without the rest of the header's page."""
        name = self._name(key)
        ((slab, start),) = [(s, place) for s, place, k in _records(self._folder) if k == name]
        with slab.open("rb") as file:
            file.seek(start)
            data = file.read(HEADER_BYTES) + _payload(slab, start)
        self._places[key] = slab, start, len(data)
        return data

    def write(self, key: bytes, data: bytes) -> None:
        """Where the record was when it was read; what is cut off is zeros."""
        slab, start, size = self._places[key]
        whole = data.ljust(size, b"\0")
        with slab.open("r+b") as file:
            for place, part in (start, whole[:HEADER_BYTES]), (start + PAGE, whole[HEADER_BYTES:]):
                file.seek(place)
                file.write(part)


class ServerMedium:
    """A Redis tier's values; `name`: what the server calls a block, behind the tier's prefix."""

    def __init__(self, url: str, name: Callable[[bytes], bytes] = lambda key: key) -> None:
        self._url = url
        self._name = name

    def read(self, key: bytes) -> bytes:
        with redis.Redis.from_url(self._url) as client:
            return cast(bytes, client.get(b"kvtiers:" + self._name(key)))

    def write(self, key: bytes, data: bytes) -> None:
        with redis.Redis.from_url(self._url) as client:
            client.set(b"kvtiers:" + self._name(key), data, keepttl=True)


class PackMedium:
    """Records of blocks that begin a pack, in files of packs below `folder`."""

    def __init__(self, folder: Path, name: Callable[[bytes], bytes] = lambda key: key) -> None:
        self._folder = folder
        self._name = name

    def read(self, key: bytes) -> bytes:
        data = (self._folder / name_of(self._name(key))).read_bytes()[INDEX_BYTES:]
        return data[: HEADER_BYTES + parse_header(data).stored_bytes]

    def write(self, key: bytes, data: bytes) -> None:
        file = self._folder / name_of(self._name(key))
        file.write_bytes(file.read_bytes()[:INDEX_BYTES] + data)


def damage_all(folder: str) -> None:
    """Damage each block that the slabs hold."""
    assert damage_blocks(Path(folder), lambda key: True)


def read_nothing() -> None:
    """Let all loads of this process's disk tiers fail."""
    DiskStore.get = lambda self, blocks: [False] * len(blocks)  # type: ignore[method-assign]


def lie(folder: str, exchanged: Sequence[tuple[int, int]], flipped: Sequence[int]) -> None:
    """Let the disk tiers of this process give wrong payloads, behind all checks: of two blocks each
    other's, of one its own with a bit flipped. They are named by their places in
    `keys_on(folder)`."""
    records = [(key, _payload(slab, start)) for slab, start, key in _records(Path(folder))]
    wrong: dict[bytes, bytes] = {}
    for one, other in exchanged:
        wrong[records[one][0]], wrong[records[other][0]] = records[other][1], records[one][1]
    for place in flipped:
        key, payload = records[place]
        wrong[key] = _with_a_huge_number(payload)
    honest = DiskStore.get

    def get(self: DiskStore, blocks: Sequence[Block]) -> Any:
        answer = honest(self, blocks)
        for block in blocks:
            if block.key in wrong:
                block.payload[:] = wrong[block.key]
        return answer

    DiskStore.get = get  # type: ignore[method-assign]


def _with_a_huge_number(payload: bytes) -> bytes:
    """Set the highest bit of an exponent, of the last float32 that has it clear."""
    top = next(at for at in range(len(payload) - 1, 0, -4) if not payload[at] & 0x40)
    return payload[:top] + bytes([payload[top] | 0x40]) + payload[top + 1 :]


def keys_on(folder: Path) -> list[bytes]:
    """The whole keys of all blocks that the slabs hold or held, in their order there."""
    return [key for _, _, key in _records(folder)]


def _payload(slab: Path, start: int) -> bytes:
    with slab.open("rb") as file:
        file.seek(start)
        size = parse_header(file.read(HEADER_BYTES)).stored_bytes
        file.seek(start + PAGE)
        return file.read(size)


def _records(folder: Path) -> Iterator[tuple[Path, int, bytes]]:
    for slab in folder.glob("**/slab-*"):
        data = slab.read_bytes()
        for start in (match.start() for match in re.finditer(b"kvtiers\n", data)):
            try:
                yield slab, start, parse_header(data[start : start + HEADER_BYTES]).key
            except RecordError:
                continue  # a payload that happens to look like a header


def without_amx() -> None:
    """Let this process's processor be one that has no AMX."""
    import torch

    torch.cpu._is_amx_tile_supported = lambda: False


def allow_tiles() -> None:
    """Have the kernel give this process the tiles of AMX, as PyTorch's first product does: vLLM's
    own kernels for four-bit weights take them unasked, which ends a process."""
    import torch

    one = torch.ones(256, 256, dtype=torch.bfloat16)
    torch.mm(one, one)


def end(process: int) -> None:
    """End a process that holds the engine up."""
    os.kill(process, signal.SIGKILL)


def without_pictures() -> None:
    """Let Llama 4 be served for text where the package that reads its images is missing. vLLM would
    take embeddings of images from whoever loads KV."""
    from vllm.config import ModelConfig

    ModelConfig._supports_multimodal_inputs = lambda self: False
    name = "transformers.models.llama4.image_processing_llama4"
    names = ("Llama4ImageProcessor", "find_supported_resolutions", "get_best_fit")
    module = types.ModuleType(name)
    vars(module).update(dict.fromkeys(names, type("Missing", (), {})))
    sys.modules[name] = module


def mamba_states() -> None:
    """Have vLLM keep Mamba 2's states within a prompt on the CPU."""
    from tests.engine.vllm import mamba_states

    mamba_states.put_in()


def deepseek_v4() -> None:
    """Let DeepSeek V4 answer on the CPU."""
    from tests.engine.vllm import deepseek_v4

    deepseek_v4.put_in()


def context_parallel() -> None:
    """Let ranks share out the tokens of requests, which vLLM does on devices alone."""
    from tests.engine.vllm import context_parallel

    context_parallel.put_in()


def layers_raise(tokens: int) -> None:
    """Have the first step of so many tokens raise within the second layer, as where memory is
    short."""
    from vllm.model_executor.models.llama import LlamaDecoderLayer

    forward, raised = LlamaDecoderLayer.forward, list[int]()

    def raising(self: Any, positions: Any, hidden_states: Any, *rest: Any, **more: Any) -> Any:
        is_second = rest[0] is not None  # what earlier layers add up
        if len(hidden_states) == tokens and is_second and not raised:
            raised.append(tokens)
            raise MemoryError("there is none for this layer")
        return forward(self, positions, hidden_states, *rest, **more)

    LlamaDecoderLayer.forward = raising


def plain_linears() -> None:
    """Keep weights where they were loaded, as on devices: on the CPU vLLM packs them elsewhere, so
    that nothing could change them in place."""
    from vllm import _custom_ops

    _custom_ops._supports_onednn = False
