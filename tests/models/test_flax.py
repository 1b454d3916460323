"""The Flax examples, NNX and Linen: trained, sharded, sampled; and errors for unsuitable modules."""

import sys
import types

import equinox as eqx
import flax.linen as nn
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from haliax import Axis

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.models.base import Inputs, vocab_axis
from jaxlm.models.flax.config import FlaxConfig
from jaxlm.models.inference.generate import generate
from jaxlm.models.loss import next_token_sums, token_losses
from jaxlm.models.remat import RematConfig
from tests.engine.helpers import VOCAB, TinyRun, arrays, layout, one_device
from tests.tiers import one_of

LINEN_AXES = {
    r"norm\.scale$": ["embed"],
    r"tokens\.embedding$": ["vocab", "embed"],
    r"(query|key|value)\.kernel$": ["embed", "heads", "head_size"],
    r"out\.kernel$": ["heads", "head_size", "embed"],
    r"up\.kernel$": ["embed", "mlp"],
    r"down\.kernel$": ["mlp", "embed"],
    r"head\.kernel$": ["embed", "vocab"],
}
EXAMPLES = {
    "nnx": FlaxConfig(factory="examples.nnx_model:make", seq_len=16, kwargs={"width": 32, "depth": 1, "dropout": 0.1}),
    "linen": FlaxConfig(
        factory="examples.linen_model:make",
        seq_len=16,
        kwargs={"width": 32, "depth": 1, "dropout": 0.1},
        axes=LINEN_AXES,
    ),
}


def inputs_of(ids):
    axes = (Axis("batch", ids.shape[0]), Axis("position", ids.shape[1]))
    positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    return Inputs(*(hax.named(jnp.asarray(a, jnp.int32), axes) for a in (ids, positions, np.ones(ids.shape))))


@pytest.mark.slow
@pytest.mark.parametrize("kind", one_of(["nnx", "linen"]))
def test_the_examples_train_sharded(kind):
    run = TinyRun(layout(), model=EXAMPLES[kind])
    losses = [run.step(arrays(0))["train/loss"] for _ in range(4)]
    assert losses[-1] < losses[0] - 0.1
    spread = [leaf.array for _, leaf in tree.leaves(run.state.model) if leaf.has_axis("embed")]
    assert len(spread) >= 9
    assert all(array.addressable_shards[0].data.size * 8 == array.size for array in spread)


@pytest.mark.slow
@pytest.mark.parametrize("kind", one_of(EXAMPLES))
def test_the_examples_train_the_same_sharded_or_not_and_can_be_sampled(kind):
    runs = [TinyRun(where, model=EXAMPLES[kind]) for where in (one_device(), layout())]
    losses = [[run.step(arrays(step))["train/loss"] for step in range(4)] for run in runs]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    for (path, alone), (_, sharded) in zip(*(tree.leaves(run.state.model) for run in runs), strict=True):
        np.testing.assert_allclose(sharded.array, alone.array, rtol=0, atol=1e-4, err_msg=path)
    model = jax.tree.map(lambda a: jnp.asarray(np.asarray(a)) * 8, runs[0].state.model)
    prompts, full = [[3], [5, 9, 11, 2]], eqx.filter_jit(lambda ids: model.hidden(inputs_of(ids)).final.array)
    for prompt, new in zip(prompts, generate(model, prompts, max_new_tokens=5, temperature=0.0), strict=True):
        whole = np.zeros((1, 16), np.int32)
        whole[0, : len(prompt) + 5] = [*prompt, *new]
        chosen = np.asarray(full(whole))[0].argmax(-1)
        assert new == chosen[len(prompt) - 1 : len(prompt) + 4].tolist()


@pytest.mark.slow
def test_the_loss_of_logits_equals_that_of_hidden_states_with_an_identity_head():
    rng = np.random.default_rng(0)
    Batch, Pos, Vocab = Axis("batch", 2), Axis("position", 7), vocab_axis(11)
    logits = hax.named(jnp.asarray(rng.normal(size=(2, 7, 11)), jnp.float32), (Batch, Pos, Vocab))
    targets = hax.named(jnp.asarray(rng.integers(0, 11, (2, 7))), (Batch, Pos))
    mask = hax.named(jnp.asarray(rng.random((2, 7)), jnp.float32), (Batch, Pos))
    head = hax.named(jnp.eye(11), (Vocab, Axis("embed", 11)))

    def loss(logits, head):
        x = logits if head is None else logits.rename({"vocab": "embed"})
        return next_token_sums(x, head, targets, mask, z_loss_weight=0.1, label_smoothing=0.1, chunk_tokens=4).total

    (ours, ours_d), (theirs, theirs_d) = (jax.jit(jax.value_and_grad(loss))(logits, h) for h in (None, head))
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    np.testing.assert_allclose(ours_d.array, theirs_d.array, atol=1e-6)
    log_probabilities = jax.nn.log_softmax(logits.array)
    expected = -np.take_along_axis(np.asarray(log_probabilities), np.asarray(targets.array)[..., None], -1)[..., 0]
    np.testing.assert_allclose(token_losses(logits, None, targets).array, expected, rtol=1e-5, atol=1e-6)


