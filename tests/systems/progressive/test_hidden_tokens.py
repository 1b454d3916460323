"""The objectives `mlm`, `clm` and `diffusion`: their losses, and what they refuse."""

import dataclasses

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from jaxlm.core.errors import ConfigError
from jaxlm.core.values.batch_types import MaskedBatch
from jaxlm.data.batch import random_tokens
from jaxlm.data.masking import Masker, MaskingConfig, stratified
from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.models.base import Inputs, vocab_axis
from jaxlm.models.diffusion import TimeEmbeddingConfig
from jaxlm.objectives.base import ObjectiveConfig, check_model
from jaxlm.objectives.next_token import NextToken, score_batch
from jaxlm.systems.progressive.losses import Diffusion, MaskedLanguageModeling
from tests.engine.helpers import MODEL, TinyRun, layout, one_device, phase

VOCAB, MASK_ID, LENGTH = 23, 22, 16
CAUSAL = LlamaConfig(seq_len=LENGTH, hidden_dim=16, intermediate_dim=24, num_layers=2, num_heads=2, num_kv_heads=1)
BOTH = dataclasses.replace(CAUSAL, use_bidirectional_attention=True)


@pytest.fixture(scope="module")
def model():
    return with_random_weights(BOTH)


def with_random_weights(config):
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda key: config.build(vocab_axis(VOCAB), key=key), jax.random.key(0))
    return jax.tree.map(lambda s: jnp.asarray(rng.normal(0, 0.4, s.shape), s.dtype), shapes)


def columns_of(rows, vocab=VOCAB, seed=0, **masking):
    """Two documents in each row, and the columns of `MaskedBatch`."""
    columns = random_tokens((rows, LENGTH), vocab - 1, seed)
    columns["segment_ids"] = np.repeat([[1] * 7 + [2] * 6 + [0] * 3], rows, 0).astype(np.int32)
    columns["positions"] = np.repeat([[*range(7), *range(6), 0, 0, 0]], rows, 0).astype(np.int32)
    masker = Masker(MaskingConfig(**masking), vocab - 1, np.arange(vocab) == vocab - 1)
    numbers = np.arange(rows)
    return masker.mask(columns, numbers, np.full(rows, seed), stratified(numbers, (seed,)))


def batch_of(columns):
    axes = (Axis("batch", len(columns["tokens"])), Axis("position", LENGTH))
    return MaskedBatch(**{k: hax.named(jnp.asarray(v), axes[: v.ndim]) for k, v in columns.items()})


def log_probabilities(model, batch, *, without_mask):
    logits = model.logits(model.hidden(Inputs(batch.tokens, batch.positions, batch.segment_ids)).final).array
    logits = np.array(logits, np.float64)
    if without_mask:
        logits[..., MASK_ID] = -np.inf
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return np.take_along_axis(log_p, np.asarray(batch.targets.array)[..., None], -1)[..., 0]


@pytest.mark.slow
def test_mlm_is_the_mean_cross_entropy_of_hidden_tokens(model):
    batch = batch_of(columns_of(6, time_step_mask_fractions=[0.4]))
    terms, metrics, _ = MaskedLanguageModeling().terms(model, batch, None, key=None)
    hidden = np.asarray(batch.loss_mask.array)
    expected = -(hidden * log_probabilities(model, batch, without_mask=False)).sum() / hidden.sum()
    assert float(terms["loss"].mean()) == pytest.approx(expected, rel=1e-5)
    assert float(metrics["hidden_share"].mean()) == pytest.approx(hidden.sum() / (6 * 13))
    assert float(terms["loss"].weight) == float(MaskedLanguageModeling().weights(batch)["loss"]) == hidden.sum()
    for keys in (
        {"min_mask_fraction": 0.4, "max_mask_fraction": 0.4},
        {"min_mask_fraction": 0.3, "max_mask_fraction": 0.5},
    ):
        batch = batch_of(columns_of(6, **keys))
        scores, hidden = score_batch(model, batch), np.asarray(batch.loss_mask.array)
        found = float((scores.nats * scores.mask).array.sum() / scores.mask.array.sum())
        expected = -(hidden * log_probabilities(model, batch, without_mask=False)).sum() / hidden.sum()
        assert found == pytest.approx(expected, rel=1e-5), "an evaluation without a bound takes the mean too"


@pytest.mark.slow
def test_diffusion_is_the_bound_of_the_paper(model):
    """Equation 3 of Nie et al. for the linear schedule, with the mask token left out (substitution parameterization)."""
    columns = columns_of(6, min_mask_fraction=1e-3)
    batch = batch_of(columns)
    terms, metrics, _ = Diffusion().terms(model, batch, None, key=None)
    hidden, fractions = columns["loss_mask"], columns["mask_fractions"]
    nats = -(hidden * log_probabilities(model, batch, without_mask=True)).sum(1)
    expected = ((1 - 1e-3) / fractions * nats).sum() / (6 * 13)
    assert float(terms["loss"].mean()) == pytest.approx(expected, rel=1e-5)
    assert float(metrics["loss"].mean()) == pytest.approx(expected, rel=1e-5)
    scores = score_batch(model, batch)
    assert float((scores.nats * scores.mask).array.sum() / scores.mask.array.sum()) == pytest.approx(expected, rel=1e-5)
    np.testing.assert_array_equal(scores.mask.array, columns["maskable"])
    np.testing.assert_array_equal(scores.inputs.array[:, 1:], columns["targets"][:, :-1])


