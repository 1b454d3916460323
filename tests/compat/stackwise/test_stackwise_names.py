"""Scripts with StackWise's names become phases of one run."""

import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from jaxlm import stackwise
from jaxlm.core.errors import ConfigError
from jaxlm.engine.sync import Done
from jaxlm.plan.load_config import load_config, run_id_of
from jaxlm.plan.run_config import RunConfig
from jaxlm.reading.yaml import ConfigSource
from jaxlm.stackwise import ProgressiveRackBuilder, ProgressiveTrainer, StackWiseConfig
from jaxlm.systems.progressive.cached_trunk import CachedTrunk
from jaxlm.train import TrainResult
from tests.compat.stackwise.test_stackwise import CLM, QLORA, VARIABLE, config


def loaded(*arguments: Any) -> StackWiseConfig:
    return StackWiseConfig(ConfigSource(config(*arguments)))


def surgeries(run: RunConfig) -> list[list[dict[str, Any]]]:
    """The surgeries of each phase: type, and what tells one from another."""
    shown = ("kind", "modules", "rank", "at", "num_layers")
    return [
        [
            {"type": type(one).__name__, **{key: getattr(one, key) for key in shown if hasattr(one, key)}}
            for one in phase.surgery
        ]
        for phase in run.phases or []
    ]


def grow(place: str, num_layers: int = 2) -> dict[str, Any]:
    return {"type": "GrowConfig", "at": place, "num_layers": num_layers}


def store(kind: str, place: str) -> dict[str, Any]:
    return {"type": "QuantizeConfig", "kind": kind, "modules": rf"^body\.{place}layers\."}


@pytest.mark.parametrize(
    "progressive",
    [CLM, {**CLM, "building_mode": "prepend"}, QLORA, {**QLORA, "qlora_strategy": "progressive"}, {}],
    ids=["frozen", "prepend", "qlora", "ranks", "time as depth"],
)
def test_an_empty_builder_gives_the_run_of_the_yaml(progressive: dict[str, Any], tmp_path: Path):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config(progressive)))
    expected = load_config(["--config_path", str(tmp_path / "config.yaml")], "jaxlm.train")
    given = StackWiseConfig.from_yaml(tmp_path / "config.yaml")
    run = ProgressiveTrainer(given).run_config(ProgressiveRackBuilder(config=given))
    assert run.phases == expected.phases
    assert run_id_of(run) == run_id_of(expected) == "config"
    assert (run.model, run.data, run.objective, run.optimizer) == (
        expected.model,
        expected.data,
        expected.objective,
        expected.optimizer,
    )


def test_stacks_keep_their_side_size_and_precision():
    given = loaded(CLM)
    builder = ProgressiveRackBuilder(config=given, building_mode="append", default_precision="full")
    builder.append_stack(n_blocks=4, precision="full")
    builder.append_stack(n_blocks=3, precision="half")
    builder.prepend_stack(n_blocks=1, precision="qlora")
    builder.append_stack()
    assert [stack.place for stack in builder.build_rack()] == ["append", "append", "prepend", "append"]
    run = ProgressiveTrainer(given).run_config(builder, target_stacks=5)
    assert run.model.num_layers == 4
    assert surgeries(run) == [
        [],
        [grow("append", 3)],
        [store("float16", r"1\."), grow("prepend", 1)],
        [store("nf4", r"0\."), grow("append", 2)],
        [grow("append", 2)],
    ]


def test_precisions_that_are_given_win():
    def stored(default: str | None, *precisions: str | None) -> list[str | None]:
        given = loaded(QLORA)
        builder = ProgressiveRackBuilder(config=given, default_precision=default)
        for precision in precisions:
            builder.append_stack(precision=precision)
        run = ProgressiveTrainer(given).run_config(builder, target_stacks=4)
        return [next((one["kind"] for one in phase if "kind" in one), None) for phase in surgeries(run)[1:]]

    assert stored(None) == ["nf4", "nf4", "nf4"]
    assert stored(None, "full", None, "half") == [None, "nf4", "float16"]
    assert stored("full") == [None, None, None]
    assert stored("nvfp4", "full") == [None, "nvfp4", "nvfp4"]


def test_a_trunk_that_cannot_be_stored_is_noted(capsys):
    given = loaded({**CLM, "cache_activations": True})
    builder = ProgressiveRackBuilder(config=given)
    for add in (builder.append_stack, builder.append_stack, builder.prepend_stack):
        add()
    run = ProgressiveTrainer(given).run_config(builder, target_stacks=4)
    stores = [isinstance(phase.objective, CachedTrunk) for phase in run.phases or []]
    assert stores == [False, True, False, True]
    notes = capsys.readouterr().out
    assert "note: training.progressive.cache_activations: nothing is stored while stack 2 trains: the trunk" in notes
    assert notes.count("nothing is stored") == 1


