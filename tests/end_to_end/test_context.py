"""Runs whose rows several devices share: resumed with fewer devices a row and with none, as two processes, and with
rows that a teacher has read before.
"""

import re

import jax
import numpy as np
import pytest

from jaxlm import train
from jaxlm.core import tree
from jaxlm.engine.checkpoint.local import LocalFolder
from jaxlm.engine.checkpoint.restore import latest_valid, restore
from jaxlm.plan.load_config import load_config
from jaxlm.plan.plan import make_plan
from tests.end_to_end.commands import Workplace, check_close

RUN = ("--config_path", "run.yaml")
CONTEXT = "--trainer.context."
# 2 key/value heads for 8 devices.
METHODS = {
    "gather": (f"{CONTEXT}size", "8", f"{CONTEXT}method", "gather", f"{CONTEXT}balance", "blocks"),
    "ring": (f"{CONTEXT}size", "8", f"{CONTEXT}method", "ring", f"{CONTEXT}balance", "zigzag"),
    "usp": (f"{CONTEXT}size", "8", f"{CONTEXT}method", "usp"),
    "ulysses": (f"{CONTEXT}size", "4", f"{CONTEXT}method", "ulysses"),
}
TWO_A_ROW = (f"{CONTEXT}size", "2")


@pytest.fixture(scope="module")
def alone(uninterrupted) -> Workplace:
    """An uninterrupted run on one device."""
    return uninterrupted.place


@pytest.fixture(scope="module")
def ring(workplace) -> Workplace:
    """An uninterrupted run of eight devices."""
    place = workplace(devices=8)
    place.write()
    place.finish(*RUN, *METHODS["ring"])
    return place


# CI trains two processes below, and tests/models/test_context.py compares the attention of each with that of one device.
@pytest.mark.soak
@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_as_one_device_does(workplace, alone, method):
    place = workplace(devices=8)
    place.write()
    out = place.finish(*RUN, *METHODS[method]).out
    assert re.search(rf"^  context +{method} over \d devices", out, re.MULTILINE)
    check_close(place.losses(), alone.losses())


@pytest.mark.soak
def test_evaluations_do_not_depend_on_who_shares_a_row(alone, ring):
    one, eight = ([r["eval/loss"] for r in place.records() if "eval/loss" in r] for place in (alone, ring))
    assert eight == pytest.approx(one, rel=1e-5)
    assert len(one) >= 3


@pytest.mark.soak
def test_a_run_goes_on_with_fewer_devices_a_row(workplace, alone):
    place = workplace(devices=8)
    place.write()
    place.die(*RUN, *METHODS["ring"], at="7")
    place.die(*RUN, *TWO_A_ROW, at="14")
    out = place.finish(*RUN).out
    assert re.search(r"resuming, from checkpoints/run/step-(5|10)$", out, re.MULTILINE)
    check_close(place.losses(), alone.losses())


@pytest.mark.soak
def test_the_state_is_read_bit_for_bit_whoever_shares_a_row(ring, monkeypatch):
    monkeypatch.chdir(ring.folder)
    verified = latest_valid(LocalFolder(ring.folder / "checkpoints" / "run"), print)
    assert verified is not None
    states = []
    for arguments in (METHODS["ring"], TWO_A_ROW, ()):
        plan = make_plan(load_config([*RUN, *arguments], "test"), "run", 300, jax.devices())
        abstract = plan.state_builder.abstract_state(plan.phases[0])
        states.append(dict(tree.leaves(jax.tree.map(np.asarray, restore(verified, abstract, plan.layout)))))
    for state in states[1:]:
        assert state.keys() == states[0].keys()
        for path, leaf in state.items():
            jax.tree.map(np.testing.assert_array_equal, leaf, states[0][path])


@pytest.mark.slow
def test_two_processes_share_rows(workplace, alone):
    """Each reads only its part of a row."""
    place = workplace()
    place.write()
    ends = place.run_all(2, *RUN, "--evals", "[]", f"{CONTEXT}size", "2", f"{CONTEXT}method", "ring")
    assert [end.code for end in ends] == [0, 0], ends
    check_close(place.losses(), alone.losses())


CACHED = """
refs: {{teacher: {{type: checkpoint, path: {teacher}}}}}
objective: {{type: distill, top_k: 20, cache: true}}
"""


@pytest.mark.soak
def test_what_a_teacher_said_of_shared_rows_is_read_as_text(workplace, alone):
    """The cache that devices have written which share rows, and the other way round."""
    losses = []
    for order in ((8, 1), (1, 8)):
        place = workplace(devices=8)
        written = place.write(CACHED.format(teacher=alone.folder / "checkpoints/run"), num_steps=4)
        written.write_text(written.read_text().replace(f"cache_dir: {place.cache}\n", "cache_dir: cache\n"))
        for number, devices in enumerate(order):
            shared = (*RUN, f"{CONTEXT}size", str(devices), "--trainer.seed", "1", "--trainer.id", f"on{number}")
            shown = place.finish(*shared, XLA_FLAGS=f"--xla_force_host_platform_device_count={devices}").out
            assert ("annotating" in shown) == (number == 0)
            losses.append(place.losses(f"on{number}"))
    for found in losses[1:]:
        check_close(found, losses[0])


def test_wrong_keys_are_refused_before_anything_starts(workplace, in_process):
    place = workplace(devices=8)
    place.write()
    for arguments, message in {
        (f"{CONTEXT}size", "3"): "trainer.context.size: 3 given, which does not divide the 8 devices",
        (f"{CONTEXT}method", "ring"): "trainer.context.method: ring given, but no devices share the tokens of a row",
        (f"{CONTEXT}size", "8", f"{CONTEXT}method", "ulysses"): "4 query heads on a device, which do not divide",
    }.items():
        done = in_process(train.main, place, *RUN, *arguments)
        assert done.code == 2, done.err
        assert message in done.err
    assert not (place.folder / "checkpoints").exists()
