"""Adapters and stored weights of layers that are not attention: what gets them, what never does, and what is exported."""

import jax
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.core.guards import SKIPPED
from jaxlm.core.parameters import float32_paths
from jaxlm.core.products.stored_weights import StoredWeight
from jaxlm.interop.hf.folder import save_folder
from jaxlm.interop.hf.safetensors_file import SafetensorsFile
from jaxlm.models.linear import Linear
from jaxlm.optim.groups import parameter_groups
from jaxlm.optim.muon import MuonConfig
from jaxlm.plan.load_config import decode_run
from jaxlm.plan.plan import Plan, make_plan
from jaxlm.reading.yaml import ConfigSource
from jaxlm.surgery.base import merge_surgeries
from tests.engine.helpers import VOCAB, TinyRun, arrays, one_device
from tests.small_runs import MODELS
from tests.tiers import one_of

RECURRENT = ("q_proj", "k_proj", "v_proj", "gate_proj", "decay_proj", "beta_proj", "o_proj")

WHOLE = {"in_proj_qkv", "in_proj_z", "out_proj", "q_proj", "v_proj", "o_proj"}


def plan_of(*surgeries: dict, mp: str = "f32", trainable: str = r"\.[ab]$", kind: str = "qwen3_5") -> Plan:
    run = {
        "model": MODELS[kind],
        "phases": [{"name": "p", "surgery": list(surgeries), "trainable": [trainable]}],
        "trainer": {"train_batch_size": 16, "mp": mp},
        "optimizer": {"learning_rate": 0.05, "warmup": 0},
    }
    return make_plan(decode_run(ConfigSource(run), None), "x", VOCAB)


def model_of(plan: Plan):
    return plan.state_builder.abstract_state(plan.phases[0]).model


@pytest.mark.parametrize("kind", ["nf4", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("nvfp4", "int8"))])
def test_projections_are_stored_in_few_bits_and_filters_and_rates_never(kind):
    model = model_of(plan_of({"type": "quantize", "kind": kind}, {"type": "lora", "rank": 2}))
    stored = {path for path, _ in tree.modules_by_path(model, StoredWeight)}
    recurrent = {path.rpartition(".attn.")[0] for path, leaf in tree.leaves(model) if path.endswith("attn.q_conv")}
    assert recurrent
    for block in recurrent:
        assert {f"{block}.attn.{name}.base.weight" for name in RECURRENT} <= stored
    for path, leaf in tree.leaves(model):
        if path.rpartition(".")[2] in ("q_conv", "k_conv", "v_conv", "A_log", "dt_bias"):
            assert leaf.dtype == np.float32, path
            assert not any(path.startswith(one) for one in stored)


def test_only_projections_decay_or_are_orthogonalized():
    plan = plan_of(trainable=".*")
    model = model_of(plan)
    groups = parameter_groups(plan.phases[0].split(model)[0], MuonConfig(weight_decay=0.1))
    linear = {f"{path}.weight" for path, _ in tree.modules_by_path(model, Linear)}
    assert {path for group in groups if group.weight_decay for path in group.paths} == linear
    assert {path for group in groups if group.as_matrices for path in group.paths} == linear - {"head.weight"}
    assert {path.rpartition(".")[2] for path in float32_paths(model)} == {"A_log", "dt_bias"}


@pytest.mark.slow
@pytest.mark.parametrize("target", one_of([r"attn\.(q|v|o|gate)_proj", r"attn\.beta_proj|mlp\.down_proj"]))
def test_a_merged_export_has_all_other_tensors_to_the_bit(tmp_path, target):
    """In bfloat16, in which adding zero to a weight or casting it twice would show."""
    plan = plan_of({"type": "lora", "rank": 2, "target": target}, mp="bf16")
    (phase,) = plan.phases
    run = TinyRun(one_device(), phase, plan.precision, plan.model, VOCAB)
    options = {"dtype": jax.numpy.bfloat16, "files": {}, "special_ids": {}}
    with run.where.use():
        save_folder(tmp_path / "before", plan.state_builder.initial_model(), plan.config.model, run.where, **options)
        for seed in range(2):
            assert run.step(arrays(seed))[SKIPPED] == 0
        merged = merge_surgeries(run.state.model, phase.surgeries)
        save_folder(tmp_path / "after", merged, plan.config.model, run.where, **options)
    before, after = (SafetensorsFile(tmp_path / name / "model.safetensors") for name in ("before", "after"))
    assert before.tensors.keys() == after.tensors.keys()
    changed = {n for n in before.tensors if before.view(n).tobytes() != after.view(n).tobytes()}
    assert {before.tensors[n].dtype for n in before.tensors} == {after.tensors[n].dtype for n in after.tensors}
    names = {name.rpartition(".")[0].rpartition(".")[2] for name in changed}
    assert names == ({"in_proj_b", "down_proj"} if "beta" in target else WHOLE)


@pytest.mark.soak
@pytest.mark.parametrize("kind", one_of(["qwen3_5_moe", "glm4_moe"]))
def test_adapters_beside_experts_train_and_nothing_else_moves(kind):
    plan = plan_of({"type": "lora", "rank": 2, "target": r"attn|shared_expert"}, kind=kind)
    run = TinyRun(one_device(), plan.phases[0], plan.precision, plan.model, VOCAB)
    before = {path: np.asarray(leaf.array) for path, leaf in tree.leaves(run.state.model)}
    adapters = {path for path in before if path.endswith((".a", ".b"))}
    assert any("shared_expert" in path for path in adapters)
    losses = [run.step(arrays(0))["train/loss"] for _ in range(8)]
    assert losses[-1] < losses[0] - 0.01  # the head, which has small weights, stays
    for path, leaf in tree.leaves(run.state.model):
        assert (leaf.array != before[path]).any() == (path in adapters), path
