"""A vocabulary that is padded in the loss, against the same model without padding."""

import contextlib
import dataclasses
import functools

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from jax.sharding import PartitionSpec

from jaxlm.core.mesh import AxisMappings, make_layout, mesh_shape
from jaxlm.core.products.stored_weights import Int8Weight
from jaxlm.core.sharding import Layout
from jaxlm.core.tracing import tracing
from jaxlm.interop.hf.folder import load_model, save_folder
from jaxlm.models.base import vocab_axis
from jaxlm.models.chunked_loss import ChunkLogits
from jaxlm.models.distillation.chunked import (
    ForwardKL,
    JensenShannon,
    ReverseKL,
    TeacherStates,
    distillation_sums,
    top_k_of,
)
from jaxlm.models.inference.generate import generate
from jaxlm.models.loss import token_losses, token_numbers
from tests.engine import helpers
from tests.models.test_loss import closed_form, named, problem, sums_of, value_and_grads

ODD = 23
LOGITS = {"z_loss_weight": 1e-2, "label_smoothing": 0.1, "soft_cap": 0.7, "chunk_tokens": 16}


def odd_layout(model: int, fsdp: tuple[str, ...] = ("embed",), vocab: int = ODD) -> Layout:
    """All devices, `model` of which share the vocabulary."""
    shape = mesh_shape(len(jax.devices()), model=model)
    return make_layout(shape, AxisMappings("batch", fsdp, ("vocab",), {}, {}), helpers.AXES | {"vocab": vocab})


