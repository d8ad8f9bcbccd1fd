"""Who a model's weights are: their content, wherever it lies, or nobody's but this process's."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tiers.concurrency.executors import in_background
from tiers.engine.identity import digests, weights
from tiers.engine.identity.digests import Digests, FileChanged
from tiers.engine.identity.weights import NoIdentity, identity, source, within
from tiers.paths import Mount

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def old(path: Path) -> None:
    """Let a file be older than the engine, also where it was just made."""
    while time.time() - path.stat().st_ctime < 0.02:
        time.sleep(0.01)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's folder with two files of weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    for number in (1, 2):
        (folder / f"model-{number}.safetensors").write_bytes(os.urandom(3_000_000))
    (folder / "config.json").write_text("{}")
    (folder / "modeling_own.py").write_text("scale = 1")
    return folder


def found(
    model: Path | str,
    hub: Path | None = None,
    load_format: str = "auto",
    cache: Path | None = None,
    **more: Any,
) -> str:
    """What an engine that is started now takes the weights for."""
    config = SimpleNamespace(model=str(model), revision=None, seed=0, **more)
    load = SimpleNamespace(load_format=load_format)
    if Path(model).is_dir():
        for path in Path(model).iterdir():
            old(path)
    return identity(source(config, load, hub, time.time()), Digests(cache).of, time.time())


def test_a_byte_anywhere_makes_other_weights(model: Path) -> None:
    before = found(model)
    assert found(model) == before
    for at in (0, 1_234_567, 2_999_999):
        with (model / "model-2.safetensors").open("r+b") as file:
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 1]))
        after = found(model)
        assert after != before
        before = after


def test_a_model_s_own_code_and_settings_count_and_its_tokenizer_does_not(model: Path) -> None:
    before = found(model)
    for name in ("tokenizer", "tokenizer_config", "special_tokens_map", "added_tokens", "vocab"):
        (model / f"{name}.json").write_text("[]")
    (model / "README.md").write_text("read me")
    (model / "older.safetensors").mkdir()
    assert found(model) == before
    (model / "modeling_own.py").write_text("scale = 2")
    seen = {before, found(model)}
    (model / "modeling_own.py").rename(model / "modeling_other.py")
    seen.add(found(model))
    (model / "preprocessor_config.json").write_text('{"size": 224}')
    seen.add(found(model))
    for suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf"):
        (model / f"more{suffix}").write_bytes(b"weights")
        seen.add(found(model))
    assert len(seen) == 9


def test_loaders_of_the_folder_s_files_alone_load_the_same_weights(model: Path) -> None:
    formats = "auto hf safetensors pt mistral fastsafetensors instanttensor sharded_state"
    streamed = "runai_streamer runai_streamer_sharded"
    assert len({found(model, None, one) for one in f"{formats} {streamed}".split()}) == 1


def test_what_cannot_be_looked_at_is_neither_left_out_nor_missing(model: Path) -> None:
    (model / "model-3.safetensors").symlink_to("x" * 256)
    for where in ("x" * 256, str(model)):
        config = SimpleNamespace(model=where, revision=COMMIT)
        with pytest.raises(OSError, match="too long"):
            source(config, SimpleNamespace(load_format="auto"), None, time.time())


def test_the_same_weights_under_another_path_are_the_same(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "mount" / "elsewhere")
    (tmp_path / "link").symlink_to(model)
    (tmp_path / "one.gguf").write_bytes(b"weights")
    (tmp_path / "two.gguf").write_bytes(b"weights")
    time.sleep(0.05)
    assert found(model) == found(tmp_path / "mount" / "elsewhere") == found(tmp_path / "link")
    assert found(tmp_path / "one.gguf") == found(tmp_path / "two.gguf")


@pytest.mark.parametrize(
    ("where", "more", "words"),
    [
        ("org/model", {"model_weights": "s3://bucket/model"}, r"behind a URL \(s3://\.\.\.\)"),
        ("org/model", {"load_format": "tensorizer"}, "load_format 'tensorizer'"),
        ("org/model", {"load_format": "ipc_cache"}, "load_format 'ipc_cache'"),
        ("org/model", {"load_format": "npcache"}, "load_format 'npcache'"),
        ("org/model", {"load_format": "a plugin's"}, "load_format"),
        ("org/model", {}, "may stand for others tomorrow"),
        ("empty", {}, "no file of the model's folder"),
    ],
)
def test_what_nothing_tells_from_others_is_named(
    where: str, more: dict[str, Any], words: str, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(NoIdentity, match=words) as refusal:
        found(tmp_path / "empty" if where == "empty" else where, **more)
    assert "bucket" not in str(refusal.value)


def test_a_folder_within_a_snapshot_that_the_engine_has_downloaded_is_known(tmp_path: Path) -> None:
    since = time.time()
    repository = tmp_path / "models--org--model"
    snapshot, blob = repository / "snapshots" / COMMIT, repository / "blobs" / ("a" * 64)
    for folder in (blob.parent, snapshot / "whisper"):
        folder.mkdir(parents=True)
    blob.write_bytes(b"weights")
    old(blob)
    for folder in (snapshot, snapshot / "whisper"):
        (folder / "model.safetensors").symlink_to(blob)
    config = SimpleNamespace(model="org/model", revision=None, seed=0)
    whole = source(config, SimpleNamespace(load_format="auto"), tmp_path, since)
    assert identity(whole, Digests(None).of, since)
    assert identity(within(whole, "whisper"), Digests(None).of, since)


@pytest.mark.vllm
@pytest.mark.parametrize(
    "file",
    [
        "scales.json",
        "tower/model.safetensors",
        "model/encoder/model.safetensors",
        "model/audio_tokenizer/model.safetensors",
        "model/adapters/retrieval/adapter_model.safetensors",
    ],
)
def test_other_content_of_what_an_engine_reads_beside_its_model_is_other_weights(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    """Scales of an images' encoder, a tower of another name, and folders within the model's."""
    from tiers.engine import vllm_identity

    monkeypatch.setattr(vllm_identity, "_process_began", lambda: time.time() + 1)
    media = SimpleNamespace(mm_encoder_fp8_scale_path=str(tmp_path / "scales.json"))
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(model), revision=None, seed=0, multimodal_config=media
        ),
        load_config=SimpleNamespace(load_format="auto", download_dir=str(tmp_path)),
    )
    more = [[str(tmp_path / "tower"), None, None], [str(model), None, "encoder"]]
    layers = {"sources": json.dumps([*map(json.dumps, more)])}
    for name in ("tower", "model/encoder"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "scales.json").write_text("{}")
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    known: dict[bytes, object] = {}
    for content in (b"one", b"two", b"one"):
        (tmp_path / file).write_bytes(content)
        facts = vllm_identity._weights(config, "", "alone", layers)
        assert known.setdefault(content, facts) == facts != {"weights": "alone"}
    assert known[b"one"] != known[b"two"]


@pytest.mark.vllm
def test_ranks_that_others_gave_their_weights_have_no_identity(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They say that they load dummies, as vLLM has the ranks that elastic EP adds."""
    from tiers.engine import vllm_identity

    load = SimpleNamespace(load_format="dummy", download_dir=None)
    there = SimpleNamespace(model=str(model), revision=None, seed=0, multimodal_config=None)
    config = SimpleNamespace(model_config=there, load_config=load)
    assert vllm_identity._weights(config, "", "alone", {}) == {"weights": "random: 0"}
    monkeypatch.setenv("VLLM_ELASTIC_EP_SCALE_UP_LAUNCH", "1")
    assert vllm_identity._weights(config, "", "alone", {}) == {"weights": "alone"}


