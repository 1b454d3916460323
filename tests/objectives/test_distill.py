"""The distillation objective: its terms, and what it asks its teacher."""

import functools

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import check_fields
from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.models.base import Inputs, layer_tap, vocab_axis
from jaxlm.objectives.base import ObjectiveConfig
from jaxlm.objectives.distill import Distill
from tests.objectives.test_next_token import CONFIG, a_batch

TEACHER = LlamaConfig(seq_len=20, hidden_dim=24, intermediate_dim=32, num_layers=2, num_heads=3, num_kv_heads=3)


def filled(config, seed):
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda key: config.build(vocab_axis(23), key=key), jax.random.key(0))
    return jax.tree.map(lambda s: jnp.asarray(rng.normal(0, 0.4, s.shape), s.dtype), shapes)


@pytest.fixture(scope="module")
def student():
    return filled(CONFIG, 0)


@pytest.fixture(scope="module")
def refs():
    return {"teacher": filled(TEACHER, 1)}


@functools.partial(jax.jit, static_argnums=0)
def terms_of(objective, model, refs, batch):
    return objective.terms(model, objective.annotate(refs, batch), None, key=None)


@jax.jit
def logits_of(model, batch):
    return model.logits(model.hidden(Inputs(batch.tokens, batch.positions, batch.segment_ids)).final).array


@pytest.mark.slow
def test_terms_and_metrics_match_the_definition(student, refs):
    batch, objective = a_batch(), Distill(temperature=2.0, weight=0.7)
    terms, metrics, slot = terms_of(objective, student, refs, batch)
    ours, theirs, m = logits_of(student, batch), logits_of(refs["teacher"], batch), batch.loss_mask.array
    log_q, log_p = jax.nn.log_softmax(ours / 2), jax.nn.log_softmax(theirs / 2)
    kl = (jnp.exp(log_p) * (log_p - log_q)).sum(-1)
    nll = -jnp.take_along_axis(jax.nn.log_softmax(ours), batch.targets.array[..., None], axis=-1)[..., 0]
    assert slot is None
    np.testing.assert_allclose(terms["loss"].total, (m * (0.3 * nll + 0.7 * 4 * kl)).sum(), rtol=1e-5)
    expected = {
        "loss": nll,
        "divergence": kl,
        "mean_token_accuracy": ours.argmax(-1) == batch.targets.array,
        "agreement": ours.argmax(-1) == theirs.argmax(-1),
    }
    assert set(metrics) == set(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(metrics[name].total, (m * values).sum(), rtol=1e-5)
        np.testing.assert_array_equal(metrics[name].weight, m.sum())
    np.testing.assert_array_equal(objective.weights(batch)["loss"], m.sum())


@pytest.mark.slow
def test_the_teachers_loss_is_one_more_metric_and_changes_no_other(student, refs):
    batch, plain, asking = a_batch(), Distill(temperature=2.0), Distill(temperature=2.0, teacher_loss=True)
    parts = [terms_of(objective, student, refs, batch)[:2] for objective in (plain, asking)]
    theirs, m = logits_of(refs["teacher"], batch), batch.loss_mask.array
    nll = -jnp.take_along_axis(jax.nn.log_softmax(theirs), batch.targets.array[..., None], axis=-1)[..., 0]
    teacher_loss = parts[1][1].pop("teacher_loss")
    np.testing.assert_allclose(teacher_loss.total, (m * nll).sum(), rtol=1e-5)
    np.testing.assert_array_equal(teacher_loss.weight, m.sum())
    jax.tree.map(np.testing.assert_array_equal, *parts)

    gradient = jax.jit(jax.grad(lambda m, of: terms_of(of, m, refs, batch)[0]["loss"].total), static_argnums=1)
    gradients = [gradient(student, objective) for objective in (plain, asking)]
    jax.tree.map(np.testing.assert_array_equal, *gradients)


@pytest.mark.slow
@pytest.mark.parametrize("top_k", [None, 4])
def test_microbatches_add_up_to_the_batch(student, refs, top_k):
    batch, objective = a_batch(), Distill(top_k=top_k, divergence="js")
    is_named = lambda a: isinstance(a, hax.NamedArray)  # noqa: E731
    rows = lambda s: jax.tree.map(lambda a: a["batch", s], batch, is_leaf=is_named)  # noqa: E731
    of = lambda part: terms_of(objective, student, refs, part)[:2]  # noqa: E731
    whole, parts = of(batch), [of(rows(slice(i, i + n))) for i, n in ((0, 1), (1, 3))]
    for group in (0, 1):
        for name, total in whole[group].items():
            added = parts[0][group][name] + parts[1][group][name]
            np.testing.assert_allclose(added.mean(), total.mean(), rtol=1e-5)


def test_an_annotated_batch_needs_no_teacher(refs):
    objective = Distill(top_k=4)
    annotated = objective.annotate(refs, a_batch())
    assert objective.annotate({}, annotated) is annotated
    axes = [axis.name for axis in annotated.annotations.ids.axes]
    assert axes == ["batch", "position", "teacher_top"]


def test_a_teacher_in_bfloat16_computes_in_bfloat16(refs):
    teacher = jax.tree.map(lambda a: a.astype(jnp.bfloat16), refs["teacher"])
    annotate = lambda refs: Distill().annotate(refs, a_batch()).annotations  # noqa: E731
    states = jax.eval_shape(annotate, {"teacher": teacher})
    assert states.hidden.dtype == states.head.dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, "objective.temperature: 0.0 given"),
        ({"temperature": float("nan")}, "objective.temperature: nan given"),
        ({"temperature": float("inf")}, "objective.temperature: inf given"),
        ({"weight": 0.0}, "objective.weight: 0.0 given"),
        ({"weight": 1.5}, "objective.weight: 1.5 given"),
        ({"weight": float("nan")}, "objective.weight: nan given"),
        ({"divergence": "js", "beta": 1.0}, "objective.beta: 1.0 given"),
        ({"beta": 0.3}, "objective.beta: 0.3 given without divergence: js, but divergence is forward_kl"),
        ({"top_k": 0}, "objective.top_k: 0 given"),
        ({"teacher_loss": True, "top_k": 4}, "objective.teacher_loss: true given together with top_k: 4"),
        ({"cache": True}, "objective.cache: true given without top_k"),
    ],
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        check_fields(Distill(**options), "objective")


