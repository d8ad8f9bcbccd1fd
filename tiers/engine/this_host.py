"""What tells the machine and the file systems that this process sees from all others."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path


def this_host(proc: Path = Path("/proc")) -> str:
    """The host's name and a digest; processes on one machine that see the same mounts agree on it.

    Two containers of one machine are two hosts: a path names another folder in each.
    """
    facts = [os.uname().nodename]
    # A sandbox may have neither; then the name alone tells hosts apart.
    with suppress(OSError):
        facts.append((proc / "sys/kernel/random/boot_id").read_text().strip())
    with suppress(OSError):
        facts.append(os.readlink(proc / "self/ns/mnt"))
    digest = hashlib.blake2b("\0".join(facts).encode(), digest_size=4).hexdigest()
    return f"{facts[0]}#{digest}"
