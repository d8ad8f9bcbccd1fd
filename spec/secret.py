"""Secret: the place of a secret; never holds the secret itself."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import PlainSerializer, PlainValidator, WithJsonSchema

from spec.fields import checked

MAX_BYTES = 64 << 10
"""A longer secret is refused; reading stops here, so that an endless file does no harm."""

_HOW = "write {file: /run/secrets/name} or {env: NAME}; a secret itself has no place in this file"


@dataclass(frozen=True)
class Secret:
    """A reference to a secret: the path of a file, or the name of an environment variable."""

    kind: Literal["file", "env"]
    name: str

    def reveal(self) -> str:
        """Read and return the secret, without the line end of a file. Raises ValueError, which
        shows nothing of a secret."""
        if self.kind == "env":
            where = f"the environment variable {self.name}"
            if (found := os.environ.get(self.name)) is None:
                raise ValueError(f"set {where}, which is not set here")
        else:
            where = f"the file {self.name}"
            found = self._read(where).removesuffix("\n").removesuffix("\r")
        if not found or "\0" in found:
            raise ValueError(f"write the secret to {where}, which holds none")
        return found

    def _read(self, where: str) -> str:
        try:
            with open(self.name, "rb") as file:
                data = file.read(MAX_BYTES + 1)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise ValueError(f"let {where} be read, which failed: {reason}") from None
        try:
            text = data.decode()
        except UnicodeDecodeError:
            raise ValueError(f"save {where} as UTF-8, which it is not") from None
        if len(data) > MAX_BYTES:
            raise ValueError(f"name another than {where}, which has more than 64 KiB")
        return text


def parse_secret(value: object) -> Secret:
    """Parse {"file": PATH} or {"env": NAME}, and read the secret to check it. Raises ValueError."""
    if isinstance(value, Secret):
        return value
    if not isinstance(value, Mapping) or len(value) != 1 or not {*value} <= {"file", "env"}:
        raise ValueError(_HOW)
    [(kind, name)] = value.items()
    if not isinstance(name, str) or not name.strip() or "\0" in name or "=" in name:
        raise ValueError(_HOW)
    if kind == "file" and not os.path.isabs(name):
        raise ValueError("write the file's whole path, like {file: /run/secrets/name}")
    secret = Secret(kind, name)
    secret.reveal()
    return secret


SecretField = Annotated[
    Secret,
    PlainValidator(lambda value: checked(parse_secret, value, "a value not shown")),
    PlainSerializer(lambda secret: {secret.kind: secret.name}),
    WithJsonSchema(
        {
            "type": "object",
            "properties": {"file": {"type": "string"}, "env": {"type": "string"}},
            "additionalProperties": False,
            "minProperties": 1,
            "maxProperties": 1,
            "examples": [{"file": "/run/secrets/redis"}, {"env": "REDIS_PASSWORD"}],
        }
    ),
]
"""A Secret in a spec. The secret is read when the spec is made, to check that it exists, and again
when the tier is opened."""
