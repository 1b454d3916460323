"""Annotations on disk: built block by block, read by position, refused if damaged or made from other inputs."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.core.safe_io import temporary_path
from jaxlm.data import annotations
from jaxlm.data.annotations import AnnotatedExamples, AnnotationFolder, AskingBatches
from jaxlm.data.packing import PackedSequences
from tests.data.helpers import numbered_cache

KEY = {"tokens": "abc", "objective": {"top_k": 2}}


@pytest.fixture
def folder(tmp_path):
    """Seven sequences."""
    cache = replace(numbered_cache(33), folder=tmp_path / "train")
    return AnnotationFolder(PackedSequences(cache, 5), KEY)


def values_of(sequences, indices):
    tokens = sequences.read(indices)["tokens"]
    return {"ids": np.stack([tokens, tokens + 1], -1).astype(np.int32)}


def build(folder, *parts):
    """Adds a block for each part that is not there yet. Returns how many examples were missing."""
    with folder.locked(lambda _: None):
        missing = [np.array(part)[folder.missing(np.array(part))] for part in parts]
        for indices in missing:
            if len(indices):
                folder.write(indices, values_of(folder.examples, indices))
    return sum(map(len, missing))


def ids_of(folder, indices):
    examples = AnnotatedExamples(folder.examples, folder.open(folder.blocks()), {"ids": np.dtype(np.int32)})
    return examples.read(np.array(indices))["annotations.ids"]


def test_every_example_gets_its_own(folder):
    assert build(folder, [0, 1, 2], [3, 4, 5], [6]) == 7
    examples = AnnotatedExamples(folder.examples, folder.open(folder.blocks()), {"ids": np.dtype(np.int32)})
    indices = np.array([6, 0, 5, 2, 3])
    found = examples.read(indices)
    np.testing.assert_array_equal(found["annotations.ids"], values_of(folder.examples, indices)["ids"])
    np.testing.assert_array_equal(found["tokens"], folder.examples.read(indices)["tokens"])
    assert len(examples) == 7


def test_what_is_missing_is_added_and_the_rest_stays(folder):
    assert folder.missing(np.arange(3)).all(), "nothing is stored yet"
    assert build(folder, [0, 4, 5]) == 3
    before = {path.name: path.read_bytes() for path in folder.path.iterdir()}
    assert folder.missing(np.array([5, 1, 0])).tolist() == [False, True, False]
    assert build(folder, [0, 1, 5, 6]) == 2
    assert build(folder, [6, 4]) == 0
    after = {path.name: path.read_bytes() for path in folder.path.iterdir()}
    assert after.keys() - before.keys() == {"block-1.npy", "block-1.json"}
    assert {name: after[name] for name in before} == before
    wanted = [6, 4, 1, 0]
    np.testing.assert_array_equal(ids_of(folder, wanted), values_of(folder.examples, np.array(wanted))["ids"])
    for number in (2, 3, 7):
        with pytest.raises(LookupError, match=f"example {number} has no annotations"):
            ids_of(folder, [0, number, 4])


def test_a_block_without_its_json_is_made_again(folder):
    build(folder, [0, 1], [2, 3])
    (folder.path / "block-1.json").unlink()
    leftover = folder.path / "block-1.npy"
    assert folder.missing(np.arange(4)).tolist() == [False, False, True, True]
    with folder.locked(lambda _: None):
        assert not leftover.exists()
    assert build(folder, [0, 1, 2, 3]) == 2
    np.testing.assert_array_equal(ids_of(folder, [3, 0]), values_of(folder.examples, np.array([3, 0]))["ids"])


def test_what_a_killed_build_was_writing_is_deleted(folder):
    build(folder, [0])
    left = [temporary_path(folder.path / name) for name in ("cache.json", "block-0.npy", "block-7.json")]
    of_another_host = folder.path / "cache.json.elsewhere-1a2b3c4d.tmp"
    for path in (*left, of_another_host):
        path.write_bytes(b"half")
    build(folder, [0])  # nothing is missing
    assert [path for path in (*left, of_another_host) if path.exists()] == [of_another_host]


def test_few_blocks_are_open_at_a_time(folder, monkeypatch):
    monkeypatch.setattr(annotations, "_MAX_OPEN", 2)
    build(folder, *[[index] for index in range(7)])
    cache = folder.open(folder.blocks())
    for indices in ([0, 6, 3], [3, 2, 1, 0], [5, 6]):
        expected = values_of(folder.examples, np.array(indices))["ids"]
        np.testing.assert_array_equal(cache.read(np.array(indices))["ids"], expected)
        assert len(cache._open) <= 2


def test_the_folder_depends_on_what_the_annotations_were_made_from(folder):
    build(folder, [0])
    other = replace(folder, made_from={**KEY, "objective": {"top_k": 3}})
    assert other.path != folder.path
    folder.path.rename(other.path)
    with pytest.raises(ConfigError, match=r"were made from other inputs \(objective differ\)\. Delete this folder"):
        other.open(other.blocks())


@pytest.mark.parametrize("position", [0, -1])
def test_a_changed_byte_is_noticed_when_its_block_is_read(folder, position):
    build(folder, [0, 1, 2], [3, 4, 5], [6])
    path = folder.path / "block-1.npy"
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)
    cache = folder.open(folder.blocks())
    cache.read(np.array([0, 6]))
    with pytest.raises(ConfigError, match=r"block-1.npy: its checksum does not match.*delete .*block-1.json to build"):
        cache.read(np.array([4]))


def test_missing_and_unreadable_files_are_noticed_at_once(folder):
    build(folder, [0, 1, 2], [3, 4, 5], [6])
    (folder.path / "block-2.npy").unlink()
    with pytest.raises(ConfigError, match=r"block-2.npy: the file is missing"):
        folder.open(folder.blocks())
    (folder.path / "block-0.json").write_text('{"crc32": 1')
    with pytest.raises(ConfigError, match=r"block-0.json: it cannot be read"):
        folder.missing(np.arange(2))


def changed(folder, name, **keys):
    path = folder.path / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


@pytest.mark.parametrize(
    "indices", [[3, 4], [5, 4, 3], [4, 5, 6], [2, 3, 4, 5], 5, [[3, 4, 5]], [10**30], "345", {}, [True], None]
)
def test_changed_indices_are_noticed_before_anything_is_read_or_added(folder, indices):
    build(folder, [0, 1, 2], [3, 4, 5])
    changed(folder, "block-1.json", indices=indices)
    for act in (lambda: folder.missing(np.arange(7)), lambda: folder.open(folder.blocks())):
        with pytest.raises(
            ConfigError, match=r"The annotations are damaged: delete .*block-1\.json to build them again"
        ):
            act()
    (folder.path / "block-1.json").unlink()
    assert build(folder, np.arange(7)) == 4
    np.testing.assert_array_equal(ids_of(folder, [3, 6]), values_of(folder.examples, np.array([3, 6]))["ids"])


def test_blocks_of_versions_without_a_checksum_of_the_indices_are_read(folder):
    build(folder, [0, 1, 2], [3, 4, 5])
    path = folder.path / "block-1.json"
    content = json.loads(path.read_text())
    del content["indices_crc32"]
    path.write_text(json.dumps(content))
    np.testing.assert_array_equal(ids_of(folder, [4, 0]), values_of(folder.examples, np.array([4, 0]))["ids"])
    path.write_text(json.dumps({**content, "indices": [3, 4]}))
    with pytest.raises(ConfigError, match=r"it has 3 records, but block-1.json has 2 indices.* delete .*block-1.json"):
        ids_of(folder, [4])


def test_an_empty_block_is_noticed(folder):
    build(folder, [0, 1, 2], [3, 4, 5])
    (folder.path / "block-1.npy").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"block-1.npy: it cannot be read: .* delete .*block-1.json to build"):
        ids_of(folder, [4])


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"made_from": []}', '{"made_from": "abc"}', '{"made_from": null}']
)
def test_a_damaged_key_is_noticed(folder, content):
    build(folder, [0, 1])
    (folder.path / "cache.json").write_text(content)
    with pytest.raises(ConfigError, match=f"cache.json: it cannot be read: .* delete {folder.path} to build"):
        folder.open(folder.blocks())


def test_a_file_that_is_named_like_a_block_is_refused(folder):
    build(folder, [0, 1])
    for suffix in (".json", ".npy"):
        shutil.copy(folder.path / f"block-0{suffix}", folder.path / f"block-x{suffix}")
    for act in (lambda: folder.missing(np.arange(7)), lambda: build(folder, [2]), folder.blocks):
        with pytest.raises(ConfigError, match=r"block-x.json: its name has no number.* delete .*block-x.json to build"):
            act()
    (folder.path / "block-x.json").unlink()
    assert build(folder, [0, 1, 2]) == 1
    assert not (folder.path / "block-x.npy").exists()


class Recorded:
    """Batches of four examples."""

    def __init__(self):
        self.examples = 0

    def __next__(self):
        self.examples += 4

    def state(self):
        return {"examples": self.examples}

    def restore(self, state):
        self.examples = state["examples"]

    def skip(self, num_steps):
        self.examples += 4 * num_steps

    def due(self, step):
        return False


def test_annotations_are_asked_for_from_the_position_on():
    asked = []
    batches = AskingBatches(Recorded(), lambda *arguments: asked.append(arguments))
    for step in range(3):
        if batches.due(step):
            batches.refresh("model", step)
        next(batches)
    batches.skip(2)
    assert batches.due(3)
    batches.refresh("model", 3)
    batches.restore({"examples": 8})
    batches.refresh("model", 2)
    assert asked == [("model", 0, 0), ("model", 3, 20), ("model", 2, 8)]
