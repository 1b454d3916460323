"""Every field matters: each one, changed, gives another plan, another program, another behaviour, or an error.

The fields are found by walking the dataclasses, so a new one without an entry here fails. Nothing below looks at the
configuration itself: only at what was made of it.
"""

import copy
import dataclasses
import functools
import json
import re
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest

from jaxlm.config.load import decode_run
from jaxlm.config.run import PhaseConfig, RunConfig
from jaxlm.config.trainer import TrainerConfig
from jaxlm.config.yaml import ConfigSource
from jaxlm.core.batch_schedule import BatchSchedule, BatchSize
from jaxlm.core.distributed import DistributedConfig
from jaxlm.core.errors import ConfigError
from jaxlm.core.mesh import MeshConfig
from jaxlm.data.config import DataConfig
from jaxlm.data.loader import train_batches
from jaxlm.engine.checkpoint.policy import CheckpointerConfig, KeepRule
from jaxlm.engine.watch import WatchConfig
from jaxlm.evals import harness
from jaxlm.evals.base import EvalConfig, EvalContext
from jaxlm.models.base import ModelConfig, vocab_axis
from jaxlm.models.decoder import DecoderConfig
from jaxlm.models.rope import RotaryConfig
from jaxlm.objectives.base import ObjectiveConfig
from jaxlm.observe.profiler import ProfileHook, ProfilerConfig
from jaxlm.observe.trackers import RunInfo, TrackerConfig, environment
from jaxlm.optim.base import OptimizerConfig
from jaxlm.run.compilation_cache import enable_compilation_cache
from jaxlm.run.compile import trace_step
from jaxlm.run.plan import make_plan
from jaxlm.run.startup import check_performance, describe
from jaxlm.surgery.base import SurgeryConfig

SIZES = {"seq_len": 16, "hidden_dim": 32, "num_layers": 2, "num_heads": 4}
LLAMA = {**SIZES, "intermediate_dim": 32, "num_kv_heads": 4}
MODELS = {
    "gpt2": {"type": "gpt2", **SIZES},
    "llama": {"type": "llama", **LLAMA},
    "mistral": {"type": "mistral", **LLAMA},
    "qwen2": {"type": "qwen2", **LLAMA, "sliding_window": 4},
    "gemma2": {"type": "gemma2", **LLAMA, "head_dim": 8},
    "gemma3": {"type": "gemma3", **LLAMA, "head_dim": 8, "sliding_window_pattern": 2},
    "gpt_neox": {"type": "gpt_neox", **LLAMA},
    "mpt": {"type": "mpt", **LLAMA},
    "olmo2": {"type": "olmo2", **LLAMA},
    "phi3": {"type": "phi3", **LLAMA},
    "flax": {"type": "flax", "seq_len": 16, "factory": "examples.nnx_model:make", "kwargs": {"width": 32, "depth": 1}},
    "mixtral": {"type": "mixtral", **LLAMA, "num_experts": 4, "num_experts_per_token": 1},
    "qwen3_moe": {"type": "qwen3_moe", **LLAMA, "head_dim": 8, "num_experts": 4, "num_experts_per_token": 2},
    "qwen3": {"type": "qwen3", **LLAMA, "head_dim": 8, "sliding_window": 4},
}
TRAINER = {"id": "x", "train_batch_size": 16, "num_train_steps": 100, "fsdp_axis": "embed"}


def tree(model: str = "llama", **sections: Any) -> dict[str, Any]:
    return {"model": dict(MODELS[model]), "trainer": dict(TRAINER), **copy.deepcopy(sections)}


ROPES = {name: tree() for name in RotaryConfig.get_known_choices()}
for name, base in ROPES.items():
    base["model"]["rope"] = {"type": name}
    if name in ("llama3", "yarn", "longrope"):
        base["model"]["rope"]["original_max_position_embeddings"] = 8
    if name == "yarn":
        base["model"]["rope"] |= {"theta": 16.0, "beta_fast": 8.0, "original_max_position_embeddings": 256}
    if name == "longrope":
        base["model"]["rope"] |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
