"""Copies between slots of pinned host memory and staged rows on a CUDA device, over the bus.

A wave's slots may lie anywhere. Those of a run of neighbours cross by one copy, and all runs of a
wave by one call, where the driver has it: `cuMemcpyBatchAsync`, of CUDA 12.8, which vLLM's own
offloading uses too. It is tried before it is used, and one that refuses later is not asked again.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tiers.concurrency.numa import ROOT, near
from tiers.host.slot_memory import pinned_together

logger = logging.getLogger(__name__)

DRIVER = "libcuda.so.1"
BATCHED = "cuMemcpyBatchAsync"
_ONE_BY_ONE = "each run of slots is copied by a call of its own"
_AS_OF = 12080
"""The CUDA whose function is asked for. That of 13 takes other arguments; its drivers have both."""
_IN_STREAM_ORDER = 1
"""A source is read when the stream has come to the copy (CU_MEMCPY_SRC_ACCESS_ORDER_STREAM)."""
_SAME_ADDRESSES = 91
"""Whether memory that was pinned where it lay has the host's addresses on a device, too, as slots
must: WSL2 gives it others (CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM)."""

_POINTER, _COUNT = ctypes.c_void_p, ctypes.c_size_t
_GIVEN = [_POINTER, _POINTER, _POINTER, _COUNT, _POINTER, _POINTER, _COUNT, _POINTER, _POINTER]
FUNCTION = ctypes.CFUNCTYPE(ctypes.c_uint, *_GIVEN)
"""Targets, sources, sizes, copies; attributes, the first copy that each is of, attributes' number;
the copy that failed; the stream. Its result is an error."""


class Run(NamedTuple):
    """Neighbouring slots from `slot` on, and as many staged rows from `item` on."""

    slot: int
    item: int
    length: int


def runs(slots: Sequence[int], together: int) -> list[Run]:
    """The runs of a wave's slots; none goes on across a multiple of `together`."""
    found: list[Run] = []
    first = 0
    for last in range(1, len(slots) + 1):
        if last == len(slots) or slots[last] != slots[last - 1] + 1 or slots[last] % together == 0:
            found.append(Run(slots[first], first, last - first))
            first = last
    return found


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes: how sources are read; places of both sides (unused); flags."""

    _fields_ = [("order", ctypes.c_uint), ("places", ctypes.c_int * 4), ("flags", ctypes.c_uint)]


class Batch:
    """The driver's batched copy. Raises AttributeError where the driver has none."""

    def __init__(self, driver: Any) -> None:
        """`driver`: libcuda, as `ctypes.CDLL`."""
        find, address, status = driver.cuGetProcAddress_v2, ctypes.c_void_p(), ctypes.c_int()
        name = ctypes.c_char_p(BATCHED.encode())
        to_fill = ctypes.byref(address), ctypes.c_int(_AS_OF), ctypes.c_uint64(0)
        if find(name, *to_fill, ctypes.byref(status)) or status.value or not address.value:
            raise AttributeError(f"it has no {BATCHED}")
        self._use(address.value)

    def _use(self, address: int) -> None:
        self._call = FUNCTION(address)
        self._attributes = _Attributes(_IN_STREAM_ORDER)
        self._first = ctypes.c_size_t(0)  # of all copies, from the first on

    def queue(self, places: tuple[int, int, int], count: int, stream: int) -> int:
        """Queue `count` copies on a stream; return the driver's error, 0 if there is none. `places`
        are the addresses of as many targets, sources and sizes in bytes, 64 bits each, of which
        none is read any more when this returns. Of copies that failed some may be queued."""
        failed = ctypes.c_size_t(0)
        of_all = ctypes.byref(self._attributes), ctypes.byref(self._first), 1, ctypes.byref(failed)
        return int(self._call(*places, count, *of_all, stream))

    def copy(
        self, targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], stream: int
    ) -> int:
        """As `queue`, for lists of addresses and sizes."""
        to, of, by = (array("Q", one) for one in (targets, sources, sizes))
        places = to.buffer_info()[0], of.buffer_info()[0], by.buffer_info()[0]
        return self.queue(places, len(sizes), stream)


def open_bus(
    device: torch.device, stream: torch.cuda.Stream, load: Callable[[str], Any] = ctypes.CDLL
) -> Bus:
    """With the driver's batched copy, if there is one and it copies here what was sent. `stream`:
    one that is not the default, which the driver refuses. `load`: finds the driver."""
    try:
        driver = load(DRIVER)
        batch = Batch(driver)
        _require_same_addresses(driver, device)
    except (OSError, AttributeError) as error:
        logger.info("%s: %s", _ONE_BY_ONE, error)
        return Bus(None)
    try:
        why = _fault(batch, device, stream)
    except RuntimeError as error:  # there is no memory to try it with, or the device has failed
        why = f"could not be tried: {error}"
    bus = Bus(batch)
    if why:
        bus.do_without(why)
    return bus


