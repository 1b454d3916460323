"""A checkpoint as a person names it: the run's plan and tokenizer, and its model on the devices that are there."""

import argparse
import difflib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxlm.config.load import decode_run
from jaxlm.config.overrides import option_tree, override, parse_arguments
from jaxlm.config.yaml import ConfigSource, load_yaml
from jaxlm.core.errors import ConfigError
from jaxlm.core.runtime import main_first
from jaxlm.data.config import DataConfig
from jaxlm.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from jaxlm.engine.checkpoint.integrity import DamagedError
from jaxlm.engine.checkpoint.policy import CheckpointerConfig
from jaxlm.engine.checkpoint.remote import is_url
from jaxlm.engine.checkpoint.resolve import resolve_checkpoints
from jaxlm.engine.checkpoint.restore import VerifiedCheckpoint, restore
from jaxlm.interop.hf.folder import load_model, open_folder
from jaxlm.interop.hf.hub import local_folder, may_be_repository
from jaxlm.interop.hf.tensor_files import open_tensors
from jaxlm.models.base import LanguageModel
from jaxlm.run.adapters import with_adapters, without_adapters
from jaxlm.run.plan import Plan, make_plan

AS_TRAINED = "trained"
# Keys beside the model's that say how it is laid out and computed. The batch's must divide over the devices.
_EFFECTIVE = tuple(
    f"trainer.{name}"
    for name in (
        *("mp", "model_axis_size", "replica_ici_axis_size", "batch_axis", "fsdp_axis", "tensor_parallel_axes"),
        *("axis_resources", "parameter_axis_resources", "train_batch_size", "per_device_parallelism"),
    )
)


@dataclass(frozen=True)
class LoadedCheckpoint:
    """What a checkpoint holds beside its arrays.

    Attributes:
        found: the checkpoint, whose files have been checked.
        tokenizer: of the run.
        plan: of the run, for the devices that are there.
    """

    found: VerifiedCheckpoint
    tokenizer: Tokenizer
    plan: Plan

    @property
    def data(self) -> DataConfig:
        """Of the phase that the checkpoint stands in."""
        return self.plan.data[self.found.cursor.phase]

    def load_model(self, weights: str = AS_TRAINED) -> LanguageModel:
        """The model in its parameters' dtype. Call it inside `plan.layout.use()`.

        Args:
            weights: the newest, `trained`, or an average that the run kept (`trainer.model_averaging`), `ema`.

        Raises:
            ConfigError: the run kept no such average.
        """
        phase = self.plan.phases[self.found.cursor.phase]
        known = (AS_TRAINED, *phase.averages)
        if weights not in known:
            raise ConfigError(
                f"--weights: '{weights}' given, and {self.found.place} has: {', '.join(known)}. A run keeps averages where"
                " trainer.model_averaging says so"
            )
        abstract, layout = self.plan.state_builder.abstract_state(phase), self.plan.layout
        model = restore(self.found, abstract.model, layout, prefix="model")
        if weights == AS_TRAINED:
            return model
        average = restore(self.found, abstract.slots[weights].weights, layout, prefix=f"slots.{weights}.weights")
        return phase.with_average(model, average)


def checkpoint_parser(command: str, description: str, *, or_else: str = "") -> argparse.ArgumentParser:
    """The command line of a command that takes a checkpoint (`or_else` what), to which it adds its own options."""
    parser = argparse.ArgumentParser(prog=f"python -m {command}", description=description, allow_abbrev=False)
    add_checkpoint_options(parser, or_else=or_else)
    return parser


def add_checkpoint_options(parser: argparse.ArgumentParser, *, or_else: str = "") -> None:
    """Which checkpoint (`or_else` what), and which weights of it."""
    what = f"a checkpoint, or a run's folder of them (the newest is used){or_else}"
    parser.add_argument("--checkpoint", required=True, help=what)
    parser.add_argument(
        "--weights",
        default=AS_TRAINED,
        help="`trained` (default), or `ema`: the average that trainer.model_averaging has kept",
    )


