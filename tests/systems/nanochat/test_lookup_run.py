"""Runs with lookup layers: the tables are laid out once, and every checkpoint has the layout."""

import re
import shutil

import pytest

from tests.end_to_end.commands import Workplace, check_close, end_of

STEPS = 10
LOOKUP = (
    *("--config_path", "run.yaml", "--trainer.steps_per_eval", "20", "--trainer.num_train_steps", str(STEPS)),
    *("--model.lookup", "{layers: [0], num_entries: 1500, mlp_dim: 32}"),
)


def with_nano(place: Workplace) -> Workplace:
    """nanochat's model in place of Llama."""
    path = place.write()
    text = path.read_text().replace("type: llama", "type: nano").replace("  intermediate_dim: 64\n", "")
    path.write_text(text)
    return place


@pytest.fixture(scope="module")
def uninterrupted(workplace) -> Workplace:
    place = with_nano(workplace())
    place.finish(*LOOKUP)
    return place


@pytest.mark.soak
def test_a_checkpoint_has_the_layout_on_one_and_on_eight_devices(workplace, uninterrupted):
    """Bit for bit the uninterrupted run on one device; the same layout and losses on eight. Nothing is computed again."""
    place = with_nano(workplace())
    stopped = place.stop(*LOOKUP, at=6)
    assert "computing body.lookups" not in stopped.out  # the uninterrupted run did
    shutil.rmtree(place.cache / "derived")
    eight = with_nano(workplace(8))
    for name in ("checkpoints", "logs"):
        shutil.copytree(place.folder / name, eight.folder / name)
    for each in (place, eight):
        finished = each.finish(*LOOKUP)
        assert re.search(r"resuming, from .*step-\d+$", finished.out, re.MULTILINE)
        assert "computing body.lookups" not in finished.out
    assert not (place.cache / "derived").exists()
    last, bounds = f"step-{STEPS}", "model.body.lookups.0.bounds"
    assert place.losses() == uninterrupted.losses()
    assert place.digest(last) == uninterrupted.digest(last)
    assert eight.digest(last)[bounds] == uninterrupted.digest(last)[bounds]
    check_close(eight.losses(), uninterrupted.losses())


@pytest.mark.soak
def test_two_processes_have_the_same_layout(workplace, uninterrupted):
    """Process 1 has a cache folder of its own, in which nothing is computed."""
    two = with_nano(workplace())
    where = [(), ("--data.cache_dir", str(two.folder / "own"))]
    shutil.copytree(two.cache, two.folder / "own", ignore=shutil.ignore_patterns("derived", "xla"))
    for code, _, err in map(end_of, two.start_each([(*LOOKUP, *own) for own in where])):
        assert code == 0, err
    assert not (two.folder / "own" / "derived").exists()
    check_close(two.losses(), uninterrupted.losses())
    bounds = "model.body.lookups.0.bounds"
    assert two.digest(f"step-{STEPS}")[bounds] == uninterrupted.digest(f"step-{STEPS}")[bounds]
