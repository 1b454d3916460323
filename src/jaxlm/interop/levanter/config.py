"""Levanter's own spelling of a configuration, read as what it is called here.

Source: the configuration files that Levanter publishes, of version 1.2 and of its successor (`lib/levanter` of Marin), and
the fields of its dataclasses that they write. What the configuration guide documents needs none of this: those keys have
their names here. A key that asks for nothing (null, false, empty) is dropped; one that asks for something that is not
here is an error that says what to do instead; whatever is read by another name is said in a note.
"""

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxlm.config.decode import chosen_class
from jaxlm.config.yaml import ConfigSource
from jaxlm.core.errors import ConfigError
from jaxlm.interop.levanter.data import data_section, supervised_sources
from jaxlm.interop.levanter.evals import harness_evals
from jaxlm.models.base import ModelConfig
from jaxlm.models.families.llama import LlamaConfig

# Path there -> path here.
_RENAMED = {
    "model.max_seq_len": "model.seq_len",
    "train_length": "model.seq_len",
    "train_seq_len": "model.seq_len",
    "z_loss_weight": "objective.z_loss_weight",
    "initialize_from_checkpoint_path": "trainer.initialize_from",
    "trainer.model_ici_axis_size": "trainer.model_axis_size",
    "trainer.per_device_train_batch_size": "trainer.per_device_parallelism",
    "trainer.per_device_eval_batch_size": "trainer.per_device_eval_parallelism",
    "trainer.jax_compilation_cache_dir": "trainer.compilation_cache_dir",
}
# Path there -> why it is not needed; a note says so.
_NOT_NEEDED = {
    "model.flash_attention_block_size": "attention chooses its blocks",
    "model.cross_entropy_block_size": "the loss chooses its blocks",
    "model.reference_checkpoint": "initialize_from_hf names weights",
    "trainer.profiler_perfetto_link": "the trace lies in the log folder, for ui.perfetto.dev",
}
# Path there -> what to do instead; an error says so.
_NOT_HERE = {
    "data_seed": "trainer.seed is the one seed",
    "hf_upload": "upload the folders of hf_save_path with the hub's own tools",
    "log_entropy": "there is no such number here; leave it out",
    "trainer.quantization": "there are no quantised matrix products here; mp: p=f32,c=bfloat16 is the nearest",
    "optimizer.cooldown": "write it as optimizer.decay",
    "optimizer.haps": "write the steps at which cycles end as optimizer.cycles",
    "optimizer.lr": "it has no effect there; write optimizer.learning_rate",
}
_ATTENTION = {None: "auto", "default": "auto", "jax_flash": "blockwise", "nvte": "cudnn", "vanilla": "reference"}
# Of models whose family has no such key: what it is there, always.
_ALWAYS = {"use_bias": False, "use_layer_norm_weight": True, "upcast_attn": False, "tie_word_embeddings": False}
_NOTHING = (None, False, {}, [])


def from_levanter(source: ConfigSource) -> tuple[ConfigSource, list[str]]:
    """A configuration with Levanter's spellings replaced by those here, and a line on each that was.

    Raises:
        ConfigError: a key asks for what is not here, or stands beside the one that it means.
    """
    reading = _Reading(source)
    reading.trainer()
    reading.model()
    reading.supervised()
    reading.data()
    reading.evals()
    for path, instead in _NOT_HERE.items():
        reading.refuse(path, instead)
    for path, why in _NOT_NEEDED.items():
        reading.leave_out(path, why)
    for old, new in _RENAMED.items():
        reading.rename(old, new)
    return ConfigSource(reading.tree, reading.marks), reading.notes


