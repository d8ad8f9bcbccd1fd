"""Tiny models of random weights, written once a session, and what goes with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench import engine_models
from bench.engine_models import INITIALIZER_RANGE
from tests.engine.vllm.tiny_vllm import DEEPSEEK_V4


def write_model(folder: Path, config: dict[str, Any]) -> Path:
    """Write the text model of a configuration to its own folder below `folder`; that folder.

    A model has one folder, made once: where it lies is part of what its KV is known by.
    """
    model = folder / str(config["model_type"])
    if model.exists():
        return model
    if config is DEEPSEEK_V4:
        return write_deepseek_v4(model, config)
    return engine_models.write_model(model, config, "float32")


ADAPTER_RANK = 8


def write_adapter(folder: Path, config: dict[str, Any], seed: int) -> Path:
    """Write a LoRA adapter of random weights for the attention of a model; its folder."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    hidden, width = config["hidden_size"], config["head_dim"]
    outputs = {
        "q_proj": config["num_attention_heads"] * width,
        "v_proj": config["num_key_value_heads"] * width,
    }
    made = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for part, size in outputs.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{part}"
            for half, shape in (("A", (ADAPTER_RANK, hidden)), ("B", (size, ADAPTER_RANK))):
                drawn = torch.randn(shape, generator=made) * INITIALIZER_RANGE
                weights[f"{name}.lora_{half}.weight"] = drawn
    save_file(weights, folder / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": ADAPTER_RANK, "bias": "none"}
    said |= {"lora_alpha": 2 * ADAPTER_RANK, "target_modules": sorted(outputs)}
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return folder


IMAGE_TOKENS = 32
"""Tokens of an image in the prompts of `write_vision_model`: they come first, one block."""


def write_vision_model(folder: Path) -> Path:
    """Write a tiny BLIP-2, its tokenizer and its image processor to a folder of their own."""
    model = folder / "blip-2"
    if not model.exists():
        import torch
        from transformers import (
            Blip2Config,
            Blip2ForConditionalGeneration,
            BlipImageProcessor,
            GPT2TokenizerFast,
        )

        small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        vision = {**small, "intermediate_size": 128, "image_size": 28, "patch_size": 14}
        qformer = {**small, "intermediate_size": 128, "vocab_size": 100, "encoder_hidden_size": 64}
        text = {
            **small,
            "model_type": "opt",
            "num_attention_heads": 2,
            "ffn_dim": 128,
            "word_embed_proj_dim": 64,
            "vocab_size": 1000,
            "max_position_embeddings": 2048,
        }
        config = Blip2Config(
            vision_config=vision,
            qformer_config=qformer,
            text_config=text,
            num_query_tokens=IMAGE_TOKENS,
            image_token_index=999,
            architectures=["Blip2ForConditionalGeneration"],
        )
        torch.manual_seed(0)
        made = Blip2ForConditionalGeneration(config)
        with torch.no_grad():
            for weights in made.parameters():
                if weights.dim() > 1:
                    weights.normal_(std=INITIALIZER_RANGE)
        made.save_pretrained(model)
        words = {f"w{number}": number for number in range(999)}
        GPT2TokenizerFast(
            vocab={**words, "<image>": 999},
            merges=[],
            unk_token="w0",
            bos_token="w1",
            eos_token="w2",
            additional_special_tokens=["<image>"],
        ).save_pretrained(model)
        BlipImageProcessor(size={"height": 28, "width": 28}).save_pretrained(model)
    return model


def write_llama_4(folder: Path) -> Path:
    """Write a tiny Llama 4 to a folder of its own: chunks of attention, experts, and a layer
    without positions, whose queries vLLM scales where requests may be longer than 32,768 tokens;
    here from the first block on, elsewhere from token 8,192 on."""
    import torch
    from transformers import Llama4Config, Llama4ForConditionalGeneration

    text = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "intermediate_size_mlp": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 1000,
        "max_position_embeddings": 65536,
        "no_rope_layers": [1, 1, 1, 0],
        "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
        "attention_chunk_size": 256,
        "floor_scale": 16,
        "attn_scale": 2.0,
        "num_local_experts": 2,
        "interleave_moe_layer_step": 2,
        "moe_layers": [1, 3],
        "pad_token_id": 0,
        "initializer_range": INITIALIZER_RANGE,
    }
    vision = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vision_output_dim": 64,
        "projector_input_dim": 64,
        "projector_output_dim": 64,
        "image_size": 28,
        "patch_size": 14,
    }
    marks = dict.fromkeys(("boi_token_index", "eoi_token_index", "image_token_index"), 1)
    config = Llama4Config(
        text_config=text,
        vision_config=vision,
        architectures=["Llama4ForConditionalGeneration"],
        **marks,
    )
    torch.manual_seed(0)
    Llama4ForConditionalGeneration(config).save_pretrained(folder)
    return folder


