"""The identity of a model's weights: their content, if they are in files; otherwise none.

A name, a path or a URL may stand for other weights tomorrow, while a tier still holds today's
blocks. KV of weights without an identity is shared with no other process.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISLNK, S_ISREG
from typing import Any

from tiers.engine.identity.digests import FileChanged
from tiers.errors import KVTiersError
from tiers.paths import found_at, mount_of

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
PROGRAMS = (".py", ".json")
"""Other files in a model's folder that decide what it computes: code, processors, scales."""
WITHOUT_EFFECT = {
    "config.json",  # read by the engine, which tells it with overrides
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "generation_config.json",
    "chat_template.json",
    "trainer_state.json",
}
FOLDERS = ("audio_tokenizer", "adapters/*")
"""What some model reads in folders within its own, whatever its configuration says."""
FROM_FILES = {
    "auto",
    "hf",
    "safetensors",
    "pt",
    "mistral",
    "fastsafetensors",
    "instanttensor",
    "sharded_state",
    "runai_streamer",
    "runai_streamer_sharded",
}
"""Load formats that read only the files of the model's folder."""

_COMMIT = re.compile(r"[0-9a-f]{40}")
_BLOB = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}")
"""SHA-256 for large files; git's own SHA-1 digest for small ones."""


class NoIdentity(KVTiersError):
    """These weights have no identity. The text is the reason, and continues "the weights"."""


@dataclass(frozen=True)
class Source:
    """Where weights come from: a unique `name`, or `files`, whose names matter if they are all
    those of a `folder`."""

    name: str = ""
    files: tuple[Path, ...] = ()
    folder: Path | None = None


def source(model: Any, load: Any, hub: Path | None, since: float) -> Source:
    """Return where the weights of `model` come from. `load`: how they are loaded; `hub`: the folder
    for what comes from the model hub; `since`: when the engine was started, in seconds since the
    epoch. Raises NoIdentity, OSError."""
    load_format = format_of(load)
    if "dummy" in load_format:
        return Source(f"random: {model.seed}")
    if load_format not in FROM_FILES:
        raise NoIdentity(
            f"are loaded in a way that kvtiers can't follow (load_format {load_format!r})"
        )
    where = str(getattr(model, "model_weights", "") or model.model)
    if "://" in where:
        raise NoIdentity(f"are behind a URL ({where.partition('://')[0]}://...)")
    path = Path(where)
    if found_at(path) is not None:
        return _files(path)
    return _from_hub(where, model.revision, hub, since)


def format_of(load: Any) -> str:
    """Return the name of the format that weights are loaded in."""
    return str(getattr(load.load_format, "value", load.load_format))


def within(weights: Source, folder: str) -> Source:
    """Return where those of a folder within a model's come from."""
    if weights.folder is None:
        return Source(f"{weights.name} {folder}")
    return _files(weights.folder / folder)


def _files(path: Path) -> Source:
    if not path.is_dir():
        return Source(files=(path,))
    # Whatever can't be looked at would else be no part of the identity.
    below = sorted(one for name in FOLDERS for one in path.glob(name) if one.is_dir())
    every = [one for folder in [path, *below] for one in sorted(folder.iterdir())]
    files = [one for one in every if (at := found_at(one)) and S_ISREG(at.st_mode)]
    if not any(p.suffix in WEIGHTS for p in files):
        raise NoIdentity("are in no file of the model's folder")
    decide = (p for p in files if p.name not in WITHOUT_EFFECT)
    return Source(files=tuple(p for p in decide if p.suffix in (*WEIGHTS, *PROGRAMS)), folder=path)


def _from_hub(name: str, revision: str | None, hub: Path | None, since: float) -> Source:
    is_commit = revision is not None and _COMMIT.fullmatch(revision) is not None
    repository = None if hub is None else hub / f"models--{name.replace('/', '--')}"
    if repository is not None and (snapshot := _snapshot(repository, revision, since)) is not None:
        return _files(snapshot)
    if is_commit:
        return Source(f"{name} {revision}")
    raise NoIdentity(
        "come from a model hub under a name that may stand for others tomorrow (set `revision` to "
        "a commit)"
    )


