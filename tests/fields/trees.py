"""Small configurations whose fields are changed, and the list of all fields that need a proof."""

import copy
import dataclasses
from pathlib import Path
from typing import Any

from jaxlm.controllers.early_stopping import UntilConfig
from jaxlm.controllers.reduce_on_plateau import ReduceOnPlateauConfig
from jaxlm.core.mesh import MeshConfig
from jaxlm.core.precision import PrecisionConfig, PrecisionRuleConfig
from jaxlm.data.batch_schedule import BatchSize
from jaxlm.engine.checkpoint.policy import CheckpointerConfig, KeepRule
from jaxlm.engine.watch import WatchConfig
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoder import DecoderConfig
from jaxlm.models.diffusion import TimeEmbeddingConfig
from jaxlm.models.remat import RematConfig
from jaxlm.models.rope import RotaryConfig
from jaxlm.objectives.base import ObjectiveConfig
from jaxlm.observe.completions import CompletionsConfig
from jaxlm.optim.base import OptimizerConfig
from jaxlm.optim.clipping import AdaGc
from jaxlm.optim.stored_state import EightBit
from jaxlm.optim.telemetry import Telemetry
from jaxlm.plan.context.config import ContextConfig
from jaxlm.plan.presets.base import PresetConfig
from jaxlm.plan.refs.base import RefConfig, SanityConfig
from jaxlm.plan.run_config import PhaseConfig, RunConfig
from jaxlm.plan.trainer_config import TrainerConfig
from jaxlm.surgery.base import SurgeryConfig
from jaxlm.systems.nanochat.lookup import LookupConfig
from jaxlm.systems.orchestrate.bandit import Safety
from jaxlm.systems.orchestrate.orchestrator import NowcastTrials, OrchestratorConfig, PlannedSwitch
from jaxlm.systems.orchestrate.portfolio import Nowcast
from jaxlm.systems.progressive.depth_times import DepthTimes
from jaxlm.systems.progressive.preset import StackAdapters
from jaxlm.systems.rl.advantages import AdaptiveEntropy, Advantage, Entropy, Overlong
from jaxlm.systems.rl.policy_losses import ImportanceSampling, Kl, LossAgg, OfModel, PolicyLoss
from jaxlm.systems.topology.layers import Node
from jaxlm.systems.upcycle.blockwise import Autotune, Convergence
from jaxlm.systems.upcycle.handover import HandoverConfig
from tests.small_runs import LLAMA, SIZES, Tree, run_of
from tests.small_runs import MODELS as CORE_MODELS

TEACHER = str(Path(__file__).parent / "teacher")  # only its config.json
OBJECTIVES = {
    "next_token": "llama",
    "clm": "llama",
    "custom": "llama",
    "mlm": "llama",
    "diffusion": "llama",
    "diffusion_blocks": "diffusion_blocks",
    "blockwise": "blockwise",
    "distill": "distill",
    "dpo": "dpo",
    "grpo": "grpo",
    "kto": "kto",
    "reward": "reward",
    "cached_trunk": "cached_trunk",
}
REFS = {"hf": "distill", "checkpoint": "checkpoint"}
PRESETS = {"depth_dial": "dial", "progressive": "progressive"}
_PRE_NORM = {"type": "rms_norm"}
MODELS = {
    **CORE_MODELS,
    "dba": {"type": "dba", **LLAMA, "sem_dim": 16, "geo_dim": 32},
    "nano": {"type": "nano", **SIZES, "num_layers": 4, "window_pattern": "SL"},
    "topology": {
        "type": "topology",
        "seq_len": 16,
        "hidden_dim": 32,
        "topology": {
            "type": "stacked",
            "layers": [
                {
                    "type": "nested",
                    "repeat": 2,
                    "layers": [
                        {
                            "type": "residual",
                            "layers": [
                                _PRE_NORM,
                                {"type": "attention", "num_heads": 4},
                                {"type": "dropout", "probability": 0.0},
                            ],
                        },
                        {
                            "type": "residual",
                            "layers": [{"type": "layer_norm"}, {"type": "swiglu", "intermediate_dim": 48}],
                        },
                    ],
                },
                {"type": "residual", "layers": [_PRE_NORM, {"type": "attention", "num_heads": 4, "num_kv_heads": 2}]},
                {"type": "residual", "layers": [{"type": "glu", "intermediate_dim": 40}]},
                {"type": "residual", "layers": [{"type": "mlp", "intermediate_dim": 56}]},
                {
                    "type": "residual",
                    "layers": [{"type": "moe", "intermediate_dim": 24, "num_experts": 4, "num_experts_per_token": 1}],
                },
                {"type": "residual", "layers": [{"type": "linear"}]},
                _PRE_NORM,
            ],
        },
    },
}
# Where each type of node is in that topology.
NODES = {
    "stacked": "model.topology",
    "nested": "model.topology.layers.0",
    "residual": "model.topology.layers.0.layers.0",
    "rms_norm": "model.topology.layers.0.layers.0.layers.0",
    "attention": "model.topology.layers.0.layers.0.layers.1",
    "dropout": "model.topology.layers.0.layers.0.layers.2",
    "layer_norm": "model.topology.layers.0.layers.1.layers.0",
    "swiglu": "model.topology.layers.0.layers.1.layers.1",
    "glu": "model.topology.layers.2.layers.0",
    "mlp": "model.topology.layers.3.layers.0",
    "moe": "model.topology.layers.4.layers.0",
    "linear": "model.topology.layers.5.layers.0",
}
ROPES: dict[str, Tree] = {
    "default": {},
    "proportional": {"partial_rotary_factor": 0.5},
    "linear": {},
    "dynamic": {"original_max_position_embeddings": 8},
    "llama3": {"original_max_position_embeddings": 8},
    "yarn": {"theta": 16.0, "beta_fast": 8.0, "original_max_position_embeddings": 256},
    "longrope": {
        "original_max_position_embeddings": 8,
        "short_factor": [1.0, 1.0, 1.0, 1.0],
        "long_factor": [2.0, 2.0, 2.0, 2.0],
    },
}


