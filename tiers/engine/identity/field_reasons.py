"""Why a field of the engine's configuration is not a fact, or how the key contains it otherwise."""

from __future__ import annotations

from dataclasses import dataclass

ROUNDING = "the same computation in another order or by another kernel; rounding at most"
SCHEDULING = "decides when and with what else a token is computed, not what is computed of it"
PLACEMENT = "decides where data or processes are, not what they hold"
WATCHING = "tells people or programs how the engine does"
SAMPLING = "decides which tokens come next; tokens are in the block hashes"
PROMPTS = "decides which tokens a prompt has, or which prompts are taken; tokens are in the hashes"
HASHED = "part of the block hashes, or of the mark of a request"
LIMITS = "a limit: what is beyond it is refused"
OUTPUTS = "decides what is made of the last layer's output"
DERIVED = "computed from other fields, which are in the key"
HANDED_ON = "handed on to a field of another class of this table"
STATES = "about recurrent state; kvtiers refuses models that have any"
WEIGHTS = "decides how weights reach the device, not which"
CAPACITY = "how many blocks there are, or bytes for them"
REFUSED = "kvtiers refuses to start with it"

OWN = "a configuration with rows of its own"
BY_WEIGHTS = "in the key: the content of the weights stands for it (see `identity.weights`)"
BY_CONFIG = "in the key: through the digest of the model's own configuration"
BY_LAYOUT = "in the key: through the layout of the paged KV, and its groups"
BY_DEVICE = "in the key: as the device, and what each layer's attention is"
BY_RANK = "in the key: through the ranks' numbers and their layers' shapes"
BY_SALT = "in the key: the chain's salt; its other settings don't change what a block is"


@dataclass(frozen=True)
class Fields:
    """The fields of one class, as names separated by blanks.

    `key`: those whose values are facts. `why`: all others, by the reason why the key does not need
    them.
    """

    key: str
    why: dict[str, str]

    @property
    def keyed(self) -> tuple[str, ...]:
        """The names of the fields whose values are facts."""
        return tuple(self.key.split())

    @property
    def known(self) -> frozenset[str]:
        """The names of all fields."""
        return frozenset(self.key.split()).union(*(names.split() for names in self.why.values()))
