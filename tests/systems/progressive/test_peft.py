"""PEFT's adapters in models whose layers are cut into stacks."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.interop.peft.names import AxisSizes
from jaxlm.interop.peft.read import lora_keys, read_adapters
from jaxlm.plan.load_config import decode_run
from jaxlm.plan.plan import make_plan
from jaxlm.reading.yaml import ConfigSource
from jaxlm.session.load_model import open_model
from jaxlm.surgery.lora import LoraConfig
from tests.answers import write_instructions, write_model
from tests.surgery.test_peft import (
    LORA,
    PHASE,
    SIZES,
    adapted,  # noqa: F401 - a fixture
    busy,
    logits_of,
    save_adapters_of,
    tuned,
)


@pytest.mark.soak
def test_adapters_of_the_upper_layers_only(tmp_path):
    """PEFT and jaxlm compute the same, and `--adapter` adds a whole model's adapters to a checkpoint that was cut."""
    peft, torch = pytest.importorskip("peft"), pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    write_model(tmp_path / "hf", num_hidden_layers=3)
    upper = {**LORA, "target": r"body\.1.*(q_proj|mlp)"}
    write_instructions(tmp_path / "train.jsonl")
    tuned(tmp_path, tmp_path / "train.jsonl", 6, {"type": "split_at", "layer": 1}, upper)
    trained = open_model(str(tmp_path / "checkpoints" / "lora"), {})
    ids = np.random.default_rng(0).integers(0, trained.plan.state_builder.Vocab.size, size=(8, 24))
    with trained.plan.layout.use():
        model = trained.load()
        ours = logits_of(model, ids)
        save_adapters_of(model, tmp_path / "adapter", trained.plan)
        some = {path: leaf for path, leaf in tree.leaves(model) if path.endswith("q_proj.a")}
        assert {path: leaf.axis_size("layers") for path, leaf in some.items()} == {
            "body.1.layers.stacked.attn.q_proj.a": 2
        }
    described = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert described["layers_to_transform"] == [1, 2]
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert not [name for name, _ in theirs.named_parameters() if "layers.0." in name and "lora" in name]
    with torch.no_grad():
        np.testing.assert_allclose(ours, theirs(torch.tensor(ids)).logits.numpy(), rtol=1e-4, atol=1e-4)

    torch.manual_seed(0)
    settings = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["o_proj"], init_lora_weights=False)
    both = peft.get_peft_model(theirs.merge_and_unload(), settings).eval()
    both.save_pretrained(tmp_path / "more")
    named = open_model(str(tmp_path / "checkpoints" / "lora"), {}, adapter=str(tmp_path / "more"))
    with named.plan.layout.use(), torch.no_grad():
        expected = both(torch.tensor(ids)).logits.numpy()
        np.testing.assert_allclose(logits_of(named.for_inference(), ids), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_adapters_of_different_layers_come_back(tmp_path):
    """Those of two stacks, of other modules and ranks in each: what has none in PEFT has none here."""
    lower, upper = ({**LORA, "target": target} for target in (r"body\.0.*q_proj", r"body\.1.*v_proj"))
    upper |= {"rank": 3, "alpha": 3.0}
    config = {
        "model": {"type": "llama", **SIZES},
        "phases": [{**PHASE, "surgery": [{"type": "split_at", "layer": 1}, lower, upper]}],
        "trainer": {"train_batch_size": 8},
    }
    plan = make_plan(decode_run(ConfigSource(config), None), "x", 61)
    with plan.layout.use():
        abstract = plan.state_builder.abstract_state(plan.phases[0]).model
        model = busy(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract))
        save_adapters_of(model, tmp_path / "adapter", plan)
    described = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert described["target_modules"] == ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.v_proj"]
    read = read_adapters(tmp_path / "adapter", plan.config.model, AxisSizes({"layers": 2}, {}))
    sizes = LoraConfig(**lora_keys(tmp_path / "adapter", plan.config.model))
    assert sizes.rank_pattern
    assert sizes.layers_to_transform is None
    leaves = dict(tree.leaves(model))
    for path, (name, rank, layer) in {"0": ("q_proj", 4, 0), "1": ("v_proj", 3, 1)}.items():
        found = read.adapters[f"body.layers.stacked.attn.{name}"].a
        assert found.shape == (2, rank, 32)
        np.testing.assert_array_equal(found[layer], leaves[f"body.{path}.layers.stacked.attn.{name}.a"].array[0])
        assert not found[1 - layer].any()


@pytest.mark.slow
def test_adapters_for_all_layers_do_not_start_a_model_that_was_cut(adapted):  # noqa: F811
    *_, folder = adapted
    lora = {"type": "lora", "from_peft": str(folder), "target": "q_proj|v_proj|mlp", "dropout": 0.0}
    config = {
        "model": {"type": "llama", **SIZES},
        "phases": [{**PHASE, "surgery": [{"type": "split_at", "layer": 1}, lora]}],
        "trainer": {"train_batch_size": 8},
    }
    plan = make_plan(decode_run(ConfigSource(config), None), "x", 61)
    with pytest.raises(ConfigError, match="but these have been cut into stacks"):
        plan.state_builder.initial_leaves(plan.phases[0])