LORA = tree(phases=[{"name": "p", "surgery": [{"type": "lora", "rank": 2, "target": "attn|mlp"}]}])
PHASES = tree(phases=[{"name": "p"}], objective={"type": "next_token"}, optimizer={"type": "adam"})

SIZED = tree()
SIZED["trainer"]["train_batch_size"] = [{"start": 0, "value": 16}, {"start": 20, "value": 32}]
WATCHED = tree()
WATCHED["trainer"]["watch"] = {"interval": 2, "watch_targets": ["grads"]}

# What to change each field to, where twice a number or the opposite would not do. A dictionary goes over the whole tree.
CHANGES: dict[str, Any] = {
    "model.gradient_checkpointing": "full",
    "model.scan_layers": False,
    "model.attn_backend": "reference",
    "model.sliding_window": 5,
    "model.head_dim": 16,
    "model.attn_soft_cap": 3.0,
    "model.final_soft_cap": 3.0,
    "model.sliding_window_pattern": 1,
    "model.factory": {"model": {"factory": "examples.nnx_model:none"}},
    "model.kwargs": {"model": {"kwargs": {"depth": 2}}},
    "model.axes": {"model": {"axes": {"qkv": [None, "embed"]}}},
    "model.local_rope": {"model": {"local_rope": {"theta": 77.0}}},
    "model.rope.partial_rotary_factor": 0.5,
    "model.rope.short_factor": {"model": {"seq_len": 8, "rope": {"short_factor": [3.0] * 4}}},
    "model.rope.long_factor": [3.0] * 4,
    "model.rope.attention_factor": 2.0,
    "model.hidden_dim": 64,
    "model.num_heads": 2,
    "model.num_kv_heads": 2,
    "model.activation_function": "relu",
    "model.embed_pdrop": 0.5,
    "model.resid_pdrop": 0.5,
    "model.attn_pdrop": 0.5,
    "model.upcast_attn": {"model": {"upcast_attn": True}, "trainer": {"mp": "p=f32,c=bfloat16"}},
    "model.rope": {"model": {"rope": {"type": "llama3"}}},
    "trainer.id": "y",
    "trainer.train_batch_size": 32,
    "trainer.per_device_parallelism": 1,
    "trainer.per_device_train_parallelism": 1,
    "trainer.allow_nondivisible_batch_size": {
        "trainer": {"train_batch_size": 12, "allow_nondivisible_batch_size": True}
    },
    "trainer.compute_axis_resources": {"trainer": {"compute_axis_resources": {"mlp": "data"}}},
    "trainer.mesh": {"trainer": {"mesh": {"axes": {"data": -1, "replica": 2}}}},
    "trainer.mesh.axes": {"trainer": {"mesh": {"axes": {"data": 4, "replica": 2}}}},
    "trainer.mesh.dcn_axes": {"trainer": {"mesh": {"dcn_axes": {"data": 2}}}},
    "trainer.mesh.shared_mapping": {"trainer": {"mesh": {"shared_mapping": {"mlp": "model"}}}},
    "trainer.mesh.compute_mapping": {"trainer": {"mesh": {"compute_mapping": {"position": "data"}}}},
    "trainer.mesh.param_mapping": {"trainer": {"mesh": {"param_mapping": {"mlp": "data"}}}},
    "trainer.load_checkpoint": True,
    "trainer.load_checkpoint_path": "elsewhere",
    "trainer.initialize_from": "elsewhere",
    "trainer.initialize_from_state": "elsewhere",
    "trainer.watch": {"trainer": {"watch": {"interval": 1}}},
    "trainer.watch.watch_targets": ["updates"],
    "trainer.checkpointer.staging_dir": {"trainer": {"checkpointer": {"base_path": "memory://m", "staging_dir": "s"}}},
    "trainer.per_device_eval_parallelism": 4,
    "trainer.max_eval_batches": 3,
    "trainer.mp": "p=f32,c=bfloat16",
    "trainer.log_dir": "elsewhere",
    "trainer.batch_axis": None,
    "trainer.fsdp_axis": None,
    "trainer.tensor_parallel_axes": ["mlp"],
    "trainer.model_axis_size": 2,
    "trainer.replica_ici_axis_size": 2,
    "trainer.axis_resources": {"trainer": {"axis_resources": {"mlp": "model"}}},
    "trainer.parameter_axis_resources": {"trainer": {"parameter_axis_resources": {"mlp": "model"}}},
    "trainer.checkpointer.base_path": "elsewhere",
    "trainer.checkpointer.save_interval": "7m",
    "trainer.checkpointer.keep": [],
    "trainer.checkpointer.keep.0.until": 50,
    "optimizer.lr_schedule": "linear",
    "optimizer.weight_decay": 0.1,
    "optimizer.warmup": 10,
    "optimizer.decay": 10,
    "optimizer.rewarmup": {"optimizer": {"rewarmup": 0.2, "cycles": 2}},
    "optimizer.cycles": 2,
    "optimizer.cycle_length": 30,
    "optimizer.default_weight_decay_mask": {"optimizer": {"weight_decay": 0.1, "default_weight_decay_mask": False}},
    "optimizer.skip_bad_steps": True,
    "optimizer.update_rms_clipping": 1.0,
    "optimizer.clip_update_norm": {"optimizer": {"clip_update_norm": {"sigma_factor": 2.0}}},
    "optimizer.adamc_weight_decay": {"optimizer": {"weight_decay": 0.1, "adamc_weight_decay": True}},
    "trainer.model_averaging": {"trainer": {"model_averaging": {"type": "ema"}}},
    "optimizer.weight_decay_modules": {"optimizer": {"weight_decay": 0.1, "weight_decay_modules": ["norm"]}},
    "objective.z_loss_weight": 1e-4,
    "objective.label_smoothing": 0.1,
    "surgery.target": "mlp",
    "surgery.dropout": 0.5,
    "phases.0.name": "q",
    "phases.0.num_train_steps": 50,
    "phases.0.surgery": [{"type": "lora"}],
    "phases.0.trainable": ["mlp"],
    "phases.0.objective": {"phases": [{"name": "p", "objective": {"type": "next_token", "z_loss_weight": 1e-3}}]},
    "phases.0.optimizer": {"phases": [{"name": "p", "optimizer": {"type": "adam", "learning_rate": 1e-2}}]},
}
# Fields whose effect is shown by a test of its own below (or elsewhere), and where.
SHOWN_ELSEWHERE = {
    "trainer.compilation_cache_dir": "test_compiled_programs_are_kept_where_the_field_says",
    "trainer.strict_performance": "test_strict_performance_refuses_what_falls_back",
    "trainer.require_accelerator": "tests/run/test_startup.py",
    "trainer.crash_on_nan": "tests/observe/test_hooks.py",
    "trainer.crash_on_inf": "tests/observe/test_hooks.py",
    "trainer.jax_config": "tests/run/test_startup.py",
    "trainer.log_jaxprs": "tests/run/test_init_from.py",
    "trainer.log_xla_hlo": "tests/run/test_init_from.py",
    "trainer.tracker": "test_tracker_fields",
    "trainer.profiler": "test_profiler_fields",
    "trainer.distributed": "test_distributed_fields",
    "trainer.ray": "tests/data/test_ray_cluster.py",
    "trainer.checkpointer": "its fields",
    "data": "test_data_fields",
    "model": "its fields",
    "trainer": "its fields",
    "optimizer": "its fields",
    "objective": "its fields",
    "evals": "test_sample_fields",
    "phases": "its fields",
    "phases.0.data": "test_a_phase_has_data_of_its_own",
    "surgery.from_peft": "tests/run/test_adapters.py",
    "epoch": "tests/run/test_num_steps.py",
    **dict.fromkeys(
        (
            "initialize_from_hf",
            "use_hf_model_config",
            "hf_weight_names",
            "hf_save_path",
            "hf_save_steps",
            "hf_save_dtype",
        ),
        "tests/end_to_end/test_hugging_face.py",
    ),
    "dry_run": "tests/end_to_end/test_command.py",
}


