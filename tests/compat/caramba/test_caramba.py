"""Caramba's manifests become jaxlm's configuration: every key is translated, or noted, or refused."""

import contextlib
import copy
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from jaxlm.__main__ import main
from jaxlm.compat.caramba.from_caramba import from_caramba
from jaxlm.core.errors import EXIT_CONFIG, ConfigError
from jaxlm.optim.clipping import AdaGc
from jaxlm.plan.load_config import load_config
from jaxlm.plan.plan import make_plan
from jaxlm.plan.run_config import RunConfig
from jaxlm.reading.decode import decode
from jaxlm.reading.targets import Selection
from jaxlm.reading.yaml import ConfigSource, load_yaml
from jaxlm.systems.orchestrate.portfolio import PortfolioConfig

PAGE = Path(__file__).parents[3] / "docs/howto/caramba.md"
NORM = {"type": "RMSNormLayer", "d_model": 64}
ATTENTION = {"type": "AttentionLayer", "d_model": 64, "n_heads": 4}
MLP = {"type": "SwiGLULayer", "d_model": 64, "d_ff": 128, "bias": False}
HEAD = {"type": "LinearLayer", "d_in": 64, "d_out": 300, "bias": False}
STUDENT = {**ATTENTION, "n_kv_heads": 2, "mode": "decoupled", "sem_dim": 16, "geo_dim": 32}


def residual(*layers: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "ResidualTopology", "layers": list(layers)}


def model(
    attention: Mapping[str, Any] = ATTENTION, mlp: Mapping[str, Any] = MLP, head: Mapping[str, Any] = HEAD, **keys: Any
) -> dict[str, Any]:
    unit = {"type": "NestedTopology", "repeat": 3, "layers": [residual(NORM, attention), residual(NORM, mlp)]}
    topology = {"type": "StackedTopology", "layers": [unit, NORM, *([head] if head else [])]}
    embedder = {"type": "token", "vocab_size": 300, "d_model": 64}
    return {"type": "TransformerModel", "embedder": embedder, "topology": topology, **keys}


def target(*runs: Mapping[str, Any], **keys: Any) -> dict[str, Any]:
    """A target with these runs, whose model is small."""
    system = {"ref": "system.language_model", "config": {"model": model()}}
    data = {"ref": "dataset.tokens", "config": {"path": "tokens.npy"}}
    return {"type": "experiment", "name": "one", "system": system, "data": data, "runs": list(runs), **keys}


def standard(**train: Any) -> dict[str, Any]:
    return target({"id": "train", "steps": 10, "train": {"phase": "standard", **train}}, trainer="trainer.standard")


def blockwise(**train: Any) -> dict[str, Any]:
    first = {"id": "blocks", "steps": 5, "train": {"phase": "blockwise", "teacher_ckpt": "hf://org/name", **train}}
    system = {"config": {"model": model(STUDENT)}}
    return target(first, trainer="trainer.upcycle", system=system)


def upcycle(
    *, first: Mapping[str, Any] | None = None, second: Mapping[str, Any] | None = None, **keys: Any
) -> dict[str, Any]:
    """Both phases."""
    one = blockwise()
    one["runs"][0] |= first or {}
    return {
        **one,
        "runs": [*one["runs"], {"id": "all", "steps": 9, "train": {"phase": "global"}, **(second or {})}],
        **keys,
    }


def translate(
    folder: Path, *targets: Mapping[str, Any], name: str | None = None, top: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], str]:
    """The translation of a manifest, and its notes."""
    (folder / "manifest.yml").write_text(
        yaml.safe_dump({"version": 2, "targets": list(targets), **(top or {})}, sort_keys=False)
    )
    resolved = from_caramba(load_yaml(folder / "manifest.yml"), Selection(name, {}))
    return resolved.source.tree, "\n".join(resolved.notes)


def at(tree: Any, path: str) -> Any:
    for name in path.split("."):
        tree = tree[int(name)] if isinstance(tree, list) else tree.get(name, "missing")
    return tree


