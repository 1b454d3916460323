"""LoRA: nothing changes at first, merging changes nothing, and the adapters rest where their axes say."""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.models.base import Inputs, vocab_axis
from jaxlm.models.llama import LlamaConfig
from jaxlm.surgery.lora import LoraConfig, LoraLinear, merge_lora

MODEL = LlamaConfig(seq_len=16, hidden_dim=32, intermediate_dim=48, num_layers=2, num_heads=4, num_kv_heads=2)


@pytest.fixture(scope="module")
def model():
    return MODEL.build(vocab_axis(64), key=jax.random.PRNGKey(0))


def adapted(model, **config):
    return LoraConfig(**config).apply(model, refs={}, calibration=None, key=jax.random.PRNGKey(1))


def randomised(model):
    """Adapters that do something."""

    def fill(path, leaf):
        if not path.endswith((".a", ".b")):
            return leaf
        return hax.random.normal(jax.random.PRNGKey(len(path)), leaf.axes) * 0.1

    return tree.map_leaves(fill, model)


@jax.jit
def logits(model):
    axes = (hax.Axis("batch", 3), MODEL.Pos)
    ids = hax.random.randint(jax.random.PRNGKey(2), axes, 0, 64)
    ones = hax.ones(axes, dtype=jnp.int32)
    positions = hax.arange(MODEL.Pos).broadcast_axis(axes[0]).rearrange(axes)
    return model.logits(model.hidden(Inputs(ids, positions, ones)).final).array


def test_the_adapted_model_begins_as_the_model_it_was(model):
    assert np.array_equal(logits(adapted(model, target="attn|mlp")), logits(model))


def test_merging_changes_nothing_but_the_shape_of_the_tree(model):
    busy = randomised(adapted(model, target="attn|mlp", rank=4))
    assert np.abs(logits(busy) - logits(model)).max() > 1e-2
    merged = merge_lora(busy)
    np.testing.assert_allclose(logits(merged), logits(busy), atol=1e-5)
    assert jax.tree.structure(merged) == jax.tree.structure(model)


def test_only_what_matches_is_adapted(model):
    paths = {path for path, _ in tree.leaves(adapted(model, target=r"q_proj|v_proj"))}
    assert {p for p in paths if p.endswith((".a", ".b"))} == {
        f"body.layers.stacked.attn.{name}_proj.{part}" for name in "qv" for part in "ab"
    }


def test_scale(model):
    def scales(changed):
        is_lora = lambda x: isinstance(x, LoraLinear)  # noqa: E731
        return {m.scale for m in jax.tree.leaves(changed, is_leaf=is_lora) if is_lora(m)}

    assert scales(adapted(model, rank=4, alpha=8.0)) == {2.0}
    assert scales(adapted(model, rank=4, alpha=8.0, rslora=True)) == {4.0}


@pytest.mark.parametrize(("config", "named"), [({"target": "nothing"}, "q_proj"), ({"rank": 0}, "rank 0")])
def test_what_cannot_be_done(model, config, named):
    with pytest.raises(ConfigError, match=named):
        adapted(model, **config)


def test_it_traces_without_numbers_and_adapters_have_the_axes_of_their_layers(model):
    abstract = eqx.filter_eval_shape(lambda m: adapted(m, target="down_proj", rank=4), model)
    axes = {
        path: tuple(ax.name for ax in leaf.axes) for path, leaf in tree.leaves(abstract) if path.endswith((".a", ".b"))
    }
    assert axes == {
        "body.layers.stacked.mlp.down_proj.a": ("layers", "lora_rank", "mlp"),
        "body.layers.stacked.mlp.down_proj.b": ("layers", "embed", "lora_rank"),
    }