def test_random_weights_are_their_seed() -> None:
    assert found("org/model", load_format="dummy") == "random: 0"


def hub_model(hub: Path, commit: str, content: bytes, blob: str) -> Path:
    """A model as the hub's cache has it: files that link to blobs named by their digests."""
    repository = hub / "models--org--model"
    for folder in (repository / "blobs", repository / "snapshots" / commit, repository / "refs"):
        folder.mkdir(parents=True, exist_ok=True)
    (repository / "blobs" / blob).write_bytes(content)
    link = repository / "snapshots" / commit / "model.safetensors"
    link.symlink_to(f"../../blobs/{blob}")
    return link.parent


def test_the_hub_s_files_are_told_by_their_names_and_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(file: FileIO) -> str:
        raise AssertionError("a blob was read")

    monkeypatch.setattr(digests, "read_digest", read)
    first = hub_model(tmp_path / "a", COMMIT, b"weights", "a" * 64)
    other = hub_model(tmp_path / "b", COMMIT, b"weighty", "b" * 64)
    assert found("org/model", tmp_path / "a") == found(first)
    assert found("org/model", tmp_path / "b") == found(other) != found(first)


def test_of_several_snapshots_the_branch_s_is_loaded_unless_it_has_just_moved(
    tmp_path: Path,
) -> None:
    first = hub_model(tmp_path, COMMIT, b"weights", "a" * 64)
    settings = first.parent / "settings" / "config.json"  # a commit of which no weights were loaded
    settings.parent.mkdir()
    settings.write_text("{}")
    assert found("org/model", tmp_path) == found(first)
    hub_model(tmp_path, COMMIT[::-1], b"later", "c" * 64)
    with pytest.raises(NoIdentity):
        found("org/model", tmp_path)
    branch = tmp_path / "models--org--model" / "refs" / "main"
    before = time.time()
    time.sleep(0.02)
    branch.write_text(COMMIT)
    time.sleep(0.02)
    assert found("org/model", tmp_path) == found(first)
    model = SimpleNamespace(model="org/model", revision=None)
    load = SimpleNamespace(load_format="auto")
    with pytest.raises(NoIdentity):
        source(model, load, tmp_path, before)
    branch.with_name("v2").write_text(COMMIT[::-1])
    model.revision = "v2"
    assert source(model, load, tmp_path, time.time() + 1).folder == first.with_name(COMMIT[::-1])