def _require_same_addresses(driver: Any, device: torch.device) -> None:
    """Raise AttributeError unless batches find slots. They are not tried with some: a device that
    is given other addresses than its own fails for good."""
    number, same = ctypes.c_int(), ctypes.c_int()
    failed = driver.cuDeviceGet(ctypes.byref(number), device.index or 0)
    failed = failed or driver.cuDeviceGetAttribute(ctypes.byref(same), _SAME_ADDRESSES, number)
    if failed or not same.value:
        raise AttributeError(f"{BATCHED} would not find memory that was pinned where it lay")


def _fault(batch: Batch, device: torch.device, stream: torch.cuda.Stream) -> str:
    """What is wrong with it, tried on a few rows there and back; nothing: an empty text."""
    rows, width = 5, 4096
    made = torch.Generator().manual_seed(0)  # the engine's own draws what requests are answered
    sent = torch.randint(0, 256, (rows, width), dtype=torch.uint8, generator=made)
    back = torch.zeros_like(sent)
    if device.type == "cuda":
        sent, back = sent.pin_memory(), back.pin_memory()
    # From pageable memory, which takes until it has arrived; zeroes of the device would come later.
    there = torch.zeros(rows, width, dtype=torch.uint8).to(device)
    places, sizes = [3, 0, 4], [width, width // 2 + 3, width]  # rows 1 and 2 stay as they are
    codes: list[int] = []
    for target, source in ((there, sent), (back, there)):
        to, of = ([one.data_ptr() + at * width for at in places] for one in (target, source))
        codes.append(batch.copy(to, of, sizes, stream.cuda_stream))
    stream.synchronize()  # what failed may be queued in part, and this memory goes
    if any(codes):
        return f"answers with error {max(codes)}"
    expected = torch.zeros_like(sent)
    for place, size in zip(places, sizes, strict=True):
        expected[place, :size] = sent[place, :size]
    same = torch.equal(there.cpu(), expected) and torch.equal(back, expected)
    return "" if same else "copies other bytes than it is sent"


def near_device(
    device: torch.device, root: Path = ROOT, load: Callable[[str], Any] = ctypes.CDLL
) -> frozenset[int]:
    """The processors of the NUMA node that a device is at; see `numa.near`. By the driver, since
    PyTorch does not tell where on the bus a device is in all its versions."""
    number, address = ctypes.c_int(), ctypes.create_string_buffer(16)
    try:
        driver = load(DRIVER)
        failed = driver.cuDeviceGet(ctypes.byref(number), device.index or 0)
        failed = failed or driver.cuDeviceGetPCIBusId(address, len(address), number)
    except (OSError, AttributeError):
        return frozenset()
    return frozenset() if failed else near(address.value.decode(), root)


class Bus:
    """Queues copies on the current stream. What leaves and what arrives may be called by a thread
    each. `batch`: without one each run is a copy. `warning`: why the driver's is not used although
    there is one, for the operator; empty: it is used, or there is none."""

    def __init__(self, batch: Batch | None) -> None:
        self.batch = batch
        self.warning = ""
        # Without it two threads could both say that the driver refused.
        self._lock = threading.Lock()

    def cross(
        self,
        rows: torch.Tensor,
        slots: Sequence[int],
        staged: torch.Tensor,
        width: int,
        to_host: bool,
    ) -> None:
        """From staged rows to slots of `rows`, or back, `width` bytes of each. What is pinned
        together is contiguous on both sides: all else would pass through pageable memory, and
        wait."""
        stride = rows.stride(0)
        if not width == stride == staged.stride(0):  # rows that are longer than the block
            width = min(width, rows.shape[1])
            rows, staged = rows[:, :width], staged[:, :width]
            found = runs(slots, 1)
        else:
            found = runs(slots, pinned_together(stride))
        if len(found) > 1 and self._at_once(rows, found, staged, to_host):
            return
        for slot, item, length in found:
            host, device = rows[slot : slot + length], staged[item : item + length]
            target, source = (host, device) if to_host else (device, host)
            target.copy_(source, non_blocking=True)

    def _at_once(
        self, rows: torch.Tensor, found: Sequence[Run], staged: torch.Tensor, to_host: bool
    ) -> bool:
        """Whether the driver has queued all. What it has queued of a batch that it refuses does no
        harm: the same is copied once more, behind it."""
        batch = self.batch
        if batch is None:
            return False
        width, row, row_stride = rows.shape[1], rows.data_ptr(), rows.stride(0)
        first, stride = staged.data_ptr(), staged.stride(0)
        hosts = [row + slot * row_stride for slot, _, _ in found]
        devices = [first + item * stride for _, item, _ in found]
        sizes = [length * width for _, _, length in found]
        targets, sources = (hosts, devices) if to_host else (devices, hosts)
        stream = torch.cuda.current_stream(staged.device).cuda_stream
        code = batch.copy(targets, sources, sizes, stream)
        if code:
            self.do_without(f"answers with error {code}")
        return not code

    def do_without(self, why: str) -> None:
        """Copy each run by itself from now on, and say so once."""
        with self._lock:
            is_first, self.batch = self.batch is not None, None
            self.warning = self.warning or f"{_ONE_BY_ONE}: {BATCHED} {why}"
        if is_first:
            logger.warning("%s", self.warning)
