"""The benchmark of a stored trunk, of a small size."""

import json

import pytest

from tests.test_benchmarks import run


@pytest.mark.soak
def test_the_benchmark_of_a_stored_trunk_gives_both_sides_the_same_losses(tmp_path):
    options = ("--trunks", 1, "--layers", 1, "--hidden", 64, "--steps", 40, "--folder", tmp_path)
    done = run(*options, script="cached_trunk.py")
    assert done.returncode == 0, done.stderr[-3000:]
    (found,) = json.loads(done.stdout.splitlines()[-1])
    assert found["losses"] == 0
    assert found["stored"][0] > 0
    assert found["fill"] > 0
