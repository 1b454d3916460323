"""The models and the loss on eight simulated devices, against one device."""

import json
import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest

DATA_WAYS = {"fsdp8": 8, "tp2_fsdp4": 4, "tp2_fsdp4_vocab": 4, "hsdp2x4": 4}
HEAD = 64 * 32
FAMILIES = {"llama": list(DATA_WAYS), "gpt2": list(DATA_WAYS)}
# Tensor parallelism without a sharded vocabulary is a part of the layout with one.
SLOW = {"llama": ("fsdp8", "tp2_fsdp4_vocab", "hsdp2x4")}


@lru_cache
def reports(layouts: tuple[str, ...], *program: str) -> dict:
    """What a program says of these layouts. Args: program: as on a command line."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    run = subprocess.run(
        [sys.executable, *program, *layouts],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1])


def cases():
    """One process computes all layouts of a family that are tested together."""
    for family, layouts in FAMILIES.items():
        slow = SLOW.get(family, ())
        others = tuple(layout for layout in layouts if layout not in slow)
        for mark, together in ((pytest.mark.slow, slow), (pytest.mark.soak, others)):
            for layout in together:
                yield pytest.param(family, layout, together, id=f"{family}-{layout}", marks=mark)


@pytest.mark.parametrize(("family", "layout", "together"), cases())
def test_equals_one_device_with_only_the_expected_collectives(family, layout, together):
    check_layout(reports(together, str(Path(__file__).with_name("sharded_program.py")), family), layout)


def check_layout(report, layout):
    found = report[layout]
    # Loss, metrics, evaluation loss per token, every leaf of the gradient; then greedy tokens.
    assert found["difference"] < 1e-5
    assert found["text"] == report["text"]
    assert found["gradient_at_rest"]
    assert found["largest_gather"] <= max(report["layer"], HEAD), "more than one layer, or the head, gathered at once"
    head_part = HEAD // DATA_WAYS[layout] // (2 if layout.endswith("vocab") else 1)
    assert head_part in found["scatters"], "the head's gradient is not scattered to where it rests"
    assert found["whole_stacks"] == [], "gathered parameters of all layers exist at once"
