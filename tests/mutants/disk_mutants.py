"""Defects of the disk tier."""

from __future__ import annotations

from tests.mutants.mutant import Source

STORE = Source("disk", "tiers/disk/disk_store.py")
EXECUTORS = Source("disk", "tiers/concurrency/executors.py")
ROOM = Source("disk", "tiers/disk/index/slot_allocator.py")
EDIT = Source("disk", "tiers/disk/index/edit.py")
OPEN = Source("disk", "tiers/disk/folder/open_folder.py")
SPEC = Source("disk", "tiers/disk/spec.py")

LOADED = (
    "            folder.uses.record([index_key(blocks[place].key) for place in sorted(loaded)])\n"
)
ANSWER = "        return [place in loaded for place in range(len(blocks))]\n"
HAS = "            return folder.index.has([index_key(key) for key in keys])\n"
DROP = "            folder.drop([index_key(key) for key in keys])\n"

MUTANTS = (
    STORE.but(
        "answers",
        "get is True of what it did not read",
        ANSWER,
        "        return [entry is not None for entry in entries]\n",
    ),
    STORE.but(
        "answers",
        "drop leaves the first key",
        DROP,
        "            folder.drop([index_key(key) for key in keys[1:]])\n",
    ),
    STORE.but(
        "answers",
        "clear says that there is more for ever",
        "            return len(index_keys) == _CLEAR_BATCH\n",
        "            return True\n",
    ),
    STORE.but(
        "answers",
        "clear says that there is no more",
        "            return len(index_keys) == _CLEAR_BATCH\n",
        "            return False\n",
    ),
    EDIT.but(
        "answers",
        "a key is known by its first 32 bytes",
        "xxhash.xxh3_128_digest(key)",
        "xxhash.xxh3_128_digest(key[:32])",
    ),
    STORE.but(
        "bytes", "records are not verified", "        verify(record, block.payload, checksum)\n", ""
    ),
    STORE.but(
        "bytes",
        "a record's key and length are not compared",
        "record = expect(header, block.key, len(block.payload))",
        "record = parse_header(header)",
        equal="the index names the record's checksum, which is of its key and length, too",
    ),
    STORE.but(
        "bytes",
        "the index's checksum is not compared",
        "if record.checksum != entry.checksum:",
        "if False:",
        equal="the record is whole and of that very key, whose bytes are always the same",
    ),
    STORE.but(
        "bytes",
        "another length is read",
        " and entry.payload_bytes == len(block.payload)",
        "",
        equal="the record's header says its length, and it is compared",
    ),
    ROOM.but(
        "eviction",
        "the head goes first",
        "            for key in reversed(keys):\n                self._uses[key]",
        "            for key in keys:\n                self._uses[key]",
    ),
    OPEN.but(
        "eviction",
        "of what is put the head goes first",
        "for k in reversed(put.sizes) if is_held",
        "for k in put.sizes if is_held",
    ),
    STORE.but("eviction", "loads are not noted", LOADED, ""),
    STORE.but(
        "eviction",
        "touches are not noted",
        "        self._folder.uses.record([index_key(key) for key in keys])\n",
        "        pass\n",
    ),
    STORE.but(
        "eviction",
        "touches are reversed",
        "        self._folder.uses.record([index_key(key) for key in keys])\n",
        "        self._folder.uses.record([index_key(key) for key in keys[::-1]])\n",
    ),
    EDIT.but(
        "eviction",
        "what is renewed keeps its age",
        '        self._delete("recency", STAMP.pack(entry.stamp))\n        self._enter(key, entry)\n        return True\n',
        "        return True\n",
        survives="uses are noted in memory, too, and count until upkeep writes them, seconds later",
    ),
    ROOM.but(
        "eviction",
        "the capacity is doubled",
        "if edit.used + size > edit.capacity or not space.has(size)",
        "if edit.used + size > 2 * edit.capacity or not space.has(size)",
    ),
    ROOM.but(
        "eviction",
        "nothing is evicted for new blocks",
        "        if (slot := _evict(edit, batch, uses)) is None:\n            return None\n        if slot.size == size and",
        "        return None\n        if (slot := _evict(edit, batch, uses)) is None:\n            return None\n        if slot.size == size and",
    ),
    STORE.but(
        "scale",
        "has answers 500 keys",
        HAS,
        "            found = folder.index.has([index_key(key) for key in keys[:500]])\n            return found + [False] * (len(keys) - len(found))\n",
    ),
    STORE.but(
        "scale",
        "drop drops 100 keys",
        DROP,
        "            folder.drop([index_key(key) for key in keys[:100]])\n",
    ),
    STORE.but(
        "scale",
        "put takes 32 blocks",
        "        for name, block in zip(index_keys, blocks, strict=True):\n",
        "        for name, block in list(zip(index_keys, blocks, strict=True))[:32]:\n",
    ),
    STORE.but(
        "scale",
        "get loads 32 blocks",
        "for place, (block, entry) in enumerate(zip(blocks, entries, strict=True))\n",
        "for place, (block, entry) in list(enumerate(zip(blocks, entries, strict=True)))[:32]\n",
    ),
    STORE.but(
        "truth",
        "usage says half the bytes",
        "            return folder.index.usage()\n",
        "            u = folder.index.usage()\n            return Usage(u.blocks, u.used // 3, u.capacity)\n",
    ),
    STORE.but(
        "truth",
        "usage says more blocks",
        "            return folder.index.usage()\n",
        "            u = folder.index.usage()\n            return Usage(u.blocks + 1, u.used, u.capacity)\n",
    ),
    STORE.but("truth", "evictions are not counted", "self._folder.evicted.take()", "0"),
    STORE.but(
        "truth",
        "renewed blocks are not counted",
        '            if all(folder.index.has(list(batch))):\n                folder.uses.record(list(batch))\n                self._put_counts.count("renewed", len(blocks))\n',
        "            if all(folder.index.has(list(batch))):\n                folder.uses.record(list(batch))\n",
    ),
    STORE.but(
        "truth",
        "damage is not counted",
        '            self._damaged.count("record", dropped)\n',
        "            pass\n",
    ),
    STORE.but(
        "truth",
        "writes that fail are held",
        "    except OSError as error:\n        return [error] if len(run) == 1 else _one_by_one(_write",
        "    except OSError:\n        return entries if len(run) == 1 else _one_by_one(_write",
    ),
    STORE.but(
        "truth",
        "reads that fail are misses",
        "            if failed and len(failed) == len(outcomes):\n                raise failed[0]\n",
        "",
    ),
    STORE.but(
        "leaks",
        "close does nothing",
        "            open_folders.leave(self._folder)\n",
        "            pass\n",
    ),
    OPEN.but(
        "leaks",
        "the I/O threads stay",
        "        self.threads.shutdown()\n",
        "",
        equal="threads of an executor that nobody holds end by themselves",
    ),
    OPEN.but(
        "leaks",
        "the slabs stay open",
        "        self.index.close()\n        self.slabs.close()\n",
        "        self.index.close()\n        LEFT.append(self.slabs)\n",
        "NO_ENTRIES: Mapping",
        "LEFT: list[object] = []\nNO_ENTRIES: Mapping",
    ),
    EXECUTORS.but(
        "memory",
        "a read goes on after the call",
        "        wait(futures)  # a process",
        "        pass  # a process",
        equal="each result is waited for; a call is refused midway only where the process ends",
    ),
    SPEC.but(
        "spec",
        "host_local is False",
        "        return True  # each host has a folder",
        "        return False  # each host has a folder",
    ),
    SPEC.but(
        "spec", "it does not say that it verifies", "    verifies: ClassVar[bool] = True\n", ""
    ),
    SPEC.but("spec", "it does not say that it resizes", "    resizes: ClassVar[bool] = True\n", ""),
    SPEC.but(
        "spec",
        "scratch is the same place",
        '        return self.model_copy(update={"path": folder})\n',
        "        return self\n",
    ),
    STORE.but(
        "spec",
        "peek reads a file",
        "            return folder.fingerprints.peek(keys)\n",
        "            __import__('os').stat(folder.path)\n            return folder.fingerprints.peek(keys)\n",
    ),
    STORE.but(
        "spec",
        "peek waits for puts",
        "            held = self._store(folder, batch)\n",
        "            with LOCK:\n                held = self._store(folder, batch)\n",
        "            return folder.fingerprints.peek(keys)\n",
        "            with LOCK:\n                return folder.fingerprints.peek(keys)\n",
        "_CLEAR_BATCH = 256\n",
        "_CLEAR_BATCH = 256\nLOCK = __import__('threading').Lock()\n",
    ),
)