def test_the_precision_of_the_last_stack_is_noted(capsys):
    """The guide's blocks: full, half, qlora, of which the last one is stored nowhere."""
    for last, target, noted in (("qlora", None, True), ("half", 3, True), ("full", None, False), ("qlora", 4, False)):
        given = loaded(CLM)
        builder = ProgressiveRackBuilder(config=given)
        for precision in ("full", "half", last):
            builder.append_stack(precision=precision)
        ProgressiveTrainer(given).run_config(builder, target_stacks=target)
        assert (f"note: stack 2: precision {last} has no effect" in capsys.readouterr().out) == noted


def mapped(stack_idx: int, max_stacks: int, num_time_steps: int) -> int:
    """As in the guide."""
    assert max_stacks == 3
    return min(stack_idx * 50, num_time_steps - 1)


@pytest.mark.parametrize(("at", "training", "total"), [("append", {}, 300), ("prepend", {"num_time_steps": 120}, 120)])
def test_a_function_maps_stacks_to_times_in_the_order_of_training(at: str, training: dict[str, Any], total: int):
    given = loaded({"building_mode": at, "time_interpretation": "depth"}, training)
    given.training.progressive.stack_time_mapping = mapped
    run = ProgressiveTrainer(given).run_config(ProgressiveRackBuilder(config=given))
    times = [phase.data.masking.times[0] for phase in run.phases or []]
    assert times == pytest.approx([step / (total - 1) for step in (0, 50, 100)])


def test_a_configuration_leaves_the_builder_as_it_is():
    builder = ProgressiveRackBuilder()
    builder.append_stack()
    assert len(untrained(builder, target_stacks=3).phases or []) == 3
    assert len(builder.build_rack()) == 1


def test_the_trunk_of_each_stack_is_frozen_or_has_adapters():
    given = loaded(QLORA)
    builder = ProgressiveRackBuilder(config=given)
    builder.append_stack()
    builder.append_stack()
    builder.freeze_trunk([0])
    builder.append_stack()
    builder.freeze_all_but_qlora([0, 1])
    run = ProgressiveTrainer(given).run_config(builder)
    adapters = {"type": "LoraConfig", "rank": 16}
    assert surgeries(run)[1:] == [
        [store("nf4", ""), grow("append")],
        [store("nf4", r"1\."), adapters, grow("append")],
    ]
    assert [r"\.[ab]$" in phase.trainable for phase in run.phases or []] == [False, False, True]


@pytest.mark.parametrize("target", [2, 3, 6])
def test_ranks_are_those_of_as_many_stacks_as_train(target, capsys):
    """As of a configuration with this number of stacks: those that the table lacks have qlora_rank."""
    given = loaded({**VARIABLE, "qlora_configs": {0: {"rank": 8}, 1: {"rank": 2}, 2: {"rank": 1}}})
    run = ProgressiveTrainer(given).run_config(ProgressiveRackBuilder(config=given), target_stacks=target)
    ranks = [one["rank"] for phase in surgeries(run) for one in phase if one["type"] == "LoraConfig"]
    assert ranks == [8, 2, 1, 4, 4][: target - 1]
    assert ("qlora_configs: 1, 2: no effect: of 2 stacks, only the first one" in capsys.readouterr().out) == (
        target == 2
    )


def test_keys_are_attributes():
    given = loaded()
    given.training.progressive.trunk_strategy = "qlora"
    given.training.progressive.cache_activations = True
    given.training.progressive.training_objective = "clm"
    given.training.optimizer.lr = 0.5
    given.validate()
    builder = ProgressiveRackBuilder(vocab_size=300, d_model=32, d_ff=given.model.d_ff, n_heads=2)
    run = ProgressiveTrainer(given, {"trainer.seed": 3}).run_config(builder, {"train_urls": ["b.txt"]}, 2)
    assert (run.optimizer.learning_rate, run.trainer.seed, run.data.train_urls) == (0.5, 3, ["b.txt"])
    assert (run.model.hidden_dim, run.model.num_heads, len(run.phases or [])) == (32, 2, 2)


def untrained(builder: ProgressiveRackBuilder, **arguments: Any) -> RunConfig:
    return ProgressiveTrainer(loaded(CLM)).run_config(builder, **arguments)


def two_sided() -> RunConfig:
    builder = ProgressiveRackBuilder()
    for add in (builder.append_stack, builder.append_stack, builder.prepend_stack):
        add()
    return ProgressiveTrainer(loaded()).run_config(builder)