def test_a_model_that_the_engine_itself_has_just_downloaded_is_known(tmp_path: Path) -> None:
    """Its files are younger than the engine, and yet what their names say."""
    since = time.time()
    time.sleep(0.02)
    snapshot = hub_model(tmp_path, COMMIT, b"weights", "a" * 64)
    small = tmp_path / "models--org--model" / "blobs" / ("b" * 40)
    small.write_text("{}")
    (snapshot / "preprocessor_config.json").symlink_to(small)
    model = SimpleNamespace(model="org/model", revision=None)
    files = source(model, SimpleNamespace(load_format="auto"), tmp_path, since)
    assert len(files.files) == 2
    assert identity(files, Digests(None).of, since)


def test_a_commit_is_an_identity_where_the_hub_s_files_are_not_found(tmp_path: Path) -> None:
    load = SimpleNamespace(load_format="auto")
    at = SimpleNamespace(model="org/model", revision=COMMIT)
    assert source(at, load, tmp_path, 0).name == f"org/model {COMMIT}"
    branch = SimpleNamespace(model="org/model", revision="v2")
    with pytest.raises(NoIdentity):
        source(branch, load, tmp_path, 0)
    snapshot = hub_model(tmp_path, COMMIT, b"weights", "a" * 64)
    hub_model(tmp_path, COMMIT[::-1], b"later", "c" * 64)
    assert source(at, load, tmp_path, 0).folder == snapshot


NAMES = [
    "model.safetensors",
    "blobs/" + "a" * 64,
    "models--own/blobs/W-1",
    "models--own/w/" + "a" * 64,
]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_alone_makes_no_blob(tmp_path: Path, name: str) -> None:
    """Outside of the hub's cache, a name of 64 digits says nothing of what is in the file."""
    folder = tmp_path / "model"
    target = folder / name
    target.parent.mkdir(parents=True)
    target.write_bytes(b"weights")
    if name != "model.safetensors":
        (folder / "model.safetensors").symlink_to(target)
    before = found(folder)
    target.write_bytes(b"weighty")
    old(target)
    assert found(folder) != before


# -- what changes meanwhile ----------------------------------------------------------------------


