"""Hints as a real vLLM takes them: in a request's parameters, and in its own envelope."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.engine.vllm.tiny_vllm import Run, documents
from tests.engine.vllm.vllm_chains import IN_PROCESS, cpu, tiers
from tiers.connector.policy.request_params import Demote, Hints, RequestReader, Retain

pytestmark = pytest.mark.vllm

PROMPTS = documents(4, 600, seed=3)
FULL = 18 * 32
RETAIN = {"kv_transfer_params": {"kvtiers": {"hints": {"retain": {"ttl": 600}}}}}


def test_a_retained_prompt_is_there_after_others(run_vllm: Callable[..., Run]) -> None:
    """Engine and tier have room for two prompts each; the first of four comes back."""
    first, *others = ([prompt, 8] for prompt in PROMPTS)
    said = [*first, {"sampling": {"extra_args": RETAIN}}]
    config = tiers(cpu("2560KiB"))
    share = {"max_retained": 0.5, "tenants": {"": {"max_retained": 0.5}}}
    config["kv_connector_extra_config"]["chain"] |= share
    batches = [[one] for one in (said, *others, first, others[0])]
    run = run_vllm(batches, kv_transfer_config=config, settled=True, **IN_PROCESS)
    assert run.cached == [[0], [0], [0], [0], [FULL], [0]]
    assert run.tokens[4:] == run.tokens[:2]
    assert run.loaded() == {"cpu": FULL}


def test_vllms_envelope_arrives_at_the_reader() -> None:
    """As it crosses to the engine's process, and there as the request that connectors see."""
    pytest.importorskip("vllm.v1.kv_hints", reason="this vLLM has no envelope of hints")
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
    from vllm.v1.request import Request
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    said = {"retain": {"ttl": 60}, "demote": {}, "kvcr.pin": {"blocks": [1, 2]}}
    actions = [KvHintAction(kind, kind, "1", payload) for kind, payload in said.items()]
    asked = EngineCoreRequest(
        request_id="r",
        prompt_token_ids=[1, 2, 3],
        mm_features=None,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        kv_hints=KvHintsEnvelope("1", "message", actions),
    )
    arrived = MsgpackDecoder(EngineCoreRequest).decode(MsgpackEncoder().encode(asked))
    request = Request.from_engine_core_request(arrived, None)
    reader = RequestReader()
    assert reader.hints(request) == Hints(Retain(ttl=60), Demote())
    assert reader.ignored == 1