def tree(model: str = "llama", **sections: Any) -> Tree:
    """The configuration of a small run."""
    return run_of(MODELS[model], **sections)


def merged(base: Any, over: Any) -> Any:
    """`base` with the keys of `over` replaced, at any depth."""
    if isinstance(base, dict) and isinstance(over, dict):
        return base | {key: merged(base.get(key), value) for key, value in over.items()}
    return over


def _trainer(**keys: Any) -> Tree:
    return merged(tree(), {"trainer": keys})


BASES: dict[str, Tree] = {
    **{name: tree(name) for name in MODELS},
    **{f"rope {name}": merged(tree(), {"model": {"rope": {"type": name, **keys}}}) for name, keys in ROPES.items()},
    "stages": _trainer(train_batch_size=[{"start": 0, "value": 16}, {"start": 20, "value": 32}]),
    "watch": _trainer(watch={"interval": 2, "watch_targets": ["grads"]}),
    "keep": _trainer(checkpointer={"keep": [{"every": 10}]}),
    "until": _trainer(until={"metric": "eval/loss", "below": 3.0}) | {"data": {"validation_urls": ["held-out.txt"]}},
    "plateau": _trainer(controllers=[{"type": "reduce_on_plateau", "metric": "train/loss"}]),
    "handover": _trainer(controllers=[{"type": "handover"}])
    | {
        "objective": {"type": "distill", "teacher_loss": True},
        "refs": {"teacher": {"type": "hf", "path": TEACHER}},
    },
    "orchestrator": _trainer(controllers=[{"type": "orchestrator"}])
    | {"optimizer": {"type": "portfolio", "telemetry": True}, "data": {"validation_urls": ["held-out.txt"]}},
    "telemetry": tree(optimizer={"telemetry": {"window": 64}}),
    "portfolio": tree(optimizer={"type": "portfolio", "nowcast": {}}),
    "lora": tree(phases=[{"name": "p", "surgery": [{"type": "lora", "rank": 2, "target": "attn|mlp"}]}]),
    "quantize": tree(phases=[{"name": "p", "surgery": [{"type": "quantize"}], "trainable": ["norm"]}]),
    "split_at": merged(
        tree(phases=[{"name": "p", "surgery": [{"type": "split_at", "layer": 1}]}]), {"model": {"num_layers": 3}}
    ),
    "drop_layers": merged(
        tree(phases=[{"name": "p", "surgery": [{"type": "drop_layers", "layers": [1]}]}]), {"model": {"num_layers": 3}}
    ),
    "extend_context": tree(phases=[{"name": "p", "surgery": [{"type": "extend_context", "seq_len": 32}]}]),
    "grow": tree(phases=[{"name": "p", "surgery": [{"type": "grow", "num_layers": 3}]}]),
    "denoisers": merged(
        tree(
            phases=[{"name": "p", "surgery": [{"type": "denoisers", "mask_fractions": [0.5, 1.0]}]}],
            data={"masking": {}},
        ),
        {"model": {"use_bidirectional_attention": True}, "objective": {"type": "diffusion"}},
    ),
    "diffusion_blocks": merged(
        tree(data={"masking": {}}, objective={"type": "diffusion_blocks", "num_blocks": 2}),
        {"model": {"use_bidirectional_attention": True}},
    ),
    "decouple": tree(phases=[{"name": "p", "surgery": [{"type": "decouple", "sem_dim": 16, "geo_dim": 16}]}]),
    "pool_kv_heads": merged(
        tree(phases=[{"name": "p", "surgery": [{"type": "pool_kv_heads", "num_kv_heads": 1}]}]),
        {"model": {"num_kv_heads": 4}},
    ),
    "interpolate": tree(
        phases=[{"name": "p", "surgery": [{"type": "interpolate", "ref": "teacher"}]}],
        refs={"teacher": {"type": "hf", "path": TEACHER}},
    ),
    "fp8": tree(phases=[{"name": "p", "surgery": [{"type": "fp8", "min_features": 16}]}]),
    "distill": tree(objective={"type": "distill"}, refs={"teacher": {"type": "hf", "path": TEACHER}}),
    "blockwise": merged(
        tree(
            objective={"type": "blockwise"},
            phases=[{"name": "p", "trainable": ["attn"]}],
            refs={"teacher": {"type": "hf", "path": TEACHER}},
        ),
        {"model": {"hidden_dim": 64}},
    ),
    "checkpoint": tree(
        objective={"type": "distill"}, refs={"teacher": {"type": "checkpoint", "path": "checkpoints/x"}}
    ),
    "dpo": tree(data={"type": "pairs"}, objective={"type": "dpo"}),
    "grpo": tree(data={"type": "groups"}, objective={"type": "grpo"}),
    "kto": tree(data={"type": "unpaired"}, objective={"type": "kto"}),
    "reward": tree(
        data={"type": "pairs"},
        objective={"type": "reward"},
        phases=[{"name": "p", "surgery": [{"type": "reward_head"}]}],
    ),
    "8bit": tree(optimizer={"state": {"type": "8bit", "min_size": 256}}),
    "adagc": tree(optimizer={"adagc": {"warmup": 7}}),
    "phases": tree(phases=[{"name": "p"}], objective={"type": "next_token"}, optimizer={"type": "adam"}),
    "lookup": merged(tree("nano"), {"model": {"lookup": {"layers": [1], "num_entries": 80}}}),
    "dial": {
        "preset": {"type": "depth_dial", "depth": 2, "aspect_ratio": 32, "head_dim": 16},
        "data": {"vocab_size": 64},
        "model": {"type": "nano", "seq_len": 16},
        "trainer": {"id": "x"},
    },
    "timed": merged(
        tree(data={"masking": {}}, objective={"type": "diffusion"}),
        {"model": {"use_bidirectional_attention": True, "time_embedding": {"dim": 10}}},
    ),
    "progressive": tree(preset={"type": "progressive", "stacks": 3, "steps_per_stack": 4}),
    "adapted stacks": tree(
        preset={"type": "progressive", "stacks": 3, "steps_per_stack": 4, "trunk": "lora", "lora": {}}
    ),
    "timed stacks": merged(
        tree(preset={"type": "progressive", "stacks": 3, "steps_per_stack": 4, "depth_times": {}}),
        {
            "model": {"use_bidirectional_attention": True},
            "objective": {"type": "mlm"},
            "data": {"masking": {"min_mask_fraction": 0.15}},
        },
    ),
    "cached_trunk": tree(
        objective={"type": "cached_trunk", "num_layers": 1},
        phases=[{"name": "p", "surgery": [{"type": "split_at", "layer": 1}], "trainable": [r"body\.1", "^head"]}],
    ),
    "remat": merged(tree(), {"model": {"gradient_checkpointing": {"modules": "mlp"}}}),
    "offload": merged(tree(), {"model": {"gradient_checkpointing": {"offload": ["residual"]}}}),
    "precision": _trainer(mp={"default": "p=f32,c=bfloat16", "rules": [{"match": "mlp", "compute": "f32"}]}),
}


