"""this_host: a name for the machine and the file systems that this process sees."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path


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
