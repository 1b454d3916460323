"""The guide's example of StackWise, from its YAML to trained stacks."""

import re
from dataclasses import replace

import pytest

from jaxlm.observe.console import Console
from jaxlm.observe.logged_run import read_run
from jaxlm.observe.page.page import render
from jaxlm.stackwise import ProgressiveRackBuilder, ProgressiveTrainer, StackWiseConfig
from jaxlm.train import train
from tests.compat.stackwise.test_stackwise import PROGRESSIVE

SMALL = """
model: {{d_model: 16, d_ff: 32, n_heads: 2, vocab_size: 300, architecture: {{blocks_per_stack: 1}}}}
data: {{dataset_path: {text}}}
{progressive}
  batch_size: 8
  seq_len: 32
  max_steps: 4
  cache_dir: cache
"""


@pytest.mark.slow
def test_the_example_of_the_guide_trains(workplace, monkeypatch, capsys):
    place = workplace()
    monkeypatch.chdir(place.folder)
    (place.folder / "text.txt").write_bytes((place.corpus / "train" / "argparse.py").read_bytes())
    (place.folder / "config.yaml").write_text(SMALL.format(text="text.txt", progressive=PROGRESSIVE.rstrip()))
    config = StackWiseConfig.from_yaml("config.yaml")
    config.validate()
    builder = ProgressiveRackBuilder(config=config, building_mode="append", default_precision="full")
    trainer = ProgressiveTrainer(config, {"trainer.id": "rack"})
    run = trainer.run_config(builder, target_stacks=2)
    train(replace(run, dry_run=True), Console())
    assert "dry run complete" in capsys.readouterr().out

    results = trainer.train_progressively(rack_builder=builder, dataloader=None, target_stacks=2)
    out = capsys.readouterr().out
    first, second = results["training_history"]
    assert (first["name"], second["name"]) == ("stack_0", "stack_1")
    assert (first["layers"], second["layers"]) == ("1", "2 (1 + 1)")
    assert (first["num_tokens"], second["num_tokens"]) == (4 * 8 * 32, 4 * 8 * 32)
    # With `append`, the first stack is the one beside the embeddings: it has the most noise.
    assert (first["hidden"], second["hidden"]) == ("mask fraction 0.9, time 1", "mask fraction 0.15, time 0")
    assert re.fullmatch(r"[\d,]+ sequences \([\d.]+ MB\)", second["stored"])
    assert re.search(rf"phase 'stack_1' ends: loss {second['losses'][0]:.4f} at step 5", out)
    assert results["final_rack_info"]["num_stacks"] == 2
    assert results["total_training_time"] > 0
    assert str(results["checkpoint"]).endswith("step-8")

    assert "phases\n  stack_0  steps 0 to 4; layers 1; trains " in out
    assert "2 (1 + 1)" in render([read_run("logs/rack")])