def write_drafter(folder: Path, config: dict[str, Any]) -> Path:
    """Write an EAGLE head of random weights, of one layer, for a Llama; its folder."""
    import torch
    from safetensors.torch import save_file

    hidden, wide = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    values = config["num_key_value_heads"] * config["head_dim"]
    shapes = {
        "fc": (hidden, 2 * hidden),
        "layers.0.self_attn.q_proj": (queries, hidden),
        "layers.0.self_attn.k_proj": (values, hidden),
        "layers.0.self_attn.v_proj": (values, hidden),
        "layers.0.self_attn.o_proj": (hidden, queries),
        "layers.0.mlp.gate_proj": (wide, hidden),
        "layers.0.mlp.up_proj": (wide, hidden),
        "layers.0.mlp.down_proj": (hidden, wide),
    }
    made = torch.Generator().manual_seed(0)
    weights = {
        f"{name}.weight": torch.randn(shape, generator=made) * INITIALIZER_RANGE
        for name, shape in shapes.items()
    }
    weights["layers.0.post_attention_layernorm.weight"] = torch.ones(hidden)
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    return folder


def write_deepseek_v4(folder: Path, config: dict[str, Any]) -> Path:
    """Write a tiny DeepSeek V4 to a folder of its own, by the names of its published weights."""
    import torch
    from safetensors.torch import save_file

    made = torch.Generator().manual_seed(0)
    weights: dict[str, torch.Tensor] = {}

    def draw(name: str, rows: int, width: int, factor: float = 1.0) -> None:
        drawn = torch.randn((rows, width), generator=made) * (factor / width**0.5)
        weights[name] = drawn if name.endswith("_fn") else drawn.bfloat16()

    def compress(name: str, width: int, ratio: int) -> None:
        rows = width * (2 if ratio == 4 else 1)  # of four tokens each state is of the four before
        weights[f"{name}.ape"] = torch.randn((ratio, rows), generator=made)
        weights[f"{name}.norm.weight"] = torch.ones(width).bfloat16()
        draw(f"{name}.wkv.weight", rows, hidden)
        draw(f"{name}.wgate.weight", rows, hidden)

    def mix(name: str, rows: int, scales: int) -> None:
        draw(f"{name}_fn", rows, streams * hidden)
        weights[f"{name}_base"], weights[f"{name}_scale"] = torch.zeros(rows), torch.ones(scales)

    hidden, streams, heads = config["hidden_size"], config["hc_mult"], config["num_attention_heads"]
    width, queries, experts = config["head_dim"], config["q_lora_rank"], config["n_routed_experts"]
    outputs = config["o_groups"] * config["o_lora_rank"]
    weights["embed.weight"] = torch.randn((config["vocab_size"], hidden), generator=made).bfloat16()
    draw("head.weight", config["vocab_size"], hidden, 3.0)
    weights["norm.weight"] = torch.ones(hidden).bfloat16()
    mix("hc_head", streams, 1)
    for number in range(config["num_hidden_layers"]):
        layer, ratio = f"layers.{number}", config["compress_ratios"][number]
        attn, ffn = f"{layer}.attn", f"{layer}.ffn"
        for part in ("attn", "ffn"):
            weights[f"{layer}.{part}_norm.weight"] = torch.ones(hidden).bfloat16()
            mix(f"{layer}.hc_{part}", (2 + streams) * streams, 3)
        weights[f"{attn}.attn_sink"] = torch.zeros(heads)
        weights[f"{attn}.q_norm.weight"] = torch.ones(queries).bfloat16()
        weights[f"{attn}.kv_norm.weight"] = torch.ones(width).bfloat16()
        draw(f"{attn}.wq_a.weight", queries, hidden)
        draw(f"{attn}.wq_b.weight", heads * width, queries)
        draw(f"{attn}.wkv.weight", width, hidden)
        draw(f"{attn}.wo_a.weight", outputs, heads * width // config["o_groups"])
        # So that what is attended to outweighs the last token.
        draw(f"{attn}.wo_b.weight", hidden, outputs, 20.0)
        if ratio:
            compress(f"{attn}.compressor", width, ratio)
        if ratio == 4:
            rows, size = config["index_n_heads"], config["index_head_dim"]
            draw(f"{attn}.indexer.wq_b.weight", rows * size, queries)
            draw(f"{attn}.indexer.weights_proj.weight", rows, hidden)
            compress(f"{attn}.indexer.compressor", size, ratio)
        draw(f"{ffn}.gate.weight", experts, hidden)
        weights[f"{ffn}.gate.bias"] = torch.zeros(experts)
        for expert in ("shared_experts", *(f"experts.{one}" for one in range(experts))):
            for name in ("w1", "w3"):
                draw(f"{ffn}.{expert}.{name}.weight", config["moe_intermediate_size"], hidden)
            draw(f"{ffn}.{expert}.w2.weight", hidden, config["moe_intermediate_size"])
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


GROUP = 32
"""Weights of a row that have one scale."""


def write_int4(model: Path, folder: Path) -> Path:
    """Write a model's weights in four bits, as GPTQ does, to a folder of their own; that folder."""
    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(model / "model.safetensors")
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        whole = weights.pop(name)
        rows, width = whole.shape
        groups = whole.view(rows, width // GROUP, GROUP)
        scales = groups.abs().amax(2) / 7
        numbers = (groups / scales[..., None]).round().view(rows, width).int() + 8
        module = name.removesuffix("weight")
        weights[f"{module}qweight"] = packed(numbers).t().contiguous()
        weights[f"{module}scales"] = scales.t().contiguous().bfloat16()
        # A zero is kept less one.
        zeros = torch.full((width // GROUP, rows), 7, dtype=torch.int32)
        weights[f"{module}qzeros"] = packed(zeros)
        weights[f"{module}g_idx"] = torch.arange(width, dtype=torch.int32) // GROUP
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    said = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": said}))
    return folder


def packed(numbers: Any) -> Any:
    """Eight numbers of four bits of a row in each of 32."""
    import torch

    rows, width = numbers.shape
    places = torch.arange(8, dtype=torch.int32) * 4
    return (numbers.view(rows, width // 8, 8) << places).sum(2, dtype=torch.int32)


def write_mtp(folder: Path, config: dict[str, Any]) -> Path:
    """Write a GLM-4 MoE of a Llama's size to `folder`, which guesses with a layer of its own: one
    like its last; the folder."""
    import torch
    from safetensors.torch import load_file, save_file

    last = config["num_hidden_layers"] - 1
    hidden = config["hidden_size"]
    glm = {
        **config,
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "first_k_dense_replace": last,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "n_group": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
    }
    engine_models.write_model(folder, glm, "float32")
    file = folder / "model.safetensors"
    weights = load_file(file)
    before, after = f"model.layers.{last}.", f"model.layers.{last + 1}."
    guessing = {name: one for name, one in weights.items() if name.startswith(before)}
    weights |= {name.replace(before, after): one.clone() for name, one in guessing.items()}
    made = torch.Generator().manual_seed(0)
    both = torch.randn((hidden, 2 * hidden), generator=made) * INITIALIZER_RANGE
    weights[f"{after}eh_proj.weight"] = both
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        weights[f"{after}{norm}.weight"] = torch.ones(hidden)
    weights[f"{after}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    weights[f"{after}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, file, metadata={"format": "pt"})
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**said, "num_nextn_predict_layers": 1}))
    return folder
