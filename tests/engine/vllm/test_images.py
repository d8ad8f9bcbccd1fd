"""A real engine that sees images: no request gets KV of another image, however images are named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.vllm.checkpoints import IMAGE_TOKENS, write_vision_model
from tests.engine.vllm.tiny_vllm import Run, documents

pytestmark = [pytest.mark.vllm, pytest.mark.faults]

TEXT = documents(1, 128, seed=4)[0]
COMPLETE = (IMAGE_TOKENS + len(TEXT)) // 32 * 32
RED, BLUE, GREEN = [255, 0, 0], [0, 0, 255], [0, 255, 0]


@pytest.fixture(scope="module")
def see(
    run_vllm: Callable[..., Run], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Run]:
    """Show images to a fresh engine, one by one, with one text, over one disk."""
    folder = tmp_path_factory.mktemp("vision")

    def run(images: list[tuple[list[int], str | None]], disk: Path, **options: Any) -> Run:
        batches: Any = [
            [(TEXT, 8, {"image": color, **({"uuid": uuid} if uuid else {})})]
            for color, uuid in images
        ]
        return run_vllm(
            batches,
            [{"type": "disk", "capacity": "64MiB", "path": str(disk)}],
            model=str(write_vision_model(folder)),
            skip_tokenizer_init=False,
            num_gpu_blocks_override=80,
            env={"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
            **options,
        )

    return run


@pytest.fixture(scope="module")
def answers(
    see: Callable[..., Run], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[list[int]]]:
    """What is said of each image where no cache is asked; that the images matter."""
    run = see(
        [(RED, None), (BLUE, None), (GREEN, None)],
        tmp_path_factory.mktemp("own"),
        enable_prefix_caching=False,
        mm_processor_cache_gb=0,
    )
    assert run.loaded() == {}
    red, blue, green = run.tokens
    assert red != blue != green != red
    return {"red": red, "blue": blue, "green": green}


@pytest.mark.fault
def test_images_named_by_a_counter_are_not_mixed_up(
    see: Callable[..., Run], answers: dict[str, Any], tmp_path: Path
) -> None:
    counted = {"enable_prefix_caching": False, "mm_processor_cache_gb": 0}
    assert see([(RED, None)], tmp_path, **counted).tokens == [answers["red"]]
    restarted = see([(BLUE, None), (RED, None)], tmp_path, **counted)
    assert restarted.tokens == [answers["blue"], answers["red"]]
    assert restarted.loaded() == {}
    assert "names images by a counter" in restarted.log


@pytest.mark.fault
def test_a_clients_name_for_an_image_is_not_believed(
    see: Callable[..., Run], answers: dict[str, Any], tmp_path: Path
) -> None:
    first = see([(RED, "avatar"), (GREEN, None), (BLUE, "sky")], tmp_path)
    assert first.tokens == [answers["red"], answers["green"], answers["blue"]]
    again = see([(BLUE, "avatar"), (GREEN, None), (BLUE, "sky")], tmp_path)
    assert again.tokens == [answers["blue"], answers["green"], answers["blue"]]
    assert again.cached == [[0], [COMPLETE], [COMPLETE]]
