"""What lies at a path, on which file system, and on which host."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_MOUNTS = Path("/proc/self/mountinfo")
_MOUNT_OF_HANDLE = re.compile(r"^mnt_id:\s*([0-9]+)$", re.M)


class Mount(NamedTuple):
    """A file system by the kernel's names of its kind, and of the device or server that it is from,
    and its options; "" if unknown."""

    kind: str = ""
    device: str = ""
    options: str = ""


def found_at(path: Path) -> os.stat_result | None:
    """What the system says of a path; None: nothing is there. Raises OSError, which `exists` and
    the like of pathlib take for nothing from Python 3.14 on."""
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None


def mount_of(path: Path) -> Mount:
    """The file system at a path, or at its nearest existing parent."""
    there = next(place for place in (path, *path.parents) if os.path.lexists(place))
    with suppress(OSError):
        # The dot makes the kernel mount an automount.
        handle = os.open(f"{there}/." if there.is_dir() else there, os.O_PATH)
        try:
            found = _MOUNT_OF_HANDLE.search(Path(f"/proc/self/fdinfo/{handle}").read_text())
        finally:
            os.close(handle)
        for line in _MOUNTS.read_text(errors="replace").splitlines():
            ids, _, source = line.partition(" - ")
            if found and ids.split(" ", 1)[0] == found[1]:
                return Mount(*source.split(" ")[:3])
    return Mount()


def foreign(found: os.stat_result) -> str:
    """Why a folder is not for this process's user alone to write to, and the remedy; "": it is."""
    if found.st_uid != os.geteuid():
        us = f"this process runs as {os.geteuid()}; give the folder to that user, or name another"
        return f"belongs to user {found.st_uid}, {us}"
    if found.st_mode & 0o022:
        mode = stat.S_IMODE(found.st_mode)
        return f"has mode {mode:04o}, so others can write to it; chmod it to 0700, or name another"
    return ""


def this_host(proc: Path = Path("/proc")) -> str:
    """Return the host's name and a digest, equal in all processes with the same mounts: the same
    path names different folders in two containers of one machine."""
    facts = [os.uname().nodename]
    # In a sandbox both may be missing. Then only the name distinguishes hosts.
    with suppress(OSError):
        facts.append((proc / "sys/kernel/random/boot_id").read_text().strip())
    with suppress(OSError):
        facts.append(os.readlink(proc / "self/ns/mnt"))
    digest = hashlib.blake2b("\0".join(facts).encode(), digest_size=4).hexdigest()
    return f"{facts[0]}#{digest}"