def parse_with_keys(
    parser: argparse.ArgumentParser, arguments: Sequence[str]
) -> tuple[argparse.Namespace, dict[str, Any]]:
    """The command's own options, and the dotted keys that go over the saved configuration.

    Raises:
        ConfigError: an option that is neither, or another configuration.
    """
    options, rest = parser.parse_known_args(arguments)
    parsed = parse_arguments(rest)
    if parsed.config_path is not None:
        raise ConfigError(
            "command line: --config_path: a checkpoint brings its own configuration. Override its keys one by one"
        )
    own = sorted(vars(options))
    for name in parsed.options:
        if "." not in name:
            near = difflib.get_close_matches(name, own, n=1)
            meant = f"Did you mean --{near[0]}? " if near else ""
            raise ConfigError(
                f"command line: --{name} is no option of {parser.prog}. {meant}Its own are"
                f" {', '.join(f'--{o}' for o in own)}; keys of the saved configuration have a dot"
            )
    return options, parsed.options


def open_checkpoint(
    path: Path | str, options: Mapping[str, Any] | None = None, *, also: Collection[str] = ()
) -> LoadedCheckpoint:
    """The checkpoint that a path names, or the newest in a run's folder.

    Args:
        options: dotted key -> value, over the configuration that was saved (`trainer.model_axis_size`, ...).
        also: further keys that have an effect on what it is opened for.

    Raises:
        ConfigError: there is none, its files are not what was saved, the devices cannot hold it as configured, or an
            option has no effect on a model that is trained already.
    """
    found = find_checkpoint(path)
    given = dict(options or {})
    with found.checkpoint.local("run") as folder:
        tokenizer = load_tokenizer(str(folder / "tokenizer"))
        config = decode_run(override(load_yaml(folder / "config.yaml"), given), None)
    check_effective(given, also=also)
    return LoadedCheckpoint(found, tokenizer, make_plan(config, "trained", tokenizer.vocab_size))


def check_effective(options: Mapping[str, Any], *, also: Collection[str] = ()) -> None:
    """Raises `ConfigError` for an option that has no effect on a trained model. Args: as of `open_checkpoint`."""
    for key in _leaves(option_tree(dict(options))):
        if not key.startswith("model.") and key not in (*_EFFECTIVE, *also):
            raise ConfigError(
                f"command line: --{key} has no effect on a model that is trained already. Leave it out. What has one:"
                f" model.*, {', '.join((*_EFFECTIVE, *also))}"
            )


def _leaves(tree: Mapping[str, Any], path: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and f"{path}{key}" not in _EFFECTIVE:
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}"


def find_checkpoint(place: Path | str) -> VerifiedCheckpoint:
    """The checkpoint that a path or URL names: itself, or the newest in a run's folder. Its files are checked.

    Raises:
        ConfigError: there is none, or its files are not what was saved.
    """
    candidates = resolve_checkpoints(str(place), Path(CheckpointerConfig.staging_dir), of_runs=False)
    if not candidates:
        path = Path(place)
        near = sorted(str(p.parent) for p in path.parent.glob("*/step-*")) if path.parent.is_dir() else []
        there = f" There are: {', '.join(dict.fromkeys(near))}." if near else ""
        raise ConfigError(f"--checkpoint {place}: no checkpoint there (step-N, or a folder of them).{there}")
    newest = candidates[-1]
    try:
        newest.verify()
    except DamagedError as damage:
        raise ConfigError(f"--checkpoint {newest.place}: damaged: {damage}. Name another one") from damage
    return VerifiedCheckpoint(newest, newest.cursor())


_CHECKPOINT = "--checkpoint"