def _snapshot(repository: Path, revision: str | None, since: float) -> Path | None:
    """Return the snapshot in the hub's folder that the engine loads; None if that is unknown. Of
    several it is the one that the branch's entry names, if that is older than the engine: a process
    that finds another commit at the hub rewrites the entry."""
    snapshots = repository / "snapshots"
    if revision is not None and _COMMIT.fullmatch(revision):
        return snapshots / revision if (snapshots / revision).is_dir() else None
    if not snapshots.is_dir():
        return None
    full = [s for s in snapshots.iterdir() if any(p.suffix in WEIGHTS for p in s.iterdir())]
    if len(full) > 1:
        entry = repository / "refs" / (revision or "main")
        is_old = entry.is_file() and entry.stat().st_ctime <= since
        commit = entry.read_text().strip() if is_old else ""
        full = [snapshot for snapshot in full if snapshot.name == commit]
    return full[0] if len(full) == 1 else None


def identity(weights: Source, digest: Callable[[Path], str], since: float) -> str:
    """Return text that is equal only for equal weights. Slow: reads files through `digest`. Raises
    OSError, and FileChanged for files that may have changed after `since`."""
    if weights.name:
        return weights.name
    whole = hashlib.blake2b(digest_size=16)
    for path in weights.files:
        name = path.name if weights.folder is not None else ""
        blob = _blob(path)
        whole.update(f"{name}:{path.stat().st_size}:{blob or digest(path)}\n".encode())
        # Only then: the engine has loaded what was there before, and not what came meanwhile.
        if blob is None and path.stat().st_ctime > since:
            raise FileChanged(f"{path.name} changed after the engine was started")
        # A commit's folder, or one within, of the hub's cache: its links never change.
        parents = path.parent.resolve().parents[:2]
        if blob is None or "snapshots" not in [one.name for one in parents]:
            _same_links(path, since)
    if weights.folder is not None:
        _same_links(weights.folder, since)
    for folder in {part for path in weights.files for part in _above(path)}:
        # An overlay's folder looks moved once somebody first writes below it.
        if folder == weights.folder or mount_of(folder).kind != "overlay":
            _not_moved(folder, since)
    return whole.hexdigest()


def _blob(path: Path) -> str | None:
    """Return the digest by which a model hub's cache names the file; None outside such a cache. The
    hub's client renames a blob when it is whole, and never changes it afterwards."""
    real = path.resolve()
    in_hub = real.parent.name == "blobs" and real.parent.parent.name.startswith("models--")
    return real.name if in_hub and path.is_symlink() and _BLOB.fullmatch(real.name) else None


def _not_moved(folder: Path, since: float) -> None:
    """Raise FileChanged if `folder`, of weights or above, came to its place after `since`, which
    changes no file's time. Nor does it change its entries; those of weights show themselves."""
    status = folder.stat()
    if status.st_mtime <= since < status.st_ctime:
        what = "was moved, or its owner or mode changed,"
        raise FileChanged(f"{folder}, a folder, {what} after the engine was started")


def _above(path: Path) -> Iterator[Path]:
    """The folders on the way to `path`, through links too."""
    path = path.absolute()
    for place in (path, *(link.parent / link.readlink() for link in links(path))):
        yield from place.parents


def _same_links(path: Path, since: float) -> None:
    """Raise FileChanged if a link on the way to `path` changed after `since`."""
    for link in links(path.absolute()):
        if link.lstat().st_ctime > since:
            raise FileChanged(f"{link.name}, a link, changed after the engine was started")


def links(path: Path) -> Iterator[Path]:
    for part in (path, *path.parents):
        if S_ISLNK(part.lstat().st_mode):
            yield part
            yield from links(part.parent / part.readlink())
