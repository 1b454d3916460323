"""Translates StackWise's configurations (sections `model`, `training` and `data`).

Source: StackWise's guide to progressive training, and the fields of its configuration classes. Every key is translated, or
accepted with a note that says why it has no effect, or refused with what to do instead. Nothing is ignored silently.
"""

import contextlib
from collections.abc import Collection, Mapping
from typing import Any

from jaxlm.compat.section import TOKENS, Section, Translated, put_text
from jaxlm.compat.stackwise.growth import Growth, drop_growth, put_growth
from jaxlm.compat.stackwise.keys import MASK, Objective, check_kinds, put_objective
from jaxlm.compat.stackwise.masking import drop_masking, put_masking
from jaxlm.core.errors import ConfigError, shown
from jaxlm.core.safe_io import map_array
from jaxlm.reading.choices import choice
from jaxlm.reading.foreign import ForeignConfig
from jaxlm.reading.targets import Resolved, Selection, resolve
from jaxlm.reading.yaml import ConfigSource

_END_OF_TEXT = "<|endoftext|>"
_SEQ_LEN = 512


def put_data(model: Section, data: Section, training: Section, objective: Objective, out: Translated) -> int | None:
    """Writes where text comes from, the tokenizer and the length of sequences.

    Returns:
        The number of sequences; None if it cannot be told from the size of a file.
    """
    seq_len = _length(data, training, out)
    path = data.take("dataset_path")
    if path is not None:
        put_text(str(path), data, "dataset_path", out)
    data.ignore(
        "use_dummy_data",
        "no effect: nothing is learned from random tokens. Set data.dataset_path, or --data.train_urls"
        if path is None
        else "no effect: the text of dataset_path is read",
    )
    data.ignore("num_samples", "no effect: it is the number of random sequences of use_dummy_data")
    if objective.name == "custom":
        out.put("data.type", "labeled", data, "dataset_path")
    _tokenizer(model, data, objective, out)
    data.ignore("padding", "no effect: documents are packed into full sequences, and objectives leave padding out")
    data.ignore("num_workers", "no effect: a thread of each process prepares the next batches")
    data.ignore("pin_memory", "no effect: batches are copied to the devices while the step before runs")
    if (shuffles := data.choice("shuffle", (True, False))) is not None:
        out.put("data.shuffle", shuffles, data, "shuffle")
    if (folder := training.take("cache_dir")) is not None:
        out.put("data.cache_dir", folder, training, "cache_dir")
    if isinstance(path, str) and path.endswith(TOKENS) and isinstance(seq_len, int):
        with contextlib.suppress(OSError, ValueError):
            return map_array(path).size // seq_len
    return None


def _length(data: Section, training: Section, out: Translated) -> Any:
    seq_len, longest = training.take("seq_len"), data.take("max_length")
    if seq_len is None:
        seq_len = _SEQ_LEN if longest is None else longest
        out.put("model.seq_len", seq_len, data, "max_length")
        return seq_len
    if longest not in (None, seq_len):
        data.note(
            "max_length", f"no effect: sequences have training.seq_len ({seq_len}) tokens, of documents of any length"
        )
    out.put("model.seq_len", seq_len, training, "seq_len")
    return seq_len


def _tokenizer(model: Section, data: Section, objective: Objective, out: Translated) -> None:
    path, embedding = data.take("tokenizer_path"), model.section("tokenizer_embedding")
    family = embedding.take("family")
    embedding.ignore("embedding_option", "no effect: embeddings are new, and of the width d_model")
    embedding.ignore(
        "freeze_embeddings", "embeddings are new: they train with the first stack, and are frozen afterwards"
    )
    embedding.refuse("adapter_hidden_dim", "embeddings have the width of the model, so that nothing has to adapt them")
    embedding.done()
    if path is not None:
        out.put("data.tokenizer", path, data, "tokenizer_path")
    elif family is not None and not out.has("data.vocab_size"):
        out.put("data.tokenizer", family, embedding, "family")
    elif objective.hides_tokens:
        special = {"type": "bpe", "special_tokens": [_END_OF_TEXT, MASK]}
        out.put("data.tokenizer", special, data, "tokenizer_path")
    if family is not None and path is not None:
        embedding.note("family", "no effect beside data.tokenizer_path, which is the tokenizer")
    elif family is not None and out.has("data.vocab_size"):
        embedding.note("family", "no effect beside vocab_size: a tokenizer of that size is trained on the text")


