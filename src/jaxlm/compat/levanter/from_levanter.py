"""Translates Levanter configurations to jaxlm keys.

Source: the configuration files that Levanter publishes, of version 1.2 and of its successor (`lib/levanter` of Marin), and
the dataclass fields that they set. Keys in Levanter's configuration guide have the same names in jaxlm and need no
translation. A key that requests nothing (null, false, empty) is dropped. A key that requests an unsupported feature is an
error that says what to do instead. Every renamed key is reported in a note.
"""

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxlm.compat.levanter.sections import data_section, harness_evals, lora_phases, supervised_sources
from jaxlm.core.errors import ConfigError
from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.models.base import ModelConfig
from jaxlm.reading.choices import choice
from jaxlm.reading.decode import chosen_class
from jaxlm.reading.foreign import ForeignKeys
from jaxlm.reading.yaml import ConfigSource

# Path in Levanter -> path in jaxlm.
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
    "trainer.mesh.batch_axis_name": "trainer.batch_axis",
    "merged_hf_save_path": "hf_save_path",
    "merged_hf_upload": "hf_upload",
}
# Path in Levanter -> why jaxlm ignores it; reported in a note.
_IGNORED = {
    "model.flash_attention_block_size": "attention chooses its block size automatically",
    "model.cross_entropy_block_size": "the loss chooses its block size automatically",
    "model.reference_checkpoint": "initialize_from_hf selects the weights",
    "trainer.profiler_perfetto_link": "open the trace in the log folder with ui.perfetto.dev",
}
# Path in Levanter -> what to do instead; reported in an error.
_UNSUPPORTED = {
    "peft_hf_upload": "push the adapters of the last checkpoint with jaxlm convert to-hf --adapters only --upload NAME",
    "peft_save_path": "convert the last checkpoint with jaxlm convert to-hf --adapters only",
    "trust_remote_code": "models are jaxlm's own classes; no code is loaded with weights",
    "optimizer.cooldown": "set optimizer.decay",
    "optimizer.haps": "set optimizer.cycles to the steps at which cycles end",
    "optimizer.lr": "set optimizer.learning_rate; this key has no effect in Levanter either",
}
_ATTENTION = {None: "auto", "default": "auto", "jax_flash": "blockwise", "nvte": "cudnn", "vanilla": "reference"}
# The only supported value of these keys in model families that do not have them.
_ALWAYS = {"use_bias": False, "use_layer_norm_weight": True, "upcast_attn": False, "tie_word_embeddings": False}
_BIASES = ("attention_bias", "mlp_bias")
"""What `use_bias` means in families that have both keys."""
_NOTHING = (None, False, {}, [])


@choice(ForeignKeys, "levanter")
class LevanterKeys(ForeignKeys):
    """Keys of Levanter's configuration guide."""

    def translate(self, source: ConfigSource) -> tuple[ConfigSource, list[str]]:
        return from_levanter(source)


def from_levanter(source: ConfigSource) -> tuple[ConfigSource, list[str]]:
    """Translates a configuration, and returns it with one note per translated key.

    Raises:
        ConfigError: a key requests an unsupported feature, or is set together with the key that it is translated to.
    """
    translation = _Translation(source)
    translation.trainer()
    translation.mesh()
    translation.finetuning()
    translation.quantization()
    translation.optimizer()
    translation.model()
    translation.supervised()
    translation.data()
    translation.evals()
    for path, instead in _UNSUPPORTED.items():
        translation.refuse(path, instead)
    for path, reason in _IGNORED.items():
        translation.ignore(path, reason)
    for old, new in _RENAMED.items():
        translation.rename(old, new)
    return ConfigSource(translation.tree, translation.marks), translation.notes