class _Reading:
    """The tree while it is rewritten. Every method leaves a tree without its keys as it is."""

    def __init__(self, source: ConfigSource):
        self.tree: dict[str, Any] = copy.deepcopy(source.tree)
        self.marks = dict(source.marks)
        self.notes: list[str] = []

    def take(self, path: str) -> Any:
        """Removes a key; None where it is not there."""
        *sections, key = path.split(".")
        at: Any = self.tree
        for name in sections:
            at = at.get(name) if isinstance(at, Mapping) else None
        return at.pop(key, None) if isinstance(at, dict) else None

    def put(self, path: str, value: Any, old: str) -> None:
        *sections, key = path.split(".")
        at: Any = self.tree
        for name in sections:
            at = at.setdefault(name, {})
        if at.get(key, value) != value:
            raise self.error(old, f"it means {path}, which is given too, as {at[key]!r}. Leave one out")
        at[key] = value
        self.marks[tuple(path.split("."))] = ConfigSource({}, self.marks).where(tuple(old.split(".")))

    def error(self, path: str, problem: str) -> ConfigError:
        where = ConfigSource({}, self.marks).where(tuple(path.split(".")))
        return ConfigError(f"{where + ': ' if where else ''}{path}: {problem}")

    def refuse(self, path: str, instead: str) -> None:
        value = self.take(path)
        if value not in _NOTHING:
            raise self.error(path, f"{value!r} given, as in Levanter; that is not here: {instead}")

    def leave_out(self, path: str, why: str) -> None:
        if self.take(path) not in _NOTHING:
            self.notes.append(f"{path} is left out: {why}")

    def rename(self, old: str, new: str) -> None:
        value = self.take(old)
        if value is not None:
            self.put(new, value, old)
            self.notes.append(f"{old} is read as {new}")

    def trainer(self) -> None:
        trainer = self.tree.get("trainer")
        if not isinstance(trainer, dict):
            return
        old_tracker = self.take("trainer.wandb")
        if old_tracker is not None:
            self.put("trainer.tracker", {"type": "wandb", **old_tracker}, "trainer.wandb")
            self.notes.append("trainer.wandb is read as trainer.tracker")
        given = trainer.get("tracker", [])
        trackers = given if isinstance(given, list) else [given]
        kept = [t for t in trackers if not (isinstance(t, dict) and t.get("type") in ("json_logger", "noop"))]
        if len(kept) < len(trackers):
            trainer["tracker"] = kept
            self.notes.append(
                "trainer.tracker of type json_logger or noop is left out: metrics.jsonl is always written"
            )
        profiler = trainer.get("profiler")
        steps = {key: self.take(f"trainer.profiler_{key}") for key in ("start_step", "num_steps")}
        if profiler is True:
            trainer["profiler"] = {key: value for key, value in steps.items() if value is not None}
        elif profiler is False:
            trainer["profiler"] = None

    def model(self) -> None:
        model = self.tree.get("model")
        if not isinstance(model, dict):
            return
        reference = model.get("reference_checkpoint")
        if self.tree.get("initialize_from_hf") is True and reference:
            self.tree["initialize_from_hf"] = self.take("model.reference_checkpoint")
            self.notes.append(f"initialize_from_hf: true means model.reference_checkpoint, {reference}")
        if "attn_backend" in model and model["attn_backend"] in _ATTENTION:
            model["attn_backend"] = _ATTENTION[model["attn_backend"]]
        if self.take("model.use_flash_attention") is False:
            self.put("model.attn_backend", "reference", "model.use_flash_attention")
        if model.get("gradient_checkpointing") == "nested":
            model["gradient_checkpointing"] = "full"
            self.notes.append("model.gradient_checkpointing: nested is read as full")
        self._rope(model.get("rope"))
        self._what_families_fix(model)

    def _rope(self, rope: Any) -> None:
        if isinstance(rope, dict) and rope.get("type", "default") == "default" and rope.get("factor") == 1:
            del rope["factor"]
        if isinstance(rope, dict) and rope.get("mscale") == 1:
            del rope["mscale"]

    def _what_families_fix(self, model: dict[str, Any]) -> None:
        family = chosen_class(ModelConfig, model, LlamaConfig())
        known = {item.name for item in dataclasses.fields(family)} if family is not None else set(_ALWAYS)
        for key in sorted(model.keys() & (_ALWAYS.keys() - known)):
            given = model.pop(key)
            if given != _ALWAYS[key]:
                given, always = (str(value).lower() for value in (given, _ALWAYS[key]))
                raise self.error(f"model.{key}", f"{given} given; models of this family always have {always}")

    def supervised(self) -> None:
        given, section = self.take("supervised_data"), self.tree.get("data")
        if given in _NOTHING:
            return
        places = [section.get(key) for key in ("configs", "components")] if isinstance(section, dict) else []
        named = next((place for place in places if isinstance(place, dict)), None)
        if named is None or not isinstance(given, Mapping):
            raise self.error(
                "supervised_data", f"{given!r} given; sources by name expected, beside those of data.configs"
            )
        for name, source in supervised_sources(given, self.error).items():
            if name in named:
                raise self.error(f"supervised_data.{name}", "the name of a source of data, too. Rename one of them")
            named[name] = source
        self.notes.append(
            "supervised_data is read as sources of data.configs; eval/loss and eval/bpb are over them, too"
        )

    def data(self) -> None:
        section = self.tree.get("data")
        if isinstance(section, dict):
            self.tree["data"], notes = data_section(section)
            self.notes.extend(notes)

    def evals(self) -> None:
        given = self.take("eval_harness")
        if given in _NOTHING:
            return self.leave_out("eval_harness_steps", "there is no eval_harness")
        asked, notes = harness_evals(given, self.error)
        others = self.tree.pop("evals", [{"type": "loss"}])
        if not isinstance(others, list):
            raise self.error("evals", f"{others!r} given beside eval_harness; a list expected, as in [{{type: loss}}]")
        self.put("evals", [*others, *asked], "eval_harness")
        self.notes.append("eval_harness is read as evals of type harness")
        self.notes.extend(notes)
        self.leave_out("eval_harness_steps", "all evals run every trainer.steps_per_eval steps")
