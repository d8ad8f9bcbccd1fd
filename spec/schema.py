"""The JSON Schema of a chain's YAML, which editors complete and check by."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from pydantic import BaseModel

from spec.chain import ChainSpec, RecordSpec
from spec.offloading import OffloadingSpec
from spec.plugins import BrokenPlugin
from spec.registry import tier_parts, tier_types


def chain_schema(left_out: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Make the schema, in which a tier is of one of the types installed here.

    Broken types are left out; `left_out` is called with a line about each.
    """
    schema = ChainSpec.model_json_schema()
    _write_defaults(schema, ChainSpec)
    definitions = schema["$defs"]
    _write_defaults(definitions["RecordSpec"], RecordSpec)
    del definitions["OffloadingSpec"]  # stands for all types of tiers
    choices = []
    for tier_type in tier_types():
        try:
            definitions |= tier_parts(tier_type, partial(_tier_schema, tier_type))
        except BrokenPlugin as error:
            left_out(f"the tier type {tier_type} is left out: {error}")
            continue
        choices.append({"$ref": f"#/$defs/{tier_type}"})
    schema["properties"]["tiers"]["items"] = {"oneOf": choices}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "kvtiers chain",
        "$defs": definitions,
    }


def _write_defaults(schema: dict[str, Any], spec: type[BaseModel]) -> None:
    # As an operator writes them: 256MiB, where pydantic has the number of bytes.
    for name, written in spec.model_construct().model_dump(mode="json").items():
        schema["properties"][name]["default"] = written


def _tier_schema(tier_type: str, spec: type[OffloadingSpec]) -> dict[str, Any]:
    """Make a tier's schema and those that it refers to, under names with the tier type in front."""
    schema = spec.model_json_schema(ref_template=f"#/$defs/{tier_type}.{{model}}")
    inner = schema.pop("$defs", {})
    _write_defaults(schema, spec)
    described = schema["properties"]["type"].get("description", "The tier's type.")
    schema["properties"]["type"] = {"const": tier_type, "description": described}
    schema["required"] = ["type", *schema.get("required", [])]
    return {tier_type: schema, **{f"{tier_type}.{name}": part for name, part in inner.items()}}
