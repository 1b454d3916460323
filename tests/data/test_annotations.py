"""Annotations on disk: built block by block, read by position, refused if damaged or made from other inputs."""

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


def contents(folder):
    return {path.relative_to(folder.path): path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}


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
    before = contents(folder)
    assert folder.missing(np.array([5, 1, 0])).tolist() == [False, True, False]
    assert build(folder, [0, 1, 5, 6]) == 2
    assert build(folder, [6, 4]) == 0
    after = contents(folder)
    assert {name.parts[0] for name in after.keys() - before.keys()} == {"block-1"}
    assert {name: after[name] for name in before} == before
    wanted = [6, 4, 1, 0]
    np.testing.assert_array_equal(ids_of(folder, wanted), values_of(folder.examples, np.array(wanted))["ids"])
    for number in (2, 3, 7):
        with pytest.raises(LookupError, match=f"example {number} has no annotations"):
            ids_of(folder, [0, number, 4])


def test_what_a_killed_build_was_writing_is_deleted(folder):
    build(folder, [0])
    left = temporary_path(folder.path / "block-1")
    left.mkdir()
    build(folder, [0])  # nothing is missing
    assert not left.exists()


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
    with pytest.raises(ConfigError, match=r"(?s)was built from other inputs:.*objective: .*delete this folder"):
        other.open(other.blocks())


def test_damaged_records_are_noticed_when_they_are_read(folder):
    build(folder, [0, 1, 2], [3, 4, 5], [6])
    path = folder.path / "block-1" / "records.npy"
    path.write_bytes(path.read_bytes()[:-1])
    cache = folder.open(folder.blocks())
    cache.read(np.array([0, 6]))
    with pytest.raises(ConfigError, match=r"records.npy: its checksum does not match.*Delete the folder .*block-1 to"):
        cache.read(np.array([4]))


def test_damaged_indices_are_noticed_before_anything_is_read_or_added(folder):
    build(folder, [0, 1, 2], [3, 4, 5])
    path = folder.path / "block-1" / "indices.npy"
    path.write_bytes(path.read_bytes()[:-8] + np.int64(6).tobytes())
    for act in (lambda: folder.missing(np.arange(7)), lambda: folder.open(folder.blocks())):
        with pytest.raises(ConfigError, match=r"indices.npy: its checksum .*Delete the folder .*block-1 to rebuild it"):
            act()
    shutil.rmtree(path.parent)
    assert build(folder, np.arange(7)) == 4
    np.testing.assert_array_equal(ids_of(folder, [3, 6]), values_of(folder.examples, np.array([3, 6]))["ids"])


def test_blocks_of_an_earlier_version_are_made_again(folder):
    """They were pairs of files."""
    folder.path.mkdir(parents=True)
    for name in ("cache.json", "block-0.npy", "block-0.json"):
        (folder.path / name).write_text("{}")
    assert build(folder, [0, 1]) == 2
    np.testing.assert_array_equal(ids_of(folder, [0, 1]), values_of(folder.examples, np.array([0, 1]))["ids"])


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
