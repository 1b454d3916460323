"""What every kind of artifact promises: made once, complete or absent, never read if it is damaged or of another key."""

import errno
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import numpy as np
import pytest

from jaxlm.core import safe_io
from jaxlm.core.errors import ConfigError
from jaxlm.data.annotations import BLOCK
from jaxlm.data.cache import artifacts
from jaxlm.data.cache import build as build_module
from jaxlm.data.cache.artifacts import Artifacts, DamagedError, Files, Kind
from jaxlm.data.cache.build import build_cache
from jaxlm.data.cache.derived_arrays import ARRAYS, ROW_INDEX, Derived, RowIndex
from jaxlm.data.cache.token_cache import TOKEN_CACHE, cache_key
from jaxlm.data.formats.documents import TextFormat
from jaxlm.data.tokenizer.train_bpe import TOKENIZER, train_bpe
from tests.data.helpers import find_files, small_tokenizer, some_text, write_corpus

ROOT = Path(__file__).parents[2]
NAME = "made"


class Case(NamedTuple):
    """A kind, the key of one of it, and what writes its files. Args: text: a folder of text files."""

    kind: Kind[Any]
    key: Callable[[Path], dict[str, Any]]
    make: Callable[[Path, Files], Any]


a_tokenizer = functools.cache(small_tokenizer)


def tokenize(text: Path, made: Files) -> Any:
    tokenizer, files = a_tokenizer(), find_files([str(text)], "x", "text")
    encoder = TextFormat().encoder(tokenizer, bos=True, eos=True, key="")
    return build_cache(made, files, encoder, cache_key(files, tokenizer, bos=True, eos=True), lambda _: None)


@functools.cache
def token_key(text: Path) -> dict[str, Any]:
    return dict(cache_key(find_files([str(text)], "x", "text"), a_tokenizer(), bos=True, eos=True))


def train(text: Path, made: Files) -> Any:
    train_bpe([some_text(seed) for seed in range(5)], 300).save(made.folder)
    return {}


def write_records(text: Path, made: Files) -> Any:
    made.put_array("records", np.arange(40).view([("ids", np.int64, 4)]))
    made.put_array("indices", np.arange(10))
    return {}


def writes(derived: Derived[Any], value: Any) -> Callable[[Path, Files], Any]:
    return lambda _, made: derived.write(made, value)


INDEX = RowIndex(np.arange(5), np.arange(7) * 3, np.ones(7, np.int32), 1, 2, np.zeros((0, 2), np.int64))
TABLES = {"body.bounds": np.arange(300, dtype=np.int32), "scale": np.array([2.5], np.float32)}


def key_of(text: Path) -> dict[str, Any]:
    return {"pairs": ((1, 2),), "files": {"a.txt": "abc"}}


CASES = {
    "token cache": Case(TOKEN_CACHE, token_key, tokenize),
    "tokenizer": Case(TOKENIZER, key_of, train),
    "block": Case(BLOCK, key_of, write_records),
    "row index": Case(ROW_INDEX.kind, key_of, writes(ROW_INDEX, INDEX)),
    "arrays": Case(ARRAYS.kind, key_of, writes(ARRAYS, TABLES)),
}


def opened(case: Case, root: Path, text: Path, changed: Any = None) -> bool:
    """Opens the artifact, reads all of it, and tells whether it was made for that."""
    made: list[Files] = []

    def make(files: Files) -> Any:
        made.append(files)
        return case.make(text, files)

    key = case.key(text) | ({} if changed is None else {"changed": changed})
    found = Artifacts(root).open_or_make(case.kind, key, make, lambda _: None, name=NAME)
    if case.kind is BLOCK:
        found.arrays()  # it is checked when it is read
    return bool(made)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    write_corpus(folder)
    return folder


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(build_module, "_SHARD_CHARACTERS", 1000)


@pytest.fixture(params=CASES)
def case(request) -> Case:
    return CASES[request.param]


@pytest.fixture
def made(case, tmp_path, text) -> Path:
    """The folder of one."""
    assert opened(case, tmp_path / "root", text)
    return tmp_path / "root" / NAME


def test_one_is_made_once_without_leftovers(case, made, text):
    before = contents(made.parent)
    assert not opened(case, made.parent, text)
    assert contents(made.parent) == before
    assert {path.name for path in made.parent.iterdir()} == {".lock", NAME}


def test_one_of_another_key_is_refused_with_the_differences_or_made_again(case, made, text):
    if case.kind.remade:
        assert opened(case, made.parent, text, changed=1)
        return
    with pytest.raises(
        ConfigError, match=r"(?s)built from other inputs:.*changed: was None, is now 1.*delete this"
    ) as e:
        opened(case, made.parent, text, changed=1)
    assert not isinstance(e.value, DamagedError)
    assert not opened(case, made.parent, text)


def damaged(raw: bytes, path: Path) -> Iterator[str]:
    """Damages a file in one way after another."""
    for name, content in {
        "truncated": raw[:-2],
        "emptied": b"",
        "extended": raw + b"\0\0",
        "list": b"[" * 99_999,
    }.items():
        path.write_bytes(content)
        yield name
    for place in np.linspace(0, len(raw) - 1, 24).astype(int).tolist():
        flipped = bytearray(raw)
        flipped[place] ^= 1 << (place % 8)
        path.write_bytes(flipped)
        yield f"bit {place}"
    path.unlink()
    yield "deleted"