_SIZES = {"d_model": "hidden_dim", "d_ff": "intermediate_dim", "n_heads": "num_heads"}
_BIDIRECTIONAL = {"bert_style": True, "efficient_gqa": True, "gpt_style": False}
_OTHER_ATTENTION = ("mla_attention", "kernel_attention", "mlgka", "full_featured")
_MODES = ("bidirectional", "causal")


def put_model(model: Section, objective: Objective, out: Translated) -> None:
    """Writes the model: a Llama, whose attention is causal or looks both ways."""
    out.put("model.type", "llama", model, "attention_preset")
    for old, new in _SIZES.items():
        if (size := model.take(old)) is not None:
            out.put(f"model.{new}", size, model, old)
    if (heads := model.take("n_kv_heads")) is not None:
        out.put("model.num_kv_heads", heads, model, "n_kv_heads")
    if (size := model.take("vocab_size")) is not None:
        out.put("data.vocab_size", size, model, "vocab_size")
    out.put("model.use_bidirectional_attention", _looks_both_ways(model, objective), model, "attention_preset")
    out.put("model.tie_word_embeddings", model.choice("tie_embeddings", (True, False), True), model, "tie_embeddings")
    if not model.choice("use_rope", (True, False), True):
        raise model.error("use_rope", "false given, but the model (llama) has no other positions. Set it to true")
    out.put("model.rope.theta", model.number("rope_theta", 10_000.0), model, "rope_theta")
    model.refuse(
        "dropout", "the model (llama) has none. Set it to 0, or regularize with optimizer.weight_decay", 0, 0.0
    )
    model.ignore(
        "freeze_up_proj",
        "up-projections train: those that are frozen would stay random. To freeze them, write `phases` with `trainable`",
    )
    model.note("attention_preset", "the model is jaxlm's llama: RMSNorm where StackWise has LayerNorm")


def _looks_both_ways(model: Section, objective: Objective) -> bool:
    preset = model.choice("attention_preset", (*_BIDIRECTIONAL, *_OTHER_ATTENTION, "custom"))
    key = "attention_preset"
    if preset in _OTHER_ATTENTION:
        raise model.error(
            key,
            f"'{preset}' given, which jaxlm cannot do: a model that grows has plain or grouped-query attention. Set"
            " bert_style or gpt_style, with n_kv_heads below n_heads for grouped queries",
        )
    if preset == "custom":
        custom = model.section("attention_custom")
        both, key = _custom(custom), "attention_custom"
        custom.done()
    else:
        model.ignore("attention_custom", "no effect without attention_preset: custom")
        both = objective.looks_both_ways is not False if preset is None else _BIDIRECTIONAL[preset]
    if objective.looks_both_ways not in (None, both):
        why = (
            "a token would see the one that it predicts. Set gpt_style"
            if both
            else "hidden tokens are predicted from both sides. Set bert_style"
        )
        raise model.error(
            key, f"{_MODES[not both]} attention given with training_objective: {objective.name}, but then {why}"
        )
    return both


def _custom(custom: Section) -> bool:
    if custom.choice("attention_type", ("mha", "mla"), "mha") == "mla":
        raise custom.error("attention_type", "'mla' given, which jaxlm cannot do in a model that grows. Set mha")
    custom.refuse("kernel_type", "attention is a softmax of dot products. Set it to linear", "linear")
    for key, what in {
        "mla_rq": "attention_type: mla",
        "mla_rkv": "attention_type: mla",
        "kernel_dim": "kernels",
    }.items():
        custom.ignore(key, f"no effect without {what}")
    return custom.choice("attention_mode", _MODES, "bidirectional") == "bidirectional"


_STEPS_PER_STACK = 1000
_OF_SGD = ("momentum", "dampening", "nesterov")


