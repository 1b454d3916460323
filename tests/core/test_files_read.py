"""Which differences between what the processes have read are told, and how large files are compared."""

import contextlib
import hashlib
import os

import pytest

from jaxlm.core import hashing
from jaxlm.core.runtime import differences_between_processes, from_main, main_first, main_only
from tests.processes import together


def said(*of_process: dict[str, list[str]]) -> list[str]:
    facts = [{name: " and ".join(digests) for name, digests in known.items()} for known in of_process]
    ends = together(*(lambda known=known: differences_between_processes(known, hashing._are_same) for known in facts))
    assert all(end == ends[0] for end in ends)
    return ends[0]


@pytest.fixture
def told(monkeypatch) -> list[dict[str, str]]:
    """What this process, one of two, tells the other one."""
    hashing.check_same_files()
    told = []
    monkeypatch.setattr(hashing, "exchange", lambda: True)
    monkeypatch.setattr(hashing, "differences_between_processes", lambda known, _: told.append(known) or [])
    return told


def test_only_what_all_processes_have_read_is_compared():
    assert said({"a": ["1"], "b": ["2"]}, {"a": ["1"]}) == []
    assert said({"a": ["1", "3"]}, {"a": ["1"]}) == [], "process 0 reads more"
    assert said({"a": ["1"]}, {"a": ["2"]}, {"a": ["1"]}) == ["a: 1 on processes 0, 2; 2 on process 1"]


def test_one_common_content_of_a_name_is_not_enough():
    """Folders may have files of one name, and they are read in the same order everywhere."""
    for other in (["1", "3"], ["2", "1"], ["1", "1"], ["3"]):
        content = " and ".join(other)
        assert said({"a": ["1", "2"]}, {"a": other}) == [f"a: 1 and 2 on process 0; {content} on process 1"]


def test_what_is_noted_is_compared_once(told):
    """A common content of an earlier phase, or of an earlier run, must not hide a difference in a later one."""
    for content in ("first", "second"):
        hashing.note("text", content, evaluates=True)
        hashing.note("text", content, evaluates=True)
        digest = hashlib.sha256(content.encode()).hexdigest()[:16]
        assert hashing.check_same_files() == told[-1] == {"text": digest}
    assert hashing.check_same_files() == {}


def test_files_of_one_name_are_noted_each(tmp_path, told):
    for folder, content in (("a", "1"), ("b", "1"), ("c", "2")):
        (tmp_path / folder / "data").mkdir(parents=True)
        (tmp_path / folder / "data" / "x").write_text(content)
        for _ in range(2):
            hashing.note_file(tmp_path / folder / "data" / "x")
    hashing.note_file(tmp_path / "a" / "data" / "y")
    hashing.check_same_files()
    first, second = (hashlib.sha256(content).hexdigest()[:16] for content in (b"1", b"2"))
    assert told == [{"data/x": f"{first} and {first} and {second}", "data/y": "missing"}]


@pytest.mark.parametrize("function", [main_only, from_main, main_first])
def test_what_process_0_reads_alone_is_not_noted(function):
    hashing.check_same_files()
    with contextlib.suppress(OSError):
        function(lambda: fails_after(lambda: hashing.note("text", "content", evaluates=True)))
    function(lambda: hashing.note("text", "content", evaluates=True))
    assert bool(hashing.check_same_files()) == (function is main_first), "the others read it next"
    hashing.note("text", "content", evaluates=True)
    assert hashing.check_same_files()


def fails_after(act):
    act()
    raise OSError


def test_a_large_file_is_compared_by_its_size_and_by_blocks_from_its_first_to_its_last_byte(tmp_path, monkeypatch):
    """And again only if it has changed."""
    monkeypatch.setattr(hashing, "_WHOLE_BYTES", 1000)
    reads, read = [], os.pread
    monkeypatch.setattr(os, "pread", lambda *arguments: reads.append(arguments) or read(*arguments))
    path, digests = tmp_path / "x", []
    size = 5 * hashing._BLOCK_BYTES * hashing._NUM_BLOCKS
    for place in (None, 0, size - 1):
        with open(path, "wb") as file:
            file.truncate(size)
            if place is not None:
                file.seek(place)
                file.write(b"x")
        digests += [hashing._digest(path) for _ in range(2)]
    assert len(set(digests)) == 3
    assert len(reads) == 3 * hashing._NUM_BLOCKS <= 3 * 1_024


def test_a_file_of_the_hubs_cache_has_its_repositorys_name(tmp_path):
    snapshot = tmp_path / "hub" / "models--a--b" / "snapshots"
    names = {hashing.name_of(snapshot / commit / "model.safetensors") for commit in ("1f", "2e")}
    assert names == {"models--a--b/model.safetensors"}
    assert hashing.name_of(tmp_path / "base" / "config.json") == "base/config.json"
