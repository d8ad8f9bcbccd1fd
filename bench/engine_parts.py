"""A vLLM for GPUs that can be carried, in parts of at most 64 MiB, to a machine that has PyTorch
and no network.

    python -m bench.engine_parts fetch FOLDER [--python 3.12]    make gpu-engine-parts
    python -m bench.engine_parts cut FOLDER WHEEL...
    python -m bench.engine_parts join FOLDER TARGET              make gpu-engine does it
    python -m bench.engine_parts name TARGET                     make gpu does it

`fetch` downloads vLLM's wheel and the packages that it imports to serve text, and cuts them. Of
vLLM stay its Python files and the libraries of PyTorch's stable interface, which load beside
another PyTorch than the one they were built with. `cut` writes FOLDER/00, FOLDER/01 and so on:
carry each one by itself. `join` checks every part, names what is missing or damaged, and unpacks
all into TARGET, to be put into PYTHONPATH. `name` writes there what is known of kvtiers where it is
installed, which a checkout in PYTHONPATH is not.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).parents[1]
VLLM = "vllm==0.32.0"
PART_BYTES = 52 << 20
"""Of a part: what carries it may have a limit of 64 MiB for all that goes at once, and this
repository goes with it."""
LIBRARIES = (
    "_C_stable_libtorch",
    "_moe_C_stable_libtorch",
    "_vllm_fa3_C",
    "cumem_allocator",
    "fs_io_C",
    "spinloop",
)
"""Of vLLM's compiled ones: its kernels, those of mixtures of experts, FlashAttention 3, memory that
can be unmapped, small ones; not FlashAttention 2."""
NOT_NEEDED = ("", ".so", ".a", ".h", ".hpp", ".cuh", ".cu", ".cpp", ".cubin")
"""Endings of what is compiled, or sources in C; vLLM's server in Rust has none."""
NEEDED = (
    "aiohttp",
    "blake3",
    "cachetools",
    "cbor2",
    "cloudpickle",
    "einops",
    "fastapi",
    "huggingface_hub",
    "lark",
    "llguidance",
    "loguru",
    "lmdb",
    "msgspec",
    "numpy",
    "openai",
    "opentelemetry-sdk",
    "opentelemetry-exporter-otlp",
    "partial-json-parser",
    "pillow",
    "prometheus_client",
    "protobuf",
    "psutil",
    "py-cpuinfo",
    "pybase64",
    "pydantic",
    "python-json-logger",
    "pyyaml",
    "pyzmq",
    "redis",
    "regex",
    "requests",
    "rich",
    "safetensors",
    "sentencepiece",
    "setproctitle",
    "tiktoken",
    "tokenizers",
    "tqdm",
    "transformers",
    "typer",
    "uvloop",
    "xxhash",
    "zstandard",
)
"""What vLLM and kvtiers import to serve text; with what these need."""
ALONE = (
    "apache-tvm-ffi",
    "compressed-tensors",
    "depyf",
    "dill",
    "oss-harmony",
    "outlines_core",
    "xgrammar",
)
"""As those, without what they need: PyTorch, which is there."""
MANIFEST = "manifest.json"


class DamagedParts(ValueError):
    """Parts are missing, or are not what was cut."""


def cut(wheels: Sequence[Path], folder: Path, part_bytes: int = PART_BYTES) -> list[Path]:
    """Write the parts of these wheels below `folder`, which is emptied first; their folders. Each
    has a copy of the manifest."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    whole = folder / "whole.zip"
    with zipfile.ZipFile(whole, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in _members(wheels):
            archive.writestr(name, data)
    parts: list[dict[str, Any]] = []
    digest = hashlib.sha256()
    with whole.open("rb") as file:
        while piece := file.read(part_bytes):
            digest.update(piece)
            part = folder / f"{len(parts):02}"
            part.mkdir()
            (part / "part").write_bytes(piece)
            parts.append({"bytes": len(piece), "sha256": hashlib.sha256(piece).hexdigest()})
    whole.unlink()
    manifest = {"sha256": digest.hexdigest(), "parts": parts}
    folders = [folder / f"{number:02}" for number in range(len(parts))]
    for one in folders:
        (one / MANIFEST).write_text(json.dumps(manifest, indent=1))
    return folders


def _members(wheels: Sequence[Path]) -> Iterator[tuple[str, bytes]]:
    """Names and contents of what is carried, each once."""
    seen: set[str] = set()
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if not name.endswith("/") and name not in seen and is_carried(name):
                    seen.add(name)
                    yield name, archive.read(name)
    yield from _entry_points()


def is_carried(name: str) -> bool:
    """Whether a file of a wheel is; of vLLM's compiled ones only the libraries named above."""
    path = PurePosixPath(name)
    if path.parts[0] == "vllm" and path.suffix in NOT_NEEDED:
        return path.name.partition(".")[0] in LIBRARIES
    return ".data" not in PurePosixPath(path.parts[0]).suffixes


