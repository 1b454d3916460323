"""The objective `dpo`: its losses against float64 closed forms, its terms against the model's logits, its reference."""

import functools
import json
from dataclasses import replace
from pathlib import Path

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.tree import is_named
from jaxlm.core.values.batch_types import PairBatch
from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.models.base import Inputs, vocab_axis
from jaxlm.objectives.base import ObjectiveConfig
from jaxlm.objectives.completions import ReferenceLogps
from jaxlm.objectives.dpo import Dpo
from jaxlm.objectives.pair_losses import PAIR_LOSSES, PairLogps, PairLossOptions
from jaxlm.plan.load_config import decode_run
from jaxlm.plan.plan import make_plan
from jaxlm.plan.run_config import RunConfig
from jaxlm.reading.decode import decode, encode
from jaxlm.reading.yaml import ConfigSource
from jaxlm.session.references import flops_per_token

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "post_training.json").read_text())["pairs"]
CONFIG = LlamaConfig(seq_len=12, hidden_dim=16, intermediate_dim=24, num_layers=1, num_heads=2, num_kv_heads=1)
NUM_PAIRS, VOCAB = 4, 23


def given(reduction="sum"):
    """The log-likelihoods of the vectors."""
    v = {name: np.array(value, np.float64) for name, value in VECTORS.items() if isinstance(value, list)}
    tokens = {side: v[f"{side}_tokens"] for side in ("chosen", "rejected")}
    by = tokens if reduction == "mean" else dict.fromkeys(tokens, 1)
    numbers = [v[f"{prefix}{side}"] / by[side] for prefix in ("", "reference_") for side in tokens]
    return PairLogps(*map(jnp.float32, (*numbers, *(v[side] / tokens[side] for side in tokens))))


