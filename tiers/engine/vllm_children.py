"""Connectors of vLLM, or of others, as children of our MultiConnector."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, supports_hma

from spec.chain import LOAD_POLICIES, LoadPolicy, name_clashes, resolve_names

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.kv_cache_interface import KVCacheConfig

FOLLOWING = ("KVTiersConnector", "NixlConnector", "NixlPullConnector")
LOADED_BY_ANOTHER: Any = b"loaded by another connector"
"""Stands for the hash of a block in what one connector is shown; no cache ever has it."""


@dataclass(frozen=True)
class ChildConfig:
    """One entry of `connectors`: its unique name, its class, and the config it is made with."""

    name: str
    cls: type[Any]
    vllm_config: VllmConfig

    @property
    def maker(self) -> dict[str, Any]:
        """How another process finds the class again; plain data."""
        transfer = self.vllm_config.kv_transfer_config
        return {
            "kv_connector": transfer.kv_connector,
            "kv_connector_module_path": transfer.kv_connector_module_path,
        }


def child_configs(vllm_config: VllmConfig) -> list[ChildConfig]:
    """The children that `connectors` lists, in load-priority order. An entry holds what a
    KVTransferConfig does, and perhaps a `name`; engine id, role and failure policy are the parent's
    unless it says otherwise. Raises ValueError."""
    parent = vllm_config.kv_transfer_config
    extra = parent.kv_connector_extra_config
    names = child_names(extra.get("connectors", []))
    inherited = "engine_id", "kv_role", "kv_load_failure_policy"
    more = {name: getattr(parent, name) for name in inherited}
    transfers = [*child_transfers(extra, **more)]
    dcp = getattr(vllm_config.parallel_config, "decode_context_parallel_size", 1)
    if dcp > 1 and any(transfer.kv_connector == "NixlConnector" for transfer in transfers):
        raise ValueError(
            f"connectors: vLLM does not see NixlConnector here, and with "
            f"decode_context_parallel_size {dcp} lays tokens out otherwise than nodes with another "
            "one. List both connectors under vLLM's MultiConnector"
        )
    children = []
    for name, transfer in zip(names, transfers, strict=True):
        config = copy.copy(vllm_config)
        config.kv_transfer_config = transfer
        children.append(ChildConfig(name, child_class(transfer), config))
    return children


def child_names(entries: list[dict[str, Any]]) -> list[str]:
    """A unique name for each entry: its own, or that of its connector. Raises ValueError."""
    named = [(str(entry.get("kv_connector")), entry.get("name")) for entry in entries]
    for (index, key), remedy in name_clashes([name for _, name in named]):
        raise ValueError(f"connectors[{index}].{key}: connectors{remedy.removeprefix('tiers')}")
    return resolve_names(named)


def child_class(transfer: KVTransferConfig) -> type[Any]:
    """The class an entry names. Raises ValueError for one that can't be a child."""
    cls: type[Any] = KVConnectorFactory.get_connector_class(transfer)
    if cls.__name__ == "KVTiersConnector" and "connectors" in transfer.kv_connector_extra_config:
        raise ValueError("connectors of connectors: list them all in the outer one")
    return cls


def others_shake_hands(transfer: KVTransferConfig) -> bool:
    """Whether a connector that an engine lists has a handshake, ours apart: vLLM's MultiConnector
    gives the first one's to all, and NIXL's ends the start with any other."""
    listed = child_transfers(transfer.kv_connector_extra_config, kv_role="kv_both")
    shakes = {KVConnectorFactory.get_connector_class(o).get_handshake_metadata for o in listed}
    return shakes > {KVConnectorBase_V1.get_handshake_metadata}


def made_by(maker: Mapping[str, Any]) -> type[Any]:
    return child_class(KVTransferConfig(kv_role="kv_both", **maker))


def identity(vllm_config: VllmConfig) -> str:
    """The same in both roles of one list of children, and different for another list."""
    entries = vllm_config.kv_transfer_config.kv_connector_extra_config["connectors"]
    text = json.dumps(entries, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def load_policy(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> LoadPolicy:
    """Which of the listed connectors serves: `load_policy` beside the list, else `first`. Raises
    ValueError for one that is unknown, or that this model can't have."""
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    policy = extra.get("load_policy", "first")
    if policy not in LOAD_POLICIES:
        raise ValueError(
            f"load_policy is {policy!r}; over a list of connectors it is "
            f"{', '.join(LOAD_POLICIES[:-1])} or {LOAD_POLICIES[-1]}"
        )
    groups = len(kv_cache_config.kv_cache_groups)
    if policy == "stitched" and groups > 1:
        raise ValueError(
            f"load_policy is stitched, and this model has {groups} KV cache groups, of which vLLM "
            "takes no report of single blocks that failed: write first or longest"
        )
    return cast(LoadPolicy, policy)


def following(children: Sequence[ChildConfig]) -> frozenset[int]:
    """The places of those that can load what is behind the prefix that others load: ours, NIXL's
    that pulls, and any whose class says so (`loads_behind_others`)."""
    return frozenset(
        place
        for place, child in enumerate(children)
        if child.cls.__name__ in FOLLOWING or getattr(child.cls, "loads_behind_others", False)
    )


def as_computed(blocks: KVCacheBlocks, count: int) -> KVCacheBlocks:
    """The same blocks, of which the first `count` look as found in the engine's own cache: its
    connectors tell by that which blocks they are to load."""

    def found(block: KVCacheBlock) -> KVCacheBlock:
        block = copy.copy(block)
        block.set_block_hash(LOADED_BY_ANOTHER)
        return block

    groups = (
        [found(b) if i < count and b.block_hash is None else b for i, b in enumerate(group)]
        for group in blocks.blocks
    )
    return replace(blocks, blocks=tuple(groups))


def refuse_groups(children: Sequence[ChildConfig], kv_cache_config: KVCacheConfig) -> None:
    """Raise ValueError if the model has several KV cache groups and a child can serve one only."""
    groups = len(kv_cache_config.kv_cache_groups)
    unfit = [child.name for child in children if not supports_hma(child.cls)]
    if groups > 1 and unfit:
        raise ValueError(
            f"this model has {groups} KV cache groups, and {', '.join(unfit)} can serve one only. "
            "Start vLLM with --disable-hybrid-kv-cache-manager."
        )


def child_transfers(
    extra_config: Mapping[str, Any], **inherited: Any
) -> Iterator[KVTransferConfig]:
    """What the entries of `connectors` say, and what they inherit where they don't."""
    for entry in extra_config.get("connectors", []):
        fields = {key: value for key, value in entry.items() if key != "name"}
        yield KVTransferConfig(**{**inherited, **fields})
