"""Attention backends against the definition in float64: values, gradients, odd lengths, groups, windows, documents."""

import dataclasses

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.core.tracing import BlockSizes, tracing
from jaxlm.models.attention.backends.blockwise import Reach, blockwise_attention, query_blocks
from jaxlm.models.attention.backends.reference import reference_attention
from jaxlm.models.attention.backends.splash import splash_attention
from jaxlm.models.attention.choose import AttentionTask, choose_attention
from jaxlm.models.attention.scores import ScoreRule
from jaxlm.models.attention.sharding import AttentionSharding

B, K, G, H = 2, 2, 2, 8
SCALE = 0.3


def random_case(length, num_segments, seed=0):
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(B, length, K, G, H)).astype(np.float32)
    k, v, d_out = (rng.normal(size=(B, length, K, *shape)).astype(np.float32) for shape in ((H,), (H,), (G, H)))
    starts = np.sort(rng.integers(0, length, size=(B, num_segments)), axis=1)
    segments = (np.arange(length)[None, :, None] >= starts[:, None, :]).sum(-1)  # 0, before the first start, is padding
    return q, k, v, segments, d_out


def allowed(segments, window, causal=True):
    query, key = np.arange(segments.shape[1])[:, None], np.arange(segments.shape[1])[None, :]
    size = window or segments.shape[1]
    near = (key <= (query if causal else query + size - 1)) & (key > query - size)
    return near & (segments[:, :, None] == segments[:, None, :]) & (segments != 0)[:, :, None]


def definition(q, k, v, segments, window, d_out, causal=True):
    """Output and gradients in float64, from the formulas."""
    q, k, v, d_out = (a.astype(np.float64) for a in (q, k, v, d_out))
    mask = allowed(segments, window, causal)[:, None, None]
    scores = np.where(mask, np.einsum("btkgh,bskh->bkgts", q, k) * SCALE, -np.inf)
    with np.errstate(invalid="ignore"):
        weights = np.nan_to_num(np.exp(scores - scores.max(-1, keepdims=True)))
        weights = np.nan_to_num(weights / weights.sum(-1, keepdims=True))
    out = np.einsum("bkgts,bskh->btkgh", weights, v)
    d_v = np.einsum("bkgts,btkgh->bskh", weights, d_out)
    d_weights = np.einsum("btkgh,bskh->bkgts", d_out, v)
    d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True)) * SCALE
    return out, np.einsum("bkgts,bskh->btkgh", d_scores, k), np.einsum("bkgts,btkgh->bskh", d_scores, q), d_v


def blocks(q, k, v, segments, window, causal=True):
    return blockwise_attention(q, k, v, segments, SCALE, window, causal=causal)


def splash(q, k, v, segments, window, causal=True):
    return splash_attention(q, k, v, segments, SCALE, window, causal=causal, interpret=True)


def plain(q, k, v, segments, window, causal=True):
    return reference_attention(q, k, v, jnp.asarray(allowed(np.asarray(segments), window, causal)), SCALE, 0.0, None)


def value_and_gradients(attend, q, k, v, d_out):
    """The output, and the gradients of its product with `d_out`; compiled as one program."""

    @jax.jit
    def both(q, k, v):
        out, vjp = jax.vjp(attend, q, k, v)
        return (out, *vjp(d_out))

    return both(q, k, v)


