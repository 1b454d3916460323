"""A surgery of someone else's package: it brings its own leaves and keys from files, and merges itself into exports."""

import json
from dataclasses import dataclass
from pathlib import Path

import equinox as eqx
import haliax as hax
import jax
import numpy as np
import pytest
from haliax import NamedArray

from jaxlm.core import tree
from jaxlm.core.axes import axes_of
from jaxlm.core.errors import ConfigError
from jaxlm.data.tokenizer.tokenizer import load_tokenizer
from jaxlm.engine.entry import enter_phase
from jaxlm.interop.hf.safetensors_file import SafetensorsFile
from jaxlm.interop.hf.source_folder import NO_SOURCE
from jaxlm.models.linear import Linear
from jaxlm.plan.load_config import decode_run
from jaxlm.plan.plan import make_plan
from jaxlm.reading.decode import encode
from jaxlm.reading.yaml import ConfigSource
from jaxlm.session.export import Exporter, ExportHook
from jaxlm.surgery.base import SurgeryConfig, Wants
from tests.answers import write_tokenizer

SIZES = {"seq_len": 16, "hidden_dim": 32, "intermediate_dim": 48, "num_layers": 2, "num_heads": 4}
DOWN = "body.layers.stacked.mlp.down_proj"


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch):
    """Other tests list the registered classes."""
    monkeypatch.setattr(SurgeryConfig, "_choice_registry", dict(SurgeryConfig.get_known_choices()))


class Gain(eqx.Module):
    """A linear layer whose outputs are multiplied by {layers, *Out}."""

    base: Linear
    gain: NamedArray

    def __call__(self, x):
        return self.base(x) * self.gain

    def merged(self):
        weight = (self.base.weight * self.gain).rearrange(self.base.weight.axes)
        return eqx.tree_at(lambda layer: layer.weight, self.base, weight)


@dataclass(frozen=True)
class Gains(SurgeryConfig):
    """Multiplies the outputs of layers.

    Attributes:
        folder: contains `gains.npy`, and `target` in `gains.json`.
        target: layers.
    """

    folder: str = ""
    target: str = ".*"

    def apply(self, model, *, key):
        def wrap(layer):
            axes = tuple(axis for axis in layer.weight.axes if axis not in axes_of(layer.In))
            return Gain(layer, hax.ones(axes))

        return tree.map_modules(model, Linear, self.target, wrap)

    def merge(self, model):
        return tree.map_modules(model, Gain, self.target, Gain.merged)

    @property
    def wants(self):
        return Wants(leaves=self.read)

    def read(self, model, config):
        file = Path(self.folder) / "gains.npy"
        if not file.is_file():
            raise ConfigError(f"surgery: {file} not found")
        (path,) = [path for path, _ in tree.modules_by_path(model, Gain)]
        assert dict(tree.leaves(model))[f"{path}.gain"].array.shape == (config.num_layers, config.hidden_dim)
        return {f"{path}.gain": np.load(file)}

    def keys_from_files(self, keys, config):
        file = Path(self.folder) / "gains.json"
        return {} if "target" in keys else {"target": json.loads(file.read_text())["target"]}


@pytest.fixture
def gains(tmp_path):
    """The array in the surgery's folder, float64 {layers, embed}."""
    array = np.random.default_rng(0).normal(size=(2, 32))
    np.save(tmp_path / "gains.npy", array)
    (tmp_path / "gains.json").write_text(json.dumps({"target": "down_proj"}))
    return array


def planned(folder: Path, num_tokens: int = 61):
    surgery = {"type": "tests.surgery.test_family:Gains", "folder": str(folder)}
    phases = [{"name": "p", "surgery": [surgery], "num_train_steps": 1}, {"name": "q", "num_train_steps": 1}]
    config = {"model": {"type": "llama", **SIZES}, "phases": phases, "trainer": {"train_batch_size": 8}}
    return make_plan(decode_run(ConfigSource(config), None), "x", num_tokens)


@pytest.mark.slow
def test_a_surgery_brings_leaves_and_merges_itself_into_exports(tmp_path, gains):
    num_tokens = write_tokenizer(tmp_path / "tokenizer")
    plan = planned(tmp_path, num_tokens)
    first, second = plan.phases
    with plan.layout.use():
        state = enter_phase(plan.state_builder, first, plan.layout, None)()
        leaves = dict(tree.leaves(jax.device_get(state.model)))
        np.testing.assert_array_equal(leaves[f"{DOWN}.gain"].array, gains.astype(np.float32))
        assert not state.model.body.layers.stacked.mlp.down_proj.gain.array.sharding.is_fully_replicated
        # A later phase without a surgery has the same tree.
        tokenizer = load_tokenizer(str(tmp_path / "tokenizer"))
        ExportHook(tmp_path / "out", 1, second, Exporter(plan, tokenizer, NO_SOURCE, np.float32), print).run(2, state)
    written = SafetensorsFile(tmp_path / "out" / "step-2" / "model.safetensors")
    for layer, (gain, weight) in enumerate(zip(gains, leaves[f"{DOWN}.base.weight"].array, strict=True)):
        expected = weight.astype(np.float64) * gain[:, None]
        found = written.view(f"model.layers.{layer}.mlp.down_proj.weight")
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_what_is_saved_needs_no_file(tmp_path, gains):
    plan = planned(tmp_path)
    (surgery,) = plan.phases[0].surgeries
    assert surgery == Gains(str(tmp_path), "down_proj"), "the target is read from the folder"
    for name in ("gains.npy", "gains.json"):
        (tmp_path / name).unlink()
    again = make_plan(decode_run(ConfigSource(encode(plan.config)), None), "x", 61)
    assert again.config == plan.config
    shape = again.state_builder.abstract_state(again.phases[1]).model.body.layers.stacked.mlp.down_proj.gain.array.shape
    assert shape == gains.shape, "a resumed run rebuilds the tree"
    with pytest.raises(ConfigError, match=r"gains\.npy not found"):
        again.state_builder.initial_leaves(again.phases[0])


@pytest.mark.parametrize(
    ("brought", "message"),
    [
        (lambda: {f"{DOWN}.gian": np.ones((2, 32))}, rf"surgery.0: .*gian' has no place .*Did you mean '{DOWN}.gain'"),
        (lambda: {f"{DOWN}.gain": np.ones(32)}, r"surgery.0: .* has shape \(32,\), but .*'layers': 2, 'embed': 32"),
        (lambda: {f"{DOWN}.gain": np.load("nothing.npy")}, r"surgery.0: nothing.npy cannot be read \(No such file"),
    ],
)
def test_leaves_that_do_not_fit_are_one_message(tmp_path, gains, monkeypatch, brought, message):
    plan = planned(tmp_path)
    monkeypatch.setattr(Gains, "read", lambda *_: brought())
    with pytest.raises(ConfigError, match=message):
        plan.state_builder.initial_leaves(plan.phases[0])
