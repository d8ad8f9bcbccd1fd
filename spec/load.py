"""Load a chain from its YAML file, or raise an error with one line for each problem."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from spec.chain import ChainSpec
from spec.document import Document, NotYaml, read_yaml
from spec.errors import SpecError as SpecError
from spec.fields import WRITTEN
from spec.problems import explain, first_lines, problem_line

MAX_BYTES = 1 << 20
"""A larger file is refused; reading stops here, so that an endless device or pipe does no harm."""

Model = TypeVar("Model", bound=BaseModel)

_EXAMPLE = "write version: 1 and tiers: like - {type: cpu, capacity: 8GiB}"


def load_chain(chain: str | Path | Mapping[str, object]) -> ChainSpec:
    """Make a chain from the YAML file at a path, or from a mapping with the same content.

    In a file a number of bytes below a mebibyte needs its unit; a program's mapping may have any.
    Raises SpecError. Opens and connects to nothing that the chain names.
    """
    if isinstance(chain, str | Path):
        return _load(Path(chain), ChainSpec, "write the path of a chain's YAML", _EXAMPLE, WRITTEN)
    if isinstance(chain, Mapping):
        return _validate(Document(dict(chain), ChainSpec, "chain"), ChainSpec, _EXAMPLE, {})
    raise _unreadable("chain", f"a {type(chain).__name__}", "write a file's path")


def parse_chain(text: str) -> ChainSpec:
    """Make a chain from YAML that is in no file. Raises SpecError, NotYaml."""
    return _validate(read_yaml(text, ChainSpec, "chain"), ChainSpec, _EXAMPLE, WRITTEN)


def load_document(
    path: Path, model: type[Model], example: str, context: Mapping[str, object] | None = None
) -> Model:
    """Make a `model` from the YAML (or JSON) file at a path. `example`: what a file without content
    should begin with. `context`: for the model's validators. Raises SpecError, with a line for each
    problem as for a chain."""
    known = {**WRITTEN, **(context or {})}
    return _load(path, model, "write the path of a YAML file", example, known)


def _load(
    path: Path, model: type[Model], remedy: str, example: str, context: Mapping[str, object]
) -> Model:
    source = str(path)
    try:
        document = read_yaml(_text(path, source, remedy), model, source)
    except NotYaml as error:
        lines = [problem_line(source, at, (), found, do) for at, found, do in sorted(error.faults)]
        raise SpecError(first_lines(lines, source)) from None
    return _validate(document, model, example, context)


def _validate(
    document: Document, model: type[Model], example: str, context: Mapping[str, object]
) -> Model:
    if document.data is None:
        raise _unreadable(document.source, "nothing", example, 1)
    try:
        return model.model_validate(document.data, context=dict(context))
    except ValidationError as error:
        # Not from error, which quotes the value: a password, perhaps.
        raise SpecError(explain(error, document)) from None


def _text(path: Path, source: str, remedy: str) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise _unreadable(source, "no such file", remedy) from None
    except IsADirectoryError:
        raise _unreadable(source, "a folder", remedy) from None
    except PermissionError:
        user = f"user {os.getuid()}"
        raise _unreadable(source, "a file closed to us", f"let {user} read it") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise _unreadable(source, f"no readable file ({reason})", "write another path") from None
    if len(data) > MAX_BYTES:
        raise _unreadable(source, "more than 1 MiB", "a chain is some lines of YAML")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        found = f"the byte 0x{data[error.start]:02x}, which is not UTF-8"
        raise _unreadable(source, found, "save the file as UTF-8", number) from None


def _unreadable(source: str, found: str, remedy: str, number: int | None = None) -> SpecError:
    return SpecError([problem_line(source, number, (), found, remedy)])