def put_training(training: Section, is_progressive: bool, num_sequences: int | None, out: Translated) -> None:
    """Writes everything but growth and masks. Args: num_sequences: of the training data, if it is known."""
    _optimizer(training.section("optimizer"), out)
    training.ignore("current_block_lr", "no effect: optimizer.lr is the learning rate of all that trains")
    batch_size = training.number("batch_size", 4)
    out.put("trainer.train_batch_size", batch_size, training, "batch_size")
    _steps(training, is_progressive, num_sequences, batch_size, out)
    _devices(training, out)
    _records(training, out)


def _optimizer(optimizer: Section, out: Translated) -> None:
    name = str(optimizer.take("optimizer_type", "AdamW"))
    if name.lower() not in ("adamw", "adam"):
        raise optimizer.error(
            "optimizer_type", f"'{name}' given, which jaxlm cannot do. Set AdamW, or --optimizer.type"
        )
    out.put("optimizer.type", "adam", optimizer, "optimizer_type")
    out.put("optimizer.learning_rate", optimizer.number("lr", 1e-4), optimizer, "lr")
    decay = optimizer.number("weight_decay", 0.1)
    out.put("optimizer.weight_decay", decay, optimizer, "weight_decay")
    if decay:
        out.put("optimizer.default_weight_decay_mask", False, optimizer, "weight_decay")  # norms decay too
        if name.lower() == "adam":
            optimizer.note("weight_decay", "decoupled from the gradient, as in AdamW")
    betas = optimizer.take("betas", [0.9, 0.95])
    if not isinstance(betas, list) or len(betas) != 2:
        raise optimizer.error("betas", f"{shown(betas)} given, a list of two numbers expected")
    for key, value in zip(("beta1", "beta2"), betas, strict=True):
        out.put(f"optimizer.{key}", value, optimizer, "betas")
    out.put("optimizer.epsilon", optimizer.number("eps", 1e-8), optimizer, "eps")
    constant: dict[str, Any] = {"lr_schedule": "constant", "warmup": 0, "max_grad_norm": None}
    for key, value in constant.items():
        out.put(f"optimizer.{key}", value, optimizer, "lr")
    for key in _OF_SGD:
        optimizer.ignore(key, f"no effect with optimizer_type: {name}")
    for key in ("custom_params", "groups"):
        optimizer.refuse(key, "write the keys of optimizer (or optimizer.groups) in the translated file")
    optimizer.refuse("use_groups", "set optimizer.groups in the translated file")
    optimizer.done()


