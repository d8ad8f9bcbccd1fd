"""Value objects that specs share: sizes, durations and folders as an operator writes them."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    PlainSerializer,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from spec.text import format_number as format_number
from spec.text import format_size as format_size

Value = TypeVar("Value")

_SIZE_UNITS = {
    "B": Decimal(1),
    **{f"{p}B": Decimal(1000**i) for i, p in enumerate(("k", "M", "G", "T", "P"), 1)},
    "KB": Decimal(1000),
    **{f"{p}iB": Decimal(1024**i) for i, p in enumerate(("K", "M", "G", "T", "P"), 1)},
}
_SECONDS = {
    "ms": Decimal("0.001"),
    "s": Decimal(1),
    "m": Decimal(60),
    "h": Decimal(3600),
    "d": Decimal(86400),
}
_MAX_SIZE = 2**63 - 1
_MIN_BARE = 1 << 20
"""A smaller number without a unit is refused where an operator wrote it: GiB was meant, or MB."""
_MIN_SIZE = 4 << 10
"""No block takes less host memory, and what holds none is not what an operator meant."""
WRITTEN = {"written": True}
"""The context in which specs are validated that an operator wrote, not a program."""
_MAX_SECONDS = 36500 * 86400
"""A century, which sockets, locks and servers accept as a timeout."""
_NUMBER = re.compile(r"\s*([-+]?[0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def _parse(value: object, units: Mapping[str, Decimal], bare: str, example: str) -> Decimal:
    """Return the number in `value` times its unit; `bare` is the unit of a number without one."""
    known = ValueError(f"use one of {', '.join(units)}, like {example}")
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise known
    if isinstance(value, str):
        match = _NUMBER.fullmatch(value)
        if match is None:
            raise known
        number, unit = Decimal(match[1]), match[2] or bare
    elif isinstance(value, float) and not math.isfinite(value):
        raise known
    else:
        number, unit = Decimal(value), bare
    if number <= 0:
        raise ValueError(f"write more than zero, like {example}")
    if unit not in units:
        raise known
    return number * units[unit]


def parse_size(value: object) -> int:
    """Parse "8GiB", "500MB" or a plain number of bytes into bytes. Raises ValueError."""
    size = int(_parse(value, _SIZE_UNITS, "B", "8GiB"))
    if not 1 <= size <= _MAX_SIZE:
        raise ValueError("write one byte or more, and less than 8192PiB")
    return size


def parse_duration(value: object) -> float:
    """Parse "250ms", "1.5s", "10m" or "1d" into seconds. Raises ValueError, also without a unit."""
    seconds = float(_parse(value, _SECONDS, "", "30s"))
    if not 0.001 <= seconds <= _MAX_SECONDS:
        raise ValueError("write 1ms or more, and 36500d at most")
    return seconds


def _need_meant(value: object, size: int) -> None:
    """Raise ValueError if `value` is few bytes: a number without a unit, or less than a block."""
    text = str(value).strip()
    if size < _MIN_BARE and text[-1:].isdecimal():
        unit = "GiB" if size < 1024 else "MiB"
        raise ValueError(f"a number alone is bytes; write its unit, like {text}{unit}")
    if size < _MIN_SIZE:
        raise ValueError(f"{text} is less than a block; write 4KiB or more, like 8GiB")


def _written_size(value: object, info: ValidationInfo) -> int:
    """Parse a size, which an operator may not have meant as bytes."""
    size = parse_size(value)
    if (info.context or {}).get("written"):
        _need_meant(value, size)
    return size


_RATE_SECONDS = {unit: _SECONDS[unit] for unit in ("s", "m", "h", "d")} | {"day": _SECONDS["d"]}
_PER = rf"/\s*({'|'.join(_RATE_SECONDS)})\s*"
_RATE = re.compile(rf"([^/]+){_PER}")


def parse_rate(value: object) -> float:
    """Parse "200MB/s" or "2TB/day" into bytes per second. Raises ValueError."""
    match = _RATE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError("write a size per s, m, h or day, like 200MB/s or 2TB/day")
    size = parse_size(match[1])
    _need_meant(match[1], size)
    return size / float(_RATE_SECONDS[match[2]])


def format_rate(rate: float) -> str:
    """Format bytes per second as an operator writes them, exact to a byte per day."""
    a_day = round(rate * 86400)
    if a_day % 86400 == 0:
        return f"{exact_size(a_day // 86400)}/s"
    return f"{exact_size(a_day)}/day"


def exact_size(size: int) -> str:
    """Format a size in bytes, exact and as short as possible, with three decimals at most."""
    exact = [
        f"{Decimal(size * 1000 // int(scale)).scaleb(-3).normalize():f}{unit}"
        for unit, scale in _SIZE_UNITS.items()
        if size >= scale and not size * 1000 % int(scale)
    ]
    return min(exact, key=len)


def format_duration(seconds: float) -> str:
    """Format seconds in the largest unit that divides them, like "1d" or "1.5s", exact."""
    exact = Decimal(repr(seconds))
    for unit in ("d", "h", "m"):
        if exact >= _SECONDS[unit] and exact % _SECONDS[unit] == 0:
            return f"{exact // _SECONDS[unit]}{unit}"
    unit = "s" if exact >= 1 else "ms"
    return f"{(exact / _SECONDS[unit]).normalize():f}{unit}"


def _pattern(units: Mapping[str, Decimal]) -> str:
    return rf"^\s*\+?(?=[0-9.]*[1-9])[0-9]+(\.[0-9]+)?\s*({'|'.join(units)})\s*$"


def _text(pattern: str, *examples: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "pattern": pattern, "examples": [*examples]})


ByteSize = Annotated[
    int,
    BeforeValidator(_written_size),
    PlainSerializer(exact_size, return_type=str, when_used="json"),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "pattern": _pattern(_SIZE_UNITS)},
                {"type": "integer", "minimum": _MIN_BARE},
            ],
            "examples": ["8GiB", "500MB"],
        }
    ),
]
"""A size in bytes, above zero; an operator writes fewer than a mebibyte with their unit."""

Duration = Annotated[
    float,
    BeforeValidator(parse_duration),
    PlainSerializer(format_duration, return_type=str, when_used="json"),
    _text(_pattern(_SECONDS), "250ms", "30s", "1d"),
]
"""A duration in seconds, a millisecond or more; always written with its unit."""

ByteRate = Annotated[
    float,
    BeforeValidator(parse_rate),
    PlainSerializer(format_rate, return_type=str, when_used="json"),
    _text(_pattern(_SIZE_UNITS)[:-1] + _PER + "$", "200MB/s", "2TB/day"),
]
"""Bytes per second, above zero; always written with the time it is for."""


def _named(value: object) -> object:
    if value == "":
        raise ValueError("no path; write it like /var/lib/kvtiers")
    if isinstance(value, str) and "\0" in value:
        raise ValueError("a path can't hold a NUL character")
    refuse_variables(value)
    return value


def refuse_variables(value: object) -> None:
    """Raise ValueError if the text holds a shell's variable, which nobody would replace."""
    found = _VARIABLE.search(str(value))
    if found is not None:
        raise ValueError(f"write what {found[0]} stands for: variables are not replaced here")


