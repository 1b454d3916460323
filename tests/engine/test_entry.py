"""What a phase takes over from the one before, and what its step is given."""

from dataclasses import dataclass, replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.core.axes import MICROBATCH
from jaxlm.core.errors import ConfigError
from jaxlm.core.sharding import at_rest
from jaxlm.engine.accumulate import Sums, microbatch_axis
from jaxlm.engine.entry import StateBuilder, enter_phase
from jaxlm.engine.step import make_train_step
from jaxlm.engine.sync import FlagSync
from jaxlm.models.base import LanguageModel, vocab_axis
from jaxlm.objectives.next_token import NextToken
from jaxlm.optim.elementwise import AdamConfig
from jaxlm.optim.groups import SCHEDULE_STATES
from jaxlm.plan.load_config import decode_run
from jaxlm.plan.plan import make_plan
from jaxlm.reading.yaml import ConfigSource
from jaxlm.surgery.interpolate import InterpolateConfig
from jaxlm.surgery.lora import LoraConfig
from tests.engine.helpers import F32, MODEL, VOCAB, TinyRun, arrays, batch, layout, one_device, phase

ADAM = AdamConfig(learning_rate=1e-2, warmup=3, lr_schedule="cosine")


def entered(where=None, config=MODEL, before=ADAM, **changes):
    """(state after three steps, as on the host; state at the start of a second phase)."""
    where = where or one_device()
    first = phase(optimizer=before, model=config)
    second = replace(first, index=1, name="second", start=3, end=20, carries_optimizer=True, **changes)
    run = TinyRun(where, first, model=config)
    for seed in range(3):
        run.step(arrays(seed))
    before = jax.device_get(run.state)
    builder = StateBuilder(config, vocab_axis(VOCAB), 0, F32, (first, second))
    with where.use():
        return before, jax.device_get(enter_phase(builder, second, where, run.state)())


def models(opt_state) -> list:
    return tree.modules(opt_state, LanguageModel)


def counts(opt_state) -> dict[str, int]:
    return {path: int(leaf) for path, leaf in tree.leaves(opt_state) if path.endswith("count")}


@pytest.mark.slow
def test_moments_of_new_leaves_are_zero_and_others_are_carried():
    lora = LoraConfig(target="q_proj", rank=2)
    before, after = entered(surgeries=(lora,), trainable=("mlp", r"\.[ab]$"), schedule_start=0, scheduled_steps=20)
    old = [dict(tree.leaves(moments)) for moments in models(before.opt_state)]
    new = [tree.leaves(moments) for moments in models(after.opt_state)]
    assert len(old) == len(new) == 2
    for theirs, ours in zip(old, new, strict=True):
        assert len(ours) == 6, "the mlp's norm and matrices, and A and B"
        for path, leaf in ours:
            if path.endswith((".a", ".b")):
                assert not leaf.array.any(), path
            else:
                assert leaf.array.any(), path
                np.testing.assert_array_equal(leaf.array, theirs[path].array, err_msg=path)
    assert set(counts(after.opt_state).values()) == {3}
    assert (int(after.guard.updates), int(after.step)) == (3, 3)


@dataclass(frozen=True)
class Counting(NextToken):
    """Keeps the number of updates of its phase, and begins with `start`."""

    start: int = 0

    def init_slot(self, trainable):
        return jnp.int32(self.start)

    def update_slot(self, slot, trainable, updates):
        return updates


@pytest.mark.slow
@pytest.mark.parametrize(("objective", "expected"), [(Counting(), 3), (Counting(start=7), 7)])
def test_only_the_same_objective_keeps_what_it_has_counted(objective, expected):
    first = phase(optimizer=ADAM, objective=Counting())
    second = replace(first, index=1, name="second", start=3, end=20, carries_optimizer=True, objective=objective)
    second = replace(second, schedule_start=0, scheduled_steps=20)
    run = TinyRun(one_device(), first)
    for seed in range(3):
        run.step(arrays(seed))
    state = eqx.tree_at(lambda state: state.guard.skipped, run.state, jnp.int32(2))
    builder = StateBuilder(MODEL, vocab_axis(VOCAB), 0, F32, (first, second))
    with one_device().use():
        after = enter_phase(builder, second, one_device(), state)()
    assert int(after.slots["objective"]) == expected
    assert int(after.guard.skipped) == 2, "skipped steps are counted over all phases"


