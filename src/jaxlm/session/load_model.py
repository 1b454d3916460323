"""Loads a checkpoint or a Hugging Face model for the commands: its plan, its tokenizer and the model on the devices."""

import argparse
import functools
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from jaxlm.core.errors import ConfigError, Parser, did_you_mean
from jaxlm.core.runtime import main_first
from jaxlm.core.safe_io import read_json_object
from jaxlm.core.stores import is_url
from jaxlm.data.config import DataConfig
from jaxlm.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from jaxlm.engine.checkpoint.manifest import DamagedError
from jaxlm.engine.checkpoint.policy import CheckpointerConfig
from jaxlm.engine.checkpoint.restore import VerifiedCheckpoint, resolve_checkpoints, restore, while_it_exists
from jaxlm.engine.phases import Phase
from jaxlm.evals.batches import prompt_ids
from jaxlm.interop.hf.family import with_mtp_of
from jaxlm.interop.hf.folder import ReadOptions, load_model, open_folder, parameter_dtype
from jaxlm.interop.hf.hub import local_folder, may_be_repository
from jaxlm.interop.hf.source_folder import SourceFolder, location_of_source
from jaxlm.interop.hf.text_part import replaced_keys
from jaxlm.interop.peft.merged import MergedAdapter, has_adapters_of, read_merged
from jaxlm.models.base import LanguageModel, ModelConfig
from jaxlm.models.inference.quantized import describe_weights, quantized
from jaxlm.objectives.base import ObjectiveConfig
from jaxlm.optim.averaging import AS_TRAINED
from jaxlm.plan.load_config import decode_run, read_saved
from jaxlm.plan.plan import Plan, make_plan
from jaxlm.reading.decode import flattened
from jaxlm.reading.overrides import OPTION, option_tree, override, parse_arguments
from jaxlm.reading.yaml import ConfigSource
from jaxlm.session.source import saved_source
from jaxlm.surgery.base import SurgeryConfig, merge_surgeries
from jaxlm.surgery.lora import add_adapters, adds_adapters, lora_for_inference

Devices = Sequence[jax.Device] | None
# Keys outside the `model` section that control sharding and dtypes. The batch size must divide over the devices.
_EFFECTIVE = tuple(
    f"trainer.{name}"
    for name in (
        *("mp", "mesh", "context", "model_axis_size", "replica_ici_axis_size", "replica_dcn_axis_size", "batch_axis"),
        *("fsdp_axis", "tensor_parallel_axes", "axis_resources", "parameter_axis_resources", "compute_axis_resources"),
        *("train_batch_size", "per_device_parallelism"),
    )
)
# Keys outside all sections that have an effect on a Hugging Face folder.
_TOP_LEVEL = ("hf_skip_keys",)


@dataclass(frozen=True)
class Spelling:
    """Says how messages write the arguments of `open_model`.

    Attributes:
        name, adapter, weights: the arguments.
        equals: what is between an argument and its value.
        key: what is before a key that overrides the configuration.
    """

    name: str = "--checkpoint"
    adapter: str = "--adapter"
    weights: str = "--weights"
    equals: str = " "
    key: str = OPTION


OPTIONS = Spelling()
"""As options of a command."""
ARGUMENTS = Spelling("name", "adapter", "weights", "=", "keys: ")
"""As arguments of `jaxlm.load`."""


def checkpoint_parser(command: str, description: str, *, or_else: str = "") -> argparse.ArgumentParser:
    """The parser of a command that takes a checkpoint. Args: or_else: help text for what else `--checkpoint` may name."""
    parser = Parser(prog=f"jaxlm {command}", description=description, allow_abbrev=False)
    add_checkpoint_options(parser, or_else=or_else)
    return parser


def add_checkpoint_options(parser: argparse.ArgumentParser, *, or_else: str = "") -> None:
    """Adds `--checkpoint` and `--weights`. Args: or_else: help text for what else `--checkpoint` may name."""
    checkpoint_help = f"a checkpoint, or a run's checkpoint folder (the newest is used){or_else}"
    parser.add_argument("--checkpoint", required=True, help=checkpoint_help)
    parser.add_argument(
        "--weights", default=AS_TRAINED, help="`trained` (default), or `ema` for the average of trainer.model_averaging"
    )


