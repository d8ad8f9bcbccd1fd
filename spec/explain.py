"""ExplainSpec: what is kept of each request, to say why it was served as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from spec.fields import ByteSize, refuse_variables

MAX_FOLDER_BYTES = 84
"""A Unix socket's path has 107 bytes at most, and names in the folder have up to 20."""


def _absolute(folder: Path) -> Path:
    if "\0" in str(folder):
        raise ValueError("a path can't hold a NUL character")
    refuse_variables(folder)
    if not folder.is_absolute():
        raise ValueError("write an absolute path: an engine's own folder is another")
    if len(str(folder).encode()) > MAX_FOLDER_BYTES:
        raise ValueError(f"write a path of {MAX_FOLDER_BYTES} bytes at most: it holds sockets")
    return folder


class ExplainSpec(BaseModel):
    """What is kept of each request, to explain why it was served as it was."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: Annotated[Path, AfterValidator(_absolute)] = Field(
        examples=["/run/kvtiers"],
        description="Folder of the sockets that `kvtiers explain` asks, one of each engine. Only "
        "the engine's user may come in. It is made if it is not there.",
    )
    requests: int = Field(
        default=1000,
        ge=1,
        le=1_000_000,
        examples=[1000],
        description="Keep this many requests that have ended.",
    )
    memory: ByteSize = Field(
        default=16 << 20,
        description="Keep fewer requests where they would take more memory than this.",
    )
