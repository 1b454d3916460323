"""Evaluations that compare a model with a reference: what they measure, against closed forms, and their limits."""

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.values.sums import TokenScores
from jaxlm.evals.base import EvalConfig, EvalContext, GateError, Limit, Limits, ValidationSet
from jaxlm.evals.compare import CompareEvalConfig, FidelityEvalConfig, L1Limits
from jaxlm.evals.loss import perplexity
from jaxlm.interop.hf.families.gpt2 import Gpt2Config
from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.models.base import EMBEDDING, Hidden, Inputs, LanguageModel, ModelConfig, layer_tap, vocab_axis
from jaxlm.models.distillation.layerwise import layer_streams
from jaxlm.objectives.next_token import score_batch
from jaxlm.observe.hooks import EvalHook, Generated, ScheduledEval
from jaxlm.reading.decode import decode
from jaxlm.reading.yaml import ConfigSource
from tests.engine.helpers import F32, MODEL, VOCAB, arrays, layout, one_device
from tests.engine.helpers import batch as training_batch
from tests.small_runs import MODELS
from tests.tiers import one_of

WHERE = {"fsdp 8": layout, "one device": one_device}
MESHES = one_of(WHERE)


def built(seed: int, where: Any, config: Any = MODEL, vocab: int = VOCAB) -> Any:
    model = jax.jit(lambda: config.build(vocab_axis(vocab), key=jax.random.key(seed)))()
    model = jax.tree.map(lambda x: x * 3 if eqx.is_inexact_array(x) else x, model)  # unlike a new model, not uniform
    return tree.map_leaves(lambda _, leaf: put(leaf, where), model)


def put(leaf: Any, where: Any) -> Any:
    return hax.NamedArray(jax.device_put(leaf.array, where.parameter_sharding(leaf.axes)), leaf.axes)


def validation_batches(where: Any, num: int = 2) -> list[Any]:
    """Batches with padding at the end of some rows."""
    batches = []
    for seed in range(num):
        columns = arrays(seed)
        padded = np.arange(16)[None] >= 16 - np.arange(16)[:, None] // 2
        columns["segment_ids"] = np.where(padded, 0, 1).astype(np.int32)
        columns["loss_mask"] = np.where(padded, 0, columns["loss_mask"])
        batch = training_batch(columns, where)
        batches.append(jax.tree.map(lambda column: column["microbatch", 0], batch, is_leaf=tree.is_named))
    return batches


def context(where: Any, reference: Any, batches: Any = None, tokenizer: Any = None, log: Any = print) -> EvalContext:
    batches = validation_batches(where) if batches is None else batches
    sets = (ValidationSet("", (), lambda: iter(batches)),) if batches else ()
    return EvalContext(
        where, F32, tokenizer, None, sets, log, 16, score_batch, reference=lambda name: {"teacher": reference}[name]
    )


@jax.jit
def logits_by_name(model: Any, inputs: Inputs) -> Any:
    return model.logits(model.hidden(inputs).final).rearrange(("batch", "position", "vocab"))


def logits_of(model: Any, batch: Any) -> np.ndarray:
    inputs = Inputs(batch.tokens, batch.positions, batch.segment_ids)
    return np.asarray(logits_by_name(model, inputs).array, np.float64)


@pytest.mark.slow
@pytest.mark.parametrize("where", MESHES)
def test_fidelity_is_the_difference_of_mean_losses(where):
    where = WHERE[where]()
    with where.use():
        model, reference = built(0, where), built(1, where)
        fidelity = FidelityEvalConfig().open(context(where, reference))
        found, of_itself = fidelity.run(model), fidelity.run(reference)
        losses = []
        for one in (model, reference):
            nats = weight = 0.0
            for batch in validation_batches(where):
                logits = logits_of(one, batch)
                log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
                targets, mask = np.asarray(batch.targets.array), np.asarray(batch.loss_mask.array)
                nats -= (mask * np.take_along_axis(log_probs, targets[..., None], -1)[..., 0]).sum()
                weight += mask.sum()
            losses.append(nats / weight)
    assert found == pytest.approx(
        {
            "fidelity/nll": losses[0],
            "fidelity/reference_nll": losses[1],
            "fidelity/delta_nll": losses[0] - losses[1],
            "fidelity/ppl_ratio": math.exp(losses[0] - losses[1]),
        },
        rel=1e-4,
    )
    assert (of_itself["fidelity/delta_nll"], of_itself["fidelity/ppl_ratio"]) == (0.0, 1.0)


