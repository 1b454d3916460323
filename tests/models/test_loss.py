"""The chunked loss against float64 closed forms, torch, and its own compiled program."""

import re

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlm.core.mesh import AxisMappings, make_layout, mesh_shape
from jaxlm.core.tracing import BlockSizes, tracing
from jaxlm.models import chunked_loss
from jaxlm.models.loss import next_token_sums, token_losses


def problem(batch, position, embed, vocab, *, seed=0, mask=0.7):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(batch, position, embed)).astype(np.float32)
    w = rng.normal(size=(vocab, embed)).astype(np.float32) / np.sqrt(embed)
    y = rng.integers(0, vocab, size=(batch, position)).astype(np.int32)
    return x, w, y, (rng.random((batch, position)) < mask).astype(np.float32)


def closed_form(x, w, y, m, z, smoothing, cap=None):
    """Sums and gradients in float64 from the definition, with all logits at once."""
    x, w, m = (a.astype(np.float64) for a in (x, w, m))
    logits = x @ w.T if cap is None else cap * np.tanh(x @ w.T / cap)
    top = logits.max(-1, keepdims=True)
    lse = (top + np.log(np.exp(logits - top).sum(-1, keepdims=True)))[..., 0]
    onehot = np.eye(w.shape[0])[y]
    wanted = (1 - smoothing) * onehot + smoothing / w.shape[0]
    nll = lse - (logits * onehot).sum(-1)
    loss = (wanted * (lse[..., None] - logits)).sum(-1) + z * lse**2
    dlogits = m[..., None] * ((1 + 2 * z * lse)[..., None] * np.exp(logits - lse[..., None]) - wanted)
    if cap is not None:
        dlogits *= 1 - np.tanh(x @ w.T / cap) ** 2
    sums = [(m * a).sum() for a in (loss, nll, z * lse**2, logits.argmax(-1) == y)]
    return sums, np.einsum("bsv,vd->bsd", dlogits, w), np.einsum("bsv,bsd->vd", dlogits, x), nll


def named(x, w, *columns):
    rows = (Axis("batch", x.shape[0]), Axis("position", x.shape[1]))
    Embed, Vocab = Axis("embed", x.shape[2]), Axis("vocab", w.shape[0])
    return hax.named(x, (*rows, Embed)), hax.named(w, (Vocab, Embed)), *(hax.named(c, rows) for c in columns)


def sums_of(x, w, y, m, **options):
    return next_token_sums(*named(x, w, jnp.asarray(y), jnp.asarray(m)), **options)


def value_and_grads(x, w, y, m, **options):
    def total(x, w):
        sums = sums_of(x, w, y, m, **options)
        return sums.total, sums

    (_, sums), grads = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))(jnp.asarray(x), jnp.asarray(w))
    return sums, grads


def losses_and_gradient(x, w, y, m, **options):
    """Of each token, and of their sum with these weights by the hidden states."""

    def weighted(x):
        losses = token_losses(*named(x, w, jnp.asarray(y)), **options)
        assert [axis.name for axis in losses.axes] == ["batch", "position"]
        return (losses.array * m).sum(), losses.array

    gradient, losses = jax.jit(jax.grad(weighted, has_aux=True))(x)
    return losses, gradient


@pytest.mark.slow
def test_chunks_are_those_of_the_trace_options_unless_they_are_given():
    case = problem(2, 40, 8, 30)
    expected, given_size = value_and_grads(*case, chunk_tokens=16), value_and_grads(*case, chunk_tokens=24)
    with tracing(block_sizes=BlockSizes(loss_chunk_tokens=16)):
        found, still_given = value_and_grads(*case), value_and_grads(*case, chunk_tokens=24)
    for ours, theirs in ((found, expected), (still_given, given_size)):
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_array_equal(a, b)
    assert any(
        (np.asarray(a) != np.asarray(b)).any()
        for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(given_size), strict=True)
    )


@pytest.fixture
def on_gpu(monkeypatch):
    """Reduces logits as on a GPU, in one pass."""
    monkeypatch.setattr(chunked_loss, "current_platform", lambda: "gpu")


