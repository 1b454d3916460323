"""The distillation loss against torch in float64, its second derivatives, and its own compiled program."""

import re

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from jaxlm.core.tracing import tracing
from jaxlm.models.distillation.chunked import (
    ForwardKL,
    JensenShannon,
    ReverseKL,
    TeacherStates,
    distillation_sums,
    top_k_of,
)
from tests.tiers import one_of

DIVERGENCES = {"forward": ForwardKL(), "reverse": ReverseKL(), "js": JensenShannon(0.5), "js 0.1": JensenShannon(0.1)}
# The definition in torch shows all four; of what follows from it, "js 0.1" shows both halves of a mixture.
NAMES = one_of(["forward", "reverse", "js 0.1", "js"], but=3)
CHUNK = 16


def problem(batch=2, position=37, embed=16, vocab=50, *, teacher_embed=24, seed=0, mask=0.7):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(batch, position, embed)).astype(np.float32)
    w = rng.normal(size=(vocab, embed)).astype(np.float32) / np.sqrt(embed)
    tx = 2 * rng.normal(size=(batch, position, teacher_embed)).astype(np.float32)
    tw = rng.normal(size=(vocab, teacher_embed)).astype(np.float32) / np.sqrt(teacher_embed)
    y = rng.integers(0, vocab, size=(batch, position)).astype(np.int32)
    return x, w, tx, tw, y, (rng.random((batch, position)) < mask).astype(np.float32)


def named(x, w, *columns):
    rows = (Axis("batch", x.shape[0]), Axis("position", x.shape[1]))
    Embed, Vocab = Axis("embed", x.shape[2]), Axis("vocab", w.shape[0])
    return hax.named(x, (*rows, Embed)), hax.named(w, (Vocab, Embed)), *(hax.named(c, rows) for c in columns)


def teacher_of(tx, tw, top_k=None, temperature=1.0, cap=None):
    states = lambda tx, tw: TeacherStates(*named(tx, tw), cap)  # noqa: E731
    if top_k is None:
        return states(jnp.asarray(tx), jnp.asarray(tw))
    return jax.jit(lambda tx, tw: top_k_of(states(tx, tw), top_k, temperature, chunk_tokens=CHUNK))(tx, tw)


def sums_of(x, w, y, m, teacher, **options):
    options = {"divergence": ForwardKL(), "temperature": 1.0, "weight": 0.5, "chunk_tokens": CHUNK} | options
    return distillation_sums(*named(x, w, jnp.asarray(y), jnp.asarray(m)), teacher, **options)


def value_and_grads(x, w, y, m, teacher, **options):
    def total(x, w):
        sums = sums_of(x, w, y, m, teacher, **options)
        return sums.total, sums

    (_, sums), grads = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))(jnp.asarray(x), jnp.asarray(w))
    return sums, grads


def in_torch(x, w, tx, tw, y, m, divergence, *, temperature, weight, top_k=None, cap=None):
    """The sums and gradients from the definition, in float64."""
    torch = pytest.importorskip("torch")
    x, w = (torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in (x, w))
    tx, tw, m = (torch.tensor(a, dtype=torch.float64) for a in (tx, tw, m))
    y = torch.tensor(y.astype(np.int64))
    capped = lambda logits: logits if cap is None else cap * torch.tanh(logits / cap)  # noqa: E731
    student, teacher = capped(x @ w.T), capped(tx @ tw.T)
    q, p = torch.softmax(student / temperature, -1), torch.softmax(teacher / temperature, -1)
    if top_k is not None:
        ids = p.topk(top_k, -1).indices
        merged = lambda a: torch.cat([a.gather(-1, ids), 1 - a.gather(-1, ids).sum(-1, keepdim=True)], -1)  # noqa: E731
        p, q = merged(p), merged(q)
    kl = lambda a, b: (a * (a.log() - b.log())).sum(-1)  # noqa: E731
    if isinstance(divergence, JensenShannon):
        mixture = divergence.beta * p + (1 - divergence.beta) * q
        value = divergence.beta * kl(p, mixture) + (1 - divergence.beta) * kl(q, mixture)
    else:
        value = kl(p, q) if isinstance(divergence, ForwardKL) else kl(q, p)
    nll = torch.nn.functional.cross_entropy(student.flatten(0, 1), y.flatten(), reduction="none").reshape(y.shape)
    total = (m * ((1 - weight) * nll + weight * temperature**2 * value)).sum()
    total.backward()
    top = student.argmax(-1)
    sums = [total, (m * nll).sum(), (m * value).sum(), (m * (top == y)).sum(), (m * (top == teacher.argmax(-1))).sum()]
    return [a.item() for a in sums], x.grad.numpy(), w.grad.numpy()


