"""ModelWeights: samples of the parameters of a worker's model, and a count of what changes them."""

from __future__ import annotations

import logging
import secrets
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import torch
import xxhash

from tiers.contract.weight_reports import Look, Weights

logger = logging.getLogger(__name__)

PARTS = 16
"""Samples that are looked at in turn."""
SAMPLE_WORDS = 32
"""Words of each parameter in a sample. A step of training at 1e-6 changes one in a hundred weights
of bfloat16: of a model with 300 parameters a look misses that once in e^96 times."""
LOOK_PARAMETERS = 400
"""Parameters of a look; of a model that has more some are looked at in one look and some in the
next."""
WEIGHT_CHANGERS = (
    "load_model",
    "reload_weights",
    "reset_weights",
    "update_weights",
    "finish_weight_update",
)
"""Members of a worker that change its weights, where its version has them."""
Place = tuple[Callable[[], Any], str]
"""Where a parameter is: its module, which may be gone, and its name there."""
WORD = torch.int16
"""As long as most weights are, so that each lies at a whole one."""


def before_calls(
    owner: Any,
    name: str,
    notify: Callable[[], object],
    answered: Callable[[Any], object] = lambda answer: None,
) -> bool:
    """Call `notify` before each call of an object's member, and `answered` with what it returns;
    False: it has no such member."""
    call: Callable[..., Any] | None = getattr(owner, name, None)
    if call is None:
        return False

    def telling(*args: Any, **kwargs: Any) -> Any:
        notify()
        answer = call(*args, **kwargs)
        answered(answer)
        return answer

    setattr(owner, name, telling)
    return True


