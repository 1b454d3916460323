"""Runs whose optimizer state is in the host's memory between steps, against runs that keep it on the devices, bit for bit."""

import re

import pytest

pytestmark = pytest.mark.slow
ACCUMULATES = ("--config_path", "run.yaml", "--trainer.per_device_parallelism", "1")
OFFLOADS = ("--trainer.offload_optimizer", "true")


@pytest.mark.soak
def test_an_offloaded_run_is_killed_and_resumed_with_and_without_and_ends_in_the_same_bits(workplace):
    plain, place = workplace(devices=8), workplace(devices=8)
    plain.write()
    plain.finish(*ACCUMULATES)
    place.write()
    place.die(*ACCUMULATES, *OFFLOADS, at="8")
    place.die(*ACCUMULATES, at="14")
    out = place.finish(*ACCUMULATES, *OFFLOADS).out
    assert re.search(r"^  optimizer state +.*in the host's memory between steps", out, re.MULTILINE)
    assert place.losses() == plain.losses()
    assert place.digest("step-24") == plain.digest("step-24")
