"""Adapters as PEFT saves them: what they compute, here and in PEFT, after reading and after writing."""

import functools
import json
from pathlib import Path

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlm.core import tree
from jaxlm.interop.hf.safetensors_file import SafetensorsFile
from jaxlm.models.base import Inputs
from jaxlm.session.load_model import open_model
from jaxlm.surgery.lora import save_peft, saved_modules
from jaxlm.surgery.lora_layers import LoraLinear
from tests.answers import LLAMA, write_tokenizer
from tests.surgery.test_peft import logits_of
from tests.tiers import one_of

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LAYERS = "model.layers"
HYBRID = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
# Name -> model type, keys of its config, keys of PEFT's LoraConfig.
CASES = {
    "rank_pattern": (
        "llama",
        {},
        {
            "target_modules": ALL,
            "rank_pattern": {"q_proj": 2, r"layers\.[12]\.mlp\.up_proj": 5, f"{LAYERS}.0.mlp.down_proj": 1},
            "alpha_pattern": {"v_proj": 7, r"layers\.0\.mlp\..*": 3},
        },
    ),
    "layers_to_transform": (
        "llama",
        {},
        {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [0, 2], "layers_pattern": "layers"},
    ),
    "scattered": (
        "llama",
        {},
        {
            "target_modules": r".*\.(0\.self_attn\.q_proj|[12]\.self_attn\.v_proj|1\.mlp\.(up|down)_proj)",
            "use_rslora": True,
            "rank_pattern": {r"2\.self_attn\.v_proj": 6},
        },
    ),
    "exclude_modules": ("llama", {}, {"target_modules": "all-linear", "exclude_modules": r".*layers\.1\..*"}),
    "head": ("llama", {}, {"target_modules": ["q_proj", "lm_head"]}),
    "embedding": ("llama", {}, {"target_modules": ["q_proj", "embed_tokens"], "use_rslora": True}),
    "modules_to_save": (
        "llama",
        {"attention_bias": True},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens", "input_layernorm", "k_proj"]},
    ),
    "lora_only": ("qwen2", {}, {"target_modules": ["q_proj", "up_proj"], "bias": "lora_only"}),
    "bias": ("gpt2", {}, {"target_modules": ["c_attn", "mlp.c_proj"], "bias": "all", "fan_in_fan_out": True}),
    "dora": (
        "qwen2",
        {},
        {"target_modules": ALL, "use_dora": True, "rank_pattern": {r"layers\.1\..*": 6}, "layers_to_transform": [0, 1]},
    ),
    "dora_head": ("llama", {}, {"target_modules": ["lm_head", "embed_tokens"], "use_dora": True}),
    "dora_fused": ("phi3", {}, {"target_modules": "all-linear", "use_dora": True, "rank_pattern": {"qkv_proj": 6}}),
    "hybrid": (
        "qwen3_5_text",
        HYBRID,
        {
            "target_modules": ["in_proj_qkv", "in_proj_z", "in_proj_a", "out_proj", "q_proj", "o_proj", "down_proj"],
            "rank_pattern": {"in_proj_qkv": 6, r"layers\.0\.linear_attn\.out_proj": 2},
        },
    ),
    "dora_hybrid": ("qwen3_5_text", HYBRID, {"target_modules": "all-linear", "use_dora": True}),
    "dora_conv1d": ("gpt2", {}, {"target_modules": ["c_attn", "c_fc"], "use_dora": True, "fan_in_fan_out": True}),
    "tied_embedding": ("qwen2", {"tie_word_embeddings": True}, {"target_modules": ["v_proj", "embed_tokens"]}),
    "tied_head": ("qwen2", {"tie_word_embeddings": True}, {"target_modules": ["v_proj", "lm_head"]}),
    "tied_both": (
        "gemma2",
        {"tie_word_embeddings": True, "head_dim": 8, "query_pre_attn_scalar": 8},
        {"target_modules": ["embed_tokens", "lm_head"], "use_dora": True},
    ),
    "tied_shared": (
        "qwen2",
        {"tie_word_embeddings": True},
        {"target_modules": ["v_proj", "embed_tokens"], "ensure_weight_tying": True},
    ),
    "tied_saved": (
        "qwen2",
        {"tie_word_embeddings": True},
        {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
}
FILE = "adapter_model.safetensors"


def write_base(folder: Path, kind: str, keys: dict, torch, transformers) -> int:
    num_tokens = write_tokenizer(folder)
    torch.manual_seed(0)
    sizes = {**LLAMA, "num_hidden_layers": 3, "initializer_range": 0.1}
    if kind == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "initializer_range": 0.1}
    config = transformers.AutoConfig.for_model(
        kind, **sizes, **keys, vocab_size=num_tokens, bos_token_id=0, eos_token_id=0, pad_token_id=None
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    model.save_pretrained(folder)
    return num_tokens


def load_base(folder: Path, torch, transformers):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def theirs_of(folder: Path, keys: dict, torch, transformers, peft):
    """A PEFT model with random adapters, and what else it trains is changed too."""
    settings = peft.LoraConfig(r=4, lora_alpha=6, init_lora_weights=False, task_type="CAUSAL_LM", **keys)
    model = peft.get_peft_model(load_base(folder, torch, transformers), settings).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "lora_A" not in name and "lora_B" not in name:
                parameter.mul_(1 + 0.3 * torch.randn_like(parameter)).add_(0.02 * torch.randn_like(parameter))
            elif "lora_" in name:
                parameter.mul_(0.4)
    return model


def close(ours, expected):
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)


def as_inputs(ids: np.ndarray) -> Inputs:
    axes = (hax.Axis("batch", ids.shape[0]), hax.Axis("position", ids.shape[1]))
    columns = (ids, np.broadcast_to(np.arange(ids.shape[1]), ids.shape), np.ones_like(ids))
    return Inputs(*(hax.named(jnp.asarray(column, jnp.int32), axes) for column in columns))


def logits_in_torch(model, ids, torch) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(ids)).logits.numpy()