def assert_closed_form(sums, grads, x, w, y, m):
    expected, dx, dw, _ = closed_form(x, w, y, m, 1e-2, 0.1, 0.7)
    got = [sums.total, sums.cross_entropy, sums.z_loss, sums.correct]
    np.testing.assert_allclose(got, expected, rtol=2e-6, atol=1e-6)
    np.testing.assert_allclose(grads[0], dx, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(grads[1], dw, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("multiple", [1, 8, 64])
def test_padding_on_one_device_is_not_in_the_sums_or_gradients(multiple):
    given = problem(2, 19, 16, ODD)
    sums, grads = value_and_grads(*given, **LOGITS, vocab_multiple=multiple)
    assert grads[1].shape == (ODD, 16)
    assert_closed_form(sums, grads, *given)


@pytest.mark.parametrize("model", [8, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fsdp", [("embed",), pytest.param(("vocab",), marks=pytest.mark.slow), ()])
def test_an_odd_vocabulary_on_eight_devices_has_the_sums_and_gradients_of_the_closed_form(model, fsdp):
    given = problem(8, 16, 32, ODD)
    with odd_layout(model, fsdp).use():
        sums, grads = value_and_grads(*given, **LOGITS, vocab_multiple=3)
    assert_closed_form(sums, grads, *given)


def test_a_target_in_the_padding_is_outside_the_vocabulary():
    x, w, y, m = problem(1, 9, 8, 11, mask=1.0)
    y[0, 3] = 12
    assert np.isnan(sums_of(x, w, y, m, vocab_multiple=16).total)


@pytest.mark.slow
def test_second_derivatives_do_not_see_the_padding():
    x, w, y, m = problem(2, 9, 8, ODD)

    def along(multiple):
        gradient = jax.grad(lambda x, w: sums_of(x, w, y, m, **LOGITS, vocab_multiple=multiple).total, (0, 1))
        with tracing(twice_differentiable=True):
            return jax.jvp(gradient, (x, w), (jnp.ones_like(x), jnp.ones_like(w)))

    for padded, plain in zip(jax.tree.leaves(along(32)), jax.tree.leaves(along(1)), strict=True):
        np.testing.assert_allclose(padded, plain, rtol=1e-4, atol=1e-5)


def test_losses_of_tokens_do_not_see_the_padding():
    x, w, y, m = problem(8, 16, 32, ODD)
    *_, expected = closed_form(x, w, y, m, 0.0, 0.0)
    nats = lambda **options: jax.jit(functools.partial(token_losses, **options))  # noqa: E731
    arrays = named(jnp.asarray(x), jnp.asarray(w), jnp.asarray(y))
    np.testing.assert_allclose(nats(vocab_multiple=5)(*arrays).array, expected, rtol=1e-5, atol=1e-6)
    with odd_layout(8).use():
        np.testing.assert_allclose(nats()(*arrays).array, expected, rtol=1e-5)


@pytest.mark.parametrize("sharded", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_entropies_of_tokens_do_not_see_the_padding_in_their_gradients_either(sharded):
    """H = -sum p ln p, whose gradient of a logit is -p (ln p + H), and the collision entropy -ln sum p^2, without one."""
    x, w, y, m = problem(8, 16, 32, ODD)
    logits = x.astype(np.float64) @ w.astype(np.float64).T
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    entropy = -(p * np.log(p)).sum(-1)
    dlogits = -m[..., None] * p * (np.log(p) + entropy[..., None])

    def numbers(of_chunk, x, w):
        return token_numbers(of_chunk, *named(x, w, jnp.asarray(y)), chunk_tokens=16, vocab_multiple=5).array

    def summed(x, w, of_chunk):
        found = numbers(of_chunk, x, w)
        return jnp.sum(found * m), found

    def constant(chunk):
        return chunk.constant().entropy()

    of_hidden_and_head = jax.jit(jax.grad(summed, argnums=(0, 1), has_aux=True), static_argnums=2)
    collision = jax.jit(functools.partial(numbers, ChunkLogits.collision_entropy))
    with odd_layout(8).use() if sharded else contextlib.nullcontext():
        gradients, found = of_hidden_and_head(x, w, ChunkLogits.entropy)
        (no_gradient, _), _ = of_hidden_and_head(x, w, constant)
        np.testing.assert_allclose(collision(x, w), -np.log((p**2).sum(-1)), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found, entropy, rtol=1e-5)
    np.testing.assert_allclose(gradients[0], np.einsum("bsv,vd->bsd", dlogits, w), rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(gradients[1], np.einsum("bsv,bsd->vd", dlogits, x), rtol=2e-5, atol=2e-5)
    assert not np.any(no_gradient)


def test_an_int8_head_is_padded_with_its_scales():
    x, w, y, _ = problem(8, 16, 32, ODD)
    hidden, head, targets = named(jnp.asarray(x), jnp.asarray(w), jnp.asarray(y))
    stored = Int8Weight.of(head, head.resolve_axis("embed"))
    evaluate = lambda **options: jax.jit(lambda h: token_losses(hidden, h, targets, **options).array)(stored)  # noqa: E731
    expected = evaluate()
    np.testing.assert_allclose(evaluate(vocab_multiple=64), expected, rtol=1e-6)
    with odd_layout(8).use():
        np.testing.assert_allclose(evaluate(), expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("divergence", [ForwardKL(), ReverseKL(), JensenShannon(0.5)], ids=str)
@pytest.mark.parametrize("teacher", ["head", "logits", "top k"])
def test_distillation_does_not_see_the_padding(divergence, teacher):
    x, w, y, m = problem(8, 16, 32, ODD)
    tx, tw = (2 * array for array in problem(8, 16, 32, ODD, seed=1)[:2])
    options = {"divergence": divergence, "temperature": 1.5, "weight": 0.6, "chunk_tokens": 16}

    def states():
        hidden, head = named(jnp.asarray(tx), jnp.asarray(tw))
        if teacher == "logits":
            return TeacherStates(hax.dot(hidden, head, axis="embed"), None, None)
        return TeacherStates(hidden, head, None)

    def loss(x, w, multiple):
        said = top_k_of(states(), 4, 1.5) if teacher == "top k" else states()
        sums = distillation_sums(*named(x, w, jnp.asarray(y), jnp.asarray(m)), said, **options, vocab_multiple=multiple)
        return sums.total, sums

    def found(multiple):
        return jax.jit(jax.value_and_grad(lambda x, w: loss(x, w, multiple), (0, 1), has_aux=True))(x, w)

    plain, padded = found(1), found(64)
    with odd_layout(8).use():
        sharded = found(1)
    for others in (padded, sharded):
        for ours, theirs in zip(jax.tree.leaves(others), jax.tree.leaves(plain), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)


def test_stored_arrays_are_sharded_along_another_axis():
    Vocab, Embed = Axis("vocab", ODD), Axis("embed", 32)
    where = odd_layout(2)
    assert where.parameter_sharding((Vocab, Embed)).spec == PartitionSpec(None, ("data", "model"))
    assert where.compute_sharding((Vocab, Embed)).spec == PartitionSpec(None, None)
    assert where.parameter_sharding((Vocab,)).spec == PartitionSpec(None)
    assert odd_layout(2, ("vocab",)).parameter_sharding((Vocab, Embed)).spec == PartitionSpec(None, "data")
    assert odd_layout(2, vocab=24).parameter_sharding((Axis("vocab", 24), Embed)).spec == PartitionSpec("model", "data")


def trained(where: Layout, multiple: int | None = None) -> tuple[list[float], helpers.TinyRun]:
    model = dataclasses.replace(helpers.MODEL, pad_vocab_to_multiple_of=multiple)
    # With a small epsilon, Adam's first steps are about the sign of the gradient, and rounding decides it where it is 0.
    adam = helpers.AdamConfig(learning_rate=1e-2, warmup=0, epsilon=1e-2)
    run = helpers.TinyRun(where, helpers.phase(optimizer=adam), model=model, vocab=ODD)
    columns = {name: array % ODD if array.dtype == np.int32 else array for name, array in helpers.arrays(0).items()}
    return [run.step(columns)["train/loss"] for _ in range(3)], run


@pytest.mark.slow
def test_training_with_an_odd_vocabulary_is_the_training_of_one_device():
    expected, alone = trained(helpers.one_device())
    for others in (trained(helpers.one_device(), 64), trained(odd_layout(8)), trained(odd_layout(2, ("vocab",)))):
        np.testing.assert_allclose(others[0], expected, rtol=1e-5)
        leaves = (jax.tree.leaves(run.state.model) for run in (others[1], alone))
        for ours, theirs in zip(*leaves, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_generation_logits_and_exports_have_the_real_vocabulary(tmp_path, family):
    from tests.models.conftest import TINY

    config = dataclasses.replace(TINY[family], pad_vocab_to_multiple_of=64)
    model = jax.jit(lambda: config.build(vocab_axis(ODD), key=jax.random.key(0)))()
    prompts = [[1, 2, 3], [4, 5]]
    alone = generate(model, prompts, max_new_tokens=8, temperature=1.0, seed=1)
    assert max(map(max, alone)) < ODD
    where = odd_layout(8)
    options = {"dtype": np.dtype("float32"), "files": {}, "special_ids": {}}
    with where.use():
        placed = jax.tree.map(
            lambda leaf: hax.NamedArray(jax.device_put(leaf.array, where.parameter_sharding(leaf.axes)), leaf.axes),
            model,
            is_leaf=lambda leaf: isinstance(leaf, hax.NamedArray),
        )
        assert generate(placed, prompts, max_new_tokens=8, temperature=1.0, seed=1) == alone
        save_folder(tmp_path / "sharded", placed, config, where, **options)
    save_folder(tmp_path / "alone", model, config, helpers.one_device(), **options)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("sharded", "alone")]
    assert files[0] == files[1]
    loaded = load_model(tmp_path / "sharded", jax.eval_shape(lambda: model), config, odd_layout(2))
    for ours, theirs in zip(jax.tree.leaves(loaded), jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(ours, theirs)
