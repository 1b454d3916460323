"""Adapters stack by stack: a grown model has at most one on each weight, with ranks of its own for each stack."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.surgery.base import merge_surgeries
from jaxlm.surgery.lora import LoraConfig, save_peft
from jaxlm.surgery.lora_layers import LoraLinear
from jaxlm.systems.progressive.surgery import GrowConfig
from tests.engine.helpers import one_device

GQA = {"seq_len": 16, "hidden_dim": 32, "intermediate_dim": 48, "num_heads": 4, "num_kv_heads": 2}
LLAMA = LlamaConfig(**GQA, num_layers=1)
KEY = jax.random.key(1)
TARGET = r"layers\..*(attn|mlp)"
SURGERIES = [
    step
    for rank in (2, 4, 8)
    for step in (LoraConfig(target=TARGET, rank=rank, existing="keep"), GrowConfig(1, init="random"))
]


def applied(model, surgeries):
    for number, surgery in enumerate(surgeries):
        model = surgery.apply(model, key=jax.random.fold_in(KEY, number))
    return model


def filled(model):
    return tree.map_leaves(lambda path, leaf: leaf + 0.05 if path.endswith((".a", ".b")) else leaf, model)


def logits(model, as_inputs):
    ids = np.random.default_rng(0).integers(0, 40, size=(2, 16))
    inputs = as_inputs(ids, np.broadcast_to(np.arange(16), (2, 16)), np.ones((2, 16), int))
    return np.asarray(jax.jit(lambda model: model.logits(model.hidden(inputs).final).array)(model))


def ranks(model):
    """Rank of the adapters of each stack; None without."""
    found = []
    for stack in model.body.stacks:
        layers = tree.modules(stack, LoraLinear)
        assert len(layers) in (0, 7), "q, k, v, o, gate, up and down"
        found.append(layers[0].a.axis_size("lora_rank") if layers else None)
    return found


@pytest.mark.slow
def test_every_stack_of_the_trunk_has_one_adapter_of_its_own_rank(built, as_inputs, tmp_path):
    """After three growths. Merged, it is a plain model with the same outputs; PEFT reads the adapters."""
    model = filled(applied(built(LLAMA), SURGERIES))
    assert ranks(model) == [2, 4, 8, None]
    assert not any(isinstance(layer.base, LoraLinear) for layer in tree.modules(model, LoraLinear))
    merged = merge_surgeries(model, SURGERIES)
    whole = dataclasses.replace(LLAMA, num_layers=4)
    assert jax.tree.structure(merged) == jax.tree.structure(built(whole))
    expected = logits(model, as_inputs)
    np.testing.assert_allclose(logits(merged, as_inputs), expected, atol=1e-5 * np.abs(expected).max())
    save_peft(tmp_path, model, whole, one_device(), dtype=np.float32, base="x")
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert sorted({written["r"], *written["rank_pattern"].values()}) == [2, 4, 8]


@pytest.mark.slow
def test_existing_adapters_are_kept_or_merged(built, as_inputs):
    first = LoraConfig(target="attn", rank=2)
    model = filled(first.apply(built(LLAMA), key=KEY))
    kept = LoraConfig(target="attn|mlp", rank=4, existing="keep").apply(model, key=KEY)
    layer = kept.body.layers.stacked
    assert (layer.attn.q_proj.a.axis_size("lora_rank"), layer.mlp.up_proj.a.axis_size("lora_rank")) == (2, 4)
    np.testing.assert_array_equal(layer.attn.q_proj.b.array, model.body.layers.stacked.attn.q_proj.b.array)
    again = LoraConfig(target="attn", rank=4, existing="merge")
    reset = again.apply(model, key=KEY)
    assert not np.asarray(reset.body.layers.stacked.attn.q_proj.b.array).any()
    expected = logits(model, as_inputs)
    assert np.abs(expected - logits(built(LLAMA), as_inputs)).max() > 1e-3
    np.testing.assert_allclose(logits(reset, as_inputs), expected, atol=1e-5 * np.abs(expected).max())
    moments = [path for path, _ in tree.leaves(again.moved(model, None))]
    assert not any(path.endswith((".a", ".b")) for path in moments), "new adapters have no moments"
    for surgery, message in [
        (LoraConfig(target="attn", rank=4), "already has an adapter"),
        (LoraConfig(target="attn", existing="keep"), "have adapters already"),
        (LoraConfig(target="mlp", existing="merge"), "no layer that target 'mlp' matches has an adapter"),
    ]:
        with pytest.raises(ConfigError, match=message):
            surgery.apply(model, key=KEY)


def test_ranks_are_at_most_half_of_a_matrix(built):
    """The matrices are 32 x 32 (q), 16 x 32 (k) and 48 x 32 (MLP)."""
    model = LoraConfig(target="attn|mlp", rank=32768, alpha=8.0, cap_rank=True).apply(built(LLAMA), key=KEY)
    layer = model.body.layers.stacked
    found = [one.a.axis_size("lora_rank") for one in (layer.attn.q_proj, layer.attn.k_proj, layer.mlp.up_proj)]
    assert found == [16, 8, 16]
    assert layer.attn.k_proj.scale == 1.0, "alpha / rank, of the rank that it has"