_VARIABLE = re.compile(r"\$(?:\w+|\{[^}]*\}?|\([^)]*\)?)")


def _absolute(path: Path) -> Path:
    try:
        return Path(os.path.abspath(path.expanduser()))
    except RuntimeError as error:
        raise ValueError(f"{error} in {str(path)!r}; write the whole path") from error


FolderPath = Annotated[Path, BeforeValidator(_named), AfterValidator(_absolute)]
"""A folder: `~` stands for the home folder, a relative path starts at the working directory."""


def checked(parse: Callable[[object], Value], value: object, shown: str) -> Value:
    """Return `parse(value)`. Raises ValidationError that quotes `shown` where pydantic would quote
    the value, which may hold a secret."""
    try:
        return parse(value)
    except ValueError as error:
        reason = str(error)
    problem = PydanticCustomError("value_error", "Value error, {reason}", {"reason": reason})
    details = InitErrorDetails(type=problem, loc=(), input=shown)
    raise ValidationError.from_exception_data("value", [details])


# Without a colon it may be a password that its writer took for the user's place.
_USERINFO = re.compile(r"(.*?://)?([^:/?#@\s]*:)?.*@", re.S)
_LOST_AT = re.compile(r"(://[^:/?#\s\[]*:)(?!\d{0,5}(?:[/?#]|$))[^/?#\s]*")
_IS_SECRET = "pass|auth|secret|token|sig|key|credential"
_QUERY_SECRET = re.compile(rf"([?&][^=&\s]*(?:{_IS_SECRET})[^=&\s]*=)[^&\s]*", re.I)
_PATH = re.compile(r"/(?!/)(?!.*://)", re.S)


def mask_secrets(text: str) -> str:
    """Return the text of a value with the password of a URL shown as ***; rather masks too much
    than too little."""
    if "@" not in text:
        # Where a port should be there may be a password whose @ was forgotten.
        text = _LOST_AT.sub(r"\1***", text)
    elif not _PATH.match(text):
        text = _USERINFO.sub(r"\1\2***@", text, count=1)
    return _QUERY_SECRET.sub(r"\1***", text)
