"""Defects of the packs, as the object tier keeps them."""

from __future__ import annotations

from tests.mutants.mutant import Source

STORE = Source("object", "tiers/remote/packs/pack_store.py")
OVER_FILES = Source("shared", "tiers/remote/packs/pack_store.py")
"""Over a directory, whose writes the kit can let fail."""
PACK = Source("object", "tiers/remote/packs/pack.py")
SEARCH = Source("object", "tiers/remote/packs/search.py")
RECENT = Source("object", "tiers/recent.py")
BUCKET = Source("object", "tiers/remote/object/obstore_bucket.py")
SPEC = Source("object", "tiers/remote/object_spec.py")

KEPT = Source("capacity", "tiers/remote/object/upkeep.py")
LISTED = Source("capacity", "tiers/remote/object/obstore_bucket.py")
EVICTOR = Source("capacity", "tiers/remote/packs/evictor.py")
LEASE = Source("capacity", "tiers/remote/packs/lease.py")

MARKED = "        held[span.at : span.stop] = [True] * span.count\n"
MATCHED = "count = 0 if index is None else min(index.matches(keys, at), stop - at)\n"
RENEWED = '                self._renewed.count("value", sum(held))\n'
VERIFIED = (
    "                verify(expect(each[number], block.key, self._payload_bytes), block.payload)\n"
)
DROPPED = "        firsts = packs | set(keys)\n"
GIVEN = "        given = [blocks[places[0]] for places in piece.places]\n        keys, size"
ENDS = "        self._threads.shutdown(wait=False, cancel_futures=True)\n"
HITS = "        hits = [False] * len(blocks)\n        groups, deadline"

