"""Gather and scatter between paged KV and host slots."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from tiers.contract.block_copier import ENDED
from tiers.errors import TierUnusable
from tiers.gpu import bus, cuda
from tiers.gpu.copier import open_copier
from tiers.gpu.cuda import CudaCopier
from tiers.host.slot_memory import SlotMemory, register

BLOCKS = 12
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]


def paged(device: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "a": torch.randint(0, 255, (BLOCKS, 2, 24), dtype=torch.uint8).to(device),
        "b": torch.randn(2, BLOCKS, 8, dtype=torch.bfloat16).to(device),
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("slots", [[0, 1, 2, 3], [5, 1, 0, 6], [2]])
def test_what_was_gathered_is_scattered_back(device: str, slots: list[int]) -> None:
    kv = paged(device)
    copier = open_copier(kv, BLOCKS)
    memory = SlotMemory(8, copier.payload_bytes, copier.pin)
    blocks = [7, 3, 11, 0][: len(slots)]
    before = {name: cache.clone() for name, cache in kv.items()}
    copier.gather(blocks, memory.rows, slots).wait()
    targets = [1, 2, 4, 5][: len(slots)]
    (fence := copier.fence()).wait()
    copier.scatter(memory.rows, slots, targets, fence).wait()
    for source, target in zip(blocks, targets, strict=True):
        assert torch.equal(kv["a"][target], before["a"][source])
        assert torch.equal(kv["b"][:, target], before["b"][:, source])
    untouched = [b for b in range(BLOCKS) if b not in targets]
    assert torch.equal(kv["a"][untouched], before["a"][untouched])
    copier.close()
    memory.close()


def test_slots_beside_the_gathered_ones_keep_their_bytes() -> None:
    kv = paged("cpu")
    copier = open_copier(kv, BLOCKS)
    memory = SlotMemory(4, copier.payload_bytes, pin=False)
    memory.rows.fill_(9)
    copier.gather([3], memory.rows, [2]).wait()
    assert (memory.rows[[0, 1, 3]] == 9).all()
    assert bytes(memory.payload(2)) == bytes(memory.rows[2, : copier.payload_bytes].tolist())


def test_staging_is_less_where_the_engine_has_left_less(monkeypatch: pytest.MonkeyPatch) -> None:
    made = torch.zeros

    def zeros(waves: int, rows: int, stride: int, **more: Any) -> torch.Tensor:
        if rows > 3:
            raise torch.OutOfMemoryError("none is left")
        return made(waves, rows, stride, **more)

    monkeypatch.setattr(torch, "zeros", zeros)
    assert cuda._memory(13, 64, torch.device("cpu")).shape == (cuda.WAVES, 3, 64)


def test_a_device_we_do_not_know_is_refused() -> None:
    with pytest.raises(ValueError, match="meta"):
        open_copier({"a": torch.zeros(4, 2, device="meta")}, 4)


@pytest.mark.parametrize(("block", "slot"), [(BLOCKS, 0), (-1, 0), (0, 4), (0, -1)])
def test_memory_that_is_not_ours_is_not_touched(block: int, slot: int) -> None:
    copier = open_copier(paged("cpu"), BLOCKS)
    memory = SlotMemory(4, copier.payload_bytes, pin=False)
    with pytest.raises(IndexError):
        copier.scatter(memory.rows, [slot], [block], ENDED)
    with pytest.raises(IndexError):
        copier.gather([block], memory.rows, [slot]).wait()


@needs_cuda
def test_one_kernel_copies_all_pages() -> None:
    page_kernel = pytest.importorskip("tiers.gpu.page_kernel", exc_type=ImportError)
    copier = open_copier(paged("cuda"), BLOCKS)
    assert isinstance(copier, CudaCopier)
    assert isinstance(copier._copies, page_kernel.KernelCopies)
    copier.close()


@needs_cuda
def test_the_driver_copies_batches() -> None:
    """One that has the function must be able to."""
    try:
        bus.Batch(ctypes.CDLL("libcuda.so.1"))
    except (OSError, AttributeError) as error:
        pytest.skip(str(error))
    assert bus.open_bus(torch.device("cuda", 0), torch.cuda.Stream()).batch is not None


@needs_cuda
def test_memory_that_can_not_be_pinned_fails_no_kernel_of_the_engine() -> None:
    memory = SlotMemory(1, 4096, pin=True)
    with pytest.raises(TierUnusable):
        register(memory.rows.data_ptr(), 4096)
    assert (torch.ones(8, device="cuda") + 1).sum().item() == 16
    memory.close()
