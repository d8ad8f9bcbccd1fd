"""Load a chain from its YAML file, or raise an error with one line for each problem."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError

from spec.chain import FORMAT_VERSION, MAX_TIERS, ChainSpec, name_clashes
from spec.document import Document, Loc, NotYaml, read_yaml
from spec.errors import SpecError as SpecError
from spec.errors import closest, did_you_mean, one_line, one_of
from spec.fields import WRITTEN, mask_secrets
from spec.plugins import BrokenPlugin, UnknownPlugin
from spec.registry import tier_class, tier_types

MAX_LINES = 50
"""Problems beyond this number are only counted."""

_SHOWN = 80
_PRIVATE = re.compile(r"pass|secret|token|auth|salt|credential|key_file", re.I)
_COUNTS_TOKENS = re.compile(r"_per_token\b|\b(min|step|block)_tokens\b")
"""Keys of ours whose tokens are those of a prompt."""
_PLAIN_REMEDIES = {
    "string_type": "write text, in quotes if it looks like a number, a date, or yes and no",
    "path_type": "write a path, like /var/lib/kvtiers",
    "dict_type": "write a mapping, a line key: value for each",
    "float_parsing": "write a number, like 0.25",
    "int_parsing": "write a whole number, like 2",
    "bool_type": "use true or false",
    "bool_parsing": "use true or false",
    "tuple_type": "write a list, one line that begins with - for each",
    "list_type": "write a list, one line that begins with - for each",
    "invalid_key": "write keys as plain words, in quotes if need be",
}
_TIER_REMEDY = "write a mapping, like {type: cpu, capacity: 8GiB}"
_CHAIN_REMEDIES = {
    "model_type": "write version: 1 and tiers: at the top",
    "too_short": "add at least one tier, like - {type: cpu, capacity: 8GiB}",
    "too_long": f"keep {MAX_TIERS} tiers at most",
}

Problem = Mapping[str, Any]
"""One of the errors that a ValidationError lists."""


def explain(error: ValidationError, document: Document, source: str) -> list[str]:
    """Return a line for each error of a document, in the order of the document's lines."""
    problems: list[Problem] = [
        {**problem, "loc": document.written_part(problem["loc"])}
        for problem in error.errors(include_url=False)
    ]
    if document.model is None:
        wrong_version = [p for p in problems if p["loc"] == ("version",) and p["type"] != "missing"]
        # Another version may have other keys, so errors about keys would mislead.
        problems = wrong_version or [*problems, *_clashes_so_far(document)]
    uncounted = len(problems[MAX_LINES:])
    problems = problems[:MAX_LINES]
    slips = dict(_slips(problems, document))
    lines = [
        (document.line(p["loc"]) or 0, _line(p, document, source, slips))
        for p in problems
        if not _follows(p, problems, slips)
    ]
    texts = [text for _, text in sorted(lines, key=lambda line: line[0])]
    return first_lines(list(dict.fromkeys(texts)), source, uncounted)


def first_lines(lines: list[str], source: str, uncounted: int = 0) -> list[str]:
    """Return the first `MAX_LINES` lines, and one that counts the others and `uncounted`."""
    more = uncounted + len(lines[MAX_LINES:])
    if more == 0:
        return lines
    rest = problem_line(source, None, (), f"{more} more problems", "correct these first")
    return [*lines[:MAX_LINES], rest]


def _follows(problem: Problem, problems: Sequence[Problem], slips: Mapping[Loc, Loc]) -> bool:
    """Return whether a problem only follows from another: a misspelt key is missing, too, and
    pydantic calls a list too short if none of its items is valid."""
    loc = problem["loc"]
    if problem["type"] == "too_short":
        return any(p["loc"][: len(loc)] == loc != p["loc"] for p in problems)
    return problem["type"] == "missing" and loc in slips.values()


def problem_line(source: str, number: int | None, loc: Loc, found: str, remedy: str) -> str:
    """Format one problem as one line, without control characters."""
    place = source if number is None else f"{source}:{number}"
    key = f"{_key(loc)}: " if loc else ""
    return one_line(f"{place}: {key}found {found}; {remedy}")