def fields(prefix: str, kind: type) -> list[str]:
    return [f"{prefix}.{field.name}".lstrip(".") for field in dataclasses.fields(kind)]


def cases() -> list[tuple[str, dict[str, Any]]]:
    """(dotted field, tree that it is changed in) of every field there is."""
    found = [(name, tree()) for name in fields("", RunConfig)]
    found += [(path, tree("llama")) for path in fields("model", DecoderConfig)]
    for name, kind in ModelConfig.get_known_choices().items():
        # What relatives of Llama share is the same code, and goes through with Llama.
        skipped = set(fields("model", DecoderConfig)) if issubclass(kind, DecoderConfig) else set()
        found += [(path, tree(name)) for path in fields("model", kind) if path not in skipped]
    for name, kind in RotaryConfig.get_known_choices().items():
        found += [(path, ROPES[name]) for path in fields("model.rope", kind)]
    keep = tree()
    keep["trainer"]["checkpointer"] = {"keep": [{"every": 10}]}
    found += [(path, tree()) for path in fields("trainer", TrainerConfig)]
    found += [(path, tree()) for path in fields("trainer.checkpointer", CheckpointerConfig)]
    found += [(path, tree()) for path in fields("trainer.mesh", MeshConfig)]
    found += [(path, WATCHED) for path in fields("trainer.watch", WatchConfig)]
    found += [(path, keep) for path in fields("trainer.checkpointer.keep.0", KeepRule)]
    # Of the other optimizers, what each computes: tests/optim/test_family.py.
    found += [(path, SIZED) for path in fields("trainer.train_batch_size.1", BatchSize)]
    found += [(path, tree()) for path in fields("optimizer", OptimizerConfig.get_known_choices()["adam"])]
    for name, kind in ObjectiveConfig.get_known_choices().items():
        found += [(path, tree(objective={"type": name})) for path in fields("objective", kind)]
    assert list(SurgeryConfig.get_known_choices()) == ["lora"]
    found += [(path, LORA) for path in fields("surgery", SurgeryConfig.get_known_choices()["lora"])]
    found += [(path, PHASES) for path in fields("phases.0", PhaseConfig)]
    return [(path, base) for path, base in found if path not in SHOWN_ELSEWHERE]