class _Translation:
    """The tree during translation. Methods do nothing if their keys are missing."""

    def __init__(self, source: ConfigSource):
        self.tree: dict[str, Any] = copy.deepcopy(source.tree)
        self.marks = dict(source.marks)
        self.notes: list[str] = []

    def take(self, path: str) -> Any:
        """Removes a key and returns its value; None if it is missing."""
        *sections, key = path.split(".")
        node: Any = self.tree
        for name in sections:
            node = node.get(name) if isinstance(node, Mapping) else None
        return node.pop(key, None) if isinstance(node, dict) else None

    def put(self, path: str, value: Any, old: str) -> None:
        *sections, key = path.split(".")
        node: Any = self.tree
        for name in sections:
            node = node.setdefault(name, {})
        if node.get(key, value) != value:
            raise self.error(old, f"same as {path}, which is also set, to {node[key]!r}. Remove one")
        node[key] = value
        self.marks[tuple(path.split("."))] = ConfigSource({}, self.marks).where(tuple(old.split(".")))

    def error(self, path: str, problem: str) -> ConfigError:
        where = ConfigSource({}, self.marks).where(tuple(path.split(".")))
        return ConfigError(f"{where + ': ' if where else ''}{path}: {problem}")

    def refuse(self, path: str, instead: str) -> None:
        value = self.take(path)
        if value not in _NOTHING:
            raise self.error(path, f"{value!r} given; jaxlm does not support this Levanter key: {instead}")

    def ignore(self, path: str, reason: str) -> None:
        if self.take(path) not in _NOTHING:
            self.notes.append(f"{path} is ignored: {reason}")

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
            self._wandb(old_tracker, trainer)
        section = trainer.get("tracker", [])
        trackers = section if isinstance(section, list) else [section]
        supported = [t for t in trackers if not (isinstance(t, dict) and t.get("type") in ("json_logger", "noop"))]
        if len(supported) < len(trackers):
            trainer["tracker"] = supported
            self.notes.append("trainer.tracker of type json_logger or noop is ignored: metrics.jsonl is always written")
        profiler = trainer.get("profiler")
        keys = ("profiler_start_step", "profiler_num_steps")
        steps = {key.removeprefix("profiler_"): self.take(f"trainer.{key}") for key in keys}
        if profiler is True:
            trainer["profiler"] = {key: value for key, value in steps.items() if value is not None}
        elif profiler is False:
            trainer["profiler"] = None

    def _wandb(self, old: Any, trainer: dict[str, Any]) -> None:
        """Adds the keys of `trainer.wandb` to the tracker of that type, or a tracker to the others."""
        if not isinstance(old, Mapping):
            raise self.error("trainer.wandb", f"{old!r} given; a section expected, such as {{project: p}}")
        self.notes.append("trainer.wandb is read as trainer.tracker")
        section = trainer.get("tracker") or []
        trackers = section if isinstance(section, list) else [section]
        is_wandb = [isinstance(tracker, Mapping) and tracker.get("type", "wandb") == "wandb" for tracker in trackers]
        if not any(is_wandb):
            new = {"type": "wandb", **old}
            trainer["tracker"] = [*trackers, new] if trackers else new
            return
        tracker = trackers[is_wandb.index(True)]
        for key, value in old.items():
            if tracker.setdefault(key, value) != value:
                raise self.error(
                    f"trainer.wandb.{key}",
                    f"{value!r} given, but trainer.tracker.{key} is {tracker[key]!r}. Remove one",
                )

    def mesh(self) -> None:
        """Drops axes of Levanter's own layers, in which a batch is flattened to tokens. jaxlm's follow the batch."""
        mappings = [f"mesh.{name}_mapping" for name in ("shared", "compute", "param")]
        mappings += ["axis_resources", "parameter_axis_resources", "compute_axis_resources"]
        for path in (f"trainer.{mapping}.{axis}" for mapping in mappings for axis in ("token", "token_repeat")):
            self.ignore(path, "the tokens of a batch are sharded as the batch is")

    def finetuning(self) -> None:
        """Translates the keys of the programs for LoRA and for supervised fine-tuning."""
        for key in ("lora", "adapter"):
            section = self.take(key)
            if section in _NOTHING or (isinstance(section, Mapping) and section.get("type") == "none"):
                continue
            self.put("phases", lora_phases(section, key, self.error), key)
            self.notes.append(f"{key} is read as phases with a surgery of type lora")
            if isinstance(self.tree.get("initialize_from_hf"), str) and "model" not in self.tree:
                self.put("use_hf_model_config", True, key)
        urls = self.take("chat_train_urls")
        if urls is None:
            return
        self.ignore("dataset_type", "chat_train_urls says it")
        names = {"messages_field": self.take("messages_field"), "chat_template": self.take("chat_template")}
        self.put("data.train_urls", urls, "chat_train_urls")
        self.put(
            "data.format", {"type": "chat", **{k: v for k, v in names.items() if v is not None}}, "chat_train_urls"
        )
        self.notes.append("chat_train_urls is read as data.train_urls with data.format of type chat")
        cache = self.tree.get("supervised_data")
        if isinstance(cache, Mapping) and cache.keys() == {"cache_dir"}:
            self.rename("supervised_data.cache_dir", "data.cache_dir")
        for old, new in (("tokenizer", "data.tokenizer"), ("max_seq_len", "model.seq_len")):
            self.rename(old, new)

    def quantization(self) -> None:
        """Translates fp8 to the only phase of a run, with a surgery."""
        section = self.take("trainer.quantization")
        if not isinstance(section, Mapping):
            if section not in _NOTHING:
                raise self.error(
                    "trainer.quantization", f"{section!r} given; a section expected, such as {{fp8: true}}"
                )
            return
        for key, value in section.items():
            if key != "fp8" and value not in _NOTHING:
                raise self.error(
                    f"trainer.quantization.{key}",
                    f"{value!r} given; jaxlm does not support this Levanter key: surgeries of type fp8 choose layers by"
                    " size and by `exclude`, and there is no int8 in training",
                )
        if section.get("fp8") in _NOTHING:
            return
        if self.tree.get("phases"):
            raise self.error(
                "trainer.quantization.fp8",
                "true given together with phases or lora. Add {type: fp8} to the surgery of the first phase instead",
            )
        surgery = {"type": "fp8", "min_features": 16}  # Levanter leaves out no layer for its size
        self.put("phases", [{"name": "train", "surgery": [surgery]}], "trainer.quantization")
        self.notes.append(
            "trainer.quantization is read as phases with a surgery of type fp8, whose scales are those of the current values,"
            " not of earlier steps"
        )

    def optimizer(self) -> None:
        """`type: cautious` is Adam with cautious updates, with a default of its own; `type: mini` is Adam-mini."""
        optimizer = self.tree.get("optimizer")
        if isinstance(optimizer, dict) and optimizer.get("type") == "mini":
            self.refuse("optimizer.nesterov", "remove it")
            optimizer["type"] = "adam-mini"
            self.notes.append("optimizer.type: mini is read as adam-mini")
        if isinstance(optimizer, dict) and optimizer.get("type") == "cautious":
            self.ignore("optimizer.gamma", "it has no effect in Levanter either")
            self.tree["optimizer"] = {"beta1": 0.95, **optimizer, "type": "adam", "cautious": True}
            self.notes.append("optimizer.type: cautious is read as adam with cautious: true")

    def model(self) -> None:
        model = self.tree.get("model")
        if not isinstance(model, dict):
            return
        reference = model.get("reference_checkpoint")
        if self.tree.get("initialize_from_hf") is True and reference:
            self.tree["initialize_from_hf"] = self.take("model.reference_checkpoint")
            self.notes.append(f"initialize_from_hf: true is read as model.reference_checkpoint, {reference}")
        backend = model.get("attn_backend", "")
        if backend is None or (isinstance(backend, str) and backend in _ATTENTION):
            model["attn_backend"] = _ATTENTION[backend]
        if self.take("model.use_flash_attention") is False:
            self.put("model.attn_backend", "reference", "model.use_flash_attention")
        if model.get("gradient_checkpointing") == "nested":
            model["gradient_checkpointing"] = "full"
            self.notes.append("model.gradient_checkpointing: nested is read as full")
        if isinstance(rope := model.get("rope"), dict):
            is_one = {key: rope.get(key) == 1 and rope[key] is not True for key in ("factor", "mscale")}
            if rope.get("type", "default") == "default" and is_one["factor"]:
                self.ignore("model.rope.factor", "1 is what the type default always has")
            if is_one["mscale"] and "mscale_all_dim" not in rope:
                del rope["mscale"]
        self._fixed_keys(model)

    def _fixed_keys(self, model: dict[str, Any]) -> None:
        family = chosen_class(ModelConfig, model, LlamaConfig())
        known = {item.name for item in dataclasses.fields(family)} if family is not None else set(_ALWAYS)
        if model.get("use_bias") is True and "use_bias" not in known and known.issuperset(_BIASES):
            model.pop("use_bias")
            for key in _BIASES:
                self.put(f"model.{key}", True, "model.use_bias")
            self.notes.append(f"model.use_bias is read as {' and '.join(_BIASES)}; RMSNorms have no biases")
        for key in sorted(model.keys() & (_ALWAYS.keys() - known)):
            setting = model.pop(key)
            if setting != _ALWAYS[key]:
                setting, always = (str(value).lower() for value in (setting, _ALWAYS[key]))
                raise self.error(
                    f"model.{key}", f"{setting} given; this model family always has {always}. Remove the key"
                )

    def supervised(self) -> None:
        supervised_data, section = self.take("supervised_data"), self.tree.get("data")
        if supervised_data in _NOTHING:
            return
        candidates = [section.get(key) for key in ("configs", "components")] if isinstance(section, dict) else []
        sources = next((candidate for candidate in candidates if isinstance(candidate, dict)), None)
        if sources is None or not isinstance(supervised_data, Mapping):
            raise self.error(
                "supervised_data",
                f"{supervised_data!r} given; sources by name expected, in addition to those of data.configs",
            )
        for name, source in supervised_sources(supervised_data, self.error).items():
            if name in sources:
                raise self.error(f"supervised_data.{name}", "data.configs has a source of the same name. Rename one")
            sources[name] = source
        self.notes.append(
            "supervised_data is read as sources of data.configs; eval/loss and eval/bpb include these sources"
        )

    def data(self) -> None:
        section = self.tree.get("data")
        if isinstance(section, dict):
            self.tree["data"], notes = data_section(section)
            self.notes.extend(notes)

    def evals(self) -> None:
        if self.take("log_entropy") not in _NOTHING:
            self._add_evals([{"type": "entropy"}], "log_entropy")
            self.notes.append("log_entropy is read as evals of type entropy")
        harness = self.take("eval_harness")
        if harness in _NOTHING:
            return self.ignore("eval_harness_steps", "eval_harness is not set")
        translated, notes = harness_evals(harness, self.error)
        self._add_evals(translated, "eval_harness")
        self.notes.append("eval_harness is read as evals of type harness")
        self.notes.extend(notes)
        self.ignore("eval_harness_steps", "all evals run every trainer.steps_per_eval steps")

    def _add_evals(self, more: list[dict[str, Any]], old: str) -> None:
        others = self.tree.pop("evals", [{"type": "loss"}])
        if not isinstance(others, list):
            raise self.error("evals", f"{others!r} given with {old}; a list expected, such as [{{type: loss}}]")
        self.put("evals", [*others, *more], old)