def test_any_damage_to_any_file_is_noticed(case, made, text):
    whole = contents(made)
    assert case.kind.metadata in whole
    for name, raw in whole.items():
        for how in damaged(raw, made / name):
            if case.kind.remade:
                assert Artifacts(made.parent).find(case.kind, case.key(text), NAME) is None, f"{name}: {how}"
            else:
                with pytest.raises(DamagedError, match=rf"{name}: .*Delete the folder {made} to rebuild it"):
                    opened(case, made.parent, text)
        if not case.kind.remade:
            shutil.rmtree(made)
        assert opened(case, made.parent, text)
        assert contents(made) == whole


def test_what_cannot_be_written_is_read(case, made, text, monkeypatch):
    monkeypatch.setattr(os, "access", lambda _, mode: mode == os.R_OK)  # root can write everywhere
    monkeypatch.setattr(artifacts, "folder_lock", None)
    assert not opened(case, made.parent, text)
    with pytest.raises(ConfigError, match=r"data\.cache_dir: .*is not writable"):
        opened(case, made.parent / "elsewhere", text)


def test_derived_arrays_of_a_folder_that_cannot_be_written_stay_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert ARRAYS.open_or_compute(tmp_path / "x", {}, lambda: TABLES, print) is TABLES
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_reported_and_leaves_nothing_that_looks_complete(case, tmp_path, text, monkeypatch):
    synced: list[Path] = []
    monkeypatch.setattr(safe_io, "fsync", synced.append)
    opened(case, tmp_path / "whole", text)

    def full(path: Path) -> None:
        calls.append(path)
        if len(calls) > moment:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for moment in range(len(synced) - 1):  # the last one is for the entry of the complete one
        calls: list[Path] = []
        root = tmp_path / str(moment)
        with monkeypatch.context() as patch:
            patch.setattr(safe_io, "fsync", full)
            with pytest.raises(ConfigError, match=r"data\.cache_dir: no space left for .*finished work is kept"):
                opened(case, root, text)
        assert not list(root.rglob("*.tmp"))
        assert opened(case, root, text)
        assert contents(root) == contents(tmp_path / "whole")


STARTS = """
import multiprocessing, os, signal, sys
from pathlib import Path
from jaxlm.data.cache import build as build_module
from tests.data.test_artifacts import CASES, contents, opened

build_module._SHARD_CHARACTERS = 1000
text, work = Path(sys.argv[1]), Path(sys.argv[2])
KILLED, MADE, OPENED = -signal.SIGKILL, 0, 1


def start(case, root, most_calls=10**9, barrier=None):
    # In a child that kills itself at its most_calls-th call to the file system.
    child = os.fork()
    if child:
        return child
    calls = [0]
    def counted(function):
        def call(*arguments, **named):
            calls[0] += 1
            if calls[0] > most_calls:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **named)
        return call
    for name in ("fsync", "replace", "rename", "open", "mkdir", "unlink", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))
    if barrier:
        barrier.wait()
    os._exit(MADE if opened(case, root, text) else OPENED)


def end(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


for name, case in CASES.items():
    folder = work / name
    assert end(start(case, folder / "whole")) == MADE
    whole, number = contents(folder / "whole"), 0
    while end(start(case, killed := folder / f"at-{number}", number)) == KILLED:
        assert end(start(case, killed)) in (MADE, OPENED)
        assert contents(killed) == whole, (name, number)
        number += 1
    assert number > (50 if name == "token cache" else 5), (name, number)
    barrier = multiprocessing.get_context("fork").Barrier(3)
    together = [start(case, folder / "together", barrier=barrier) for _ in range(3)]
    assert sorted(map(end, together)) == [MADE, OPENED, OPENED], name
    assert contents(folder / "together") == whole, name
"""


@pytest.mark.slow
def test_starts_that_are_killed_at_any_moment_or_come_together_make_one(tmp_path, text):
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-c", STARTS, str(text), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr


class TestSharing:
    """Through a URL, whose store is fsspec's memory file system."""

    URL = "memory://shared/cache"

    @pytest.fixture(autouse=True)
    def memory(self):
        fs = fsspec.filesystem("memory")
        yield fs
        fs.rm("/shared", recursive=True)

    def opened(self, case: Case, folder: Path, text: Path) -> bool:
        made: list[Files] = []
        make = lambda files: (made.append(files), case.make(text, files))[1]  # noqa: E731
        Artifacts(folder, self.URL).open_or_make(case.kind, case.key(text), make, lambda _: None, name=NAME)
        return bool(made)

    def test_the_first_machine_makes_it_and_the_second_copies_it(self, case, tmp_path, text, memory):
        assert self.opened(case, tmp_path / "one", text)
        assert not self.opened(case, tmp_path / "one", text)
        assert not self.opened(case, tmp_path / "two", text)
        assert contents(tmp_path / "two") == contents(tmp_path / "one")

    def test_an_interrupted_upload_is_not_one(self, case, tmp_path, text, memory):
        self.opened(case, tmp_path / "one", text)
        memory.rm_file(f"/shared/cache/{NAME}/{case.kind.metadata}")
        assert self.opened(case, tmp_path / "two", text)
        assert memory.exists(f"/shared/cache/{NAME}/{case.kind.metadata}")