class ModelWeights(Weights):
    """Samples the parameters of a worker's model, drawn by chance, and counts calls that change
    weights. Called by the engine's thread, which does nothing else between the comparison of
    addresses and the order to read."""

    parts = PARTS

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._changes = 0
        self._model: Callable[[], Any] = lambda: None
        self._groups: list[_Group] = []
        for name in WEIGHT_CHANGERS:
            before_calls(worker, name, self.changed)

    def changed(self) -> None:
        self._changes += 1

    def look(self, part: int) -> _Look:
        """Begin to read the words of a part. What can't be read has changed."""
        same_model = self._model() is self._worker.get_model()
        if not (same_model and self._group(part).is_in_place()):
            self.changed()
            self._find()
        try:
            readings = self._group(part).read(part)
        except RuntimeError:  # a device without memory
            self.changed()
            readings = []
        return _Look(self._changes, readings)

    def _group(self, part: int) -> _Group:
        return self._groups[part % len(self._groups)]

    def _find(self) -> None:
        model = self._worker.get_model()
        if model is not self._model():
            self._model = weakref.ref(model)
            before_calls(model, "load_weights", self.changed)
        found = list(_parameters(model, self._worker.parallel_config.enable_eplb))
        users = Counter(one.data_ptr() for _, one in found)
        shared = {address for address, count in users.items() if count > 1}
        groups = min(PARTS, -(-len(found) // LOOK_PARAMETERS)) or 1
        try:
            self._groups = [_Group(found[at::groups], shared) for at in range(groups)]
        except (RuntimeError, AttributeError, TypeError) as error:
            self._groups = [_Group([], shared)]
            logger.warning(
                "kvtiers can't look at this engine's weights (%s): after each change of them, "
                "reset its prefix cache before the next request",
                error,
            )


class _Look(Look):
    """Words being read, and how often the weights had changed when they were asked for."""

    def __init__(self, changes: int, readings: Sequence[Reading]) -> None:
        self._changes = changes
        self._readings = readings
        self._seen: bytes | None = None

    def ready(self) -> bool:
        return all(one.ready() for one in self._readings)

    def seen(self) -> bytes:
        if self._seen is None:
            digest = xxhash.xxh3_128(self._changes.to_bytes(8, "little"))
            for one in self._readings:
                digest.update(one.words())
            self._seen, self._readings = digest.digest(), ()
        return self._seen


class _Group:
    """Parameters that are looked at together. Their memory is read where it is and never held: what
    is loaded anew may lie elsewhere, and weights are most of a device's memory."""

    def __init__(self, found: Sequence[tuple[Place, torch.Tensor]], shared: Set[int]) -> None:
        """`shared`: addresses of memory that several have."""
        self._places = [place for place, _ in found]
        self._addresses = [one.data_ptr() for _, one in found]
        spans: dict[torch.device, list[tuple[int, int]]] = {}
        for _, one in found:
            # Layers that are brought in turn show another each time.
            if one.data_ptr() not in shared:
                spans.setdefault(one.device, []).append(_extent(one))
        self._samples = [_sample(device, extents) for device, extents in spans.items()]

    def is_in_place(self) -> bool:
        """Whether the memory is still theirs: else reading it could end the process."""
        try:
            now = [module()._parameters[name].data_ptr() for module, name in self._places]
        except (KeyError, AttributeError, RuntimeError):  # one is gone, or has none
            return False
        return now == self._addresses

    def read(self, part: int) -> list[Reading]:
        """Begin to read the words of a part. Raises RuntimeError where the device can't."""
        return [words.read(numbers[part]) for words, numbers in self._samples]


def _sample(
    device: torch.device, extents: Sequence[tuple[int, int]]
) -> tuple[Words, list[torch.Tensor]]:
    """Words of one device, and the numbers of those of each part, drawn by chance from each of
    these ranges of addresses."""
    start = min(first for first, _ in extents)
    start -= start % WORD.itemsize
    words = Words(device, start, max(last for _, last in extents))
    drawn = (torch.tensor(_draw(start, extents), dtype=torch.int64) for _ in range(PARTS))
    return words, [one.pin_memory() if device.type == "cuda" else one for one in drawn]


def _draw(start: int, extents: Sequence[tuple[int, int]]) -> list[int]:
    """Draw the numbers of the words of one part; word 0 is at `start`."""
    drawn: list[int] = []
    for first, last in extents:
        low = -((start - first) // WORD.itemsize)
        high = (last - start) // WORD.itemsize
        at = low + secrets.randbelow(max(1, high - low - SAMPLE_WORDS + 1))
        drawn += range(at, min(high, at + SAMPLE_WORDS))
    return drawn


def _parameters(
    model: torch.nn.Module, moves_experts: bool
) -> Iterator[tuple[Place, torch.Tensor]]:
    """Yield every parameter with memory of its own, once, with its place. Not buffers, which
    computing may change, nor experts that the engine moves between ranks (`moves_experts`)."""
    known: set[int] = set()
    for path, module in model.named_modules():
        if moves_experts and "experts" in path.split("."):
            continue
        for name, one in module.named_parameters(recurse=False):
            if id(one) not in known and _has_memory(one):
                known.add(id(one))
                yield (weakref.ref(module), name), one


def _has_memory(one: torch.Tensor) -> bool:
    try:
        return one.numel() > 0 and one.data_ptr() != 0
    except (RuntimeError, NotImplementedError):  # a wrapper around others
        return False


def _extent(one: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of a parameter's first byte, and behind its last."""
    steps = zip(one.shape, one.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return one.data_ptr(), one.data_ptr() + (last + 1) * one.element_size()


class Reading:
    """Words that cross the bus, and are there after `done`; without it they are there at once."""

    def __init__(
        self, words: torch.Tensor, device: torch.device, done: torch.cuda.Event | None = None
    ) -> None:
        self._words = words
        self._device = device
        self._done = done

    def ready(self) -> bool:
        """Whether `words` waits for nothing any more."""
        return self._done is None or bool(self._done.query())

    def words(self) -> bytes:
        """The words, in the order asked for; waits for the device. Raises RuntimeError, of a device
        that failed."""
        if self._done is not None:
            with torch.cuda.device(self._device):  # else a thread makes a context on the first one
                self._done.synchronize()
        return self._words.numpy().tobytes()


class Words:
    """Reads words between two addresses of one device, whoever owns them.

    It owns none of that memory and keeps nobody's alive: who asks knows that the words it asks for
    are there until the device has done what it has been given by then.
    """

    def __init__(self, device: torch.device, start: int, stop: int) -> None:
        """The addresses, in bytes, of the first word and behind the last. Raises RuntimeError or
        AttributeError where this PyTorch can't look there."""
        self._device = device
        length = (stop - start) // WORD.itemsize
        storage = torch._C._construct_storage_from_data_pointer(
            start, device, length * WORD.itemsize
        )
        with torch.inference_mode(False):
            self._memory = torch.empty(0, dtype=WORD, device=device)
            self._memory.set_(storage, 0, (length,), (1,))
        if self._memory.data_ptr() != start:
            raise RuntimeError("this PyTorch copies memory instead of looking at it")
        self._beside = torch.cuda.Stream(device) if device.type == "cuda" else None

    def read(self, numbers: torch.Tensor) -> Reading:
        """Begin to read the words of these numbers, behind all that the calling thread has queued
        on its device. `numbers`: int64, in host memory, pinned for a CUDA device."""
        if self._beside is None:
            there = torch.index_select(self._memory, 0, numbers.to(self._device))
            return Reading(there.cpu(), self._device)
        after = torch.cuda.Event()
        after.record(torch.cuda.current_stream(self._device))
        count = len(numbers)
        with torch.cuda.device(self._device), torch.cuda.stream(self._beside):
            self._beside.wait_event(after)
            there = numbers.to(self._device, non_blocking=True)
            found = torch.empty(count, dtype=WORD, device=self._device)
            torch.index_select(self._memory, 0, there, out=found)
            arrived = torch.empty(count, dtype=WORD, pin_memory=True)
            arrived.copy_(found, non_blocking=True)
            done = torch.cuda.Event(blocking=True)
            done.record(self._beside)
        return Reading(arrived, self._device, done)