ON = {"orchestrator_enabled": True}
CONTROLLER = "trainer.controllers.0"
STANDARD = [
    ({"phase": "standard"}, {"objective.type": "next_token", "trainer.num_train_steps": 10}),
    ({"batch_size": 4}, {"trainer.train_batch_size": 4}),
    ({}, {"trainer.train_batch_size": 32, "model.seq_len": 512, "optimizer.learning_rate": 3e-4}),
    ({"block_size": 64}, {"model.seq_len": 64}),
    ({"lr": 0.01}, {"optimizer.learning_rate": 0.01}),
    ({"device": "cuda"}, {"trainer.require_accelerator": True}),
    ({"device": "cpu"}, {"trainer.jax_config.jax_platforms": "cpu"}),
    ({"dtype": "float32"}, {"trainer.mp": "f32"}),
    ({"dtype": "bfloat16"}, {"trainer.mp": "p=f32,c=bfloat16"}),
    ({"dtype": "float16"}, {"trainer.mp": "p=f32,c=float16"}),
    ({"dtype": "auto"}, {"trainer.mp": "p=f32,c=bfloat16"}),
    ({}, {"optimizer.weight_decay": 0.01, "optimizer.default_weight_decay_mask": False}),
    ({"weight_decay": 0}, {"optimizer.weight_decay": 0, "optimizer.default_weight_decay_mask": "missing"}),
    ({"beta1": 0.8, "beta2": 0.99}, {"optimizer.beta1": 0.8, "optimizer.beta2": 0.99}),
    ({}, {"optimizer.beta1": 0.9, "optimizer.beta2": 0.95}),
    ({"grad_clip": 0.5}, {"optimizer.max_grad_norm": 0.5}),
    ({"grad_clip": 0.0}, {"optimizer.max_grad_norm": None}),
    ({}, {"optimizer.max_grad_norm": 1.0, "optimizer.warmup": 0, "optimizer.lr_schedule": "cosine"}),
    ({"warmup_steps": 7}, {"optimizer.warmup": 7}),
    ({"lr_schedule": "linear"}, {"optimizer.lr_schedule": "linear"}),
    ({"lr_schedule": "constant"}, {"optimizer.lr_schedule": "constant"}),
    ({"lr_schedule": "none"}, {"optimizer.lr_schedule": "constant"}),
    ({"scheduler": "linear"}, {"optimizer.lr_schedule": "linear"}),
    ({"lr": 1e-3, "min_lr": 1e-5}, {"optimizer.min_lr_ratio": pytest.approx(0.01)}),
    ({"min_lr_ratio": 0.2}, {"optimizer.min_lr_ratio": 0.2}),
    ({}, {"optimizer.min_lr_ratio": 0.0}),
    ({"use_amp": True}, {"trainer.mp": "p=f32,c=float16"}),
    ({"use_amp": True, "amp_dtype": "bfloat16"}, {"trainer.mp": "p=f32,c=bfloat16"}),
    ({"use_amp": True, "amp_dtype": "auto"}, {"trainer.mp": "p=f32,c=bfloat16"}),
    ({"use_amp": False, "amp_dtype": "bfloat16"}, {"trainer.mp": "f32"}),
    (
        {"batch_size": 4, "gradient_accumulation_steps": 8},
        {"trainer.train_batch_size": 32, "trainer.max_per_device_parallelism": 4},
    ),
    ({"activation_checkpointing": True}, {"model.gradient_checkpointing": "full"}),
    ({"activation_checkpointing": False}, {"model.gradient_checkpointing": "none"}),
    ({}, {"model.gradient_checkpointing": "missing"}),
    ({"optimizer": "lion"}, {"optimizer.type": "lion"}),
    ({"optimizer": "adamw"}, {"optimizer.type": "adam"}),
    ({"auto_resume": False}, {"trainer.load_checkpoint": False}),
    ({"distributed_strategy": "none"}, {"trainer.fsdp_axis": "missing"}),
    ({"distributed_strategy": "ddp"}, {"trainer.fsdp_axis": None}),
    ({"distributed_strategy": "fsdp"}, {"trainer.fsdp_axis": "embed"}),
    ({"distributed": {"strategy": "DDP", "ddp_find_unused_parameters": False}}, {"trainer.fsdp_axis": None}),
    ({"distributed": {"strategy": "FSDP", "fsdp_sharding_strategy": "NO_SHARD"}}, {"trainer.fsdp_axis": None}),
    ({"distributed": {"strategy": "FSDP", "fsdp_sharding_strategy": "FULL_SHARD"}}, {"trainer.fsdp_axis": "embed"}),
    ({"distributed": {"strategy": "FSDP", "fsdp_sharding_strategy": "SHARD_GRAD_OP"}}, {"trainer.fsdp_axis": "embed"}),
    (
        {"distributed": {"strategy": "fsdp", "fsdp_sharding_strategy": "HYBRID_SHARD"}},
        {"trainer.fsdp_axis": "embed", "trainer.mesh": {"axes": {"data": -1}, "dcn_axes": {"replica": -1}}},
    ),
    ({"distributed": {"strategy": "fsdp", "fsdp_mixed_precision": True}}, {"trainer.mp": "p=f32,c=bfloat16"}),
    ({"distributed": {"strategy": "ddp", "fsdp_mixed_precision": True}}, {"trainer.mp": "f32"}),
    (
        {"distributed": {"strategy": "fsdp", "fsdp_activation_checkpointing": True}},
        {"model.gradient_checkpointing": "full"},
    ),
    (
        ON,
        {
            "optimizer.type": "portfolio",
            "optimizer.telemetry": True,
            "optimizer.initial": "conservative_adamw",
            "optimizer.strategies": "missing",
            "optimizer.adagc": "missing",
            "optimizer.nowcast": "missing",
            "optimizer.beta1": "missing",
            "optimizer.max_grad_norm": "missing",
            "optimizer.learning_rate": 3e-4,
            "optimizer.weight_decay": 0.01,
            "optimizer.lr_schedule": "cosine",
            "trainer.controllers": [
                {
                    "type": "orchestrator",
                    "mode": "active",
                    "interval": 500,
                    "horizon": 100,
                    "max_spikes": 3,
                    "safety": {"strategy": "spike_resistant", "max_loss_increase": 1.5},
                }
            ],
        },
    ),
    ({**ON, "orchestrator_mode": "monitor"}, {f"{CONTROLLER}.mode": "monitor"}),
    ({**ON, "orchestrator_mode": "disabled"}, {"optimizer.type": "adam", "trainer.controllers": "missing"}),
    ({**ON, "orchestrator_decision_interval": 50}, {f"{CONTROLLER}.interval": 50}),
    ({**ON, "orchestrator_eval_horizon": 10}, {f"{CONTROLLER}.horizon": 10}),
    ({**ON, "orchestrator_max_spikes_before_switch": 2}, {f"{CONTROLLER}.max_spikes": 2}),
    ({**ON, "orchestrator_max_loss_increase": 2.0}, {f"{CONTROLLER}.safety.max_loss_increase": 2.0}),
    ({**ON, "orchestrator_safety_strategy": "sgd_escape"}, {f"{CONTROLLER}.safety.strategy": "sgd_escape"}),
    ({**ON, "orchestrator_initial_strategy": "aggressive_adamw"}, {"optimizer.initial": "aggressive_adamw"}),
    (
        {**ON, "orchestrator_use_nowcasting": True},
        {"optimizer.nowcast": {"window": 20}, f"{CONTROLLER}.nowcast": {"every": 100, "start": 200, "steps": 50}},
    ),
    (
        {**ON, "orchestrator_use_adagc": True},
        {"optimizer.adagc": {"mode": "zscore", "beta": 0.99, "threshold": 3.0, "warmup": 100}},
    ),
    (
        {**ON, "orchestrator_use_adagc": True, "orchestrator_adagc_warmup": 7, "orchestrator_adagc_threshold": 2.0},
        {"optimizer.adagc": {"mode": "zscore", "beta": 0.99, "threshold": 2.0, "warmup": 7}},
    ),
    (
        {**ON, "lr": 1e-3, "min_lr": 1e-4, "orchestrator_portfolio_base_lr": 5e-5},
        {"optimizer.learning_rate": pytest.approx(2e-3), "optimizer.min_lr_ratio": pytest.approx(0.05)},
    ),
    ({**ON, "orchestrator_fail_fast": True}, {"optimizer.type": "portfolio"}),
]


@pytest.mark.parametrize(("train", "expected"), STANDARD, ids=[str(row[0]) for row in STANDARD])
def test_a_key_of_standard_training(train: dict[str, Any], expected: dict[str, Any], tmp_path: Path):
    """The translation has these values, and is a configuration."""
    tree, _ = translate(tmp_path, standard(**train))
    assert {path: at(tree, path) for path in expected} == expected
    config = load_config(["--config_path", str(tmp_path / "manifest.yml")], "jaxlm.train")
    assert config.model.seq_len == train.get("block_size", 512)


