"""All checks of a chain, or of a place where one shall run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from spec.chain import ChainSpec
from spec.errors import describe_error
from spec.findings import GRAVITIES, DoctorFinding
from spec.load import load_chain
from spec.offloading import HostSpec, OffloadingSpec, StoreSpec
from tiers.concurrency.executors import IoExecutor
from tiers.control.control_server import FolderRefused, prepare_folder, runtime_folder
from tiers.doctor.isolated import SECONDS, Check, Found, run
from tiers.doctor.machine import examine_machine
from tiers.doctor.software import examine_engine, examine_hashes, examine_plugins

ENGINE_SECONDS = 120.0
"""Limit for making the engine's configuration: its import takes 7 s, more from a cold disk."""
PLUGIN_SECONDS = 60.0
"""Limit for importing all plugins, of which each has 30 s."""


def load_in_time(file: Path, seconds: float) -> ChainSpec:
    """Read a chain. Raises SpecError, and TimeoutError if it does not end: its file, or one that it
    names, may be on a mount that hangs."""
    loader = IoExecutor(1, "load")
    chain = loader.submit(load_chain, file).result(seconds)
    loader.shutdown()  # checks fork
    return chain


def examine(
    chain: ChainSpec | None,
    file: Path | None,
    environ: Mapping[str, str],
    model: Path | None = None,
    arguments: Sequence[str] = (),
    seconds: float = SECONDS,
) -> list[Found]:
    """All findings, the gravest first. `file`: where the chain is written, if a file has it.
    `environ`: the engine's environment variables. `model`, `arguments`: of the engine to be
    started. `seconds`: for the machine, and for each tier."""
    checks = [_check("machine", partial(examine_machine, chain), seconds)]
    checks.append(_check("engine", partial(examine_engine, environ), seconds))
    if model is not None:
        ask = partial(examine_model, model, arguments, file, chain, environ)
        checks.append(_check("engine", ask, ENGINE_SECONDS))
    elif chain is not None:
        checks.append(_check("engine", partial(examine_hashes, chain, environ), seconds))
    folders = () if chain is None else _folders(chain)
    checks += [_check(one[0], partial(_examine_folder, *one), seconds) for one in folders]
    checks.append(_check("plugins", examine_plugins, PLUGIN_SECONDS))
    hangs = DoctorFinding(
        "error",
        f"its place did not answer within {seconds:g} s, or ended the process that asked it",
        "see what hangs there: a mount, a device, a server",
        "nothing for the engine, which would serve without the tier",
    )
    for tier in () if chain is None else chain.tiers:
        checks += [Check(tier.tier_name, partial(_examine_tier, tier), hangs, seconds)]
    return sorted(run(checks), key=lambda found: GRAVITIES.index(found.finding.gravity))


def _check(about: str, findings: Callable[[], Iterator[DoctorFinding]], seconds: float) -> Check:
    silent = DoctorFinding("can't tell", f"the rest: the check did not end within {seconds:g} s")
    return Check(about, findings, silent, seconds)


def _examine_tier(tier: OffloadingSpec) -> Iterator[DoctorFinding]:
    if isinstance(tier, StoreSpec) and tier.encryption is not None:
        from tiers.wrappers.opening import usable_keys  # here, since it imports torch

        keys = usable_keys(tier.encryption)
        yield DoctorFinding("fine", f"blocks are encrypted, with {len(keys)} key(s)")
    found = None
    for found in tier.examine():
        yield found
    if found is None and not isinstance(tier, HostSpec):
        yield DoctorFinding(
            "can't tell",
            f"whether it works: type {tier.type} has no checks of its own",
            f"kvtiers bench --live {tier.tier_name} tries it",
            "some hundred MiB are stored in it, and dropped",
        )


def _folders(chain: ChainSpec) -> Iterator[tuple[str, Path, str, str]]:
    """Of each folder of a chain that is no tier's: the key of it, its use and what hangs on it."""
    if (control := chain.control) is not None:
        cost = "without it kvtiers status, explain and apply reach no engine; tiers serve"
        yield "control", control.folder or runtime_folder(), "engines listen to commands in", cost
    if chain.record is not None:
        cost = "without it no request is recorded; tiers serve"
        yield "record", chain.record.path, "requests are recorded in", cost
    if (folder := chain.events.folder) is not None:
        cost = "what is announced again after a restart; tiers serve"
        yield "events", folder, "what was announced is kept in", cost


def _examine_folder(about: str, folder: Path, use: str, cost: str) -> Iterator[DoctorFinding]:
    # Path.exists raises for a name that is too long. Recorders alone make what a folder is in, too.
    missing = [place for place in (folder, *folder.parents) if not os.path.exists(place)]
    place = missing[-1] if missing and about == "record" else folder
    try:
        prepare_folder(place)
    except FolderRefused as error:
        yield DoctorFinding.of_line("warning", str(error), cost)
        return
    if missing:
        with suppress(OSError):  # an engine may use it by now
            place.rmdir()
    yield DoctorFinding("fine", f"{use} {folder}")


def examine_model(
    model: Path,
    arguments: Sequence[str],
    file: Path | None,
    chain: ChainSpec | None,
    environ: Mapping[str, str],
) -> Iterator[DoctorFinding]:
    """Findings about what kvtiers makes of an engine, in a process of the check's own."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded
    try:
        from tiers.engine.vllm_settings import engine_config, examine_settings
    except ImportError as error:
        yield DoctorFinding(
            "can't tell", f"what kvtiers makes of the model: {describe_error(error)}"
        )
        return
    try:
        config = engine_config(model, arguments, file)
    except (ValueError, OSError, RuntimeError, NotImplementedError) as error:
        yield DoctorFinding("can't tell", f"vLLM makes no configuration of {model}: {error}")
        return
    yield from examine_settings(config)
    if chain is not None:
        yield from examine_hashes(chain, environ, config.cache_config.prefix_caching_hash_algo)