def overridden(**overrides: Any) -> RunConfig:
    keys = {key.replace("__", "."): value for key, value in overrides.items()}
    return ProgressiveTrainer(loaded(CLM), keys).run_config(ProgressiveRackBuilder())


def polished() -> RunConfig:
    given = loaded(CLM, {"joint_tuning_steps": 3})
    builder = ProgressiveRackBuilder(config=given)
    builder.append_stack(precision="half")
    return ProgressiveTrainer(given).run_config(builder, target_stacks=2)


def second_stack(n_blocks: Any) -> None:
    builder = ProgressiveRackBuilder()
    builder.append_stack()
    builder.append_stack(n_blocks=n_blocks)


REFUSED = {
    "phases": (
        lambda: overridden(phases=[]),
        r"overrides: phases given, but the stacks of the builder become the phases",
    ),
    "a key of a phase": (lambda: overridden(phases__0__num_train_steps=3), r"overrides: phases given"),
    "stacks": (lambda: overridden(preset__stacks=3), r"overrides: preset\.stacks given, .* target_stacks"),
    "side": (lambda: overridden(preset={"at": "prepend"}), r"overrides: preset\.at given, .* building_mode"),
    "polish": (polished, r"joint_tuning_steps: 3 given, .* stack 0 is stored as float16"),
    "loader": (
        lambda: untrained(ProgressiveRackBuilder(), dataloader=[1]),
        r"dataloader: list given\. jaxlm reads text itself: give keys of its section `data`",
    ),
    "precision": (
        lambda: ProgressiveRackBuilder().append_stack(precision="fp8"),
        r"precision: 'fp8' given\. Allowed: full",
    ),
    "precisions": (
        lambda: ProgressiveRackBuilder().append_stack(precision=["half"]),  # pyright: ignore[reportArgumentType]
        r"precision: \['half'\] given\. Allowed: full",
    ),
    "trunk": (lambda: ProgressiveRackBuilder().freeze_trunk([0]), r"trunk_indices: \[0\] given, \[\] expected"),
    "target": (lambda: untrained(ProgressiveRackBuilder(), target_stacks=1), r"target_stacks: 1 given.* at least 2"),
    **{
        f"target {value}": (
            lambda value=value: untrained(ProgressiveRackBuilder(), target_stacks=value),
            rf"^target_stacks: {re.escape(repr(value))} given, an integer of 1 or more and at most 128 expected$",
        )
        for value in (math.nan, 2.5, 1e30, "a", [3], 0, -1, True, 129)
    },
    **{
        f"blocks {value}": (
            lambda value=value: second_stack(value),
            rf"^stack 1: n_blocks: {re.escape(repr(value))} given, an integer of 1 or more and at most 10000 expected$",
        )
        for value in (0, -1, math.nan, "a", [1], 2.5, True, 10_001)
    },
    **{
        f"overrides {value}": (
            lambda value=value: ProgressiveTrainer(loaded(), value),
            rf"^overrides: {type(value).__name__} given, a mapping from dotted keys to values or None expected",
        )
        for value in ([1], [], "a", 3)
    },
    "key": (lambda: ProgressiveTrainer(loaded(), {1: 2}), r"^overrides: a key: 1 given, a string expected"),  # pyright: ignore[reportArgumentType]
    "sizes": (lambda: untrained(ProgressiveRackBuilder(width=4)), r"model\.width: no such key"),
    "attribute": (lambda: loaded({"trunk": "frozen"}).validate(), r"progressive\.trunk: no such key"),
    "sides": (two_sided, r"time_interpretation: depth given with stacks on both sides"),
    "whole": (
        lambda: ProgressiveTrainer(loaded({"enabled": False})).run_config(ProgressiveRackBuilder()),
        r"end_to_end given, but a rack is trained stack by stack",
    ),
    "mode": (
        lambda: ProgressiveRackBuilder(building_mode="insert"),
        r"building_mode: 'insert' given\. Allowed: append, prepend",
    ),
    **{
        name: (lambda name=name: getattr(stackwise, name), rf"jaxlm\.stackwise has no {name}: ")
        for name in ("ProgressiveDataLoader", "TimeStepMasking", "create_stack_from_config")
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_counterpart_is_refused(name: str):
    run, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        run()


def test_results_are_printed_in_short():
    """The model and the optimizer's state are not."""
    state: Any = SimpleNamespace(model="weights")
    result = TrainResult(state, Done(), Path("checkpoints/run/step-9"), state)
    assert (
        str({"run": result}) == "{'run': TrainResult(outcome=Done(), checkpoint=PosixPath('checkpoints/run/step-9'))}"
    )


def test_an_attribute_that_is_not_set():
    with pytest.raises(AttributeError, match="'d_modle' is not set in this section"):
        _ = loaded().model.d_modle
