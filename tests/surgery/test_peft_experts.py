"""Adapters of experts, against PEFT and transformers."""

import itertools
import json

import jax
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.engine.state import place_state
from jaxlm.interop.hf.families.qwen3_moe import Qwen3MoeConfig
from jaxlm.interop.hf.folder import save_folder
from jaxlm.interop.hf.safetensors_file import SafetensorsFile, TensorInfo, write_safetensors
from jaxlm.interop.peft.names import AxisSizes
from jaxlm.interop.peft.read import read_adapters
from jaxlm.plan.load_config import decode_run
from jaxlm.plan.plan import make_plan
from jaxlm.reading.yaml import ConfigSource
from jaxlm.surgery.base import merge_surgeries
from jaxlm.surgery.lora import add_adapters, save_peft
from tests.surgery.test_peft import busy, logits_of
from tests.tiers import one_of

SIZES = {"seq_len": 64, "hidden_dim": 16, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "initializer_range": 0.2}
SIZES |= {"num_experts": 4, "num_experts_per_token": 2}
SIZES |= {
    "intermediate_dim": 24
}  # twice this is not the width of the model, so that A and B have other shapes transposed
MODELS = {
    "qwen3_moe": {"head_dim": 8},
    "mixtral": {},
    "olmoe": {},
    "qwen2_moe": {"shared_expert_intermediate_dim": 20},
    "granitemoe": {"embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0},
    "glm4_moe": {"head_dim": 8, "dense_intermediate_dim": 40, "shared_expert_intermediate_dim": 24},
    "minimax_m2": {"head_dim": 8, "initializer_range": 0.1},
    "gpt_oss": {"head_dim": 8},
    "gemma4": {"initializer_range": 0.1, "head_dim": 8, "global_head_dim": 8, "expert_dim": 24, "num_layers": 6},
    "qwen3_5_moe": {
        **{"head_dim": 8, "shared_expert_intermediate_dim": 20, "attention_interval": 2, "num_state_heads": 2},
        **{"num_value_heads": 4, "state_key_dim": 8, "state_value_dim": 12},
    },
}
NUM_TOKENS = 61
OPTIONS = {"dtype": np.float32, "base": "base"}


def plan_of(family, lora, **sizes):
    model = {"type": family, **SIZES, **MODELS[family], **sizes}
    phases = [{"name": "lora", "surgery": [{"type": "lora", **lora}], "trainable": [r"\.[ab]$"]}]
    config = {"model": model, "phases": phases, "trainer": {"train_batch_size": 8}}
    return make_plan(decode_run(ConfigSource(config), None), "x", NUM_TOKENS)


def with_adapters(folder, family, lora, **sizes):
    """A plan, its model, the same with random adapters, and a folder of the base for transformers."""
    plan = plan_of(family, lora, **sizes)
    with plan.layout.use():
        plain = place_state(plan.state_builder.initial_model, plan.state_builder.abstract_initial_model, plan.layout)
        ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        save_folder(folder, plain, plan.config.model, plan.layout, dtype=np.float32, files={}, special_ids=ids)
        change = lambda model: busy(plan.phases[0].surgeries[0].apply(model, key=jax.random.key(1)))  # noqa: E731
        return plan, plain, jax.jit(change)(plain)


def in_transformers(folder):
    import torch
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def their_logits(model, ids):
    import torch

    with torch.no_grad():
        return model(torch.tensor(ids)).logits.numpy()


EVERY = {"target": "o_proj|router", "experts": "gate_proj|up_proj|down_proj", "rank": 2, "alpha": 6.0}
SOME_LAYERS = {"rank_pattern": {"layers.1.*down_proj": 3}, "layers_to_transform": [1]}


def tokens():
    return np.random.default_rng(0).integers(0, NUM_TOKENS, size=(8, 16))


@pytest.mark.slow
@pytest.mark.parametrize("family", one_of(MODELS))
@pytest.mark.parametrize(
    "lora",
    one_of(
        [
            EVERY,
            {**EVERY, "target": None, **SOME_LAYERS},
            {**EVERY, "experts": "up_proj", "alpha_pattern": {"up_proj": 5.0, "router": 3.0}},
            {**EVERY, "experts": "down_proj", "rslora": True},
        ]
    ),
    ids=str,
)
def test_adapters_of_experts_compute_the_same_in_peft(tmp_path, family, lora):
    """What jaxlm exports, opened by PEFT; as jaxlm reads it again; and what PEFT saves of it, in jaxlm."""
    peft = pytest.importorskip("peft")
    plan, plain, model = with_adapters(tmp_path / "base", family, lora)
    with plan.layout.use():
        save_peft(tmp_path / "adapter", model, plan.config.model, plan.layout, **OPTIONS)
        ours = logits_of(model, tokens())
        merged = jax.jit(lambda model: merge_surgeries(model, plan.phases[0].surgeries))(model)
        np.testing.assert_allclose(logits_of(merged, tokens()), ours, rtol=1e-5, atol=1e-5)
        assert np.abs(ours - logits_of(plain, tokens())).max() > 0.1
    opened = peft.PeftModel.from_pretrained(in_transformers(tmp_path / "base"), tmp_path / "adapter").eval()
    np.testing.assert_allclose(ours, their_logits(opened, tokens()), rtol=1e-5, atol=1e-5)
    opened.save_pretrained(tmp_path / "again")
    for folder in ("adapter", "again"):
        with plan.layout.use():
            read = add_adapters(plain, tmp_path / folder, plan.config.model, plan.layout)
            np.testing.assert_allclose(logits_of(read, tokens()), ours, rtol=1e-5, atol=1e-5)
        if lora is EVERY:
            for (path, found), (same, expected) in zip(tree.leaves(read), tree.leaves(model), strict=True):
                assert path == same
                np.testing.assert_array_equal(found.array, expected.array, err_msg=path)


def old_files(folder, settings, arrays):
    """Writes an adapter."""
    folder.mkdir()
    described = {"peft_type": "LORA", "bias": "none", "r": 2, "lora_alpha": 6, **settings}
    (folder / "adapter_config.json").write_text(json.dumps(described))
    arrays = {f"base_model.model.{name}": np.ascontiguousarray(array) for name, array in arrays.items()}
    infos = {name: TensorInfo(array.shape, array.dtype) for name, array in arrays.items()}
    write_safetensors(folder / "adapter_model.safetensors", infos, arrays.values())
    return folder


def read_arrays(folder):
    file = SafetensorsFile(folder / "adapter_model.safetensors")
    return {name.removeprefix("base_model.model."): np.array(file.view(name)) for name in file.tensors}


@pytest.mark.slow
@pytest.mark.parametrize("family", one_of(MODELS))
def test_adapters_that_peft_made(tmp_path, family):
    """Gate and up share A there. Also as PEFT before 0.19 wrote them: A has the outputs, and B the inputs."""
    peft = pytest.importorskip("peft")
    plan, plain, _ = with_adapters(tmp_path / "base", family, EVERY)
    names = ["experts.gate_up_proj", "experts.down_proj"]
    settings = peft.LoraConfig(
        **{"r": 2, "lora_alpha": 6, "target_modules": ["q_proj"], "target_parameters": names},
        init_lora_weights=False,
    )
    theirs = peft.get_peft_model(in_transformers(tmp_path / "base"), settings).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    expected = their_logits(theirs, tokens())
    arrays = read_arrays(tmp_path / "adapter")
    swapped = dict(arrays)
    for name, a in arrays.items():
        if "experts" in name and "lora_A" in name:
            other = name.replace("lora_A", "lora_B")
            experts, b = a.reshape(4, 2, -1), arrays[other]
            swapped[name] = b.reshape(len(b), 2, 4).transpose(2, 1, 0).reshape(8, -1)
            swapped[other] = experts.transpose(2, 1, 0).reshape(-1, 8)
    old = old_files(tmp_path / "old", {"target_parameters": names, "target_modules": ["q_proj"]}, swapped)
    is_transposed = family == "gpt_oss"  # which every version knows
    for folder in (tmp_path / "adapter", *([] if is_transposed else [old])):
        with plan.layout.use():
            read = add_adapters(plain, folder, plan.config.model, plan.layout)
            np.testing.assert_allclose(logits_of(read, tokens()), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", one_of(["mixtral", "qwen3_moe"]))
def test_adapters_of_single_experts(tmp_path, family):
    """As older versions of transformers have them. PEFT makes adapters of all experts of them."""
    peft = pytest.importorskip("peft")
    plan, plain, _ = with_adapters(tmp_path / "base", family, EVERY)
    rng, experts = np.random.default_rng(0), "block_sparse_moe" if family == "mixtral" else "mlp"
    names = ("w1", "w2", "w3") if family == "mixtral" else ("gate_proj", "down_proj", "up_proj")
    arrays = {}
    for layer, expert, name in itertools.product(range(2), range(4), names):
        inputs, outputs = (24, 16) if name == names[1] else (16, 24)
        module = f"model.layers.{layer}.{experts}.experts.{expert}.{name}"
        arrays |= {f"{module}.lora_A.weight": rng.normal(0, 0.3, (2, inputs)).astype(np.float32)}
        arrays |= {f"{module}.lora_B.weight": rng.normal(0, 0.3, (outputs, 2)).astype(np.float32)}
    folder = old_files(tmp_path / "adapter", {"target_modules": list(names), "lora_dropout": 0.1}, arrays)
    opened = peft.PeftModel.from_pretrained(
        in_transformers(tmp_path / "base"), folder, config=without_dropout(peft, folder)
    )
    with plan.layout.use():
        read = add_adapters(plain, folder, plan.config.model, plan.layout)
        np.testing.assert_allclose(
            logits_of(read, tokens()), their_logits(opened.eval(), tokens()), rtol=1e-5, atol=1e-5
        )


def without_dropout(peft, folder):
    """PEFT refuses dropout for parameters of experts."""
    config = peft.PeftConfig.from_pretrained(folder)
    config.lora_dropout = 0.0
    return config


QWEN3_MOE = {"seq_len": 8, "hidden_dim": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "head_dim": 8}
QWEN3_MOE |= {"num_experts": 4}
MODULE = "model.layers.0.mlp.experts"


@pytest.mark.parametrize(
    ("width", "version", "outputs_first"),
    [
        (24, None, False),
        (24, "0.17.1", False),
        (8, "0.19.1", False),
        (8, "0.20.0.dev0", False),
        (8, "0.18.1", True),
        (8, None, None),
        (8, "unknown", None),
    ],
)
def test_the_version_of_peft_decides_where_shapes_do_not(tmp_path, width, version, outputs_first):
    """Gate and up have 2 x width outputs, and 16 inputs."""
    config = Qwen3MoeConfig(**QWEN3_MOE, intermediate_dim=width)
    shapes = {"lora_A": (8, 16), "lora_B": (2 * width, 8)}
    rng = np.random.default_rng(0)
    arrays = {f"{MODULE}.{side}.weight": rng.normal(size=shape) for side, shape in shapes.items()}
    settings = {"target_parameters": ["layers.0.mlp.experts.gate_up_proj"], "peft_version": version}
    folder = old_files(tmp_path / "adapter", settings, arrays)
    sizes = AxisSizes({"layers": 2, "experts": 4, "embed": 16, "mlp": width}, {})
    if outputs_first is None:
        with pytest.raises(ConfigError, match=r"as many inputs as outputs.* Set peft_version in adapter_config\.json"):
            read_adapters(folder, config, sizes)
        return
    up = read_adapters(folder, config, sizes).adapters["body.layers.stacked.mlp.up_proj"]
    a, b = (arrays[f"{MODULE}.{side}.weight"] for side in shapes)
    a, b = a.reshape(4, 2, -1), b.reshape(-1, 2, 4)
    change = np.einsum("ire,ero->eoi" if outputs_first else "ore,eri->eoi", b, a)
    np.testing.assert_allclose(up.b[:4] @ up.a[:4], change[:, width:], rtol=1e-5)
    assert not up.a[4:].any(), "layer 1 has none"


@pytest.mark.parametrize(
    ("settings", "name", "message"),
    [
        ({"target_parameters": ["experts.other"]}, MODULE, "no adapters"),
        (
            {"target_parameters": ["0.mlp.experts.down_proj"], "r": 3},
            MODULE,
            r"\[8, 16\] in the file, but .* rank 3 of 4 experts expected",
        ),
        ({"target_parameters": ["0.mlp.experts.down_proj"], "use_dora": True}, MODULE, "does not compute for experts"),
        ({"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}, MODULE, "missing: .*base_layer"),
        ({"target_parameters": ["0.mlp.experts.down_proj"]}, MODULE, "maps 16 features to 48, but 24 to 16 expected"),
        ({}, MODULE, "no adapters"),
        ({}, f"{MODULE}.4.up_proj", "no adapters"),
        ({"rank_pattern": {"1.up_proj": 3}}, f"{MODULE}.0.up_proj", r"\[8, 16\] in the file, but .* rank 2 expected"),
    ],
    ids=str,
)
def test_other_adapters_of_experts_are_refused(tmp_path, settings, name, message):
    config = Qwen3MoeConfig(**QWEN3_MOE, intermediate_dim=24)
    arrays = {f"{name}.{side}.weight": np.ones(s) for side, s in {"lora_A": (8, 16), "lora_B": (48, 8)}.items()}
    folder = old_files(tmp_path / "adapter", {"peft_version": "0.21.2", **settings}, arrays)
    with pytest.raises(ConfigError, match=message):
        read_adapters(folder, config, AxisSizes({"layers": 2, "experts": 4, "embed": 16, "mlp": 24}, {}))
