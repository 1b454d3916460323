"""The gated delta rule in chunks beside its definition in float64, where a shorter form would lose digits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core.tracing import tracing
from jaxlm.models.mixers.delta_rule import DeltaState, Tokens, delta_rule, transition, unit_lower_inverse
from tests.tiers import one_of

KEY_HEADS, GROUP, KEY_SIZE, VALUE_SIZE = 2, 2, 16, 8


compiled = jax.jit(delta_rule)


def _unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def _tokens(length, *, common=0.0, decay=None, beta=None, segments=None, seed=0) -> Tokens:
    """Args: common: share of every key that is the same; decay, beta: of all tokens; None for random ones."""
    rng = np.random.default_rng(seed)
    rows = (2, length, KEY_HEADS)
    keys = np.sqrt(1 - common) * _unit(rng.normal(size=(*rows, KEY_SIZE)))
    keys = keys + np.sqrt(common) * _unit(rng.normal(size=KEY_SIZE))
    g = -np.exp(rng.normal(size=(*rows, GROUP)) - 3) if decay is None else np.broadcast_to(decay, (*rows, GROUP))
    beta = rng.uniform(0, 1, g.shape) if beta is None else np.full(g.shape, beta)
    arrays = (
        _unit(rng.normal(size=(*rows, KEY_SIZE))) * KEY_SIZE**-0.5,
        _unit(keys),
        rng.normal(size=(*rows, GROUP, VALUE_SIZE)),
        g,
        beta,
    )
    segments = np.ones((2, length)) if segments is None else np.broadcast_to(segments, (2, length))
    return Tokens._make((*(jnp.asarray(a, jnp.float32) for a in arrays), jnp.asarray(segments, jnp.int32)))


def _definition(tokens: Tokens):
    """Token by token, [B, T, K, R, V] and the state."""
    q, k, v, g, beta = (jnp.moveaxis(a, 1, 0) for a in tokens[:5])

    def step(carry, token):
        state, segment = carry
        q, k, v, g, beta, s = token
        kept = jnp.where((s == segment)[:, None, None, None, None], state * jnp.exp(g)[..., None, None], 0)
        error = beta[..., None] * (v - jnp.einsum("bkd,bkrdv->bkrv", k, kept))
        new = kept + jnp.einsum("bkd,bkrv->bkrdv", k, error)
        real = (s != 0)[:, None, None, None]
        out = jnp.where(real, jnp.einsum("bkd,bkrdv->bkrv", q, new), 0)
        return (jnp.where(real[..., None], new, state), jnp.where(s != 0, s, segment)), out

    start = jnp.zeros((2, KEY_HEADS, GROUP, KEY_SIZE, VALUE_SIZE), v.dtype), jnp.zeros(2, jnp.int32)
    (state, _), out = jax.lax.scan(step, start, (q, k, v, g, beta, tokens.segments.T))
    return jnp.moveaxis(out, 0, 1), state


def _documents(*lengths):
    return np.repeat(np.arange(1, len(lengths) + 1), lengths)


_MIXED = np.where(np.arange(200) % 3 == 0, -300.0, -0.001)[None, :, None, None]
_PADDED = np.concatenate([np.zeros(5), _documents(40), np.zeros(7), 2 + _documents(66, 10), np.zeros(72)])
CASES = {
    **{f"{n} tokens": {"length": n} for n in (1, 3, 64, 65, 200)},
    "common keys": {"length": 200, "common": 0.9, "decay": 0.0, "beta": 1.0},
    "equal keys": {"length": 200, "common": 1.0, "decay": 0.0, "beta": 1.0},
    "fast beside slow": {"length": 200, "decay": _MIXED},
    "beta of 2": {"length": 200, "beta": 2.0},
    "documents": {"length": 200, "segments": _documents(1, 3, 63, 64, 65, 4), "decay": -0.01},
    "fast documents beside slow": {
        "length": 200,
        "segments": _documents(1, 30, 63, 37, 69),
        "decay": np.repeat([-300.0, -0.001, -300.0, -0.001, -0.001], [1, 30, 63, 37, 69])[None, :, None, None],
    },
    "padding": {"length": 200, "segments": _PADDED, "decay": -0.01},
}


@functools.partial(jax.jit, static_argnums=(0, 2))
def _with_gradients(rule, tokens: Tokens, dtype):
    """Args: dtype: of all that tokens have; None for what it is."""
    weights = jnp.asarray(np.random.default_rng(1).normal(size=tokens.v.shape), dtype or jnp.float32)

    def loss(arrays):
        out, state = rule(Tokens._make((*arrays, tokens.segments)))
        return jnp.sum(weights * out), (out, state)

    gradients, (out, state) = jax.grad(loss, has_aux=True)(tuple(a.astype(dtype or a.dtype) for a in tokens[:5]))
    return out, state, gradients


SLOW = ("3 tokens", "64 tokens")  # each length is a program of its own


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name, marks=pytest.mark.slow if name in SLOW else ()) for name, case in CASES.items()],
)
def test_chunks_compute_the_definition(case):
    tokens = _tokens(**case)
    out, state, gradients = _with_gradients(delta_rule, tokens, jnp.float32)
    with jax.enable_x64(True):
        expected, last, wanted = jax.tree.map(np.asarray, _with_gradients(_definition, tokens, jnp.float64))
    assert np.abs(out - expected).max() <= 1e-6 * np.abs(expected).max()
    assert np.abs(state.memory - last).max() <= 1e-6 * np.abs(last).max()
    for name, one, other in zip(Tokens._fields, gradients, wanted, strict=False):
        assert np.isfinite(one).all(), name
        assert np.abs(one - other).max() <= 1e-5 * max(1, np.abs(other).max()), name


def _in_bfloat16(tokens: Tokens) -> Tokens:
    """Activations are; decays and step sizes never."""
    return tokens._replace(**{name: getattr(tokens, name).astype(jnp.bfloat16) for name in ("q", "k", "v")})


@pytest.mark.slow
def test_bfloat16_rounds_only_what_products_read():
    tokens = _in_bfloat16(_tokens(200, common=0.5, segments=_documents(1, 30, 63, 37, 69), decay=-0.01))
    out, state, gradients = _with_gradients(delta_rule, tokens, None)
    with jax.enable_x64(True):
        expected, last, wanted = jax.tree.map(np.asarray, _with_gradients(_definition, tokens, jnp.float64))
    assert (out.dtype, state.memory.dtype) == (jnp.bfloat16, jnp.float32)
    for one, other in ((out, expected), (state.memory, last), *zip(gradients, wanted, strict=True)):
        assert np.abs(np.asarray(one, np.float64) - other).max() <= 0.02 * np.abs(other).max()


@pytest.mark.slow
def test_a_state_of_bfloat16_values_follows_updates_that_bfloat16_would_lose():
    """With the same key k in all tokens, k S moves to v by the factor (1 - beta) for each."""
    beta, length = 2e-5, 1024
    tokens = _in_bfloat16(_tokens(length, common=1.0, decay=0.0, beta=beta))
    tokens = tokens._replace(v=jnp.full_like(tokens.v, 1.5))
    key = tokens.k[:, 0].astype(jnp.float32)
    memory = jnp.broadcast_to(key[:, :, None, :, None], (2, KEY_HEADS, GROUP, KEY_SIZE, VALUE_SIZE))
    _, state = compiled(tokens, DeltaState(memory, tokens.segments[:, 0]))
    moved = jnp.einsum("bkd,bkrdv->bkrv", key, state.memory - memory)
    np.testing.assert_allclose(moved, 0.5 * (1 - (1 - beta) ** length), rtol=0.02)


@pytest.mark.slow
def test_a_document_depends_on_no_other():
    tokens = _tokens(200, segments=_documents(1, 3, 63, 64, 69), decay=-0.001, beta=1.0)
    changed = tokens._replace(v=tokens.v.at[:, 4:67].add(3.0), g=tokens.g.at[:, 4:67].add(-200.0))
    (out, _), (other, _) = compiled(tokens), compiled(changed)
    assert (out[:, 67:] == other[:, 67:]).all()
    assert (out[:, :4] == other[:, :4]).all()
    for start, stop in ((0, 1), (1, 4), (4, 67), (67, 131), (131, 200)):
        alone, _ = compiled(Tokens(*(a[:, start:stop] for a in tokens)))
        np.testing.assert_allclose(out[:, start:stop], alone, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "cuts",
    one_of([(1, 2, 70), (40, 45, 52, 118), pytest.param((100,)), pytest.param((64, 128))], but=2),
)
def test_a_text_goes_on_from_its_state(cuts):
    """In parts of any length, of one token too; documents and padding cross the cuts."""
    tokens = _tokens(200, segments=_PADDED, decay=-0.01)
    whole, last = compiled(tokens)
    state, outs = None, []
    for start, stop in zip((0, *cuts), (*cuts, 200), strict=True):
        out, state = compiled(Tokens(*(a[:, start:stop] for a in tokens)), state)
        outs.append(out)
    assert state is not None
    np.testing.assert_allclose(jnp.concatenate(outs, axis=1), whole, atol=1e-6)
    np.testing.assert_allclose(state.memory, last.memory, atol=1e-6)
    assert (state.segment == last.segment).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "segments",
    [
        pytest.param(None, id="one"),
        pytest.param(_documents(1, 3, 63, 64, 69), id="several"),
        pytest.param(_PADDED, id="padding"),
    ],
)
def test_parts_of_a_text_are_affine_maps_of_the_state(segments):
    tokens = _tokens(200, segments=segments, decay=-0.001)
    _, last = compiled(tokens)
    first, second = (Tokens(*(a[:, part] for a in tokens)) for part in (slice(0, 90), slice(90, 200)))
    _, middle = compiled(first)
    M, B = jax.jit(transition)(second, middle.segment)
    np.testing.assert_allclose(M @ middle.memory + B, last.memory, atol=1e-6)


@pytest.mark.slow
def test_the_inverse_of_repeated_keys_keeps_its_digits():
    """Powers of the matrix, as a Neumann product takes them, reach 1e10 here."""
    keys = _unit(np.random.default_rng(0).normal(size=(64, 128)) * 0.1 + 1)
    below = np.tril(keys @ keys.T, -1)
    expected = np.linalg.inv(np.eye(64) + below)
    assert np.abs(unit_lower_inverse(jnp.asarray(below, jnp.float32)) - expected).max() < 1e-6


@pytest.mark.slow
def test_many_chunks_run_in_groups(monkeypatch):
    tokens = _tokens(200)

    def value_and_gradient():
        return jax.jit(jax.value_and_grad(lambda tokens: jnp.sum(delta_rule(tokens)[0] ** 2), allow_int=True))(tokens)

    expected = value_and_gradient()
    monkeypatch.setattr("jaxlm.models.mixers.delta_rule._GROUP", 2)
    got = value_and_gradient()
    for one, other in zip(jax.tree.leaves(got)[:-1], jax.tree.leaves(expected)[:-1], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.slow
def test_second_derivatives():
    tokens = _tokens(70)
    loss = lambda rule, v: jnp.sum(rule(tokens._replace(v=v, k=tokens.k * (1 + 0.1 * v[..., 0, :1])))[0] ** 2)  # noqa: E731
    direction = jnp.asarray(np.random.default_rng(3).normal(size=tokens.v.shape), jnp.float32)

    @functools.partial(jax.jit, static_argnums=0)
    def product(rule, v):
        return jax.jvp(jax.grad(lambda v: loss(rule, v)), (v,), (direction,))[1]

    expected = product(_definition, tokens.v)
    with tracing(twice_differentiable=True):
        got = product(delta_rule, tokens.v)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4 * float(jnp.abs(expected).max()))


@pytest.mark.slow
def test_a_state_of_another_document_is_dropped():
    tokens = _tokens(10)
    start = DeltaState(jnp.ones((2, KEY_HEADS, GROUP, KEY_SIZE, VALUE_SIZE)), jnp.asarray([7, 7], jnp.int32))
    assert (compiled(tokens, start)[0] == compiled(tokens)[0]).all()