@pytest.mark.fault
def test_weights_that_change_while_the_engine_starts_are_nobody_s(model: Path) -> None:
    config = SimpleNamespace(model=str(model), revision=None)
    files = source(config, SimpleNamespace(load_format="auto"), None, time.time())
    for path in model.iterdir():
        old(path)
    since = time.time()
    assert identity(files, Digests(None).of, since)
    time.sleep(0.02)
    (model / "model-1.safetensors").touch()
    with pytest.raises(FileChanged, match=r"model-1\.safetensors changed after the engine was"):
        identity(files, Digests(None).of, since)


@pytest.mark.vllm
@pytest.mark.fault
@pytest.mark.parametrize("set_by", [3600.0, -3600.0])
def test_a_clock_that_is_set_while_the_engine_starts_hides_no_change(
    model: Path, monkeypatch: pytest.MonkeyPatch, set_by: float
) -> None:
    from tiers.engine.vllm_identity import _process_began

    config, told = SimpleNamespace(model=str(model), revision=None), time.time
    files = source(config, SimpleNamespace(load_format="auto"), None, told())
    began = _process_began()
    monkeypatch.setattr(time, "time", lambda: told() + set_by)
    assert _process_began() == pytest.approx(began + min(set_by, 0.0), abs=0.5)
    with pytest.raises(FileChanged, match="changed after the engine was"):
        identity(files, Digests(None).of, _process_began())


def test_weights_that_change_behind_the_reading_are_nobody_s(model: Path) -> None:
    """What the engine loads of them may be what they are now."""
    config = SimpleNamespace(model=str(model), revision=None)
    for path in model.iterdir():
        old(path)
    files, since = source(config, SimpleNamespace(load_format="auto"), None, 0.0), time.time()

    def digest(path: Path) -> str:
        found = Digests(None).of(path)
        time.sleep(0.02)
        path.touch()
        return found

    with pytest.raises(FileChanged, match="changed after the engine was"):
        identity(files, digest, since)


@pytest.mark.parametrize("from_hub", [False, True])
@pytest.mark.parametrize(
    ("moved", "words"),
    [
        ("link", "current, a link, changed"),
        ("link behind a link", "alias, a link, changed"),
        ("folder", "current, a folder, was moved"),
        ("folder above", "above, a folder, was moved"),
        ("folder above a link", "above, a folder, was moved"),
        ("link of a file", r"model[-1]*\.safetensors, a link, changed"),
    ],
)
def test_what_is_moved_to_its_place_while_the_engine_starts_is_nobody_s(
    model: Path, tmp_path: Path, from_hub: bool, moved: str, words: str
) -> None:
    """`current` was another model's when the engine loaded it; its files are older than both."""
    first = hub_model(tmp_path, COMMIT, b"weights", "a" * 64) if from_hub else model

    def make(folder: Path) -> None:
        folder.mkdir()
        for path in first.iterdir():
            (folder / path.name).symlink_to(path.resolve())

    make(tmp_path / "next")
    current = tmp_path / "current"
    above = tmp_path / "above" / "current"
    if "above" in moved:
        (tmp_path / "later").mkdir()
        make(tmp_path / "later" / "current")
    if moved == "folder above a link":
        current.symlink_to(above)
    elif moved == "folder above":
        current = above
    if moved == "link behind a link":
        current.symlink_to("alias")
    for path in (first, *first.iterdir(), tmp_path / "next"):
        old(path)
    time.sleep(0.02)
    since = time.time()
    time.sleep(0.02)
    if "above" in moved:
        (tmp_path / "later").rename(tmp_path / "above")
    if moved == "link behind a link":
        (tmp_path / "alias").symlink_to(first)
    elif moved == "link":
        current.symlink_to(first)
    elif moved == "folder":
        (tmp_path / "next").rename(current)
    elif moved == "link of a file":
        make(current)
    config = SimpleNamespace(model=str(current), revision=None)
    files = source(config, SimpleNamespace(load_format="auto"), None, time.time())
    with pytest.raises(FileChanged, match=words):
        identity(files, Digests(None).of, since)