def test_with_adagc_the_strategies_of_the_guide_are_clipped_by_one_section(tmp_path: Path):
    translate(tmp_path, standard(**ON, orchestrator_use_adagc=True))
    manifest = ["--config_path", str(tmp_path / "manifest.yml")]
    optimizer = load_config(manifest, "jaxlm.train").optimizer
    assert isinstance(optimizer, PortfolioConfig)
    assert optimizer.table == {
        name: replace(strategy, adagc=False) for name, strategy in PortfolioConfig().table.items()
    }
    assert optimizer.adagc == AdaGc(mode="zscore", beta=0.99)
    of_the_code = ["--optimizer.strategies", "caramba", "--optimizer.adagc", "null"]
    assert load_config([*manifest, *of_the_code], "jaxlm.train").optimizer.facts.learning_rate == pytest.approx(3e-5)


def test_what_an_orchestrated_run_reads_otherwise_is_noted(tmp_path: Path):
    plain, _ = translate(tmp_path, standard(**ON))
    keys = {"optimizer": "lion", "beta1": 0.8, "beta2": 0.9, "grad_clip": 0.0, "orchestrator_adagc_threshold": 2.0}
    tree, notes = translate(tmp_path, standard(**ON, **keys))
    assert tree == plain
    assert [key for key in keys if f"train.{key}: no effect " not in notes] == []
    _, notes = translate(tmp_path, standard(**ON, orchestrator_initial_strategy="lion_conservative"))
    assert "orchestrator_initial_strategy: the guide has no lion_conservative. Set optimizer.strategies: cara" in notes


def test_strategies_are_compared_on_held_out_data(tmp_path: Path):
    missing = "orchestrator_enabled: strategies are compared on held-out data"
    assert missing in translate(tmp_path, standard(**ON))[1]
    manifest = ["--config_path", str(tmp_path / "manifest.yml"), "--trainer.train_batch_size", "8"]
    with pytest.raises(ConfigError, match=r"on held-out data, but there is none\. Set data\.validation_urls"):
        make_plan(load_config(manifest, "jaxlm.train"), "x", 320)
    make_plan(load_config([*manifest, "--data.num_validation_sequences", "8"], "jaxlm.train"), "x", 320)
    assert missing not in translate(tmp_path, standard(**ON, orchestrator_mode="monitor"))[1]
    np.save(tmp_path / "tokens.npy", np.zeros(6400, np.uint16))
    data = {"config": {"path": str(tmp_path / "tokens.npy"), "block_size": 64}}
    defaults = {"data": {"tokenizer": "tiktoken", "val_frac": 0.05}}
    assert missing not in translate(tmp_path, {**standard(**ON), "data": data}, top={"defaults": defaults})[1]


OBJECTIVE, AUTOTUNE = "phases.0.objective", "phases.0.objective.autotune"
BLOCKWISE = [
    ({}, {OBJECTIVE: {"type": "blockwise", "teacher": "teacher", "target": "attention", "order": "parallel"}}),
    ({}, {"phases.0.trainable": ["attn\\."], "phases.0.num_train_steps": 5}),
    ({}, {"initialize_from_hf": "org/name", "use_hf_model_config": True, "data.tokenizer": "org/name"}),
    ({"teacher_ckpt": "hf://org/name@v1"}, {"refs.teacher.path": "org/name@v1", "refs.teacher.type": "hf"}),
    ({"teacher_ckpt": "some/folder"}, {"refs.teacher.path": "some/folder", "initialize_from_hf": "some/folder"}),
    ({"blockwise_distill_target": "residual"}, {f"{OBJECTIVE}.target": "residual"}),
    ({"convergence_target": 0.02}, {f"{OBJECTIVE}.convergence": {"target": 0.02, "patience": 100}}),
    (
        {"convergence_target": 0.02, "convergence_patience": 7, "convergence_max_steps": 2000},
        {f"{OBJECTIVE}.convergence": {"target": 0.02, "patience": 7, "max_steps": 2000}},
    ),
    ({"cache_teacher_outputs": True}, {f"{OBJECTIVE}.cache": True}),
    ({"blockwise_autotune_enabled": False, "blockwise_autotune_mode": "active"}, {AUTOTUNE: "missing"}),
    ({"blockwise_autotune_enabled": True, "blockwise_autotune_mode": "off"}, {AUTOTUNE: "missing"}),
    (
        {"blockwise_autotune_enabled": True},
        {AUTOTUNE: {"mode": "monitor", "patience": 100, "decay": 0.5, "spike_std": 3.0, "min_scale": 1e-6 / 3e-4}},
    ),
    (
        {
            "blockwise_autotune_enabled": True,
            "blockwise_autotune_mode": "active",
            "blockwise_autotune_plateau_patience": 9,
            "blockwise_autotune_lr_decay": 0.25,
            "blockwise_autotune_min_lr": 1e-7,
            "blockwise_autotune_log_every": 3,
            "blockwise_autotune_spike_std": 4.0,
            "blockwise_autotune_ema_decay": 0.99,
            "blockwise_autotune_window_size": 50,
            "lr": 1e-3,
        },
        {AUTOTUNE: {"mode": "active", "patience": 9, "decay": 0.25, "spike_std": 4.0, "min_scale": 1e-7 / 1e-3}},
    ),
    (
        ON,
        {
            "phases.0.optimizer.type": "portfolio",
            "phases.0.controllers.0.type": "orchestrator",
            "trainer.controllers": "missing",
        },
    ),
    ({"blockwise_grad_clip_norm": 2.0}, {"phases.0.optimizer.max_grad_norm": 2.0}),
    ({}, {"refs.teacher.sanity": {"max_loss": 20.0, "max_perplexity": 200.0, "batches": 2}}),
    (
        {"teacher_sanity_max_nll": 5.0, "teacher_sanity_max_ppl": 50.0, "teacher_sanity_batches": 4},
        {"refs.teacher.sanity": {"max_loss": 5.0, "max_perplexity": 50.0, "batches": 4}},
    ),
    ({"teacher_sanity_check": False}, {"refs.teacher.sanity": "missing"}),
    ({}, {"refs.teacher.dtype": "float32", "trainer.mp": "f32"}),
    ({"dtype": "float32", "use_amp": True}, {"refs.teacher.dtype": "float32"}),
    ({"dtype": "float16"}, {"refs.teacher.dtype": "float16"}),
    ({"dtype": "auto"}, {"refs.teacher.dtype": "bfloat16"}),
    ({}, {"phases.0.surgery": [{"type": "decouple", "method": "svd_joint", "sem_dim": 16, "geo_dim": 32}]}),
    ({"dba_init": "random"}, {"phases.0.surgery.0.method": "random"}),
    ({"dba_init": "fresh"}, {"phases.0.surgery.0.method": "fresh"}),
    (
        {},
        {
            "model.hidden_dim": 64,
            "model.num_layers": 3,
            "model.num_heads": 4,
            "model.num_kv_heads": 2,
            "model.intermediate_dim": 128,
            "model.type": "missing",
        },
    ),
]