def _entry_points() -> Iterator[tuple[str, bytes]]:
    """Metadata of kvtiers, which is not installed there: by it vLLM finds the connector, and a
    chain its tiers and policies."""
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    project_name, version = project["name"], project["version"]
    lines = [
        line
        for group, entries in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{key} = {value}" for key, value in entries.items()), "")
    ]
    folder = f"{project_name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {project_name}\nVersion: {version}\n"
    yield f"{folder}/METADATA", metadata.encode()
    yield f"{folder}/entry_points.txt", "\n".join(lines).encode()


def join(folder: Path, target: Path) -> None:
    """Unpack all parts below `folder` into `target`, which is emptied first. Raises DamagedParts,
    naming them, and leaves `target` as it was."""
    manifests = sorted(folder.glob(f"*/{MANIFEST}"))
    if not manifests:
        raise DamagedParts(f"{folder}: there is no part; make gpu-engine-parts cuts them")
    whole = json.loads(manifests[0].read_text())
    pieces, wrong = [], []
    for number, part in enumerate(whole["parts"]):
        file = folder / f"{number:02}" / "part"
        piece = file.read_bytes() if file.exists() else None
        if piece is None:
            wrong.append(f"{file.parent.name} is not here")
        elif hashlib.sha256(piece).hexdigest() != part["sha256"]:
            wrong.append(f"{file.parent.name} is damaged, or of another cut")
        else:
            pieces.append(piece)
    if wrong:
        raise DamagedParts(f"{folder}: part {', part '.join(wrong)}")
    joined = b"".join(pieces)
    if hashlib.sha256(joined).hexdigest() != whole["sha256"]:
        raise DamagedParts(f"{folder}: the parts are of several cuts")
    shutil.rmtree(target, ignore_errors=True)
    with zipfile.ZipFile(io.BytesIO(joined)) as archive:
        archive.extractall(target)  # which keeps names below it


def name(target: Path) -> None:
    """Write the metadata of kvtiers into `target`, to be put into PYTHONPATH."""
    for member, data in _entry_points():
        file = target / member
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)


def fetch(folder: Path, python: str) -> list[Path]:
    """Download the wheels for a machine of this Python, and cut them; needs a package index."""
    wheels = folder.with_name(f"{folder.name}-wheels")
    platforms = [f"manylinux_{number}_x86_64" for number in ("2_17", "2_28", "2_31", "2_34")]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q"]
    command += ["-d", str(wheels), "--only-binary", ":all:", "--python-version", python]
    for name in (*platforms, "manylinux2014_x86_64", "manylinux1_x86_64"):
        command += ["--platform", name]
    subprocess.run([*command, "--no-deps", VLLM], check=True)
    (engine,) = wheels.glob("vllm-*.whl")
    wanted = asked_of(engine)
    alone, needed = (
        [wanted.get(_plain(name), name) for name in names] for names in (ALONE, NEEDED)
    )
    subprocess.run([*command, "--no-deps", *alone], check=True)
    subprocess.run([*command, *needed], check=True)
    return cut(sorted(wheels.glob("*.whl")), folder)


def asked_of(wheel: Path) -> dict[str, str]:
    """The packages that a wheel asks for where it is installed without extras, in the versions that
    it asks for, by their plain names."""
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(metadata).decode().splitlines()
    asked = [line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist: ")]
    versions = {}
    for one in asked:
        what, _, where = one.partition(";")
        found = re.match(r"([\w.-]+)(?:\[[^]]*\])?\s*(.*)", what.strip())
        if found and not re.search(r'extra ==|^ *platform_machine == "s390x"$', where):
            versions[_plain(found[1])] = found[1] + found[2]
    return versions


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("verb", choices=("fetch", "cut", "join", "name"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("files", type=Path, nargs="*")
    parser.add_argument("--python", default="3.12")
    given = parser.parse_args()
    if given.verb == "name":
        name(given.folder)
        return
    if given.verb == "join":
        (target,) = given.files
        join(given.folder, target)
        return
    made = fetch(given.folder, given.python) if given.verb == "fetch" else None
    for part in made or cut(given.files, given.folder):
        print(part, sum(file.stat().st_size for file in part.iterdir()) >> 20, "MiB")


if __name__ == "__main__":
    main()