@pytest.mark.slow
def test_another_section_carries_moments_and_starts_its_schedule():
    other = replace(ADAM, learning_rate=3e-3, warmup=0)
    before, after = entered(optimizer=other)
    for theirs, ours in zip(models(before.opt_state), models(after.opt_state), strict=True):
        for (path, a), (_, b) in zip(tree.leaves(theirs), tree.leaves(ours), strict=True):
            np.testing.assert_array_equal(a.array, b.array, err_msg=path)
    is_position = lambda node: isinstance(node, SCHEDULE_STATES)  # noqa: E731
    positions = [node for node in jax.tree.leaves(after.opt_state, is_leaf=is_position) if is_position(node)]
    assert positions
    assert {int(node.count) for node in positions} == {0}
    assert set(counts(after.opt_state).values()) == {0, 3}, "the count of the moments' bias correction goes on"
    assert int(after.guard.updates) == 0


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        ([{"name": "a", "carry_optimizer": True}], r"phases\.0\.carry_optimizer: true given, but no phase is before"),
        (
            [{"name": "a"}, {"name": "b", "carry_optimizer": True, "optimizer": {"type": "lion"}}],
            r"phases\.1\.carry_optimizer: .* optimizer is lion, and that of phase 'a' is adam",
        ),
        (
            [{"name": "a"}, {"name": "b", "carry_optimizer": True, "optimizer": {"state": "8bit"}}],
            r"phases\.1\.carry_optimizer: .* optimizer\.state is {.*8bit.*}, and in phase 'a' it is {.*full.*}",
        ),
    ],
)
def test_an_optimizer_that_cannot_be_carried_is_refused(phases, message):
    model = {"type": "llama", "seq_len": 16, "hidden_dim": 32, "num_layers": 1, "num_heads": 4}
    config = {"model": model, "phases": phases, "trainer": {"train_batch_size": 8}}
    with pytest.raises(ConfigError, match=message):
        make_plan(decode_run(ConfigSource(config), None), "x", 61)


@pytest.mark.slow
def test_the_step_uses_the_accumulation_loop_passed_to_it():
    """A loop over microbatches in Python, from the last to the first."""
    calls = []

    def backwards(loss, parameters, zeros, columns, slot, where):
        gradient, totals, metrics = zeros, [], []
        for number in reversed(range(microbatch_axis(columns).size)):
            calls.append(number)
            part = jax.tree.map(lambda column, n=number: column[MICROBATCH, n], columns, is_leaf=tree.is_named)
            run = jax.value_and_grad(loss.scaled, has_aux=True)
            (_, (total, found, slot)), new = run(parameters, loss.annotate(slot, part), slot, jnp.asarray(number))
            gradient = jax.tree.map(lambda sum_, g: sum_ + g.astype(sum_.dtype), gradient, new)
            totals.append(total)
            metrics.append(found)
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *metrics)
        summed = {name: metric.over_microbatches() for name, metric in stacked.items()}
        return Sums(at_rest(gradient, where), sum(totals), summed, slot)

    # A large epsilon, because the direction of a gradient that is nearly zero has no correct digits.
    usual = phase(optimizer=replace(ADAM, warmup=0, epsilon=1e-3))
    run, other = TinyRun(one_device(), usual), TinyRun(one_device(), usual)
    columns = batch(arrays(0), one_device(), 2)
    flags = FlagSync.unset(one_device())
    step = make_train_step(
        other.phase, one_device(), F32, other.state_builder.abstract_state(other.phase), None, backwards
    )
    with one_device().use():
        state, report = step(other.state, {}, columns, flags)
    expected = run.step(arrays(0), 2)
    assert calls == [1, 0]
    for name, value in report.metrics.items():
        assert float(value) == pytest.approx(expected[name], rel=1e-5), name
    for (path, a), (_, b) in zip(*(tree.leaves(jax.device_get(s.model)) for s in (state, run.state)), strict=True):
        np.testing.assert_allclose(a.array, b.array, rtol=1e-4, atol=1e-5, err_msg=path)


