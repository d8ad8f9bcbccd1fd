"""Defects of the shared directory, which the kit finds, and of its upkeep, which its own tests do.

What shows only on a file system that fails, or after an evictor's minutes, no store's kit can see.
"""

from __future__ import annotations

from tests.mutants.mutant import Source

BUCKET = Source("shared", "tiers/remote/shared/directory_bucket.py")
FILES = Source("shared", "tiers/remote/shared/files.py")
SPEC = Source("shared", "tiers/remote/shared_spec.py")

KEPT = Source("upkeep", "tiers/remote/shared/directory_bucket.py")
WRITTEN = Source("upkeep", "tiers/remote/shared/files.py")
LEFT = Source("upkeep", "tiers/remote/shared/upkeep.py")
EVICTOR = Source("upkeep", "tiers/remote/packs/evictor.py")
ENDS = Source("shared", "tiers/remote/packs/evictor.py")
LEASE = Source("upkeep", "tiers/remote/packs/lease.py")

RENAME = "            os.link(temporary, path)\n"

MUTANTS = (
    # -- what the kit finds ------------------------------------------------------------------
    BUCKET.but("answers", "put does nothing", RENAME, "            pass\n"),
    BUCKET.but(
        "answers",
        "a name that is taken is an error",
        "        except FileExistsError:\n            return False\n        except OSError as error:\n            if error.errno not in _NO",
        "        except OSError as error:\n            if error.errno not in _NO",
    ),
    BUCKET.but(
        "answers",
        "delete takes one name",
        "            for name in names:\n                with unless_gone",
        "            for name in list(names)[:1]:\n                with unless_gone",
        survives="packs of a damaged batch go one a load; tests/remote/shared/test_directory_bucket.py has all",
    ),
    BUCKET.but(
        "answers",
        "a pack that is gone is empty",
        "itself is gone\n        return None\n",
        "itself is gone\n        return 0\n",
    ),
    BUCKET.but(
        "answers",
        "a folder that is not there is not made",
        "        self._make_folders(path)\n",
        "",
    ),
    BUCKET.but(
        "bytes",
        "a pack replaces one of its name",
        RENAME,
        "            os.rename(temporary, path)\n",
    ),
    BUCKET.but(
        "bytes",
        "a read begins at 0",
        "first(left, PIECE_BYTES), start + done)",
        "first(left, PIECE_BYTES), done)",
    ),
    BUCKET.but(
        "bytes",
        "a read goes on from its beginning",
        "                left = after(left, count)\n",
        "                left = left[1:]\n",
    ),
    FILES.but(
        "bytes",
        "parts but the first are left out",
        "        left = [memoryview(part) for part in parts]\n",
        "        left = [memoryview(part) for part in parts][:1]\n",
    ),
    WRITTEN.but(
        "failures",
        "a part's rest is left out",
        "            left = after(left, os.writev(handle, left))\n",
        "            left = after(left, max(os.writev(handle, left), len(left[0])))\n",
    ),
    BUCKET.but(
        "truth",
        "a put that fails has stored",
        "            kind = TierFull if error.errno in FULL else TierUnavailable\n            raise kind(",
        "            kind = TierFull if error.errno in FULL else TierUnavailable\n            return\n            raise kind(",
    ),
    BUCKET.but(
        "truth",
        "a read that fails is a miss",
        "                except OSError as error:\n                    if error.errno != errno.ESTALE:\n                        raise\n",
        "                except OSError:\n                    return None\n",
    ),
    BUCKET.but(
        "memory",
        "put keeps the caller's memory",
        "        with self._translated():\n            try:\n                fill(",
        "        self._kept = parts\n        with self._translated():\n            try:\n                fill(",
    ),
    BUCKET.but(
        "memory",
        "a read keeps the caller's memory",
        "        handle = reopen(path, os.O_RDONLY",
        "        self._kept = into\n        handle = reopen(path, os.O_RDONLY",
    ),
    BUCKET.but(
        "leaks",
        "files stay open",
        "        finally:\n            os.close(handle)\n",
        "        finally:\n            pass\n",
    ),
    FILES.but(
        "leaks",
        "written files stay open",
        "    finally:\n        os.close(handle)\n\n\ndef first",
        "    finally:\n        pass\n\n\ndef first",
    ),
    ENDS.but("leaks", "the evictor stays", "        self._end_upkeep()\n", "        pass\n"),
    SPEC.but(
        "spec", "it does not say that it verifies", "    verifies: ClassVar[bool] = True\n", ""
    ),
    SPEC.but(
        "spec",
        "scratch is the same place",
        '        return self.model_copy(update={"path": folder})\n',
        "        return self\n",
    ),
    SPEC.but("spec", "host_local is True", "        return False\n", "        return True\n"),
    # -- what its own tests find -------------------------------------------------------------
    KEPT.but(
        "failures",
        "a pack is written under its own name",
        '        temporary = f"{folder}/{TEMPORARY}{secrets.token_hex(8)}"\n',
        '        temporary = f"{self._path}/{name}"\n',
    ),
    KEPT.but(
        "failures",
        "a temporary file stays",
        "                with suppress(OSError):\n                    os.unlink(temporary)\n",
        "                pass\n",
    ),
    KEPT.but(
        "failures",
        "what another host removed is an error",
        "                    if error.errno != errno.ESTALE:\n                        raise\n",
        "                    raise\n",
    ),
    KEPT.but(
        "failures",
        "what another host removed is not opened again",
        "            for _ in range(2):\n",
        "            for _ in range(1):\n",
    ),
    KEPT.but(
        "failures",
        "a full disk is a tier that is down",
        "TierFull if error.errno in FULL else TierUnavailable",
        "TierUnavailable",
    ),
    WRITTEN.but(
        "failures",
        "a quota is a tier that is down",
        "frozenset({errno.ENOSPC, errno.EDQUOT})",
        "frozenset({errno.ENOSPC})",
    ),
    KEPT.but(
        "failures",
        "a directory that is not mounted is made",
        "        self.mode = _mode_of(path)\n",
        "        path.mkdir(parents=True, exist_ok=True)\n        self.mode = _mode_of(path)\n",
    ),
    KEPT.but(
        "failures",
        "a directory that all may write to is used",
        "    if found.st_mode & 0o002:\n",
        "    if False:\n",
    ),
    KEPT.but(
        "failures",
        "a file system without links is down",
        "            if error.errno not in _NO_LINKS:\n                raise\n",
        "            raise\n",
    ),
    KEPT.but(
        "failures",
        "a group's folders are one user's",
        "            if self.mode != 0o700:  # the",
        "            if False:  # the",
    ),
    WRITTEN.but("failures", "a pack is not synced", "        os.fsync(handle)\n", ""),
    WRITTEN.but(
        "failures",
        "a group's packs are one user's",
        "        if mode & 0o070:\n            os.fchmod(handle, mode & 0o660)\n",
        "",
    ),
    WRITTEN.but(
        "failures",
        "a file that is gone ends a listing",
        "        with unless_gone():\n            found = entry.stat",
        "        if True:\n            found = entry.stat",
    ),
    WRITTEN.but(
        "failures",
        "another's removal is an error",
        "        if error.errno not in GONE:\n            raise\n\n\ndef files",
        "        raise\n\n\ndef files",
    ),
    KEPT.but(
        "uses",
        "a read does not make a pack look new",
        "                    os.utime(handle)\n",
        "                    pass\n",
    ),
    KEPT.but(
        "uses",
        "each read makes a pack look new",
        "if not any(self._used.known([path])):",
        "if True:",
        survives="it costs a write for each read, and no block",
    ),
    KEPT.but(
        "uses",
        "a use is remembered for ever",
        "(_MOST_USES, USE_SECONDS, ",
        "(1 << 40, USE_SECONDS, ",
        equal="65,536 names are some MiB; no test puts so many packs",
    ),
    EVICTOR.but(
        "bound",
        "a put is not counted",
        "            self._room.ends(size, stored)\n",
        "            pass\n",
    ),
    EVICTOR.but(
        "bound",
        "a put that failed counts",
        "            self._room.ends(size, stored)\n",
        "            self._room.ends(size, True)\n",
    ),
    EVICTOR.but(
        "bound",
        "a full directory is put into",
        "        if not self._room.admits(size):\n",
        "        if not self._room.admits(0):\n",
    ),
    EVICTOR.but(
        "bound", "what is in flight is not counted", "                self._putting += size\n", ""
    ),
    EVICTOR.but(
        "bound",
        "what a count missed is not counted",
        "                self._own_before, self._own = self._own, 0\n",
        "                self._own_before, self._own = 0, 0\n",
    ),
    EVICTOR.but(
        "bound",
        "what was counted counts twice",
        "                self._own_before, self._own = self._own, 0\n",
        "                self._own_before += self._own\n                self._own = 0\n",
    ),
    EVICTOR.but(
        "bound",
        "a count is not learnt",
        "            self.count = count\n",
        "            pass\n",
    ),
    EVICTOR.but(
        "bound",
        "a put that finds no room wakes nobody",
        "        self.wake.set()\n        return False\n",
        "        return False\n",
        survives="room is made all the same, in the next round",
    ),
    EVICTOR.but(
        "eviction",
        "the newest goes first",
        "        for last in sorted(ages):\n",
        "        for last in sorted(ages, reverse=True):\n",
    ),
    EVICTOR.but(
        "eviction",
        "all of the last age go",
        "                    if _age(pack) < last or spare > 0:\n",
        "                    if True:\n",
    ),
    EVICTOR.but(
        "eviction",
        "nothing goes",
        "            self._bucket.delete([pack.name for pack in packs])\n",
        "            pass\n",
    ),
    EVICTOR.but(
        "eviction",
        "it begins below the capacity",
        "min(HIGH * most",
        "min(LOW * most / 2",
    ),
    EVICTOR.but(
        "eviction",
        "it ends too late",
        "min(int(LOW * most)",
        "min(int(LOW * most / 2)",
    ),
    EVICTOR.but(
        "eviction",
        "it ends too soon",
        "min(int(LOW * most)",
        "min(int(HIGH * most)",
    ),
    LEFT.but(
        "eviction",
        "files of others go",
        "            elif key_of(name) is not None:\n",
        "            else:\n",
    ),
    LEFT.but(
        "leftovers",
        "they stay",
        "            if file.startswith(TEMPORARY):\n",
        "            if False:\n",
    ),
    LEFT.but(
        "leftovers",
        "they go at once",
        "        if now - since < TEMPORARY_SECONDS:\n",
        "        if False:\n",
    ),
    LEFT.but(
        "leftovers",
        "one that grows goes, too",
        "        if (size, changed) != (found.st_size, found.st_mtime_ns):\n",
        "        if not since:\n",
    ),
    LEFT.but("leftovers", "empty folders stay", "        if is_empty:\n", "        if False:\n"),
    LEFT.but(
        "leftovers",
        "what was watched is kept for ever",
        "        self._before = self._watched\n",
        "        self._before |= self._watched\n",
        equal="it costs memory alone, a name for each folder that was ever empty",
    ),
    EVICTOR.but(
        "lease",
        "all processes evict",
        "        return self._lease.is_held and not self._stopped.is_set()\n",
        "        return not self._stopped.is_set()\n",
    ),
    EVICTOR.but(
        "lease",
        "a walk renews no lease",
        "            if not self._beat():\n                return\n            yield packs",
        "            yield packs",
    ),
    EVICTOR.but(
        "lease",
        "an error ends the upkeep",
        "                seconds = self._pace.beat\n",
        "                return\n",
    ),
    EVICTOR.but(
        "lease", "it is not resigned", "            self._lease.resign()\n", "            pass\n"
    ),
    LEASE.but(
        "lease",
        "it is never lost",
        "        return is_left or self._clock() - self._since >= self._watch\n",
        "        return is_left\n",
    ),
    LEASE.but(
        "lease",
        "it is lost at once",
        "        return is_left or self._clock() - self._since >= self._watch\n",
        "        return is_left or self._clock() - self._since >= 0\n",
    ),
    LEASE.but(
        "lease",
        "who watches sees no change",
        "            self._seen, self._since = (term, note), self._clock()\n",
        "            self._seen = (term, note)\n",
    ),
    LEFT.but(
        "lease",
        "it is taken without a rename",
        "                os.rename(self._file(term), self._file(term + 1))\n",
        "                fill(create(self._file(term + 1)), [b' ' * NOTE_BYTES], self._mode)\n",
    ),
    LEASE.but(
        "lease",
        "a holder that was stopped goes on",
        "            if newest == held > 0 and self._is_ours(held):\n",
        "            if held > 0 and self._is_ours(held):\n",
        equal="the file of its term is gone, so it writes nothing and holds nothing",
    ),
    LEASE.but(
        "lease",
        "a count is not taken over",
        "            self.count = Count(*map(int, found.groups()[2:]))\n",
        "            pass\n",
    ),
    LEASE.but(
        "lease",
        "resigning says nothing",
        "            self._terms.write(held, self._note(_NOBODY))\n",
        "            pass\n",
    ),
    LEFT.but(
        "lease",
        "files of former terms stay",
        "        for term in terms[:-1]:  # made while the one was renamed\n            with unless_gone():\n                os.unlink(self._file(term))\n",
        "",
        survives="each is a few bytes, and the newest counts",
    ),
    LEFT.but(
        "lease",
        "its folder is one user's",
        "                    os.chmod(self._folder, self._mode)\n",
        "",
    ),
)