@pytest.mark.slow
def test_gradients_match_those_of_the_definition(model):
    batch = batch_of(columns_of(4))

    def of_objective(model):
        return Diffusion().terms(model, batch, None, key=None)[0]["loss"].mean()

    def by_definition(model):
        logits = model.logits(model.hidden(Inputs(batch.tokens, batch.positions, batch.segment_ids)).final).array
        log_p = jax.nn.log_softmax(logits.at[..., MASK_ID].set(-jnp.inf))
        picked = jnp.take_along_axis(log_p, batch.targets.array[..., None], -1)[..., 0]
        weights = batch.loss_mask.array * batch.rates.array[:, None]
        return -(weights * picked).sum() / batch.maskable.array.sum()

    ours, theirs = (jax.jit(jax.grad(loss))(model) for loss in (of_objective, by_definition))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6)
    np.testing.assert_array_equal(ours.head.weight.array[MASK_ID], 0)


@pytest.mark.slow
def test_the_bound_of_uniform_predictions_is_the_logarithm_of_the_vocabulary(model):
    """Whatever the schedule: the weights make the expected number of hidden tokens 1."""
    uniform = jax.tree.map(jnp.zeros_like, model)
    bound = jax.jit(lambda model, batch: Diffusion().terms(model, batch, None, key=None)[0])
    for schedule in ("linear", "cosine", "exponential"):
        batch = batch_of(columns_of(4096, mask_schedule_type=schedule, seed=3))
        terms = bound(uniform, batch)
        by_row = np.log(VOCAB - 1) * (batch.loss_mask.array.sum(1) * batch.rates.array) / 13
        error = float(by_row.std()) / 64
        share = 1 - {"linear": 1e-3, "cosine": 1e-3, "exponential": 0.0}[schedule]
        tolerance = 3 * error + 0.01
        assert float(terms["loss"].mean()) == pytest.approx(share * np.log(VOCAB - 1), abs=tolerance), schedule


def test_hidden_tokens_are_not_leaked(model):
    """Another original token in a hidden place changes no logit."""
    columns = columns_of(4, time_step_mask_fractions=[0.5])
    read = jax.jit(lambda b: model.hidden(Inputs(b.tokens, b.positions, b.segment_ids)).final.array)
    before = read(batch_of(columns))
    hidden = columns["loss_mask"] > 0
    others = {**columns, "targets": np.where(hidden, (columns["targets"] + 1) % (VOCAB - 1), columns["targets"])}
    np.testing.assert_array_equal(read(batch_of(others)), before)
    seen = np.where(hidden, columns["tokens"], (columns["tokens"] + 1) % (VOCAB - 1))
    assert not np.array_equal(read(batch_of({**columns, "tokens": seen})), before)


def test_tokens_see_both_sides_of_their_own_document(model):
    columns = columns_of(1, min_mask_fraction=1e-3)
    read = jax.jit(lambda b: model.hidden(Inputs(b.tokens, b.positions, b.segment_ids)).final.array)
    changed = columns["tokens"].copy()
    changed[0, 5] = (changed[0, 5] + 1) % (VOCAB - 1)
    differs = (np.asarray(read(batch_of(columns))) != np.asarray(read(batch_of({**columns, "tokens": changed})))).any(
        -1
    )
    assert differs[0].tolist() == [True] * 7 + [False] * 9


