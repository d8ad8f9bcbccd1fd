"""Tiny models of random weights whose answers depend on every part of a prompt.

Weights as vLLM's `load_format=dummy` makes them are all but zero: each token is then as likely as
any other, and whatever KV the engine reads the answer is the same, wrong KV's too. Here they are
large enough that attention looks somewhere, and the same in every session.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

INITIALIZER_RANGE = 0.3
"""Standard deviation of all weights: attention has favourites, yet looks at more than one."""


def write_model(folder: Path, config: dict[str, Any]) -> Path:
    """Write the text model of a configuration to its own folder below `folder`; that folder.

    A model has one folder, made once: where it lies is part of what its KV is known by.
    """
    model = folder / str(config["model_type"])
    if not model.exists():
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        made = AutoConfig.for_model(**{"initializer_range": INITIALIZER_RANGE, **config})
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(made, dtype=torch.float32).save_pretrained(model)
    return model