MUTANTS = (
    # -- answers -----------------------------------------------------------------------------
    SEARCH.but(
        "answers", "has finds one block of a pack", MARKED, "        held[span.at] = True\n"
    ),
    SEARCH.but(
        "answers",
        "has takes a pack for all that is asked",
        MATCHED,
        MATCHED.replace("index.matches(keys, at)", "len(keys) - at"),
    ),
    STORE.but("answers", "has says what is known", "known=False)", "known=True)"),
    STORE.but(
        "answers",
        "put is True of all",
        "            if error is not None or all(created):\n                break\n        return held\n",
        "            if error is not None or all(created):\n                break\n        return [True] * len(held)\n",
    ),
    STORE.but(
        "answers",
        "get is True of what is damaged",
        "            _mark(hits, good or [])\n",
        "            _mark(hits, piece.places)\n",
    ),
    STORE.but(
        "answers",
        "get does not look for packs that begin later",
        "            self._load_by_index(left, blocks, hits, deadline)\n",
        "            pass\n",
    ),
    STORE.but(
        "answers",
        "a key twice in a batch is filled once",
        "                    blocks[place].payload[:] = block.payload\n",
        "                    pass\n",
    ),
    STORE.but(
        "answers",
        "a key twice in a batch is one hit",
        "                good.append(places)\n",
        "                good.append(places[:1])\n",
    ),
    STORE.but(
        "answers",
        "drop leaves packs that do not begin with the key",
        DROPPED,
        "        firsts = set(keys)\n",
    ),
    STORE.but(
        "answers", "what is dropped stays known", "        self._known.discard(firsts)\n", ""
    ),
    STORE.but(
        "answers",
        "a drop leaves the first key",
        "[name_of(key) for key in firsts], self",
        "[name_of(key) for key in firsts - set(keys[:1])], self",
    ),
    PACK.but(
        "answers",
        "a pack is named by the end of its key",
        "    rest = key[NAMESPACE_BYTES:].hex()\n    return",
        "    rest = key[NAMESPACE_BYTES:][-16:].hex()\n    return",
    ),
    PACK.but(
        "answers",
        "a pack's name has no namespace",
        'return f"{key[:NAMESPACE_BYTES].hex()}/{rest[-2:]}/{rest}"',
        "return f\"{'00' * NAMESPACE_BYTES}/{rest[-2:]}/{rest}\"",
    ),
    PACK.but(
        "answers",
        "a match is one block too many",
        "                return count\n",
        "                return count + 1\n",
    ),
    PACK.but(
        "answers",
        "a match is one block too few",
        "        return most\n",
        "        return max(1, most - 1)\n",
    ),
    # -- prefixes ----------------------------------------------------------------------------
    SEARCH.but(
        "prefixes",
        "held forgets the last group",
        "    return spans[-1].stop if spans else base\n",
        "    return base + 1\n",
    ),
    SEARCH.but(
        "prefixes",
        "held takes the last group for whole",
        "    return spans[-1].stop if spans else base\n",
        "    return min(base + pack_blocks, len(keys))\n",
    ),
    SEARCH.but(
        "prefixes",
        "held asks for the first group alone",
        "    low, high = -1, len(heads)",
        "    heads = heads[:1]\n    low, high = -1, len(heads)",
    ),
    SEARCH.but(
        "prefixes",
        "held goes on behind a gap",
        "                high = number\n                break\n",
        "                high = number\n",
    ),
    SEARCH.but(
        "prefixes", "a walk ends with its first pack", "        ahead = AHEAD\n", "        break\n"
    ),
    SEARCH.but(
        "prefixes",
        "a walk goes beyond its end",
        "min(index.matches(keys, at), stop - at)",
        "index.matches(keys, at)",
        equal="who asks takes of a span what it has asked for",
    ),
    SEARCH.but(
        "prefixes",
        "what follows missing packs is not looked for",
        "        spans = yield from walk(keys, first, stop)\n",
        "        pass\n",
        survives="a block whose predecessor is gone may be a miss, and costs no answer",
    ),
    SEARCH.but(
        "prefixes",
        "what is known ends with one pack",
        "        at += max(1, count)\n",
        "        at += max(1, count)\n        if not skips:\n            break\n",
        equal="a guess or a walk that is short costs a look, which finds the same packs",
    ),
    SEARCH.but(
        "prefixes",
        "of a window the first blocks of groups alone are asked for",
        "        asked = [key for key in asked if key not in found]\n",
        "        asked = []\n",
    ),
    SEARCH.but(
        "prefixes",
        "get looks for no pack that begins in the midst",
        "    if at < stop:\n        found = yield",
        "    if False:\n        found = yield",
    ),
    SEARCH.but(
        "prefixes",
        "a block that is in two packs is found twice",
        "        at += max(1, count)\n",
        "        at += 1\n",
        survives="two reads fill one block at once; tests/remote/packs/test_search.py sees it",
    ),
    SEARCH.but(
        "prefixes",
        "what is known is asked for again",
        "    at = max((end for end in ends if end <= first), default=0)\n",
        "    at = 0\n",
        equal="it costs a put of an answer's block a read for each block before",
    ),
    STORE.but(
        "prefixes",
        "prompts are packed without their places",
        "            if prefix is None:\n",
        "            if True:\n",
        survives="each block is a pack then: slower, which the bench of objects shows",
    ),
    STORE.but(
        "prefixes",
        "a group begins where its batch does",
        "            base = prefix.at - prefix.at % size\n",
        "            base = prefix.at\n",
        survives="each block is a pack then: slower, which the bench of objects shows",
    ),
    STORE.but(
        "prefixes",
        "all of a batch is one group",
        "group = found.get((id(prefix.keys), base))",
        "group = next((g for (k, _), g in found.items() if k == id(prefix.keys)), None)",
    ),
    STORE.but(
        "prefixes",
        "a pack has one block of a row",
        "[group.wanted[number] for number in row])\n        for row in _rows(group.left(held))",
        "[group.wanted[number] for number in row[:1]])\n        for row in _rows(group.left(held))",
    ),
    STORE.but(
        "prefixes",
        "a pack spans what is held",
        "        for row in _rows(group.left(held))\n",
        "        for row in [group.left(held)] if group.left(held)\n",
    ),
    STORE.but(
        "prefixes",
        "prompts are counted from the one before",
        "        return [results[number] for number in range(len(probes))]\n",
        "        return [results[number] for number in results]\n",
    ),
    STORE.but(
        "prefixes",
        "the second prompt is not looked up",
        "probes = [search.held(keys, self._pack_blocks) for keys in prompts]",
        "probes = [search.held(keys if n != 1 else [], self._pack_blocks) for n, keys in enumerate(prompts)]",
    ),
    STORE.but("prefixes", "a pack put second is not looked at again", "TRIES = 3\n", "TRIES = 1\n"),
    # -- bytes -------------------------------------------------------------------------------
    STORE.but(
        "bytes",
        "records are not verified",
        VERIFIED,
        "                expect(each[number], block.key, self._payload_bytes)\n",
    ),
    STORE.but(
        "bytes",
        "a record's key is not compared",
        VERIFIED,
        VERIFIED.replace(
            "expect(each[number], block.key, self._payload_bytes)",
            "__import__('tiers.block').block.parse_header(each[number])",
        ),
    ),
    STORE.but("bytes", "a known checksum is not kept", ", checksum=block.checksum)", ")"),
    PACK.but(
        "bytes",
        "an index is not verified",
        "    if found != xxhash",
        "    if False and found != xxhash",
        equal="a record proves itself, and a wrong index leads to none",
    ),
    STORE.but(
        "bytes",
        "an index of other blocks is taken",
        "            if not index.matches([key]):\n",
        "            if False:\n",
        equal="the block that begins a pack is in its name, and its record proves itself",
    ),
    STORE.but(
        "bytes",
        "records lie one byte off",
        "start = record_start(piece.at, self._payload_bytes)",
        "start = record_start(piece.at, self._payload_bytes) + 1",
    ),
    STORE.but(
        "bytes",
        "another length is served",
        "        if index.payload_bytes != self._payload_bytes:\n            return None\n",
        "",
        equal="a record says its length, and it is compared",
    ),
    BUCKET.but(
        "bytes", "a pack replaces one of its name", 'parts, "create")', 'parts, "overwrite")'
    ),
    BUCKET.but("bytes", "a read begins at 0", '{"range": (start, start +', '{"range": (0, '),
    # -- scale -------------------------------------------------------------------------------
    SEARCH.but(
        "scale",
        "has answers 500 keys",
        "walk_known(keys, 0, len(keys), found.get",
        "walk_known(keys, 0, min(len(keys), 500), found.get",
    ),
    STORE.but(
        "scale",
        "drop drops 100 keys",
        "[name_of(key) for key in firsts]",
        "[name_of(key) for key in list(firsts)[:100]]",
    ),
    STORE.but(
        "scale",
        "put takes 32 blocks",
        "            pieces = [piece for group in groups for piece in _missing(group, held)]\n",
        "            pieces = [piece for group in groups[:32] for piece in _missing(group, held)]\n",
    ),
    STORE.but(
        "scale",
        "get loads 32 groups",
        "        pieces = [piece for group in groups for piece in self._guess(group, hits)]\n        gone",
        "        groups = groups[:32]\n        pieces = [piece for group in groups for piece in self._guess(group, hits)]\n        gone",
    ),
    # -- truth -------------------------------------------------------------------------------
    STORE.but("truth", "renewed blocks are not counted", RENEWED, "                pass\n"),
    STORE.but(
        "truth", "new blocks count as renewed", RENEWED, RENEWED.replace("sum(held)", "len(held)")
    ),
    STORE.but(
        "truth",
        "renewed blocks count at each try",
        "            if not attempt:\n",
        "            if True:\n",
        equal="it shows only where another store puts the same block between a look and a put",
    ),
    STORE.but(
        "truth",
        "damage is not counted",
        '                self._damaged.count("record", len(piece.places) - len(good))\n',
        "",
    ),
    STORE.but(
        "truth",
        "a damaged pack stays",
        "            self._bucket.delete([name_of(key) for key in spoilt])\n",
        "            pass\n",
    ),
    OVER_FILES.but(
        "truth",
        "what put fails at is a miss",
        "            if error is not None and not any(created):\n                raise error\n",
        "",
    ),
    STORE.but(
        "truth",
        "what get fails at is a miss",
        "        if error is not None and not any(hits):\n            raise error\n",
        "",
        equal="the look for other packs, which follows, raises the same",
    ),
    STORE.but(
        "truth",
        "what has fails at is a miss",
        "or not (answered or any(answers))):\n",
        "):\n",
    ),
    OVER_FILES.but(
        "truth",
        "what fails is held",
        "            for piece, is_new in zip(pieces, created, strict=True):\n                if is_new:\n",
        "            for piece, is_new in zip(pieces, created, strict=True):\n                if is_new is not False:\n",
    ),
    RECENT.but(
        "truth",
        "what is known is known for ever",
        "        elif now >= self._until:\n            self._turn()\n",
        "        elif False:\n            self._turn()\n",
        survives="it takes a minute to be seen; tests/test_recent.py has a clock of its own",
    ),
    # -- memory ------------------------------------------------------------------------------
    STORE.but(
        "memory",
        "a verb does not wait for what it began",
        "            wait(futures[1:])",
        "            wait(futures[:0])",
        survives="unless it is closed meanwhile, which tests/remote/packs/test_pack_store.py does, "
        "each result is waited for all the same",
    ),
    STORE.but(
        "memory", "put keeps the caller's memory", GIVEN, "        self._kept = blocks\n" + GIVEN
    ),
    STORE.but(
        "memory",
        "get keeps the caller's memory",
        HITS,
        "        self._kept = list(blocks)\n" + HITS,
    ),
    STORE.but(
        "memory",
        "put scribbles",
        GIVEN,
        "        from ctypes import memset\n        from tiers.block import address_of\n        memset(address_of(blocks[0].payload), 0, 1)\n"
        + GIVEN,
    ),
    STORE.but(
        "memory",
        "get writes 20 ms late, too",
        HITS,
        "        late = [b.payload for b in blocks]\n        __import__('threading').Timer(0.02, lambda: [v.__setitem__(0, 1) for v in late]).start()\n"
        + HITS,
    ),
    BUCKET.but(
        "memory",
        "a read fills one byte too many",
        "            copy(left[0][: len(part)], part)\n",
        "            copy(left[0][: len(part)], part)\n            if len(left[0]) > 60000:\n                __import__('ctypes').memset(__import__('tiers.block').block.address_of(left[0]) + len(left[0]), 0, 1)\n",
    ),
    # -- leaks -------------------------------------------------------------------------------
    STORE.but(
        "leaks",
        "the threads stay",
        ENDS,
        "        LEFT.append(self)\n",
        'T = TypeVar("T")\n',
        'T = TypeVar("T")\nLEFT: list[object] = []\n',
    ),
    STORE.but(
        "leaks",
        "payloads are kept",
        GIVEN,
        "        LEFT.extend(bytes(b.payload) for b in blocks)\n" + GIVEN,
        'T = TypeVar("T")\n',
        'T = TypeVar("T")\nLEFT: list[object] = []\n',
    ),
    RECENT.but(
        "leaks",
        "indexes are kept for ever",
        "            if len(self._young) >= self._half:\n                self._turn()\n",
        "",
        equal="an index is a KiB, and goes after a minute",
    ),
    # -- the spec ----------------------------------------------------------------------------
    SPEC.but(
        "spec", "it does not say that it verifies", "    verifies: ClassVar[bool] = True\n", ""
    ),
    SPEC.but(
        "spec",
        "scratch is the same place",
        '        return self.model_copy(update={"url": f"file://{folder}", **none})\n',
        "        return self\n",
    ),
    # -- a fork ------------------------------------------------------------------------------
    BUCKET.but(
        "fork",
        "a forked child opens one",
        "        if os.getpid() != LOADED_IN:\n",
        "        if False:\n",
    ),
    STORE.but(
        "fork",
        "the threads are made once for all stores",
        'self._threads = IoExecutor(connections, "packs")',
        "self._threads = POOL",
        'T = TypeVar("T")\n',
        'T = TypeVar("T")\nPOOL = IoExecutor(32, "packs")\n',
    ),
    # -- a capacity, by its own tests ----------------------------------------------------------
    LISTED.but(
        "eviction", "marks go", "key_of(each.name) and not is_mark(each.name)", "key_of(each.name)"
    ),
    LISTED.but("eviction", "what is no pack goes", "key_of(each.name) and not", "not"),
    LISTED.but(
        "eviction",
        "one that is gone ends the deletes of others",
        "            for path in paths:\n                with suppress(",
        "            for path in ():\n                with suppress(",
    ),
    LISTED.but(
        "eviction",
        "a listing begins anew",
        '                last = found[-1]["path"]\n',
        "                pass\n",
    ),
    LISTED.but(
        "eviction",
        "a folder's listing goes on without an order",
        "                if last is not None and isinstance(store, LocalStore):\n",
        "                if False:\n",
    ),
    LISTED.but(
        "refusals",
        "a listing that is refused is one that fails",
        "status(?: code)?:? 40[13]\\b|",
        "",
    ),
    LISTED.but(
        "refusals", "a refused delete of many is one that fails", "|\\(code: AccessDenied\\)", ""
    ),
    LISTED.but(
        "bound",
        "a beat ends where there is no room",
        "return _FULL.search(str(error)) is not None",
        "return False",
    ),
    LISTED.but(
        "bound",
        "a full cluster is sent each pack",
        "            raise TierUnavailable(str(error)) from None\n\n    def replace",
        "            raise\n\n    def replace",
    ),
    KEPT.but(
        "lease",
        "a full cluster ends it",
        "        with suppress(TierFull):  # nobody",
        "        with suppress():  # nobody",
    ),
    KEPT.but(
        "lease",
        "any process takes it",
        "        return self._bucket.put(name_of(term + 1), [note])\n",
        "        self._bucket.replace(name_of(term + 1), note)\n        return True\n",
    ),
    KEPT.but(
        "lease",
        "former terms stay",
        "name_of(term) for term in terms[:-1]",
        "name_of(term) for term in terms[:0]",
    ),
    LEASE.but(
        "lease",
        "another's term of the same number is kept",
        "            if newest == held > 0 and self._is_ours(held):\n",
        "            if newest == held > 0:\n",
    ),
    LEASE.but(
        "lease",
        "a beat that fails loses it for minutes",
        'owner in (b"", _NOBODY, self._owner)',
        'owner in (b"", _NOBODY)',
    ),
    LEASE.but("lease", "a beat changes nothing", "        self._beats += 1\n", ""),
    LEASE.but(
        "lease",
        "who watches lists",
        "        if held or self._is_free(self._look(self._seen[0])):\n",
        "        if True:\n",
    ),
    EVICTOR.but(
        "cost",
        "a long listing is followed by a short pause",
        "        return max(self.seconds, self.times * took)\n",
        "        return self.seconds\n",
    ),
    EVICTOR.but(
        "bound",
        "what fills fast is counted as seldom",
        "ended + min(self._lasts, usual)",
        "ended + usual",
    ),
    EVICTOR.but(
        "cost",
        "what fills slowly is counted as often",
        "ended + min(self._lasts, usual)",
        "ended",
    ),
    EVICTOR.but(
        "cost",
        "one that fails is not paused after",
        "        finally:\n            ended",
        "        else:\n            ended",
        "        try:\n            self._round()\n",
        "        try:\n            self._round()\n        except ZeroDivisionError:\n            raise\n",
    ),
    EVICTOR.but(
        "cost",
        "one round follows the other where a put found no room",
        "            self._next_round = self._soonest_round\n",
        "            self._next_round = 0.0\n",
    ),
    EVICTOR.but(
        "refusals",
        "what is refused is not told",
        "        self._refused = self._refused_now\n",
        "",
    ),
    EVICTOR.but(
        "refusals",
        "what is refused is told in its own process alone",
        'int(self._refused != "" or is_stuck)',
        "0",
    ),
    EVICTOR.but(
        "refusals",
        "a refused lease is not told",
        "                self._barred = str(error)\n",
        "                pass\n",
    ),
    EVICTOR.but(
        "refusals",
        "what was refused is told for ever",
        '                self._barred = ""\n',
        "                pass\n",
    ),
)