def parse_with_keys(
    parser: argparse.ArgumentParser, arguments: Sequence[str]
) -> tuple[argparse.Namespace, dict[str, Any]]:
    """The command's own options, and the dotted keys that override the saved configuration."""
    options, rest = parser.parse_known_args(arguments)
    parsed = parse_arguments(rest)
    of_files = {"config_path": parsed.config_path, "target": parsed.target, "config_root": parsed.config_root}
    if given := next((name for name, value in of_files.items() if value is not None), None):
        raise ConfigError(
            f"command line: --{given}: not allowed, because a checkpoint has its own configuration. Override individual keys"
            " instead"
        )
    names = sorted(vars(options))
    for name in parsed.options:
        if "." not in name and name not in _TOP_LEVEL:
            raise ConfigError(
                f"command line: --{name} is not an option of {parser.prog}.{did_you_mean(name, names, '--', '')} Its"
                f" options are {', '.join(f'--{o}' for o in names)}; keys that override the saved configuration contain a dot"
            )
    return options, parsed.options


def check_effective(options: Mapping[str, Any], *, also: Collection[str] = (), spelling: Spelling = OPTIONS) -> None:
    """Raises `ConfigError` for an option that has no effect on a trained model. Args: also: additional keys that do."""
    tree = option_tree(dict(options), spelling.key)
    for key, _ in flattened(tree) if tree else ():
        if not _is_of(key, ("model", *_EFFECTIVE, *also)):
            raise ConfigError(
                f"{spelling.key}{key} has no effect on a trained model. Remove it. These keys have an effect:"
                f" model.*, {', '.join((*_EFFECTIVE, *also))}"
            )


