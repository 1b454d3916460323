"""The models and the loss on eight simulated devices, against one device."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LAYOUTS = ["fsdp8", "tp2_fsdp4", "tp2_fsdp4_vocab", "hsdp2x4"]
DATA_WAYS = {"fsdp8": 8, "tp2_fsdp4": 4, "tp2_fsdp4_vocab": 4, "hsdp2x4": 4}
HEAD = 64 * 32


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def report(request):
    program = Path(__file__).with_name("sharded_program.py")
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    run = subprocess.run(
        [sys.executable, program, request.param],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_one_device(report, layout):
    """Loss, metrics, every token's evaluation loss, every gradient leaf, and greedily decoded tokens."""
    assert report[layout]["difference"] < 1e-5
    assert report[layout]["text"] == report["text"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_device_receives_more_than_it_needs(report, layout):
    found = report[layout]
    assert found["largest_gather"] <= max(report["layer"], HEAD), "more than one layer, or the head, gathered at once"
    head_part = HEAD // DATA_WAYS[layout] // (2 if layout.endswith("vocab") else 1)
    assert head_part in found["scatters"], "the head's gradient is not scattered to where it rests"
    assert found["whole_stacks"] == [], "gathered parameters of all layers exist at once"


@pytest.mark.parametrize("layout", ["fsdp8", "tp2_fsdp4", "hsdp2x4"])
def test_gradients_land_where_parameters_rest(report, layout):
    assert report[layout]["gradient_at_rest"]
