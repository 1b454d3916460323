"""The phases that a progressive preset expands into."""

import dataclasses

import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import LARGEST_INT
from jaxlm.core.products.stored_weights import StoredWeight
from jaxlm.evals.samples import SamplesEvalConfig
from jaxlm.models.diffusion import needed
from jaxlm.models.inference.denoise import DenoisingConfig
from jaxlm.plan.load_config import decode_run
from jaxlm.plan.plan import make_plan
from jaxlm.plan.presets.base import preset_rows
from jaxlm.reading.decode import encode
from jaxlm.reading.yaml import ConfigSource
from jaxlm.systems.progressive.preset import StackAdapters, StackRank
from jaxlm.systems.progressive.surgery import GrowConfig

MODEL = {"type": "llama", "seq_len": 16, "hidden_dim": 32, "intermediate_dim": 48, "num_layers": 2, "num_heads": 4}


def config(model=MODEL, objective=None, **preset):
    section = {"type": "progressive", "stacks": 3, "steps_per_stack": 4, **preset}
    tree = {"model": model, "preset": section, "trainer": {"train_batch_size": 8}}
    return decode_run(ConfigSource({**tree, "objective": objective} if objective else tree), None)


def trained(**keys):
    """What trains in each phase."""
    return [list(phase.trainable) for phase in config(**keys).phases]


@pytest.mark.slow
def test_stacks_are_phases():
    plan = make_plan(config(polish_steps=2, cache=True, objective={"z_loss_weight": 1e-4}), "x", 40)
    assert [(phase.name, phase.num_steps, phase.model.num_layers) for phase in plan.phases] == [
        ("stack_0", 4, 2),
        ("stack_1", 4, 4),
        ("polish_1", 2, 4),
        ("stack_2", 4, 6),
        ("polish_2", 2, 6),
    ]
    assert plan.num_steps == 16
    stage, polish = plan.phases[1:3]
    assert stage.objective.objective == polish.objective == plan.phases[0].objective
    assert polish.objective.z_loss_weight == 1e-4
    rows = dict(preset_rows(plan.config.preset, encode(plan.config)))
    assert rows["  stack_2"].startswith(
        "grow (num_layers 2 at append init identity): 4 steps, trains new_stack, final_norm"
    )
    assert "trunk stored" in rows["  stack_2"]


def test_a_start_traces_each_surgery_once(monkeypatch):
    """The plan, the state and the files of a phase share shapes: a second trace doubles what N stacks take."""
    traced, apply = [], GrowConfig.apply
    monkeypatch.setattr(
        GrowConfig, "apply", lambda self, model, *, key: traced.append(0) or apply(self, model, key=key)
    )
    builder = make_plan(config(stacks=5), "x", 40).state_builder
    for phase in builder.phases:
        assert builder.initial_leaves(phase) == [{} for _ in phase.surgeries]
    assert len(traced) == 4


def test_what_trains():
    tied = {**MODEL, "tie_word_embeddings": True}
    assert trained()[1:] == [["new_stack", "final_norm", "^head"]] * 2
    assert trained(at="prepend")[1] == ["new_stack"]
    assert trained(model=tied)[1] == ["new_stack", "final_norm"]
    assert trained(model=tied, train_head=True)[1] == ["new_stack", "final_norm", "^tokens"]
    assert trained(at="prepend", train_head=True, train_norm=True)[1] == ["new_stack", "final_norm", "^head"]
    assert trained(train_norm=False, train_embeddings=True)[1] == ["new_stack", "^head", "^(tokens|positions)"]
    assert trained(trunk="train") == [[".*"]] * 3
    assert trained(trunk="lora")[1] == ["new_stack", "final_norm", "^head", r"\.[ab]$"]
    assert [phase.carry_optimizer for phase in config(carry_optimizer=True).phases] == [False, True, True]


def test_adapters_of_the_trunk_grow_with_it():
    plan = make_plan(config(trunk="lora", stacks=4, layers_per_stack=1, lora={"rank_pattern": "decreasing"}), "x", 40)
    state = plan.state_builder.abstract_state(plan.phases[-1])
    found = [stack.layers.stacked.attn.q_proj for stack in state.model.body.stacks]
    assert [adapted.a.axis_size("lora_rank") for adapted in found[:3]] == [16, 8, 4]
    assert [adapted.scale for adapted in found[:3]] == [2.0, 4.0, 8.0]
    assert not hasattr(found[3], "a")


