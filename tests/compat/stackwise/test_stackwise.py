"""StackWise's configurations become jaxlm's: every key is translated, or noted, or refused."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxlm.core.imports import haliax as hax

import equinox as eqx
import jax
import numpy as np
import pytest
import yaml
from haliax import Axis

from jaxlm.commands.convert import main as convert
from jaxlm.compat.stackwise.from_stackwise import from_stackwise
from jaxlm.core.errors import ConfigError
from jaxlm.core.values.mask_schedule import SteppedSchedule
from jaxlm.data.tokens import TokensConfig
from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.models.diffusion import TimeEmbedding
from jaxlm.plan.load_config import load_config, run_id_of
from jaxlm.reading.yaml import load_yaml
from jaxlm.systems.progressive.preset import StackAdapters

PAGE = Path(__file__).parents[3] / "docs/howto/stackwise.md"
MODEL = {"d_model": 64, "d_ff": 128, "n_heads": 4, "vocab_size": 300, "architecture": {"blocks_per_stack": 2}}
CLM = {"training_objective": "clm"}
QLORA = {"trunk_strategy": "qlora", "max_stacks": 4, **CLM}
VARIABLE = {**QLORA, "qlora_strategy": "variable", "qlora_rank": 4}


def config(
    progressive: Mapping[str, Any] | None = None,
    training: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A small configuration with these keys."""
    return {
        "model": {**MODEL, **(model or {})},
        "data": {"dataset_path": "text.txt", **(data or {})},
        "training": {"max_steps": 10, **(training or {}), "progressive": {"max_stacks": 3, **(progressive or {})}},
    }


def optimizer(**keys: Any) -> dict[str, Any]:
    return config(training={"optimizer": keys})


def qlora(**keys: Any) -> dict[str, Any]:
    """Args: keys: of the section `training.qlora`."""
    return config(QLORA, {"qlora": keys})