def test_masked_targets_may_have_any_loss():
    axes = (hax.Axis("batch", 1), hax.Axis("position", 4))
    make = lambda *values: hax.named(jnp.asarray([values], jnp.float32), axes)  # noqa: E731
    none = hax.zeros(axes, jnp.int32)
    nats = make(1.5, math.inf, math.nan, 2.0).rearrange(("position", "batch"))
    assert TokenScores(nats, make(1, 0, 0, 0.5), none, none).sums().tolist() == [2.5, 1.5]


def test_a_perplexity_beyond_floats_is_infinite():
    assert perplexity(math.log(7.0)) == pytest.approx(7.0)
    assert perplexity(709.0) == pytest.approx(8.218407e307)
    assert perplexity(710.0) == math.inf
    assert math.isnan(perplexity(math.nan))


class Shifted(LanguageModel):
    """Another model's logits plus a constant."""

    base: Any
    shift: float = eqx.field(static=True)

    @property
    def Vocab(self):
        return self.base.Vocab

    @property
    def Pos(self):
        return self.base.Pos

    def hidden(self, inputs, *, cache=None, taps=(), key=None):
        hidden = self.base.hidden(inputs)
        return Hidden(self.base.logits(hidden.final) + self.shift)

    def lm_head(self):
        return None

    def init_cache(self, Batch, capacity, dtype):
        raise NotImplementedError


@pytest.mark.slow
@pytest.mark.parametrize("where", MESHES)
def test_a_constant_offset_of_the_logits_is_their_difference(where):
    where = WHERE[where]()
    with where.use():
        model = built(0, where)
        compare = CompareEvalConfig(attention=None).open(context(where, model))
        found = compare.run(Shifted(model, 0.25))
        sizes = [
            np.abs(logits_of(model, batch))[np.asarray(batch.segment_ids.array) != 0]
            for batch in validation_batches(where)
        ]
    assert found.keys() == {f"compare/logits/{name}" for name in ("mean_l1", "max_l1", "max_abs", "relative")}
    for name in ("mean_l1", "max_l1", "max_abs"):
        assert found[f"compare/logits/{name}"] == pytest.approx(0.25, abs=1e-6)
    assert found["compare/logits/relative"] == pytest.approx(0.25 / np.concatenate(sizes).mean(), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("where", MESHES)
def test_a_model_equals_itself_in_every_layer(where):
    where = WHERE[where]()
    with where.use():
        model = built(0, where)
        found = CompareEvalConfig().open(context(where, model)).run(model)
    assert set(found.values()) == {0.0}
    layers = {f"compare/attention/layer_{layer}/{name}" for layer in range(2) for name in ("l1", "relative")}
    assert layers < found.keys()


def test_layers_without_attention_are_not_compared_and_the_error_names_the_key():
    config = decode(ModelConfig, ConfigSource(MODELS["qwen3_5"]))
    model = jax.eval_shape(lambda: config.build(vocab_axis(VOCAB), key=jax.random.key(0)))
    with pytest.raises(ConfigError, match=r"compare: attention: a layer .* has 0 attention modules.* Set it to null$"):
        CompareEvalConfig().check_model(model, {"teacher": model})
    CompareEvalConfig(attention=None).check_model(model, {"teacher": model})


@jax.jit
def attention_outputs(model: Any, inputs: Inputs) -> list[Any]:
    """The output of each layer's attention, {batch, position, embed}."""
    outputs = layer_streams(model, inputs, "attention").targets
    return [outputs["layers", layer] for layer in range(outputs.axis_size("layers"))]


def without_mlps(model: Any) -> Any:
    """The model whose layers add nothing but their attention to the residual stream."""
    return tree.map_leaves(lambda path, leaf: leaf * 0 if "down_proj" in path or "mlp.out" in path else leaf, model)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [MODEL, LlamaConfig(seq_len=16, hidden_dim=32, intermediate_dim=64, num_layers=2, num_heads=4, scan_layers=False)],
)
def test_attention_outputs_are_what_layers_without_an_mlp_add(config):
    where = one_device()
    with where.use():
        model = without_mlps(built(0, where, config))
        batch = validation_batches(where, 1)[0]
        inputs = Inputs(batch.tokens, batch.positions, batch.segment_ids)
        names = (EMBEDDING, *map(layer_tap, range(config.num_layers)))
        taps = jax.jit(lambda model, inputs: model.hidden(inputs, taps=names).taps)(model, inputs)
        streams = [taps[name] for name in names]
        outputs = attention_outputs(model, inputs)
    assert len(outputs) == config.num_layers
    for before, after, output in zip(streams, streams[1:], outputs, strict=False):
        assert float(abs(output).max().array) > 0.01
        np.testing.assert_allclose(
            output.array, (after - before).rearrange(output.axes).array, atol=1e-5 * float(abs(after).max().array)
        )


