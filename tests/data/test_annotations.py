"""Annotations on disk: built block by block, read by position, refused if damaged or made from other inputs."""

from dataclasses import replace

import numpy as np
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.data.annotations import AnnotatedExamples, AnnotationFolder
from jaxlm.data.packing import PackedSequences
from tests.data.helpers import numbered_cache

KEY = {"tokens": "abc", "objective": {"top_k": 2}}


@pytest.fixture
def folder(tmp_path):
    """Seven sequences in blocks of three."""
    cache = replace(numbered_cache(33), folder=tmp_path / "train")
    return AnnotationFolder(PackedSequences(cache, 5), KEY, 3)


def values_of(sequences, indices):
    tokens = sequences.read(indices)["tokens"]
    return {"ids": np.stack([tokens, tokens + 1], -1).astype(np.int32)}


def build(folder, blocks=None, finish=True):
    with folder.prepared(lambda _: None) as missing:
        for number in missing if blocks is None else blocks:
            folder.write(number, values_of(folder.examples, folder.indices(number)))
        if finish:
            folder.finish()
    return missing


def test_every_example_gets_its_own(folder):
    assert build(folder) == [0, 1, 2]
    examples = AnnotatedExamples(folder.examples, folder.open(), {"ids": np.dtype(np.int32)})
    indices = np.array([6, 0, 5, 2, 3])
    found = examples.read(indices)
    np.testing.assert_array_equal(found["annotations.ids"], values_of(folder.examples, indices)["ids"])
    np.testing.assert_array_equal(found["tokens"], folder.examples.read(indices)["tokens"])
    assert len(examples) == 7


def test_an_interrupted_build_continues_and_a_complete_one_is_not_repeated(folder):
    build(folder, [0, 2], finish=False)
    with pytest.raises(ConfigError, match=r"cache.json: it cannot be read"):
        folder.open()
    assert build(folder, finish=True) == [1]
    with folder.prepared(lambda _: None) as missing:
        assert missing == []
    assert [path.name for path in folder.path.parent.iterdir() if path.is_dir()] == [folder.path.name]


def test_what_is_to_build_are_the_missing_blocks(folder):
    assert folder.to_build() == (7, 0)
    build(folder, [0], finish=False)
    assert folder.to_build() == (4, 0)
    build(folder, [2], finish=False)
    assert folder.to_build() == (3, 0)


def test_another_block_size_starts_over(folder):
    build(folder, [0], finish=False)
    building = folder.path.with_name(f"{folder.path.name}.building")
    left = sum(path.stat().st_size for path in building.iterdir())
    assert replace(folder, block_size=4).to_build() == (7, left)
    assert build(replace(folder, block_size=4)) == [0, 1]


def test_the_folder_depends_on_what_the_annotations_were_made_from(folder):
    build(folder)
    other = replace(folder, made_from={**KEY, "objective": {"top_k": 3}})
    assert other.path != folder.path
    folder.path.rename(other.path)
    with pytest.raises(ConfigError, match=r"were made from other inputs \(objective differ\)\. Delete this folder"):
        other.open()


@pytest.mark.parametrize("position", [0, -1])
def test_a_changed_byte_is_noticed_when_its_block_is_read(folder, position):
    build(folder)
    path = folder.path / "block-1.npy"
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)
    cache = folder.open()
    cache.read(np.array([0, 6]))
    with pytest.raises(ConfigError, match=r"block-1.npy: its checksum does not match.*delete .* to build them again"):
        cache.read(np.array([4]))


def test_a_missing_block_is_noticed_at_once(folder):
    build(folder)
    (folder.path / "block-2.npy").unlink()
    with pytest.raises(ConfigError, match=r"block-2.npy: the file is missing"):
        folder.open()
