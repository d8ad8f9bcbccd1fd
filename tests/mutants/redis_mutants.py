"""Defects of the Redis tier."""

from __future__ import annotations

from tests.mutants.mutant import Source

STORE = Source("redis", "tiers/remote/redis/redis_store.py")
PIPES = Source("redis", "tiers/remote/redis/pipeline.py")
STREAM = Source("redis", "tiers/remote/redis/stream.py")
DEADLINE = Source("redis", "tiers/remote/deadline.py")
SPEC = Source("redis", "tiers/remote/spec.py")

HAS = '        return self._ask(self._names(keys), "reads", self._limit(len(keys) // ASKED), b"EXISTS")\n'
UNLINK = "        self._unlink(self._names(keys), self._limit(len(keys) // ASKED))\n"

MUTANTS = (
    STORE.but(
        "answers",
        "has answers 500 keys",
        HAS,
        HAS.replace("self._names(keys)", "self._names(keys[:500])").replace(
            'b"EXISTS")', 'b"EXISTS") + [False] * len(keys[500:])'
        ),
    ),
    STORE.but("answers", "has is always True", HAS, "        return [True for _ in keys]\n"),
    STORE.but(
        "scale",
        "drop drops 100 keys",
        UNLINK,
        UNLINK.replace("self._names(keys)", "self._names(keys[:100])"),
    ),
    STORE.but(
        "scale",
        "put takes 32 blocks",
        "        missing = [index for index, here in enumerate(held) if not here]\n",
        "        missing = [index for index, here in enumerate(held) if not here][:32]\n",
    ),
    STORE.but(
        "answers",
        "put is True of what is refused",
        "                held[index] = answer\n",
        "                held[index] = True\n",
        equal="a server with room refuses nothing",
    ),
    STORE.but("answers", "drop does nothing", UNLINK, "        pass\n"),
    STORE.but(
        "answers",
        "keys are cut to 32 bytes",
        "        return [self._prefix + key for key in keys]\n",
        "        return [self._prefix + key[:32] for key in keys]\n",
    ),
    STORE.but(
        "bytes",
        "values are not verified",
        "        verify(header, record.stored)\n",
        "",
    ),
    STORE.but(
        "bytes",
        "a value's key is not compared",
        "header = expect(record.header, block.key, self._payload_bytes)",
        "from tiers.block import parse_header\n        header = parse_header(record.header)",
    ),
    STORE.but(
        "bytes",
        "a known checksum is taken for changed bytes",
        "self._payload_bytes, stored, codec, checksum)",
        "self._payload_bytes, stored, codec)",
    ),
    STORE.but(
        "truth",
        "damage is not counted",
        '        self._damaged.count("value", len(spoilt - others))\n',
        "",
    ),
    STORE.but(
        "truth",
        "damaged values stay",
        "            self._unlink(list(spoilt), deadline)\n",
        "            pass\n",
    ),
    STORE.but(
        "truth",
        "renewed values are not counted",
        '        self._renewed.count("value", sum(held))\n',
        "",
    ),
    STORE.but(
        "truth",
        "a server that fails is a miss",
        '            raise TierUnavailable(f"{self._place}: {reason(error)}") from None\n',
        "            return\n",
    ),
    STORE.but(
        "leaks",
        "close does nothing",
        "        self._topology.close()\n",
        "        LEFT.append(self)\n",
        "EACH = 0.01\n",
        "EACH = 0.01\nLEFT: list[object] = []\n",
    ),
    STORE.but(
        "memory",
        "put keeps the caller's memory",
        "        deadline, ttl = self._limit_of(blocks), self._ttl_ms\n",
        "        deadline, ttl = self._limit_of(blocks), self._ttl_ms\n        self._kept = list(blocks)\n",
    ),
    STORE.but(
        "memory",
        "get keeps the caller's memory",
        "        came: set[int] = set()\n",
        "        came: set[int] = set()\n        self._kept = list(blocks)\n",
    ),
    STORE.but(
        "memory",
        "get writes 20 ms late, too",
        "        self._damaged.count(",
        "        late = [(b.payload, bytes(b.payload)) for b in blocks]\n        __import__('threading').Timer(0.02, lambda: [v.__setitem__(slice(None), d) for v, d in late]).start()\n        self._damaged.count(",
    ),
    STORE.but(
        "leaks",
        "a thread of each store stays",
        "        self._window = Window()\n",
        "        self._window = Window()\n        import threading\n        threading.Thread(target=threading.Event().wait, daemon=True).start()\n",
    ),
    STORE.but(
        "leaks",
        "values are kept",
        "        self._damaged.count(",
        "        LEFT.append([bytes(b.payload) for b in blocks])\n        self._damaged.count(",
        "EACH = 0.01\n",
        "EACH = 0.01\nLEFT: list[object] = []\n",
    ),
    DEADLINE.but(
        "time",
        "it goes on once it is given up",
        "        left = min(self._ends - time.monotonic(), time_left())\n",
        "        time_left()\n        left = self._ends - time.monotonic()\n",
    ),
    STORE.but(
        "time",
        "what had no time to come counts as come",
        "        self._damaged.count(",
        "        hits = [hit or n not in came for n, hit in enumerate(hits)]\n        self._damaged.count(",
    ),
    SPEC.but(
        "spec", "it does not say that it verifies", "    verifies: ClassVar[bool] = True\n", ""
    ),
)
