"""The kernel: its machine code can be made, and in Triton's interpreter it copies byte for byte
what PyTorch copies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.test_pages import BLOCKS, LAYOUTS
from tiers.gpu.cuda import open_copies
from tiers.gpu.pages import Copies, PageCopies, block_pages

kernel: Any = pytest.importorskip("tiers.gpu.page_kernel", exc_type=ImportError)


def odd_pages() -> torch.Tensor:
    return torch.zeros(BLOCKS, 13, dtype=torch.uint8)


def more_than_a_chunk() -> torch.Tensor:
    return torch.zeros(BLOCKS, 2 * kernel.CHUNK + 3, dtype=torch.int64)


@pytest.mark.parametrize("unit", [8, 1])
@pytest.mark.parametrize("gather", [True, False], ids=["gather", "scatter"])
@pytest.mark.parametrize("compute_capability", [80, 90])
def test_it_compiles_for_devices(
    unit: int,
    gather: bool,
    compute_capability: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To machine code, which takes no device."""
    compiler: Any = pytest.importorskip("triton.compiler")
    target: Any = pytest.importorskip("triton.backends.compiler").GPUTarget
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    rows = f"*{'i64' if unit == 8 else 'u8'}"
    signature = {"pages": "*i64", "blocks": "*i64", "rows": rows, "row_units": "i32"}
    given = {"GATHER": gather, "UNIT": kernel._UNITS[unit][1], "CHUNK": kernel.CHUNK}
    whole = {**signature, **dict.fromkeys(given, "constexpr")}
    source = compiler.ASTSource(kernel._copy_pages, whole, given)
    compiled = compiler.compile(source, target=target("cuda", compute_capability, 32))
    assert compiled.asm["cubin"]


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter: Any = pytest.importorskip("triton.runtime.interpreter")
    function = interpreter.InterpretedFunction(kernel._copy_pages.fn)
    monkeypatch.setattr(kernel, "_copy_pages", function)


def filled(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """A layer of this layout, whose bytes all differ from their neighbours'."""
    layer = make()
    some = torch.randint(0, 256, (layer.untyped_storage().nbytes(),), dtype=torch.uint8)
    torch.empty(0, dtype=torch.uint8).set_(layer.untyped_storage()).copy_(some)
    return layer


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("make", [*LAYOUTS, odd_pages, more_than_a_chunk], ids=lambda m: m.__name__)
@pytest.mark.parametrize("blocks", [[3], [5, 0, 2]])
def test_it_copies_what_pytorch_copies(make: Callable[[], torch.Tensor], blocks: list[int]) -> None:
    torch.manual_seed(0)
    layers = {"a": filled(make), "b": filled(make)}
    pages = block_pages(layers, BLOCKS)
    unit = kernel.unit_of(pages)
    stride = -(-sum(page.shape[1] for page in pages) // 4096) * 4096
    ours, theirs = (torch.full((len(blocks), stride), 7, dtype=torch.uint8) for _ in range(2))
    both: list[Copies] = [kernel.KernelCopies(pages, unit), PageCopies(pages)]
    for copies, out in zip(both, (ours, theirs), strict=True):
        copies.copy(copies.numbers([1, *blocks, 4]), 1, 1 + len(blocks), out, to_rows=True)
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours[0, : pages[0].shape[1]], torch.full_like(pages[0][0], 7))

    rows = torch.randint(0, 256, ours.shape, dtype=torch.uint8)
    before = [layer.clone() for layer in layers.values()]
    whole = [torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()) for x in layers.values()]
    images = []
    for copies in both:
        for layer, image in zip(layers.values(), before, strict=True):
            layer.copy_(image)
        copies.copy(copies.numbers([1, *blocks, 4]), 1, 1 + len(blocks), rows, to_rows=False)
        images.append([one.clone() for one in whole])
    assert all(map(torch.equal, *images))


def test_nothing_is_kept_on_the_device() -> None:
    """An engine that sleeps takes it away, and gives it back with other bytes."""
    pages = block_pages({"layer": odd_pages().to("meta")}, BLOCKS)
    kept = vars(kernel.KernelCopies(pages, 1)).values()
    assert {one.device.type for one in kept if isinstance(one, torch.Tensor)} == {"cpu"}


def test_units_are_as_large_as_all_pages_allow() -> None:
    pages = torch.zeros(2, 64, dtype=torch.uint8)
    assert kernel.unit_of([pages]) == 8
    assert kernel.unit_of([pages, pages[:, 4:]]) == 4
    assert kernel.unit_of([pages, pages[:, :6]]) == 2
    assert kernel.unit_of([pages, pages[:, 3:]]) == 1


@pytest.mark.usefixtures("interpreted")
def test_a_kernel_that_copies_right_is_used() -> None:
    pages = block_pages({"layer": filled(odd_pages)}, BLOCKS)
    before = torch.get_rng_state()
    assert isinstance(open_copies(pages), kernel.KernelCopies)
    assert torch.equal(torch.get_rng_state(), before), "the engine samples tokens by these"


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("wrong", [True, False])
def test_a_kernel_that_copies_wrong_is_not(
    wrong: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = kernel.KernelCopies.copy

    def copy(*args: Any, to_rows: bool) -> None:
        """Copies nothing to the rows, or nothing from them."""
        if to_rows != wrong:
            right(*args, to_rows=to_rows)

    monkeypatch.setattr(kernel.KernelCopies, "copy", copy)
    pages = block_pages({"layer": filled(odd_pages)}, BLOCKS)
    assert isinstance(open_copies(pages), PageCopies)
    assert "other bytes" in caplog.text


def test_one_that_does_not_run_is_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise AssertionError("no compiler here")

    monkeypatch.setattr(kernel.KernelCopies, "copy", fail)
    pages = block_pages({"layer": filled(odd_pages)}, BLOCKS)
    assert isinstance(open_copies(pages), PageCopies)
    assert "no compiler here" in caplog.text
