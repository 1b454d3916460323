"""Whether annotations fit on the disk before they are built."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.data.annotations import AnnotationFolder
from jaxlm.data.packing import PackedSequences
from jaxlm.session import annotate
from tests.data.helpers import numbered_cache
from tests.data.test_annotations import build

EXAMPLE_BYTES = 100


@pytest.fixture
def folder(tmp_path):
    """Seven sequences in blocks of three."""
    cache = replace(numbered_cache(33), folder=tmp_path / "train")
    return AnnotationFolder(PackedSequences(cache, 5), {"tokens": "abc"}, 3)


@pytest.fixture
def free(monkeypatch):
    """Sets the free space of the disk."""
    return lambda size: monkeypatch.setattr(annotate.shutil, "disk_usage", lambda path: SimpleNamespace(free=size))


def fits(folder):
    try:
        annotate._check_space([folder], EXAMPLE_BYTES)
    except ConfigError:
        return False
    return True


def test_a_new_build_needs_space_for_every_example(folder, free):
    free(700)
    assert fits(folder)
    free(699)
    with pytest.raises(ConfigError, match=r"objective: what it stores of the training data in .* needs 0\.0 GB"):
        annotate._check_space([folder], EXAMPLE_BYTES)


def test_an_interrupted_build_needs_space_for_its_missing_blocks_alone(folder, free):
    build(folder, [0, 2], finish=False)
    free(300)
    assert fits(folder)
    free(299)
    assert not fits(folder)


def test_blocks_of_another_plan_are_deleted_first_and_make_room(folder, free):
    build(folder, [0], finish=False)
    building = folder.path.with_name(f"{folder.path.name}.building")
    left, other = sum(path.stat().st_size for path in building.iterdir()), replace(folder, block_size=4)
    free(700 - left)
    assert fits(other)
    free(699 - left)
    assert not fits(other)