def test_as_many_top_tokens_as_the_vocabulary_has_are_refused(refs):
    with pytest.raises(ConfigError, match=r"objective.top_k: 23 given, but the vocabulary has 23 tokens"):
        Distill(top_k=23).annotate(refs, a_batch())


def test_is_registered_by_name():
    assert ObjectiveConfig.get_choice_class("distill") is Distill


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "theirs", "pairs"), [(1, 1, {1: 1}), (1, 3, {1: 3}), (2, 3, {1: 2, 2: 3}), (3, 3, {1: 1, 2: 2, 3: 3})]
)
def test_the_hidden_term_compares_layers_at_the_same_fraction_of_the_depth(own, theirs, pairs):
    sizes = {"seq_len": 12, "hidden_dim": 16, "intermediate_dim": 24, "num_heads": 2, "num_kv_heads": 1}
    models = [filled(LlamaConfig(num_layers=n, **sizes), seed) for seed, n in enumerate((own, theirs))]
    batch, objective = a_batch(), Distill(hidden=0.25)
    terms, metrics, _ = terms_of(objective, models[0], {"teacher": models[1]}, batch)
    plain, *_ = terms_of(Distill(), models[0], {"teacher": models[1]}, batch)
    streams = []
    for model in models:
        names = [layer_tap(layer) for layer in range(model.config.num_layers)]
        inputs = Inputs(batch.tokens, batch.positions, batch.segment_ids)
        taps = jax.jit(lambda model, inputs=inputs, names=names: model.hidden(inputs, taps=names).taps)(model)
        streams.append([np.asarray(taps[name].array, np.float64) for name in names])
    distances = []
    for layer, teachers in pairs.items():
        s, t = streams[0][layer - 1], streams[1][teachers - 1]
        distances.append(((s - t) ** 2).sum(-1) / (t**2).sum(-1))
    expected = (np.mean(distances, axis=0) * np.asarray(batch.loss_mask.array)).sum()
    np.testing.assert_allclose(metrics["hidden_distance"].total, expected, rtol=1e-4)
    np.testing.assert_allclose(terms["loss"].total, plain["loss"].total + 0.25 * expected, rtol=1e-4)


@pytest.mark.slow
def test_the_hidden_term_of_a_model_that_equals_its_teacher_is_zero(student):
    objective = Distill(hidden=1.0)
    _, metrics, _ = terms_of(objective, student, {"teacher": student}, a_batch())
    assert float(metrics["hidden_distance"].total) < 1e-9


@pytest.mark.slow
def test_hidden_states_of_another_width_are_refused(student, refs):
    objective = Distill(hidden=1.0)
    with pytest.raises(ConfigError, match="the model's residual stream is 16 wide and the teacher's 24"):
        objective.terms(student, objective.annotate(refs, a_batch()), None, key=None)
    with pytest.raises(ConfigError, match="cache: true given together with hidden: 1"):
        check_fields(Distill(hidden=1.0, cache=True, top_k=4), "objective")