@pytest.mark.slow
@pytest.mark.parametrize("case", one_of(reversed(CASES), but=3))
def test_adapters_compute_what_they_do_in_peft(tmp_path, case):
    """After reading; merged; after writing and reading them in PEFT; and after reading PEFT's copy again, to the last bit."""
    peft, torch = pytest.importorskip("peft"), pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    kind, model_keys, keys = CASES[case]
    # Chunks of the delta rule are added up in another order there.
    near = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4) if "hybrid" in case else close
    num_tokens = write_base(tmp_path / "hf", kind, model_keys, torch, transformers)
    theirs = theirs_of(tmp_path / "hf", keys, torch, transformers, peft)
    theirs.save_pretrained(tmp_path / "adapter")
    ids = np.random.default_rng(0).integers(0, num_tokens, size=(8, 24))
    expected = logits_in_torch(theirs, ids, torch)
    base = logits_in_torch(load_base(tmp_path / "hf", torch, transformers), ids, torch)
    assert np.abs(expected - base).max() > 0.02
    named = open_model(str(tmp_path / "hf"), {}, adapter=str(tmp_path / "adapter"))
    with named.plan.layout.use():
        model = named.load()
        ours = logits_of(model, ids)
        near(ours, expected)
        near(logits_of(named.for_inference(), ids), expected)
        options = {"dtype": np.float32, "base": "base", "saved": saved_modules(named.surgeries)}
        save_peft(tmp_path / "written", model, named.plan.config.model, named.plan.layout, **options)
    again = peft.PeftModel.from_pretrained(load_base(tmp_path / "hf", torch, transformers), tmp_path / "written").eval()
    near(logits_in_torch(again, ids, torch), expected)
    again.save_pretrained(tmp_path / "resaved")
    reread = open_model(str(tmp_path / "hf"), {}, adapter=str(tmp_path / "resaved"))
    with reread.plan.layout.use():
        # A matrix of several parameters was written with the ranks of all of them, and is read with those for each.
        exact = near if "fused" in case or "hybrid" in case else np.testing.assert_array_equal
        exact(logits_of(reread.load(), ids), ours)
    repeated = "lm_head" if case == "tied_shared" else " "
    num_theirs = sum(p.numel() for n, p in theirs.named_parameters() if "lora_" in n and repeated not in n)
    if not json.loads((tmp_path / "hf" / "config.json").read_text())["architectures"][0].startswith(
        ("GPT2", "Phi3", "Qwen3_5")
    ):
        sizes = tree.sizes(model)
        num_ours = sum(n for path, n in sizes.items() if path.endswith((".a", ".b", ".magnitude")))
        assert num_ours == num_theirs, "padding is no parameter"


