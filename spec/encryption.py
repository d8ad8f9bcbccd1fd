"""EncryptionSpec: where the keys of an encrypted tier are, and how they are read."""

from __future__ import annotations

import os
import re
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, field_validator

from spec.secret import Secret

KEY_BYTES = 32
MAX_KEYS = 8
"""A lookup that misses tries every key."""

_KEY = re.compile(rf"[0-9a-fA-F]{{{2 * KEY_BYTES}}}")
_HOW = "write keys of 64 hex digits, one a line, like those of: openssl rand -hex 32"


class EncryptionSpec(BaseModel):
    """Encrypt and authenticate blocks with AES-256-GCM before a tier is given them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

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
    lines = [line.strip() for line in Secret(file=str(path)).reveal().splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys or not all(_KEY.fullmatch(key) for key in keys):
        raise ValueError(_HOW)
    if len(keys) > MAX_KEYS or len({key.lower() for key in keys}) < len(keys):
        raise ValueError(f"write {MAX_KEYS} keys at most, each of them once")
    return tuple(bytes.fromhex(key) for key in keys)


def others_can_read(path: Path) -> bool:
    """Return whether users other than its owner and group may read the file."""
    return bool(os.stat(path).st_mode & 0o004)