@pytest.mark.parametrize(("kind", "at"), [("ext4", "above"), ("overlay", "."), ("overlay", "m")])
def test_folders_of_a_container_s_image_are_written_below(
    model: Path, monkeypatch: pytest.MonkeyPatch, kind: str, at: str
) -> None:
    """An overlay copies a folder then, which keeps the time of its entries and has a new one of its
    own, as one that was moved. So only that of the weights themselves is looked at there."""
    monkeypatch.setattr(weights, "mount_of", lambda path: Mount(kind))
    files = source(
        SimpleNamespace(model=str(model), revision=None),
        SimpleNamespace(load_format="auto"),
        None,
        time.time(),
    )
    for path in (*model.iterdir(), model, model.parent):
        old(path)
    time.sleep(0.02)
    since = time.time()
    time.sleep(0.02)
    changed = model if at == "m" else model.parent
    changed.chmod(0o711)
    if (kind, at) == ("overlay", "."):
        assert identity(files, Digests(None).of, since)
        return
    with pytest.raises(FileChanged, match="a folder, was moved"):
        identity(files, Digests(None).of, since)


def test_a_file_that_changes_while_it_is_read_has_no_digest(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model / "model-1.safetensors"
    old(path)

    def read(file: FileIO) -> str:
        path.write_bytes(b"other")
        return "half of it"

    monkeypatch.setattr(digests, "read_digest", read)
    with pytest.raises(FileChanged):
        Digests(tmp_path / "cache").of(path)
    assert not list((tmp_path / "cache").glob("*-*[!k]")), "nothing of it is kept"


# -- what is kept --------------------------------------------------------------------------------


@pytest.fixture
def settled(model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of weights that did not change lately."""
    monkeypatch.setattr(digests, "SETTLED_SECONDS", 0.05)
    time.sleep(0.1)
    return model / "model-1.safetensors"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The files that were read, a number each."""
    seen: list[int] = []
    read_digest = digests.read_digest

    def counted(file: FileIO) -> str:
        seen.append(file.fileno())
        return read_digest(file)

    monkeypatch.setattr(digests, "read_digest", counted)
    return seen


def entry(cache: Path) -> Path:
    (one,) = [path for path in cache.iterdir() if not path.suffix]
    return one


def test_a_second_start_reads_nothing(settled: Path, tmp_path: Path, reads: list[int]) -> None:
    cache = tmp_path / "cache" / "weights"
    first = Digests(cache).of(settled)
    assert Digests(cache).of(settled) == first == Digests(None).of(settled)
    assert len(reads) == 2, "once with the cache, once without"
    assert cache.stat().st_mode & 0o777 == 0o700


def test_a_digest_that_can_t_be_kept_is_made_again(
    settled: Path, tmp_path: Path, reads: list[int]
) -> None:
    cache = tmp_path / "cache"
    first = Digests(cache).of(settled)
    kept = entry(cache)
    kept.unlink()
    kept.with_suffix(".new").mkdir()
    assert Digests(cache).of(settled) == Digests(cache).of(settled) == first
    assert len(reads) == 3 and not kept.exists()


def test_an_edit_behind_the_same_time_and_size_is_seen(settled: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = Digests(cache).of(settled)
    times = settled.stat().st_atime_ns, settled.stat().st_mtime_ns
    with settled.open("r+b") as file:
        file.write(b"edited")
    os.utime(settled, ns=times)
    assert Digests(cache).of(settled) != first


def test_a_file_that_changed_just_now_is_not_kept(
    model: Path, tmp_path: Path, reads: list[int]
) -> None:
    """It may change again within a tick of the clock, and look the same."""
    path = model / "model-1.safetensors"
    path.write_bytes(b"new")
    assert Digests(tmp_path / "cache").of(path) == Digests(tmp_path / "cache").of(path)
    assert len(reads) == 2


def test_nothing_is_kept_of_a_file_in_an_image(
    settled: Path, tmp_path: Path, reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other weights of the next image, mounted in its place, had this one's device, inode, size and
    times: squashfs keeps no time of a change, and numbers files in their order. Earlier versions
    kept some."""
    cache = tmp_path / "cache"
    Digests(cache).of(settled)
    monkeypatch.setattr(digests, "mount_of", lambda path: Mount("squashfs", "/dev/loop0"))
    assert Digests(cache).of(settled) == Digests(cache).of(settled)
    assert len(reads) == 3
    entry(cache).unlink()
    Digests(cache).of(settled)
    assert not [path for path in cache.iterdir() if not path.suffix], "nothing is kept"


def test_a_process_that_stands_still_as_it_reads_keeps_nobody(
    settled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others wait for it, and then read the file themselves."""
    cache = tmp_path / "cache"
    first = Digests(cache).of(settled)
    entry(cache).write_text("")  # it has yet to write what it read
    monkeypatch.setattr(digests, "LOCK_SECONDS", 0.1)
    (lock,) = cache.glob("*.lock")
    with lock.open() as theirs:
        fcntl.flock(theirs, fcntl.LOCK_EX)
        before = os.listdir("/proc/self/fd")
        assert in_background(lambda: Digests(cache).of(settled), "read").result(20) == first
        assert os.listdir("/proc/self/fd") == before
    assert not entry(cache).read_text()
    assert Digests(cache).of(settled) == first and entry(cache).read_text()


def _other_digest(text: str) -> str:
    stamp, digest = json.loads(text)
    return json.dumps([[*stamp[:-1], stamp[-1] + 1], "0" * len(digest)])


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: "\0" * 300,
        lambda text: text[: len(text) // 2],
        lambda text: "[" * 1000,
        lambda text: "null",
        lambda text: json.dumps([json.loads(text)[0], "no digest"]),
        lambda text: json.dumps([json.loads(text)[0], "g" * 32]),
        lambda text: json.dumps([json.loads(text)[0], 7]),
        _other_digest,
    ],
    ids=["empty", "zeros", "half", "deep", "null", "short", "no hex", "a number", "another file's"],
)
@pytest.mark.fault
def test_damaged_entries_are_read_again(
    settled: Path, tmp_path: Path, reads: list[int], damage: Callable[[str], str]
) -> None:
    cache = tmp_path / "cache"
    first = Digests(cache).of(settled)
    kept = entry(cache)
    kept.write_text(damage(kept.read_text()))
    assert Digests(cache).of(settled) == first
    assert Digests(cache).of(settled) == first
    assert len(reads) == 2, "once more, and then it is kept again"


def test_links_in_the_cache_are_not_followed(settled: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = Digests(cache).of(settled)
    kept = entry(cache)
    other = tmp_path / "other"
    other.write_text(json.dumps([json.loads(kept.read_text())[0], "0" * 32]))
    kept.unlink()
    kept.symlink_to(other)
    assert Digests(cache).of(settled) == first


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_a_cache_that_others_can_write_to_is_left_alone(
    settled: Path, tmp_path: Path, mode: int
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(mode)
    assert Digests(cache).of(settled) == Digests(None).of(settled)
    assert list(cache.iterdir()) == []


def test_a_cache_that_is_no_folder_costs_a_reading(
    settled: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path)
    caplog.set_level("INFO")
    assert Digests(tmp_path / "link").of(settled) == Digests(None).of(settled)
    assert "link: it is no folder" in caplog.text
    assert Digests(tmp_path / "file").of(settled) == Digests(None).of(settled)
    assert Digests(tmp_path / "file" / "below").of(settled) == Digests(None).of(settled)


def _rank(path: Path, cache: Path, reads: Any, answers: Any) -> None:
    read_digest = digests.read_digest

    def slow(file: FileIO) -> str:
        reads.put(1)
        time.sleep(0.3)
        return read_digest(file)

    digests.read_digest = slow
    digests.SETTLED_SECONDS = 0.05
    answers.put(Digests(cache).of(path))


def test_ranks_of_one_host_read_once(settled: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    reads, answers = context.SimpleQueue(), context.SimpleQueue()
    ranks = [
        context.Process(target=_rank, args=(settled, tmp_path / "cache", reads, answers))
        for _ in range(3)
    ]
    for rank in ranks:
        rank.start()
    said = {answers.get() for _ in ranks}
    for rank in ranks:
        rank.join()
    assert said == {Digests(None).of(settled)}
    reads.get()
    assert reads.empty(), "others waited for the one who read"
