"""The remote tier's findings before an engine starts: each server, and what the tier may do there.

What is stored to try it has keys that no engine has, lives for a minute at most, and is dropped.
"""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from redis.exceptions import ResponseError

from spec.fields import exact_size, format_duration, format_size
from spec.findings import DoctorFinding, Gravity
from tiers.errors import TierError, TierUnavailable
from tiers.remote.deadline import Deadline
from tiers.remote.redis.pools import ConnectionSettings, Pool, reason
from tiers.remote.redis.redis_store import RedisStore
from tiers.remote.redis.topology import FAILURES, SLOTS, open_topology
from tiers.remote.redis.url import RedisUrl
from tiers.remote.trial import judged, look_up, move

PIECE = 1 << 20
MOST_PIECES = 32
TRIAL_TTL = 60.0
SOON = 14 * 86400.0
_OF_SERVER = 16
"""No more than a sixteenth of a server's memory is stored to try it."""


class ExaminedTier(NamedTuple):
    """The settings that are examined. `cert_file`: our own certificate. `open`: opens the store for
    blocks of `PIECE` bytes, with this ttl in seconds."""

    connection: ConnectionSettings
    timeout: float
    ttl: float | None
    user: str
    key_prefix: str
    cert_file: str | None
    open: Callable[[float | None], RedisStore]

    @property
    def url(self) -> RedisUrl:
        return self.connection.url


