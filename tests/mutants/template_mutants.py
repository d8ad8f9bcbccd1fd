"""Defects of the store that `kvtiers new-tier` writes."""

from __future__ import annotations

from tests.mutants.mutant import Source

STORE = Source("template", "tiers/testing/template/store.py")
SPEC = Source("template", "tiers/testing/template/spec.py")

HAS = "        with self._lock:\n            return self._held(keys)\n"
HITS = "            hits = [self._fill(block) for block in blocks]\n"
USE = "            self._use([block.key for block, hit in zip(blocks, hits, strict=True) if hit])\n"
GET_END = "        return hits\n"
KEYS = "        keys = [block.key for block in blocks]\n        with self._edit():\n"
STORED = "            self._make_room()\n            return self._held(keys)\n"
DROP = "    def drop(self, keys: Sequence[bytes]) -> None:\n        with self._edit():\n"
USAGE = "        return Usage(blocks, used, self._capacity)\n"
CLOSE = "        with self._lock:\n            self._db.close()\n"
SELF = "        self._path = path\n"
FILL = "        block.payload[:] = row[0]\n"
ORDER = 'FROM blocks ORDER BY used"'
TOP = "            top = self._newest() + len(blocks)\n"
HOST = "    @property\n    def host_local"
OPEN = "        return TemplateStore("
PUT = "    def put(self, blocks: Sequence[Block]) -> list[bool]:\n"
GET = "    def get(self, blocks: Sequence[Block]) -> list[bool]:\n"
SWALLOW = """    def {0}(self, {1}):
        try:
            return self._{0}({1})
        except sqlite3.Error:
            return [{2}] * len({1})

"""
LATE = "threading.Timer(0.02, {}).start()"

