"""What must never share blocks: salts, adapters, images; and an adapter whose files change."""

from __future__ import annotations

import logging
import os
import threading
import time
from io import FileIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.compatibility import Cells
from tiers.connector.contract.engine import EngineInfo
from tiers.connector.policy.requests import RequestTable
from tiers.engine import request_marks
from tiers.engine.content_marks import ContentMarks
from tiers.engine.identity import digests
from tiers.engine.identity.facts import config_facts
from tiers.engine.request_marks import AdapterMarks

BLOCK = 16
TOKENS = list(range(3, 3 + 3 * BLOCK))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine must not make digests late."""
    monkeypatch.setattr(request_marks, "MOMENT", 30.0)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A LoRA adapter's folder."""
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights" * 1000)
    (tmp_path / "adapter_config.json").write_text('{"r": 8}')
    return tmp_path


@pytest.mark.vllm
def test_requests_that_differ_in_more_than_tokens_share_no_block(adapter: Path) -> None:
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import (
        MultiModalBatchedField,
        MultiModalFeatureSpec,
        MultiModalFieldElem,
        MultiModalKwargsItem,
        PlaceholderRange,
    )
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)

    def image(name: str, brightness: float = 0.5, at: int = 2) -> MultiModalFeatureSpec:
        pixels = MultiModalFieldElem(torch.full((3, 4), brightness), MultiModalBatchedField())
        return MultiModalFeatureSpec(
            data=MultiModalKwargsItem({"pixel_values": pixels}),
            modality="image",
            identifier=name,
            mm_position=PlaceholderRange(offset=at, length=4),
        )

    def keys(trust: bool = False, **more: Any) -> list[bytes]:
        request = Request(
            "id",
            TOKENS,
            SamplingParams(max_tokens=1),
            None,
            block_hasher=get_request_block_hasher(BLOCK, sha256),
            **more,
        )
        marks, media = AdapterMarks(), ContentMarks(trust, room=10)
        engine = EngineInfo({}, BLOCK, BLOCK, num_blocks=9, mark=marks, media=media)
        table = RequestTable(engine)
        return table.keys(table.of(request))

    lora = LoRARequest("sql", 1, str(adapter))
    other_lora = LoRARequest("prose", 2, str(adapter))
    variants = [
        keys(),
        keys(cache_salt="tenant a"),
        keys(cache_salt="tenant b"),
        keys(mm_features=[image("cat")]),
        keys(mm_features=[image("dog")]),
        keys(mm_features=[image("cat", brightness=0.6)]),
        keys(mm_features=[image("cat")], lora_request=lora),
        keys(lora_request=lora),
        keys(lora_request=other_lora),
    ]
    assert all(len(one) == 3 for one in variants)
    assert len({key for one in variants for key in one}) == 3 * len(variants)
    assert keys(cache_salt="tenant a") == variants[1], "but with themselves they do"
    assert keys(mm_features=[image("cat")]) == variants[3]
    assert keys(lora_request=lora) == variants[-2]

    late = keys(mm_features=[image("cat", at=20)])
    assert [key in variants[0] for key in late] == [True, False, False], "what precedes an image"
    trusted = keys(True, mm_features=[image("cat")])
    assert keys(True, mm_features=[image("cat", brightness=0.6)]) == trusted
    assert not set(trusted) & set(variants[3])


def request_with(path: Path) -> Any:
    return SimpleNamespace(lora_request=SimpleNamespace(lora_name="sql", lora_path=str(path)))


def test_an_adapter_is_what_its_files_say(adapter: Path) -> None:
    before = AdapterMarks()(request_with(adapter))
    assert AdapterMarks()(request_with(adapter)) == before
    assert AdapterMarks()(SimpleNamespace(lora_request=None)) == b""
    (adapter / "adapter_config.json").write_text('{"r": 16}')
    assert AdapterMarks()(request_with(adapter)) != before
    (adapter / "adapter_config.json").write_text('{"r": 8}')
    (adapter / "adapter_model.safetensors").write_bytes(b"Weights" * 1000)
    assert AdapterMarks()(request_with(adapter)) != before