def translate(folder: Path, tree: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The translation of a configuration, and its notes."""
    (folder / "config.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    resolved = from_stackwise(load_yaml(folder / "config.yaml"))
    return resolved.source.tree, "\n".join(resolved.notes)


def at(tree: Any, path: str) -> Any:
    for name in path.split("."):
        tree = tree.get(name, "missing") if isinstance(tree, Mapping) else "missing"
    return tree


FRACTIONS = [0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85]
INPUT = {"time_interpretation": "input"}
LEARNED = {**INPUT, "time_encoding_type": "learned"}
MASKS = "data.masking.time_step_mask_fractions"
TIMES = "preset.depth_times"
TRANSLATED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (config(), {"preset.type": "progressive", "preset.stacks": 3, "preset.steps_per_stack": 10, "model.num_layers": 2}),
    (config({"enabled": True, "max_stacks": 5}), {"preset.stacks": 5}),
    (
        config({"enabled": False}, model={"architecture": {"n_stacks": 3}}),
        {"preset": "missing", "model.num_layers": 12},
    ),
    (config({"target_stacks": 2}), {"preset.stacks": 2}),
    (config({"max_stacks": None}), {"preset.stacks": 12}),
    (config({"max_stacks": 0}), {"preset.stacks": 0}),  # which the preset refuses
    (config(data={"max_length": 0}), {"model.seq_len": 0}),  # which the model refuses
    (config({"max_stacks": None}, model={"architecture": {"n_stacks": 6}}), {"preset.stacks": 6}),
    (config(), {"preset.at": "append", "preset.trunk": "frozen", "preset.store": "missing", "trainer.mp": "f32"}),
    (config({"building_mode": "prepend"}), {"preset.at": "prepend"}),
    (config(QLORA), {"preset.trunk": "lora", "preset.store": "nf4", "preset.lora": {"rank": 16, "alpha": 32}}),
    (config({"new_stack_precision": "full"}), {"trainer.mp": "f32", "preset.store": "missing"}),
    (config({"new_stack_precision": "half"}), {"trainer.mp": "p=f32,c=float16", "preset.store": "missing"}),
    (config({"new_stack_precision": "bfloat16"}), {"trainer.mp": "p=f32,c=bfloat16", "preset.store": "missing"}),
    (config({"new_stack_precision": "nvfp4"}), {"trainer.mp": "f32", "preset.store": "nvfp4"}),
    (config({"new_stack_precision": "qlora"}), {"trainer.mp": "f32", "preset.store": "nf4"}),
    (config({"cache_activations": True, **CLM}), {"preset.cache": True}),
    (config({"cache_activations": False, **CLM}), {"preset.cache": "missing"}),
    (config(CLM), {"preset.cache": True}),
    (config(QLORA), {"preset.cache": "missing"}),
    (config({"cache_activations": True}), {"preset.cache": True, "data.masking.mask_replicas": 1}),
    (config({"max_stacks": 2}, {"time_step_mask_fractions": [0.1, 0.9]}), {MASKS: [0.1, 0.9]}),
    (config({"training_objective": "mlm"}), {"objective.type": "mlm", "data.masking.mode": "fixed_count"}),
    (config(CLM), {"objective.type": "next_token", "data.masking": "missing", TIMES: "missing"}),
    (config({"training_objective": "custom"}), {"objective.type": "custom", "data.type": "labeled"}),
    (
        config({"training_objective": "diffusion", **INPUT}),
        {"objective.type": "diffusion", "data.masking": {"mask_schedule_type": "linear", "mask_replicas": 1}},
    ),
    (config(INPUT), {"model.time_embedding": {"type": "sinusoidal", "dim": 512}, MASKS: FRACTIONS}),
    (config({**INPUT, "time_embedding_dim": 64}), {"model.time_embedding.dim": 64}),
    (
        config(LEARNED),
        {"model.time_embedding": {"type": "learned", "dim": 512, "num_time_steps": 10}},
    ),
    (config(), {TIMES: {"mapping": "linear", "time_per_stack": 100}, "model.time_embedding": "missing"}),
    (
        config({"stack_time_mapping": "exponential", "time_per_stack": 50}),
        {TIMES: {"mapping": "exponential", "time_per_stack": 50}},
    ),
    (
        config({"time_per_stack": 50}, {"time_step_masking": False, "time_step_mask_fractions": [0.2, 0.4, 0.9]}),
        {f"{TIMES}.time_per_stack": 50},
    ),
    (config({"stack_time_mapping": [0, 3, 7]}, {"num_time_steps": 8}), {f"{TIMES}.num_time_steps": 8}),
    (config({**QLORA, "qlora_rank": 4, "qlora_alpha": 8}), {"preset.lora": {"rank": 4, "alpha": 8}}),
    (
        config({**QLORA, "qlora_strategy": "progressive", "qlora_rank_pattern": "increasing"}),
        {"preset.lora": {"rank": 16, "alpha": 32, "rank_pattern": "increasing"}},
    ),
    (
        config({**QLORA, "qlora_strategy": "progressive", "qlora_alpha_pattern": "linear"}),
        {"preset.lora": {"rank": 16, "alpha": 32, "alpha_pattern": "linear"}},
    ),
    (
        config({**QLORA, "qlora_strategy": "variable", "qlora_configs": {0: {"rank": 8, "alpha": 16}, 2: {"rank": 2}}}),
        {"preset.lora.stacks": [{"rank": 8, "alpha": 16}, {"rank": 16, "alpha": 32}, {"rank": 2, "alpha": 32}]},
    ),
    (config({**QLORA, "qlora_enabled": True, "progressive_qlora": True}), {"preset.lora": {"rank": 24, "alpha": 48}}),
    (
        config({**QLORA, "qlora_enabled": False, "progressive_qlora": True, "progressive_qlora_rank": 4}),
        {"preset.lora": {"rank": 4, "alpha": 16}},
    ),
    (
        config({**QLORA, "progressive_qlora": True, "progressive_qlora_alpha": 4}),
        {"preset.lora": {"rank": 24, "alpha": 36}},
    ),
    (config(training={"strategy": "progressive"}), {"preset.stacks": 3}),
    (
        config({"max_stacks": None}, {"strategy": "end_to_end", "end_to_end_scope": "rackwise"}),
        {"preset": "missing", "model.num_layers": 4, "trainer.num_train_steps": 10},
    ),
    (config({**INPUT}, {"strategy": "end_to_end"}), {"model.time_embedding.type": "sinusoidal"}),
    (config(training={"max_steps": None}), {"preset.steps_per_stack": 1000}),
    (
        config(training={"max_steps": None, "epochs_per_stack": 3, "seq_len": 64}, data={"dataset_path": "tokens.npy"}),
        {"preset.steps_per_stack": 75, "data.format": {"type": "pretokenized"}},
    ),
    (config(training={"joint_tuning_steps": 5}), {"preset.polish_steps": 5}),
    (config(), {"trainer.train_batch_size": 4, "model.seq_len": 512}),
    (config(training={"batch_size": 8, "seq_len": 32}), {"trainer.train_batch_size": 8, "model.seq_len": 32}),
    (qlora(rank=4, alpha=8, enabled=True), {"preset.lora": {"rank": 4, "alpha": 8}}),
    (
        qlora(
            strategy="progressive", rank_pattern="increasing", alpha_pattern="decreasing", rank=32, progressive_rank=8
        ),
        {"preset.lora.stacks": [{"rank": 8, "alpha": 32}, {"rank": 16, "alpha": 26}, {"rank": 24, "alpha": 21}]},
    ),
    (
        qlora(strategy="variable", progressive_alpha=1, configs={1: {"rank": 2, "alpha": 4, "dropout": 0.0}}),
        {"preset.lora.stacks": [{"rank": 16, "alpha": 32}, {"rank": 2, "alpha": 4}, {"rank": 16, "alpha": 32}]},
    ),
    (config(QLORA, {"quantization_enabled": False}), {"preset.store": "missing", "preset.trunk": "lora"}),
    (config(QLORA, {"quantization_type": "fp32"}), {"preset.store": "missing"}),
    (config(training={"quantization_enabled": True}), {"preset.store": "float16"}),
    (config(training={"quantization_type": "fp4"}), {"preset.store": "nvfp4"}),
    (config(INPUT, {"num_time_steps": 2, "time_step_mask_fractions": [0.1, 0.9]}), {MASKS: [0.1, 0.9]}),
    (
        config(INPUT, {"num_time_steps": 3}),
        {
            "data.masking.num_time_steps": 3,
            "data.masking.min_mask_fraction": 0.15,
            "data.masking.max_mask_fraction": 0.9,
        },
    ),
    (
        config(
            INPUT,
            {
                "time_step_masking": False,
                "min_mask_fraction": 0.2,
                "max_mask_fraction": 0.6,
                "mask_schedule_type": "cosine",
            },
        ),
        {
            MASKS: "missing",
            "data.masking.num_time_steps": "missing",
            "data.masking.min_mask_fraction": 0.2,
            "data.masking.max_mask_fraction": 0.6,
            "data.masking.mask_schedule_type": "cosine",
        },
    ),
    (
        config(model={"mask_fraction_min": 0.3, "mask_fraction_max": 0.4}),
        {"data.masking.min_mask_fraction": 0.3, "data.masking.max_mask_fraction": 0.4},
    ),
    (config(training={"device": "cuda"}), {"trainer.require_accelerator": True}),
    (config(training={"device": "cpu"}), {"trainer.jax_config.jax_platforms": "cpu"}),
    (config(training={"gradient_checkpointing": True}), {"model.gradient_checkpointing": "full"}),
    (config(training={"cache_dir": "c"}), {"data.cache_dir": "c"}),
    (
        config(training={"checkpoint_dir": "out", "save_interval": 100, "run_id": "one"}),
        {
            "trainer.checkpointer.base_path": "out",
            "trainer.checkpointer.keep": [{"every": 100}],
            "trainer.id": "one",
        },
    ),
    (
        config(
            training={"use_wandb": True, "wandb_entity": "me", "wandb_run_name": "r", "wandb_tags": ["a"]},
        ),
        {"trainer.tracker": {"type": "wandb", "project": "stack-wise", "entity": "me", "name": "r", "tags": ["a"]}},
    ),
    (config(training={"use_wandb": True, "wandb_project": "p"}), {"trainer.tracker.project": "p"}),
    (
        optimizer(lr=2e-4, weight_decay=0.01, betas=[0.8, 0.99], eps=1e-6, optimizer_type="AdamW"),
        {
            "optimizer": {
                "type": "adam",
                "learning_rate": 2e-4,
                "weight_decay": 0.01,
                "default_weight_decay_mask": False,
                "beta1": 0.8,
                "beta2": 0.99,
                "epsilon": 1e-6,
                "lr_schedule": "constant",
                "warmup": 0,
                "max_grad_norm": None,
            }
        },
    ),
    (config(), {"optimizer.learning_rate": 1e-4, "optimizer.weight_decay": 0.1, "optimizer.beta2": 0.95}),
    (
        config(model={"n_kv_heads": 2}),
        {
            "model.hidden_dim": 64,
            "model.intermediate_dim": 128,
            "model.num_heads": 4,
            "model.num_kv_heads": 2,
            "data.vocab_size": 300,
        },
    ),
    (config(model={"attention_preset": "bert_style"}), {"model.use_bidirectional_attention": True}),
    (config(CLM, model={"attention_preset": "gpt_style"}), {"model.use_bidirectional_attention": False}),
    (config(CLM), {"model.use_bidirectional_attention": False}),
    (config({"training_objective": "custom"}), {"model.use_bidirectional_attention": True}),
    (
        config(CLM, model={"attention_preset": "custom", "attention_custom": {"attention_mode": "causal"}}),
        {"model.use_bidirectional_attention": False},
    ),
    (config(), {"model.tie_word_embeddings": True, "model.rope.theta": 10000.0, "model.type": "llama"}),
    (
        config(model={"tie_embeddings": False, "rope_theta": 5e5, "use_rope": True, "dropout": 0.0}),
        {"model.tie_word_embeddings": False, "model.rope.theta": 5e5},
    ),
    (config(model={"vocab_size": None, "tokenizer_embedding": {"family": "gpt2"}}), {"data.tokenizer": "gpt2"}),
    (config(), {"data.tokenizer": {"type": "bpe", "special_tokens": ["<|endoftext|>", "<|mask|>"]}}),
    (config(CLM), {"data.tokenizer": "missing", "data.train_urls": ["text.txt"]}),
    (config(data={"dataset_path": "hf://org/name"}), {"data.id": "org/name"}),
    (config(data={"tokenizer_path": "folder"}), {"data.tokenizer": "folder"}),
    (config(data={"max_length": 64}), {"model.seq_len": 64}),
    (config(data={"shuffle": False}), {"data.shuffle": False}),
]


def ids(rows: list[Any]) -> list[str]:
    plain = config()

    def own(tree: Mapping[str, Any], below: Any) -> dict[str, Any]:
        nested = lambda k, v: own(v, below.get(k, {})) if isinstance(v, Mapping) else v  # noqa: E731
        return {k: nested(k, v) for k, v in tree.items() if not isinstance(below, Mapping) or below.get(k) != v}

    return [f"{number}-{own(row[0], plain)}" for number, row in enumerate(rows)]


@pytest.mark.parametrize(("tree", "expected"), TRANSLATED, ids=ids(TRANSLATED))
def test_a_key_is_translated(tree: dict[str, Any], expected: dict[str, Any], tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("tokens.npy", np.zeros(6400, np.uint16))
    translated, _ = translate(tmp_path, tree)
    assert {path: at(translated, path) for path in expected} == expected


# (plain, the same with a key that has no effect, name of the key)
NO_EFFECT: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (config(), config(qlora), next(iter(qlora)))
    for qlora in (
        {"qlora_enabled": True},
        {"qlora_rank": 8},
        {"qlora_alpha": 8},
        {"qlora_strategy": "progressive"},
        {"qlora_rank_pattern": "linear"},
        {"qlora_alpha_pattern": "linear"},
        {"qlora_configs": {0: {"rank": 8}}},
        {"progressive_qlora": True},
        {"progressive_qlora_rank": 4},
        {"progressive_qlora_alpha": 4},
    )
]
NO_EFFECT += [
    *(
        (config(training=steps), config({"time_per_stack": 10}, steps), "time_per_stack: no effect: training.")
        for steps in ({"num_time_steps": 8}, {"time_step_mask_fractions": [0.2, 0.4, 0.9]})
    ),
    (config(QLORA), config({**QLORA, "cache_activations": True}), "cache_activations: nothing is stored: the adapters"),
    (
        config({**CLM, "building_mode": "prepend"}),
        config({**CLM, "building_mode": "prepend", "cache_activations": True}),
        "cache_activations: nothing is stored: with building_mode: prepend",
    ),
    (config(), config(training={"end_to_end_scope": "stackwise"}), "end_to_end_scope"),
    (config(), config({"time_embedding_dim": 64}), "time_embedding_dim"),
    (config(), config({"time_encoding_type": "learned"}), "time_encoding_type"),
    (config(INPUT), config({**INPUT, "stack_time_mapping": "linear"}), "stack_time_mapping"),
    (config(INPUT), config({**INPUT, "time_per_stack": 10}), "time_per_stack"),
    (config(CLM), config({**CLM, "time_interpretation": "depth"}), "time_interpretation"),
    (config({"enabled": False}), config({"enabled": False, "trunk_strategy": "qlora"}), "trunk_strategy"),
    (config({"enabled": False}), config({"enabled": False, "target_stacks": 2}), "target_stacks"),
    (config({"enabled": False}), config({"enabled": False, "time_interpretation": "depth"}), "time_interpretation"),
    (config({"enabled": False}), config({"enabled": False}, {"quantization_type": "fp4"}), "quantization_type"),
    (
        config({"enabled": False}),
        config({"enabled": False}, {"joint_tuning_steps": 5}),
        "joint_tuning_steps",
    ),
    (config(), config(training={"epochs_per_stack": 3}), "epochs_per_stack: no effect: max_steps"),
    (config(), config(model={"architecture": {"n_stacks": 9, "blocks_per_stack": 2}}), "architecture.n_stacks"),
    (config(QLORA), config({**QLORA, "qlora_rank_pattern": "linear"}), "qlora_rank_pattern"),
    (config(QLORA), config({**QLORA, "qlora_alpha_pattern": "linear"}), "qlora_alpha_pattern"),
    (config(QLORA), config({**QLORA, "qlora_configs": {0: {"rank": 8}}}), "qlora_configs"),
    (
        config({**VARIABLE, "target_stacks": 3, "qlora_configs": {0: {"rank": 8}}}),
        config({**VARIABLE, "target_stacks": 3, "qlora_configs": {stack: {"rank": 8 >> stack} for stack in (0, 2, 3)}}),
        "qlora_configs: 2, 3: no effect: of 3 stacks, only the first 2 become part of the trunk",
    ),
    (qlora(rank=4), qlora(rank=4, lr=1e-5), "qlora.lr"),
    (qlora(rank=4), qlora(rank=4, mixed_precision=True), "qlora.mixed_precision"),
    (qlora(rank=4), qlora(rank=4, progressive_enabled=True), "qlora.progressive_enabled"),
    (config(), config(training={"qlora": {"rank": 4}}), "training.qlora"),
    (
        config(INPUT),
        config(INPUT, {"time_step_mask_fractions": FRACTIONS, "min_mask_fraction": 0.2}),
        "min_mask_fraction",
    ),
    (
        config({"training_objective": "diffusion"}),
        config({"training_objective": "diffusion"}, {"time_step_mask_fractions": FRACTIONS}),
        "time_step_mask_fractions",
    ),
    *(
        (config(CLM), config(CLM, {key: value}), key)
        for key, value in {"time_step_masking": True, "num_time_steps": 8, "max_mask_fraction": 0.5}.items()
    ),
    *(
        (config(), config(training={key: value}), key)
        for key, value in {
            "current_block_lr": 1e-4,
            "mask_token_id": 103,
            "fine_tune_mode": "clm",
            "cache_mode": "stack",
            "save_stacks": True,
            "save_rack": True,
            "log_interval": 10,
            "wandb_notes": "x",
        }.items()
    ),
    *((optimizer(lr=1.0), optimizer(lr=1.0, **{key: 0.9}), key) for key in ("momentum", "dampening", "nesterov")),
    *(
        (config(), config(model={key: value}), key)
        for key, value in {
            "freeze_up_proj": True,
            "special_mask_id": 4,
            "attention_custom": {"mla_rq": 4},
            "tokenizer_embedding": {"family": "gpt2"},
        }.items()
    ),
    *(
        (config(), config(model={"tokenizer_embedding": {key: value}}), key)
        for key, value in {"embedding_option": "embed_tokens", "freeze_embeddings": True}.items()
    ),
    *(
        (config(), config(data={key: value}), key)
        for key, value in {"num_samples": 128, "padding": "right", "num_workers": 2, "pin_memory": True}.items()
    ),
    (
        {**config(), "data": {}},
        {**config(), "data": {"use_dummy_data": True}},
        "use_dummy_data",
    ),
    (config(training={"seq_len": 64}), config(training={"seq_len": 64}, data={"max_length": 512}), "max_length"),
]


@pytest.mark.parametrize(("plain", "tree", "key"), NO_EFFECT, ids=[f"{n}-{row[2]}" for n, row in enumerate(NO_EFFECT)])
def test_a_key_without_an_effect_is_noted(plain: dict[str, Any], tree: dict[str, Any], key: str, tmp_path: Path):
    expected, before = translate(tmp_path, plain)
    translated, notes = translate(tmp_path, tree)
    assert notes.count(key) > before.count(key)
    assert translated == expected


NAN = [
    (section, key, float("nan"))
    for section, keys in {
        "progressive": ("max_stacks", "target_stacks", "qlora_rank", "time_per_stack"),
        "training": ("batch_size", "seq_len", "max_steps", "save_interval", "min_mask_fraction"),
        "model": ("d_model", "vocab_size", "rope_theta", "dropout"),
        "data": ("max_length", "num_workers"),
    }.items()
    for key in keys
]
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "target": (config({"target_stacks": 9}), r"progressive\.target_stacks: 9 given, above max_stacks: 3"),
    "mode": (config({"building_mode": "insert"}), r"building_mode: 'insert' given\. Allowed: append, prepend"),
    "fp8": (config({"new_stack_precision": "nf_fp8"}), r"new_stack_precision: 'nf_fp8' given"),
    "stored whole": (
        config({"enabled": False, "new_stack_precision": "qlora"}),
        r"new_stack_precision: 'qlora' given, but weights that train",
    ),
    "mapping": (config({"stack_time_mapping": "custom"}), r"stack_time_mapping: 'custom' given\. A function can only"),
    "no adapters": (
        config({**QLORA, "qlora_enabled": False}),
        r"qlora_enabled: false given with trunk_strategy: qlora",
    ),
    "two sections": (
        config({**QLORA, "qlora_rank": 4}, {"qlora": {"rank": 4}}),
        r"qlora_rank: given together with the section training\.qlora",
    ),
    "disabled": (qlora(enabled=False), r"qlora\.enabled: false given with trunk_strategy: qlora"),
    "dropout": (qlora(dropout=0.1), r"qlora\.dropout: 0\.1 given, which jaxlm cannot do"),
    "configs": (
        config({**QLORA, "qlora_strategy": "variable", "qlora_configs": {"a": 1}}),
        r"qlora_configs: \{'a': 1\} given, a mapping such as",
    ),
    "configs key": (
        config({**QLORA, "qlora_strategy": "variable", "qlora_configs": {0: {"r": 1}}}),
        r"qlora_configs\.0\.r: no such key",
    ),
    "scope": (
        config(training={"strategy": "end_to_end", "end_to_end_scope": "stackwise"}),
        r"end_to_end_scope: 'stackwise' given.*strategy: progressive",
    ),
    "epochs": (
        config(training={"max_steps": None, "epochs_per_stack": 2}),
        r"epochs_per_stack: 2 given, but the number of sequences in the text is not known here\. Set max_steps",
    ),
    "fp8 trunk": (config(training={"quantization_type": "fp8"}), r"quantization_type: 'fp8' given"),
    "two stores": (
        config({"new_stack_precision": "qlora"}, {"quantization_type": "fp16"}),
        r"quantization_type: fp16 given, but progressive\.new_stack_precision is qlora",
    ),
    "polish": (
        config(QLORA, {"joint_tuning_steps": 3}),
        r"training\.joint_tuning_steps: 3 given.*trunk_strategy: qlora stores the trunk as nf4.*quantization_enabled: false",
    ),
    "polish of a stored trunk": (
        config(CLM, {"joint_tuning_steps": 3, "quantization_type": "fp16"}),
        r"training\.joint_tuning_steps: 3 given.*quantization_type: fp16 stores the trunk as float16",
    ),
    "no store": (
        config({"new_stack_precision": "qlora"}, {"quantization_enabled": False}),
        r"quantization_enabled: false given, but progressive\.new_stack_precision: qlora stores",
    ),
    "fractions": (
        config(INPUT, {"num_time_steps": 3, "time_step_mask_fractions": [0.5]}),
        r"num_time_steps: 3 given, but time_step_mask_fractions has 1",
    ),
    "a number of fractions": (
        config(INPUT, {"time_step_mask_fractions": 0.5}),
        r"time_step_mask_fractions: 0\.5 given, a list of fractions expected",
    ),
    "rows": (
        config(LEARNED, {"num_time_steps": 1000, "mask_schedule_type": "cosine"}),
        r"num_time_steps: fractions of 1000 time steps given, of which two are only 9\.3e-07 apart, with .*: learned",
    ),
    "exponential": (
        config(INPUT, {"mask_schedule_type": "exponential", "min_mask_fraction": 0}),
        r"min_mask_fraction: 0 given, but an exponential schedule begins above 0",
    ),
    "steps": (config(INPUT, {"num_time_steps": 2.5}), r"num_time_steps: 2\.5 given, a positive integer expected"),
    "two fractions": (
        config(training={"min_mask_fraction": 0.1}, model={"mask_fraction_min": 0.2}),
        r"min_mask_fraction: 0\.1 given, but model\.mask_fraction_min is 0\.2",
    ),
    "sgd": (optimizer(optimizer_type="SGD"), r"optimizer_type: 'SGD' given"),
    "betas": (optimizer(betas=0.9), r"betas: 0\.9 given, a list of two numbers"),
    "params": (optimizer(custom_params={"amsgrad": True}), r"custom_params: .* given, which jaxlm cannot do"),
    "groups": (optimizer(groups=[{"lr": 1.0}]), r"optimizer\.groups: .* given, which jaxlm cannot do"),
    "use groups": (optimizer(use_groups=True), r"use_groups: true given"),
    "latent": (config(model={"attention_preset": "mlgka"}), r"attention_preset: 'mlgka' given, which jaxlm cannot do"),
    "custom latent": (
        config(model={"attention_preset": "custom", "attention_custom": {"attention_type": "mla"}}),
        r"attention_custom\.attention_type: 'mla' given",
    ),
    "kernel": (
        config(model={"attention_preset": "custom", "attention_custom": {"kernel_type": "laplacian"}}),
        r"kernel_type: 'laplacian' given",
    ),
    "leak": (
        config(CLM, model={"attention_preset": "bert_style"}),
        r"attention_preset: bidirectional attention given with training_objective: clm, but then a token would see",
    ),
    "causal": (
        config(model={"attention_preset": "gpt_style"}),
        r"attention_preset: causal attention given with training_objective: mlm",
    ),
    "positions": (config(model={"use_rope": False}), r"model\.use_rope: false given"),
    "model dropout": (config(model={"dropout": 0.1}), r"model\.dropout: 0\.1 given"),
    "adapter": (
        config(model={"tokenizer_embedding": {"adapter_hidden_dim": 8}}),
        r"adapter_hidden_dim: 8 given, which jaxlm cannot do",
    ),
    "no dataset": (config(data={"dataset_path": "hf://"}), r"dataset_path: 'hf://' given, hf://ORG/NAME expected"),
    "text": (config(data={"dataset_path": "a.bin"}), r"data\.dataset_path: 'a\.bin' given, which jaxlm cannot read"),
    "unknown": (config({"max_stack": 3}), r"progressive\.max_stack: no such key\. Did you mean 'max_stacks'\?"),
    "unknown of training": (config(training={"batchsize": 3}), r"training\.batchsize: no such key"),
    **{
        f"nan {section} {key}": (
            config(**{section: {key: value}}),
            rf"{key}: nan given, a finite number expected",
        )
        for section, key, value in NAN
    },
    "dropout of a frozen trunk": (
        config({**CLM}, {"qlora": {"dropout": 0.1}}),
        r"qlora\.dropout: 0\.1 given, which jaxlm cannot do",
    ),
    "unknown of a frozen trunk": (config(training={"qlora": {"r": 1}}), r"qlora\.r: no such key"),
    **{
        f"no effect: {key}": (config({**CLM, **progressive}, training), rf"{key}: 'x' given{problem}")
        for progressive, training, key, problem in (
            ({"time_interpretation": "x"}, {}, "time_interpretation", r"\. Allowed: input, depth"),
            ({"qlora_rank_pattern": "x"}, {}, "qlora_rank_pattern", r"\. Allowed: constant, .* linear"),
            ({"progressive_qlora": "x"}, {}, "progressive_qlora", ", true or false expected"),
            ({"qlora_rank": "x"}, {}, "qlora_rank", ", a number expected"),
            ({}, {"num_time_steps": "x"}, "num_time_steps", ", a number expected"),
            ({}, {"qlora": {"rank": "x"}}, "qlora.rank", ", a number expected"),
        )
    },
    "a flag": (config({"enabled": "yes"}), r"enabled: 'yes' given\. Allowed: true, false$"),
    "a flag as a choice": (config({"building_mode": True}), r"building_mode: true given\. Allowed: append, prepend$"),
    "a list": (config({"training_objective": ["clm"]}), r"training_objective: \['clm'\] given\. Allowed: mlm, clm"),
    "a long value": (
        config(training={"device": ["cuda"] * 5000}),
        r"device: \['cuda', .{180,200}\.\.\. \(40,000 characters\) given\. Allowed: cuda, cpu, auto$",
    ),
    "nan betas": (optimizer(betas=[float("nan"), 0.9]), r"optimizer\.betas: nan given, a finite number expected"),
    "infinite rate": (optimizer(lr=float("inf")), r"optimizer\.lr: inf given, a finite number expected"),
    "section": ({**config(), "trainer": {}}, r"trainer: no such key.* Known here: model, training, data"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_jaxlm_cannot_do_is_refused(name: str, tmp_path: Path):
    tree, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message) as caught:
        translate(tmp_path, tree)
    assert re.match(r"\S+config\.yaml:\d+: ", str(caught.value))


@pytest.mark.slow
@pytest.mark.parametrize(
    "training",
    [
        {},
        {"num_time_steps": 100},
        {"num_time_steps": 20, "mask_schedule_type": "cosine", "max_mask_fraction": 1.0},
        {"time_step_mask_fractions": [0.3, 0.29, 1]},
    ],
    ids=str,
)
def test_a_learned_time_embedding_tells_all_steps_apart(training: dict[str, Any], tmp_path: Path):
    translate(tmp_path, config(LEARNED, training))
    run = load_config(["--config_path", str(tmp_path / "config.yaml")], "jaxlm.train")
    assert isinstance(run.data, TokensConfig)
    assert isinstance(run.model, LlamaConfig)
    assert run.data.masking is not None
    assert run.model.time_embedding is not None
    schedule, Embed = run.data.masking.schedule, Axis("embed", 4)
    assert isinstance(schedule, SteppedSchedule)
    embedding = TimeEmbedding.init(run.model.time_embedding, Embed, key=jax.random.key(0))
    out = hax.random.normal(jax.random.key(1), embedding.out_proj.weight.axes)
    embedding = eqx.tree_at(lambda one: one.out_proj.weight, embedding, out)
    fractions = hax.named(np.array(schedule.by_step, np.float32), "batch")
    assert len(np.unique(embedding(fractions).array, axis=0)) == fractions.size


def test_neither_targets_nor_variables(tmp_path: Path):
    translate(tmp_path, config(CLM))
    for option in ("--target", "--vars.n"):
        with pytest.raises(ConfigError, match=option):
            load_config(["--config_path", str(tmp_path / "config.yaml"), option, "1"], "jaxlm.train")


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (
            {"model": {"type": "llama"}, "training": {"num_train_steps": 3}},
            r"model\.type: no such key.*This file was read as",
        ),
        (
            {"optimizer": {"learning_rate": 0.1}, "training": {"num_train_steps": 3}},
            r"training: no such key.*\btrainer\b",
        ),
        ({"vars": {"n": 3}, "training": {"num_train_steps": "${n}"}}, r"training: no such key.*\btrainer\b"),
    ],
)
def test_a_misspelt_section_of_jaxlm_is_told_from_stackwise(tree: dict[str, Any], message: str, tmp_path: Path):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(ConfigError, match=message):
        load_config(["--config_path", str(tmp_path / "config.yaml")], "jaxlm.train")


@pytest.mark.parametrize(
    "tree",
    [
        config(CLM),
        config({**CLM, "cache_activations": True}),
        config({"cache_activations": True}),
        config({"training_objective": "diffusion", "building_mode": "prepend"}),
        config(INPUT),
        config(QLORA),
        qlora(rank=4),
    ],
)
def test_the_translation_is_a_configuration(tree: dict[str, Any], tmp_path: Path):
    translate(tmp_path, tree)
    run = load_config(["--config_path", str(tmp_path / "config.yaml"), "--preset.steps_per_stack", "7"], "jaxlm.train")
    assert [phase.num_train_steps for phase in run.phases or []] == [7] * tree["training"]["progressive"]["max_stacks"]


def test_sums_of_adapters_follow_the_patterns(tmp_path: Path):
    keys = {"qlora_strategy": "progressive", "qlora_rank_pattern": "decreasing", "qlora_alpha_pattern": "linear"}
    tree, _ = translate(tmp_path, config({**QLORA, **keys, "progressive_qlora": True}))
    stacks = StackAdapters(16, 32.0, "decreasing", "linear")
    expected = [{"rank": stacks.of(k).rank + 8, "alpha": stacks.of(k).alpha + 16} for k in range(3)]
    assert tree["preset"]["lora"]["stacks"] == expected


# The guide's YAML, word for word.
PROGRESSIVE = """
training:
  progressive:
    enabled: true
    trunk_strategy: "frozen"        # "frozen" or "qlora"
    new_stack_precision: "full"    # "full", "half", "bfloat16", "qlora"
    cache_activations: true
    
    # Simplified QLoRA configuration
    qlora_enabled: true             # Enable QLoRA adapters on all stacks
    qlora_rank: 16                  # QLoRA rank for all stacks
    qlora_alpha: 32                 # QLoRA alpha parameter
    qlora_strategy: "simplified"    # "simplified" - add LoRA to all stacks
    
    max_stacks: 12
    building_mode: "append"          # "append" or "prepend"
    
    # Time interpretation
    time_interpretation: "depth"     # "input" or "depth"
    time_embedding_dim: 512        # For time-as-input
    time_encoding_type: "sinusoidal" # "sinusoidal" or "learned"
    stack_time_mapping: "linear"    # "linear", "exponential", "custom"
    time_per_stack: 100            # For time-as-depth
"""
DUAL_LORA = """
training:
  progressive:
    # Stack LoRA parameters (added to each stack)
    qlora_enabled: true
    qlora_rank: 16
    qlora_alpha: 32
    
    # Progressive QLoRA parameters (added to trunk when new stacks are added)
    progressive_qlora: true
    progressive_qlora_rank: 8
    progressive_qlora_alpha: 16
"""


def test_the_page_starts_runs_of_different_names(tmp_path: Path):
    page = PAGE.read_text()
    (tmp_path / "config.yaml").write_text(page.split("```yaml\n")[1].split("```")[0])
    lines = re.findall(r"^jaxlm train --config_path config\.yaml(.*)", page, re.MULTILINE)
    runs = [
        load_config(["--config_path", str(tmp_path / "config.yaml"), *line.split()], "jaxlm.train") for line in lines
    ]
    assert [run_id_of(run) for run in runs] == ["config", "short"]
    assert [run.trainer.train_batch_size for run in runs] == [8, 16]


@pytest.mark.parametrize("text", [PROGRESSIVE, DUAL_LORA], ids=["progressive", "dual LoRA"])
def test_the_yaml_of_the_guide(text: str, tmp_path: Path):
    (tmp_path / "config.yaml").write_text(text)
    tree = from_stackwise(load_yaml(tmp_path / "config.yaml")).source.tree
    times = {"mapping": "linear", "time_per_stack": 100}
    assert tree["preset"] == {
        "type": "progressive",
        "stacks": 12,
        "steps_per_stack": 1000,
        "at": "append",
        "trunk": "frozen",
        "depth_times": times,
        "cache": True,
    }


@pytest.mark.parametrize(
    ("progressive", "said"),
    [
        ({}, "--preset.depth_times.order training --preset.depth_times.mapping '[0, 100, 200]' for that"),
        ({"building_mode": "prepend", "time_per_stack": 7}, "set --preset.depth_times.mapping '[0, 7, 14]' for that"),
        ({"stack_time_mapping": [0, 1, 2]}, "set --preset.depth_times.order training for that"),
    ],
    ids=["append", "prepend", "list"],
)
def test_a_note_says_how_time_as_depth_differs_from_the_guide(progressive, said, tmp_path: Path):
    """Its options give the guide's time step k x time_per_stack to stack k in the order of training."""
    _, notes = translate(tmp_path, config({"max_stacks": 3, **progressive}))
    assert said in notes
    if progressive:
        return
    options = said.removesuffix(" for that").replace("'", "").replace("[0, 100, 200]", "[0,100,200]").split()
    run = load_config(["--config_path", str(tmp_path / "config.yaml"), *options], "jaxlm.train")
    times = [phase.data.masking.times for phase in run.phases or []]
    assert times == [[step / 299] * 2 for step in (0, 100, 200)]


def tables() -> dict[str, set[str]]:
    """Heading of the page -> the keys in the first column of its table."""
    sections = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    keys = {}
    for section in sections:
        cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
        keys[section.partition("\n")[0]] = {key for cell in cells for key in re.findall(r"`(\w+)`", cell)}
    return keys


def keys_with_rows() -> dict[str, set[str]]:
    """Heading of the page -> the keys that this file translates, notes or refuses."""
    trees = [row[0] for row in TRANSLATED] + [row[1] for row in NO_EFFECT] + [row[0] for row in REFUSED.values()]
    found = {}
    for heading, path in {
        "Keys of `training.progressive`": "training.progressive",
        "Keys of `training`": "training",
        "Keys of `training.optimizer`": "training.optimizer",
        "Keys of `model`": "model",
        "Keys of `data`": "data",
    }.items():
        sections = [at(tree, path) for tree in trees]
        found[heading] = {key for section in sections if isinstance(section, Mapping) for key in section}
    found["Keys of `training`"] -= {"progressive", "batchsize"}
    found["Keys of `training.progressive`"] -= {"max_stack"}
    return found


def test_the_page_has_every_key_and_every_key_has_a_row():
    documented = tables()
    assert {heading: documented[heading] for heading in keys_with_rows()} == keys_with_rows()


def test_the_command_writes_a_configuration_of_the_same_run(tmp_path: Path, capsys):
    translate(tmp_path, config({**QLORA, "qlora_strategy": "progressive"}, {"run_id": "one"}))
    written = tmp_path / "run.yaml"
    assert convert(["stackwise", str(tmp_path / "config.yaml"), "--output", str(written)]) == 0
    assert "# model.attention_preset: the model is jaxlm's llama" in written.read_text()
    runs = [load_config(["--config_path", str(path)], "jaxlm.train") for path in (tmp_path / "config.yaml", written)]
    assert runs[0] == runs[1]
    for program, message in {"stackwise": "a section `training`", "caramba": "not a caramba manifest"}.items():
        assert convert([program, str(written)]) == 2
        assert message in capsys.readouterr().err