@pytest.mark.parametrize(("train", "expected"), BLOCKWISE, ids=[str(row[0]) for row in BLOCKWISE])
def test_a_key_of_upcycling(train: dict[str, Any], expected: dict[str, Any], tmp_path: Path):
    tree, _ = translate(tmp_path, blockwise(**train))
    assert {path: at(tree, path) for path in expected} == expected
    decode(RunConfig, ConfigSource({"phases": tree["phases"]}))  # every key exists


def test_the_phase_global_trains_all_weights_on_the_next_token(tmp_path: Path):
    tree, _ = translate(tmp_path, upcycle())
    names = [(phase["name"], phase["num_train_steps"], phase["objective"]["type"]) for phase in tree["phases"]]
    assert names == [("blocks", 5, "blockwise"), ("all", 9, "next_token")]
    assert "trainable" not in tree["phases"][1]
    assert "surgery" not in tree["phases"][1]


NO_CHANGE = [
    {"device": "mps"},
    {"compile_model": True},
    {"compile_mode": "max-autotune"},
    {"num_workers": 4},
    {"pin_memory": True},
    {"fused_optimizer": True},
    {"skip_if_final": True},
    {"telemetry_interval": 10},
    {"profile_record_shapes": True},
    {"distributed_backend": "nccl"},
    {"blockwise_truncated_forward": True},
    {"blockwise_teacher_cache_max_size": 100},
    {"blockwise_reset_lr_each_block": True},
    {"cache_teacher_outputs": True},
    {"convergence_patience": 5},
    {"blockwise_autotune_enabled": True},
    {"activation_checkpoint_threshold": 3},
    {"activation_checkpoint_threshold_mb": 3.0},
    {"teacher_rope_base": 1e4},
    {"teacher_rope_dim": 64},
    {"teacher_sanity_batch_size": 2},
    {"teacher_sanity_ref_batches": 2},
    {"distributed": {"strategy": "none", "fsdp_transformer_layer_cls": ["TransformerBlock"]}},
    {"orchestrator_enabled": False, "orchestrator_decision_interval": 500},
    {"orchestrator_enabled": True, "orchestrator_mode": "disabled", "orchestrator_eval_horizon": 100},
    {"orchestrator_mode": "monitor"},
    {"orchestrator_use_adagc": True},
]


@pytest.mark.parametrize("train", NO_CHANGE, ids=str)
def test_a_key_without_an_effect_is_noted(train: dict[str, Any], tmp_path: Path):
    plain, _ = translate(tmp_path, standard())
    tree, notes = translate(tmp_path, standard(**train))
    inner = next(reversed(train.values()))
    key = list(inner)[-1] if isinstance(inner, dict) else list(train)[-1]
    assert tree == plain
    assert f"{key}: " in notes


FULL_SHARD = {"strategy": "FSDP", "fsdp_mixed_precision": True}


@pytest.mark.parametrize(
    ("train", "followed", "note"),
    [
        (
            {"use_amp": True, "dtype": "bfloat16"},
            "float16",
            "amp_dtype: the computation is in float16, .* not as dtype",
        ),
        ({"dtype": "float32", "distributed": FULL_SHARD}, "bfloat16", r"fsdp_mixed_precision: .* as dtype \(float32\)"),
        ({"use_amp": True, "distributed": FULL_SHARD}, "float16", r"as distributed\.fsdp_mixed_precision \(bfloat16\)"),
        ({"use_amp": True, "amp_dtype": "auto", "dtype": "bfloat16"}, "bfloat16", None),
        ({"use_amp": True}, "float16", None),
        ({"distributed": FULL_SHARD}, "bfloat16", None),
    ],
    ids=str,
)
def test_of_two_keys_for_one_precision_the_note_says_which_was_followed(train, followed, note, tmp_path: Path):
    tree, notes = translate(tmp_path, standard(**train))
    assert tree["trainer"]["mp"] == f"p=f32,c={followed}"
    assert re.search(note, notes) if note else "the computation is in" not in notes


def test_what_asks_for_nothing_is_not_noted(tmp_path: Path):
    nothing = {"compile_model": False, "pin_memory": False, "num_workers": None, "convergence_target": None}
    nothing |= {"orchestrator_enabled": False, "cache_teacher_outputs": False, "activation_checkpoint_threshold": None}
    assert translate(tmp_path, standard(**nothing)) == translate(tmp_path, standard())


