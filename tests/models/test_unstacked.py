"""Unstacked layers generate the same as stacked layers, and no weight is copied per token."""

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from jaxlm.interop.hf.families.gemma2 import Gemma2Config
from jaxlm.interop.hf.families.gpt2 import Gpt2Config
from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.interop.hf.families.mixtral import MixtralConfig
from jaxlm.interop.hf.families.qwen3_moe import Qwen3MoeConfig
from jaxlm.models.base import vocab_axis
from jaxlm.models.inference import unstacked as unstacked_module
from jaxlm.models.inference.decoding import Draw, Request, compile_programs
from jaxlm.models.inference.generate import CACHE_DTYPES, GenerationConfig, generate_tokens
from jaxlm.models.inference.padding import left_padded
from jaxlm.models.inference.sampling import Sampling
from jaxlm.models.inference.unstacked import Generator, stack, unstack

SIZES = {"seq_len": 32, "hidden_dim": 32, "num_layers": 3, "num_heads": 4}
MODELS = {
    "gpt2": Gpt2Config(**SIZES, scale_attn_by_inverse_layer_idx=True, upcast_attn=True),
    "gemma2": Gemma2Config(**SIZES, intermediate_dim=48, num_kv_heads=1, head_dim=8, sliding_window=3),
    "mixtral": MixtralConfig(**SIZES, intermediate_dim=48, num_kv_heads=2, sliding_window=5),
    "mixed": Qwen3MoeConfig(
        **{**SIZES, "num_layers": 5},
        intermediate_dim=48,
        num_kv_heads=2,
        num_experts=4,
        num_experts_per_token=2,
        sliding_window=5,
        mlp_only_layers=[1, 2],
        dense_intermediate_dim=40,
    ),
}


# Two of each; they have nothing to do with each other.
TOGETHER = {("gpt2", "bfloat16"), ("mixed", "int8")}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=pytest.mark.slow if (name, dtype) in TOGETHER else pytest.mark.soak)
        for name in MODELS
        for dtype in CACHE_DTYPES
    ],
)
def test_unstacked_layers_give_the_same_logits_and_cache(name, dtype, built, as_inputs):
    """Token by token after a left-padded prompt; a sliding window shorter than the text; a scale per layer index."""
    model = built(MODELS[name])
    tokens = np.random.default_rng(0).integers(0, 40, size=(2, 12))
    segments = np.ones_like(tokens)
    segments[1, :4] = 0
    positions = np.maximum(np.arange(12) - np.array([[0], [4]]), 0)
    whole = as_inputs(tokens, positions, segments)
    part = lambda of: jax.tree.map(lambda a: a["position", of], whole, is_leaf=lambda a: isinstance(a, hax.NamedArray))  # noqa: E731
    step = jax.jit(lambda model, inputs, cache: model.hidden(inputs, cache=cache))
    stacked = step(model, part(slice(0, 8)), model.init_cache(Axis("batch", 2), 16, CACHE_DTYPES[dtype])).cache
    model_apart, cache_apart = unstack((model, stacked))
    for at in range(8, 12):
        expected = step(model, part(slice(at, at + 1)), stacked)
        got = step(model_apart, part(slice(at, at + 1)), cache_apart)
        stacked, cache_apart = expected.cache, got.cache
        np.testing.assert_allclose(got.final.array, expected.final.array, rtol=1e-5, atol=1e-5)
    for joined, expected in zip(jax.tree.leaves(stack(cache_apart)), jax.tree.leaves(stacked), strict=True):
        np.testing.assert_allclose(joined.astype(jnp.float32), expected.astype(jnp.float32), rtol=1e-2, atol=1e-5)


@pytest.mark.slow
def test_a_generator_unstacks_its_model_once(built, tiny_llama, monkeypatch):
    """For any number of texts; only their caches are unstacked each time."""
    model, taken = built(tiny_llama), []
    copied = unstacked_module._unstacked_copy
    monkeypatch.setattr(unstacked_module, "_unstacked_copy", lambda tree: taken.append(type(tree)) or copied(tree))
    writer, decoding = Generator.of(model), GenerationConfig(3, temperature=0.0)
    together_ = generate_tokens(writer, [[1, 2], [3, 4]], decoding)
    assert [generate_tokens(writer, [prompt], decoding)[0] for prompt in ([1, 2], [3, 4])] == together_
    assert taken.count(type(model)) == 1
    assert len(taken) == 4


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "kv_heads"), [(1, 1), (3, 2)])
def test_decoding_a_token_copies_neither_weights_nor_cache(rows, kv_heads):
    """The program's temporary memory is less than one matrix and less than one layer's keys."""
    config = LlamaConfig(
        **(SIZES | {"hidden_dim": 128, "num_layers": 2, "num_kv_heads": kv_heads}), intermediate_dim=344
    )
    model = jax.eval_shape(lambda: config.build(vocab_axis(40), key=jax.random.key(0)))
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), rows))
    draw = Draw.of(keys, (), Sampling(temperature=0.0).numbers)
    request = Request(left_padded([[1, 2, 3]] * rows, rows), draw, capacity=960, slots=960)
    _, program, _ = compile_programs(Generator(model, jax.eval_shape(unstack, model)), request)
    temporary = program.memory_analysis().temp_size_in_bytes
    assert temporary < 4 * 128 * 344