def merged(base: Any, over: Any) -> Any:
    if isinstance(base, dict) and isinstance(over, dict):
        return base | {key: merged(base.get(key), value) for key, value in over.items()}
    return over


def changed(base: dict[str, Any], path: str) -> dict[str, Any]:
    """The tree with one field changed."""
    change = CHANGES.get(path)
    if isinstance(change, dict):
        return merged(base, change)
    result = copy.deepcopy(base)
    keys = path.replace("surgery.", "phases.0.surgery.0.").split(".")
    node: Any = result
    for key in keys[:-1]:
        node = node[int(key)] if isinstance(node, list) else node.setdefault(key, {})
    node[keys[-1]] = change if path in CHANGES else automatic(base, path)
    return result


def automatic(base: dict[str, Any], path: str) -> Any:
    """Twice a number, the opposite of a switch."""
    node: Any = decode_run(ConfigSource(base), None)
    for key in path.replace("surgery.", "phases.0.surgery.0.").split("."):
        node = node[int(key)] if isinstance(node, list) else getattr(node, key)
    if isinstance(node, bool):
        return not node
    assert isinstance(node, (int, float)), (
        f"{path}: say in CHANGES what to change it to, or in SHOWN_ELSEWHERE where it is shown"
    )
    return node * 2 or 1


def plan_of(base: dict[str, Any]) -> Any:
    return make_plan(decode_run(ConfigSource(base), None), base["trainer"]["id"], 64)


def rates(plan: Any) -> list[list[float]]:
    return [[float(p.optimizer.schedule(p.num_steps)(s)) for s in range(0, p.num_steps, 3)] for p in plan.phases]


def groups(plan: Any) -> list[Any]:
    return [
        [(g.name, g.num_parameters, g.weight_decay) for g in p.groups(plan.state_builder.abstract_state(p).model)]
        for p in plan.phases
    ]


def shapes(plan: Any) -> list[Any]:
    flat = [jax.tree_util.tree_flatten_with_path(plan.state_builder.abstract_state(p))[0] for p in plan.phases]
    return [[(jax.tree_util.keystr(path), x.shape, x.dtype) for path, x in leaves] for leaves in flat]