@pytest.mark.parametrize(
    ("keys", "ranks", "alphas"),
    [
        ({"rank_pattern": "increasing"}, [16, 32, 64, 128], [32] * 4),
        ({"rank_pattern": "decreasing", "alpha_pattern": "decreasing"}, [16, 8, 4, 2], [32, 16, 8, 4]),
        ({"rank_pattern": "linear", "alpha_pattern": "linear"}, [16, 24, 32, 40], [32, 48, 64, 80]),
        ({"rank": 2, "rank_pattern": "decreasing", "alpha_pattern": "increasing"}, [2, 1, 1, 1], [32, 64, 128, 256]),
        ({"stacks": [StackRank(3, 5.0), StackRank(7, 9.0)]}, [3, 7, 16, 16], [5, 9, 32, 32]),
    ],
    ids=["increasing", "decreasing", "linear", "at least 1", "variable"],
)
def test_ranks_by_stack(keys, ranks, alphas):
    sizes = [StackAdapters(**keys).of(number) for number in range(4)]
    assert [size.rank for size in sizes] == ranks
    assert [size.alpha for size in sizes] == alphas


def test_patterns_of_many_stacks_end_where_numbers_do():
    assert StackAdapters(rank_pattern="increasing").of(126).rank == LARGEST_INT, "the surgery lora caps it further"
    ends = [("increasing", 32, r"3\.403e\+38 for stack 123"), ("decreasing", 0.5, r"5\.877e-39 for stack 126")]
    for pattern, alpha, end in ends:
        message = rf"preset\.lora\.alpha_pattern: {pattern} given with alpha: {alpha}, which makes {end}:"
        with pytest.raises(ConfigError, match=message):
            config(trunk="lora", stacks=128, lora={"alpha": alpha, "alpha_pattern": pattern})


REFUSED = {
    "one": ({"stacks": 1}, "then nothing grows"),
    "prepended": ({"cache": True, "at": "prepend"}, "cache: true given with at: prepend, but the trunk reads"),
    "adapters": ({"cache": "int8", "trunk": "lora"}, "cache: int8 given with trunk: lora, but the trunk changes"),
    "trained embeddings": (
        {"cache": True, "train_embeddings": True},
        "cache: true given with train_embeddings: true, but the trunk reads the embeddings",
    ),
    "trained tied head": (
        {"cache": "int8", "train_head": True, "model": {**MODEL, "tie_word_embeddings": True}},
        r"cache: int8 given with train_head: true, but the head is the embeddings \(model\.tie_word_embeddings\)",
    ),
    "copies of adapted layers": (
        {"trunk": "lora", "init": "copy"},
        "init: copy given with trunk: lora, but .* under adapters then. Set init: identity or random",
    ),
    "copies of stored layers": (
        {"trunk": "lora", "store": "nf4", "init": "copy", "at": "prepend"},
        "store: nf4 given together with init: copy, but what a new stack would copy is in another form then",
    ),
    "train": ({"trunk": "train", "train_head": False}, "train_head: false given together with trunk: train"),
    "embeddings": (
        {"trunk": "train", "train_embeddings": True},
        "train_embeddings: true given together with trunk: train",
    ),
    "no adapters": ({"lora": {"rank": 4}}, "lora: a section given without trunk: lora, but trunk is frozen"),
    "the usual adapters": ({"lora": {"rank": 16}}, "lora: a section given without trunk: lora, but trunk is frozen"),
    "no such stack": (
        {"trunk": "lora", "lora": {"stacks": [{"rank": 1, "alpha": 1}] * 3}},
        "stacks: 3 stacks given, but of 3 stacks only the first 2",
    ),
}


@pytest.mark.parametrize(("keys", "message"), REFUSED.values(), ids=REFUSED)
def test_contradictions_are_refused(keys, message):
    with pytest.raises(ConfigError, match=rf"^preset\.{message}|{message}"):
        config(**keys)


@pytest.mark.slow
def test_an_untied_head_trains_on_a_stored_trunk():
    make_plan(config(cache=True, train_head=True), "x", 40)


@pytest.mark.parametrize(("at", "forms"), [("append", ["nf4", "nf4", None]), ("prepend", [None, "nf4", "nf4"])])
def test_a_trunk_is_stored_and_only_its_adapters_train(at, forms):
    plan = make_plan(config(at=at, trunk="lora", store="nf4"), "x", 40)
    phase = plan.phases[-1]
    model = plan.state_builder.abstract_state(phase).model
    stacks = [stack.layers.stacked for stack in model.body.stacks]
    stored = [{weight.form for weight in tree.modules(stack, StoredWeight)} for stack in stacks]
    assert stored == [{form} if form else set() for form in forms]
    newest = forms.index(None)
    trained = {path for path, _ in tree.leaves(phase.split(model)[0])}
    in_trunk = {path for path in trained if path.startswith("body.") and not path.startswith(f"body.{newest}.")}
    in_trunk -= {path for path in in_trunk if "final_norm" in path}
    assert in_trunk
    assert all(path.endswith((".a", ".b")) for path in in_trunk)
    assert {f"body.{newest}.layers.stacked.mlp.{name}_proj.weight" for name in ("gate", "up", "down")} <= trained


