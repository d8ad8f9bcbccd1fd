"""What kvtiers would make of an engine's arguments, without its weights: for `kvtiers doctor`."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from spec.findings import DoctorFinding
from tiers.engine.plugin import transfer_config
from tiers.engine.vllm_groups import WHY_OLD, refuse_settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def engine_config(model: Path, arguments: Sequence[str], chain: Path | None) -> VllmConfig:
    """Make the configuration that vLLM would start with. `arguments`: as after `vllm serve MODEL`.
    Raises ValueError, with vLLM's own words for what it refuses."""
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    words = ["--model", str(model), *arguments]
    if chain is not None:
        words += ["--kv-transfer-config", json.dumps(transfer_config(chain))]
    refusal = io.StringIO()
    try:
        with redirect_stderr(refusal):
            parsed, _ = parser.parse_known_args(words)  # the server's own are none of the engine's
    except SystemExit:
        raise ValueError(refusal.getvalue().strip().rpartition("\n")[2]) from None
    try:
        return EngineArgs.from_cli_args(parsed).create_engine_config()
    except ValidationError as error:
        raise ValueError("; ".join(each["msg"] for each in error.errors())) from None


def examine_settings(config: VllmConfig) -> Iterator[DoctorFinding]:
    """Findings about an engine with this configuration."""
    model = config.model_config
    try:
        refuse_settings(config)
    except ValueError as error:
        found, _, change = str(error).rpartition(". ")
        yield DoctorFinding(
            "error", found or str(error), change, "without kvtiers: all prompts computed"
        )
        return
    if getattr(model, "is_hybrid", False) and WHY_OLD:
        found = f"the model has recurrent layers: {WHY_OLD}"
        yield DoctorFinding("error", found, cost="another runner")
    if not config.cache_config.enable_prefix_caching:
        yield DoctorFinding(
            "warning",
            "the engine's own prefix cache is off: each request asks the tiers for all its blocks",
            "leave --no-enable-prefix-caching out",
            "nothing: it takes no memory that the engine has not already",
        )
    runner = "V2" if getattr(config, "use_v2_model_runner", False) else "V1"
    scheduling = "on" if config.scheduler_config.async_scheduling else "off"
    yield DoctorFinding(
        "fine",
        f"{model.architecture}: Model Runner {runner}, async scheduling {scheduling}; both work",
    )
    yield DoctorFinding("can't tell", "the kinds of the model's layers: it names them as it starts")
