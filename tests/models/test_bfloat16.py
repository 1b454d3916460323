"""Gradients of whole models in bfloat16, compared parameter by parameter with those in float32."""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from jaxlm.core import tree
from jaxlm.interop.hf.families.gpt2 import Gpt2Config
from jaxlm.interop.hf.families.qwen2 import Qwen2Config
from jaxlm.models.base import Inputs, vocab_axis
from jaxlm.models.loss import next_token_sums
from tests.tiers import one_of

VOCAB, LENGTH, ROWS = 64, 256, 32
SIZES = {"seq_len": LENGTH, "hidden_dim": 32, "num_layers": 2, "num_heads": 2}
MODELS = {
    "gpt2": Gpt2Config(**SIZES),
    "qwen2": Qwen2Config(**SIZES, num_kv_heads=1, intermediate_dim=64),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", one_of(MODELS))
def test_no_sum_over_tokens_loses_terms(name):
    check_sums(MODELS[name])


def check_sums(config):
    """The text has 8,192 tokens, of which a fifth are the same one. Summed in bfloat16, gradients of factors, biases and
    tables would be off by up to 43 %."""
    model = config.build(vocab_axis(VOCAB), key=jax.random.key(0))
    arrays, rest = eqx.partition(model, eqx.is_inexact_array)
    leaves, structure = jax.tree.flatten(arrays)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noisy = [leaf + 0.05 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    arrays = jax.tree.unflatten(structure, noisy)
    axes = (Axis("batch", ROWS), Axis("position", LENGTH))
    frequencies = 1 / np.arange(1, VOCAB + 1)
    random = np.random.default_rng(0).choice(VOCAB, (ROWS, LENGTH + 1), p=frequencies / frequencies.sum())
    tokens, targets = (hax.named(jnp.asarray(ids), axes) for ids in (random[:, :-1], random[:, 1:]))
    positions = hax.named(jnp.tile(jnp.arange(LENGTH), (ROWS, 1)), axes)
    inputs = Inputs(tokens, positions, hax.ones(axes, dtype=jnp.int32))

    def gradients(dtype):
        def loss(arrays):
            model = eqx.combine(jax.tree.map(lambda leaf: leaf.astype(dtype), arrays), rest)
            sums = next_token_sums(
                model.hidden(inputs).final,
                model.lm_head(),
                targets,
                hax.ones(axes),
                soft_cap=model.traits.logit_soft_cap,
                vocab_multiple=model.traits.vocab_multiple,
            )
            return sums.total / tokens.array.size

        return jax.jit(jax.grad(loss))(arrays)

    exact, rounded = (tree.leaves(gradients(dtype)) for dtype in (jnp.float32, jnp.bfloat16))
    least = 1e-3 * max(float(jnp.linalg.norm(one.array)) for _, one in exact)  # that of GPT-2's key biases is 0
    off = {}
    for (path, one), (_, other) in zip(exact, rounded, strict=True):
        off[path] = float(jnp.linalg.norm(one.array - other.array)) / max(float(jnp.linalg.norm(one.array)), least)
    assert max(off.values()) < 0.02, off