def fields(sums):
    return [sums.total, sums.cross_entropy, sums.divergence, sums.correct, sums.agreement]


@pytest.mark.slow
@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize(
    ("top_k", "temperature", "weight", "cap"),
    one_of([(None, 1.0, 1.0, None), (7, 2.5, 0.3, 3.0), (7, 1.0, 1.0, None), (None, 2.5, 0.3, 3.0)], but=2),
)
def test_sums_and_gradients_equal_torch(name, top_k, temperature, weight, cap):
    x, w, tx, tw, y, m = problem()
    options = {"temperature": temperature, "weight": weight}
    expected, dx, dw = in_torch(x, w, tx, tw, y, m, DIVERGENCES[name], top_k=top_k, cap=cap, **options)
    teacher = teacher_of(tx, tw, top_k, temperature, cap)
    options |= {"divergence": DIVERGENCES[name], "soft_cap": cap}
    sums, grads = value_and_grads(x, w, y, m, teacher, **options)
    np.testing.assert_allclose(fields(sums), expected, rtol=5e-6, atol=1e-6)
    np.testing.assert_allclose(grads[0], dx, rtol=2e-5, atol=3e-6)
    np.testing.assert_allclose(grads[1], dw, rtol=2e-5, atol=2e-5)
    undifferentiated = jax.jit(lambda x, w: sums_of(x, w, y, m, teacher, **options).total)(x, w)
    np.testing.assert_allclose(undifferentiated, sums.total, rtol=1e-6)


