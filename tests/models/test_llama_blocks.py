"""The parts that Llama's relatives have: dropout, norms of single heads, scores that grow, groups with a global layer."""

import dataclasses

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.interop.hf.families.cohere import CohereConfig
from jaxlm.interop.hf.families.cwm import CwmConfig
from jaxlm.interop.hf.families.exaone4 import Exaone4Config
from jaxlm.interop.hf.families.ministral3 import Ministral3Config
from jaxlm.interop.hf.families.seed_oss import SeedOssConfig
from jaxlm.interop.hf.families.starcoder2 import Starcoder2Config
from jaxlm.interop.hf.family import config_from_json
from jaxlm.interop.hf.form import form_of_json
from jaxlm.models.attention.api import AttentionMask
from jaxlm.models.base import vocab_axis
from jaxlm.models.mixers.base import LayerContext
from jaxlm.models.norms import HeadwiseLayerNorm
from jaxlm.models.rope import Places, QueryScaling, YarnRotary
from tests.interop.cases import inputs_of, tokens
from tests.interop.published import OPENED

SIZES = {
    "seq_len": 48,
    "hidden_dim": 32,
    "intermediate_dim": 40,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "initializer_range": 0.2,
}


@jax.jit
def final(model, inputs, key=None):
    return model.hidden(inputs, key=key).final.array


def built(config):
    return jax.jit(lambda key: config.build(vocab_axis(61), key=key))(jax.random.key(0))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "key"),
    [
        (SeedOssConfig, "residual_dropout"),
        (Starcoder2Config, "embedding_dropout"),
    ],
)
def test_dropout_changes_training_only(config, key):
    plain, dropped = (config(**SIZES, **{key: rate}) for rate in (0.0, 0.5))
    inputs, model = inputs_of(tokens(rows=1)), built(dropped)
    whole = final(built(plain), inputs)
    np.testing.assert_array_equal(final(model, inputs), whole)
    first, again, second = (final(model, inputs, jax.random.key(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - whole).max() > 0.1
    assert np.abs(first - second).max() > 0.1


@pytest.mark.slow
def test_dropout_of_the_residual_stream_keeps_its_expectation():
    """Of a block that adds a constant to the stream, whatever it reads."""
    config = SeedOssConfig(**SIZES, residual_dropout=0.25)
    block = config.block(key=jax.random.key(0))
    bias = hax.full(config.Embed, 3.0)
    o_proj = dataclasses.replace(block.attn.o_proj, weight=block.attn.o_proj.weight * 0, bias=bias)
    down = dataclasses.replace(block.mlp.down_proj, weight=block.mlp.down_proj.weight * 0, bias=bias)
    attn, mlp = dataclasses.replace(block.attn, o_proj=o_proj), dataclasses.replace(block.mlp, down_proj=down)
    block = dataclasses.replace(block, attn=attn, mlp=mlp)
    inputs = inputs_of(tokens(rows=2))
    x = hax.zeros((*inputs.tokens.axes, config.Embed))
    out = block(x, LayerContext(AttentionMask.of(inputs), None, None), None, key=jax.random.key(3))[0].array
    values, counts = np.unique(np.round(np.asarray(out), 4), return_counts=True)
    np.testing.assert_allclose(values, [0.0, 4.0, 8.0])  # each of the two adds 3 / 0.75, or nothing
    np.testing.assert_allclose(counts / counts.sum(), [1 / 16, 6 / 16, 9 / 16], atol=0.03)


def test_each_head_has_the_norm_of_its_own_weights():
    Heads, HeadSize, Position = hax.Axis("kv_heads", 3), hax.Axis("head_size", 8), hax.Axis("position", 5)
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(5, 3, 8)), rng.normal(size=(3, 8))
    norm = HeadwiseLayerNorm(hax.named(jnp.asarray(weight, jnp.float32), (Heads, HeadSize)), 1e-3)
    out = norm(hax.named(jnp.asarray(x, jnp.float32), (Position, Heads, HeadSize)))
    centered = x - x.mean(-1, keepdims=True)
    expected = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-3) * weight
    np.testing.assert_allclose(out.array, expected, rtol=1e-5, atol=1e-5)