def test_calibration_on_data_that_does_not_say_what_the_model_reads_is_refused():
    model = {"type": "llama", "seq_len": 16, "hidden_dim": 32, "num_layers": 1, "num_heads": 4}
    surgery = [{"type": "lora", "target": "attn", "init": "eva"}]
    config = {"model": model, "data": {"type": "unpaired"}, "objective": {"type": "kto"}, "evals": []}
    config |= {"phases": [{"name": "a", "surgery": surgery}], "trainer": {"train_batch_size": 8}}
    with pytest.raises(
        ConfigError, match=r"phase 'a': surgery: it measures .* data.type: unpaired makes UnpairedBatch"
    ):
        make_plan(decode_run(ConfigSource(config), None), "x", 61)


# --- A surgery that reads a reference ---------------------------------------------------------------------------------


def initial(config, seed: int):
    return jax.jit(StateBuilder(config, vocab_axis(VOCAB), seed, F32).initial_model)()


@pytest.mark.slow
@pytest.mark.parametrize("where", [one_device, layout])
def test_weights_move_towards_a_reference(where):
    where = where()
    first = phase(surgeries=(InterpolateConfig("base", weight=0.25, match="attn|head"),))
    builder = StateBuilder(MODEL, vocab_axis(VOCAB), 0, F32, (first,))
    ours, theirs = initial(MODEL, 0), initial(replace(MODEL, scan_layers=False), 7)
    with where.use():
        builder.check_references(first, {"base": jax.eval_shape(lambda: theirs)})
        found = jax.device_get(enter_phase(builder, first, where, None, refs={"base": theirs})().model)
    for (path, leaf), (_, a), (_, b) in zip(*map(tree.leaves, (found, ours, theirs)), strict=True):
        expected = 0.75 * a.array + 0.25 * b.array if "attn" in path or "head" in path else a.array
        np.testing.assert_allclose(leaf.array, expected, rtol=1e-6, atol=1e-7, err_msg=path)


@pytest.mark.parametrize(
    ("other", "surgeries", "message"),
    [
        (replace(MODEL, intermediate_dim=32), (), r"gate_proj\.weight has the axes .*'mlp': 32.* but .*'mlp': 64"),
        (replace(MODEL, tie_word_embeddings=True), (), r"the model 'base' has no parameter head\.weight"),
        (MODEL, (LoraConfig(target="q_proj"),), r"has no parameter body.*q_proj\.base\.weight"),
    ],
    ids=["other sizes", "tied", "adapters"],
)
def test_references_that_do_not_fit_are_refused_before_the_start(other, surgeries, message):
    first = phase(surgeries=(*surgeries, InterpolateConfig("base")))
    builder = StateBuilder(MODEL, vocab_axis(VOCAB), 0, F32, (first,))
    abstract = StateBuilder(other, vocab_axis(VOCAB), 0, F32).abstract_initial_model
    with pytest.raises(ConfigError, match=message):
        builder.check_references(first, {"base": abstract})


def test_a_weight_outside_its_range_and_a_pattern_without_a_match_are_refused():
    model = {"type": "llama", "seq_len": 16, "hidden_dim": 32, "num_layers": 1, "num_heads": 4}
    for keys, message in (
        ({"weight": 1.5}, r"phases\.0\.surgery\.0\.weight: 1\.5 given"),
        ({"match": "nothing"}, r"surgery interpolate: match: .*'nothing' matches no parameter"),
    ):
        surgery = {"type": "interpolate", "ref": "base", **keys}
        refs = {"base": {"type": "hf", "path": "x"}}
        config = {"model": model, "phases": [{"name": "a", "surgery": [surgery]}], "refs": refs}
        with pytest.raises(ConfigError, match=message):
            make_plan(decode_run(ConfigSource(config | {"trainer": {"train_batch_size": 8}}), None), "x", 61)
