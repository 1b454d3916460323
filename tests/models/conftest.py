"""Small models and inputs that the model tests share."""

import dataclasses
from functools import lru_cache

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from jaxlm.interop.hf.families.gpt2 import Gpt2Config
from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.models.base import Inputs, vocab_axis

TINY = {
    "gpt2": Gpt2Config(seq_len=32, hidden_dim=32, num_layers=2, num_heads=4),
    "llama": LlamaConfig(
        seq_len=32,
        hidden_dim=32,
        intermediate_dim=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
    ),
}


@lru_cache
def _built(config):
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda key: config.build(vocab_axis(40), key=key), jax.random.key(0))
    return jax.tree.map(lambda s: jnp.asarray(rng.normal(0, 0.2, s.shape), s.dtype), shapes)


@pytest.fixture
def built():
    """A configuration's model for 40 tokens with N(0, 0.2) in every parameter, including norms and biases."""
    return _built


@pytest.fixture(params=[pytest.param("gpt2", marks=pytest.mark.slow), "llama"])
def tiny(request):
    """Each family's configuration in turn."""
    return TINY[request.param]


@pytest.fixture
def tiny_llama():
    """One configuration, for tests that do not depend on the family."""
    return TINY["llama"]


@pytest.fixture
def as_inputs():
    """Builds `Inputs` from integer arrays [batch, position]; by default one document per row."""

    def make(tokens, positions=None, segment_ids=None) -> Inputs:
        tokens = np.asarray(tokens)
        axes = (Axis("batch", tokens.shape[0]), Axis("position", tokens.shape[1]))
        positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape) if positions is None else positions
        segment_ids = np.ones_like(tokens) if segment_ids is None else segment_ids
        return Inputs(*(hax.named(jnp.asarray(a, jnp.int32), axes) for a in (tokens, positions, segment_ids)))

    return make


@jax.jit
def _logits(model, inputs):
    return model.logits(model.hidden(inputs).final).array


@pytest.fixture
def logits_of():
    """A model's logits as a plain array [batch, position, vocab]."""
    return _logits


@pytest.fixture
def gradient_of(built, as_inputs):
    """The gradient of a model with a remat policy, for 4 rows of 16 tokens, as a function of the weights, and the weights."""
    inputs = as_inputs([list(range(16))] * 4)

    def make(config, remat_policy):
        model = built(dataclasses.replace(config, gradient_checkpointing=remat_policy))
        weights, rest = eqx.partition(model, eqx.is_inexact_array)

        def loss(weights):
            return (eqx.combine(weights, rest).hidden(inputs).final.array ** 2).sum()

        return jax.jit(jax.grad(loss)), weights

    return make