@pytest.mark.parametrize("backend", [blocks, plain])
@pytest.mark.parametrize(
    ("length", "num_segments", "window"),
    [
        (1, 1, None),
        pytest.param(7, 1, None, marks=pytest.mark.slow),
        pytest.param(128, 2, None, marks=pytest.mark.slow),
        (131, 5, 3),
        pytest.param(257, 32, None, marks=pytest.mark.slow),
        pytest.param(300, 3, 40, marks=pytest.mark.slow),
        pytest.param(300, 1, 1000, marks=pytest.mark.slow),
    ],
)
def test_matches_the_definition(backend, length, num_segments, window):
    q, k, v, segments, d_out = random_case(length, num_segments)
    found = value_and_gradients(lambda *qkv: backend(*qkv, segments, window), q, k, v, d_out)
    for ours, theirs in zip(found, definition(q, k, v, segments, window, d_out), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "num_segments", "window"),
    [
        (128, 2, None),
        (256, 5, None),
        (384, 3, 40),
    ],
)
def test_splash_matches_the_definition(length, num_segments, window):
    test_matches_the_definition(splash, length, num_segments, window)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "length", "num_segments", "window"),
    [
        (blocks, 131, 3, None),
        (blocks, 300, 3, 40),
        (splash, 256, 3, None),
        (splash, 384, 3, 40),
        (plain, 131, 3, 7),
    ],
)
def test_tokens_attend_to_later_ones_within_their_document_and_window(backend, length, num_segments, window):
    q, k, v, segments, d_out = random_case(length, num_segments)
    found = value_and_gradients(lambda *qkv: backend(*qkv, segments, window, causal=False), q, k, v, d_out)
    for ours, theirs in zip(found, definition(q, k, v, segments, window, d_out, causal=False), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
def test_second_derivatives_match_the_definition():
    q, k, v, segments, d_out = random_case(131, 5)
    u = tuple(np.random.default_rng(1).normal(size=a.shape) for a in (q, k, v))

    def side(h):
        moved = (a + h * b for a, b in zip((q, k, v), u, strict=True))
        return definition(*moved, segments, 40, d_out)[1:]

    with tracing(twice_differentiable=True):
        gradient = jax.grad(lambda *qkv: jnp.sum(blocks(*qkv, segments, 40) * d_out), (0, 1, 2))
        found = jax.jit(lambda *qkv: jax.jvp(gradient, qkv, tuple(map(jnp.float32, u))))(q, k, v)
    along = [(ahead - behind) / 2e-5 for ahead, behind in zip(side(1e-5), side(-1e-5), strict=True)]
    for ours, theirs in zip(jax.tree.leaves(found), [*side(0.0), *along], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def by_autodiff(q, k, v, segments, window, rule):
    """Attention with score rules from the papers' formulas; derivatives by jax."""
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k) * SCALE
    if rule.soft_cap is not None:
        scores = rule.soft_cap * jnp.tanh(scores / rule.soft_cap)
    if rule.alibi_max is not None:
        distance = np.arange(q.shape[1])[:, None] - np.arange(q.shape[1])[None, :]
        slopes = 2.0 ** (-rule.alibi_max * np.arange(1, K * G + 1) / (K * G))
        scores = scores - slopes.reshape(K, G, 1, 1) * distance
    mask = allowed(segments, window)[:, None, None]
    weights = jnp.where(mask, jax.nn.softmax(jnp.where(mask, scores, -1e30), axis=-1), 0.0)
    return jnp.einsum("bkgts,bskh->btkgh", weights, v)


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(ScoreRule(soft_cap=0.5), marks=pytest.mark.slow),
        pytest.param(ScoreRule(alibi_max=4.0), marks=pytest.mark.slow),
        ScoreRule(2.0, 8.0),
    ],
    ids=str,
)
def test_score_rules(rule):
    q, k, v, segments, d_out = random_case(150, 2)
    found, expected = (
        value_and_gradients(attend, q, k, v, d_out)
        for attend in (
            lambda *qkv: blockwise_attention(*qkv, segments, SCALE, 40, rule),
            lambda *qkv: by_autodiff(*qkv, segments, 40, rule),
        )
    )
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)


def test_score_rules_exclude_fused_kernels():
    task = AttentionTask(
        "tpu", jnp.dtype(jnp.bfloat16), 1024, head_size=64, rule=ScoreRule(soft_cap=30.0, alibi_max=8.0)
    )
    choice = choose_attention(task)
    assert (choice.name, choice.degraded) == ("blockwise", True)
    assert "not splash: it does not support a soft cap of scores and ALiBi" in choice.reason
    with pytest.raises(ConfigError, match="'splash' given, but it does not support"):
        choose_attention(task, "splash")


def test_second_derivatives_exclude_kernels_without_them():
    task = AttentionTask("tpu", jnp.dtype(jnp.bfloat16), 1024, head_size=64, twice_differentiable=True)
    assert choose_attention(task).reason.endswith("not splash: its backward pass is not differentiable")


@pytest.mark.slow
def test_kernels_receive_their_own_rows_and_heads():
    """The inputs of a kernel under shard_map, with key heads that divide over the devices and that do not."""
    from tests.engine.helpers import layout

    q, k, v, segments, _ = (np.concatenate([a] * 2) for a in random_case(16, 2))
    named = lambda a, *axes: hax.named(jnp.asarray(a.reshape(4, 16, -1, H)), axes)  # noqa: E731
    run = lambda q, k, v, rows, _, scale: blockwise_attention(q, k, v, rows, scale, window=None)  # noqa: E731
    expected = run(q, k, v, segments, None, SCALE)
    for model in (2, 4):
        with layout(model=model).use() as where:
            queries = named(q, "batch", "position", "heads", "head_size")
            place = AttentionSharding.of(queries, named(k, "batch", "key_position", "kv_heads", "head_size"))
            assert (place.heads == place.kv_heads) == (model == 2)
            out = jax.jit(place.shard_map(run))(q, k, v, segments, None, SCALE)
            assert where.mesh.size == 8
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


