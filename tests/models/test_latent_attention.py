"""What only latent attention has: a cache without heads, a factor of the scores, and two sizes of heads."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from jaxlm.core.axes import BATCH, HEADS, KV_HEADS
from jaxlm.core.errors import ConfigError
from jaxlm.interop.hf.families.glm4_moe_lite import FAMILY, Glm4MoeLiteConfig
from jaxlm.interop.hf.family import config_from_json, config_to_json
from jaxlm.models.base import vocab_axis
from jaxlm.models.flops import matrix_operations
from jaxlm.models.inference.generate import GenerationConfig, generate_tokens
from jaxlm.models.inference.quantized import quantized
from jaxlm.models.inference.unstacked import Generator
from jaxlm.models.rope import YarnRotary
from tests.models.test_mixers import MODELS, documents, final, inputs_of
from tests.models.test_prefix_cache import NEW, updated
from tests.models.test_quantized import stands_for

SMALL: Glm4MoeLiteConfig = MODELS["latent attention"]  # pyright: ignore[reportAssignmentType]
LATENT, ROTATED, LAYERS = 8, 4, 4
YARN = YarnRotary(factor=40.0, mscale=1.0, mscale_all_dim=1.0, original_max_position_embeddings=64)


@pytest.mark.parametrize(
    ("dtype", "size"), [(jnp.bfloat16, 2 * (LATENT + ROTATED)), (jnp.int8, LATENT + ROTATED + 2 * 4)]
)
def test_a_token_takes_the_latent_and_one_rotated_key_of_each_layer(dtype, size):
    """int8 adds a scale in float32 for each of the two."""
    model = jax.eval_shape(lambda: SMALL.build(vocab_axis(40), key=jax.random.key(0)))
    cache = jax.eval_shape(lambda model: model.init_cache(Axis(BATCH, 3), 16, dtype), model)
    assert (cache.bytes_per_token, cache.bytes_per_row) == (LAYERS * size, 0)
    assert not any(
        leaf.has_axis(name)
        for leaf in jax.tree.leaves(cache.stacks[0], is_leaf=lambda x: hasattr(x, "axes"))
        for name in (HEADS, KV_HEADS)
    )


@pytest.mark.soak
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_prefixes_are_reused(dtype, built, monkeypatch):
    """Prompts that grow, that change in the middle, and that begin differently."""
    model = built(dataclasses.replace(SMALL, seq_len=512))
    decoding = GenerationConfig(NEW, temperature=0.0, cache_dtype=dtype)
    ours, anew, held = updated(model, decoding, monkeypatch)
    assert ours == anew
    assert sum(map(bool, held)) == 4


@pytest.mark.soak
def test_an_int8_cache_is_nearly_as_accurate(built):
    model, text = built(SMALL), documents()[2]

    def after(dtype):
        cache = model.init_cache(Axis(BATCH, 1), 80, dtype)
        _, cache = final(model, inputs_of([[text[:40]]], 40), cache)
        following = inputs_of([[text[40:60]]], 20)
        moved = dataclasses.replace(following, positions=following.positions + 40)
        return np.asarray(final(model, moved, cache)[0])

    exact, rounded = after(jnp.float32), after(jnp.int8)
    assert 0 < np.sqrt(np.mean((rounded - exact) ** 2)) < 2e-2 * np.std(exact)


@pytest.mark.soak
def test_int8_weights_compute_what_they_stand_for(built):
    int8 = quantized(built(SMALL))
    prompts, config = [[1, 2, 3], [4, 5, 6, 7, 8]], GenerationConfig(8, temperature=0.0)
    expected = generate_tokens(Generator.of(stands_for(int8)), prompts, config)
    assert generate_tokens(Generator.of(int8), prompts, config) == expected


def test_flops_are_those_of_the_products_in_the_program():
    length, rows = 32, 2
    config = dataclasses.replace(SMALL, seq_len=length)
    model = jax.eval_shape(lambda: config.build(vocab_axis(40), key=jax.random.key(0)))
    read = inputs_of([[np.arange(length)]] * rows, length)
    program = jax.make_jaxpr(lambda model: model.logits(model.hidden(read).final).array)(model)
    assert 3 * matrix_operations(program.jaxpr) == rows * length * config.flops_per_token(40).palm


def test_the_factor_of_the_scores_follows_the_rotary_embedding():
    """DeepSeek-V3's is 1.874, also of a model whose context is extended later."""
    config = dataclasses.replace(SMALL, rope=YARN)
    assert {kind.score_factor for kind in config.kinds} == {(0.1 * math.log(40) + 1) ** 2}
    assert (0.1 * math.log(40) + 1) ** 2 == pytest.approx(1.874, abs=1e-3)
    model = jax.eval_shape(lambda: SMALL.build(vocab_axis(40), key=jax.random.key(0)))
    assert model.with_context(256, YARN).body.kinds_by_layer == config.rotated_kinds


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_key_value_heads": 2}, "num_key_value_heads: 2 given, 4 expected"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale_all_dim": 1.0}}, "given without mscale"),
        ({"mlp_layer_types": ["dense", "some"]}, "dense or sparse expected for each of 4 layers"),
    ],
)
def test_what_would_change_the_numbers_is_refused(keys, message):
    content = config_to_json(FAMILY, SMALL) | keys
    with pytest.raises(ConfigError, match=message):
        config_from_json(FAMILY, content, "config.json")