SMALL = ((2, 37, 16, 50), 16)
OTHER_SHAPES = (((7, 1217, 8, 97), 1024), ((1, 1, 4, 3), 512), ((3, 5, 4, 7), 1))
PENALTIES = ((0.0, 0.0), (1e-2, 0.0), (0.0, 0.1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "chunk_tokens", "z", "smoothing"),
    [
        *((*SMALL, *penalties) for penalties in (*PENALTIES, (1e-2, 0.1))),
        *((*shape, 1e-2, 0.1) for shape in OTHER_SHAPES),
        *(pytest.param(*s, *p, marks=pytest.mark.soak) for s in OTHER_SHAPES for p in PENALTIES),
    ],
)
def test_sums_and_gradients_match_the_closed_forms(shape, chunk_tokens, z, smoothing):
    x, w, y, m = problem(*shape)
    expected, dx, dw, _ = closed_form(x, w, y, m, z, smoothing)
    options = {"z_loss_weight": z, "label_smoothing": smoothing, "chunk_tokens": chunk_tokens}
    sums, grads = value_and_grads(x, w, y, m, **options)
    got = [sums.total, sums.cross_entropy, sums.z_loss, sums.correct]
    np.testing.assert_allclose(got, expected, rtol=2e-6, atol=1e-6)
    np.testing.assert_allclose(grads[0], dx, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(grads[1], dw, rtol=2e-5, atol=2e-5)
    undifferentiated = jax.jit(lambda x, w: sums_of(x, w, y, m, **options).total)(x, w)
    np.testing.assert_allclose(undifferentiated, sums.total, rtol=1e-6)


def test_dynamic_fine_tuning_weights_each_token_by_its_probability_as_a_constant():
    x, w, y, m = problem(2, 37, 16, 50)
    z, x64, w64 = 1e-2, x.astype(np.float64), w.astype(np.float64)
    nll, onehot = closed_form(x, w, y, m, 0.0, 0.0)[3], np.eye(50)[y]
    lse = np.log(np.exp(x64 @ w64.T).sum(-1))
    p = np.exp(-nll)
    softmax = np.exp(x64 @ w64.T - lse[..., None])
    d_logits = m[..., None] * (p[..., None] * (softmax - onehot) + (2 * z * lse)[..., None] * softmax)
    sums, grads = value_and_grads(x, w, y, m, dft=True, z_loss_weight=z, chunk_tokens=16)
    np.testing.assert_allclose(sums.total, (m * (p * nll + z * lse**2)).sum(), rtol=2e-6)
    np.testing.assert_allclose(sums.cross_entropy, (m * nll).sum(), rtol=2e-6)
    np.testing.assert_allclose(grads[0], np.einsum("bsv,vd->bsd", d_logits, w64), rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(grads[1], np.einsum("bsv,bsd->vd", d_logits, x64), rtol=2e-5, atol=2e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("shape", [(2, 37, 16, 50), (1, 1, 4, 3)])
def test_one_pass_over_the_logits_matches_the_closed_forms(shape):
    test_sums_and_gradients_match_the_closed_forms(shape, 16, 1e-2, 0.1)
    test_token_losses_and_their_gradient()


@pytest.mark.slow
@pytest.mark.usefixtures("on_gpu")
def test_one_pass_over_the_logits_has_the_second_derivatives_of_the_closed_form():
    test_second_derivatives_match_the_closed_form(0.7, 1e-2, 0.1)


@pytest.mark.usefixtures("on_gpu")
def test_one_pass_over_a_sharded_vocabulary_gives_the_sums_and_gradients_of_one_device():
    x, w, y, m = problem(8, 16, 8, 24)
    expected, dx, dw, _ = closed_form(x, w, y, m, 1e-2, 0.1)
    shape = mesh_shape(len(jax.devices()), replica=1, model=2)
    where = make_layout(shape, AxisMappings("batch", ("embed",), ("vocab",), {}, {}), {"embed": 8, "vocab": 24})
    with where.use():
        sums, grads = value_and_grads(x, w, y, m, z_loss_weight=1e-2, label_smoothing=0.1, chunk_tokens=16)
    got = [sums.total, sums.cross_entropy, sums.z_loss, sums.correct]
    np.testing.assert_allclose(got, expected, rtol=2e-6, atol=1e-6)
    np.testing.assert_allclose(grads[0], dx, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(grads[1], dw, rtol=2e-5, atol=2e-5)


def test_one_pass_finds_the_first_of_equal_maxima_and_keeps_infinities():
    rows = [[1.0, 3.0, 3.0, -2.0], [-np.inf, 5.0, -np.inf, -np.inf], [1e30, -1e30, 1e30, 0.0], [np.nan, 0, 1, 2]]
    top, total, first = chunked_loss.online_maximum(jnp.asarray(rows, jnp.float32))
    np.testing.assert_array_equal(top, np.float32([3.0, 5.0, 1e30, np.nan]))
    np.testing.assert_allclose(total, [2 + np.exp(-2) + np.exp(-5), 1.0, 2.0, np.nan], rtol=1e-6)
    np.testing.assert_array_equal(first[:3], [1, 1, 0])


@pytest.mark.slow
@pytest.mark.parametrize("cap", [0.7, 30.0])
def test_soft_capped_sums_and_gradients_match_the_closed_forms(cap):
    x, w, y, m = problem(2, 37, 16, 50)
    expected, dx, dw, nll = closed_form(x, w, y, m, 1e-2, 0.1, cap)
    options = {"z_loss_weight": 1e-2, "label_smoothing": 0.1, "soft_cap": cap, "chunk_tokens": 16}
    sums, grads = value_and_grads(x, w, y, m, **options)
    np.testing.assert_allclose([sums.total, sums.cross_entropy, sums.z_loss, sums.correct], expected, rtol=2e-6)
    np.testing.assert_allclose(grads[0], dx, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(grads[1], dw, rtol=2e-5, atol=2e-5)
    _, dx, _, _ = closed_form(x, w, y, m, 0.0, 0.0, cap)
    got, found = losses_and_gradient(x, w, y, m, soft_cap=cap, chunk_tokens=16)
    np.testing.assert_allclose(got, nll, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found, dx, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("cap", "z", "smoothing"), [(0.7, 1e-2, 0.1), pytest.param(None, 0.0, 0.0, marks=pytest.mark.slow)]
)
def test_second_derivatives_match_the_closed_form(cap, z, smoothing):
    x, w, y, m = problem(2, 37, 16, 50)
    y[0, 0], m[0, 0] = -100, 0.0
    u = tuple(np.random.default_rng(1).normal(size=a.shape) for a in (x, w))
    side = lambda h: closed_form(x + h * u[0], w + h * u[1], np.maximum(y, 0), m, z, smoothing, cap)[1:3]  # noqa: E731
    expected = [(ahead - behind) / 2e-5 for ahead, behind in zip(side(1e-5), side(-1e-5), strict=True)]
    options = {"soft_cap": cap, "z_loss_weight": z, "label_smoothing": smoothing, "chunk_tokens": 16}

    @jax.jit
    def along(given, u):
        gradient = jax.grad(lambda x, w: sums_of(x, w, y, m, **options).total, (0, 1))
        return jax.jvp(gradient, given, u)

    given = [tuple(jnp.asarray(a, jnp.float32) for a in pair) for pair in ((x, w), u)]
    with tracing(twice_differentiable=True):
        program = along.lower(*given).compile()
    gradient, found = program(*given)
    for ours, theirs in zip(gradient, side(0.0), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    assert not re.search(r"\[(5,15|75|74|2,37),50\]", program.as_text()), "the logits of all tokens at once"


@pytest.mark.parametrize("cap", [0.0, -1.0, float("nan")])
def test_an_invalid_soft_cap_is_refused(cap):
    with pytest.raises(ValueError, match=r"soft_cap: .* given, more than 0 or None expected"):
        sums_of(*problem(1, 2, 4, 5), soft_cap=cap)


def test_equals_torch_cross_entropy():
    torch = pytest.importorskip("torch")
    x, w, y, m = problem(2, 33, 16, 41)
    tx, tw = (torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in (x, w))
    targets = torch.tensor(np.where(m > 0, y, -100).reshape(-1).astype(np.int64))
    loss = torch.nn.functional.cross_entropy(
        (tx @ tw.T).reshape(-1, 41), targets, label_smoothing=0.2, reduction="sum", ignore_index=-100
    )
    loss.backward()
    sums, grads = value_and_grads(x, w, np.where(m > 0, y, -100), m, label_smoothing=0.2, chunk_tokens=20)
    np.testing.assert_allclose(sums.total, loss.item(), rtol=1e-6)
    np.testing.assert_allclose(grads[0], tx.grad.numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(grads[1], tw.grad.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@given(
    batch=st.integers(1, 4),
    position=st.integers(1, 40),
    vocab=st.integers(2, 30),
    chunk=st.integers(1, 64),
    seed=st.integers(0, 9),
)
@settings(max_examples=5)
def test_the_chunk_size_does_not_matter(batch, position, vocab, chunk, seed):
    x, w, y, m = problem(batch, position, 4, vocab, seed=seed)
    whole, whole_grads = value_and_grads(x, w, y, m, z_loss_weight=1e-3, chunk_tokens=10_000)
    cut, cut_grads = value_and_grads(x, w, y, m, z_loss_weight=1e-3, chunk_tokens=chunk)
    for a, b in zip(jax.tree.leaves((whole, whole_grads)), jax.tree.leaves((cut, cut_grads)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_masked_rows_contribute_zero():
    x, w, y, _ = problem(2, 9, 8, 11)
    ignored = np.full_like(y, -100)
    sums, grads = value_and_grads(x, w, ignored, np.zeros(y.shape, np.float32), z_loss_weight=0.1, label_smoothing=0.1)
    for leaf in jax.tree.leaves((sums, grads)):
        np.testing.assert_array_equal(leaf, np.zeros_like(leaf))


def test_an_unmasked_target_beyond_the_vocabulary_gives_nan():
    x, w, y, m = problem(1, 9, 8, 11, mask=1.0)
    total = jax.jit(lambda y, m: sums_of(x, w, y, m).total)
    masked = m.copy()
    masked[0, 3] = 0
    for bad in (-1, 11, 400):
        y[0, 3] = bad
        assert np.isnan(total(y, m))
        assert np.isfinite(total(y, masked))


def test_bfloat16_inputs_have_float32_sums():
    x, w, y, m = problem(2, 300, 64, 500)
    x, w = (jnp.asarray(a, jnp.bfloat16) for a in (x, w))
    expected, dx, dw, _ = closed_form(np.asarray(x, np.float32), np.asarray(w, np.float32), y, m, 1e-3, 0.1)
    sums, grads = value_and_grads(x, w, y, m, z_loss_weight=1e-3, label_smoothing=0.1, chunk_tokens=128)
    assert grads[0].dtype == grads[1].dtype == jnp.bfloat16
    # Logits are exact products summed in float32; their gradient is rounded (2^-9 relative) before its products.
    np.testing.assert_allclose([sums.total, sums.cross_entropy, sums.z_loss], expected[:3], rtol=1e-5)
    for got, want in zip(grads, (dx, dw), strict=True):
        error = np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)
        assert error < 4e-3, error


def num_matrix_products(fun, *args) -> int:
    return str(jax.make_jaxpr(fun)(*args)).count("dot_general")


def test_only_requested_gradients_cost_a_matrix_product():
    x, w, y, m = problem(2, 8, 4, 5)
    total = lambda x, w: sums_of(x, w, y, m).total  # noqa: E731
    assert num_matrix_products(total, x, w) == 1
    assert num_matrix_products(jax.grad(total, argnums=0), x, w) == 2
    assert num_matrix_products(jax.grad(total, argnums=1), x, w) == 2
    assert num_matrix_products(jax.grad(total, argnums=(0, 1)), x, w) == 3


def test_metrics_have_no_gradient():
    x, w, y, m = problem(2, 8, 4, 5)
    grad = jax.jit(jax.grad(lambda w: sums_of(x, w, y, m).cross_entropy))(w)
    np.testing.assert_array_equal(grad, 0)


@pytest.mark.parametrize("task", ["train", "evaluate"])
def test_the_logits_of_all_tokens_are_never_materialized(task):
    tokens, vocab, chunk = 4096, 1531, 256
    x, w, y, m = problem(4, tokens // 4, 16, vocab)

    def train(x, w):
        return jax.grad(lambda x, w: sums_of(x, w, y, m, chunk_tokens=chunk).total, argnums=(0, 1))(x, w)

    def evaluate(x, w):
        return token_losses(*named(x, w, jnp.asarray(y)), chunk_tokens=chunk).array

    compiled = jax.jit(train if task == "train" else evaluate).lower(x, w).compile()
    shapes = [tuple(map(int, s.split(","))) for s in re.findall(r"\w+\[([\d,]+)\]", compiled.as_text())]
    largest_with_vocab = max(np.prod(s) for s in shapes if vocab in s)
    assert largest_with_vocab == chunk * vocab
    assert compiled.memory_analysis().temp_size_in_bytes < tokens * vocab * 4 / 3


def test_token_losses_and_their_gradient():
    x, w, y, m = problem(3, 21, 8, 17)
    _, dx, _, nll = closed_form(x, w, y, m, 0.0, 0.0)
    got, found = losses_and_gradient(x, w, y, m, chunk_tokens=10)
    np.testing.assert_allclose(got, nll, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found, dx, rtol=1e-5, atol=1e-6)


def test_empty_chunks_are_refused():
    with pytest.raises(ValueError, match="chunk_tokens: 0 given"):
        sums_of(*problem(1, 2, 4, 5), chunk_tokens=0)
