"""NVIDIA's driver, as far as it copies batches and tells where devices are: calls by ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

from tiers.gpu.bus import BATCHED, FUNCTION

IN_STREAM_ORDER = 1
NOT_FOUND = 1
Operation = Callable[[], None]
_POINTER, _COUNT = ctypes.c_void_p, ctypes.c_size_t
_FIND = ctypes.CFUNCTYPE(
    ctypes.c_uint,
    ctypes.c_char_p,
    ctypes.POINTER(_POINTER),
    ctypes.c_int,
    ctypes.c_uint64,
    ctypes.POINTER(ctypes.c_int),
)

_DEVICE = ctypes.CFUNCTYPE(ctypes.c_uint, ctypes.POINTER(ctypes.c_int), ctypes.c_int)
_ADDRESS = ctypes.CFUNCTYPE(ctypes.c_uint, _POINTER, ctypes.c_int, ctypes.c_int)
_ATTRIBUTE = ctypes.CFUNCTYPE(
    ctypes.c_uint, ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int
)


def at_once(stream: int, operation: Operation) -> None:
    """A device that does what it is told."""
    operation()


class Driver:
    """Stands for libcuda. `put`: queues an operation on the stream of a handle, and raises
    RuntimeError where the device takes no more. Nothing that a callback raises reaches its caller,
    so it is an error that is answered."""

    def __init__(self, put: Callable[[int, Operation], None] = at_once) -> None:
        self.batches = self.copies = self.refused = 0
        """Calls, the copies of those that it took, and calls that it did not take."""
        self.code = 0
        """What it answers, though half of the copies are queued."""
        self.newest_only = False
        """Whether it has the function of CUDA 13 alone."""
        self.goes_wrong: Callable[[list[int]], None] = lambda targets: None
        """Changes a batch's targets."""
        self.bus = ["0000:1B:00.0", "0000:3B:00.0"]
        """Where its devices are."""
        self.same_addresses = [1, 1]
        """Whether each of them reaches memory that was pinned where it lay by the host's addresses;
        a negative number: it fails to say."""
        self.cuDeviceGet: Any = _DEVICE(self._device)
        self.cuDeviceGetPCIBusId: Any = _ADDRESS(self._address)
        self.cuDeviceGetAttribute: Any = _ATTRIBUTE(self._attribute)
        self._put = put
        self._batch = FUNCTION(self._copy)
        self.cuGetProcAddress_v2: Any = _FIND(self._find)

    def _device(self, found: Any, ordinal: int) -> int:
        found[0] = ordinal + 100
        return 0 if ordinal < len(self.bus) else 101

    def _address(self, text: int, room: int, device: int) -> int:
        ctypes.memmove(text, (self.bus[device - 100] + "\0").encode(), min(room, 13))
        return 0

    def _attribute(self, found: Any, attribute: int, device: int) -> int:
        assert attribute == 91, "CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM of cuda.h"
        found[0] = self.same_addresses[device - 100]
        return 1 if found[0] < 0 else 0

    def _find(self, name: bytes, address: Any, cuda: int, flags: int, status: Any) -> int:
        found = name == BATCHED.encode() and cuda == 12080 and not self.newest_only
        address[0] = ctypes.cast(self._batch, _POINTER).value if found else None
        status[0] = 0 if found else NOT_FOUND
        return 0

    def _copy(self, targets: int, sources: int, sizes: int, count: int, *more: int) -> int:
        attributes, first, number, failed, stream = more
        (order,) = (ctypes.c_uint * 1).from_address(attributes)
        if number != 1 or _COUNT.from_address(first).value or not stream:
            return 1
        places = [[*(ctypes.c_uint64 * count).from_address(at)] for at in (targets, sources, sizes)]
        self.goes_wrong(places[0])
        moves = [*zip(*places, strict=True)]
        if order != IN_STREAM_ORDER:  # it may read what is there now
            moves = [(to, _kept(at, size), size) for to, at, size in moves]
        self.batches += 1
        code = self.code
        try:
            for move in moves[: count // 2 if code else count]:
                self._put(stream, partial(_move, *move))
        except RuntimeError:
            code = 700
        _COUNT.from_address(failed).value = count // 2
        self.refused += bool(code)
        self.copies += 0 if code else count
        return code


def _kept(address: int, size: int) -> bytes:
    return ctypes.string_at(address, size)


def _move(target: int, source: int | bytes, size: int) -> None:
    ctypes.memmove(target, source, size)