@pytest.mark.soak
def test_the_step_is_the_same_on_one_and_on_eight_devices_and_with_microbatches():
    """The first step of each, so that Adam's first moment compares gradients."""
    config = dataclasses.replace(MODEL, use_bidirectional_attention=True)
    columns = columns_of(16, vocab=64)

    def place(columns, where, num_microbatches):
        axes = (Axis("microbatch", num_microbatches), Axis("batch", 16 // num_microbatches), Axis("position", LENGTH))
        shape = [axis.size for axis in axes]
        return MaskedBatch(
            **{
                k: hax.named(jnp.asarray(v.reshape([*shape[:2], *v.shape[1:]])), axes[: v.ndim + 1])
                for k, v in columns.items()
            }
        )

    results = []
    for where, num_microbatches in ((one_device(), 1), (layout(model=2), 2)):
        run = TinyRun(where, phase(model=config, objective=Diffusion()), model=config, batch=place)
        results.append((run.step(columns, num_microbatches), jax.tree.leaves(run.state.opt_state)))
    (one, state), (eight, sharded) = results
    assert one["train/loss"] == pytest.approx(eight["train/loss"], rel=1e-5)
    assert one["grad/norm/total"] == pytest.approx(eight["grad/norm/total"], rel=1e-5)
    for a, b in zip(state, sharded, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys", [{"dim": 8}, {"type": "learned", "dim": 6, "num_time_steps": 4}], ids=["sines", "learned"]
)
def test_the_time_changes_nothing_before_the_first_step(keys):
    config = dataclasses.replace(BOTH, time_embedding=TimeEmbeddingConfig(**keys))
    config.check()
    plain, timed = (c.build(vocab_axis(VOCAB), key=jax.random.key(0)) for c in (BOTH, config))
    batch = batch_of(columns_of(4))

    @jax.jit
    def logits(model, fraction):
        fractions = hax.named(jnp.full(4, fraction), batch.tokens.axes[:1])
        inputs = Inputs(batch.tokens, batch.positions, batch.segment_ids, mask_fractions=fractions)
        return model.logits(model.hidden(inputs).final).array

    np.testing.assert_allclose(logits(timed, 0.3), logits(plain, 0.3), atol=1e-6)
    np.testing.assert_array_equal(logits(timed, 0.3), logits(timed, 0.9))

    def loss(model):
        return Diffusion().terms(model, batch, None, key=None)[0]["loss"].mean()

    stepped = jax.tree.map(lambda p, g: p - 0.1 * g, timed, jax.jit(jax.grad(loss))(timed))
    assert np.abs(logits(stepped, 0.3) - logits(stepped, 0.9)).max() > 1e-4
    np.testing.assert_array_equal(logits(plain, 0.3), logits(plain, 0.9))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"dim": 7}, "7 given, an even number expected"),
        ({"type": "learned"}, r"type: learned given without num_time_steps\. Set num_time_steps"),
        (
            {"num_time_steps": 4},
            "num_time_steps: 4 given without type: learned, but type is sinusoidal. Remove it, or set type",
        ),
    ],
)
def test_time_embeddings_without_a_meaning_are_refused(keys, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(BOTH, time_embedding=TimeEmbeddingConfig(**keys)).check()
    with pytest.raises(ConfigError, match="no tokens are hidden from a causal model"):
        dataclasses.replace(CAUSAL, time_embedding=TimeEmbeddingConfig()).check()


@pytest.mark.slow
def test_clm_is_next_token_prediction():
    assert ObjectiveConfig.get_choice_class("clm") is NextToken
    model, tokens = with_random_weights(CAUSAL), np.random.default_rng(0).integers(0, VOCAB, (1, LENGTH))
    axes = (Axis("batch", 1), Axis("position", LENGTH))

    def logits(ids):
        named = [hax.named(jnp.asarray(a), axes) for a in (ids, np.arange(LENGTH)[None], np.ones_like(ids))]
        return np.asarray(model.logits(model.hidden(Inputs(*named)).final).array)[0]

    before = logits(tokens)
    for later in (3, LENGTH - 1):
        changed = tokens.copy()
        changed[0, later] = (changed[0, later] + 1) % VOCAB
        np.testing.assert_array_equal(logits(changed)[:later], before[:later])


@pytest.mark.parametrize(
    ("objective", "config", "message"),
    [
        (NextToken(), BOTH, "next_token predicts each token from those before it, but with model.use_bidirectional"),
        (
            MaskedLanguageModeling(),
            CAUSAL,
            "mlm predicts hidden tokens from those on both sides, but tokens of this model",
        ),
        (Diffusion(), CAUSAL, "diffusion predicts hidden tokens from those on both sides.* or objective.type: clm"),
    ],
)
def test_objective_and_attention_must_suit_each_other(objective, config, message):
    with pytest.raises(ConfigError, match=message):
        check_model(objective, config)
    check_model(objective, BOTH if config is CAUSAL else CAUSAL)


def test_scores_refuse_a_model_that_reads_its_targets(model):
    batch = batch_of(columns_of(2))
    with pytest.raises(ConfigError, match=r"Remove data\.masking"):
        score_batch(with_random_weights(CAUSAL), batch)
    from tests.objectives.test_next_token import a_batch

    with pytest.raises(ConfigError, match="means nothing for a model whose tokens attend to later ones"):
        score_batch(model, a_batch())


def test_diffusion_refuses_masks_without_a_bound(model):
    batch = batch_of(columns_of(2, time_step_mask_fractions=[0.15]))
    with pytest.raises(ConfigError, match="is a bound only for masks that hide each token with the same probability"):
        Diffusion().check(batch, model, None)
    narrow = (
        {"min_mask_fraction": 0.5, "max_mask_fraction": 0.5},
        {"max_mask_fraction": 0.85},
        {"min_mask_fraction": 0.1},
    )
    for keys in ({"mode": "fixed_count"}, {"random_fraction": 0.1}, {"num_time_steps": 8}, *narrow):
        assert not MaskingConfig(**keys).has_rates
    assert all(MaskingConfig(mask_schedule_type=kind).has_rates for kind in ("linear", "cosine", "exponential"))
    Diffusion().check(batch_of(columns_of(2)), model, None)
