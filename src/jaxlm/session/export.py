"""Exports a model as a folder for transformers, for `jaxlm convert` and during training."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.publish import (
    Location,
    PublishError,
    check_folder_writable,
    check_unused,
    child_of,
    is_taken,
    location_of,
)
from jaxlm.core.runtime import main_only
from jaxlm.core.stores import is_url
from jaxlm.core.values.logged import EVAL_PREFIX, Activity
from jaxlm.data.config import DataConfig
from jaxlm.data.tokenizer.tokenizer import Tokenizer
from jaxlm.engine.checkpoint.store import CURSOR
from jaxlm.engine.phases import Phase
from jaxlm.engine.state import RunState
from jaxlm.interop.hf.classifier import is_reward_model
from jaxlm.interop.hf.folder import Parts, StoredFormat, save_folder
from jaxlm.interop.hf.hub import repository_of, upload_folder
from jaxlm.interop.hf.model_card import README, ModelCard
from jaxlm.interop.hf.source_folder import SourceFolder
from jaxlm.interop.peft.merged import MergedAdapter, merged_file
from jaxlm.interop.pretrained import hf_name
from jaxlm.models.base import LanguageModel, ModelConfig
from jaxlm.models.rows import parameters
from jaxlm.observe.records import METRICS, read_metrics
from jaxlm.plan.load_config import run_id_of
from jaxlm.plan.plan import Plan
from jaxlm.plan.rows import describe_parts, describe_phase
from jaxlm.plan.run_config import RunConfig
from jaxlm.session.startup import LAST_EXPORTED
from jaxlm.surgery.base import export_form
from jaxlm.surgery.lora import adds_adapters

_HUB_URL = "hf:"  # a dataset as one of the train_urls
_MAX_URLS = 20


@dataclass(frozen=True)
class Exporter:
    """Writes models as folders for transformers.

    Attributes:
        tokenizer: is saved with the models.
        source: the folder of the model that training began with.
        dtype: of the weights in the files; None for that of the source's.
        parts: of the source that the exports have.
        stored_format: in which they have its stored weights.
    """

    plan: Plan
    tokenizer: Tokenizer
    source: SourceFolder
    dtype: Any
    parts: Parts = "all"
    stored_format: StoredFormat = "decode"

    def check(self, config: ModelConfig, rows: int) -> None:
        """Raises `ConfigError` if `write` would for a model of this config. Args: rows: of its embedding."""
        self.source.dtype_of(self.dtype)
        if self.parts == "all":
            self.source.check_fits(config, rows)
        if self.stored_format == "keep":
            states = ((phase, self.plan.state_builder.abstract_state(phase).model) for phase in self.plan.phases)
            trained = {path for phase, model in states for path, _ in tree.leaves(phase.split(model)[0])}
            self.source.check_keeps(config, trained)

    def describe(self, model: LanguageModel) -> str:
        """What an export of this model has beside the text model; empty if there is nothing else."""
        return self.source.describe_export("text" if is_reward_model(model) else self.parts)

    def write(
        self,
        folder: Location,
        model: LanguageModel,
        config: ModelConfig,
        card: ModelCard | None = None,
        merged: Sequence[MergedAdapter] = (),
    ) -> None:
        """Writes a complete new folder: configuration, weights, tokenizer and model card. All processes must call this.

        Args:
            model: in the form of `export_form`.
            config: of the model.
            card: becomes README.md; None keeps the tokenizer's.
            merged: the adapters that it contains.
        """
        plan, files = self.plan, self.tokenizer.files(max_length=config.seq_len)
        if card is not None:
            readme, base, place = files.pop(README, None), plan.config.initialize_from_hf, plan.data[0].tokenizer
            if readme is not None and base and hf_name(base, place) == hf_name(True, place):  # it is about the base
                card = replace(card, of_base=readme.decode("utf-8", errors="replace"))
            if is_reward_model(model):
                card = replace(card, task="text-classification")
            files |= {README: card.text().encode(), **merged_file(merged)}
        made_from = {"special_ids": self.tokenizer.special_ids, "source": self.source, "parts": self.parts}
        made_from["stored_format"] = self.stored_format
        save_folder(folder, model, config, plan.layout, dtype=self.dtype, files=files, **made_from)


@dataclass(frozen=True)
class ExportHook:
    """Exports the model to `folder/step-N` every `every_steps` steps and after the last step of the phase.

    Attributes:
        latest: the metrics of the newest evaluation, for the model card.
        upload: repository on the Hugging Face Hub to which the folders are pushed; None pushes none.
    """

    activity = Activity.SAVE

    folder: Location
    every_steps: int
    phase: Phase
    exporter: Exporter
    log: Callable[[str], None]
    latest: Callable[[], Mapping[str, float]] = dict
    upload: str | None = None

    def due(self, step: int) -> bool:
        return step % self.every_steps == 0 or step == self.phase.end

    def run(self, step: int, state: RunState) -> None:
        """Exports the model, unless this step's folder exists: a resumed run may repeat steps.

        A folder that cannot be written or uploaded does not end the run.
        """
        folder = child_of(self.folder, f"step-{step}")
        if is_taken(folder, LAST_EXPORTED):
            self.log(f"step {step}: not exported again: {folder} exists")
            return
        plan, config = self.exporter.plan, self.phase.model
        surgeries, devices = plan.state_builder.surgeries_until(self.phase), plan.layout.mesh.devices.ravel()
        model, name = export_form(state.model, surgeries), f"{run_id_of(plan.config)}/step-{step}"
        merged = [MergedAdapter.of_checkpoint(name)] if adds_adapters(surgeries) else []
        card = model_card(plan, config, step, self.latest(), hardware=f"{len(devices)} x {devices[0].device_kind}")
        try:
            self.exporter.write(folder, model, config, card, merged)
        except PublishError as error:
            self.log(f"warning: step {step}: not exported: {error}. To export it later, run jaxlm convert")
        else:
            self.log(f"step {step}: exported to {folder}{self.exporter.describe(model)}")
        if self.upload is not None and is_taken(folder, LAST_EXPORTED):
            self._push(step, Path(folder), self.upload)

    def _push(self, step: int, folder: Path, repository: str) -> None:
        def push() -> str:
            try:
                return f"pushed to {upload_folder(folder, repository, f'Step {step}')}"
            except PublishError as error:
                later = f"hf upload {repository} {folder}"
                return f"NOT PUSHED: {error}. {folder} is complete. To push it later, run: {later}"

        if (outcome := main_only(push)) is not None:
            self.log(f"{'warning: ' if outcome.startswith('NOT') else ''}step {step}: {outcome}")


def model_card(
    plan: Plan,
    model: ModelConfig,
    step: int | None,
    metrics: Mapping[str, float],
    *,
    hardware: str | None = None,
    base: str | None = None,
    library: str = "transformers",
) -> ModelCard:
    """Describes what a model was trained on, how, and with what result.

    Args:
        model: config of the model that is exported.
        step: number of training steps; None for a model that jaxlm only converts.
        metrics: those of the last evaluation.
        hardware: the devices that trained it; None if unknown.
        base: name of the model that it was made from; None takes it from the configuration.
    """
    config = plan.config
    base = base or hf_name(config.initialize_from_hf, plan.data[0].tokenizer)
    title = Path(base).name if step is None and base else run_id_of(config)
    kind = type(model).__name__.removesuffix("Config")
    built = jax.eval_shape(lambda: model.build(plan.state_builder.Vocab, key=jax.random.key(0)))
    what = f"A {kind} with {parameters(built)}, {'converted' if step is None else 'trained'} with jaxlm {version('jaxlm')}."
    software = ("software", f"jaxlm {version('jaxlm')}, JAX {jax.__version__}")
    rows = [] if step is None else [*_training(plan, step), software]
    return ModelCard(
        title=title,
        library=library,
        summary=what if base is None else f"{what} It was made from `{base}`.",
        sections={
            "Training": [*rows, *([("hardware", hardware)] if hardware else [])],
            "Last evaluation": [(name, f"{value:.4f}") for name, value in metrics.items()],
        },
        base_model=None if base is None else repository_of(base),
        datasets=[] if step is None else list(dict.fromkeys(_datasets(plan.data))),
    )


def logged_evaluation(config: RunConfig, step: int) -> dict[str, float]:
    """The newest evaluation in a run's `metrics.jsonl` up to `step`; empty if the file is elsewhere."""
    log_dir = config.trainer.log_dir
    records = [] if is_url(log_dir) else read_metrics(Path(log_dir) / run_id_of(config) / METRICS)
    for record in reversed([record for record in records if record["step"] <= step]):
        if metrics := {k: v for k, v in record.items() if k.startswith(EVAL_PREFIX) and v is not None}:
            return metrics
    return {}