@pytest.mark.slow
def test_differences_of_attention_are_means_over_tokens_by_layer():
    where = one_device()
    with where.use():
        model, reference = built(0, where), built(1, where)
        found = CompareEvalConfig(logits=None, name="after").open(context(where, reference)).run(model)
        means = []
        for batch in validation_batches(where):
            inputs, kept = (
                Inputs(batch.tokens, batch.positions, batch.segment_ids),
                np.asarray(batch.segment_ids.array) != 0,
            )
            pairs = zip(*(attention_outputs(one, inputs) for one in (model, reference)), strict=True)
            means.append([np.abs(np.asarray(a.array) - np.asarray(b.array))[kept].mean() for a, b in pairs])
    assert found["after/attention/mean_l1"] == pytest.approx(np.mean(means), rel=1e-5)
    assert found["after/attention/max_l1"] == pytest.approx(np.max(means), rel=1e-5)
    for layer in range(2):
        assert found[f"after/attention/layer_{layer}/l1"] == pytest.approx(np.mean(means, axis=0)[layer], rel=1e-5)


def test_models_whose_layers_do_not_correspond_are_refused():
    shapes = lambda config: jax.eval_shape(lambda: config.build(vocab_axis(VOCAB), key=jax.random.key(0)))  # noqa: E731
    model, other = shapes(MODEL), shapes(dataclasses.replace(MODEL, num_layers=3))
    CompareEvalConfig().check_model(model, {"teacher": model})
    CompareEvalConfig(attention=None).check_model(model, {"teacher": other})
    CompareEvalConfig().check_model(model, None)
    with pytest.raises(ConfigError, match=r"the model has 2 layers and the reference 3.*Set it to null"):
        CompareEvalConfig().check_model(model, {"teacher": other})
    with pytest.raises(ConfigError, match="the model has 32 features and the reference 64"):
        CompareEvalConfig().check_model(model, {"teacher": shapes(dataclasses.replace(MODEL, hidden_dim=64))})
    CompareEvalConfig().check_model(
        shapes(Gpt2Config(seq_len=16, hidden_dim=32, num_layers=2, num_heads=4)), {"teacher": model}
    )
    with pytest.raises(ConfigError, match="both null"):
        CompareEvalConfig(attention=None, logits=None).check()


def test_limits_name_every_violation():
    limits = Limits(
        {"a": Limit(1.0, "max_a: 1"), "b": Limit(0.5, "min_b: 0.5", least=True), "c": Limit(2.0, "max_c: 2")}
    )
    assert limits.violations("eval", {"a": 1.0, "b": 0.5, "c": 2.0}) == []
    assert limits.violations("eval", {"a": 1.5, "b": 0.25, "c": 2.0}) == [
        "eval/a is 1.5, at most 1 allowed (max_a: 1)",
        "eval/b is 0.25, at least 0.5 allowed (min_b: 0.5)",
    ]
    assert limits.violations("eval", {"a": math.nan, "b": 1.0}) == [
        "eval/a is nan, at most 1 allowed (max_a: 1)",
        "eval/c was not measured, at most 2 allowed (max_c: 2)",
    ]


def test_each_gate_knows_its_limits_and_names():
    both = L1Limits(0.1, 0.2)
    compare = CompareEvalConfig(attention=both, logits=both, fail_fast=True).metrics.limits
    assert compare.fail_fast
    assert {name: limit.bound for name, limit in compare.by_metric.items()} == {
        "compare/attention/mean_l1": 0.1,
        "compare/attention/max_l1": 0.2,
        "compare/logits/mean_l1": 0.1,
        "compare/logits/max_l1": 0.2,
    }
    assert FidelityEvalConfig(max_delta_nll=None, name="x").metrics.limits.by_metric.keys() == {"x/ppl_ratio"}
    assert "x/delta_nll" in (FidelityEvalConfig(name="x").metrics.names or ())
    assert CompareEvalConfig().metrics.limits.by_metric == {}


