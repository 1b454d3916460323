"""A run that an earlier version of jaxlm began continues: same paths, optimizer state, regular expressions, losses.

`tests/vectors/earlier_run` was written on one device by commit d17b901 (`python -m jaxlm.train --config_path
run.yaml`, in a folder with these two files): the checkpoints before the end of either phase, and the losses of all steps.
"""

import hashlib
import io
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.observe.console import Console
from jaxlm.plan.load_config import load_config, read_config
from jaxlm.plan.refs.checkpoint import CheckpointRefConfig
from jaxlm.session.load_model import open_model
from jaxlm.train import train
from tests.tiers import one_of

pytestmark = pytest.mark.slow

EARLIER = Path(__file__).parents[1] / "vectors" / "earlier_run"
LOSSES = {record["step"]: record["train/loss"] for record in json.loads((EARLIER / "losses.json").read_text())}


@pytest.fixture
def place(tmp_path, monkeypatch):
    for name in ("run.yaml", "corpus.txt"):
        shutil.copy(EARLIER / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", one_of(["step-6", "step-3"]))
def test_a_run_of_an_earlier_version_continues(place, name):
    """From the middle of the first phase (the whole model's optimizer state), and of the second (that of adapters)."""
    shutil.copytree(EARLIER / name, place / "checkpoints" / "run" / name)
    console = io.StringIO()
    options = ["--config_path", "run.yaml", "--trainer.fsdp_axis", "null"]  # too small to shard over eight devices
    result = train(load_config(options, "test"), Console(console))
    assert re.search(rf"resuming, from .*{name}$", console.getvalue(), re.MULTILINE)
    lines = (place / "logs" / "run" / "metrics.jsonl").read_text().splitlines()
    losses = {record["step"]: record["train/loss"] for record in map(json.loads, lines) if "train/loss" in record}
    first = int(name.removeprefix("step-")) + 1
    assert list(losses) == list(range(first, 9))
    for step, loss in losses.items():
        assert loss == pytest.approx(LOSSES[step], rel=1e-5), f"step {step}"
    paths = {path for path, _ in tree.leaves(result.state.model)}
    assert {
        "body.layers.stacked.attn.q_proj.a",
        "body.layers.stacked.mlp.up_proj.weight",
        "body.final_norm.weight",
    } <= paths
    assert "body.layers.stacked.mlp.up_proj.a" not in paths


def test_its_configuration_and_its_average_are_read(place):
    """Commands that read a checkpoint use the configuration that it was saved with."""
    keys, name = {"trainer.fsdp_axis": None}, str(EARLIER / "step-6")
    loaded = open_model(name, keys)
    (phase,) = (phase for phase in loaded.plan.phases if phase.start < 6 <= phase.end)
    with loaded.plan.layout.use():
        trained, average = loaded.load(), open_model(name, keys, weights="ema").load()
    mask = dict(tree.leaves(phase.mask(trained)))
    assert [path for path, trains in mask.items() if trains and path.endswith(".a")] == [
        f"body.layers.stacked.attn.{name}_proj.a" for name in "qkvo"
    ]
    averaged = dict(tree.leaves(average))
    changed = {path for path, leaf in tree.leaves(trained) if not np.array_equal(leaf.array, averaged[path].array)}
    assert changed == {path for path, trains in mask.items() if trains}


def test_its_model_is_read_without_the_modules_that_followed_its_training(place):
    saved = place / "run" / "step-6"
    shutil.copytree(EARLIER / "step-6", saved)
    config, checksums = saved / "run" / "config.yaml", saved / "checksums.json"
    following = "trainer:\n  callbacks: [{type: 'gone:Callback', path: x}]\n  tracker: {type: 'gone:Tracker'}\n"
    lines = [
        line for line in config.read_text().splitlines(keepends=True) if not re.match(r"  (callbacks|tracker):", line)
    ]
    config.write_text("".join(lines).replace("trainer:\n", following))
    hashes = json.loads(checksums.read_text())
    checksums.write_text(json.dumps(hashes | {"run/config.yaml": hashlib.sha256(config.read_bytes()).hexdigest()}))
    assert open_model("run", {"trainer.fsdp_axis": None}).plan.config.trainer.callbacks == []
    assert CheckpointRefConfig("run").open("refs.teacher").model_config().num_layers == 2
    with pytest.raises(ConfigError, match="importing gone failed: ModuleNotFoundError"):
        read_config(config)