CASES = {
    "sigmoid_beta_0.1": ("sigmoid", {}, "sum"),
    "sigmoid_beta_0.5": ("sigmoid", {"beta": 0.5}, "sum"),
    "conservative_smoothing_0.1": ("sigmoid", {"label_smoothing": 0.1}, "sum"),
    "robust_smoothing_0.1": ("robust", {"label_smoothing": 0.1}, "sum"),
    "sigmoid_mean": ("sigmoid", {}, "mean"),
    "ipo_mean": ("ipo", {}, "mean"),
    "ipo_sum": ("ipo", {}, "sum"),
    "hinge": ("hinge", {}, "sum"),
    "apo_zero": ("apo_zero", {}, "sum"),
    "simpo_beta_2_gamma_1": ("simpo", {"beta": 2.0, "simpo_gamma": 1.0}, "sum"),
    "orpo_odds": ("orpo", {"beta": 1.0}, "sum"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_losses_match_the_vectors(case):
    name, options, reduction = CASES[case]
    losses = PAIR_LOSSES[name](given(reduction), PairLossOptions(**options))
    np.testing.assert_allclose(np.mean(losses, dtype=np.float64), VECTORS[case], rtol=1e-6)


def test_each_pair_has_its_own_loss_and_reward():
    pair = given()
    np.testing.assert_allclose(PAIR_LOSSES["sigmoid"](pair, PairLossOptions()), VECTORS["each_beta_0.1"], rtol=1e-6)
    np.testing.assert_allclose(0.1 * pair.chosen_ratio, VECTORS["rewards_chosen"], rtol=1e-6)
    np.testing.assert_allclose(0.1 * pair.rejected_ratio, VECTORS["rewards_rejected"], rtol=1e-6)
    np.testing.assert_allclose(0.1 * np.mean(pair.margin), VECTORS["margin"], rtol=1e-6)
    assert np.mean(np.asarray(pair.chosen_ratio) > np.asarray(pair.rejected_ratio)) == VECTORS["accuracy"]
    order = np.array([2, 0, 3, 1])
    for name, loss in PAIR_LOSSES.items():
        permuted = loss(PairLogps(*(column[order] for column in pair)), PairLossOptions())
        np.testing.assert_array_equal(permuted, np.asarray(loss(pair, PairLossOptions()))[order], err_msg=name)


@np.errstate(divide="ignore")
def closed_forms(pair, o):
    """Every loss from its definition, in float64; `exo_pair` is infinite without smoothing."""
    c, r, rc, rr, cm, rm = (np.asarray(column, np.float64) for column in pair)
    prob = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    smoothed = lambda x: -(1 - o.label_smoothing) * np.log(prob(x)) - o.label_smoothing * np.log(prob(-x))  # noqa: E731
    x, y, a = o.beta * (c - rc), o.beta * (r - rr), o.alphapo_alpha
    z = o.beta * ((c - rc) - (r - rr))
    wins, loses = -np.log(prob(z)), -np.log(prob(-z))
    odds = lambda mean: np.exp(mean) / (1 - np.exp(mean))  # noqa: E731
    return {
        "sigmoid": smoothed(z),
        "robust": ((1 - o.label_smoothing) * wins - o.label_smoothing * loses) / (1 - 2 * o.label_smoothing),
        "ipo": (z / o.beta - 0.5 / o.beta) ** 2,
        "hinge": np.maximum(0, 1 - z),
        "apo_zero": 1 - prob(o.beta * (c - rc)) + prob(o.beta * (r - rr)),
        "apo_down": prob(o.beta * (c - rc)) + 1 - prob(z),
        "exo_pair": prob(z) * np.log(prob(z) / (1 - o.label_smoothing))
        + prob(-z) * np.log(prob(-z) / o.label_smoothing),
        "nca_pair": -np.log(prob(x)) - (np.log(prob(-x)) + np.log(prob(-y))) / 2,
        "bco_pair": -np.log(prob(x)) - np.log(prob(-y)),
        "sppo_hard": (x / o.beta - 0.5 / o.beta) ** 2 + (y / o.beta + 0.5 / o.beta) ** 2,
        "discopop": (1 - prob(z / o.discopop_tau)) * wins + prob(z / o.discopop_tau) * np.exp(-z),
        "simpo": smoothed(o.beta * (cm - rm) - o.simpo_gamma),
        "alphapo": smoothed(o.beta * (np.exp(-a * rm) - np.exp(-a * cm)) / a - o.simpo_gamma),
        "orpo": -o.beta * np.log(prob(np.log(odds(cm)) - np.log(odds(rm)))),
    }


@pytest.mark.slow
def test_the_losses_match_the_closed_forms_with_finite_gradients():
    rng = np.random.default_rng(0)
    columns = -rng.uniform(0.5, 60, (4, 500))
    # Likelihoods per token from almost 1 to almost 0.
    means = -(10 ** rng.uniform(-4, 1.3, (2, 500)))
    pair = PairLogps(*map(jnp.float32, (*columns, *means)))
    options = PairLossOptions(beta=0.3, label_smoothing=0.2, simpo_gamma=0.7, alphapo_alpha=0.1, discopop_tau=0.5)
    expected = closed_forms(pair, options)
    assert expected.keys() == PAIR_LOSSES.keys()

    @jax.jit
    def losses_and_gradients(pair):
        losses = {name: loss(pair, options) for name, loss in PAIR_LOSSES.items()}
        total = {name: lambda pair, loss=loss: jnp.sum(loss(pair, options)) for name, loss in PAIR_LOSSES.items()}
        return losses, {name: jax.grad(loss)(pair) for name, loss in total.items()}

    for name, loss in losses_and_gradients(pair)[0].items():
        np.testing.assert_allclose(loss, expected[name], rtol=2e-5, atol=1e-6, err_msg=name)
    certain = PairLogps(*(jnp.zeros(1),) * 6)
    for logps in (pair, certain):
        for name, gradient in losses_and_gradients(logps)[1].items():
            assert all(np.isfinite(column).all() for column in gradient), name


def columns_of(rows=NUM_PAIRS, length=12, seed=0, vocab=VOCAB):
    """Pairs with a prompt of three tokens, completions of unequal lengths, and padding; the last row is no pair."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, vocab, (rows, 2, length + 1))
    ids[:, 1, :3] = ids[:, 0, :3]
    end = 4 + np.arange(rows * 2).reshape(rows, 2) % (length - 3)
    at = np.arange(length)
    mask = (at >= 2) & (at + 1 < end[..., None])
    mask[-1] = False
    inside = at < end[..., None]
    columns = {
        "tokens": ids[..., :-1] * inside,
        "targets": ids[..., 1:] * inside,
        "loss_mask": mask.astype(np.float32),
        "segment_ids": inside.astype(np.int32),
        "positions": at * inside,
    }
    return {k: v.astype(np.float32 if k == "loss_mask" else np.int32) for k, v in columns.items()}


def pair_batch(columns):
    rows, two, length = columns["tokens"].shape
    axes = (Axis("batch", rows), Axis("pair", two), Axis("position", length))
    return PairBatch.of(**{name: hax.named(jnp.asarray(column), axes) for name, column in columns.items()})


def random_model(seed):
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda key: CONFIG.build(vocab_axis(VOCAB), key=key), jax.random.key(0))
    return jax.tree.map(lambda s: jnp.asarray(rng.normal(0, 0.3, s.shape), s.dtype), shapes)


@pytest.fixture(scope="module")
def models():
    return random_model(0), random_model(1)


@jax.jit
def logits_of_one(model, tokens, positions, segment_ids):
    """[S, vocab]: the logits of one sequence."""
    axes = (Axis("batch", 1), Axis("position", len(tokens)))
    named = (hax.named(column[None], axes) for column in (tokens, positions, segment_ids))
    return model.logits(model.hidden(Inputs(*named)).final).array[0]


def target_logps(model, columns):
    """[..., S]: the log-likelihood of each target from all logits, one sequence at a time."""
    found = np.zeros(columns["tokens"].shape)
    for row in np.ndindex(found.shape[:-1]):
        inputs = (columns[name][row] for name in ("tokens", "positions", "segment_ids"))
        logits = np.asarray(logits_of_one(model, *inputs), np.float64)
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        found[row] = log_p[np.arange(len(logits)), columns["targets"][row]]
    return found


def logps_of(model, columns):
    """[pairs, 2]: the log-likelihoods of the completions."""
    return (target_logps(model, columns) * columns["loss_mask"]).sum(-1)


def terms_of(objective, model, slot, batch):
    """Terms and metrics as in a step, with the reference in the objective's state."""
    batch = objective.annotate({}, batch, slot, model)
    return objective.terms(model, batch, slot, key=None)[:2]


def measured(objective, model, reference, batch):
    terms, metrics = jax.jit(functools.partial(terms_of, objective))(model, objective.init_slot(reference), batch)
    weights = objective.weights(batch)
    return {name: float(t.total / weights[name]) for name, t in terms.items()}, {
        k: float(m.mean()) for k, m in metrics.items()
    }


@pytest.mark.slow
def test_terms_and_metrics_match_the_logits(models):
    model, reference = models
    columns = columns_of()
    policy, frozen = (logps_of(m, columns)[:-1] for m in models)
    num_tokens = columns["loss_mask"].sum(-1)[:-1]
    ours = PairLogps(*policy.T, *frozen.T, *(policy / num_tokens).T)
    objective = Dpo(loss_type={"sigmoid": 0.75, "hinge": 2.0}, beta=0.2, sft_weight=0.5, label_smoothing=0.1)
    terms, metrics = measured(objective, model, reference, pair_batch(columns))
    options = PairLossOptions(0.2, 0.1)
    losses = closed_forms(ours, options)
    nll = -policy[:, 0].sum() / num_tokens[:, 0].sum()
    rewards = 0.2 * (policy - frozen)
    assert terms == pytest.approx(
        {"loss": (0.75 * losses["sigmoid"] + 2 * losses["hinge"]).mean(), "sft": 0.5 * nll}, rel=1e-5
    )
    assert metrics == pytest.approx(
        {
            "loss": terms["loss"],
            "rewards/chosen": rewards[:, 0].mean(),
            "rewards/rejected": rewards[:, 1].mean(),
            "rewards/accuracies": (rewards[:, 0] > rewards[:, 1]).mean(),
            "rewards/margins": (rewards[:, 0] - rewards[:, 1]).mean(),
            "logps/chosen": policy[:, 0].mean(),
            "logps/rejected": policy[:, 1].mean(),
            "nll_loss": nll,
        },
        rel=1e-4,
        abs=1e-6,
    )
    averaged, _ = measured(Dpo(reduction="mean"), model, reference, pair_batch(columns))
    means = PairLogps(*(policy / num_tokens).T, *(frozen / num_tokens).T, *(policy / num_tokens).T)
    assert averaged["loss"] == pytest.approx(closed_forms(means, PairLossOptions())["sigmoid"].mean(), rel=1e-5)
    orpo, of_orpo = measured(Dpo(loss_type="orpo"), model, None, pair_batch(columns))
    assert orpo == pytest.approx({"loss": closed_forms(ours, PairLossOptions())["orpo"].mean(), "sft": nll}, rel=1e-5)
    assert of_orpo["rewards/chosen"] == pytest.approx(0.1 * (policy / num_tokens)[:, 0].mean(), rel=1e-5)
    free, _ = measured(Dpo(reference="none"), model, None, pair_batch(columns))
    without = PairLogps(*policy.T, *np.zeros((2, 3)), *(policy / num_tokens).T)
    assert free["loss"] == pytest.approx(closed_forms(without, PairLossOptions())["sigmoid"].mean(), rel=1e-5)


@pytest.mark.slow
def test_a_model_that_is_its_own_reference_has_a_loss_of_ln_2_and_prefers_nothing(models):
    model, _ = models
    terms, metrics = measured(Dpo(), model, model, pair_batch(columns_of()))
    assert terms["loss"] == np.float32(np.log(2))
    assert metrics["rewards/accuracies"] == metrics["rewards/margins"] == 0


@pytest.mark.slow
def test_only_the_model_that_trains_has_a_gradient_and_a_small_step_widens_the_margin(models):
    model, _ = models
    columns = columns_of(rows=2)  # the second row is no pair
    objective, batch = Dpo(), pair_batch(columns)
    slot, measure = objective.init_slot(model), jax.jit(functools.partial(terms_of, objective))
    gradient = jax.jit(jax.grad(lambda m: measure(m, slot, batch)[0]["loss"].total))(model)
    moved = jax.jit(lambda model: jax.tree.map(lambda w, g: w - 1e-3 * g, model, gradient))(model)
    (terms, after), (_, before) = (measure(m, slot, batch) for m in (moved, model))
    assert after["rewards/margins"].total > before["rewards/margins"].total == 0
    # A prompt's own likelihoods are not in the loss: other targets there change nothing.
    columns["targets"][:, :, :2] = 5
    assert measure(moved, slot, pair_batch(columns))[0]["loss"].total == terms["loss"].total


@pytest.mark.slow
def test_frozen_leaves_are_the_reference_s_too_and_syncs_move_the_others(models):
    model, other = models
    nothing = Dpo().init_slot(jax.tree.map(lambda _: None, model, is_leaf=is_named))
    held = nothing.model(other)
    assert jax.tree.all(jax.tree.map(lambda a, b: a is b, held, other))
    objective, slot = Dpo(sync_interval=3, sync_mixup=0.6), Dpo().init_slot(model)
    for updates in (1, 2, 3, 4):
        slot = objective.update_slot(slot, other, jnp.int32(updates))
        share = 0.6 if updates >= 3 else 0.0
        for ours, old, new in zip(*map(jax.tree.leaves, (slot.weights, model, other)), strict=True):
            np.testing.assert_allclose(ours, (1 - share) * old + share * new, rtol=1e-5, atol=1e-6)
    replaced = Dpo(sync_interval=2).update_slot(slot, other, jnp.int32(4))
    for ours, new in zip(jax.tree.leaves(replaced.weights), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(ours, new)
    assert Dpo().update_slot(slot, other, jnp.int32(200)).weights is slot.weights


def test_small_steps_of_a_reference_arrive_in_a_bfloat16_computation(models):
    """1000 steps of 1e-3 from one model to another: 1 - 0.999 ** 1000 of the way. In bfloat16, most would be lost."""
    first, target = (jax.tree.map(lambda array: array.astype(jnp.bfloat16), model) for model in models)
    objective = Dpo(sync_interval=1, sync_mixup=1e-3)

    @jax.jit
    def followed(slot):
        step = lambda number, slot: objective.update_slot(slot, target, number)  # noqa: E731
        return jax.lax.fori_loop(1, 1001, step, slot)

    slot = followed(objective.init_slot(first))
    share = 1 - 0.999**1000
    for held, old, new in zip(*map(jax.tree.leaves, (slot.weights, first, target)), strict=True):
        assert held.dtype == jnp.float32
        old, new = np.asarray(old, np.float64), np.asarray(new, np.float64)
        np.testing.assert_allclose(held, (1 - share) * old + share * new, rtol=1e-4, atol=1e-6)
    asked = slot.model(first)
    assert {leaf.dtype for leaf in jax.tree.leaves(asked)} == {jnp.dtype(jnp.bfloat16)}
    assert {leaf.dtype for leaf in jax.tree.leaves(Dpo(sync_interval=1).init_slot(first))} == {jnp.dtype(jnp.bfloat16)}


def test_with_lora_only_the_adapters_are_held_in_the_dtype_of_the_computation():
    sizes = {
        "seq_len": 16,
        "hidden_dim": 32,
        "intermediate_dim": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 4,
    }
    lora = {"name": "p", "surgery": [{"type": "lora", "target": "attn", "rank": 2}], "trainable": [r"\.[ab]$"]}
    config = {
        "model": sizes,
        "data": {"type": "pairs"},
        "objective": {"type": "dpo"},
        "phases": [lora],
        "trainer": {"id": "x", "train_batch_size": 8, "mp": "p=f32,c=bfloat16"},
    }
    plan = make_plan(decode_run(ConfigSource(config), None), "x", 64)
    state = plan.state_builder.abstract_state(plan.phases[0])
    held = dict(tree.leaves(state.slots["objective"].weights))
    assert {path: (leaf.axes, leaf.dtype) for path, leaf in held.items()} == {
        path: (leaf.axes, jnp.bfloat16) for path, leaf in tree.leaves(state.model) if path.endswith((".a", ".b"))
    }
    alone = plan.config.model.flops_per_token(64).causal
    frozen = 2 * (4 * 32 * 32 + 3 * 32 * 48) + 32 * 64  # weights of matrix products, which have no gradients
    assert flops_per_token(plan, plan.phases[0]).causal == pytest.approx(alone * 4 / 3 - 2 * frozen)
    refs = {"base": {"type": "hf", "path": "x"}}
    cached = {"objective": {"type": "dpo", "reference": "base", "cache": True}, "evals": [{"type": "objective"}]}
    source = ConfigSource({**config, "refs": refs, **cached})
    with pytest.raises(ConfigError, match=r"the evaluation 'objective' asks the references about the validation data"):
        make_plan(decode_run(source, None), "x", 64)


def test_losses_that_compare_pairs_refuse_microbatches():
    sizes = {
        "seq_len": 16,
        "hidden_dim": 32,
        "intermediate_dim": 48,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 2,
    }
    trainer = {"id": "x", "train_batch_size": 16, "per_device_parallelism": 1}
    config = {"model": sizes, "data": {"type": "pairs"}, "trainer": trainer}

    def plan(**objective):
        return make_plan(decode_run(ConfigSource({**config, "objective": {"type": "dpo", **objective}}), None), "x", 64)

    plan()
    with pytest.raises(ConfigError, match=r"the loss compares all examples of a batch .* a batch of 16 is split into"):
        plan(loss_type={"aot": 1.0, "sigmoid": 0.5})


def test_answers_from_the_disk_are_not_asked_again(models):
    model, _ = models
    batch = pair_batch(columns_of())
    axes = (batch.pairs.tokens.resolve_axis("batch"), batch.pairs.tokens.resolve_axis("pair"))
    asked = replace(batch, annotations=ReferenceLogps(hax.zeros(axes)))
    objective = Dpo(reference="base", cache=True)
    assert objective.annotate({}, asked) is asked
    assert objective.facts.annotation_key
    assert objective.facts.references == ("base",)
    assert objective.init_slot(model) is None
    assert Dpo().facts.references == Dpo(loss_type="simpo").facts.references == ()
    assert not Dpo(loss_type="simpo").facts.holds_reference


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": {"sigmod": 1.0}}, r"objective\.loss_type: 'sigmod' given, expected some of: sigmoid, robust"),
        ({"loss_type": {}}, r"objective\.loss_type: an empty mapping given"),
        ({"loss_type": {"ipo": 0.0}}, r"objective\.loss_type\.ipo: 0\.0 given, a finite number above 0 expected"),
        ({"loss_type": "ppo"}, r"objective\.loss_type: 'ppo' given, 'sigmoid' or .* expected"),
        ({"label_smoothing": 0.5}, r"objective\.label_smoothing: 0\.5 given"),
        (
            {"label_smoothing": 0.1, "loss_type": "ipo"},
            r"label_smoothing: 0\.1 given, which has no effect with .*: ipo",
        ),
        (
            {"loss_type": "exo_pair"},
            r"objective\.label_smoothing: 0 is the default, but exo_pair compares with a preference that is",
        ),
        ({"discopop_tau": 1.0}, r"objective\.discopop_tau: 1\.0 given, which has no effect with loss_type: sigmoid"),
        (
            {"alphapo_alpha": 1.0, "loss_type": "simpo"},
            r"alphapo_alpha: 1\.0 given, which has no effect with .*: simpo",
        ),
        ({"simpo_gamma": 1.0}, r"objective\.simpo_gamma: 1\.0 given, which has no effect with loss_type: sigmoid"),
        ({"reduction": "mean", "loss_type": "orpo"}, r"objective\.reduction: mean given, which has no effect"),
        (
            {"reference": "base", "loss_type": "simpo"},
            r"objective\.reference: 'base' given, but the loss needs none",
        ),
        (
            {"ld_alpha": 0.5, "loss_type": "simpo"},
            r"objective\.ld_alpha: 0\.5 given, which has no effect with .*: simpo",
        ),
        (
            {"f_divergence": "js_divergence", "loss_type": "apo_zero"},
            r"objective\.f_divergence: js_divergence given, but loss_type: apo_zero is not defined for it",
        ),
        ({"f_divergence_alpha": 0.3}, r"f_divergence_alpha: 0\.3 given without f_divergence: alpha_divergence"),
        (
            {"f_divergence": "forward_kl", "reference": "none"},
            r"f_divergence: forward_kl given together with reference: none",
        ),
        ({"wpo": True, "loss_type": "aot"}, r"objective\.wpo: true given, but aot and aot_unpaired compare"),
        ({"cache": True}, r"objective\.cache: true given without reference, but only a model of the section refs"),
        (
            {"cache": True, "reference": "initial"},
            r"cache: true given together with reference: initial, but only",
        ),
        ({"sync_interval": 5, "reference": "base"}, r"objective\.sync_interval: 5 given with reference: base"),
        ({"sync_mixup": 0.5}, r"objective\.sync_mixup: 0\.5 given without sync_interval"),
    ],
)
def test_options_without_an_effect_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        decode(RunConfig, ConfigSource({"objective": {"type": "dpo", **options}}))


def test_is_registered_and_encoded():
    assert ObjectiveConfig.get_choice_class("dpo") is Dpo
    written = encode(Dpo(loss_type={"sigmoid": 1.0, "orpo": 0.5}))
    assert decode(RunConfig, ConfigSource({"objective": written})).objective == Dpo(
        loss_type={"sigmoid": 1.0, "orpo": 0.5}
    )