def test_flops_are_counted_from_the_matrix_products():
    flops = EXAMPLES["linen"].flops_per_token(VOCAB).palm
    weights = 4 * 32 * 32 + 2 * 32 * 128 + 32 * VOCAB
    assert flops == 6 * weights + 12 * 32 * 16  # attention over the whole sequence


def plan_of(config):
    """The first step of `make_plan` with a model section."""
    config.check()
    return jax.eval_shape(lambda: config.build(vocab_axis(VOCAB), key=jax.random.key(0)))


class WithAverages(nnx.Module):
    """Has running averages, which would not be saved."""

    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(4, rngs=rngs)


@pytest.fixture
def factories(monkeypatch):
    module = types.ModuleType("flax_factories")
    module.averages = lambda rngs: WithAverages(rngs)
    module.narrow = lambda: nn.Embed(8, 5)
    module.wide = lambda vocab_size: nn.Embed(8, vocab_size)
    module.raises = lambda: 1 / 0
    module.text = lambda: nn.Embed(8, "x")
    module.number = lambda: jnp.zeros(3)
    monkeypatch.setitem(sys.modules, "flax_factories", module)


@pytest.mark.parametrize(
    ("factory", "options", "message"),
    [
        ("nowhere.at_all:make", {}, "importing nowhere.at_all failed: ModuleNotFoundError"),
        ("examples.nnx_model:mak", {}, "there is nothing named 'mak' in examples.nnx_model"),
        ("examples.nnx_model", {}, "`package.module:name` expected"),
        ("examples.nnx_model:make", {"kwargs": {"widht": 3}}, "unexpected keyword argument 'widht'.*takes .*width"),
        ("examples.nnx_model:make", {"kwargs": {"vocab_size": 3}}, "vocab_size: given, but its value is derived"),
        ("examples.nnx_model:make", {"scan_layers": True}, "model.scan_layers: true given"),
        ("examples.nnx_model:make", {"attn_backend": "reference"}, "model.attn_backend: reference given"),
        ("examples.nnx_model:make", {"gradient_checkpointing": ["mlp"]}, "Allowed: auto, none, cheap, full"),
        (
            "examples.nnx_model:make",
            {"gradient_checkpointing": RematConfig("mlp")},
            "modules mlp given, but jaxlm does not know",
        ),
        ("flax_factories:averages", {}, r"has the state norm.mean \(BatchStat\), norm.var"),
        (
            "flax_factories:narrow",
            {},
            r"returns float32\[2, 16, 5\] for tokens \[2, 16\]; logits \[2, 16, 64\] expected",
        ),
        ("flax_factories:raises", {}, "ZeroDivisionError"),
        ("flax_factories:text", {}, "flax_factories:text with model.kwargs {} fails on tokens"),
        ("flax_factories:number", {}, "a flax.nnx.Module or a flax.linen.Module expected"),
        (
            "flax_factories:wide",
            {"axes": {"nothing": ["embed"]}},
            "'nothing' matches no parameter. The parameters are: embedding",
        ),
        ("flax_factories:wide", {"axes": {"embedding": ["embed"]}}, "one name or null per dimension expected"),
        ("flax_factories:wide", {"axes": {"embedding": ["embed", "embed"]}}, "which contain a duplicate"),
    ],
)
def test_unsuitable_modules_are_refused_before_training(factories, factory, options, message):
    config = FlaxConfig(factory=factory, seq_len=16, **options)
    with pytest.raises(ConfigError, match=message):
        plan_of(config)


def test_one_name_has_one_size():
    axes = {r"up\.kernel$": ["embed", "mlp"], r"down\.kernel$": ["embed", "mlp"]}
    config = FlaxConfig(factory="examples.linen_model:make", seq_len=16, kwargs={"width": 32}, axes=axes)
    with pytest.raises(ConfigError, match=r"'embed' is .* in .* and .* in"):
        jax.eval_shape(lambda: config.build(vocab_axis(VOCAB), key=jax.random.key(0)))