def test_queries_grow_with_their_position_in_the_document():
    axes = (hax.Axis("batch", 1), hax.Axis("position", 6))
    positions = hax.named(jnp.array([[0, 7, 8, 16, 0, 24]]), axes)
    factors = QueryScaling(0.5, 8).factors(Places(positions, positions * 0 + 1)).array
    np.testing.assert_allclose(factors, [[1 + 0.5 * np.log(1 + n) for n in (0, 0, 1, 2, 0, 3)]], rtol=1e-6)


@pytest.mark.slow
def test_a_packed_document_has_the_scores_of_a_separate_one():
    rope = YarnRotary(theta=100.0, original_max_position_embeddings=8)
    config = Ministral3Config(**SIZES, rope=rope, query_scaling=0.7)
    model, ids = built(config), tokens(rows=1)
    whole = inputs_of(ids)
    segments, positions = np.repeat([1, 2], [20, 28])[None], np.concatenate([np.arange(20), np.arange(28)])[None]
    packed = dataclasses.replace(
        whole,
        segment_ids=hax.named(jnp.asarray(segments), whole.tokens.axes),
        positions=hax.named(jnp.asarray(positions), whole.tokens.axes),
    )
    together = np.asarray(final(model, packed))
    for part in (slice(0, 20), slice(20, 48)):
        alone = final(model, inputs_of(ids[:, part]))
        np.testing.assert_allclose(together[:, part], alone, rtol=0, atol=1e-5)
    plain = final(built(dataclasses.replace(config, query_scaling=0.0)), packed)
    changed = np.abs(np.asarray(plain) - together).max(axis=-1)[0]
    assert changed[:8].max() == changed[20:28].max() == 0.0 < changed[8:20].max()


@pytest.mark.slow
def test_attention_and_mlp_of_a_parallel_block_read_one_norm():
    config = CohereConfig(**SIZES)
    block = config.block(key=jax.random.key(0))
    assert [norm for norm in vars(block) if "norm" in norm] == ["attn_norm"]
    identity, inputs = block.as_identity(), inputs_of(tokens(rows=1))
    x = hax.random.normal(jax.random.key(1), (*inputs.tokens.axes, config.Embed))
    out = identity(x, LayerContext(AttentionMask.of(inputs), None, None), None, key=None)[0]
    np.testing.assert_array_equal(out.array, x.array)


def test_the_first_layer_of_each_group_is_global():
    config = CwmConfig(**SIZES | {"num_layers": 6})
    assert [kind.window for kind in config.kinds] == [None, 8192, 8192, 8192, None, 8192]
    kept = config.with_layers([0, 1, 2, 4])
    assert [kind.window for kind in kept.kinds] == [None, 8192, 8192, None]
    assert (kept.sliding_window_pattern, list(kept.local_layers)) == (None, [1, 2])
    assert config.with_layers([0, 1, 2, 3, 4]).sliding_window_pattern == 4


def test_layers_without_a_window_rotate_if_no_layer_has_one():
    config = Exaone4Config(**SIZES | {"num_layers": 4})
    assert [kind.rope is None for kind in config.kinds] == [False, False, False, True]
    whole = dataclasses.replace(config, sliding_window=None, sliding_window_pattern=1)
    assert all(kind.rope is not None and kind.window is None for kind in whole.kinds)
    with pytest.raises(ConfigError, match=r"sliding_window: null given, but layers \[0, 1, 2\] are local"):
        dataclasses.replace(config, sliding_window=None).check()


def test_hunyuans_alpha_is_part_of_theta():
    content = OPENED["Hunyuan-7B"][0]
    config, _ = config_from_json(form_of_json(content, "x").family, content, "x")
    assert config.rope.theta == pytest.approx(10000.0 * 1000.0 ** (128 / 126))


def test_a_pattern_of_letters_is_the_layers_that_are_listed():
    content = dict(OPENED["EXAONE-4.0-32B"][0])
    family = form_of_json(content, "x").family
    listed, notes = config_from_json(family, content, "x")
    assert not notes
    del content["layer_types"]
    assert config_from_json(family, content, "x")[0].kinds == listed.kinds
