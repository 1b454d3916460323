"""StackWise's Python names: what its scripts do step by step is one run of phases here.

    config = StackWiseConfig.from_yaml("config.yaml")
    builder = ProgressiveRackBuilder(config=config, building_mode="append")
    builder.append_stack(n_blocks=4, precision="qlora")
    results = ProgressiveTrainer(config).train_progressively(rack_builder=builder, target_stacks=6)

A builder holds no weights: it records stacks, and the trainer turns them into phases (`grow`, `quantize`, `lora`,
`trainable`). Checkpoints, logs and resumption are those of `jaxlm train`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jaxlm.compat.stackwise.progressive_api import STORED_AS, PlannedStack, ProgressiveRackBuilder, StackWiseConfig
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import NumStacks, check_simple
from jaxlm.core.values.logged import TRAINING_TIME
from jaxlm.observe.events import phase_history
from jaxlm.observe.logged_run import read_run
from jaxlm.plan.load_config import decode_run
from jaxlm.plan.presets.base import given_at
from jaxlm.plan.run_config import RunConfig
from jaxlm.reading.decode import decode
from jaxlm.reading.overrides import option_tree, override
from jaxlm.reading.yaml import ConfigSource, merge
from jaxlm.systems.progressive.preset import ProgressiveConfig
from jaxlm.train import train

__all__ = ["ProgressiveRackBuilder", "ProgressiveTrainer", "StackWiseConfig"]
_ABSENT = {
    "ProgressiveDataLoader": "jaxlm reads the text itself: the section `data` says where it is",
    "TimeStepMasking": "the keys of time and masks are in the configuration: training.progressive and training",
    "create_stack_from_config": "a stack has no weights before it trains: use ProgressiveRackBuilder.append_stack",
}
_OF_THE_RACK = {
    "phases": "the stacks of the builder become the phases. Change the stacks instead",
    "preset.stacks": "the builder decides how many there are. Give target_stacks instead",
    "preset.at": "the builder decides where stacks go. Give it building_mode instead",
}


def __getattr__(name: str) -> Any:
    if name in _ABSENT:
        raise ConfigError(f"jaxlm.stackwise has no {name}: {_ABSENT[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class ProgressiveTrainer:
    """Trains a rack, stack by stack, as one run."""

    def __init__(self, config: StackWiseConfig, overrides: Mapping[str, Any] | None = None):
        """Args: overrides: keys of jaxlm, dotted, as on the command line: `{"trainer.log_dir": "logs"}`."""
        if overrides is not None and not isinstance(overrides, Mapping):
            raise ConfigError(
                f"overrides: {type(overrides).__name__} given, a mapping from dotted keys to values or None expected, such as"
                ' {"trainer.log_dir": "logs"}'
            )
        self.config, self.overrides = config, dict(overrides or {})
        for key in self.overrides:
            check_simple(str, key, "overrides: a key")
        for key, instead in _OF_THE_RACK.items():
            if given_at(option_tree(self.overrides), key.split(".")) is not None:
                raise ConfigError(f"overrides: {key} given, but {instead}")

    def train_progressively(
        self,
        rack_builder: ProgressiveRackBuilder,
        dataloader: Mapping[str, Any] | None = None,
        target_stacks: int | None = None,
    ) -> dict[str, Any]:
        """Trains the builder's stacks, and adds as many to it as are missing.

        Args:
            dataloader: keys of jaxlm's section `data`; None for those of the configuration.
            target_stacks: number of stacks at the end; None for the builder's, or the configuration's if it has none.

        Returns:
            `training_history`: losses, steps, tokens and layers of each phase; `final_rack_info`, `total_training_time` in
            seconds, `checkpoint`, and `run`, which is a `jaxlm.train.TrainResult`.
        """
        config, stacks = self._planned(rack_builder, dataloader, target_stacks)
        result = train(config)
        rack_builder.stacks = list(stacks)
        run = read_run(str(result.plan.log_folder))
        history = [record._asdict() for record in phase_history(run)]
        return {
            "training_history": history,
            "final_rack_info": {
                "num_stacks": len(stacks),
                "stacks": list(map(asdict, stacks)),
            },
            "total_training_time": run.latest(TRAINING_TIME) or 0.0,
            "checkpoint": result.checkpoint,
            "run": result,
        }

    train_rack = train_progressively

    def run_config(
        self,
        rack_builder: ProgressiveRackBuilder,
        dataloader: Mapping[str, Any] | None = None,
        target_stacks: int | None = None,
    ) -> RunConfig:
        """The run that trains a rack. Args: as of `train_progressively`."""
        return self._planned(rack_builder, dataloader, target_stacks)[0]

    def _planned(
        self, rack_builder: ProgressiveRackBuilder, dataloader: Mapping[str, Any] | None, target_stacks: int | None
    ) -> tuple[RunConfig, tuple[PlannedStack, ...]]:
        if dataloader is not None and not isinstance(dataloader, Mapping):
            raise ConfigError(
                f"dataloader: {type(dataloader).__name__} given. jaxlm reads text itself: give keys of its section `data`,"
                ' such as {"train_urls": ["text.jsonl"]}, or None, with data.dataset_path in the configuration'
            )
        if target_stacks is not None:
            check_simple(NumStacks, target_stacks, "target_stacks")
        given = target_stacks or len(rack_builder.stacks)
        source = self.config.translated(rack_builder.sizes, given if given > 1 else None)
        source = override(source, self.overrides)
        tree = {**source.tree, "data": merge(source.tree.get("data", {}), dataloader or {})}
        preset = tree.pop("preset", None)
        if preset is None:
            raise ConfigError(
                "training.strategy: end_to_end given, but a rack is trained stack by stack. Set progressive"
            )
        wanted = given or preset["stacks"]
        if wanted < max(2, len(rack_builder.stacks)):
            raise ConfigError(
                f"target_stacks: {wanted} given, but the rack has {len(rack_builder.stacks)} stacks. Give as many or more,"
                " and at least 2"
            )
        stacks = rack_builder.completed(wanted)
        num_layers = tree["model"]["num_layers"]
        preset = {**preset, "layers_per_stack": preset.get("layers_per_stack") or num_layers}
        tree["model"] = {**tree["model"], "num_layers": stacks[0].n_blocks or num_layers}
        tree["phases"] = list(_phases(stacks, preset, ConfigSource(tree, source.marks)))
        return decode_run(ConfigSource(tree, source.marks), self.config.name), stacks


@dataclass(frozen=True)
class _PresetSection:
    preset: ProgressiveConfig


def _phases(
    stacks: Sequence[PlannedStack], preset: Mapping[str, Any], source: ConfigSource
) -> Iterator[dict[str, Any]]:
    """The phases of a rack: for each stack, those that the preset writes with the keys of that stack."""
    if "depth_times" in preset and len({stack.place for stack in stacks[1:]}) > 1:
        raise ConfigError(
            "time_interpretation: depth given with stacks on both sides, whose order is not that of training"
        )
    last = stacks[-1]
    if last.precision is not None and STORED_AS[last.precision] is not None:
        print(
            f"note: stack {last.number}: precision {last.precision} has no effect: it says how a stack is stored in the trunk"
            " of the next one, and this one is the last"
        )
    for stack in stacks:
        keys = {**preset, "stacks": len(stacks), "at": (stack if stack.number else stacks[1]).place}
        keys["trunk"] = stack.trunk or preset["trunk"]
        if stack.n_blocks is not None:
            keys["layers_per_stack"] = stack.n_blocks
        if keys["trunk"] != "lora":
            keys.pop("lora", None)
        if (keys["at"], keys["trunk"]) != ("append", "frozen") and keys.pop("cache", None) and stack.number:
            why = "reads what the stack computes" if keys["at"] == "prepend" else "has adapters that train"
            print(
                "note: training.progressive.cache_activations: nothing is stored while stack"
                f" {stack.number} trains: the trunk {why}"
            )
        before = stacks[max(0, stack.number - 1)]
        keys["store"] = _store(before, preset) if stack.number else None
        decoded = decode(_PresetSection, ConfigSource({"preset": keys}, source.marks)).preset
        yield from decoded.stage(stack.number, source, before.place)


def _store(stack: PlannedStack, preset: Mapping[str, Any]) -> str | None:
    """Says how a stack is stored in the trunk; None if the preset leaves that open."""
    kind = preset.get("store") if stack.precision is None else STORED_AS[stack.precision]
    if kind is not None and (steps := preset.get("polish_steps")):
        raise ConfigError(
            f"training.joint_tuning_steps: {steps} given, but stack {stack.number} is stored as {kind} when the next one is"
            " added, and stored weights cannot be trained. Give it the precision 'full', or remove joint_tuning_steps"
        )
    return kind