def hook_of(limits: Limits, values: dict[str, float], *, every: int | None, averages: tuple[str, ...] = ()) -> Any:
    lines: list[str] = []
    phase: Any = SimpleNamespace(end=20, name="p", averaged=lambda state: dict.fromkeys(averages))
    evaluation: Any = SimpleNamespace(run=lambda model: values)
    console: Any = SimpleNamespace(log=lines.append)
    return EvalHook([ScheduledEval(evaluation, every, limits)], 10, phase, (), console, Generated()), lines


STATE: Any = SimpleNamespace(model=None)
AT_MOST_ONE = Limits({"x": Limit(1.0, "max_x: 1")}, fail_fast=True)


def test_a_violation_ends_the_run_at_once_within_a_phase_and_once_the_end_is_saved():
    hook, lines = hook_of(AT_MOST_ONE, {"x": 2.0}, every=1)
    with pytest.raises(GateError, match=r"step 10: eval/x is 2, at most 1 allowed \(max_x: 1\)"):
        hook.run(10, STATE)
    hook.run(20, STATE)
    assert hook.latest == {"eval/x": 2.0}
    assert lines[-1] == "warning: step 20: eval/x is 2, at most 1 allowed (max_x: 1)"
    with pytest.raises(GateError, match=r"the end of phase 'p': eval/x is 2.*fail_fast"):
        hook.check_passed()


def test_a_violation_only_warns_by_default_and_averages_are_judged_too():
    hook, lines = hook_of(dataclasses.replace(AT_MOST_ONE, fail_fast=False), {"x": 2.0}, every=1, averages=("ema",))
    hook.run(10, STATE)
    hook.run(20, STATE)
    hook.check_passed()
    warnings = [line for line in lines if line.startswith("warning")]
    assert [line.split()[3] for line in warnings] == ["eval/x", "eval/ema/x"] * 2


def test_a_gate_runs_at_the_end_of_a_phase_alone_also_at_an_early_one():
    hook, _ = hook_of(AT_MOST_ONE, {"x": 2.0}, every=None)
    assert [step for step in range(1, 21) if hook.due(step)] == [20]
    hook.run_rest(20, STATE)  # its scheduled end has run already
    hook.check_passed()
    hook.run_rest(15, STATE)
    with pytest.raises(GateError, match="the end of phase 'p'"):
        hook.check_passed()


def test_a_gate_with_an_interval_runs_at_an_early_end_too():
    hook, _ = hook_of(AT_MOST_ONE, {"x": 2.0}, every=2)
    hook.run(10, STATE)  # not its turn
    hook.run_rest(10, STATE)
    with pytest.raises(GateError, match="the end of phase 'p': eval/x is 2"):
        hook.check_passed()


def test_a_gate_that_has_just_run_does_not_run_again_at_an_early_end():
    values = {"x": 0.5}
    hook, _ = hook_of(AT_MOST_ONE, values, every=1)
    hook.run(10, STATE)
    values["x"] = 2.0
    hook.run_rest(10, STATE)
    hook.check_passed()
    hook.run_rest(13, STATE)  # three steps later
    with pytest.raises(GateError, match="the end of phase 'p'"):
        hook.check_passed()


def test_the_weights_with_which_a_phase_ends_are_those_that_count():
    values = {"x": 2.0}
    hook, _ = hook_of(AT_MOST_ONE, values, every=None)
    hook.run(20, STATE)
    values["x"] = 0.5  # the best weights, which the phase goes on with
    hook.run(20, STATE)
    hook.check_passed()


def test_gates_are_written_as_any_evaluation():
    made = decode(EvalConfig, ConfigSource({"type": "compare", "attention": {"max_mean_l1": 0.05}, "logits": None}))
    assert made == CompareEvalConfig(attention=L1Limits(0.05), logits=None)
    assert made.every is None
    assert made.scope.references == ("teacher",)


def test_a_gate_that_is_due_is_judged_at_the_end_of_a_phase_that_ends_on_other_weights():
    values = {"x": 0.5}
    hook, _ = hook_of(AT_MOST_ONE, values, every=1)
    hook.run(10, STATE)
    values["x"] = 2.0
    hook.run_at_early_end(10, STATE)
    hook.run_rest(10, STATE)
    with pytest.raises(GateError, match="the end of phase 'p': eval/x is 2"):
        hook.check_passed()
    values["x"] = 0.5
    hook.run_at_early_end(20, STATE)  # after the last step, whose weights are judged no more
    hook.check_passed()
