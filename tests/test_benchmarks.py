"""Runs the GPU benchmarks without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.xla_flags import flags_for

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


def run(*arguments, script="gpu.py"):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT / "src"), "XLA_FLAGS": flags_for(1)}
    command = [sys.executable, ROOT / "benchmarks" / script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)


@pytest.mark.soak
def test_the_gpu_benchmark_runs_completely_with_tiny(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("psutil")
    done = run("--tiny", "--models", "Llama", "--rounds", 1, "--output", tmp_path / "gpu", "--minutes", 9)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["failures"] == []
    for answers in found["models"].values():
        assert [len(answers[peer]) for peer in ("jaxlm", "torch.compile")] == [1, 1]
    assert all(case["blockwise"]["errors"]["dq"] < 0.02 for case in found["kernels"]["attention"])
    assert all(case["errors"]["loss"] < 1e-3 for case in found["kernels"]["loss"])
    table = (tmp_path / "gpu.md").read_text().splitlines()
    assert table[2].startswith("| what | peer | measured |")
    assert {line.count("|") for line in table[2:] if line} == {8}


def test_without_a_gpu_the_benchmark_says_so():
    done = run()
    assert done.returncode == 1
    assert "jax finds no NVIDIA GPU, so there is nothing to measure" in done.stderr


@pytest.mark.soak
def test_the_benchmark_of_fp8_runs_completely_with_tiny(tmp_path):
    done = run("--tiny", "--steps", 2, "--output", tmp_path / "fp8", script="fp8.py")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "fp8.json").read_text())
    assert found["failures"] == []
    variants = ["bfloat16", "tensorwise", "rowwise"]
    assert [list(answers) for answers in found["speeds"].values()] == [variants]
    assert list(found["curves"]) == variants
    assert len({tuple(losses) for losses in found["curves"].values()}) == 3, "the losses are rounded differently"
    assert all(len(losses) == 20 for losses in found["curves"].values())