def _steps(
    training: Section, is_progressive: bool, num_sequences: int | None, batch_size: Any, out: Translated
) -> None:
    path = "preset.steps_per_stack" if is_progressive else "trainer.num_train_steps"
    steps, epochs = training.number("max_steps"), training.number("epochs_per_stack")
    if steps is not None:
        out.put(path, steps, training, "max_steps")
        if epochs is not None:
            training.note("epochs_per_stack", f"no effect: max_steps says how long {_of(is_progressive)} trains")
    elif epochs is not None:
        if num_sequences is None:
            raise training.error(
                "epochs_per_stack",
                f"{epochs} given, but the number of sequences in the text is not known here. Set max_steps to the steps of"
                f" {_of(is_progressive)}: epochs times sequences, divided by batch_size",
            )
        out.put(path, max(1, int(epochs * num_sequences // batch_size)), training, "epochs_per_stack")
    elif is_progressive:
        training.note("max_steps", f"missing: each stack trains for {_STEPS_PER_STACK} steps. Set it, or --{path}")
        out.put(path, _STEPS_PER_STACK, training, "max_steps")
    else:
        training.note("max_steps", f"missing: the default of {path} applies. Set it, or --{path}")
    polish = training.number("joint_tuning_steps")
    if is_progressive and polish:
        out.put("preset.polish_steps", polish, training, "joint_tuning_steps")
    elif polish:
        training.note("joint_tuning_steps", "no effect: all stacks train together from the start")


def _of(is_progressive: bool) -> str:
    return "a stack" if is_progressive else "the model"


def _devices(training: Section, out: Translated) -> None:
    device = training.choice("device", ("cuda", "cpu", "auto"))
    if device == "cuda":
        out.put("trainer.require_accelerator", True, training, "device")
    elif device == "cpu":
        out.put("trainer.jax_config.jax_platforms", "cpu", training, "device")
    remat = training.choice("gradient_checkpointing", (True, False))
    if remat is not None:
        out.put("model.gradient_checkpointing", "full" if remat else "none", training, "gradient_checkpointing")


def _records(training: Section, out: Translated) -> None:
    if training.choice("cache_mode", ("stack", "rack")) is not None:
        training.note("cache_mode", "no effect: what a trunk computes is stored for each sequence")
    for key in ("save_stacks", "save_rack"):
        training.ignore(key, "no effect: a checkpoint has the whole model, and is kept at the end of each stack")
    training.ignore("log_interval", "no effect: metrics are logged in every step")
    if (every := training.take("save_interval")) is not None:
        out.put("trainer.checkpointer.keep", [{"every": every}], training, "save_interval")
    if (folder := training.take("checkpoint_dir")) is not None:
        out.put("trainer.checkpointer.base_path", folder, training, "checkpoint_dir")
    if (name := training.take("run_id")) is not None:
        out.put("trainer.id", name, training, "run_id")
    _wandb(training, out)


def _wandb(training: Section, out: Translated) -> None:
    used = training.choice("use_wandb", (True, False), False)
    keys = {"project": "project", "entity": "entity", "run_name": "name", "tags": "tags"}
    if not used:
        for key in keys:
            training.ignore(f"wandb_{key}", "no effect without use_wandb: true")
    given = {new: value for old, new in keys.items() if (value := training.take(f"wandb_{old}"))}
    training.ignore("wandb_notes", "no effect: write a comment in the YAML file instead, which wandb stores")
    if used:
        out.put("trainer.tracker", {"type": "wandb", "project": "stack-wise", **given}, training, "use_wandb")


_MODEL, _TRAINING, _DATA = "model", "training", "data"


@choice(ForeignConfig, "stackwise")
class StackWise(ForeignConfig):
    """Configurations of StackWise: jaxlm's own have a section `trainer` instead of `training`."""

    meaning = "a configuration of StackWise; those have a section `training`"

    def recognizes(self, tree: Mapping[str, Any], own: Collection[str]) -> bool:
        # A file with a key of jaxlm's that StackWise does not have is jaxlm's.
        return _TRAINING in tree and not (tree.keys() - {_MODEL, _DATA}) & set(own)

    def translate(self, source: ConfigSource, selection: Selection) -> Resolved:
        resolve(ConfigSource({}), selection, StackWise)  # it has neither targets nor variables
        try:
            return from_stackwise(source)
        except ConfigError as error:
            raise ConfigError(
                f"{error} (This file was read as StackWise's, because of its section `training`. jaxlm's own is `trainer`)"
            ) from None


def from_stackwise(source: ConfigSource) -> Resolved:
    """Translates a configuration.

    Raises:
        ConfigError: it is not valid, or asks for what jaxlm cannot do.
    """
    notes: list[str] = []
    top = Section(source, (), source.tree, notes)
    model, training, data = (top.section(name) for name in (_MODEL, _TRAINING, _DATA))
    top.done()
    progressive, architecture = training.section("progressive"), model.section("architecture")
    check_kinds((model, training, progressive, data))
    out = Translated()
    objective = put_objective(progressive, training, out)
    put_model(model, objective, out)
    num_sequences = put_data(model, data, training, objective, out)
    growth = Growth.of(training, progressive, architecture)
    if growth.is_progressive:
        put_growth(growth, training, progressive, objective, out)
    else:
        drop_growth(growth, training, progressive, out)
    put_training(training, growth.is_progressive, num_sequences, out)
    if objective.hides_tokens:
        put_masking(growth, training, progressive, model, objective, out)
    else:
        drop_masking(training, progressive, model, objective)
    for section in (architecture, progressive, model, training, data):
        section.done()
    return Resolved(out.source(), None, tuple(notes), "stackwise")
