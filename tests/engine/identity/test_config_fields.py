"""Each field of the engine's configuration is in the key, or is known to be irrelevant."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.engine.needless_fields import NEEDLESS
from tests.engine.record import facts, fields_of, installed, versions
from tiers.engine.identity.config_fields import FIELDS, PARTS
from tiers.engine.identity.facts import attention_facts, config_facts, text_of

TABLE = FIELDS | NEEDLESS
RECORDED = versions()


def unknown(classes: dict[str, list[str]]) -> list[str]:
    """Fields that the table does not have."""
    return [
        f"{name}.{field}"
        for name, fields in classes.items()
        for field in fields
        if name not in TABLE or field not in TABLE[name].known
    ]


def fields(version: str) -> dict[str, list[str]]:
    """The fields of each class of a version."""
    return {name: (text or "").split() for name, text in facts(version)["fields"].items()}


@pytest.mark.parametrize("version", RECORDED)
def test_the_table_has_all_fields_of_the_version(version: str) -> None:
    recorded = fields(version)
    assert len(recorded) > 40 and len(recorded["ModelConfig"]) > 60
    assert unknown(recorded) == []


@pytest.mark.vllm
def test_the_table_has_all_fields_of_the_installed_version() -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    classes = fields_of(installed(Path(spec.origin).parent.parent))
    assert classes.keys() >= {"VllmConfig", "ModelConfig", "LoadConfig"}
    assert unknown(classes) == []


def test_a_new_field_and_a_new_class_are_found() -> None:
    text = "@config\nclass LoadConfig:\n    load_format: str = ''\n    colour: str = ''\n"
    assert unknown(fields_of([text])) == ["LoadConfig.colour"]
    assert unknown(fields_of(["@config()\nclass New:\n    one: int = 1\n"])) == ["New.one"]


def test_the_table_has_no_field_that_no_version_has() -> None:
    recorded: dict[str, set[str]] = {}
    for version in RECORDED:
        for name, known in fields(version).items():
            recorded.setdefault(name, set()).update(known)
    assert {name: one.known - recorded.get(name, set()) for name, one in TABLE.items()} == {
        name: frozenset() for name in TABLE
    }


def test_each_field_has_one_place() -> None:
    for name, fields in TABLE.items():
        everything = " ".join([fields.key, *fields.why.values()]).split()
        twice = {field for field in everything if everything.count(field) > 1}
        assert not twice, name


def test_what_is_irrelevant_says_why() -> None:
    assert all(len(why) > 10 for fields in TABLE.values() for why in fields.why)


def test_all_facts_are_reached() -> None:
    """A class with fields in the key is a part of one that is."""
    parts = {part for inner in PARTS.values() for part in inner.values()}
    assert FIELDS.keys() - {"VllmConfig"} == parts and not FIELDS.keys() & NEEDLESS.keys()
    assert not any(fields.key for fields in NEEDLESS.values())
    for name, inner in PARTS.items():
        assert inner.keys() <= FIELDS[name].known


# -- facts ---------------------------------------------------------------------------------------


def config(**more: dict[str, Any]) -> Any:
    """A configuration in which fields of some parts are as given."""
    model = {
        "dtype": "bfloat16",
        "max_model_len": 4096,
        "hf_config": SimpleNamespace(to_dict=dict),
        "hf_text_config": SimpleNamespace(),
    }
    parts = {"model_config": model, "cache_config": {}, "load_config": {}}
    for name, fields in more.items():
        parts[name] = {**parts.get(name, {}), **fields}
    return SimpleNamespace(**{name: SimpleNamespace(**fields) for name, fields in parts.items()})


@pytest.mark.parametrize(
    ("part", "field", "one", "other"),
    [
        ("model_config", "quantization_config", {"linear": "mxfp8"}, {"linear": "mxfp4"}),
        ("model_config", "quantization", "fp8", "online"),
        ("model_config", "code_revision", "a", "b"),
        ("model_config", "model_impl", "vllm", "transformers"),
        ("load_config", "load_format", "auto", "pt"),
        ("load_config", "model_loader_extra_config", {"tensorizer_uri": "a"}, {}),
        ("cache_config", "cache_dtype", "auto", "fp8"),
        ("attention_config", "backend", "FLASH_ATTN", "FLASHINFER"),
        ("kernel_config", "moe_backend", "triton", "cutlass"),
        ("speculative_config", "revision", "a", "b"),
        ("lora_config", "lora_dtype", "float16", "bfloat16"),
        ("parallel_config", "tensor_parallel_size", 1, 2),
        ("kv_transfer_config", "enable_permute_local_kv", True, False),
    ],
)
def test_what_kv_depends_on_is_told_apart(part: str, field: str, one: Any, other: Any) -> None:
    facts = [config_facts(config(**{part: {field: value}}), "0.32.0") for value in (one, other)]
    assert facts[0] != facts[1]
    assert facts[0] == config_facts(config(**{part: {field: one}}), "0.32.0")


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ("model_config", "model"),
        ("model_config", "served_model_name"),
        ("model_config", "enforce_eager"),
        ("cache_config", "num_gpu_blocks"),
        ("parallel_config", "data_parallel_rank"),
        ("load_config", "download_dir"),
    ],
)
def test_what_kv_does_not_depend_on_is_shared(part: str, field: str) -> None:
    facts = [config_facts(config(**{part: {field: value}}), "0.32.0") for value in ("a", "b")]
    assert facts[0] == facts[1]


def test_drafters_without_kv_are_no_fact() -> None:
    """Nor is where a model with a drafter of its own lies."""

    def facts(target: str, **drafter: str) -> dict[str, str]:
        more = {"speculative_config": drafter} if drafter else {}
        return config_facts(config(model_config={"model": target}, **more), "0.32.0")

    plain = facts("/a")
    for method in ("ngram", "suffix", "medusa"):
        assert facts("/a", method=method, model="/c", quantization="fp8") == plain
    own = facts("/a", method="mtp", model="/a")
    assert own == facts("/b", method="mtp", model="/b") != plain
    assert facts("/a", method="eagle", model="/c") != facts("/a", method="eagle", model="/d")


def test_parts_of_parts_are_told_apart() -> None:
    def facts(**fields: Any) -> dict[str, str]:
        return config_facts(
            config(model_config={"multimodal_config": SimpleNamespace(**fields)}), "0.32.0"
        )

    assert facts(mm_processor_kwargs={"size": 1}) != facts(mm_processor_kwargs={"size": 2})


def test_a_field_that_nobody_knows_is_a_fact_unless_it_has_its_default(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @dataclasses.dataclass
    class Loading:
        load_format: str = "auto"
        colour: str = "red"
        sizes: list[int] = dataclasses.field(default_factory=list)

    def facts(**fields: Any) -> dict[str, str]:
        whole = config()
        whole.load_config = Loading(**fields)
        return config_facts(whole, "0.32.0")

    caplog.set_level("INFO")
    assert facts() == facts(colour="red", sizes=[])
    assert not {"LoadConfig.colour", "LoadConfig.sizes"} & {*facts()} and not caplog.text
    assert facts(colour="blue")["LoadConfig.colour"] == "blue"
    assert "kvtiers does not know LoadConfig.colour: blocks are shared only with" in caplog.text
    assert len({str(facts(**f)) for f in ({}, {"colour": "blue"}, {"sizes": [1]})}) == 3


def test_a_field_that_is_no_fact_is_not_looked_at() -> None:
    """As the configuration of a model whose layers differ: it raises where one asks for a size."""

    class Layers:
        def __str__(self) -> str:
            raise AttributeError("'head_dim' may vary across layers")

    @dataclasses.dataclass
    class Model:
        hf_config: Any
        hf_text_config: Any

    whole = config()
    whole.model_config = Model(whole.model_config.hf_config, Layers())
    assert "config" in config_facts(whole, "0.32.0")


def test_equal_settings_are_equal_text() -> None:
    assert text_of({"b": {2, 1}, "a": None}) == text_of({"a": None, "b": {1, 2}})
    assert text_of([1, [2]]) != text_of([[1], 2]) != text_of(["1", "2"])
    assert text_of(object()) != text_of(object()), "what does not say what it is, is equal to none"


# -- attention -----------------------------------------------------------------------------------


class _Backend:
    pass


class _Other:
    pass


def layers(isa: str | None = None, backend: type = _Backend, device: str = "cpu") -> Any:
    """A configuration with two attention layers, and one of another kind."""
    layer = SimpleNamespace(get_attn_backend=lambda: backend, impl=None)
    if isa is not None:
        layer.isa = isa
    context = {"layers.0": layer, "layers.1": layer, "experts": SimpleNamespace()}
    return SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=context),
        device_config=SimpleNamespace(device_type=device),
    )


def test_how_a_processor_packs_a_block_is_a_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    assert attention_facts(layers("amx")) == attention_facts(layers("amx"))
    assert attention_facts(layers("amx")) != attention_facts(layers("vec"))
    assert attention_facts(layers("amx")) != attention_facts(layers("amx", _Other))
    facts = []
    for has_amx in (True, False):
        monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda has=has_amx: has)
        mixed = layers("vec")
        mixed.compilation_config.static_forward_context |= {
            f"more.{name}": one
            for name, one in layers().compilation_config.static_forward_context.items()
        }
        facts.append([attention_facts(each) for each in (layers("vec"), layers(), mixed)])
    assert facts[0][0] == facts[1][0], "what a processor has and does not use tells nothing"
    assert facts[0][1] != facts[1][1], "unless no layer says what it uses"
    assert facts[0][2] != facts[1][2], "or some do not"


def test_how_a_recurrent_layer_lays_out_its_states_is_a_fact() -> None:
    """vLLM registers a page of states as so many bytes, which are as many in either layout."""

    def facts(conv: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> dict[str, str]:
        layer = SimpleNamespace(
            get_attn_backend=lambda: _Backend,
            get_state_shape=lambda: (conv, (4, 8, 8)),
            get_state_dtype=lambda: (dtype, torch.float32),
        )
        config = layers()
        config.compilation_config.static_forward_context["layers.2"] = layer
        return attention_facts(config)

    assert facts((3, 64)) == facts((3, 64))
    assert facts((3, 64)) != facts((64, 3))
    assert facts((3, 64)) != facts((3, 64), torch.float16)


def test_what_a_device_can_is_a_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = []
    for capability in ((9, 0), (10, 0)):
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda has=capability: has)
        facts.append(attention_facts(layers(device="cuda")))
    assert facts[0] != facts[1]
    assert re.search(r"cuda \(10, 0\)", facts[1]["device"])
