"""NEFTune: the size of its noise, where it is, and that it does not depend on how a batch is split."""

import dataclasses

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from jaxlm.core.errors import ConfigError
from jaxlm.core.values.batch_types import PairBatch, TokenBatch
from jaxlm.interop.hf.families.gpt2 import Gpt2Config
from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.models.base import EmbeddingNoise, Inputs, vocab_axis, with_traits
from jaxlm.models.layers import Embedding, token_embeddings
from jaxlm.objectives.next_token import NextToken
from tests.engine.helpers import TinyRun, arrays, layout, one_device, phase

ALPHA = 5.0
ROWS, LENGTH, WIDTH, VOCAB = 6, 200, 48, 11
LENGTHS = (120, 50, 30)  # two documents and padding


def a_batch(rows: int = ROWS, microbatches: int = 1) -> TokenBatch:
    axes = (Axis("microbatch", microbatches), Axis("batch", rows // microbatches), Axis("position", LENGTH))
    shape = [axis.size for axis in axes]
    segments = np.repeat([1, 2, 0], LENGTHS)
    columns = {
        "tokens": np.arange(rows * LENGTH) % VOCAB,
        "targets": np.arange(rows * LENGTH) % VOCAB,
        "loss_mask": np.ones(rows * LENGTH),
        "segment_ids": np.tile(segments, rows),
        "positions": np.tile(np.arange(LENGTH), rows),
    }
    return TokenBatch(**{name: hax.named(jnp.asarray(c.reshape(shape)), axes) for name, c in columns.items()})


def noise_of(batch: TokenBatch) -> np.ndarray:
    """[batch, position, embed] of the first microbatch."""
    first = jax.tree.map(lambda c: c["microbatch", 0], batch, is_leaf=lambda leaf: isinstance(leaf, hax.NamedArray))
    table = Embedding.init(Axis("vocab", VOCAB), Axis("embed", WIDTH), std=1.0, key=jax.random.key(1))
    inputs = Inputs(first.tokens, first.positions, first.segment_ids)
    noisy = token_embeddings(table, dataclasses.replace(inputs, noise=EmbeddingNoise(first.row_keys, ALPHA)))
    return np.asarray((noisy - token_embeddings(table, inputs)).array, np.float64)


@pytest.fixture(scope="module")
def noise() -> np.ndarray:
    return noise_of(NextToken(neftune_alpha=ALPHA).prepare_batch(a_batch(), jax.random.key(0)))


@pytest.mark.slow
def test_the_noise_is_uniform_with_the_bound_of_the_paper_for_each_document(noise):
    first, second, padding = np.split(noise, np.cumsum(LENGTHS)[:2], axis=1)
    assert (padding == 0).all()
    for part, length in ((first, LENGTHS[0]), (second, LENGTHS[1])):
        bound = ALPHA / np.sqrt(length * WIDTH)
        assert 0.999 * bound < np.abs(part).max() <= bound * (1 + 1e-4)
        num = part.size  # at least 14,400; four standard errors
        assert abs(part.mean()) < 4 * bound / np.sqrt(3 * num)
        assert part.std() == pytest.approx(bound / np.sqrt(3), rel=4 / np.sqrt(5 * num / 4))
        histogram = np.histogram(part / bound, 10, (-1, 1))[0] / num
        np.testing.assert_allclose(histogram, 0.1, atol=0.015)


@pytest.mark.slow
def test_every_row_and_step_has_noise_of_its_own_and_no_split_changes_it(noise):
    assert len({row.tobytes() for row in noise}) == ROWS
    objective, key = NextToken(neftune_alpha=ALPHA), jax.random.key(0)
    np.testing.assert_array_equal(noise_of(objective.prepare_batch(a_batch(), key)), noise)
    assert not np.array_equal(noise_of(objective.prepare_batch(a_batch(), jax.random.key(1))), noise)
    whole, cut = (objective.prepare_batch(a_batch(ROWS, n), key).row_keys for n in (1, 3))
    np.testing.assert_array_equal(whole.array.reshape(ROWS, 2), cut.array.reshape(ROWS, 2))
    np.testing.assert_array_equal(noise_of(objective.prepare_batch(a_batch(ROWS, 3), key)), noise[: ROWS // 3])


def test_both_halves_of_a_pair_have_keys():
    axes = (Axis("microbatch", 2), Axis("batch", 3), Axis("pair", 2), Axis("position", 4))
    column = hax.zeros(axes, jnp.int32)
    pairs = PairBatch(TokenBatch(column, column, column, column, column))
    chosen = NextToken(neftune_alpha=ALPHA).prepare_batch(pairs, jax.random.key(0)).supervised()
    assert chosen.row_keys is not None
    assert {axis.name: axis.size for axis in chosen.row_keys.axes} == {"microbatch": 2, "batch": 3, "key_word": 2}
    assert NextToken().prepare_batch(pairs, jax.random.key(0)) is pairs


SIZES = {"seq_len": 8, "hidden_dim": 32, "num_layers": 2, "num_heads": 2}
FAMILIES = [LlamaConfig(intermediate_dim=16, num_kv_heads=2, **SIZES), Gpt2Config(**SIZES)]


@pytest.mark.parametrize("config", FAMILIES, ids=lambda config: type(config).__name__)
def test_only_training_has_noise_and_a_model_that_cannot_add_it_is_refused(config):
    check_noise(config)


def check_noise(config):
    model = jax.eval_shape(lambda: config.build(vocab_axis(VOCAB), key=jax.random.key(0)))
    axes = (Axis("batch", 2), config.Pos)
    batch = TokenBatch(*(hax.zeros(axes, jnp.int32) for _ in range(5)))

    def draws(objective, batch, model=model) -> bool:
        terms = lambda m, b: objective.terms(m, b, None, key=None)[0]["loss"].total  # noqa: E731
        return "random_bits" in str(jax.make_jaxpr(terms)(model, batch))

    noisy = NextToken(neftune_alpha=ALPHA)
    keyed = noisy.prepare_batch(batch, jax.random.key(0))
    assert draws(noisy, keyed)
    assert not draws(noisy, batch), "evaluations have no keys of rows"
    assert not draws(NextToken(), keyed)
    with pytest.raises(
        ConfigError, match=rf"neftune_alpha: 5\.0 given, but this model \({type(model).__name__}\) does not"
    ):
        draws(noisy, keyed, with_traits(model, adds_noise=False))


@pytest.mark.soak
def test_devices_and_microbatches_train_with_the_same_noise():
    noisy = phase(objective=NextToken(neftune_alpha=ALPHA))
    one, eight = TinyRun(one_device(), noisy), TinyRun(layout(), noisy)
    for seed in range(3):
        expected = one.step(arrays(seed))["train/loss"]
        assert eight.step(arrays(seed), num_microbatches=2)["train/loss"] == pytest.approx(expected, rel=1e-5)
