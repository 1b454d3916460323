"""StackWise's Python names: what its scripts do step by step is one run of phases here.

    config = StackWiseConfig.from_yaml("config.yaml")
    builder = ProgressiveRackBuilder(config=config, building_mode="append")
    builder.append_stack(n_blocks=4, precision="qlora")
    results = ProgressiveTrainer(config).train_progressively(rack_builder=builder, target_stacks=6)

A builder holds no weights: it records stacks, and the trainer turns them into phases (`grow`, `quantize`, `lora`,
`trainable`). Checkpoints, logs and resumption are those of `jaxlm train`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from jaxlm.core.errors import ConfigError
from jaxlm.engine.metric_names import TRAINING_TIME
from jaxlm.interop.stackwise.config import StackWiseConfig
from jaxlm.interop.stackwise.rack import STORED, ProgressiveRackBuilder, Stack
from jaxlm.observe.logged_run import read_run
from jaxlm.observe.phase_history import phase_history
from jaxlm.plan.load_config import decode_run
from jaxlm.plan.presets.base import with_preset
from jaxlm.plan.run_config import RunConfig
from jaxlm.reading.overrides import override
from jaxlm.reading.yaml import ConfigSource, merge
from jaxlm.train import train

__all__ = ["ProgressiveRackBuilder", "ProgressiveTrainer", "StackWiseConfig"]
_ABSENT = {
    "ProgressiveDataLoader": "jaxlm reads the text itself: the section `data` says where it is",
    "TimeStepMasking": "the keys of time and masks are in the configuration: training.progressive and training",
    "create_stack_from_config": "a stack has no weights before it trains: use ProgressiveRackBuilder.append_stack",
}


def __getattr__(name: str) -> Any:
    if name in _ABSENT:
        raise ConfigError(f"jaxlm.stackwise has no {name}: {_ABSENT[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class ProgressiveTrainer:
    """Trains a rack, stack by stack, as one run."""

    def __init__(self, config: StackWiseConfig, overrides: Mapping[str, Any] | None = None):
        """Args: overrides: keys of jaxlm, dotted, as on the command line: `{"trainer.log_dir": "logs"}`."""
        self.config, self.overrides = config, dict(overrides or {})

    def train_progressively(
        self,
        rack_builder: ProgressiveRackBuilder,
        dataloader: Mapping[str, Any] | None = None,
        target_stacks: int | None = None,
    ) -> dict[str, Any]:
        """Trains the builder's stacks, and as many more as are missing.

        Args:
            dataloader: keys of jaxlm's section `data`; None for those of the configuration.
            target_stacks: number of stacks at the end; None for the builder's, or the configuration's if it has none.

        Returns:
            `training_history`: losses, steps, tokens and layers of each phase; `final_rack_info`, `total_training_time` in
            seconds, `checkpoint`, and `run`, which is a `jaxlm.train.TrainResult`.
        """
        result = train(self.run_config(rack_builder, dataloader, target_stacks))
        run = read_run(str(result.plan.log_folder))
        history = [record._asdict() for record in phase_history(run)]
        return {
            "training_history": history,
            "final_rack_info": {
                "num_stacks": len(rack_builder.stacks),
                "stacks": list(map(asdict, rack_builder.stacks)),
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
        """The run that trains a rack; the builder then has all of its stacks. Args: as of `train_progressively`."""
        if dataloader is not None and not isinstance(dataloader, Mapping):
            raise ConfigError(
                f"dataloader: {type(dataloader).__name__} given. jaxlm reads text itself: give keys of its section `data`,"
                ' such as {"train_urls": ["text.jsonl"]}, or None, with data.dataset_path in the configuration'
            )
        source = override(self.config.translated(rack_builder.sizes), self.overrides)
        tree = {**source.tree, "data": merge(source.tree.get("data", {}), dataloader or {})}
        preset = tree.pop("preset", None)
        if preset is None:
            raise ConfigError(
                "training.strategy: end_to_end given, but a rack is trained stack by stack. Set progressive"
            )
        wanted = target_stacks or len(rack_builder.stacks) or preset["stacks"]
        if wanted < max(2, len(rack_builder.stacks)):
            raise ConfigError(
                f"target_stacks: {wanted} given, but the rack has {len(rack_builder.stacks)} stacks. Give as many or more,"
                " and at least 2"
            )
        while len(rack_builder.stacks) < wanted:
            rack_builder.stacks.append(Stack(len(rack_builder.stacks), rack_builder.building_mode))
        stacks = rack_builder.stacks
        tree["model"] = {**tree["model"], "num_layers": stacks[0].n_blocks or tree["model"]["num_layers"]}
        tree["phases"] = list(_phases(stacks, preset, tree))
        return decode_run(ConfigSource(tree, source.marks), None)


def _phases(stacks: Sequence[Stack], preset: Mapping[str, Any], tree: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The phases of a rack: for each stack, that of the preset whose keys are the stack's."""
    if "depth_times" in preset and len({stack.place for stack in stacks[1:]}) > 1:
        raise ConfigError(
            "time_interpretation: depth given with stacks on both sides, whose order is not that of training"
        )
    for stack in stacks:
        keys = {key: value for key, value in preset.items() if key != "store"} | {"stacks": len(stacks)}
        keys |= {"at": (stack if stack.number else stacks[1]).place, "trunk": stack.trunk or preset["trunk"]}
        if stack.n_blocks is not None:
            keys["layers_per_stack"] = stack.n_blocks
        if keys["trunk"] != "lora":
            keys.pop("lora", None)
        if (keys["at"], keys["trunk"]) != ("append", "frozen"):
            keys.pop("cache", None)
        for phase in with_preset(ConfigSource({**tree, "preset": keys})).tree["phases"]:
            if phase["name"] == f"stack_{stack.number}":
                yield {**phase, "surgery": [*_stores(stacks, stack.number, preset), *phase.get("surgery", [])]}
            elif phase["name"] == f"polish_{stack.number}":
                yield phase


def _stores(stacks: Sequence[Stack], number: int, preset: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The surgery that stores the stack which trained before stack `number`."""
    if number == 0:
        return
    before = stacks[number - 1]
    kind = (None if before.precision is None else STORED[before.precision]) or preset.get("store")
    if kind is not None:
        place = "" if number == 1 else rf"{0 if before.place == 'prepend' else number - 1}\."
        yield {"type": "quantize", "kind": kind, "modules": rf"^body\.{place}layers\."}