def _line(problem: Problem, document: Document, source: str, slips: Mapping[Loc, Loc]) -> str:
    kind, loc = problem["type"], problem["loc"]
    if kind == "missing":
        shown, found, remedy = loc, "nothing", _add_it(loc, document)
    elif kind == "extra_forbidden":
        shown, found, remedy = loc, "an unknown key", _instead(loc, document, slips)
    else:
        shown, remedy = document.known_part(loc), _remedy(problem, document)
        found = _describe(shown, document)
        if kind == "invalid_key":
            shown, found = loc[:-1], f"the key {str(problem['input'])[:60]}"
    return problem_line(source, document.line(loc), shown, found, remedy)


def _remedy(problem: Problem, document: Document) -> str:
    kind, context = problem["type"], problem.get("ctx", {})
    if problem["loc"] == ("version",) and document.model is None:
        quoted = "; write it without quotes" if problem["input"] == str(FORMAT_VERSION) else ""
        return f"this kvtiers understands version {FORMAT_VERSION}{quoted}"
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", context["expected"]) or [context["expected"]]
        value = document.value(document.known_part(problem["loc"]))
        near = did_you_mean(value, choices) if isinstance(value, str) else None
        return near or f"use {one_of(choices)}"
    if kind == "string_pattern_mismatch":
        return f"use what matches {context['pattern']}"
    if kind == "model_type" and problem["loc"]:
        model = _model(document.known_part(problem["loc"]), document)
        return f"write its settings, like {_example(model)}"
    if kind == "value_error" and "error" in context:
        return str(context["error"])
    is_chain = document.model is None
    if kind == "dict_type" and is_chain and problem["loc"][:-1] == ("tiers",):
        return _TIER_REMEDY
    remedies = _PLAIN_REMEDIES | (_CHAIN_REMEDIES if is_chain else {})
    if kind in remedies:
        return remedies[kind]
    message = str(problem["msg"]).removeprefix("Value error, ")
    return message[:1].lower() + message[1:]


def _add_it(loc: Loc, document: Document) -> str:
    if document.model is None and loc == ("tiers",):
        return _CHAIN_REMEDIES["too_short"]
    if document.model is None and loc == ("version",):
        return f"add version: {FORMAT_VERSION}"
    if loc[-1] == "type":
        return f"add type: {one_of(tier_types())}"
    model = _model(loc[:-1], document)
    field = _properties(model).get(str(loc[-1]), {})
    examples = field.get("examples") or [field.get("description", "").partition(". ")[0]]
    return f"add {loc[-1]}: {examples[0]}".rstrip(": .")


def _instead(loc: Loc, document: Document, slips: Mapping[Loc, Loc]) -> str:
    """Return what to write instead of an unknown key."""
    if loc in slips:
        return f"did you mean {slips[loc][-1]}?"
    model = _model(loc[:-1], document)
    return f"use {one_of(model.model_fields)}" if model else "remove it"


def _slips(problems: Iterable[Problem], document: Document) -> Iterator[tuple[Loc, Loc]]:
    """Yield unknown keys with the known key that each was probably meant to be."""
    for problem in problems:
        loc = problem["loc"]
        if problem["type"] != "extra_forbidden":
            continue
        model, written = _model(loc[:-1], document), document.value(loc[:-1])
        fields = model.model_fields if model else ("type", "name")
        free = [name for name in fields if isinstance(written, Mapping) and name not in written]
        near = closest(str(loc[-1]), free)
        if near is not None:
            yield loc, (*loc[:-1], near)


def _model(loc: Loc, document: Document) -> type[BaseModel] | None:
    """Return the model that the mapping at `loc` is validated by, or None if it is not known."""
    if document.model is None and loc[:1] == ("tiers",) and len(loc) > 1:
        model, inner = _tier_model(loc[:2], document), loc[2:]
    else:
        model, inner = document.model or ChainSpec, loc
    keys = [key for key in inner if isinstance(key, str)]  # all items of a list have one model
    while keys:
        field = model.model_fields.get(keys.pop(0)) if model else None
        model = _model_in(field.annotation) if field else None
        if keys and field and get_origin(field.annotation) is Mapping:
            del keys[0]  # a name that an operator gave: all values of a mapping have one model
    return model


