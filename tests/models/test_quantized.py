"""Models with int8 weights against the same models with the weights that these stand for."""

from dataclasses import dataclass
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.precision import parse_precision
from jaxlm.core.products.stored_weights import StoredWeight
from jaxlm.engine.entry import StateBuilder
from jaxlm.interop.hf.families.mixtral import MixtralConfig
from jaxlm.models.base import vocab_axis
from jaxlm.models.flax.config import FlaxConfig
from jaxlm.models.inference.generate import GenerationConfig, generate_tokens
from jaxlm.models.inference.quantized import describe_weights, quantized
from jaxlm.models.inference.unstacked import Generator
from jaxlm.models.loss import next_token_sums, token_losses
from jaxlm.surgery.base import SurgeryConfig
from tests.engine.helpers import F32, MODEL, VOCAB, layout, phase
from tests.models.conftest import TINY
from tests.models.test_moe import mesh as experts_mesh
from tests.tiers import one_of

MODELS = {
    **TINY,
    "mixtral": MixtralConfig(
        seq_len=32, hidden_dim=32, intermediate_dim=64, num_layers=2, num_heads=4, num_kv_heads=2, num_experts=8
    ),
}
# What Llama has is in one of the others.
FAMILIES = one_of(["mixtral", "gpt2", "llama"])


def stands_for(model: Any) -> Any:
    """The model with floating-point arrays that have the values of its int8 weights."""
    is_stored = lambda node: isinstance(node, StoredWeight)  # noqa: E731
    return jax.tree.map(lambda n: n.floats(jnp.float32) if is_stored(n) else n, model, is_leaf=is_stored)


@pytest.fixture
def inputs(as_inputs):
    return as_inputs(np.random.default_rng(3).integers(0, 40, (2, 16)))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_generated_tokens_are_those_of_the_weights_they_stand_for(family, built, inputs, logits_of):
    model = built(MODELS[family])
    int8 = quantized(model)
    floats = stands_for(int8)
    found, expected, exact = (np.asarray(logits_of(m, inputs)) for m in (int8, floats, model))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-4)
    error = np.abs(found - exact).mean() / np.abs(exact).mean()
    assert 1e-4 < error < 0.05
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8]]
    config = GenerationConfig(max_new_tokens=6, temperature=0)
    assert generate_tokens(Generator.of(int8), prompts, config) == generate_tokens(
        Generator.of(floats), prompts, config
    )


def test_routers_embeddings_norms_and_biases_stay_floats():
    shapes = jax.eval_shape(lambda: quantized(MODELS["mixtral"].build(vocab_axis(40), key=jax.random.key(0))))
    stored = {path.rpartition(".")[0].rpartition(".")[2] for path, _ in tree.modules_by_path(shapes, StoredWeight)}
    projections = {f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")}
    assert stored == {*projections, "head"}
    assert {leaf.dtype.name for path, leaf in tree.leaves(shapes) if "router" in path or "norm" in path} == {"float32"}


@pytest.mark.slow
def test_the_losses_read_an_int8_head(built, tiny_llama, inputs):
    int8 = quantized(built(tiny_llama))
    mask = hax.ones_like(inputs.tokens).astype(jnp.float32)

    @jax.jit
    def losses(model, head):
        hidden = model.hidden(inputs).final
        return token_losses(hidden, head, inputs.tokens).array, next_token_sums(hidden, head, inputs.tokens, mask).total

    by_int8, by_floats = (losses(int8, head) for head in (int8.lm_head(), stands_for(int8).lm_head()))
    for found, expected in zip(by_int8, by_floats, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5)


MESHES = {
    "fsdp 8": ("llama", lambda: layout()),
    "tp 2 x fsdp 4": ("llama", lambda: layout(model=2)),
    "experts over data, mlp over 2": ("mixtral", lambda: experts_mesh(2, ("mlp", "heads"), experts="data")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_eight_devices_compute_the_logits_of_one(name, built, as_inputs, logits_of):
    family, make = MESHES[name]
    int8, inputs = quantized(built(MODELS[family])), as_inputs(np.random.default_rng(3).integers(0, 40, (8, 16)))
    expected = logits_of(int8, inputs)
    where = make()

    def place(leaf: Any) -> Any:
        return hax.NamedArray(jax.device_put(leaf.array, where.parameter_sharding(leaf.axes)), leaf.axes)

    with where.use():
        sharded = jax.tree.map(place, int8, is_leaf=tree.is_named)
        found = jax.jit(lambda model, inputs: model.logits(model.hidden(inputs).final).array)(sharded, inputs)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_casts_leave_int8_weights_alone_and_their_size_is_told(built, tiny_llama):
    model = parse_precision("bf16").cast_to_compute(quantized(built(tiny_llama)))
    stored = tree.modules_by_path(model, StoredWeight)
    assert stored
    for path, leaf in tree.leaves(model):
        inside = any(path.startswith(f"{weight}.") for weight, _ in stored)
        assert leaf.dtype in ((jnp.int8, jnp.float32) if inside else (jnp.bfloat16,)), path
    num_bytes = sum(tree.raw(leaf).nbytes for _, leaf in tree.leaves(model))
    before = 2 * tree.num_parameters(built(tiny_llama))
    assert describe_weights(model) == f"int8 weights: {num_bytes / 1e6:.1f} MB instead of {before / 1e6:.1f} MB"


def test_a_model_without_linear_layers_is_refused():
    config = FlaxConfig(seq_len=16, factory="examples.nnx_model:make", kwargs={"width": 32, "depth": 1})
    with pytest.raises(ConfigError, match=r"--quantize: the model has no linear layers.*Flax"):
        jax.eval_shape(lambda: quantized(config.build(vocab_axis(40), key=jax.random.key(0))))


@dataclass(frozen=True)
class Quantize(SurgeryConfig):
    """A user's surgery that quantizes the model."""

    def apply(self, model: Any, **_: Any) -> Any:
        return quantized(model)

    def merge(self, model: Any) -> Any:
        return model


def test_int8_weights_cannot_be_trained():
    own = phase(surgeries=(Quantize(),))
    with pytest.raises(
        ConfigError,
        match=r"phase 'train': trainable: '\.\*' matches .*_proj\.weight, which is stored as int8 and cannot be",
    ):
        StateBuilder(MODEL, vocab_axis(VOCAB), 0, F32, (own,)).abstract_state(own)
    rest = phase(surgeries=(Quantize(),), trainable=("norm", "tokens"))
    state = StateBuilder(MODEL, vocab_axis(VOCAB), 0, F32, (rest,)).abstract_state(rest)
    assert not [path for path, _ in tree.leaves(state.opt_state) if "proj" in path]