def test_a_stored_trunk_cannot_train():
    with pytest.raises(
        ConfigError, match=r"store: int8 given together with polish_steps: 3, but stored weights cannot"
    ):
        config(store="int8", polish_steps=3)
    with pytest.raises(ConfigError, match=r"preset\.store: int8 given together with trunk: train"):
        config(store="int8", trunk="train")


@pytest.mark.parametrize("phases", [{"0": {"num_train_steps": 5}}, "stack_0", ["stack_0"]])
def test_single_keys_of_phases_are_refused(phases):
    tree = {"model": MODEL, "preset": {"type": "progressive"}, "trainer": {"train_batch_size": 8}, "phases": phases}
    with pytest.raises(ConfigError, match="phases: single keys given with preset"):
        decode_run(ConfigSource(tree), None)


NOISY = {**MODEL, "use_bidirectional_attention": True}


def timed(objective="mlm", at="prepend", masking=None, stacks=3, depth_times=None, **preset):
    section = {"type": "progressive", "stacks": stacks, "steps_per_stack": 4, "at": at, **preset}
    section["depth_times"] = depth_times or {}
    tree = {"model": NOISY, "preset": section, "trainer": {"train_batch_size": 8}, "objective": {"type": objective}}
    masking = {"min_mask_fraction": 0.1} if masking is None else masking
    return decode_run(
        ConfigSource({**tree, "data": {"masking": masking, "vocab_size": 300} if masking is not False else {}}), None
    )


def fractions(config):
    """The mask fractions at the first and the last time of each phase."""
    maskings = [phase.data.masking for phase in config.phases]
    return [masking.schedule.fractions(np.array(masking.times)).round(6).tolist() for masking in maskings]


def test_the_stack_beside_the_head_has_the_least_noise():
    """Prepended, it is the first one that trains; appended, the last one."""
    rising = [[0.1, 0.1], [0.54849, 0.54849], [1.0, 1.0]]  # step 149 or 150 of 0, ..., 299
    rising[1] = [round(0.1 + 0.9 * round(0.5 * 299) / 299, 6)] * 2
    config = timed(polish_steps=1)
    assert [phase.name for phase in config.phases] == ["stack_0", "stack_1", "polish_1", "stack_2", "polish_2"]
    assert fractions(config) == [rising[number] for number in (0, 1, 1, 2, 2)]
    assert fractions(timed(at="append")) == rising[::-1]
    assert fractions(timed(at="append", depth_times={"order": "training"})) == rising
    assert fractions(timed(at="prepend", depth_times={"order": "training"})) == rising
    rows = dict(preset_rows(config.preset, encode(config)))
    assert "trains new_stack, time step 299 of 300, mask fraction 1" in rows["  stack_2"]
    assert all(phase.data.vocab_size == 300 and phase.data.masking.min_mask_fraction == 0.1 for phase in config.phases)


def test_times_of_stacks_for_the_bound_make_up_all_times():
    config = timed("diffusion", masking={"mask_schedule_type": "cosine"}, depth_times={"num_time_steps": 5})
    assert [phase.data.masking.times for phase in config.phases] == [[0.0, 0.25], [0.25, 0.75], [0.75, 1.0]]
    config = timed("diffusion", depth_times={"mapping": [0, 2, 3], "num_time_steps": 5})
    assert [phase.data.masking.times for phase in config.phases] == [[0.0, 0.25], [0.25, 0.625], [0.625, 1.0]]


def test_a_prepended_stack_and_those_behind_it_are_for_the_masks_that_it_was_trained_on():
    table = [0.15, 0.5, 1.0]
    plan = make_plan(timed(masking={"time_step_mask_fractions": table}, polish_steps=1, layers_per_stack=1), "x", 40)
    parts = {phase.name: plan.state_builder.abstract_state(phase).model.traits.denoisers for phase in plan.phases}
    assert [(one.max_fraction, one.first, one.stop) for one in parts["stack_0"]] == [(0.15, 0, 2)]
    assert [(one.max_fraction, one.first, one.stop) for one in parts["stack_2"]] == [
        (0.15, 2, 4),
        (0.5, 1, 4),
        (1.0, 0, 4),
    ]
    assert parts["polish_2"] == parts["stack_2"]
    samples = SamplesEvalConfig(denoising=DenoisingConfig(schedule="depth"), max_new_tokens=4)
    appended = dataclasses.replace(timed(at="append", masking={"time_step_mask_fractions": table}), evals=[samples])
    with pytest.raises(ConfigError, match="schedule: depth given, but no part of this model has a noise of its own"):
        make_plan(appended, "x", 40)


