"""OffloadingSpec: the settings of one tier, which also open it. The base of plugins.

A plugin subclasses `StoreSpec` (its tier is a store of blocks) and ships the class as an entry
point of the group `kvtiers.tiers`; the entry point's name is the tier's `type` in the YAML. Only a
tier of ours is a `HostSpec`, which keeps blocks in the engine's own host pool.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from spec.fields import ByteRate, ByteSize, Duration
from spec.findings import DoctorFinding
from spec.policies import AdmissionName
from spec.secret import Secret

KEY_BYTES = 32
MAX_KEYS = 8
"""A lookup that misses tries every key."""

_KEY = re.compile(rf"[0-9a-fA-F]{{{2 * KEY_BYTES}}}")
_HOW = "write keys of 64 hex digits, one a line, like those of: openssl rand -hex 32"


class EncryptionSpec(BaseModel, frozen=True, extra="forbid"):
    """Encrypt and authenticate blocks with AES-256-GCM before a tier is given them."""

    key_file: Path = Field(
        description="A file of keys, 64 hex digits on each line. Blocks are encrypted with the "
        "first key and decrypted with any. To rotate, put a new key on top, and remove the old one "
        "later."
    )

    @field_validator("key_file")
    @classmethod
    def _has_keys(cls, path: Path) -> Path:
        if not path.is_absolute():
            raise ValueError("write the file's whole path")
        read_keys(path)
        return path


def read_keys(path: Path) -> tuple[bytes, ...]:
    """Read the keys from a file. Raises ValueError, whose text shows nothing of a key."""
    lines = [line.strip() for line in Secret("file", str(path)).reveal().splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys or not all(_KEY.fullmatch(key) for key in keys):
        raise ValueError(_HOW)
    if len(keys) > MAX_KEYS or len({key.lower() for key in keys}) < len(keys):
        raise ValueError(f"write {MAX_KEYS} keys at most, each of them once")
    return tuple(bytes.fromhex(key) for key in keys)


# The specs know nothing of `tiers`, which has these (`tiers/store.py`, `tiers/records.py`,
# `tiers/host/`, `tiers/cpu/`). Whoever overrides a method below names them.
TierStore: TypeAlias = Any
StoredRecords: TypeAlias = Any
Marks: TypeAlias = Any
SlotPool: TypeAlias = Any
SlotResidency: TypeAlias = Any

HIT_SOURCES = ("device", "host", "p2p", "disk", "external_unspecified")
"""Names that vLLM has for the source of tokens that were loaded."""

QUEUE_SECONDS = 10.0
"""How long a block may be in flight into a tier whose settings do not limit these blocks."""
INFLIGHT_SHARE = 0.5
"""The part of all slots that blocks in flight into one of several tiers may hold: one that lags
would starve the others."""
BUDGET_BURST = 3600.0
"""Seconds whose part of a write budget may be spent at once."""
STAGING = 256 << 20
"""Bytes, over all ranks, for blocks in flight, where the chain does not say and a step of the
engine needs no more."""
STAGING_STEPS = 2
"""Steps of whose blocks every one has a slot: what one step stores finds room while what the step
before it stored is still in flight."""

TierName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)]


@dataclass(frozen=True)
class StoreContext:
    """Facts of the engine for a store that is opened: the length of every block's payload, in
    bytes, and how many processes of this engine (ranks) hold a part of the tier each."""

    payload_bytes: int
    num_ranks: int = 1


class OffloadingSpec(BaseModel):
    """One entry of `tiers:`. Frozen; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    identity: ClassVar[tuple[str, ...]] = ()
    """Fields that together say where the tier keeps its blocks: two tiers of one type in a chain
    must differ in them. Empty: they need not."""

    hit_source: ClassVar[str] = "external_unspecified"
    """The engine's name for the source of tokens loaded from this tier: one of `HIT_SOURCES`."""

    resizes: ClassVar[bool] = False
    """Whether `capacity` can change while the tier is open: its store has the capability
    `Resizable`, or it is a host tier."""

    type: str = Field(description="The tier type: the name of a kvtiers.tiers entry point.")
    name: TierName | None = Field(
        default=None,
        description="The name in metrics and logs, unique in the chain. Unset: the type.",
    )
    store_threshold: int = Field(
        default=1,
        ge=1,
        le=1000,
        description="Store a block from its Nth request on; 2 keeps one-off blocks out.",
    )
    admission: AdmissionName = Field(
        default="threshold",
        description="Choose the blocks to store. threshold: by store_threshold. Or a policy that a "
        "package provides (docs/policies.md).",
    )
    paused: Literal["reads", "writes", "both"] | None = Field(
        default=None,
        description="Load nothing from the tier for now, store nothing into it, or neither. It "
        "stays open, and keeps its blocks.",
    )

    @property
    def tier_name(self) -> str:
        """The name of the tier in metrics and logs; a chain makes it unique."""
        return self.name or self.type

    @property
    def may_load(self) -> bool:
        return self.paused in (None, "writes")

    @property
    def may_store(self) -> bool:
        return self.paused in (None, "reads")

    @property
    def capacity_bytes(self) -> int:
        """The `capacity` of a tier that has one in bytes; 0: no bound is known here."""
        capacity = getattr(self, "capacity", None)
        return capacity if isinstance(capacity, int) else 0

    def scratch(self, folder: Path) -> Self | None:
        """This tier for a tool that tries it: without a block of the engines', and with none of its
        own where they find it. `folder` is an empty one of this host, which the tool removes
        afterwards. None: it can't be moved, so that tools refuse it."""
        return None

    def examine(self) -> Iterator[DoctorFinding]:
        """Findings about this tier where it will serve, for `kvtiers doctor`, which runs before an
        engine starts and perhaps beside others. It changes nothing that they use: what it makes to
        try something it removes, and it opens nothing that evicts. Runs in a process of its own,
        which is killed after `tiers.doctor.isolated.SECONDS`; so yield each finding as it is found.

        An error of ours or OSError that it raises is one more finding, which keeps the tier from
        serving; a warning that our own code logs is one, too.
        """
        yield from ()