def _training(plan: Plan, step: int) -> Iterator[tuple[str, str]]:
    numbers = [plan.batches.of(p).examples_between(p.start, max(p.start, min(step, p.end))) for p in plan.phases]
    sequences, seq_len = sum(numbers), max(p.model.seq_len for p in plan.phases if p.start <= step)
    tokens = sum(number * phase.model.seq_len for number, phase in zip(numbers, plan.phases, strict=True))
    yield "steps", f"{step} of {plan.num_steps}"
    yield "tokens", f"{tokens:,} ({sequences:,} sequences of up to {seq_len} tokens)"
    for phase, data in zip(plan.phases, plan.data, strict=True):
        if phase.start <= step:
            yield f"phase {phase.name}", describe_phase(phase)
            yield f"data of {phase.name}", "; ".join(_sources(data))
            if (parts := describe_parts(plan.state_builder.abstract_state(phase).model)) is not None:
                one_or_all = "jaxlm runs one of them for each text, transformers all layers"
                yield f"parts of {phase.name}", f"{parts}. {one_or_all}"
    yield "precision", str(plan.precision)


def _sources(data: DataConfig) -> Iterator[str]:
    for source in data.corpus.sources:
        urls = source.config.train_urls
        others = f" and {len(urls) - _MAX_URLS} more" if len(urls) > _MAX_URLS else ""
        text = source.config.id or ", ".join(urls[:_MAX_URLS]) + others
        if text:
            yield f"{source.name}: {text}" if source.name else text


def _datasets(sections: tuple[DataConfig, ...]) -> Iterator[str]:
    for config in (source.config for section in sections for source in section.corpus.sources):
        locations = [config.id] if config.id else [url for url in config.train_urls if url.startswith(_HUB_URL)]
        names = (repository_of(url.removeprefix(_HUB_URL).partition("?")[0]) for url in locations)
        yield from (name for name in names if name is not None)


def output_folder(given: str) -> Location:
    """Returns where `--output_dir` is. Refuses a folder in a checkpoint: the checkpoint would not match its checksums."""
    folder = location_of(given)
    parents = folder.absolute().parents if isinstance(folder, Path) else ()
    if (checkpoint := next((parent for parent in parents if (parent / CURSOR).exists()), None)) is not None:
        raise ConfigError(f"--output_dir: {folder} is inside the checkpoint {checkpoint}. Choose a folder outside")
    return folder


def check_new_folder(folder: Location, last: str) -> None:
    """Raises what would end an export, before the model is loaded. Args: last: as of `check_unused`."""
    check_unused(folder, last)
    if isinstance(folder, Path):
        main_only(lambda: check_folder_writable(folder))