def folders(plan: Any) -> tuple[str, str]:
    return str(plan.checkpoints), plan.log_folder


def programs(plan: Any) -> list[str]:
    with plan.layout.use():
        return [trace_step(plan, phase).lower().as_text() for phase in plan.phases]


def initial_parameters(plan: Any) -> list[tuple[Any, ...]]:
    leaves = jax.tree.leaves(plan.state_builder.apply_surgeries(plan.state_builder.initial_model(), plan.phases[0]))
    return [(x.shape, x.dtype, np.asarray(x).tobytes()) for x in leaves]


# What a plan comes to, the cheap looks first.
LOOKS = (folders, rates, describe, shapes, groups, initial_parameters, programs)


@functools.cache
def seen_before(base: str, look: Callable[[Any], Any]) -> Any:
    """What a look shows of a tree that many cases begin with."""
    return look(plan_of(json.loads(base)))


def quick_and_slow() -> list[Any]:
    """The cases; what a relative of Llama has of its own is slow."""
    quick = ("llama", "gpt2", "flax")
    return [
        pytest.param(path, base, marks=() if base["model"]["type"] in quick else pytest.mark.slow)
        for path, base in cases()
    ]


@pytest.mark.parametrize(
    ("path", "base"), quick_and_slow(), ids=lambda x: x if isinstance(x, str) else x["model"]["type"]
)
def test_field(path, base):
    try:
        after = plan_of(changed(base, path))
    except ConfigError:
        return
    assert any(seen_before(json.dumps(base), look) != look(after) for look in LOOKS)


DATA = {
    "train_urls": ["{corpus}/b.txt"],
    "validation_urls": ["{corpus}/b.txt"],
    "cache_dir": "{corpus}/other",
    "tokenizer": "{corpus}/saved",
    "vocab_size": 300,
    "text_key": "other",
    "shuffle": False,
    "enforce_bos": False,
    "enforce_eos": False,
}


# Shown in tests/data/test_mixture.py, test_records.py, test_chat.py, test_hugging_face.py and test_corpus.py.
DATASETS = ("id", "name", "split", "validation_split", "stream", "source")
MIXED = (*DATASETS, "format", "tags", "configs", "train_weights", "stop_strategy", "mixture_block_size")


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(DataConfig) if f.name not in MIXED])
def test_data_fields(name, tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "some text {i}", "other": "what {i}"}}\n' for i in range(99)))
    (tmp_path / "b.txt").write_text("entirely different words " * 40)

    def made(cache: str, **changes: Any) -> list[Any]:
        config = DataConfig(
            **({"train_urls": [f"{tmp_path}/a.jsonl"], "cache_dir": f"{tmp_path}/{cache}", "vocab_size": 280} | changes)
        )
        tokenizer = config.load_tokenizer(log=lambda _: None)
        data = config.open(tokenizer, 16, log=lambda _: None)
        eight = BatchSchedule.constant(8)
        batches = train_batches(data.examples(eight, seed=0), eight, plan_of(tree()).layout)
        batch = next(batches)
        batches.close()
        folders = sorted(p.name for p in tmp_path.iterdir() if p.is_dir())
        return [np.asarray(x).tolist() for x in jax.tree.leaves(batch)] + [len(data.validation), folders]

    first = DataConfig(train_urls=[f"{tmp_path}/b.txt"], cache_dir=f"{tmp_path}/t", vocab_size=270)
    first.load_tokenizer(log=lambda _: None).save(tmp_path / "saved")
    usual = made("usual")
    change = {name: [u.format(corpus=tmp_path) for u in DATA[name]] if isinstance(DATA[name], list) else DATA[name]}
    if isinstance(DATA[name], str):
        change = {name: DATA[name].format(corpus=tmp_path)}
    if name == "tokenizer":
        change["vocab_size"] = None
    cache = "usual" if name == "cache_dir" else "usual2"
    assert made(cache, **change)[: None if name == "cache_dir" else -1] != usual[: None if name == "cache_dir" else -1]