@pytest.mark.slow
@pytest.mark.parametrize("case", one_of(["dora_head", "rank_pattern", "dora", "tied_both"]))
def test_steps_of_training_are_those_of_peft(tmp_path, case):
    """Four steps of AdamW on the same batches, with torch. What has no adapter does not move, and neither does padding."""
    peft, torch = pytest.importorskip("peft"), pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    kind, model_keys, keys = CASES[case]
    num_tokens = write_base(tmp_path / "hf", kind, model_keys, torch, transformers)
    theirs = theirs_of(tmp_path / "hf", keys, torch, transformers, peft)
    theirs.save_pretrained(tmp_path / "adapter")
    ids = np.random.default_rng(0).integers(0, num_tokens, size=(4, 8, 24))
    # A large epsilon, because the direction of a gradient that is nearly zero has no correct digits.
    rates = {"lr": 3e-3, "eps": 1e-3, "weight_decay": 0.1}
    optimizer = torch.optim.AdamW([p for p in theirs.parameters() if p.requires_grad], **rates)
    for batch in ids:
        loss = torch.nn.functional.cross_entropy(
            theirs(torch.tensor(batch)).logits[:, :-1].flatten(0, 1), torch.tensor(batch[:, 1:]).flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    theirs.save_pretrained(tmp_path / "theirs")

    named = open_model(str(tmp_path / "hf"), {}, adapter=str(tmp_path / "adapter"))
    with named.plan.layout.use():
        model = named.load()
        mask = tree.select(model, [r"\.(a|b|magnitude)$"])
        trained, frozen = tree.partition(model, mask)
        update = optax.adamw(rates["lr"], eps=rates["eps"], weight_decay=rates["weight_decay"])

        def mean_loss(trained, inputs, targets):
            whole = eqx.combine(trained, frozen, is_leaf=tree.is_named)
            logits = whole.logits(whole.hidden(inputs).final).rearrange(("batch", "position", "vocab")).array
            return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], targets).mean()

        @jax.jit
        def step(trained, state, inputs, targets):
            gradient = jax.grad(mean_loss)(trained, inputs, targets)
            change, state = update.update(gradient, state, trained)
            return optax.apply_updates(trained, change), state

        state = update.init(trained)
        for batch in ids:
            trained, state = step(trained, state, as_inputs(batch), jnp.asarray(batch[:, 1:]))
        stepped = eqx.combine(trained, frozen, is_leaf=tree.is_named)
        save_peft(tmp_path / "ours", stepped, named.plan.config.model, named.plan.layout, dtype=np.float32, base="base")
    ours, before, after = (
        {name: np.array(file.view(name)) for name in file.tensors}
        for file in (SafetensorsFile(tmp_path / each / FILE) for each in ("ours", "adapter", "theirs"))
    )
    adapters = {name for name in after if "lora_" in name}
    assert set(ours) == adapters
    for name in adapters:
        assert np.abs(after[name] - before[name]).max() > 1e-4, name
        np.testing.assert_allclose(ours[name], after[name], rtol=1e-5, atol=1e-5, err_msg=name)
    for path, sizes in ((path, layer.sizes) for path, layer in tree.modules_by_path(stepped, LoraLinear)):
        for number, size in enumerate(sizes):
            layer = dict(tree.leaves(stepped))
            assert not layer[f"{path}.a"]["layers", number, "lora_rank", size.rank :].array.any()
            assert not layer[f"{path}.b"]["layers", number, "lora_rank", size.rank :].array.any()
            if not size.rank and f"{path}.magnitude" in layer:
                assert not layer[f"{path}.magnitude"]["layers", number].array.any()