def examine(tier: ExaminedTier) -> Iterator[DoctorFinding]:
    """Findings about the servers of this tier. Raises TierUnusable, OSError."""
    if tier.cert_file is not None:
        yield _dates(f"tls.cert_file {tier.cert_file}", _end_of(Path(tier.cert_file)))
    with closing(open_topology(tier.connection, tier.timeout)) as topology:
        deadline = Deadline(tier.timeout)
        try:
            masters, homeless = topology.masters(deadline)
        except FAILURES as error:
            yield _unreached(tier, str(tier.url), error, deadline)
            return
        room, up, fails = MOST_PIECES * PIECE, 0, False
        for place, pool in masters.items():
            deadline = Deadline(tier.timeout)
            try:
                info = yield from _info(tier, place, pool, deadline)
            except FAILURES as error:
                gravity: Gravity = "error" if len(masters) == 1 else "warning"
                yield _unreached(tier, place, error, deadline, gravity)
                continue
            up += 1
            yield from _memory(tier, place, info)
            yield from _certificate(tier, place, pool)
            room = min(room, int(info.get("maxmemory") or 0) // _OF_SERVER or room)
        if tier.url.is_cluster:
            fails = yield from _cluster(tier, list(masters.values()), homeless)
        if up and not fails:
            yield from _try_out(tier, max(1, room // PIECE))


def _unreached(
    tier: ExaminedTier, place: str, error: Exception, deadline: Deadline, gravity: Gravity = "error"
) -> DoctorFinding:
    why = reason(error)
    if deadline.is_over and "TLS" not in why:  # redis-py has many words for it
        why = f"no answer within {format_duration(tier.timeout)}"
    change = "start it, or correct url; an engine joins it by itself once it answers"
    if "refused the user" in why:
        change = "add or correct username and password"
    elif "TLS" in why or "certificate" in why:
        change = "correct tls.ca_file, or the server's certificate; redis:// is without TLS"
    cost = "nothing in the engine: until then blocks there are misses"
    return DoctorFinding(gravity, f"{place}: {why}", change, cost)


def _info(
    tier: ExaminedTier, place: str, pool: Pool, deadline: Deadline
) -> Generator[DoctorFinding, None, Mapping[str, str]]:
    """The server's INFO; empty: it may not be asked for. Raises an error of FAILURES."""
    try:
        answer = pool.ask(deadline, b"INFO")
    except ResponseError as error:  # a user may not ask for it, or a proxy does not know it
        yield DoctorFinding(
            "can't tell",
            f"{place}: its version, maxmemory and policy: INFO is refused ({reason(error)})",
            f"ask as another user, or ACL SETUSER {tier.user} +info",
            "nothing",
        )
        return {}
    lines = (answer if isinstance(answer, bytes) else b"").decode(errors="replace").splitlines()
    info = dict(line.split(":", 1) for line in lines if ":" in line)
    name = info.get("server_name", "redis")
    version = info.get(f"{name}_version", info.get("redis_version", "of no version"))
    yield DoctorFinding("fine", f"{place}: {name} {version}")
    if info.get("cluster_enabled") == "1" and not tier.url.is_cluster:
        url = "rediss+cluster://" if tier.url.is_tls else "redis+cluster://"
        yield DoctorFinding(
            "error", f"{place} is a node of a Cluster", f"write {url} in url", "nothing"
        )
    return info


def _memory(tier: ExaminedTier, place: str, info: Mapping[str, str]) -> Iterator[DoctorFinding]:
    if "maxmemory" not in info:
        return
    most, used = int(info["maxmemory"]), int(info.get("used_memory", 0))
    policy = info.get("maxmemory_policy", "")
    lru = "CONFIG SET maxmemory-policy allkeys-lru, and the same in its file"
    held = f"{format_size(used)} of {format_size(most)}"
    if not most:
        whole = int(info.get("total_system_memory", 0))
        half = f" {exact_size(whole // 2 >> 30 << 30)}" if whole >> 31 else ""
        yield DoctorFinding(
            "warning",
            f"{place}: maxmemory is not set: it grows until its host has no memory left",
            f"CONFIG SET maxmemory{half or ' SIZE'}; {lru}",
            "blocks beyond it are evicted",
        )
    elif policy == "noeviction":
        yield DoctorFinding(
            "warning",
            f"{place}: {held} used, and its policy is noeviction: once full it refuses to store",
            lru,
            "it may then evict all that is in it, also what is not of kvtiers",
        )
    elif policy.startswith("volatile-") and tier.ttl is None:
        yield DoctorFinding(
            "warning",
            f"{place}: its policy {policy} evicts keys with a ttl alone, and this tier's have none",
            f"set ttl: 1d in the chain; or {lru}",
            "blocks that nobody asks for go after that time",
        )
    else:
        yield DoctorFinding("fine", f"{place}: {held} used, policy {policy}")


def _certificate(tier: ExaminedTier, place: str, pool: Pool) -> Iterator[DoctorFinding]:
    if not tier.url.is_tls:
        return
    with suppress(*FAILURES):
        found = pool.certificate(Deadline(tier.timeout))
        ends = found.get("notAfter") if found else None
        seconds = ssl.cert_time_to_seconds(ends) if ends else None
        yield _dates(f"{place}: the server's certificate", seconds)


def _end_of(file: Path) -> float | None:
    """When a certificate ends, in seconds since the epoch; None: it can't be read here."""
    try:
        from cryptography.x509 import load_pem_x509_certificate

        return load_pem_x509_certificate(file.read_bytes()).not_valid_after_utc.timestamp()
    except (ImportError, OSError, ValueError):
        return None


def _dates(what: str, ends: float | None) -> DoctorFinding:
    if ends is None:
        return DoctorFinding(
            "can't tell", f"until when {what} is valid", "openssl x509 -noout -enddate"
        )
    left = ends - time.time()
    days = f"{what} is valid for {left / 86400:.0f} days"
    if left > SOON:
        return DoctorFinding("fine", days)
    return DoctorFinding("warning", days, "renew it", "without it the tier is down from then on")


def _cluster(
    tier: ExaminedTier, masters: Sequence[Pool], homeless: int
) -> Generator[DoctorFinding, None, bool]:
    """Findings about the Cluster as a whole; returns whether it serves nothing."""
    state = ""
    for pool in masters:
        with suppress(*FAILURES):
            answer = pool.ask(Deadline(tier.timeout), b"CLUSTER", b"INFO")
            state = "ok" if b"cluster_state:ok" in answer else "fail"
            break
    if homeless or state == "fail":
        yield DoctorFinding(
            "warning" if state != "fail" else "error",
            f"the Cluster's state is {state or 'not known'}, and {homeless} of {SLOTS} hash slots "
            "have no master",
            "start its nodes, or CLUSTER ADDSLOTS; cluster-require-full-coverage no lets the "
            "others serve meanwhile",
            "blocks of the missing slots are misses",
        )
    elif state:
        yield DoctorFinding("fine", f"{len(masters)} masters have all hash slots")
    else:
        yield DoctorFinding(
            "can't tell",
            f"the Cluster's state; {len(masters)} masters have all hash slots",
            f"ACL SETUSER {tier.user} +cluster|info",
            "nothing",
        )
    return state == "fail"


def _try_out(
    tier: ExaminedTier, most: int, ttl: float | None = TRIAL_TTL
) -> Iterator[DoctorFinding]:
    """Do what an engine does, and measure it; `most`: MiB to store."""
    try:
        yield from _exercise(tier.open(ttl), [os.urandom(48) for _ in range(most)])
    except TierUnavailable as error:
        # Only a tier with a ttl renews it.
        if ttl is not None and tier.ttl is None and "pexpire" in str(error).lower():
            yield from _try_out(tier, most, None)
        else:
            yield _refusal(tier, str(error))


def _refusal(tier: ExaminedTier, why: str) -> DoctorFinding:
    extra = " +cluster|slots" * tier.url.is_cluster + " +select" * bool(tier.url.db)
    commands = f"+get +set +exists +touch +pexpire +unlink{extra}"
    rights = f"ACL SETUSER {tier.user} ~{tier.key_prefix}:* {commands}"
    words = {
        "NOPERM": rights,
        "permission": rights,
        "READONLY": "name the master in url, or its sentinels",
        "MISCONF": "make room on the server's disk, or CONFIG SET stop-writes-on-bgsave-error no",
        "no answer in time": "raise timeout, or see what slows the server or the link",
    }
    change = next((words[word] for word in words if word in why), "see the server's log")
    return DoctorFinding("error", why, change, "nothing that is stored")


def _exercise(store: RedisStore, keys: Sequence[bytes]) -> Iterator[DoctorFinding]:
    """Look up, store, load and drop. Raises TierUnavailable."""
    try:
        store.drop(keys[:1])  # before there is anything to be left
        _, took = look_up(partial(store.has, keys[:1]))
        stored, loaded, is_slow, rates = move(store, keys, PIECE, at_once=1)
    finally:
        with suppress(TierError):
            store.drop(keys)
        store.close()
    yield DoctorFinding("fine", f"a look-up takes {took}")
    if not store.may_touch:
        found = "TOUCH is refused: once full, it evicts what faster tiers serve first"
        yield DoctorFinding("warning", found, "let the user +touch", "nothing")
    if not all(stored):
        yield DoctorFinding(
            "error" if not any(stored) else "warning",
            f"it refused {stored.count(False)} of {len(stored)} MiB: it is out of memory",
            "raise its maxmemory, or CONFIG SET maxmemory-policy allkeys-lru",
            "more memory of its host, or what it then evicts",
        )
        return
    if lost := loaded.count(False):
        rates += f", and {lost} of {len(loaded)} MiB were gone at once"
    yield judged(
        rates,
        is_slow or lost > 0,
        "requests would time out or miss",
        "a faster link, more maxmemory, or codec: byteplanes",
        "a codec costs processor time",
    )