SAMPLES = {
    "prompts": ["cd"],
    "max_new_tokens": 3,
    "temperature": 0.0,
    "top_k": 1,
    "top_p": 0.01,
    "seed": 7,
}


HARNESS: dict[str, Any] = {"tasks": ["b"], "task_folder": "elsewhere", "num_fewshot": 2, "limit": 3, "batch_size": 5}


@pytest.mark.parametrize("name", HARNESS)
def test_harness_fields(name, monkeypatch):
    """What the harness is told, and with which backend."""
    index = {"all_tasks": ["a", "b"], "load": lambda tasks: {"tasks": {}}}

    def told(**changes: Any) -> list[str]:
        heard: list[Any] = []
        manager = lambda include_path: SimpleNamespace(**index, folder=include_path)  # noqa: E731
        simple_evaluate = lambda **options: heard.append(options) or {"results": {}}  # noqa: E731
        monkeypatch.setattr(harness, "_harness", lambda: (simple_evaluate, manager))
        monkeypatch.setattr(harness, "_backend", lambda model, tokenizer, batch_size: batch_size)
        config = harness.HarnessEvalConfig(**{"tasks": ["a"], **changes})
        harness.open_tasks(config, 32).run(None, None)  # pyright: ignore
        return [repr(options) for options in heard]

    assert told() == told()
    assert told(**{name: HARNESS[name]}) != told()


@pytest.mark.parametrize("name", SAMPLES)
def test_sample_fields(name, tmp_path):
    choices = EvalConfig.get_known_choices()
    assert {kind: [f.name for f in dataclasses.fields(choices[kind])] for kind in choices} == {
        "loss": [],
        "samples": list(SAMPLES),
        "harness": list(HARNESS),
    }
    (tmp_path / "a.txt").write_text("abcd " * 200)
    tokenizer = DataConfig(train_urls=[f"{tmp_path}/a.txt"], cache_dir=f"{tmp_path}/c", vocab_size=260).load_tokenizer(
        log=lambda _: None
    )
    plan = plan_of(tree())
    model = plan.state_builder.model.build(vocab_axis(tokenizer.vocab_size), key=jax.random.key(0))
    model = jax.tree.map(lambda x: x * 20, model)

    def shown(**changes: Any) -> list[str]:
        lines: list[str] = []
        context = EvalContext(plan.layout, plan.precision, tokenizer, tokenizer.token_bytes(), (), lines.append, 32)
        config = choices["samples"](**{"prompts": ["ab"], "max_new_tokens": 8, "temperature": 3.0} | changes)
        config.open(context).run(model)
        return lines

    assert shown() == shown()
    assert shown(**{name: SAMPLES[name]}) != shown()


def test_strict_performance_refuses_what_falls_back():
    strict = merged(tree("gpt2"), {"trainer": {"strict_performance": True}})
    check_performance(plan_of(strict))
    dropping = {"model": {"attn_pdrop": 0.1}}
    check_performance(plan_of(merged(tree("gpt2"), dropping)))
    with pytest.raises(ConfigError, match="strict_performance: attention runs on reference"):
        check_performance(plan_of(merged(strict, dropping)))
    # What is asked for by its name is no fallback, though the platform has better.
    check_performance(plan_of(merged(strict, {"model": {"attn_backend": "reference"}})))
    check_performance(plan_of(merged(strict, merged(dropping, {"model": {"attn_backend": "reference"}}))))


# Of trackers: what their own libraries are told, field by field.
TRACKERS: dict[str, dict[str, Any]] = {
    "tensorboard": {
        "logdir": "elsewhere",
        "comment": "-two",
        "purge_step": 3,
        "max_queue": 5,
        "flush_secs": 7,
        "filename_suffix": ".x",
        "write_to_disk": False,
    },
    "trackio": {"project": "p", "name": "n", "group": "g", "space_id": "user/space"},
    "wandb": {
        "entity": "e",
        "project": "p",
        "name": "n",
        "tags": ["t"],
        "id": "i",
        "group": "g",
        "mode": "online",
        "resume": "must",
        "save_code": False,
        "save_xla_dumps": True,
    },
}