LLAMA = {
    "hidden_dim": 64,
    "num_heads": 4,
    "rope": {"theta": 10000.0},
    "num_layers": 3,
    "intermediate_dim": 128,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": False,
    "seq_len": 512,
}
MODELS = {
    "llama": (model(), {"type": "llama", **LLAMA}),
    "tied": (model(head={}, tied_embeddings=True), {"type": "llama", **LLAMA, "tie_word_embeddings": True}),
    "gqa": (model({**ATTENTION, "n_kv_heads": 2, "mode": "gqa"}), {"type": "llama", **LLAMA, "num_kv_heads": 2}),
    "window": (model({**ATTENTION, "local_window": 8}), {"type": "llama", **LLAMA, "sliding_window": 8}),
    "base": (model({**ATTENTION, "rope_base": 5e5}), {"type": "llama", **LLAMA, "rope": {"theta": 5e5}}),
    "narrow": (model({**ATTENTION, "attn_dim": 32}), {"type": "llama", **LLAMA, "head_dim": 8}),
    "biases": (
        model({**ATTENTION, "bias": True}, {**MLP, "bias": True}),
        {"type": "llama", **LLAMA, "attention_bias": True, "mlp_bias": True},
    ),
    "scaled": (
        model({**ATTENTION, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
        {"type": "llama", **LLAMA, "rope": {"theta": 10000.0, "type": "linear", "factor": 4.0}},
    ),
    "dba": (
        model({**STUDENT, "decoupled_gate": True, "null_attn": True}),
        {"type": "dba", **LLAMA, "num_kv_heads": 2, "sem_dim": 16, "geo_dim": 32, "gate": "static", "null_slot": True},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_stack_of_known_blocks_is_a_family(name: str, tmp_path: Path):
    system, expected = MODELS[name]
    tree, _ = translate(tmp_path, {**standard(), "system": {"config": {"model": system}}})
    assert tree["model"] == expected
    assert load_config(["--config_path", str(tmp_path / "manifest.yml")], "jaxlm.train").data.vocab_size == 300


def test_any_other_tree_is_a_topology(tmp_path: Path):
    layers = [residual(NORM, ATTENTION), {"type": "DropoutLayer", "p": 0.5}, HEAD]
    system = {"config": {"model": {"topology": {"type": "StackedTopology", "layers": layers}}}}
    tree, _ = translate(tmp_path, {**standard(), "system": system})
    attention = {"type": "attention", "mode": "standard", "num_heads": 4, "rope": {"theta": 10000.0}}
    inner = [{"type": "rms_norm", "epsilon": 1e-5}, attention]
    nodes = [{"type": "residual", "layers": inner}, {"type": "dropout", "probability": 0.5}]
    assert tree["model"]["topology"] == {"type": "stacked", "layers": nodes}
    assert (tree["model"]["type"], tree["model"]["hidden_dim"]) == ("topology", 64)


GUIDE = {
    "Training a Small Transformer": """
version: 2
name: train_from_scratch
vars:
  d_model: 256
  n_heads: 4
  n_layers: 4
targets:
  - type: experiment
    name: baseline
    trainer: trainer.standard
    runs:
      - id: train
        mode: train
        steps: 5000
        train:
          phase: standard
          batch_size: 16
          block_size: 256
          lr: 0.001
          device: mps
          dtype: float32
          warmup_steps: 200
          lr_schedule: cosine
""",
    "Llama to DBA": """
version: 2
name: llama_to_dba
vars:
  d_model: 2048
  n_heads: 32
  n_kv_heads: 8
  sem_dim: 128    # Semantic bottleneck
  geo_dim: 256    # Geometric bottleneck
targets:
  - type: experiment
    name: upcycle
    trainer: trainer.upcycle
    system:
      ref: system.language_model
      config:
        model:
          type: TransformerModel
          topology:
            type: StackedTopology
            layers:
              - type: NestedTopology
                repeat: 16
                layers:
                  - type: ResidualTopology
                    layers:
                      - type: RMSNormLayer
                        d_model: ${d_model}
                      - type: AttentionLayer
                        d_model: ${d_model}
                        n_heads: ${n_heads}
                        n_kv_heads: ${n_kv_heads}
                        mode: decoupled      # DBA mode
                        sem_dim: ${sem_dim}
                        geo_dim: ${geo_dim}
                        rope_enabled: true
    runs:
      - id: blockwise
        train:
          phase: blockwise
          teacher_ckpt: hf://meta-llama/Llama-3.2-1B
          convergence_target: 0.02
      - id: finetune
        train:
          phase: global
          lr: 0.00005
""",
}


def test_the_guide_trains_a_small_transformer(tmp_path: Path):
    (tmp_path / "my_training.yml").write_text(GUIDE["Training a Small Transformer"])
    config = load_config(["--config_path", str(tmp_path / "my_training.yml")], "jaxlm.train")
    assert (config.trainer.id, config.trainer.num_train_steps) == ("train_from_scratch-baseline", 5000)
    assert (config.trainer.train_batch_size, config.model.seq_len, config.optimizer.warmup) == (16, 256, 200)


def test_the_guide_upcycles_llama(tmp_path: Path):
    (tmp_path / "m.yml").write_text(GUIDE["Llama to DBA"])
    tree = from_caramba(load_yaml(tmp_path / "m.yml"), Selection(None, {})).source.tree
    assert tree["refs"]["teacher"]["path"] == tree["initialize_from_hf"] == "meta-llama/Llama-3.2-1B"
    assert tree["phases"][0]["surgery"] == [{"type": "decouple", "method": "svd_joint", "sem_dim": 128, "geo_dim": 256}]
    sizes = {"hidden_dim": 2048, "num_layers": 16, "num_heads": 32, "num_kv_heads": 8, "seq_len": 512}
    assert tree["model"] == sizes
    assert tree["phases"][0]["objective"]["convergence"] == {"target": 0.02, "patience": 100}
    assert tree["phases"][1]["optimizer"]["learning_rate"] == 5e-5


ORCHESTRATED = """
phase: global
orchestrator_enabled: true
orchestrator_decision_interval: 500
orchestrator_eval_horizon: 100
orchestrator_initial_strategy: conservative_adamw
orchestrator_use_adagc: true
"""


def test_the_guide_orchestrates_one_phase(tmp_path: Path):
    tree, _ = translate(tmp_path, upcycle(second={"train": yaml.safe_load(ORCHESTRATED)}))
    first, second = tree["phases"]
    assert (first["optimizer"]["type"], second["optimizer"]["type"]) == ("adam", "portfolio")
    assert "controllers" not in {**first, **tree["trainer"]}
    (controller,) = second["controllers"]
    assert (controller["type"], controller["interval"], controller["horizon"]) == ("orchestrator", 500, 100)
    decode(RunConfig, ConfigSource({"phases": tree["phases"]}))


def test_checks_of_a_run_are_evaluations(tmp_path: Path):
    limits = {"max_mean_l1": 0.05, "max_max_l1": 0.25}
    compare = {"type": "compare", "batches": 3, "fail_fast": False, "attention": limits, "logits": limits}
    case = {"id": "a", "prompt": "2+2=", "answer": 4, "kind": "int_greedy"}
    thresholds = {"min_student_accuracy": 0.7, "max_accuracy_drop": 0.1}
    evaluated = {
        "type": "eval",
        "tokenizer": {"type": "llama"},
        "max_new_tokens": 8,
        "thresholds": thresholds,
        "cases": [case],
    }
    tree, notes = translate(tmp_path, upcycle(first={"verify": compare}, second={"verify": evaluated}))
    assert tree["evals"] == [
        {"type": "loss"},
        {**compare, "name": "compare_blocks", "phases": ["blocks"]},
        {"type": "cases", "name": "cases_all", "phases": ["all"], "max_new_tokens": 8, **thresholds, "cases": [case]},
    ]
    assert "every phase" not in notes
    assert set(map(tuple, (gate["phases"] for gate in tree["evals"][1:]))) == {(p["name"],) for p in tree["phases"]}


def test_benchmarks_are_tables(tmp_path: Path):
    benchmarks = [
        {
            "id": "ppl",
            "config": {"type": "perplexity", "dataset": "tokens.npy", "block_size": 64, "num_batches": 9},
            "repeats": 2,
        },
        {
            "id": "speed",
            "config": {
                "type": "latency",
                "prompt_lengths": [8],
                "generation_lengths": [4],
                "batch_sizes": [1, 2],
                "warmup_runs": 3,
                "timed_runs": 10,
                "use_cache": True,
                "cache_kind": "fp16",
            },
            "models": ["teacher", "student"],
        },
        {
            "config": {
                "type": "memory",
                "sequence_lengths": [8],
                "measure_peak": True,
                "quantization_modes": ["fp16", "q8", "q4"],
            }
        },
    ]
    tree, notes = translate(tmp_path, upcycle(benchmarks=benchmarks))
    latency = {"type": "latency", "prompt_tokens": [8], "new_tokens": [4], "warmup": 3, "runs": 10, "repeats": 1}
    assert tree["tables"] == [
        {"type": "perplexity", "name": "ppl", "seq_lens": [64], "batches": 9, "repeats": 2},
        {"name": "speed_0", **latency, "cache_dtypes": ["bfloat16"], "batch_size": 1},
        {"name": "speed_1", **latency, "cache_dtypes": ["bfloat16"], "batch_size": 2},
        {"type": "memory", "contexts": [8], "cache_dtypes": ["bfloat16", "int8"], "batch_size": 1},
    ]
    assert "q4 is left out" in notes


def test_defaults(tmp_path: Path):
    np.save(tmp_path / "tokens.npy", np.zeros(6400, np.uint16))
    defaults = {
        "data": {"tokenizer": "tiktoken", "val_frac": 0.05},
        "logging": {"instrument": "rich", "wandb": True, "wandb_project": "p", "wandb_entity": "", "eval_iters": 50},
        "runtime": {"save_every": 500},
    }
    data = {"config": {"path": str(tmp_path / "tokens.npy"), "block_size": 64}}
    tree, _ = translate(tmp_path, {**standard(), "data": data}, top={"defaults": defaults})
    assert tree["data"]["num_validation_sequences"] == 5  # of 100 sequences
    assert (tree["data"]["tokenizer"], tree["data"]["format"]) == ("gpt2", {"type": "pretokenized"})
    assert tree["trainer"]["tracker"] == {"type": "wandb", "project": "p"}
    assert tree["trainer"]["checkpointer"]["keep"] == [{"every": 500}]
    assert (tree["trainer"]["max_eval_batches"], tree["model"]["seq_len"]) == (50, 64)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("hf://org/name", {"id": "org/name"}),
        ("texts/a.txt", {"train_urls": ["texts/a.txt"]}),
        ("a.npy", {"train_urls": ["a.npy"], "format": {"type": "pretokenized"}}),
    ],
)
def test_where_text_comes_from(path: str, expected: dict[str, Any], tmp_path: Path):
    tree, _ = translate(tmp_path, {**standard(), "data": {"config": {"path": path}}, "system": None})
    assert tree["data"] == expected


def named(name: str, **train: Any) -> dict[str, Any]:
    return {**standard(**train), "name": name}


def test_the_target_is_the_default_entrypoint_or_the_one_named(tmp_path: Path):
    targets, top = (named("quick", lr=1.0), named("paper", lr=2.0)), {"entrypoints": {"default": "paper", "q": "quick"}}
    assert translate(tmp_path, *targets, top=top)[0]["optimizer"]["learning_rate"] == 2.0
    assert translate(tmp_path, *targets, name="q", top=top)[0]["optimizer"]["learning_rate"] == 1.0


def test_variables_keep_their_types_and_may_be_overridden(tmp_path: Path):
    text = yaml.safe_dump(
        {"version": 2, "vars": {"n": 7, "lr": 1e-4}, "targets": [standard(batch_size="${n}", lr="${lr}")]}
    )
    (tmp_path / "m.yml").write_text(text)
    config = load_config(
        ["--config_path", str(tmp_path / "m.yml"), "--vars.n", "9", "--model.seq_len", "16"], "jaxlm.train"
    )
    assert (config.trainer.train_batch_size, config.optimizer.learning_rate, config.model.seq_len) == (9, 1e-4, 16)
    assert config.trainer.id == "m-one"


def test_variables_that_nothing_uses_are_noted(tmp_path: Path):
    top = {"vars": {"n": 7, "width": 64, "also": "${width}", "escaped": 1, "odd": "$${escaped}"}}
    _, notes = translate(tmp_path, standard(batch_size="${n}"), top=top)
    assert re.findall(r"vars\.(\w+): not used", notes) == ["also", "escaped", "odd"]
    (tmp_path / "m.yml").write_text(GUIDE["Training a Small Transformer"])
    notes = "\n".join(from_caramba(load_yaml(tmp_path / "m.yml"), Selection(None, {})).notes)
    assert re.findall(r"vars\.(\w+): not used", notes) == ["d_model", "n_heads", "n_layers"]


@pytest.mark.parametrize(
    "fragment",
    [
        {"targets": [standard()]},
        {"trainer": "trainer.standard", "runs": standard()["runs"]},
        {"runs": [{"id": "a", "verify": {"type": "compare"}}]},
        {"train": {"phase": "standard", "lr": 0.1}},
    ],
    ids=lambda fragment: next(iter(fragment)),
)
def test_a_part_of_a_manifest_is_told_to_say_so(fragment: dict[str, Any], tmp_path: Path, capsys):
    (tmp_path / "part.yml").write_text(yaml.safe_dump(fragment, sort_keys=False))
    with pytest.raises(
        ConfigError, match=r"part\.yml:\d+: \w+: as in caramba's manifests, .* Add version: 2 at its top"
    ):
        load_config(["--config_path", str(tmp_path / "part.yml")], "jaxlm.train")
    assert main(["train", "--config_path", str(tmp_path / "part.yml")]) == EXIT_CONFIG
    assert "Add version: 2 at its top" in capsys.readouterr().err


CONVERGING = {"convergence_target": 0.02}
TUNED = {"blockwise_autotune_enabled": True, "blockwise_autotune_mode": "active"}
BASES = {
    "standard": standard(),
    "amp": standard(use_amp=True),
    "sharded": standard(distributed=FULL_SHARD),
    "accumulated": standard(gradient_accumulation_steps=2),
    "orchestrated": standard(orchestrator_enabled=True),
    "orchestrated, adagc": standard(orchestrator_enabled=True, orchestrator_use_adagc=True),
    "monitored": standard(orchestrator_enabled=True, orchestrator_mode="monitor"),
    "disabled": standard(orchestrator_enabled=True, orchestrator_mode="disabled"),
    "blockwise": blockwise(),
    "converging": blockwise(**CONVERGING),
    "tuned": blockwise(**TUNED),
    "monitored blocks": blockwise(**{**TUNED, "blockwise_autotune_mode": "monitor"}),
}
# Key -> a value, or a tuple of values, of which one has to have an effect.
OF_THE_GUIDE: dict[str, Any] = {
    "batch_size": 3,
    "block_size": 64,
    "lr": 0.25,
    "device": "cuda",
    "dtype": ("bfloat16", "float16"),
    "cache_teacher_outputs": True,
    "convergence_target": 0.5,
    "convergence_patience": 7,
    "convergence_max_steps": 9,
    "weight_decay": 0.5,
    "beta1": 0.5,
    "beta2": 0.5,
    "grad_clip": 0.5,
    "warmup_steps": 3,
    "lr_schedule": "linear",
    "min_lr": 1e-5,
    "use_amp": True,
    "amp_dtype": "bfloat16",
    "compile_model": True,
    "gradient_accumulation_steps": 4,
    "activation_checkpointing": True,
    "activation_checkpoint_threshold": 2,
    "num_workers": 4,
    "pin_memory": True,
    "orchestrator_enabled": True,
    "orchestrator_decision_interval": 7,
    "orchestrator_eval_horizon": 7,
    "orchestrator_initial_strategy": "aggressive_adamw",
    "orchestrator_safety_strategy": "sgd_escape",
    "orchestrator_max_loss_increase": 3.0,
    "orchestrator_use_adagc": True,
    "orchestrator_use_nowcasting": True,
    "orchestrator_adagc_warmup": 7,
    "orchestrator_adagc_threshold": 7.0,
    "blockwise_autotune_enabled": True,
    "blockwise_autotune_mode": "active",
    "blockwise_autotune_plateau_patience": 7,
    "blockwise_autotune_lr_decay": 0.7,
    "blockwise_autotune_min_lr": 1e-5,
    "blockwise_autotune_log_every": 5,
}


@pytest.mark.parametrize("name", BASES)
def test_no_key_of_the_guide_is_ignored_silently(name: str, tmp_path: Path):
    """It changes the translation, adds a note, or is refused."""

    def translated(**keys: Any) -> Any:
        manifest = copy.deepcopy(BASES[name])
        manifest["runs"][0]["train"] |= keys
        return translate(tmp_path, manifest)

    plain, given = translated(), BASES[name]["runs"][0]["train"]
    silent = []
    for key, value in OF_THE_GUIDE.items():
        with contextlib.suppress(ConfigError):
            values = value if isinstance(value, tuple) else (value,)
            if all(given.get(key) != one and translated(**{key: one}) == plain for one in values):
                silent.append(key)
    assert silent == []


def run(**keys: Any) -> dict[str, Any]:
    one = standard()
    one["runs"][0] |= keys
    return one


def two(**second: Any) -> dict[str, Any]:
    return {**standard(), "runs": [*standard()["runs"], {"id": "b", "train": {"phase": "standard", **second}}]}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "fail fast": (
        standard(**ON, orchestrator_fail_fast=False),
        r"orchestrator_fail_fast: false given.*an error of the orchestrator ends the run",
    ),
    "base rate": (
        standard(**ON, orchestrator_portfolio_base_lr=0.0),
        r"portfolio_base_lr: 0\.0 given, a number above 0",
    ),
    "initial": (
        standard(**ON, orchestrator_initial_strategy="adamw"),
        r"orchestrator_initial_strategy: 'adamw' given\. Allowed: conservative_adamw, .*lion_conservative",
    ),
    "orchestrator": (
        standard(**ON, orchestrator_mode="off"),
        r"orchestrator_mode: 'off' given\. Allowed: active, monitor",
    ),
    "outputs of a teacher": (
        blockwise(**ON, cache_teacher_outputs=True),
        r"cache_teacher_outputs: true given together with orchestrator_enabled.*orchestrator_mode: monitor",
    ),
    "layers that stop": (
        blockwise(**ON, orchestrator_use_nowcasting=True),
        r"orchestrator_use_nowcasting: true given in a blockwise run",
    ),
    "nan": (standard(lr=float("nan")), r"train\.lr: nan given, a finite number expected"),
    "nan of no effect": (standard(profile_every=float("nan")), r"profile_every: nan given, a finite number expected"),
    "no dataset": (
        {**standard(), "data": {"ref": "dataset.tokens", "config": {"path": "hf://@v1"}}},
        r"path: 'hf://@v1' given, hf://ORG/NAME expected",
    ),
    "sgd": (standard(optimizer="sgd"), r"train\.optimizer: 'sgd' given"),
    "offload": (standard(offload_optimizer=True), r"offload_optimizer: true given, which jaxlm cannot do"),
    "two floors": (standard(min_lr=1e-5, min_lr_ratio=0.1), r"min_lr_ratio: given together with min_lr"),
    "floor above": (standard(lr=1e-4, min_lr=1e-3), r"min_lr: 0\.001 given, .* at most lr"),
    "two schedules": (standard(scheduler="none", lr_schedule="none"), r"scheduler: given together with lr_schedule"),
    "two clips": (blockwise(grad_clip=1.0, blockwise_grad_clip_norm=1.0), r"blockwise_grad_clip_norm: given together"),
    "schedule": (
        standard(lr_schedule="cosin"),
        r"lr_schedule: 'cosin' given\. Allowed: cosine, linear, constant, none",
    ),
    "device": (standard(device="tpu"), r"device: 'tpu' given\. Allowed: mps, cuda, cpu"),
    "auto batch": (standard(auto_batch_size=True), r"auto_batch_size: true given"),
    "profile": (standard(profile_every=10), r"profile_every: 10 given.*trainer\.profiler"),
    "threshold": (
        standard(activation_checkpointing=True, activation_checkpoint_threshold=5),
        r"activation_checkpoint_threshold: 5 given.*all of them or none",
    ),
    "reference": (blockwise(teacher_sanity_reference="hf"), r"teacher_sanity_reference: 'hf' given"),
    "detector": (
        blockwise(blockwise_autotune_enabled=True, blockwise_autotune_window_size=9),
        r"blockwise_autotune_window_size: 9 given.*set it to 50",
    ),
    "lowest rate": (
        blockwise(blockwise_autotune_enabled=True, blockwise_autotune_min_lr=1.0),
        r"blockwise_autotune_min_lr: 1\.0 given, .* at most lr",
    ),
    "offload params": (
        standard(distributed={"strategy": "fsdp", "fsdp_cpu_offload": True}),
        r"distributed\.fsdp_cpu_offload: true given",
    ),
    "strategy": (
        standard(distributed={"strategy": "tp"}),
        r"distributed\.strategy: 'tp' given\. Allowed: none, ddp, fsdp",
    ),
    "unknown": (standard(batchsize=1), r"runs\.0\.train\.batchsize: no such key\. Did you mean 'batch_size'\?"),
    "unknown of a run": (run(stepz=1), r"runs\.0\.stepz: no such key\. Did you mean 'steps'"),
    "mode": (run(mode="eval"), r"runs\.0\.mode: 'eval' given\. Allowed: train"),
    "expected": (
        run(expected={"phase": "global"}),
        r"expected\.phase: 'global' expected, but train\.phase is 'standard'",
    ),
    "lengths": (two(block_size=64), r"runs\.1\.train\.block_size: 64 follows .* 512 from \S+manifest\.yml:\d+,"),
    "two batch sizes": (two(batch_size=64), r"runs\.1\.train\.batch_size: 64 follows .* 32 from \S+manifest\.yml:\d+,"),
    "no teacher": (upcycle(first={"train": {"phase": "blockwise"}}), r"teacher_ckpt: missing"),
    "two teachers": (
        upcycle(second={"train": {"phase": "global", "teacher_ckpt": "other"}}),
        r"runs\.1\.train\.teacher_ckpt: 'other' follows",
    ),
    "teacher of nothing": (standard(teacher_ckpt="hf://a/b"), r"teacher_ckpt: .*--initialize_from_hf a/b"),
    "phase": ({**standard(), "trainer": "trainer.upcycle"}, r"phase: 'standard' given\. Allowed: blockwise, global"),
    "no system": ({**blockwise(), "system": None}, r"targets\.0\.system: missing"),
    "process": ({"type": "process", "name": "x"}, r"targets\.0\.type: 'process' given"),
    "not decoupled": ({**blockwise(), "system": {"config": {"model": model()}}}, r"mode: no decoupled attention given"),
    "layer": ({**standard(), "system": {"config": {"model": model({"type": "SSMLayer"})}}}, r"type: 'SSMLayer' given"),
    "causal": (
        {**standard(), "system": {"config": {"model": model({**ATTENTION, "is_causal": False})}}},
        r"layers\.0\.layers\.0\.layers\.1\.is_causal: false given",
    ),
    "memory": (
        {**standard(), "system": {"config": {"model": model({**ATTENTION, "mem_block": 4})}}},
        r"mem_block: 4 given",
    ),
    "temperature": (
        {**standard(), "system": {"config": {"model": model({**ATTENTION, "learned_temp": True})}}},
        r"learned_temp: true given",
    ),
    "head bias": (
        {**standard(), "system": {"config": {"model": model(head={**HEAD, "bias": True})}}},
        r"bias: true given for the head",
    ),
    "head size": (
        {**standard(), "system": {"config": {"model": model(head={**HEAD, "d_out": 301})}}},
        r"d_out: 301 given for the head",
    ),
    "data": ({**standard(), "data": {"config": {"path": "a.tokens"}}}, r"data\.config\.path: 'a\.tokens' given"),
    "data ref": ({**standard(), "data": {"ref": "dataset.images"}}, r"data\.ref: 'dataset\.images' given"),
    "two block sizes": (
        {**standard(block_size=8), "data": {"config": {"path": "a.npy", "block_size": 4}}},
        r"block_size: 8 given, but data\.config\.block_size is 4",
    ),
    "objective": ({**standard(), "objective": "objective.mse"}, r"objective: 'objective\.mse' given"),
    "check without a teacher": (run(verify={"type": "fidelity"}), r"verify\.type: 'fidelity' compares with a teacher"),
    "training split": (
        upcycle(first={"verify": {"type": "fidelity", "split": "train"}}),
        r"verify\.split: 'train' given",
    ),
    "dataset of a table": (
        {**standard(), "benchmarks": [{"config": {"type": "perplexity", "dataset": "b.npy"}}]},
        r"config\.dataset: 'b\.npy' given",
    ),
    "no cache": (
        {**standard(), "benchmarks": [{"config": {"type": "latency", "use_cache": False}}]},
        r"use_cache: false given",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_jaxlm_cannot_do_is_refused(name: str, tmp_path: Path):
    keys, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message) as caught:
        translate(tmp_path, keys)
    assert re.match(r"\S+manifest\.yml:\d+: ", str(caught.value))


def test_a_manifest_without_a_default_needs_a_target(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"--target: .* one of quick, paper"):
        translate(tmp_path, named("quick"), named("paper"))
    with pytest.raises(ConfigError, match=r"'fast' is not a target.* Known: paper, quick"):
        translate(tmp_path, named("quick"), named("paper"), name="fast")


def test_another_version_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"manifest\.yml:\d+: version: 3 given, 2 expected"):
        translate(tmp_path, standard(), top={"version": 3})


def keys_with_rows() -> set[str]:
    """The keys of `train` that this file translates, notes or refuses."""
    trains = [row[0] for row in (*STANDARD, *BLOCKWISE)] + NO_CHANGE
    trains += [one["train"] for keys, _ in REFUSED.values() for one in keys.get("runs", [])]
    return {key for train in trains for key in train}


def test_the_errors_of_a_translated_value_name_the_manifest(tmp_path: Path):
    translate(tmp_path, standard(batch_size=0))
    with pytest.raises(ConfigError, match=r"manifest\.yml:\d+: trainer\.train_batch_size: 0 given"):
        load_config(["--config_path", str(tmp_path / "manifest.yml")], "jaxlm.train")


def test_the_page_has_every_key_and_every_key_has_a_row():
    table = PAGE.read_text(encoding="utf-8").partition("## Keys of `train`")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    documented = {key for cell in cells for key in re.findall(r"`(\w+)`", cell)}
    assert documented == keys_with_rows() - {"batchsize"}
