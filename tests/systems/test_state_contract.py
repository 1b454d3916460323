"""What a run saves is what it goes on from: every registered part of a state comes back from disk bit for bit.

A step is a pure function of (state, references, batch), and the batches of a step follow from a position
(tests/data/test_loader.py). So a run that resumes repeats the run that was not interrupted if no array of its state is left
out or changed, which this shows for each model, surgery, objective, optimizer, average and guard. Whole runs that are killed
show the moments: in a start, within a save, at the end of a phase, on several processes, in a bucket.
"""

import functools
from datetime import timedelta
from typing import Any

import jax
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.engine.checkpoint.local import LocalFolder
from jaxlm.engine.checkpoint.manifest import Cursor
from jaxlm.engine.checkpoint.policy import CheckpointerConfig
from jaxlm.engine.checkpoint.restore import latest_valid, restore_state
from jaxlm.engine.checkpoint.writer import CheckpointWriter, SaveHealth
from jaxlm.engine.state import shardings, without_controls
from jaxlm.objectives.base import ObjectiveConfig
from jaxlm.optim.averaging import AveragingConfig
from jaxlm.optim.base import OptimizerConfig
from jaxlm.plan.load_config import decode_run
from jaxlm.plan.plan import make_plan
from jaxlm.reading.yaml import ConfigSource
from jaxlm.surgery.base import SurgeryConfig
from tests.fields.trees import BASES, MODELS, OBJECTIVES, merged
from tests.fields.trees import tree as small_run

GROUPS = [
    {"match": "^tokens", "learning_rate": 5e-3, "beta2": 0.99},
    {"match": "norm", "type": "lion", "learning_rate": 1e-3, "lr_schedule": "constant"},
    {"match": "attn|mlp", "type": "muon", "learning_rate": 3e-3, "weight_decay": 0.01},
]
# What a state holds depends neither on these keys nor on which relative of Llama the model is.
SAME = {name for name in BASES if name.startswith("rope ")} | {"until", "keep", "stages", "watch", "remat", "offload"}
ARRAYS_OF_THEIR_OWN = (
    "gpt2",
    "llama",
    "gemma4",
    "flax",
    "mixtral",
    "qwen3_5_moe",
    "olmo_hybrid",
    "gpt_oss",
    "deepseek_v3",
)
ARRAYS_OF_THEIR_OWN += ("dba", "nano", "topology")
STATES = {
    **{name: base for name, base in BASES.items() if name not in SAME | set(MODELS) or name in ARRAYS_OF_THEIR_OWN},
    **{
        f"{kind} optimizer": small_run(optimizer={"type": kind}) for kind in sorted(OptimizerConfig.get_known_choices())
    },
    **{
        f"{kind} average": merged(small_run(), {"trainer": {"model_averaging": {"type": kind}}})
        for kind in sorted(AveragingConfig.get_known_choices())
    },
    "four groups": small_run(optimizer={"groups": GROUPS}),
    "muon with its options": small_run(
        optimizer={"type": "muon", "normuon_beta2": 0.9, "momentum_schedule": {"warmup": 20}}
    ),
    "qlora": small_run(
        phases=[
            {"name": "p", "surgery": [{"type": "quantize"}, {"type": "lora", "rank": 2}], "trainable": [r"\.(a|b)$"]}
        ]
    ),
    "loss scale": merged(small_run(), {"trainer": {"mp": "p=f32,c=float16"}}),
    "bfloat16 router in float32": merged(
        small_run("mixtral"),
        {"trainer": {"mp": {"default": "p=f32,c=bfloat16", "rules": [{"match": r"\.router\.", "compute": "f32"}]}}},
    ),
    "biases that move by a rule": merged(small_run("glm4_moe"), {"model": {"router_bias_step": 1e-3}}),
    "a layer that predicts further tokens": merged(
        small_run("qwen3_5_moe"), {"model": {"mtp": True}, "objective": {"mtp_weight": 0.3}}
    ),
}


# Their states have the arrays of the row `llama`, `mixtral` or `progressive`, and no class of their own.
ALIKE = {
    "handover",
    "checkpoint",
    "phases",
    "precision",
    "adam optimizer",
    "bfloat16 router in float32",
    "timed stacks",
}


def tier(name: str) -> Any:
    return () if name == "llama" else pytest.mark.soak if name in ALIKE else pytest.mark.slow


@functools.cache
def planned(name: str) -> Any:
    return make_plan(decode_run(ConfigSource(STATES[name]), None), "x", 64)


def random_bits(leaf: Any, rng: np.random.Generator) -> Any:
    """Any bits: signaling NaNs, subnormal numbers and negative zeros too."""
    if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key(int(rng.integers(1 << 30)))
    if leaf.dtype == bool:
        return rng.random(leaf.shape) < 0.5
    dtype = np.dtype(leaf.dtype)
    if dtype.name in ("int4", "uint4", "int2", "uint2"):
        return rng.integers(0, 2, leaf.shape).astype(dtype)
    return np.frombuffer(rng.bytes(int(np.prod(leaf.shape)) * dtype.itemsize), dtype).reshape(leaf.shape)


def bits(state: Any) -> dict[str, bytes]:
    raw = {path: tree.raw(leaf) for path, leaf in tree.leaves(state)}
    return {
        path: np.asarray(jax.random.key_data(a) if jax.numpy.issubdtype(a.dtype, jax.dtypes.prng_key) else a).tobytes()
        for path, a in raw.items()
    }


@pytest.mark.parametrize("name", [pytest.param(name, marks=tier(name)) for name in STATES])
def test_a_state_comes_back_bit_for_bit(name, tmp_path):
    plan, rng, lines = planned(name), np.random.default_rng(0), []
    phase = plan.phases[-1]
    abstract = plan.state_builder.abstract_state(phase)
    folder = LocalFolder(tmp_path)
    folder.prepare()
    health = SaveHealth(CheckpointerConfig(retry_for=timedelta(0)), None, print)
    writer = CheckpointWriter(folder, {"config.yaml": b"{}"}, health, print, lambda: None)
    with plan.layout.use():
        made = jax.tree.map(lambda leaf: random_bits(leaf, rng), abstract)
        state = jax.device_put(made, shardings(abstract, plan.layout))
        writer.save(state, Cursor(3, phase.index, phase.name, entering=False, temporary=False), {})
        checkpoint = latest_valid(folder, print)
        assert checkpoint is not None
        found = restore_state(checkpoint, plan.state_builder, phase, plan.layout, lines.append)
    assert not lines
    assert jax.tree.structure(found) == jax.tree.structure(abstract)
    assert [(a.shape, a.dtype) for a in jax.tree.leaves(found)] == [
        (a.shape, a.dtype) for a in jax.tree.leaves(abstract)
    ]
    expected = bits(without_controls(state))  # the history of a checkpoint says which controls are in effect
    assert len(set(expected.values())) > 10
    assert bits(without_controls(found)) == expected


@pytest.mark.slow
def test_every_registered_part_of_a_state_has_a_row():
    plans = [planned(name) for name in STATES]
    phases = [phase for plan in plans for phase in plan.phases]
    assert {type(one.objective) for one in phases} >= {
        ObjectiveConfig.get_choice_class(kind) for kind in OBJECTIVES if kind != "custom"
    }
    assert {type(surgery) for one in phases for surgery in one.surgeries} >= set(
        SurgeryConfig.get_known_choices().values()
    )