@dataclass(frozen=True)
class LoadedModel:
    """A model that can be used, not trained further.

    Attributes:
        place: where it was found.
        plan: for the devices that are there.
        stop_ids: tokens that end what it writes.
        load: the model in its parameters' dtype; call it inside `plan.layout.use()`.
    """

    place: Path | str
    tokenizer: Tokenizer
    plan: Plan
    stop_ids: tuple[int, ...]
    load: Callable[[], LanguageModel]

    def for_use(self) -> LanguageModel:
        """The model in its compute dtype, adapters folded in. Call it inside `plan.layout.use()`."""
        return jax.jit(lambda model: self.plan.precision.to_compute(without_adapters(model)))(self.load())


def open_model(
    name: str, keys: Mapping[str, Any], adapter: str | None = None, weights: str = AS_TRAINED
) -> LoadedModel:
    """What a path, a URL of a checkpoint, or the hub's `name` or `name@revision` means.

    Args:
        keys: dotted key -> value, over the configuration that was saved, or that the folder's config.json makes.
        weights: of a checkpoint: see `LoadedCheckpoint.load_model`.
        adapter: a PEFT folder whose adapters are put beside the layers.

    Raises:
        ConfigError: it is nothing of these, or cannot be opened as asked.
    """
    opened = _imported(name, keys, weights) if _is_hugging_face(name) else _checkpoint(name, keys, weights)
    if adapter is None:
        return opened
    plan = opened.plan

    def load() -> LanguageModel:
        return with_adapters(opened.load(), Path(adapter), plan.config.model, plan.layout)

    return LoadedModel(opened.place, opened.tokenizer, plan, opened.stop_ids, load)


def _is_hugging_face(name: str) -> bool:
    if is_url(name):
        return False
    path = Path(name)
    if path.is_dir():
        return (path / "config.json").is_file() and not (path / "run").is_dir()
    # `checkpoints/mine`, where there are checkpoints, is more likely one of them misspelt than somebody's repository.
    below = "/" in name and "@" not in name and path.parent.exists()
    return not path.exists() and may_be_repository(name) and not below


def _checkpoint(name: str, keys: Mapping[str, Any], weights: str) -> LoadedModel:
    try:
        trained = open_checkpoint(name, keys)
    except ConfigError as error:
        if Path(name).exists() or not may_be_repository(name):
            raise
        raise ConfigError(f"{error} If a repository of the hub is meant: {name}@main") from error
    eos = trained.tokenizer.eos_id
    stop_ids = () if eos is None else (eos,)
    return LoadedModel(
        trained.found.place, trained.tokenizer, trained.plan, stop_ids, lambda: trained.load_model(weights)
    )


def _imported(name: str, keys: Mapping[str, Any], weights: str) -> LoadedModel:
    if weights != AS_TRAINED:
        raise ConfigError(
            f"--weights: '{weights}' given, but {name} is of Hugging Face and has no averages. Leave it out"
        )
    folder = main_first(lambda: local_folder(name, _CHECKPOINT, weights=True))
    opened = open_folder(folder)
    dtype = next(iter(open_tensors(folder).tensors.values())).dtype.name
    usual = {
        "initialize_from_hf": str(folder),
        "use_hf_model_config": True,
        "data": {"tokenizer": str(folder)},
        "trainer": {"mp": f"p={dtype},c={dtype}", "train_batch_size": -1, "per_device_parallelism": 1},
    }
    check_effective(keys)
    config = decode_run(override(ConfigSource(usual), dict(keys)), None)
    tokenizer = load_tokenizer(str(folder))
    # All rows of the embedding, tokens or not: the same model as at Hugging Face, to the last logit.
    plan = make_plan(config, "imported", opened.vocab_size)

    def load() -> LanguageModel:
        return load_model(folder, plan.state_builder.abstract_initial_model, config.model, plan.layout)

    return LoadedModel(folder, tokenizer, plan, _stop_ids(folder, tokenizer), load)


def _stop_ids(folder: Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Of generation_config.json, which may name several, and the tokenizer's."""
    file = folder / "generation_config.json"
    try:
        found = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from error
    several = found if isinstance(found, list) else [found]
    return tuple(dict.fromkeys(i for i in (*several, tokenizer.eos_id) if isinstance(i, int)))
