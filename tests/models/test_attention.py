"""Attention against its definition in float64, and the separation of documents."""

import dataclasses

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from jaxlm.interop.hf.families.gpt2 import Gpt2Config
from jaxlm.models.attention.api import AttentionMask, AttentionSpec, attention

B, T, S, HEADS, KV_HEADS, SIZE = 2, 7, 9, 4, 2, 8
DOCUMENTS = np.array([[1, 1, 1, 1, 2, 2, 2, 3, 3, 3, 3, 0, 0], [0, 0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2]])


def positions_within(segment_ids):
    """Positions 0, 1, 2, ... within every run of equal numbers."""
    starts = np.diff(segment_ids, axis=1, prepend=-1) != 0
    index = np.arange(segment_ids.shape[1])
    return index - np.maximum.accumulate(np.where(starts, index, 0), axis=1)


def random_case(seed=0):
    rng = np.random.default_rng(seed)
    q, k, v = (
        rng.normal(size=(B, n, h, SIZE)).astype(np.float32) for n, h in ((T, HEADS), (S, KV_HEADS), (S, KV_HEADS))
    )
    visible = [rng.integers(low, 3, size=(B, n)) for low, n in ((0, T), (0, T), (0, S), (0, S))]
    return q, k, v, visible


def run(q, k, v, visible, key=None, **options):
    name = lambda array, *axes: hax.named(jnp.asarray(array), axes)  # noqa: E731
    seen = AttentionMask(
        *(name(a, "batch", p) for a, p in zip(visible, ["position"] * 2 + ["key_position"] * 2, strict=True))
    )
    out = attention(
        name(q, "batch", "position", "heads", "head_size"),
        name(k, "batch", "key_position", "kv_heads", "head_size"),
        name(v, "batch", "key_position", "kv_heads", "head_size"),
        AttentionSpec(seen, **options),
        key=key,
    )
    return out.array


def definition(q, k, v, visible, scale):
    """A loop over rows, queries and heads, in float64."""
    positions, segments, key_positions, key_segments = visible
    out = np.zeros(q.shape)
    for b, t, h in np.ndindex(B, T, HEADS):
        sees = (key_segments[b] == segments[b, t]) & (segments[b, t] != 0) & (key_positions[b] <= positions[b, t])
        if sees.any():
            kv = h // (HEADS // KV_HEADS)
            scores = k[b, sees, kv].astype(np.float64) @ q[b, t, h] * scale
            weights = np.exp(scores - scores.max())
            out[b, t, h] = weights @ v[b, sees, kv] / weights.sum()
    return out


@pytest.mark.parametrize("scale", [None, 0.7])
def test_matches_the_definition(scale):
    case = random_case()
    expected = definition(*case, SIZE**-0.5 if scale is None else scale)
    assert (expected == 0).all(axis=-1).any(), "some query must see nothing"
    np.testing.assert_allclose(run(*case, scale=scale), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_fully_masked_queries_give_zero_and_finite_gradients():
    q, k, v, visible = random_case()
    visible[1][:] = 0

    def loss(*qkv):
        out = run(*qkv, visible)
        return (out**2 + out).sum()

    value, grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(q, k, v)
    for leaf in jax.tree.leaves((value, grads)):
        np.testing.assert_array_equal(leaf, np.zeros_like(leaf))


@pytest.mark.slow
def test_dropout_keeps_the_expectation_and_needs_a_key():
    q, k, v, visible = random_case()
    whole = run(q, k, v, visible)
    np.testing.assert_array_equal(run(q, k, v, visible, dropout=0.5), whole)
    drop = jax.jit(jax.vmap(lambda key: run(q, k, v, visible, dropout=0.3, key=key)))
    dropped = drop(jax.random.split(jax.random.key(0), 1000))
    assert float(jnp.abs(dropped[0] - whole).max()) > 0.1
    np.testing.assert_allclose(dropped.mean(axis=0), whole, atol=0.1)


@pytest.mark.slow
def test_packed_documents_equal_separate_documents(tiny, built, as_inputs, logits_of):
    tokens = np.random.default_rng(0).integers(0, 40, size=DOCUMENTS.shape)
    model = built(tiny)
    packed = logits_of(model, as_inputs(tokens, positions_within(DOCUMENTS), DOCUMENTS))
    for row, document in [(0, 1), (0, 2), (1, 2)]:
        here = DOCUMENTS[row] == document
        alone = logits_of(model, as_inputs(tokens[row : row + 1, here]))
        np.testing.assert_allclose(packed[row, here], alone[0], rtol=1e-5, atol=1e-5)


def test_a_document_does_not_see_its_neighbors_or_its_future(tiny, built, as_inputs, logits_of):
    tokens = np.random.default_rng(0).integers(0, 40, size=DOCUMENTS.shape)
    model = built(tiny)
    read = lambda tokens: logits_of(model, as_inputs(tokens, positions_within(DOCUMENTS), DOCUMENTS))  # noqa: E731
    before, other, later = read(tokens), tokens.copy(), tokens.copy()
    other[0, :4] = (other[0, :4] + 1) % 40
    np.testing.assert_array_equal(read(other)[0, 4:], before[0, 4:])
    assert not np.array_equal(read(other)[0, :4], before[0, :4])
    later[1, 6:8] = (later[1, 6:8] + 1) % 40
    np.testing.assert_array_equal(read(later)[1, :6], before[1, :6])


@pytest.mark.slow
def test_upcast_changes_16_bit_attention(built, as_inputs):
    config = Gpt2Config(seq_len=16, hidden_dim=32, num_layers=1, num_heads=2, initializer_range=0.5)
    tokens = as_inputs(np.random.default_rng(0).integers(0, 40, size=(2, 16)))

    def final(config, dtype):
        model = built(config)
        cast = model if dtype is None else jax.tree.map(lambda x: x.astype(dtype), model)
        return jax.jit(lambda model: model.hidden(tokens).final.array)(cast)

    plain, upcast = (final(dataclasses.replace(config, upcast_attn=u), jnp.bfloat16) for u in (False, True))
    assert plain.dtype == upcast.dtype == jnp.bfloat16
    assert not np.array_equal(plain, upcast)
    exact = final(config, None)
    for rounded in (plain, upcast):
        np.testing.assert_allclose(rounded.astype(jnp.float32), exact, atol=0.15)


def test_axes_in_any_order():
    q, k, v, visible = random_case()
    Batch, Pos = Axis("batch", B), Axis("position", T)
    turned = hax.named(jnp.asarray(q), (Batch, Pos, "heads", "head_size")).rearrange(
        ("heads", "position", "head_size", "batch")
    )
    keys, values = (hax.named(jnp.asarray(a), ("batch", "key_position", "kv_heads", "head_size")) for a in (k, v))
    seen = AttentionMask(
        *(
            hax.named(jnp.asarray(a), ("batch", p))
            for a, p in zip(visible, ["position"] * 2 + ["key_position"] * 2, strict=True)
        )
    )
    np.testing.assert_array_equal(attention(turned, keys, values, AttentionSpec(seen)).array, run(q, k, v, visible))