def test_every_tracker_field_is_listed():
    kinds = TrackerConfig.get_known_choices()
    listed = {kind: list(changes) for kind, changes in TRACKERS.items()}
    assert {kind: [f.name for f in dataclasses.fields(kinds[kind])] for kind in kinds} == listed


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in TRACKERS for name in TRACKERS[kind]])
def test_tracker_fields(kind, name, tmp_path, monkeypatch):
    import tensorboardX
    import wandb

    (tmp_path / "dumped").mkdir()
    (tmp_path / "dumped" / "a.txt").write_text("a program")
    monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to={tmp_path / 'dumped'}")

    def told(**changes: Any) -> str:
        library = mock.MagicMock()
        library.step = 0
        library.id = "id"
        monkeypatch.setattr(tensorboardX, "SummaryWriter", library)
        monkeypatch.setattr(wandb, "init", library)
        monkeypatch.setitem(sys.modules, "trackio", library)
        library.init.return_value._next_step = 0
        monkeypatch.setattr(wandb, "login", lambda **_: True)
        monkeypatch.setattr(wandb, "Artifact", lambda name, type: library)
        monkeypatch.setattr(wandb, "Settings", dict)
        monkeypatch.setattr(environment, "repository", lambda: tmp_path)
        config = TrackerConfig.get_known_choices()[kind](**changes)
        config.check()
        config.open(RunInfo("run", 0, False, {}, "", {})).close()
        return re.sub(r" at 0x\w+|id='\d+'", "", str(library.mock_calls))

    assert told() == told()
    assert told(**{name: TRACKERS[kind][name]}) != told()


def test_profiler_fields(tmp_path):
    def recorded(**changes: Any) -> list[int]:
        config = ProfilerConfig(**{"start_step": 3, "num_steps": 4} | changes)
        phase = plan_of(tree()).phases[0]
        hook = ProfileHook(config, tmp_path, phase, first_step=2, until=phase.end, program=str, log=print)
        return [step for step in range(100) if hook.due(step)]

    assert [field.name for field in dataclasses.fields(ProfilerConfig)] == ["start_step", "num_steps"]
    assert [recorded(), recorded(start_step=8), recorded(num_steps=1)] == [[5, 9], [10, 14], [5, 6]]
    for wrong in ({"start_step": 0}, {"num_steps": 0}):
        with pytest.raises(ConfigError, match="profiler"):
            plan_of(merged(tree(), {"trainer": {"profiler": wrong}}))


def test_distributed_fields(monkeypatch):
    seen: list[Any] = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **kwargs: seen.append((args, kwargs)))
    DistributedConfig("host:1", 2, 1, [0, 3]).join()
    times = {"initialization_timeout": 300, "heartbeat_timeout_seconds": 100, "shutdown_timeout_seconds": 300}
    assert seen.pop() == (("host:1", 2, 1), {"local_device_ids": [0, 3], **times})
    DistributedConfig("host:1", 2, 1, 3, *(timedelta(seconds=s) for s in (7, 8, 9))).join()
    times = {"initialization_timeout": 7, "heartbeat_timeout_seconds": 8, "shutdown_timeout_seconds": 9}
    assert seen == [(("host:1", 2, 1), {"local_device_ids": [3], **times})]
    with pytest.raises(ConfigError, match="heartbeat_timeout"):
        DistributedConfig(heartbeat_timeout=timedelta(0)).join()
    for partial in (DistributedConfig("host:1"), DistributedConfig(num_processes=2), DistributedConfig(process_id=0)):
        with pytest.raises(ConfigError, match="go together"):
            partial.join()


def test_compiled_programs_are_kept_where_the_field_says(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    try:
        enable_compilation_cache(str(tmp_path))
        assert Path(jax.config.jax_compilation_cache_dir) == tmp_path
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_a_phase_has_data_of_its_own():
    config = decode_run(
        ConfigSource(
            tree(data={"train_urls": ["a"]}, phases=[{"name": "p"}, {"name": "q", "data": {"train_urls": ["b"]}}])
        ),
        None,
    )
    assert [d.train_urls for d in make_plan(config, "x", 64).data] == [["a"], ["b"]]
