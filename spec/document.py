"""Read YAML into data that knows the line of each key.

Only plain YAML is read: mappings, lists, text, numbers, true and false. Dates are text, the merge
key (<<) is a key like any other, and tags for other types are refused, so that no text can grow in
memory or make an object. A key that is written twice is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import yaml
from pydantic import BaseModel
from yaml.constructor import ConstructorError, SafeConstructor
from yaml.reader import ReaderError

from spec.errors import KVTiersError
from spec.fields import mask_secrets

Loc = tuple[int | str, ...]
"""A place in a document: keys and list positions from the top."""

_TAG = "tag:yaml.org,2002:"
_SCALARS = {_TAG + name for name in ("null", "bool", "int", "float")}
_UNDERSTOOD = _SCALARS | {_TAG + name for name in ("str", "seq", "map")}
_REMEDIES = {
    "mapping values are not allowed": "put a value with a colon in quotes, check the indentation",
    "'\\t'": "indent with spaces, not tabs",
    "undefined alias": "put a value that begins with * in quotes",
    "constructor for the tag": "put a value that begins with ! in quotes",
    "tag handle": "put a value that begins with ! in quotes",
    "single document": "keep one document, without ---",
    "could not find expected ':'": "write each line as key: value",
    "expected ',' or": "close the bracket, check the commas",
    "quoted scalar": "close the quote",
    "invalid value": "put it in quotes if it is text",
    "expected <block end>": "give the keys of one mapping the same indent",
    "unhashable key": "write keys as plain words",
}


class YamlFault(NamedTuple):
    """An error of the YAML itself: its 1-based line, the text found, and the remedy."""

    line: int
    found: str
    remedy: str


class NotYaml(KVTiersError, ValueError):
    """The text is not plain YAML. `faults` has one or more."""

    def __init__(self, faults: Sequence[YamlFault]) -> None:
        super().__init__("; ".join(f"line {f.line}: {f.found}" for f in faults))
        self.faults = tuple(faults)


class Document:
    """Data, the class that checks it, what error lines call it, and the YAML nodes that it was read
    from; data without nodes has no lines."""

    def __init__(
        self, data: object, model: type[BaseModel], source: str, root: yaml.Node | None = None
    ) -> None:
        self.data, self.model, self.source, self._root = data, model, source, root

    def known_part(self, loc: Loc) -> Loc:
        """Return a `written_part` without its last step, if that is not in the document."""
        return loc if not loc or _holds(self.value(loc[:-1]), loc[-1]) else loc[:-1]

    def written_part(self, loc: Loc) -> Loc:
        """Return `loc` without the steps that pydantic adds, such as the choices of a union.

        The last step may be a missing key.
        """
        value, written = self.data, []
        for part in loc[:-1]:
            if _holds(value, part):
                written.append(part)
                value = value[part]  # type: ignore[index]  # _holds has looked
        return (*written, *loc[-1:])

    def value(self, loc: Loc) -> object:
        """Return the value at `loc`, which is in the document."""
        value: Any = self.data
        for part in loc:
            value = value[part]
        return value

    def line(self, loc: Loc) -> int | None:
        """Return the 1-based line of the key at `loc`, or of its nearest ancestor."""
        steps = self._steps(loc)
        return None if not steps else steps[-1][0].start_mark.line + 1

    def text(self, loc: Loc) -> str | None:
        """Return the text of the scalar at `loc`, without quotes; None if it is no scalar."""
        steps = self._steps(loc)
        if len(steps) != len(loc) + 1 or not isinstance(steps[-1][1], yaml.ScalarNode):
            return None
        return str(steps[-1][1].value)

    def _steps(self, loc: Loc) -> list[tuple[yaml.Node, yaml.Node]]:
        """Return the key and value nodes from the top to `loc`, as far as they exist."""
        if self._root is None:
            return []
        steps = [(self._root, self._root)]
        for part in loc:
            step = _child(steps[-1][1], part)
            if step is None:
                break
            steps.append(step)
        return steps


def read_yaml(text: str, model: type[BaseModel] = BaseModel, source: str = "") -> Document:
    """Read one YAML document; an empty text gives None as its data. Raises NotYaml."""
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        data = None if root is None else loader.construct_document(root)
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        found = f"the character U+{ord(text[error.position]):04X}"
        raise NotYaml([YamlFault(line, found, "remove it")]) from error
    except yaml.MarkedYAMLError as error:
        raise NotYaml([_syntax(error)]) from error
    except RecursionError as error:
        raise NotYaml([YamlFault(1, "too many brackets in each other", "nest less")]) from error
    if loader.repeated:
        raise NotYaml(loader.repeated)
    return Document(data, model, source, root)


class _Loader(yaml.SafeLoader):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.repeated: list[YamlFault] = []

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        # In place of merging: `<<` is a key as any other here, and merges can grow without bound.
        first: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ConstructorError(None, None, "found unhashable key", key.start_mark)
            line = key.start_mark.line + 1
            if key.value in first:
                word = mask_secrets(key.value[:60])
                found = f"the key {word} again, after line {first[key.value]}"
                self.repeated.append(YamlFault(line, found, "keep one of them"))
            first.setdefault(key.value, line)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> object:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError) as error:
            # `!!int x`, or a number with more digits than Python converts
            raise ConstructorError(None, None, "found invalid value", node.start_mark) from error


_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in resolvers if tag in _SCALARS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.yaml_constructors = {
    tag: construct
    for tag, construct in yaml.SafeLoader.yaml_constructors.items()
    if tag in _UNDERSTOOD
}
_Loader.yaml_constructors[None] = SafeConstructor.construct_undefined


def _syntax(error: yaml.MarkedYAMLError) -> YamlFault:
    mark = error.problem_mark or error.context_mark
    problem = error.problem or "invalid YAML"
    whole = f"{error.context or ''} {problem}"
    remedy = next((do for sign, do in _REMEDIES.items() if sign in whole), "correct the YAML here")
    # A tag or an alias may be a password that its writer forgot to quote: it is not repeated.
    for word in ("undefined alias", "constructor for the tag", "tag handle"):
        if word in problem:
            problem = f"a value that begins with {'*' if 'alias' in word else '!'}"
    line = 1 if mark is None else mark.line + 1
    problem = problem.removeprefix("but ").removeprefix("found ")
    return YamlFault(line, f"invalid YAML ({problem})", remedy)


def _holds(value: object, part: int | str) -> bool:
    if isinstance(value, dict):
        return part in value
    return isinstance(value, list | tuple) and isinstance(part, int) and part < len(value)


def _child(node: yaml.Node, part: int | str) -> tuple[yaml.Node, yaml.Node] | None:
    if isinstance(node, yaml.SequenceNode):
        if isinstance(part, int) and part < len(node.value):
            return node.value[part], node.value[part]
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value == str(part):
                return key, value
    return None
