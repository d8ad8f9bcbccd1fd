"""Explain what is wrong with a document: one line for each problem, with the remedy."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from spec.chain import FORMAT_VERSION, MAX_TIERS, ChainSpec, name_clashes
from spec.document import Document, Loc
from spec.errors import closest, did_you_mean, one_line, one_of
from spec.fields import mask_secrets
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


def explain(error: ValidationError, document: Document) -> list[str]:
    """Return a line for each error of a document, in the order of the document's lines."""
    problems: list[Problem] = [
        {**problem, "loc": document.written_part(problem["loc"])}
        for problem in error.errors(include_url=False)
    ]
    if document.model is ChainSpec:
        wrong_version = [p for p in problems if p["loc"] == ("version",) and p["type"] != "missing"]
        # Another version may have other keys, so errors about keys would mislead.
        problems = wrong_version or [*problems, *_clashes_so_far(document)]
    problems, rest = problems[:MAX_LINES], problems[MAX_LINES:]
    slips = dict(_slips(problems, document))
    shown = [problem for problem in problems if not _follows(problem, problems, slips)]
    shown.sort(key=lambda problem: document.line(problem["loc"]) or 0)
    lines = dict.fromkeys(_line(problem, document, slips) for problem in shown)
    return first_lines([*lines], document.source, len(rest))


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


def _line(problem: Problem, document: Document, slips: Mapping[Loc, Loc]) -> str:
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
    return problem_line(document.source, document.line(loc), shown, found, remedy)


def _remedy(problem: Problem, document: Document) -> str:
    kind, context = problem["type"], problem.get("ctx", {})
    is_chain = document.model is ChainSpec
    if problem["loc"] == ("version",) and is_chain:
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
    if kind == "dict_type" and is_chain and problem["loc"][:-1] == ("tiers",):
        return _TIER_REMEDY
    remedies = _PLAIN_REMEDIES | (_CHAIN_REMEDIES if is_chain else {})
    if kind in remedies:
        return remedies[kind]
    message = str(problem["msg"]).removeprefix("Value error, ")
    return message[:1].lower() + message[1:]


def _add_it(loc: Loc, document: Document) -> str:
    if document.model is ChainSpec and loc == ("tiers",):
        return _CHAIN_REMEDIES["too_short"]
    if document.model is ChainSpec and loc == ("version",):
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
    model: type[BaseModel] | None = document.model
    inner = loc
    if model is ChainSpec and loc[:1] == ("tiers",) and len(loc) > 1:
        model, inner = _tier_model(loc[:2], document), loc[2:]
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
    each = ((key, settings.get("examples")) for key, settings in _properties(model).items())
    return next((f"{{{key}: {examples[0]}}}" for key, examples in each if examples), "{key: value}")


def _clashes_so_far(document: Document) -> Iterator[Problem]:
    """Yield names given twice; the chain looks for them only if all else is valid."""
    tiers = document.data.get("tiers") if isinstance(document.data, Mapping) else None
    if isinstance(tiers, Sequence) and not isinstance(tiers, str):
        names = [t.get("name") if isinstance(t, Mapping) else None for t in tiers[:MAX_TIERS]]
        for key, remedy in name_clashes(names):
            yield {"type": "remedy", "loc": ("tiers", *key), "msg": remedy}


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
