"""Which differences between what the processes have read are told, and how large files are compared."""

import json

from jaxlm.core.values import files_read


def said(*of_process: dict[str, list[str]]) -> list[str]:
    return files_read._differences([json.dumps(known).encode() for known in of_process])


def test_only_what_all_processes_have_read_is_compared():
    assert said({"a": ["1"], "b": ["2"]}, {"a": ["1"]}) == []
    assert said({"a": ["1", "3"]}, {"a": ["1"]}) == [], "process 0 reads more"
    assert said({"a": ["1"]}, {"a": ["2"]}, {"a": ["1"]}) == ["a: 1 on process 0, 2; 2 on process 1"]


def test_a_large_file_is_compared_by_its_size_and_by_blocks_from_its_first_to_its_last_byte(tmp_path, monkeypatch):
    monkeypatch.setattr(files_read, "_WHOLE_BYTES", 1000)
    path, digests = tmp_path / "x", []
    size = 5 * files_read._BLOCK_BYTES * files_read._NUM_BLOCKS
    for place in (None, 0, size - 1):
        with open(path, "wb") as file:
            file.truncate(size)
            if place is not None:
                file.seek(place)
                file.write(b"x")
        digests.append(files_read._digest(path))
    assert len(set(digests)) == 3


def test_a_file_of_the_hubs_cache_has_its_repositorys_name(tmp_path):
    snapshot = tmp_path / "hub" / "models--a--b" / "snapshots"
    names = {files_read.name_of(snapshot / commit / "model.safetensors") for commit in ("1f", "2e")}
    assert names == {"models--a--b/model.safetensors"}
    assert files_read.name_of(tmp_path / "base" / "config.json") == "base/config.json"