def test_a_byte_anywhere_makes_another_adapter(adapter: Path) -> None:
    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(os.urandom(10_000_000))
    before = AdapterMarks()(request_with(adapter))
    assert AdapterMarks()(request_with(adapter)) == before
    with weights.open("r+b") as file:
        file.seek(3_456_789)
        byte = file.read(1)
        file.seek(3_456_789)
        file.write(bytes([byte[0] ^ 1]))
    assert AdapterMarks()(request_with(adapter)) != before


def test_the_engine_waits_once_for_adapters_that_come_together(
    adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, waits = threading.Event(), []
    monkeypatch.setattr(request_marks, "_adapter_digest", lambda *_: begin.wait(30) and b"mark")
    monkeypatch.setattr(request_marks, "wait", lambda marks, _: waits.append(marks))
    marks = AdapterMarks()
    for n in range(3):
        folder = adapter.parent / f"adapter-{n}"
        folder.mkdir()
        assert marks(request_with(folder)) != b"mark"
    begin.set()
    assert len(waits) == 1


def test_requests_that_come_before_an_adapter_is_read_share_nothing(
    adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_marks, "MOMENT", 0.01)
    begin = threading.Event()
    read_digest = digests.read_digest

    def late(file: FileIO) -> str:
        assert begin.wait(30)
        return read_digest(file)

    monkeypatch.setattr(digests, "read_digest", late)
    marks = AdapterMarks()
    early = [marks(request_with(adapter)) for _ in range(3)]
    assert len(set(early)) == 3
    begin.set()
    limit = time.monotonic() + 30
    while (mark := marks(request_with(adapter))) != marks(request_with(adapter)):
        assert time.monotonic() < limit
    assert mark not in early


def test_an_adapter_that_changes_under_the_engine_is_not_cached(
    adapter: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Who can say which of its weights a request was computed with?"""
    marks = AdapterMarks()
    before = marks(request_with(adapter))
    os.utime(adapter / "adapter_model.safetensors", ns=(1, 1))
    with caplog.at_level(logging.WARNING):
        after = [marks(request_with(adapter)) for _ in range(3)]
    assert len({before, *after}) == 4
    assert len(caplog.records) == 1


def test_an_adapter_that_changes_before_it_is_read_is_not_cached(
    adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine may have loaded what it was before."""
    monkeypatch.setattr(request_marks, "MOMENT", 30.0)
    digest = digests.Digests.of

    def late(self: digests.Digests, path: Path) -> str:
        path.write_text(f"other {path.name}")
        return digest(self, path)

    monkeypatch.setattr(digests.Digests, "of", late)
    mark = AdapterMarks()(request_with(adapter))
    monkeypatch.setattr(digests.Digests, "of", digest)
    assert AdapterMarks()(request_with(adapter)) != mark


def test_an_adapter_that_can_t_be_read_is_not_cached_and_stops_nobody(
    adapter: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (adapter / "tokenizer.json").symlink_to(adapter / "gone.json")
    marks = AdapterMarks()
    with caplog.at_level(logging.WARNING):
        assert len({marks(request_with(adapter)) for _ in range(3)}) == 3
    assert len(caplog.records) == 1
    (adapter / "tokenizer.json").unlink()
    assert len({marks(request_with(adapter)) for _ in range(3)}) == 3, "what was loaded meanwhile?"


def test_an_adapter_from_elsewhere_is_this_engine_s_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its name says nothing of its weights, which the hub may change."""
    caplog.set_level(logging.INFO)
    marks = AdapterMarks()
    request = request_with(Path("org/adapter"))
    assert marks(request) == marks(request) != AdapterMarks()(request)
    assert [r.message for r in caplog.records if "'sql' is no local folder" in r.message]


def model(**more: Any) -> Any:
    config = {
        "model": "org/model",
        "revision": None,
        "dtype": "bfloat16",
        "quantization": None,
        "seed": 0,
        "max_model_len": 4096,
        "hf_config": SimpleNamespace(to_dict=dict),
        "hf_text_config": SimpleNamespace(),
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(**{**config, **more}),
        cache_config=SimpleNamespace(cache_dtype="auto", prefix_caching_hash_algo="sha256"),
        load_config=SimpleNamespace(load_format="auto"),
    )


def test_longest_request_matters_where_it_chooses_the_rotary_factors() -> None:
    phi = SimpleNamespace(original_max_position_embeddings=4096)

    def facts(**more: Any) -> dict[str, str]:
        return config_facts(model(**more), "0.32.0")

    assert facts(max_model_len=4096) == facts(max_model_len=8192)
    short = facts(hf_text_config=phi, max_model_len=4096)
    assert short == facts(hf_text_config=phi, max_model_len=2048)
    assert short != facts(hf_text_config=phi, max_model_len=131072)


STATE = {"kind": "MambaSpec", "mamba_cache_mode": "align"}


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("what", "groups", "more", "words"),
    [
        ("non-causal attention", [{"non_causal": True}], {}, "non-causal FullAttentionSpec"),
        ("KV of mixed precision", [{}], {"needs_kv_cache_zeroing": True}, "mixed precision"),
        (
            "prefixes that vLLM can't reuse",
            [{}],
            {"is_prefix_caching_supported": False},
            "can't be reused",
        ),
        (
            "decode context parallelism",
            [{}],
            {"decode_context_parallel_size": 2},
            "decode_context_parallel_size is 2",
        ),
        (
            "speculation in a pipeline, on Model Runner V1",
            [{}],
            {"pipeline_parallel_size": 2, "speculative_config": object()},
            "speculative decoding with pipeline parallelism",
        ),
        (
            "recurrent states without prefix caching",
            [{**STATE, "mamba_cache_mode": "none"}],
            {},
            "MambaSpec with mamba_cache_mode",
        ),
        (
            "recurrent states on Model Runner V2",
            [STATE],
            {"use_v2_model_runner": True},
            r"recurrent layers \(layers.0.*(Model Runner V2|0.32 and later)",
        ),
        (
            "recurrent states in blocks of another size",
            [STATE, {"block_size": 32}],
            {},
            "blocks have another size than those of attention|0.32 and later",
        ),
        (
            "chunked local attention",
            [{"kind": "ChunkedLocalAttentionSpec"}],
            {},
            "ChunkedLocalAttentionSpec",
        ),
    ],
)
def test_what_can_t_be_served_is_named(
    cells: Cells, what: str, groups: list[dict[str, Any]], more: dict[str, Any], words: str
) -> None:
    from tiers.engine.vllm_groups import kv_groups

    def group(kind: str = "FullAttentionSpec", **fields: Any) -> Any:
        spec = type(kind, (SimpleNamespace,), {})(**{"block_size": 16, **fields})
        return SimpleNamespace(kv_cache_spec=spec, layer_names=["layers.0"])

    config = SimpleNamespace(
        model_config=SimpleNamespace(
            model="org/model",
            is_prefix_caching_supported=more.get("is_prefix_caching_supported", True),
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=more.get("decode_context_parallel_size", 1),
            pipeline_parallel_size=more.get("pipeline_parallel_size", 1),
        ),
        speculative_config=more.get("speculative_config"),
        use_v2_model_runner=more.get("use_v2_model_runner", False),
    )
    cache = SimpleNamespace(
        kv_cache_groups=[group(**fields) for fields in groups],
        needs_kv_cache_zeroing=more.get("needs_kv_cache_zeroing", False),
        has_mixed_precision_kv_cache=more.get("needs_kv_cache_zeroing", False),
    )
    with pytest.raises(ValueError, match=words) as refusal:
        kv_groups(config, cache)
    cells.refused(what, str(refusal.value))