def placing_keys(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that say how any model is sharded and computed, for `open_model`."""
    return {key: value for key, value in options.items() if _is_of(key, _EFFECTIVE)}


def _is_of(key: str, sections: Collection[str]) -> bool:
    return any(f"{key}.".startswith(f"{section}.") for section in sections)


def find_checkpoint(location: Path | str, spelling: Spelling = OPTIONS) -> VerifiedCheckpoint:
    """Finds and verifies the checkpoint at a path or URL, or the newest in a run's folder. Args: spelling: of messages."""
    prefix = f"{spelling.name}{spelling.equals}"
    candidates = resolve_checkpoints(str(location), Path(CheckpointerConfig.staging_dir), of_runs=False)
    if not candidates:
        path = Path(location)
        if (path / "adapter_config.json").is_file():
            raise ConfigError(
                f"{prefix}{location}: it has only adapters. Set {spelling.name} to the model that they were trained on,"
                f" and add {spelling.adapter}{spelling.equals}{location}"
            )
        near = sorted(str(p.parent) for p in path.parent.glob("*/step-*")) if path.parent.is_dir() else []
        existing = f" Existing folders: {', '.join(dict.fromkeys(near))}." if near else ""
        raise ConfigError(
            f"{prefix}{location}: no checkpoint found (expected step-N or a folder of checkpoints).{existing}"
        )
    newest = candidates[-1]
    try:
        newest.verify()
    except DamagedError as damage:
        raise ConfigError(
            f"{prefix}{newest.location}: the checkpoint is damaged: {damage}. Choose another checkpoint"
        ) from damage
    return VerifiedCheckpoint.of(newest)


@dataclass
class LoadedModel:
    """A model for inference.

    Attributes:
        location: its path or URL.
        open_tokenizer: reads its tokenizer, which a Hugging Face folder need not have.
        model: config of the model with merged surgeries.
        surgeries: the surgeries that the model has been through, in order.
        data: the data section of the checkpoint's phase; that of a Hugging Face model names only its tokenizer.
        step: the checkpoint's step; None for a Hugging Face model.
        load: loads the model in its parameters' dtype; call it inside `plan.layout.use()`.
        adds_bos: whether the model was trained with BOS before every text, as `Corpus.prompt_bos`.
        eval_batch: sequences per evaluation batch of the checkpoint's phase.
        is_hugging_face: whether prompts are tokenized as transformers does: what looks like a special token is one.
        merged: the adapters that its merged form contains.
        source: reads the folder that it was made from.
    """

    location: Path | str
    open_tokenizer: Callable[[], Tokenizer]
    plan: Plan
    model: ModelConfig
    surgeries: tuple[SurgeryConfig, ...]
    data: DataConfig
    step: int | None
    load: Callable[[], LanguageModel]
    adds_bos: bool | None
    eval_batch: int
    is_hugging_face: bool = False
    merged: tuple[MergedAdapter, ...] = ()
    source: Callable[[], SourceFolder] = SourceFolder

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """Its tokenizer. Raises `ConfigError` if the folder has none."""
        return self.open_tokenizer()

    def prompt_ids(self, prompt: str) -> list[int]:
        """The token ids of a text to continue, with the special tokens in front that the model was trained with."""
        if not self.is_hugging_face or self.adds_bos is not None:
            return prompt_ids(self.tokenizer, prompt, bos=self.adds_bos)
        ids = self.tokenizer.encode_like_transformers(prompt, add_special_tokens=True)
        return ids or prompt_ids(self.tokenizer, prompt)

    def for_inference(self, quantize: str | None = None) -> LanguageModel:
        """Loads the model in its compute dtype with surgeries merged. Call it inside `plan.layout.use()`.

        Args:
            quantize: one of `quantized.FORMATS`; None keeps floating-point weights.
        """
        return inference_form(self.load(), self.surgeries, self.plan, quantize)

    def check_predicts_next_tokens(self, option: str) -> None:
        """Raises `ConfigError` if the model does not. Args: option: what needs it."""
        if not self.model.is_causal:
            raise ConfigError(
                f"{option}: {self.location} has model.use_bidirectional_attention: true, so it makes no predictions of next"
                " tokens, which tasks read. Run `jaxlm evaluate` without --tasks for its bound on the likelihood of text"
            )


def inference_form(
    model: LanguageModel, surgeries: Sequence[SurgeryConfig], plan: Plan, quantize: str | None
) -> LanguageModel:
    """A loaded model with surgeries merged, then quantized if requested, and everything else in its compute dtype."""

    def prepare(model: LanguageModel) -> LanguageModel:
        merged = merge_surgeries(model, surgeries)
        return plan.precision.cast_to_compute(merged if quantize is None else quantized(merged))

    model = jax.jit(prepare)(model)
    if quantize is not None:
        print(describe_weights(model), file=sys.stderr)
    return model


def open_model(
    name: str,
    keys: Mapping[str, Any],
    adapter: str | None = None,
    weights: str = AS_TRAINED,
    *,
    also: Collection[str] = (),
    devices: Devices = None,
    spelling: Spelling = OPTIONS,
) -> LoadedModel:
    """Opens a checkpoint at a path or URL, a Hugging Face folder, or a hub repository `name` or `name@revision`.

    Args:
        keys: dotted key -> value, overriding the saved configuration, or the one made from the folder's config.json.
        adapter: a PEFT folder with adapters to add to the model.
        weights: of a checkpoint: `trained` for the newest, or `ema` for their average (`trainer.model_averaging`).
        also: additional keys that have an effect for the caller. Others without effect raise `ConfigError`.
        devices: devices for the model; None means all.
        spelling: of messages.

    Raises:
        ConfigError: the model cannot be opened; or it contains this adapter already, which `load` may find.
    """
    open_named = _open_hf_model if _is_hugging_face(name) else _open_checkpoint
    opened = open_named(name, keys, weights, also, devices, spelling)
    return opened if adapter is None else with_adapter(opened, adapter, spelling)


def with_adapter(opened: LoadedModel, adapter: str, spelling: Spelling = OPTIONS) -> LoadedModel:
    """A model with the adapters of a PEFT folder.

    Raises:
        ConfigError: the model contains this adapter already, which `load` may find.
    """
    config, layout, folder = opened.model, opened.plan.layout, Path(adapter)
    lora, merged_adapter, option = lora_for_inference(folder, config), MergedAdapter.of_folder(folder), spelling.adapter
    twice = ConfigError(
        f"{option}{spelling.equals}{adapter}: {opened.location} contains these adapters already. Remove {option}"
    )
    if any(one.sha256 == merged_adapter.sha256 for one in opened.merged):
        raise twice
    if opened.merged:
        sources = ", ".join(one.source for one in opened.merged)
        to_stderr(f"note: {opened.location} contains the adapters of {sources}. Those of {adapter} are added to them")

    def load() -> LanguageModel:
        trained = opened.load()
        if adds_adapters(opened.surgeries) and has_adapters_of(trained, folder, config, layout):
            raise twice
        merged = jax.jit(functools.partial(merge_surgeries, surgeries=opened.surgeries))(trained)
        return add_adapters(merged, folder, config, layout)

    return replace(opened, surgeries=(lora,), load=load, merged=(*opened.merged, merged_adapter))


def _is_hugging_face(name: str) -> bool:
    if is_url(name):
        return False
    path = Path(name)
    if path.is_dir():
        return (path / "config.json").is_file() and not (path / "run").is_dir()
    # If the parent folder exists, `checkpoints/mine` is more likely a misspelled checkpoint than a hub repository.
    in_existing_folder = "/" in name and "@" not in name and path.parent.exists()
    return not path.exists() and may_be_repository(name) and not in_existing_folder


def _open_checkpoint(
    name: str, keys: Mapping[str, Any], weights: str, also: Collection[str], devices: Devices, spelling: Spelling
) -> LoadedModel:
    try:
        checkpoint = find_checkpoint(name, spelling)
    except ConfigError as error:
        if Path(name).exists() or not may_be_repository(name):
            raise
        raise ConfigError(f"{error} If you mean a Hugging Face repository, write {name}@main") from error
    with while_it_exists(checkpoint.checkpoint), checkpoint.checkpoint.local("run") as folder:
        tokenizer = load_tokenizer(str(folder / "tokenizer"), of_run=True)
        config = read_saved(folder / "config.yaml", keys, spelling.key)
    check_effective(keys, also=also, spelling=spelling)
    plan = make_plan(config, "trained", tokenizer.vocab_size, devices)
    phase = plan.phases[checkpoint.cursor.phase]
    surgeries, data = plan.state_builder.surgeries_until(phase), plan.data[phase.index]
    return LoadedModel(
        checkpoint.location,
        lambda: tokenizer,
        plan,
        phase.model,
        surgeries,
        data,
        checkpoint.cursor.step,
        load=lambda: _load_weights(checkpoint, plan, phase, weights, spelling),
        adds_bos=data.corpus.prompt_bos,
        eval_batch=plan.batches.eval_of(phase),
        merged=(MergedAdapter.of_checkpoint(checkpoint.location),) if adds_adapters(surgeries) else (),
        source=lambda: saved_source(checkpoint.checkpoint),
    )


def _load_weights(
    checkpoint: VerifiedCheckpoint, plan: Plan, phase: Phase, weights: str, spelling: Spelling
) -> LanguageModel:
    known = (AS_TRAINED, *phase.averages)
    if weights not in known:
        raise ConfigError(
            f"{spelling.weights}: '{weights}' given, but {checkpoint.location} only has: {', '.join(known)}. A run saves"
            " averages if trainer.model_averaging is set"
        )
    abstract, layout = plan.state_builder.abstract_state(phase), plan.layout
    model = restore(checkpoint, abstract.model, layout, prefix="model")
    if weights == AS_TRAINED:
        return model
    average = restore(checkpoint, abstract.slots[weights].weights, layout, prefix=f"slots.{weights}.weights")
    return phase.with_average(model, average)


def _open_hf_model(
    name: str, keys: Mapping[str, Any], weights: str, also: Collection[str], devices: Devices, spelling: Spelling
) -> LoadedModel:
    if weights != AS_TRAINED:
        raise ConfigError(
            f"{spelling.weights}: '{weights}' given, but {name} is a Hugging Face model and has no averages. Remove it"
        )
    folder = main_first(lambda: local_folder(name, spelling.name, weights=True))
    dtype, note = parameter_dtype(folder)
    if note is not None and "trainer.mp" not in keys:
        to_stderr(f"note: {note}. Set trainer.mp to bf16 to need half of the memory")
    defaults: dict[str, Any] = {
        "initialize_from_hf": str(folder),
        "use_hf_model_config": True,
        "data": {"tokenizer": str(folder)},
        "trainer": {"mp": f"p={dtype},c={dtype}", "train_batch_size": -1, "per_device_parallelism": 1},
    }
    check_effective(keys, also=(*_TOP_LEVEL, *also), spelling=spelling)
    config = decode_run(override(ConfigSource(defaults), dict(keys), spelling.key), None)
    options = ReadOptions(skip_keys=config.hf_skip_keys, log=to_stderr)
    opened = open_folder(folder, options)
    content = replaced_keys(read_json_object(folder / "config.json"), {}, config.hf_skip_keys)
    if not opened.config.is_causal:  # such a model predicts hidden tokens, and is evaluated on them
        objective = {"type": ObjectiveConfig.of_role("hidden_tokens")}
        defaults |= {"objective": objective, "data": {**defaults["data"], "masking": {}}}
        config = decode_run(override(ConfigSource(defaults), dict(keys), spelling.key), None)

    def tokenizer() -> Tokenizer:
        if not (folder / "tokenizer.json").is_file():
            raise ConfigError(
                f"{name} has no tokenizer.json, without which texts cannot be read or written. Give token ids to logits,"
                " log_probs or hidden, or put the tokenizer's files into the folder"
            )
        return load_tokenizer(str(folder))

    # All embedding rows, even those without a token, so that the logits match those of transformers.
    plan = make_plan(config, "imported", opened.vocab_size, devices)

    def load() -> LanguageModel:
        return load_model(folder, plan.state_builder.abstract_initial_model, plan.model, plan.layout, options)

    merged, data = read_merged(folder), plan.data[0]
    return LoadedModel(
        folder,
        tokenizer,
        plan,
        plan.model,
        (),
        data,
        None,
        load,
        adds_bos=None,
        eval_batch=plan.batches.eval,
        is_hugging_face=True,
        merged=merged,
        source=lambda: SourceFolder.read(
            folder, location_of_source(name, folder), content, with_mtp_of(plan.model, opened.config)
        ),
    )


def to_stderr(line: str) -> None:
    """Prints a line beside the command's results."""
    print(line, file=sys.stderr)