def _tier_model(loc: Loc, document: Document) -> type[BaseModel] | None:
    tier = document.value(loc)
    tier_type = tier.get("type") if isinstance(tier, Mapping) else None
    try:
        return tier_class(tier_type) if isinstance(tier_type, str) else None
    except (UnknownPlugin, BrokenPlugin):
        return None


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the only model in an annotation such as `TlsSpec | None`, or None."""
    choices = get_args(annotation) or (annotation,)
    models = [c for c in choices if isinstance(c, type) and issubclass(c, BaseModel)]
    return models[0] if len(models) == 1 else None


def _properties(model: type[BaseModel] | None) -> Mapping[str, Any]:
    try:
        return model.model_json_schema()["properties"] if model else {}
    # The one place: a plugin's settings can have what no schema describes.
    except Exception:  # noqa: BLE001
        return {}


def _example(model: type[BaseModel] | None) -> str:
    properties = _properties(model)
    examples = [
        (key, each["examples"][0]) for key, each in properties.items() if "examples" in each
    ]
    return f"{{{examples[0][0]}: {examples[0][1]}}}" if examples else "{key: value}"


def _clashes_so_far(document: Document) -> Iterator[Problem]:
    """Yield names given twice; the chain looks for them only if all else is valid."""
    tiers = document.data.get("tiers") if isinstance(document.data, Mapping) else None
    if isinstance(tiers, Sequence) and not isinstance(tiers, str):
        names = [t.get("name") if isinstance(t, Mapping) else None for t in tiers[:MAX_TIERS]]
        for clash in name_clashes(names):
            yield {"type": "clash", "loc": ("tiers", *clash.loc), "msg": clash.remedy}


def _describe(loc: Loc, document: Document) -> str:
    value = document.value(loc)
    if value is None:
        return "nothing"
    if isinstance(value, Mapping):
        return "a mapping" if value else "an empty mapping"
    if isinstance(value, list | tuple | set):
        return "a list" if value else "an empty list"
    if any(_PRIVATE.search(_COUNTS_TOKENS.sub("", str(part))) for part in loc):
        return "a value not shown here"
    text = document.text(loc)
    text = str(value) if text is None else text
    if len(text) > _SHOWN:
        return f"a text of {len(text)} characters"
    masked = mask_secrets(text)
    return repr(masked) if isinstance(value, str) else masked


def _key(loc: Loc) -> str:
    parts = [f"[{part}]" if isinstance(part, int) else f".{_word(part)}" for part in loc]
    return "".join(parts).removeprefix(".")


def _word(part: str) -> str:
    shown = mask_secrets(part[:_SHOWN])
    return shown if re.fullmatch(r"[\w.-]+", shown) else repr(shown)


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
        document, source = _read(Path(chain), "write the path of a chain's YAML")
        return _validate(document, source, ChainSpec, _EXAMPLE, WRITTEN)
    if isinstance(chain, Mapping):
        return _validate(Document(dict(chain)), "chain", ChainSpec, _EXAMPLE)
    raise _unreadable("chain", f"a {type(chain).__name__}", "write a file's path")


def parse_chain(text: str) -> ChainSpec:
    """Make a chain from YAML that is in no file. Raises SpecError, NotYaml."""
    return _validate(read_yaml(text), "chain", ChainSpec, _EXAMPLE, WRITTEN)


def load_document(
    path: Path, model: type[Model], example: str, context: Mapping[str, object] | None = None
) -> Model:
    """Make a `model` from the YAML (or JSON) file at a path. `example`: what a file without content
    should begin with. `context`: for the model's validators. Raises SpecError, with a line for each
    problem as for a chain."""
    document, source = _read(path, "write the path of a YAML file")
    document.model = model
    return _validate(document, source, model, example, {**WRITTEN, **(context or {})})


def _validate(
    document: Document,
    source: str,
    model: type[Model],
    example: str,
    context: Mapping[str, object] | None = None,
) -> Model:
    if document.data is None:
        raise _unreadable(source, "nothing", example, 1)
    try:
        return model.model_validate(document.data, context=dict(context or {}))
    except ValidationError as error:
        # Not from error, which quotes the value: a password, perhaps.
        raise SpecError(explain(error, document, source)) from None


def _read(path: Path, remedy: str) -> tuple[Document, str]:
    source = str(path)
    try:
        return read_yaml(_text(path, source, remedy)), source
    except NotYaml as error:
        lines = [problem_line(source, at, (), found, do) for at, found, do in sorted(error.faults)]
        raise SpecError(first_lines(lines, source)) from None


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