def test_the_top_k_are_the_teachers_distribution():
    _, _, tx, tw, _, _ = problem()
    said = teacher_of(tx, tw, 5, temperature=2.0)
    logits = (tx.astype(np.float64) @ tw.T.astype(np.float64)) / 2
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    order = np.argsort(-p, -1)[..., :5]
    np.testing.assert_array_equal(said.ids.array, order)
    top = np.take_along_axis(p, order, -1)
    np.testing.assert_allclose(np.exp(said.log_probs.array), top, rtol=1e-5)
    np.testing.assert_allclose(np.exp(said.log_rest.array), 1 - top.sum(-1), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_student_that_equals_the_teacher_has_no_divergence_and_no_gradient(name):
    _, _, tx, tw, y, m = problem()
    for top_k in (None, 7):
        options = {"divergence": DIVERGENCES[name], "weight": 1.0}
        sums, grads = value_and_grads(tx, tw, y, m, teacher_of(tx, tw, top_k), **options)
        np.testing.assert_allclose(sums.divergence, 0, atol=2e-5)
        np.testing.assert_array_equal(sums.agreement, m.sum())
        for gradient in grads:
            np.testing.assert_allclose(gradient, 0, atol=5e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_more_top_tokens_come_closer_to_the_whole_divergence_from_below(name):
    x, w, tx, tw, y, m = problem()

    def divergence(top_k):
        of = lambda x, tx: sums_of(x, w, y, m, teacher_of(tx, tw, top_k), divergence=DIVERGENCES[name]).divergence  # noqa: E731
        return float(jax.jit(of)(x, tx))

    values = [divergence(top_k) for top_k in (1, 20, 49, None)]
    *parts, whole = values
    assert parts == sorted(parts)
    assert parts[-1] == pytest.approx(whole, rel=1e-5)  # the rest is a single token, so they differ by rounding alone


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_sharp_distributions_stay_finite(name):
    """Probabilities that underflow in float32."""
    x, w, tx, tw, y, m = problem()
    for top_k in (None, 3):
        options = {"divergence": DIVERGENCES[name]}
        sums, grads = value_and_grads(300 * x, w, y, m, teacher_of(500 * tx, tw, top_k), **options)
        for leaf in jax.tree.leaves((sums, grads)):
            assert np.isfinite(leaf).all()


@pytest.mark.slow
@pytest.mark.parametrize("top_k", [None, 7])
@pytest.mark.parametrize("name", NAMES)
def test_second_derivatives_equal_differences_of_the_gradient(name, top_k):
    x, w, tx, tw, y, m = problem(1, 21)
    divergence, teacher = DIVERGENCES[name], teacher_of(tx, tw, top_k)
    u = tuple(np.random.default_rng(1).normal(size=a.shape) for a in (x, w))
    options = {"temperature": 1.0, "weight": 0.6}
    side = lambda h: in_torch(x + h * u[0], w + h * u[1], tx, tw, y, m, divergence, top_k=top_k, **options)[1:]  # noqa: E731
    expected = [(ahead - behind) / 2e-5 for ahead, behind in zip(side(1e-5), side(-1e-5), strict=True)]

    @jax.jit
    def along(given, u):
        gradient = jax.grad(lambda x, w: sums_of(x, w, y, m, teacher, divergence=divergence, **options).total, (0, 1))
        return jax.jvp(gradient, given, u)

    given = [tuple(jnp.asarray(a, jnp.float32) for a in pair) for pair in ((x, w), u)]
    with tracing(twice_differentiable=True):
        _, found = along(*given)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-4)


@pytest.mark.slow
def test_masked_tokens_contribute_nothing_whatever_they_are():
    x, w, tx, tw, y, m = problem(1, 9)
    m[:] = 1
    m[0, 3] = 0
    y[0, 3] = -100
    tx[0, 3] = np.nan
    for top_k in (None, 4):
        sums, grads = value_and_grads(x, w, y, m, teacher_of(tx, tw, top_k), divergence=ReverseKL())
        for leaf in jax.tree.leaves((sums, grads)):
            assert np.isfinite(leaf).all()
        np.testing.assert_array_equal(grads[0][0, 3], 0)


@pytest.mark.parametrize("top_k", [None, 8])
def test_the_logits_of_all_tokens_are_never_materialized(top_k):
    tokens, vocab, chunk = 4096, 1531, 256
    x, w, tx, tw, y, m = problem(4, tokens // 4, 16, vocab)

    def train(x, w, tx, tw):
        states = TeacherStates(*named(tx, tw), None)
        teacher = states if top_k is None else top_k_of(states, top_k, 1.0, chunk_tokens=chunk)
        return jax.grad(lambda x, w: sums_of(x, w, y, m, teacher, chunk_tokens=chunk).total, argnums=(0, 1))(x, w)

    compiled = jax.jit(train).lower(x, w, tx, tw).compile()
    shapes = [tuple(map(int, s.split(","))) for s in re.findall(r"\w+\[([\d,]+)\]", compiled.as_text())]
    assert max(np.prod(s) for s in shapes if vocab in s) == chunk * vocab
    assert compiled.memory_analysis().temp_size_in_bytes < tokens * vocab * 4 / 2


@pytest.mark.slow
def test_the_teacher_costs_one_matrix_product_and_gets_no_gradient():
    x, w, tx, tw, y, m = problem(2, 8)

    def total(x, w, tx, tw):
        return sums_of(x, w, y, m, TeacherStates(*named(tx, tw), None)).total

    products = lambda fun: str(jax.make_jaxpr(fun)(x, w, tx, tw)).count("dot_general")  # noqa: E731
    assert products(total) == 2
    assert products(jax.grad(total, argnums=(0, 1))) == 4
    for gradient in jax.grad(total, argnums=(2, 3))(x, w, tx, tw):
        np.testing.assert_array_equal(gradient, 0)