MUTANTS = (
    # -- answers -----------------------------------------------------------------------------
    STORE.but("answers", "has is always True", HAS, "        return [True for _ in keys]\n"),
    STORE.but("answers", "has is always False", HAS, "        return [False for _ in keys]\n"),
    STORE.but(
        "answers",
        "has answers a tuple",
        HAS,
        HAS.replace("self._held(keys)", "tuple(self._held(keys))"),
    ),
    STORE.but(
        "answers",
        "has answers for each key once",
        HAS,
        HAS.replace("(keys)", "(list(dict.fromkeys(keys)))"),
    ),
    STORE.but("answers", "get is always True", GET_END, "        return [True] * len(hits)\n"),
    STORE.but("answers", "get is always False", GET_END, "        return [False] * len(hits)\n"),
    STORE.but(
        "answers", "get answers all or nothing", GET_END, "        return [all(hits)] * len(hits)\n"
    ),
    STORE.but("answers", "get answers in reverse", GET_END, "        return hits[::-1]\n"),
    STORE.but(
        "answers",
        "get stops at the first miss",
        GET_END,
        "        first = [*hits, False].index(False)\n        return hits[:first]\n",
    ),
    STORE.but(
        "answers",
        "get misses what follows a miss",
        GET_END,
        "        first = [*hits, False].index(False)\n        return [n < first for n in range(len(hits))]\n",
    ),
    STORE.but(
        "answers",
        "put answers None",
        STORED,
        STORED.replace("return self._held(keys)", "return None"),
    ),
    STORE.but(
        "answers",
        "put says False of what is held",
        STORED,
        STORED.replace("return self._held(keys)", "return [False] * len(keys)"),
    ),
    STORE.but("answers", "put of nothing raises", KEYS, "        blocks[0]\n" + KEYS),
    STORE.but(
        "answers",
        "drop of an unknown key raises",
        DROP,
        DROP + "            if not all(self._held(keys)):\n                raise KeyError\n",
    ),
    STORE.but("answers", "drop does nothing", DROP, DROP + "            keys = ()\n"),
    STORE.but("answers", "drop leaves the last key", DROP, DROP + "            keys = keys[:-1]\n"),
    STORE.but(
        "answers",
        "drop drops all",
        DROP,
        DROP + '            self._db.execute("DELETE FROM blocks")\n',
    ),
    STORE.but(
        "answers",
        "a block is found by its key's beginning",
        'find = "SELECT payload FROM blocks WHERE key = ?"',
        'find = "SELECT payload FROM blocks WHERE substr(key, 1, 32) = substr(?, 1, 32)"',
    ),
    STORE.but(
        "answers",
        "keys are texts",
        "(key, top - age, len(payload), payload)",
        '(key.decode("latin-1").strip().encode("latin-1"), top - age, len(payload), payload)',
    ),
    STORE.but(
        "answers",
        "a key again is not stored and False",
        KEYS,
        KEYS + "            before = self._held(keys)\n",
        STORED,
        STORED.replace(
            "return self._held(keys)",
            "return [h and not b for h, b in zip(self._held(keys), before)]",
        ),
    ),
    STORE.but(
        "answers",
        "a dropped key is not stored again",
        DROP + "            self._delete(keys)\n",
        DROP
        + "            self._delete(keys)\n            self._gone = getattr(self, '_gone', set()) | set(keys)\n",
        "for age, (key, payload) in enumerate(blocks):\n",
        "for age, (key, payload) in enumerate(blocks):\n                if key in getattr(self, '_gone', ()):\n                    continue\n",
    ),
    STORE.but(
        "answers",
        "clear empties every namespace",
        "WHERE key >= ? AND substr(key, 1, ?) = ? LIMIT",
        "WHERE ? != ? OR 1 OR ? LIMIT",
    ),
    STORE.but(
        "answers", "clear does nothing", "            self._delete(key for (key,) in rows)\n", ""
    ),
    STORE.but(
        "answers",
        "clear says that there is more for ever",
        "        return len(rows) == CLEAR_BATCH\n",
        "        return True\n",
    ),
    STORE.but(
        "answers",
        "clear says that there is no more",
        "        return len(rows) == CLEAR_BATCH\n",
        "        return False\n",
    ),
    # -- wrong bytes -------------------------------------------------------------------------
    STORE.but(
        "bytes",
        "the last byte is lost",
        "len(payload), payload),",
        "len(payload), bytes(payload[:-1]) + b'\\0'),",
    ),
    STORE.but(
        "bytes",
        "a miss fills the payload with zeros and is a hit",
        "        if row is None or len(row[0]) != len(block.payload):\n            return False\n",
        "        if row is None or len(row[0]) != len(block.payload):\n            block.payload[:] = bytes(len(block.payload))\n            return True\n",
    ),
    STORE.but(
        "bytes",
        "another length is served in part",
        " or len(row[0]) != len(block.payload)",
        "",
        FILL,
        "        block.payload[:len(row[0])] = row[0][:len(block.payload)]\n",
    ),
    STORE.but(
        "bytes",
        "a shorter one is served",
        "len(row[0]) != len(block.payload)",
        "len(row[0]) < len(block.payload)",
        FILL,
        "        block.payload[:] = row[0][:len(block.payload)]\n",
    ),
    STORE.but(
        "bytes",
        "the first version stays",
        "REPLACE INTO",
        "INSERT OR IGNORE INTO",
        equal="a key that is held already may be skipped",
    ),
    STORE.but(
        "bytes",
        "the block of the neighbour",
        "len(payload), payload),",
        "len(payload), blocks[age - 1].payload),",
    ),
    STORE.but(
        "bytes",
        "all ends with zeros past 64 KiB",
        "len(payload), payload),",
        "len(payload), bytes(payload[:65536]).ljust(len(payload), b'\\0')),",
    ),
    STORE.but(
        "bytes",
        "writes past the payload",
        FILL,
        FILL
        + "        import ctypes; from tiers.block import address_of\n        ctypes.memset(address_of(block.payload) + len(block.payload), 0, 1)\n",
    ),
    STORE.but(
        "bytes",
        "a payload is padded to 512 bytes",
        "len(payload), payload),",
        "len(payload), bytes(payload) + bytes(-len(payload) % 512)),",
    ),
    # -- eviction ----------------------------------------------------------------------------
    STORE.but("eviction", "the newest goes first", ORDER, 'FROM blocks ORDER BY used DESC"'),
    STORE.but("eviction", "any goes", ORDER, 'FROM blocks ORDER BY random()"'),
    STORE.but("eviction", "by key", ORDER, 'FROM blocks ORDER BY key"'),
    STORE.but(
        "eviction",
        "the head goes first",
        "(key, top - age, len",
        "(key, top - len(blocks) + 1 + age, len",
    ),
    STORE.but(
        "eviction", "a call's blocks are of one age", "(key, top - age, len", "(key, top, len"
    ),
    STORE.but("eviction", "all blocks are of one age", TOP, "            top = len(blocks)\n"),
    STORE.but("eviction", "loads are not noted", USE, "            pass\n"),
    STORE.but(
        "eviction",
        "only the first load is noted",
        USE,
        "            self._use([blocks[0].key][: hits[0]])\n",
    ),
    STORE.but(
        "eviction",
        "loads are noted in reverse",
        "[(top - age, key) for age, key in enumerate(keys)]",
        "[(top - age, key) for age, key in enumerate(keys[::-1])]",
    ),
    STORE.but("eviction", "loads count as old", "[(top - age, key) for", "[(-age, key) for"),
    STORE.but(
        "eviction",
        "full: nothing is taken",
        KEYS,
        KEYS
        + "            if self._totals()[1] + sum(len(b.payload) for b in blocks) > self._capacity:\n                return [False] * len(blocks)\n",
    ),
    STORE.but(
        "eviction",
        "full: all goes",
        "                if too_much <= 0:\n                    break\n",
        "",
    ),
    STORE.but(
        "eviction",
        "one block too many goes",
        "if too_much <= 0:",
        "if too_much < -size:",
        equal="a store may evict more than it must",
    ),
    STORE.but(
        "eviction",
        "one too few goes",
        "too_much -= size\n",
        "too_much -= size + 65536 * (not victims[1:])\n",
    ),
    STORE.but(
        "eviction", "nothing is evicted", "        if too_much > 0:\n", "        if False:\n"
    ),
    STORE.but(
        "eviction",
        "twice the capacity is held",
        "too_much = self._totals()[1] - self._capacity\n",
        "too_much = self._totals()[1] - 2 * self._capacity\n",
    ),
    STORE.but(
        "eviction",
        "put says True for what is evicted",
        STORED,
        STORED.replace("return self._held(keys)", "return [True] * len(keys)"),
    ),
    STORE.but(
        "eviction",
        "resize does nothing",
        "            self._capacity = capacity\n            self._make_room()\n",
        "            pass\n",
    ),
    STORE.but(
        "eviction",
        "resize evicts nothing until a put",
        "            self._capacity = capacity\n            self._make_room()\n",
        "            self._capacity = capacity\n",
    ),
    # -- scale -------------------------------------------------------------------------------
    STORE.but(
        "scale",
        "has answers 500 keys",
        HAS,
        "        with self._lock:\n            return self._held(keys[:500]) + [False] * len(keys[500:])\n",
    ),
    STORE.but(
        "scale",
        "has of 1,000 keys raises",
        HAS,
        "        if len(keys) > 999:\n            raise sqlite3.OperationalError('too many SQL variables')\n"
        + HAS,
    ),
    STORE.but(
        "scale",
        "has of 8,000 keys raises",
        HAS,
        "        if len(keys) > 8000:\n            raise sqlite3.OperationalError('too many SQL variables')\n"
        + HAS,
    ),
    STORE.but(
        "scale",
        "has takes 2 ms a key",
        HAS,
        HAS.replace("return", "__import__('time').sleep(0.002 * len(keys))\n            return"),
    ),
    STORE.but("scale", "drop drops 100 keys", DROP, DROP + "            keys = keys[:100]\n"),
    STORE.but(
        "scale",
        "drop of 256 keys raises",
        DROP,
        "    def drop(self, keys: Sequence[bytes]) -> None:\n        if len(keys) > 255:\n            raise ValueError\n        with self._edit():\n",
    ),
    STORE.but(
        "scale",
        "put takes 32 blocks",
        "enumerate(blocks):\n                self._db",
        "enumerate(blocks[:32]):\n                self._db",
    ),
    STORE.but(
        "scale",
        "get loads 32 blocks",
        HITS,
        "            hits = [n < 32 and self._fill(block) for n, block in enumerate(blocks)]\n",
    ),
    STORE.but(
        "scale",
        "get of 33 blocks raises",
        "        with self._lock:\n" + HITS,
        "        if len(blocks) > 32:\n            raise ValueError\n        with self._lock:\n"
        + HITS,
    ),
    STORE.but(
        "scale",
        "a block above 512 KiB is refused",
        KEYS,
        "        if any(len(b.payload) > 1 << 19 for b in blocks):\n            return [False] * len(blocks)\n"
        + KEYS,
    ),
    # -- truth -------------------------------------------------------------------------------
    STORE.but(
        "truth",
        "usage says twice the blocks",
        USAGE,
        "        return Usage(2 * blocks, used, self._capacity)\n",
    ),
    STORE.but(
        "truth", "usage says no bytes", USAGE, "        return Usage(blocks, 0, self._capacity)\n"
    ),
    STORE.but(
        "truth",
        "usage says a tenth of the bytes",
        USAGE,
        "        return Usage(blocks, used // 10, self._capacity)\n",
    ),
    STORE.but(
        "truth",
        "usage says the capacity at most",
        USAGE,
        "        return Usage(blocks, min(used, self._capacity), self._capacity)\n",
        "too_much = self._totals()[1] - self._capacity\n",
        "too_much = self._totals()[1] - 2 * self._capacity\n",
    ),
    STORE.but(
        "truth",
        "usage never falls",
        USAGE,
        "        self._most = max(used, getattr(self, '_most', 0))\n        return Usage(blocks, self._most, self._capacity)\n",
    ),
    STORE.but(
        "truth",
        "usage says twice the capacity",
        USAGE,
        "        return Usage(blocks, used, 2 * self._capacity)\n",
        "too_much = self._totals()[1] - self._capacity\n",
        "too_much = self._totals()[1] - 2 * self._capacity\n",
    ),
    STORE.but(
        "truth", "usage has no capacity", USAGE, "        return Usage(blocks, used, None)\n"
    ),
    STORE.but("truth", "evictions are not counted", "        self._evicted += len(victims)\n", ""),
    STORE.but("truth", "every block counts as renewed", "sum(self._held(keys))", "len(keys)"),
    STORE.but(
        "truth",
        "put swallows errors",
        PUT,
        SWALLOW.format("put", "blocks", "True") + PUT.replace(" put(", " _put("),
    ),
    STORE.but(
        "truth",
        "has swallows errors",
        HAS,
        "        try:\n            with self._lock:\n                return self._held(keys)\n        except sqlite3.Error:\n            return [False] * len(keys)\n",
    ),
    STORE.but(
        "truth",
        "get swallows errors",
        GET,
        SWALLOW.format("get", "blocks", "False") + GET.replace(" get(", " _get("),
    ),
    STORE.but(
        "truth",
        "drop swallows errors",
        DROP,
        "    def drop(self, keys: Sequence[bytes]) -> None:\n        import contextlib\n        with contextlib.suppress(sqlite3.Error), self._edit():\n",
    ),
    # -- memory ------------------------------------------------------------------------------
    STORE.but(
        "memory",
        "put scribbles",
        KEYS,
        "        import ctypes; from tiers.block import address_of\n        for block in blocks:\n            ctypes.memset(address_of(block.payload), 0, 1)\n"
        + KEYS,
    ),
    STORE.but(
        "memory",
        "put scribbles and mends it 20 ms late",
        STORED,
        STORED.replace(
            "            return",
            "            import ctypes; from tiers.block import address_of\n            at = address_of(blocks[0].payload)\n            "
            + LATE.format("lambda: ctypes.memset(at, 0, 1)")
            + "\n            return",
        ),
    ),
    STORE.but(
        "memory",
        "get writes 20 ms late, too",
        GET_END,
        "        late = [(b.payload, bytes(b.payload)) for b, hit in zip(blocks, hits) if hit]\n        def again():\n            for view, data in late:\n                view[:] = data\n        "
        + LATE.format("again")
        + "\n"
        + GET_END,
    ),
    STORE.but(
        "memory",
        "get writes 20 ms late only",
        FILL,
        "        data = row[0]\n        "
        + LATE.format("lambda: block.payload.__setitem__(slice(None), data)")
        + "\n",
    ),
    STORE.but(
        "memory",
        "put keeps the caller's memory",
        KEYS,
        "        self._kept = list(blocks)\n" + KEYS,
    ),
    STORE.but(
        "memory",
        "get keeps the caller's memory",
        GET_END,
        "        self._kept = list(blocks)\n" + GET_END,
    ),
    STORE.but(
        "memory",
        "put stores 20 ms late",
        "            for age, (key, payload) in enumerate(blocks):\n",
        "            later = blocks\n            blocks = ()\n            def write():\n                with self._edit():\n                    for b in later:\n                        self._db.execute('REPLACE INTO blocks VALUES (?, 1, ?, ?)', (b.key, len(b.payload), b.payload))\n            "
        + LATE.format("write")
        + "\n            for age, (key, payload) in enumerate(blocks):\n",
        STORED,
        STORED.replace("return self._held(keys)", "return [True] * len(keys)"),
    ),
    STORE.but(
        "memory",
        "copies of all that was put are kept",
        SELF,
        SELF + "        self._copies = []\n",
        KEYS,
        KEYS + "            self._copies += [bytes(block.payload) for block in blocks]\n",
    ),
    STORE.but(
        "memory",
        "copies outlive the store",
        "CLEAR_BATCH = 256\n",
        "CLEAR_BATCH = 256\nCOPIES = []\n",
        KEYS,
        KEYS + "            COPIES.extend(bytes(block.payload) for block in blocks)\n",
    ),
    STORE.but(
        "memory",
        "a miss of the memory's end raises",
        FILL,
        "        block.payload.cast('Q')[:] = memoryview(row[0]).cast('Q')\n",
    ),
    # -- leaks -------------------------------------------------------------------------------
    STORE.but(
        "leaks",
        "close does nothing",
        CLOSE,
        "        pass\n",
        SELF,
        SELF + "        OPEN.append(self)\n",
        "CLEAR_BATCH = 256\n",
        "CLEAR_BATCH = 256\nOPEN = []\n",
    ),
    STORE.but(
        "leaks",
        "close raises the second time",
        CLOSE,
        "        if getattr(self, '_shut', False):\n            raise ValueError('closed')\n        self._shut = True\n"
        + CLOSE,
    ),
    STORE.but(
        "leaks",
        "a thread stays",
        SELF,
        SELF + "        threading.Thread(target=threading.Event().wait, daemon=True).start()\n",
    ),
    STORE.but(
        "leaks",
        "a thread of each get stays",
        GET_END,
        "        threading.Thread(target=threading.Event().wait, daemon=True).start()\n" + GET_END,
    ),
    STORE.but(
        "leaks",
        "a file stays open",
        SELF,
        SELF + "        import os\n        self._fd = os.open(path.parent, os.O_RDONLY)\n",
    ),
    STORE.but(
        "leaks",
        "each put opens a file",
        KEYS,
        "        import os\n        os.open(self._path, os.O_RDONLY)\n" + KEYS,
    ),
    STORE.but(
        "leaks",
        "a child process stays",
        SELF,
        SELF + "        import subprocess\n        subprocess.Popen(['sleep', '30'])\n",
    ),
    STORE.but(
        "leaks",
        "a get of another length leaves a file open",
        "            return False\n" + FILL,
        "            __import__('os').open(self._path, 0)\n            return False\n" + FILL,
    ),
    STORE.but(
        "leaks",
        "a lock for each key that is asked for stays",
        HAS,
        "        self._locks = getattr(self, '_locks', {})\n        for key in keys:\n            self._locks.setdefault(key, threading.Lock())\n"
        + HAS,
    ),
    STORE.but(
        "leaks",
        "a connection stays",
        SELF,
        SELF
        + "        import socket\n        self._pair = [s.detach() for s in socket.socketpair()]\n",
    ),
    # -- time --------------------------------------------------------------------------------
    STORE.but(
        "time",
        "get never ends",
        HITS,
        HITS + "            while True:\n                threading.Event().wait(0.1)\n",
    ),
    STORE.but("time", "close never ends", CLOSE, "        threading.Event().wait()\n"),
    STORE.but(
        "time",
        "a second put never ends",
        KEYS,
        "        if getattr(self, '_once', False):\n            threading.Event().wait()\n        self._once = True\n"
        + KEYS,
    ),
    # -- processes and threads ---------------------------------------------------------------
    STORE.but(
        "processes",
        "each store is for itself",
        "path, timeout=timeout,",
        "':memory:', timeout=timeout,",
    ),
    STORE.but(
        "processes",
        "each process is for itself",
        "path, timeout=timeout,",
        "f'{path}{__import__(\"os\").getpid()}', timeout=timeout,",
    ),
    STORE.but(
        "processes",
        "opening empties it",
        "self._db.executescript(TABLE)\n",
        "self._db.executescript('DROP TABLE IF EXISTS blocks;' + TABLE)\n",
    ),
    STORE.but(
        "processes",
        "closing empties it",
        CLOSE,
        "        with self._lock:\n            try:\n                self._db.execute('DELETE FROM blocks')\n            except sqlite3.Error:\n                pass\n            self._db.close()\n",
    ),
    STORE.but(
        "processes",
        "threads share a connection without a lock",
        "        self._lock = threading.Lock()\n",
        "        import contextlib\n        self._lock = contextlib.nullcontext()\n",
    ),
    STORE.but(
        "processes",
        "only the thread that opened it may use it",
        "check_same_thread=False",
        "check_same_thread=True",
    ),
    STORE.but(
        "processes",
        "a fork's child removes the file at its end",
        SELF,
        SELF
        + "        import os\n        os.register_at_fork(after_in_child=lambda: path.unlink(missing_ok=True))\n",
    ),
    STORE.but(
        "processes",
        "a fork's child never ends",
        SELF,
        SELF
        + "        import os\n        os.register_at_fork(after_in_child=lambda: threading.Event().wait())\n",
    ),
    STORE.but(
        "processes",
        "a fork leaves the parent locked",
        SELF,
        SELF
        + "        import os\n        os.register_at_fork(before=lambda: self._lock.acquire(blocking=False))\n",
    ),
    # -- spec --------------------------------------------------------------------------------
    SPEC.but(
        "spec",
        "verifies is said and not done",
        HOST,
        "    verifies: ClassVar[bool] = True\n\n" + HOST,
    ),
    SPEC.but(
        "spec",
        "host_local is False",
        "        return True  # other hosts",
        "        return False  # other hosts",
    ),
    SPEC.but(
        "spec",
        "host_local is a text",
        "        return True  # other hosts",
        "        return 'yes'  # other hosts",
    ),
    SPEC.but(
        "spec", "is_prompt without peek", HOST, "    is_prompt: ClassVar[bool] = True\n\n" + HOST
    ),
    SPEC.but("spec", "resizes is False", "    resizes: ClassVar[bool] = True\n", ""),
    SPEC.but(
        "spec",
        "scratch is the same place",
        '        return self.model_copy(update={"path": folder})\n',
        "        return self\n",
    ),
    SPEC.but(
        "spec", "capacity is not obeyed", "self.capacity, self.deadline", "1 << 40, self.deadline"
    ),
    SPEC.but(
        "spec",
        "host_local hangs",
        "        return True  # other hosts",
        "        __import__('threading').Event().wait()\n        return True  # other hosts",
    ),
)
