"""What must never share blocks: salts, adapters, images; and which models can't be served."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.compatibility import Cells
from tiers.connector.policy.request_state import RequestTable
from tiers.contract.adapters import LoadedAdapter
from tiers.contract.engine_info import EngineInfo
from tiers.engine.content_marks import ContentMarks
from tiers.engine.loaded_adapters import name_of
from tiers.engine.request_marks import MarksOfRequests

BLOCK = 16
TOKENS = list(range(3, 3 + 3 * BLOCK))


@pytest.mark.vllm
def test_requests_that_differ_in_more_than_tokens_share_no_block() -> None:
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
    loras = lora, other_lora = LoRARequest("sql", 1, "folder"), LoRARequest("prose", 2, "folder")

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
        marks, media = MarksOfRequests(1), ContentMarks(trust, room=10)
        loaded = {
            name_of(one): LoadedAdapter(one.lora_int_id, b"weights", b"files") for one in loras
        }
        marks.heard({0: loaded})
        engine = EngineInfo({}, BLOCK, BLOCK, num_blocks=9, marks=marks, media=media)
        table = RequestTable(engine)
        return table.keys(table.of(request))

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


@pytest.mark.vllm
def test_tokens_in_the_places_of_embeddings_share_no_block() -> None:
    """The engine hashes a token of 0 and an embedding at each place of either."""
    import inspect

    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    if "prompt_is_token_ids" not in inspect.signature(Request).parameters:
        pytest.skip("this vLLM has no prompts of tokens and embeddings")
    init_none_hash(sha256)
    embeddings = torch.arange(3.0 * BLOCK * 4).reshape(3 * BLOCK, 4)

    def keys(mask: list[bool] | None) -> list[bytes]:
        request = Request(
            "id",
            None if mask is None else [0] * 3 * BLOCK,
            SamplingParams(max_tokens=1),
            None,
            prompt_embeds=embeddings,
            prompt_is_token_ids=mask,
            block_hasher=get_request_block_hasher(BLOCK, sha256),
        )
        engine = EngineInfo({}, BLOCK, BLOCK, num_blocks=9, marks=MarksOfRequests(1))
        table = RequestTable(engine)
        return table.keys(table.of(request))

    no, yes = [False] * BLOCK, [True] * BLOCK
    masks = None, [*no, *yes, *no], [*no, *no, *no], [*yes, *yes, *yes], [*no, True, *no[1:], *no]
    victim, *others = map(keys, masks)
    assert [len(one) for one in (victim, *others)] == [3] * 5
    assert not set(victim) & {key for one in others for key in one}
    shared = [len({one[block] for one in others}) for block in range(3)]
    assert shared == [2, 4, 4], "blocks up to the first place that differs are shared"
    assert keys(masks[1]) == others[0]


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