@pytest.mark.parametrize("objective", ["mlm", "diffusion"])
@pytest.mark.parametrize("kind", ["linear", "cosine", "exponential"])
def test_a_stage_needs_the_part_that_it_trains_alone(objective, kind):
    masking = {"mask_schedule_type": kind, "min_mask_fraction": 0.1}
    plan = make_plan(timed(objective, masking=masking, layers_per_stack=1), "x", 40)
    for phase, data in zip(plan.phases, plan.data, strict=True):
        parts = plan.state_builder.abstract_state(phase).model.traits.denoisers
        spec = data.batch_spec(16)
        mask_range = spec.make(**dict.fromkeys(spec.columns)).mask_range
        assert list(needed(parts, mask_range)) == [parts[-1]]
        assert (parts[-1].first, parts[-1].stop) == (0, phase.model.num_layers)


def test_times_are_steps_of_the_masks_if_these_have_some():
    table = [0.15, 0.25, 0.4, 0.55, 0.75, 1.0]
    config = timed(stacks=6, masking={"time_step_mask_fractions": table})
    assert [one[0] for one in fractions(config)] == table
    config = timed(masking={"num_time_steps": 8, "min_mask_fraction": 0.15}, depth_times={"mapping": [1, 2, 7]})
    assert [one[0] for one in fractions(config)] == pytest.approx(
        [0.15 + 0.85 * step / 7 for step in (1, 2, 7)], abs=1e-6
    )


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"objective": "next_token"}, "given with objective.type: next_token, which hides no tokens"),
        ({"objective": "diffusion_blocks"}, "diffusion_blocks, which trains each block of layers at times of its own"),
        (
            {"masking": {"min_mask_fraction": 0.4, "max_mask_fraction": 0.4}},
            r"stacks have the mask fractions \[0\.4, 0\.4, 0\.4\].* Move data\.masking\.min_mask_fraction: 0\.4 and",
        ),
        (
            {"masking": {"time_step_mask_fractions": [0.9, 0.5, 0.2]}, "at": "append"},
            r"\[0\.9, 0\.5, 0\.2\].* Write rising data\.masking\.time_step_mask_fractions",
        ),
        ({"masking": False}, "given without data.masking"),
        ({"masking": {}}, r"hides a fraction of 0\.001: less than one token of a sequence of 16"),
        ({"masking": {"times": [0.5, 0.5]}}, r"data\.masking\.times: .* sets the times of each stack"),
        ({"objective": "diffusion", "masking": {"num_time_steps": 8}}, "which needs all times, and with time steps"),
        ({"masking": {"num_time_steps": 8}, "depth_times": {"num_time_steps": 9}}, "9 given, but data.masking has 8"),
        ({"depth_times": {"num_time_steps": 9, "time_per_stack": 3}}, "time_per_stack: 3 given with num_time_steps: 9"),
        (
            {"masking": {"num_time_steps": 8}, "depth_times": {"time_per_stack": 100}},
            "time_per_stack: 100 given with time steps in data.masking",
        ),
        ({"stacks": 12, "depth_times": {"num_time_steps": 8}}, r"depth_times\.mapping: 12 stacks have the time steps"),
    ],
)
def test_stacks_without_noise_of_their_own_are_refused(keys, message):
    with pytest.raises(ConfigError, match=message):
        timed(**keys)


@pytest.mark.parametrize(
    ("key", "value", "most"),
    [
        ("model.num_layers", 1_000_000, 10_000),
        ("preset.stacks", 2_000, 128),
        ("preset.layers_per_stack", 1_000_000, 10_000),
        ("preset.depth_times.num_time_steps", 2**31 - 1, 100_000),
        ("preset.depth_times.time_per_stack", 2**31 - 1, 100_000),
        ("data.masking.num_time_steps", 2**31 - 1, 100_000),
        ("data.masking.validation_replicas", 10**9, 1_000),
        ("phases.0.surgery.0.num_layers", 10**9, 10_000),
    ],
)
def test_sizes_that_no_run_could_plan_are_refused(key, value, most):
    tree = {"model": NOISY, "trainer": {"train_batch_size": 8}, "objective": {"type": "mlm"}}
    if key.startswith("phases"):
        tree["phases"] = [{"name": "grown", "surgery": [{"type": "grow", "num_layers": value}]}]
    else:
        section, *sections, name = key.split(".")
        given = {name: value}
        for outer in reversed(sections):
            given = {outer: given}
        tree[section] = {**({"type": "progressive"} if section == "preset" else tree.get(section, {})), **given}
    with pytest.raises(ConfigError, match=rf"{key}: {value} given, an integer of 1 or more and at most {most}\b"):
        decode_run(ConfigSource(tree), None)
