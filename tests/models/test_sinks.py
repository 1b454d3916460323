"""Attention sinks, a score per head beside those of the keys: each backend against the definition in float64."""

import functools

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.models.attention import selftest
from jaxlm.models.attention.backends.blockwise import blockwise_attention
from jaxlm.models.attention.backends.cudnn import cudnn_attention
from jaxlm.models.attention.backends.reference import reference_attention
from jaxlm.models.attention.backends.splash import splash_attention
from jaxlm.models.attention.null_slot import NullSlot
from jaxlm.models.attention.selftest import AttentionShape, disagreement, packed_rows, single_document_rows
from tests.models import cudnn_stand_in
from tests.models.test_backends import SCALE, G, K, allowed, random_case

SINK = np.array([[-30.0, 0.4], [1.5, 6.0]], np.float32)


def definition(q, k, v, sink, segments, window):
    """The output in float64: the softmax has one more term, which multiplies nothing."""
    scores = np.einsum("btkgh,bskh->bkgts", q, k) * SCALE
    weights = np.where(allowed(segments, window)[:, None, None], np.exp(scores), 0.0)
    divisor = weights.sum(-1, keepdims=True) + np.exp(sink)[None, :, :, None, None]
    return np.einsum("bkgts,bskh->btkgh", weights / divisor, v)


def blocks(q, k, v, sink, segments, window):
    return blockwise_attention(q, k, v, segments, SCALE, window, sink_KG=sink)


def splash(q, k, v, sink, segments, window):
    return splash_attention(q, k, v, segments, SCALE, window, sink_KG=sink, interpret=True)


def plain(q, k, v, sink, segments, window):
    mask, slot = jnp.asarray(allowed(segments, window)), NullSlot(hax.named(sink.ravel(), "heads"))
    return reference_attention(q, k, v, mask, SCALE, 0.0, None, null_slot=slot)


def fused(packed, q, k, v, sink, segments, window):
    segments = jnp.asarray(segments)
    return cudnn_attention(q, k, v, segments, scale=SCALE, window=window, packed=packed, sink_KG=sink)


@pytest.mark.parametrize(
    ("backend", "length", "num_segments", "window"),
    [
        (blocks, 131, 5, 30),
        (plain, 131, 5, 30),
        (functools.partial(fused, True), 64, 5, 30),
        pytest.param(functools.partial(fused, False), 64, 1, None, marks=pytest.mark.slow),
        pytest.param(splash, 256, 3, 40, marks=pytest.mark.slow),
        pytest.param(blocks, 300, 1, None, marks=pytest.mark.soak),
        pytest.param(splash, 256, 1, None, marks=pytest.mark.soak),
    ],
)
def test_values_and_gradients_match_finite_differences(monkeypatch, backend, length, num_segments, window):
    """Of the whole output along a direction of all queries, keys and values, and of the score of each head."""
    cudnn_stand_in.install(monkeypatch)
    q, k, v, segments, d_out = random_case(length, num_segments)
    segments[1, -7:] = 0

    @jax.jit
    def value_and_gradients(*arrays):
        out, vjp = jax.vjp(lambda *arrays: backend(*arrays, segments, window), *arrays)
        return out, *vjp(d_out)

    out, *gradients = value_and_gradients(q, k, v, SINK)
    exact = [a.astype(np.float64) for a in (q, k, v, SINK)]
    np.testing.assert_allclose(out, definition(*exact, segments, window), rtol=2e-5, atol=2e-6)
    gradients = [np.asarray(g, np.float64) for g in gradients]

    def along(*directions):
        ends = ([a + h * u for a, u in zip(exact, directions, strict=True)] for h in (1e-5, -1e-5))
        high, low = (np.sum(definition(*arrays, segments, window) * d_out) for arrays in ends)
        return (high - low) / 2e-5

    rng, none = np.random.default_rng(1), [np.zeros_like(a) for a in exact]
    for number in range(3):
        directions = list(none)
        directions[number] = rng.normal(size=exact[number].shape)
        expected = along(*directions)
        scale = np.linalg.norm(gradients[number])
        assert abs(np.sum(gradients[number] * directions[number]) - expected) < 2e-5 * scale
    by_head = [along(*none[:3], unit.reshape(K, G)) for unit in np.eye(K * G)]
    np.testing.assert_allclose(gradients[3].ravel(), by_head, rtol=2e-5, atol=2e-6)
    assert abs(by_head[0]) < 1e-9 < abs(by_head[1])


@pytest.mark.parametrize("backend", [blocks, plain])
def test_a_token_that_sees_no_key_is_zero(backend):
    q, k, v, segments, d_out = random_case(40, 1)
    out, vjp = jax.vjp(lambda *arrays: backend(*arrays, np.zeros_like(segments), None), q, k, v, jnp.asarray(SINK))
    for leaf in (out, *vjp(jnp.asarray(d_out))):
        np.testing.assert_array_equal(leaf, np.zeros_like(leaf))


@pytest.mark.slow
@pytest.mark.parametrize(("packed", "rows"), [(True, packed_rows), (False, single_document_rows)])
def test_the_self_test_passes_with_sinks(monkeypatch, packed, rows):
    """With more documents than a call takes, rows without any, and padding between them."""
    cudnn_stand_in.install(monkeypatch)
    monkeypatch.setattr(selftest, "TOLERANCE", 1e-5)
    shape = AttentionShape(jnp.float32, head_size=8, group=2, windowed=True, has_sink=True)
    options = {"window": shape.window, "packed": packed, "scale": shape.scale}
    attend = functools.partial(cudnn_attention, sink_KG=shape.sink_KG, **options)
    assert disagreement(attend, rows(), shape) is None


@pytest.mark.slow
def test_the_self_test_finds_a_wrong_sink():
    shape = AttentionShape(jnp.float32, head_size=8, group=2, windowed=False, has_sink=True)
    attend = lambda q, k, v, rows: blockwise_attention(q, k, v, rows, shape.scale, None)  # noqa: E731
    assert "output differs from reference attention" in (disagreement(attend, packed_rows(), shape) or "")