def test_kernels_get_whole_sequences_where_positions_are_sharded():
    from tests.engine.helpers import layout

    q, k, v, segments, _ = (np.concatenate([a] * 2) for a in random_case(16, 2))
    named = lambda a, *axes: hax.named(jnp.asarray(a.reshape(4, 16, -1, H)), axes)  # noqa: E731
    run = lambda q, k, v, rows, _, scale: blockwise_attention(q, k, v, rows, scale, window=None)  # noqa: E731
    compute = {"position": ("data",), "heads": ("model",), "kv_heads": ("model",)}
    with dataclasses.replace(layout(model=2), compute=compute).use():
        queries = named(q, "batch", "position", "heads", "head_size")
        place = AttentionSharding.of(queries, named(k, "batch", "key_position", "kv_heads", "head_size"))
        assert (place.batch, place.heads) == ((), ("model",))
        out = jax.jit(place.shard_map(run))(q, k, v, segments, None, SCALE)
    np.testing.assert_allclose(out, run(q, k, v, segments, None, SCALE), rtol=1e-5, atol=1e-6)


def test_fully_masked_rows_are_zero_and_have_no_gradient():
    q, k, v, segments, d_out = random_case(150, 1)
    segments = np.zeros_like(segments)
    for leaf in value_and_gradients(lambda *qkv: blocks(*qkv, segments, None), q, k, v, d_out):
        np.testing.assert_array_equal(leaf, np.zeros_like(leaf))


def test_other_documents_do_not_change_one_bit():
    q, k, v, segments, _ = random_case(300, 2)
    first = segments == 1
    attend = jax.jit(lambda *qkv: blocks(*qkv, segments, None))
    before = attend(q, k, v)
    disturbed = [np.where(first.reshape(*first.shape, *[1] * (a.ndim - 2)), a + 1, a) for a in (q, k, v)]
    after = attend(*disturbed)
    assert (segments == 2).any()
    np.testing.assert_array_equal(np.asarray(after)[segments == 2], np.asarray(before)[segments == 2])
    assert not np.array_equal(np.asarray(after)[first], np.asarray(before)[first])


@pytest.mark.parametrize(("length", "window"), [(1, None), (1024, None), (4096, None), (5000, 300), (130, 7)])
def test_blocks_cover_every_query_with_little_overhead(length, window):
    found = list(query_blocks(length, Reach(window), 128))
    assert [start for start, *_ in found] == [0, *(stop for _, stop, *_ in found[:-1])]
    assert found[-1][1] == length
    assert all(first <= max(0, start - (window or length) + 1) for start, _, first, _ in found)
    assert all(last == stop for _, stop, _, last in found)
    both = list(query_blocks(length, Reach(window, causal=False), 128))
    assert [block[:3] for block in both] == [block[:3] for block in found]
    assert all(last >= min(length, stop + (window or length) - 1) for _, stop, _, last in both)
    computed = sum((stop - start) * (last - first) for start, stop, first, last in found)
    if length >= 1024:
        assert computed <= (9 / 16 * length**2 if window is None else length * (2 * window + 1))


@pytest.mark.slow
@pytest.mark.parametrize(("block", "window", "first"), [(16, None, 17), (64, 40, 64)])
def test_any_block_size_matches_the_definition(block, window, first):
    with tracing(block_sizes=BlockSizes(attention_block=block)):
        assert next(query_blocks(131, Reach(window))) == (0, first, 0, first)
        test_matches_the_definition(blocks, 131, 5, window)


def test_no_array_holds_all_scores():
    q, k, v, segments, _ = random_case(1024, 3)
    for attend, holds in ((blocks, False), (plain, True)):
        gradient = jax.jit(jax.grad(lambda q, attend=attend: attend(q, k, v, segments, None).sum()))
        assert ("1024x1024xf32" in gradient.lower(q).as_text()) == holds


@pytest.mark.parametrize(
    ("platform", "change", "name", "degraded"),
    [
        ("cpu", {}, "blockwise", False),
        ("cpu", {"same_tokens": False}, "reference", True),
        ("cpu", {"dropout": 0.1}, "reference", True),
        ("tpu", {}, "splash", False),
        ("tpu", {"seq_len": 100}, "blockwise", True),
        ("tpu", {"dropout": 0.1}, "reference", True),
    ],
)
def test_choice(platform, change, name, degraded):
    usual = {"platform": platform, "dtype": jnp.dtype(jnp.bfloat16), "seq_len": 1024, "head_size": 64}
    task = AttentionTask(**(usual | change))
    choice = choose_attention(task)
    assert (choice.name, choice.degraded) == (name, degraded)
    assert ("not " in choice.reason) == degraded
    assert choose_attention(task, "reference").name == "reference"


def test_an_impossible_choice_is_refused():
    task = AttentionTask("cpu", jnp.dtype(jnp.float32), 128, head_size=64, dropout=0.1)
    with pytest.raises(ConfigError, match=r"model\.attn_backend: 'blockwise' given, but attention dropout"):
        choose_attention(task, "blockwise")
    with pytest.raises(ConfigError, match=r"'cudnn' does not run on cpu\. Allowed: auto, blockwise, reference"):
        choose_attention(task, "cudnn")