LOADS_AT_ONCE = 2
"""Loads in flight at once from a tier that says nothing else, on each rank."""


class StoreSpec(OffloadingSpec):
    """A tier that is a store: disk, redis, most plugins.

    Rates and `max_inflight` hold for one engine, over all its ranks.
    """

    verifies: ClassVar[bool] = False
    """Whether the store itself detects a block that differs from the one put under its key. One
    that does not is given our checksummed records instead of bare payloads. So is any plugin's."""

    is_prompt: ClassVar[bool] = False
    """Whether `peek` and `touch` of the store never wait, so that the engine's thread may call
    them: if they hang, the engine hangs. Other stores are asked in the background, by `has`."""

    @property
    def host_local(self) -> bool | None:
        """Whether only the host that stored a block can find it, as in a folder or in a server at
        localhost. An engine on several hosts serves without such a tier, which would find
        nothing. None: the store decides; it counts as local if it has `is_prompt` or the
        capability `Clear`."""
        return None

    @property
    def notes_folder(self) -> Path | None:
        """A folder of this host for what engines note of the tier beside its blocks, in files of
        their own: what KV events announced, say. It may not be there yet. None: there is none."""
        return None

    def records(self) -> StoredRecords | None:
        """The records of this tier, for tools that list, check and move what it holds, beside
        engines that use it; the caller closes them. Changes nothing, and makes nothing that is
        missing. None: the tier can't list what it holds. Raises as `open` does."""
        return None

    def marks(self) -> Marks | None:
        """Marks beside this tier's blocks, by which engines know of each other where `records`
        would have to look at all of them; the caller closes them. None: there are none."""
        return None

    deadline: Duration = Field(
        default=10.0,
        description="Limit for one read or write. A longer one counts as failed, and the tier is "
        "not used until a trial succeeds.",
    )
    max_inflight: ByteSize | None = Field(
        default=None,
        description="Limit the bytes in flight into the tier; blocks beyond it are not stored. "
        f"Unset: what the tier stores in {QUEUE_SECONDS:g} seconds, as measured, and half of the "
        "host memory of the chain at most.",
    )
    encryption: EncryptionSpec | None = Field(
        default=None, description="Encrypt blocks and hide their names, with keys from a file."
    )
    store_rate: ByteRate | None = Field(
        default=None, description="Limit the bytes stored per second, like 200MB/s."
    )
    load_rate: ByteRate | None = Field(
        default=None, description="Limit the bytes loaded per second, like 1GB/s."
    )
    loads_at_once: int = Field(
        default=LOADS_AT_ONCE,
        ge=1,
        le=16,
        description="Loads at once on each rank; the next ones wait. More help where a load mostly "
        "waits for its first bytes, and hurt where it waits for bandwidth. Each takes 32MiB of "
        "host memory.",
    )
    store_process: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="Store blocks by a process beside each of the engine's workers, so that stores "
        "do not keep the engine's thread from launching its work. It takes 70 MB of memory, more "
        "for encryption and some plugins, and copies each block once more; with the first such "
        "tier another, of 85 MB, gets a copy to compute checksums. Where the system lets nobody "
        "write into their memory (ptrace_scope 2), or they can't begin, the engine's process does "
        "it, and the tier is degraded. auto: where the engine computes on a GPU.",
    )
    write_budget: ByteRate | None = Field(
        default=None,
        description="Limit the bytes stored in the long run, like 2TB/day, to spare an SSD. An "
        "hour's worth may be stored at once.",
    )

    def stores_apart(self, has_gpu: bool) -> bool:
        """Whether a process of its own stores blocks, beside an engine that has a GPU or not."""
        return has_gpu if self.store_process == "auto" else self.store_process == "always"

    @field_validator("codec", mode="after", check_fields=False)
    @classmethod
    def _suit_encryption(cls, codec: str, info: ValidationInfo) -> str:
        if codec != "none" and info.data.get("encryption") is not None:
            raise ValueError("write none: encrypted blocks can't be made smaller")
        return codec

    @abstractmethod
    def open(self, site: StoreContext) -> TierStore:
        """Open the store for blocks as in `site`. The caller owns the store and closes it.

        Called once for the scheduler and once for each worker (rank). Both may be in one process,
        so two open stores of one tier may share a process; the process may fork afterwards.
        Each call runs on a thread of its own, never two at once for one side. The engine waits for
        it 10 s or `deadline`, whichever is longer, and 1 s once it serves; a later store joins.

        Raises `tiers.errors.TierUnusable` if the settings can't work: the engine serves without
        the tier. Raises `TierNotOpen`, `TierUnavailable` or OSError if it can't be opened for now:
        then `open` is called again, after a second at first and less and less often, until it
        returns. Any other exception counts as TierUnusable. A server that is down needs none of
        these: return the store, whose verbs raise until the server is up.
        """


class HostSpec(OffloadingSpec):
    """A tier of ours whose blocks stay in the host pool of the engine's workers. Its bookkeeping
    runs unguarded, on the engine's scheduler thread."""

    hit_source: ClassVar[str] = "host"

    def scratch(self, folder: Path) -> Self | None:
        return self  # each engine has a host pool of its own

    capacity: ByteSize = Field(
        description="Host memory for blocks, over all ranks of an engine. Each engine of "
        "--data-parallel-size takes as much."
    )
    verify: Literal["never", "always"] = Field(
        default="never",
        description="Verify a block in host memory against its checksum before it is loaded. "
        "Blocks of stores are always verified.",
    )

    @abstractmethod
    def residency(self, pool: SlotPool, max_slots: int) -> SlotResidency:
        """Make the bookkeeping of resident blocks, which keeps `max_slots` at most in the pool."""