def at_path(base: Tree, path: str, value: Any) -> Tree:
    """The tree with another value at a dotted path."""
    result = copy.deepcopy(base)
    *parents, last = path.replace("surgery.", "phases.0.surgery.0.").split(".")
    node: Any = result
    for key in parents:
        node = node[int(key)] if isinstance(node, list) else node.setdefault(key, {})
    node[last] = value
    return result


def _fields(base: str, prefix: str, kind: type) -> list[tuple[str, str]]:
    return [(base, f"{prefix}.{field.name}".lstrip(".")) for field in dataclasses.fields(kind)]


def all_fields() -> list[tuple[str, str]]:
    """(name of a base tree, dotted path) of every field of the configuration.

    The fields of `data`, `evals`, trackers, profiler, distributed and Ray have their own tests in this folder; those of
    optimizers other than Adam are in tests/optim.
    """
    decoder = {field.name for field in dataclasses.fields(DecoderConfig)}
    rows = [*_fields("llama", "", RunConfig), *_fields("llama", "model", DecoderConfig)]
    for name, kind in ModelConfig.get_known_choices().items():
        # Llama's relatives share the code of these fields with Llama.
        shared = decoder if issubclass(kind, DecoderConfig) else set()
        rows += [(name, path) for name, path in _fields(name, "model", kind) if path.split(".")[-1] not in shared]
    rows += _fields("lookup", "model.lookup", LookupConfig)
    for name, kind in Node.get_known_choices().items():
        rows += _fields("topology", NODES[name], kind)
    rows += _fields("timed", "model.time_embedding", TimeEmbeddingConfig)
    remat = "model.gradient_checkpointing"
    rows += [("remat" if path.endswith("modules") else "offload", path) for _, path in _fields("", remat, RematConfig)]
    for name, kind in RotaryConfig.get_known_choices().items():
        rows += _fields(f"rope {name}", "model.rope", kind)
    rows += _fields("llama", "trainer", TrainerConfig)
    rows += _fields("llama", "trainer.checkpointer", CheckpointerConfig)
    rows += _fields("keep", "trainer.checkpointer.keep.0", KeepRule)
    rows += _fields("precision", "trainer.mp", PrecisionConfig)
    rows += _fields("precision", "trainer.mp.rules.0", PrecisionRuleConfig)
    rows += _fields("llama", "trainer.mesh", MeshConfig)
    rows += _fields("llama", "trainer.context", ContextConfig)
    rows += _fields("until", "trainer.until", UntilConfig)
    rows += _fields("plateau", "trainer.controllers.0", ReduceOnPlateauConfig)
    rows += _fields("handover", "trainer.controllers.0", HandoverConfig)
    rows += _fields("orchestrator", "trainer.controllers.0", OrchestratorConfig)
    rows += _fields("orchestrator", "trainer.controllers.0.safety", Safety)
    rows += _fields("orchestrator", "trainer.controllers.0.nowcast", NowcastTrials)
    rows += _fields("orchestrator", "trainer.controllers.0.switch_at.0", PlannedSwitch)
    rows += _fields("telemetry", "optimizer.telemetry", Telemetry)
    rows += _fields("portfolio", "optimizer.nowcast", Nowcast)
    rows += _fields("llama", "trainer.completions", CompletionsConfig)
    rows += _fields("watch", "trainer.watch", WatchConfig)
    rows += _fields("stages", "trainer.train_batch_size.1", BatchSize)
    rows += _fields("llama", "optimizer", OptimizerConfig.get_known_choices()["adam"])
    rows += _fields("8bit", "optimizer.state", EightBit)
    rows += _fields("adagc", "optimizer.adagc", AdaGc)
    for name, kind in ObjectiveConfig.get_known_choices().items():
        rows += _fields(OBJECTIVES[name], "objective", kind)
    for name, registry in {"loss": PolicyLoss, "loss_agg": LossAgg, "advantage": Advantage, "kl": Kl}.items():
        for kind in registry.get_known_choices().values():
            rows += _fields("grpo", f"objective.{name}", kind)
    rows += _fields("blockwise", "objective.convergence", Convergence)
    rows += _fields("blockwise", "objective.autotune", Autotune)
    rows += _fields("grpo", "objective.old_policy", OfModel)
    rows += _fields("grpo", "objective.old_policy.importance_sampling", ImportanceSampling)
    rows += _fields("grpo", "objective.overlong", Overlong)
    rows += _fields("grpo", "objective.entropy", Entropy)
    rows += _fields("grpo", "objective.entropy.adaptive", AdaptiveEntropy)
    for name, kind in RefConfig.get_known_choices().items():
        rows += _fields(REFS[name], "refs.teacher", kind)
    rows += _fields("distill", "refs.teacher.sanity", SanityConfig)
    for name, kind in PresetConfig.get_known_choices().items():
        rows += _fields(PRESETS[name], "preset", kind)
    rows += _fields("adapted stacks", "preset.lora", StackAdapters)
    rows += _fields("timed stacks", "preset.depth_times", DepthTimes)
    for name, kind in SurgeryConfig.get_known_choices().items():
        rows += _fields(name, "surgery", kind)
    return rows + _fields("phases", "phases.0", PhaseConfig)
