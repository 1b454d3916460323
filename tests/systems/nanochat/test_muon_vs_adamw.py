"""The benchmark of Muon beside AdamW: its two configurations, its statistics, and all of it."""

import importlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from jaxlm.plan.load_config import read_config
from tests.xla_flags import flags_for

ROOT = Path(__file__).parents[3]
BENCHMARKS = ROOT / "benchmarks"
sys.path.append(str(BENCHMARKS))  # at the end, so it shadows nothing
benchmark = importlib.import_module("muon_vs_adamw")


def test_the_configurations_differ_in_the_update_of_matrices_alone():
    muon, adamw = (read_config(BENCHMARKS / "optimizers" / f"{name}.yaml") for name in ("muon", "adamw"))
    num_steps = muon.trainer.num_train_steps
    assert replace(adamw.trainer, id="muon") == muon.trainer
    assert replace(adamw, optimizer=muon.optimizer, trainer=muon.trainer) == muon
    assert len(adamw.optimizer.groups) == len(muon.optimizer.groups) == 6
    for ours, theirs in zip(adamw.optimizer.groups, muon.optimizer.groups, strict=True):
        assert replace(ours, learning_rate=1.0, warmup=0, decay=0) == replace(
            theirs, learning_rate=1.0, warmup=0, decay=0
        )
        same_schedule(ours, theirs, num_steps)
    adamw_matrices = replace(adamw.optimizer, learning_rate=muon.optimizer.learning_rate)
    same_schedule(adamw_matrices, muon.optimizer, num_steps)


def same_schedule(ours, theirs, num_steps):
    for step in (0, 1, 39, 40, num_steps // 3, num_steps // 2, num_steps - 1):
        rates = [float(config.schedule(num_steps)(step)) for config in (ours, theirs)]
        assert rates[0] == pytest.approx(rates[1], rel=1e-5)


def test_the_step_that_reaches_a_loss_is_between_evaluations():
    losses = {10: 6.0, 20: 4.0, 30: 3.0}
    assert benchmark.steps_to(6.5, losses) == 10
    assert benchmark.steps_to(5.0, losses) == 15
    assert benchmark.steps_to(3.25, losses) == 27.5
    assert benchmark.steps_to(2.9, losses) is None


def test_the_summary_counts_only_seeds_that_get_there():
    runs = {
        "a": {0: {10: 5.0, 20: 4.0}, 1: {10: 5.0, 20: 3.0}, 2: {10: 5.0, 20: 4.5}},
        "b": {0: {10: 4.0, 20: 3.0}, 1: {10: 4.0, 20: 3.5}, 2: {10: 4.75, 20: 4.25}},
    }
    found = benchmark.summary(runs)
    assert found["steps_of_b_to_the_last_loss_of_a"] == [10.0, None, 15.0]
    assert found["ratio_to_all_steps"] == pytest.approx([0.625, (0.5**2 + 0.75**2 - 2 * 0.625**2) ** 0.5])
    assert found["last_loss_a"][0] == pytest.approx(11.5 / 3)
    assert "b misses it by 0.5000" in benchmark.row(1, runs["a"][1], runs["b"][1])


@pytest.mark.soak
def test_the_benchmark_chooses_a_rate_and_does_not_repeat_runs(tmp_path):
    pytest.importorskip("matplotlib")
    small = "--preset.depth 1 --preset.aspect_ratio 64 --model.seq_len 32 --preset.total_batch_size 128"
    small += " --data.vocab_size 512 --trainer.max_eval_batches 2"
    command = [sys.executable, str(BENCHMARKS / "muon_vs_adamw.py"), "--folder", str(tmp_path), "--steps", "12"]
    command += ["--seeds", "0,1", "--evals", "4", "--a_learning_rates", "1e-9,1e-3", "--tuning_steps", "6"]
    command += ["--a_options", small, "--b_options", small]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags_for(1)}

    def run():
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
        return done

    first = run()
    written = json.loads((tmp_path / "muon_vs_adamw.json").read_text())
    assert written["sides"]["a"].endswith("--optimizer.learning_rate 1e-3")
    assert written["learning_rates"]["a"]["1e-3"] < written["learning_rates"]["a"]["1e-9"]
    assert [list(written["losses"][side]["1"]) for side in "ab"] == 2 * [["3", "6", "9", "12"]]
    assert json.loads(first.stdout.splitlines()[-1]) == written["summary"]
    assert (tmp_path / "muon_vs_adamw.png").read_bytes()[:4] == b"\x89PNG"
    again = run()
    assert " after " not in again.stderr.replace("has it after", "").replace("after 12 steps", "")
    assert json.loads(again.stdout.splitlines()[-1]) == written["summary"]
