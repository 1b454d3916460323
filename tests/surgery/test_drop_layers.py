"""Dropped layers: the config that describes what is left, its outputs, what is measured, and which moments go on."""

import dataclasses
import itertools
import json

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import check_fields
from jaxlm.core.values.batch_types import TokenBatch
from jaxlm.core.values.logged import LayerTable
from jaxlm.engine.entry import enter_phase
from jaxlm.interop.hf.families.gemma2 import Gemma2Config
from jaxlm.interop.hf.families.gpt2 import Gpt2Config
from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.interop.hf.families.olmo3 import Olmo3Config
from jaxlm.interop.hf.families.qwen2 import Qwen2Config
from jaxlm.interop.hf.families.qwen2_moe import Qwen2MoeConfig
from jaxlm.interop.hf.families.qwen3_moe import Qwen3MoeConfig
from jaxlm.interop.hf.families.smollm3 import SmolLm3Config
from jaxlm.interop.hf.folder import save_folder
from jaxlm.interop.hf.verify import verify_folder
from jaxlm.models.base import Inputs, vocab_axis
from jaxlm.plan.load_config import decode_run
from jaxlm.plan.plan import make_plan
from jaxlm.reading.yaml import ConfigSource
from jaxlm.session.references import flops_per_token
from jaxlm.surgery.drop_layers import DropLayersConfig
from tests.engine.helpers import layout, one_device

SIZES = {"seq_len": 32, "hidden_dim": 32, "num_heads": 4}
GQA = {**SIZES, "intermediate_dim": 48, "num_kv_heads": 2}
MOE = {**GQA, "num_experts": 4, "num_experts_per_token": 2, "dense_intermediate_dim": 24}
LLAMA = LlamaConfig(**GQA, num_layers=5)
GEMMA2 = Gemma2Config(**GQA, num_layers=6, head_dim=8, sliding_window=3)
QWEN2 = Qwen2Config(**GQA, num_layers=6, sliding_window=3, max_window_layers=3)
# (config, dropped layers, keys of the changed config beside num_layers).
CHANGED = {
    "llama": (LLAMA, [1, 3], {}),
    "gemma2, the pattern goes on": (GEMMA2, [1, 2], {}),
    "gemma2": (GEMMA2, [0, 3], {"sliding_window_pattern": None, "local_layers": (1, 2)}),
    "gemma2 by number": (
        dataclasses.replace(GEMMA2, sliding_window_pattern=None, local_layers=[0, 5]),
        [1],
        {"local_layers": (0, 4)},
    ),
    "olmo3": (
        Olmo3Config(**SIZES, intermediate_dim=48, num_layers=5, sliding_window=3),
        [0],
        {"sliding_window_pattern": None, "local_layers": (0, 1, 3)},
    ),
    "qwen2": (QWEN2, [1, 5], {"max_window_layers": 2}),
    "qwen2 without windows": (dataclasses.replace(QWEN2, sliding_window=None), [1], {}),
    "qwen3_moe": (
        Qwen3MoeConfig(**MOE, num_layers=6, head_dim=8, decoder_sparse_step=2),
        [0, 3],
        {"decoder_sparse_step": 1, "mlp_only_layers": (1, 2)},
    ),
    "qwen2_moe, all layers with experts remain": (
        Qwen2MoeConfig(
            **MOE,
            num_layers=4,
            mlp_only_layers=[0],
            local_layers=[1, 3],
            sliding_window=3,
            shared_expert_intermediate_dim=16,
        ),
        [0],
        {"mlp_only_layers": (), "dense_intermediate_dim": None, "local_layers": (0, 2)},
    ),
    "smollm3": (
        SmolLm3Config(**GQA, num_layers=6, sliding_window=3),
        [1],
        {"no_rope_layer_interval": None, "unrotated_layers": (2,)},
    ),
    "gpt2": (Gpt2Config(**SIZES, num_layers=4), [2], {}),
}


def without(model, layers):
    return DropLayersConfig(layers=layers).apply(model, key=jax.random.key(0))


@pytest.mark.parametrize(("config", "dropped", "keys"), CHANGED.values(), ids=CHANGED)
def test_the_changed_config_describes_the_model(config, dropped, keys):
    changed = DropLayersConfig(layers=dropped).changed(config)
    changed.check()
    num_layers = config.num_layers - len(dropped)
    assert changed == dataclasses.replace(config, num_layers=num_layers, **keys)
    make = lambda config: config.build(vocab_axis(40), key=jax.random.key(0))  # noqa: E731
    shapes = jax.eval_shape(lambda: without(make(config), dropped))
    expected = jax.eval_shape(lambda: make(changed))
    assert jax.tree.structure(shapes) == jax.tree.structure(expected)
    assert jax.tree.leaves(shapes) == jax.tree.leaves(expected)
    kept = [layer for layer in range(config.num_layers) if layer not in dropped]
    assert shapes.body.kinds_by_layer == tuple(config.rotated_kinds[layer] for layer in kept)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "dropped"),
    [
        pytest.param(LLAMA, [1, 3], id="llama"),
        pytest.param(GEMMA2, [0, 3], id="gemma2"),
        pytest.param(QWEN2, [1, 5], id="qwen2"),
    ],
)
def test_transformers_computes_the_same_without_these_layers(config, dropped, built, tmp_path):
    """The whole model is exported, and loses its layers there; the export of the pruned one is verified too."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    whole = built(config)
    pruned, changed = without(whole, dropped), DropLayersConfig(layers=dropped).changed(config)
    save_folder(tmp_path / "whole", whole, config, one_device(), dtype=np.float32, files={}, special_ids={})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole", attn_implementation="eager").eval()
    kept = [layer for layer in range(config.num_layers) if layer not in dropped]
    theirs.model.layers = torch.nn.ModuleList([theirs.model.layers[layer] for layer in kept])
    theirs.config.num_hidden_layers = len(kept)
    if getattr(theirs.config, "layer_types", None) is not None:
        theirs.config.layer_types = [theirs.config.layer_types[layer] for layer in kept]
    ids = np.random.default_rng(0).integers(0, 40, (2, 24))
    with torch.no_grad():
        expected = theirs(torch.tensor(ids), use_cache=False).logits.numpy()
    found = jax.jit(lambda model, batch: model.logits(model.hidden(inputs(batch)).final).array)(pruned, batch(ids))
    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    save_folder(tmp_path / "pruned", pruned, changed, one_device(), dtype=np.float32, files={}, special_ids={})
    assert json.loads((tmp_path / "pruned" / "config.json").read_text())["num_hidden_layers"] == len(kept)
    assert "the same" in verify_folder(tmp_path / "pruned", pruned, changed, one_device())


def inputs(batch):
    return Inputs(batch.tokens, batch.positions, batch.segment_ids)


def batch(ids, padding: int = 0) -> TokenBatch:
    axes = tuple(map(hax.Axis, ("batch", "position"), ids.shape))
    segments = np.ones_like(ids)
    segments[:, ids.shape[1] - padding :] = 0
    positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    columns = {"tokens": ids, "targets": ids, "loss_mask": segments, "segment_ids": segments, "positions": positions}
    return TokenBatch(**{name: hax.named(jnp.asarray(column), axes) for name, column in columns.items()})


NUM_LAYERS = DropLayersConfig(num_layers=2, calibration_batches=3)


@pytest.mark.slow
def test_block_influence_is_that_of_the_residual_streams(built):
    """Against cosines in float64; padding does not count."""
    model, ids = built(LLAMA), np.random.default_rng(0).integers(0, 40, (2, 32))
    sums = jax.jit(NUM_LAYERS.measure)(model, batch(ids, padding=5))
    names = ("embedding", *(f"layer_{layer}" for layer in range(5)))
    taps = jax.jit(lambda: model.hidden(inputs(batch(ids, padding=5)), taps=names).taps)()
    streams = [np.asarray(taps[name].rearrange(("batch", "position", "embed")).array, np.float64) for name in names]
    for layer, (x, y) in enumerate(itertools.pairwise(streams)):
        cosine = (x * y).sum(-1) / np.linalg.norm(x, axis=-1) / np.linalg.norm(y, axis=-1)
        np.testing.assert_allclose(sums["cosines"][layer], cosine[:, :27].sum(), rtol=1e-5)
    assert int(sums["tokens"]) == 2 * 27


SUMS = {"cosines": jnp.asarray([5.0, 9.0, 1.0, 9.5, 2.0]), "tokens": jnp.asarray(10.0)}


@pytest.mark.slow
def test_the_layers_with_the_least_influence_are_dropped_with_their_moments(built):
    whole = built(LLAMA)
    expected = without(whole, [1, 3])
    structure = NUM_LAYERS.apply(whole, key=jax.random.key(0))
    fill = lambda model, before: NUM_LAYERS.fill(model, before, refs={}, sums=SUMS, key=jax.random.key(0))  # noqa: E731
    assert eqx.tree_equal(jax.jit(fill)(structure, whole), expected)
    assert NUM_LAYERS.describe(whole, SUMS).text == (
        "drop_layers: layers 1, 3 of 5 are dropped, which matter least over 10 tokens, by layer (Block Influence):"
        " 0: 0.5000; 1: 0.1000; 2: 0.9000; 3: 0.0500; 4: 0.8000"
    )
    some, _ = tree.partition(whole, tree.select(whole, ["mlp"]))
    assert eqx.tree_equal(NUM_LAYERS.moved(some, SUMS), tree.partition(expected, tree.select(expected, ["mlp"]))[0]), (
        "parts of a model, as moments are"
    )
    assert NUM_LAYERS.merge(expected) is expected


def test_equal_influences_drop_the_last_layers(built):
    equal = {"cosines": jnp.ones(5), "tokens": jnp.asarray(10.0)}
    structure = NUM_LAYERS.apply(built(LLAMA), key=jax.random.key(0))
    filled = NUM_LAYERS.fill(structure, built(LLAMA), refs={}, sums=equal, key=jax.random.key(0))
    assert eqx.tree_equal(filled, without(built(LLAMA), [3, 4]))


REFUSED = {
    "no such layer": (LLAMA, {"layers": [5]}, r"layers: \[5\] given, but the model has 5 layers"),
    "twice": (LLAMA, {"layers": [1, 1]}, r"layers: \[1, 1\] given"),
    "all": (LLAMA, {"num_layers": 5}, "num_layers: 5 given, .* at least one must remain"),
    "kinds": (GEMMA2, {"num_layers": 1}, "layer 1 of the model is of another kind .* Set `layers` instead"),
    "stacks": (CHANGED["qwen3_moe"][0], {"num_layers": 1}, "layer 1 of the model is of another kind"),
    "by number": (
        Gpt2Config(**SIZES, num_layers=4, scale_attn_by_inverse_layer_idx=True),
        {"layers": [1]},
        "the scale of a layer depends on its number",
    ),
}


@pytest.mark.parametrize(("config", "keys", "message"), REFUSED.values(), ids=REFUSED)
def test_what_no_config_describes_is_refused(config, keys, message):
    with pytest.raises(ConfigError, match=f"^surgery drop_layers: .*{message}"):
        DropLayersConfig(**keys).changed(config)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "layers: none of layers, num_layers given"),
        ({"layers": [1], "num_layers": 1}, r"layers: .* given together with num_layers: 1"),
        ({"layers": [1], "calibration_batches": 4}, "calibration_batches: 4 given without num_layers"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(keys, message):
    with pytest.raises(ConfigError, match=message):
        check_fields(DropLayersConfig(**keys))


def planned(surgery, **keys):
    phases = [{"name": "pretrain"}, {"name": "heal", "surgery": surgery, "carry_optimizer": True}]
    model = {"type": "llama", **GQA, "num_layers": 5}
    source = {"model": model, "phases": phases, "trainer": {"train_batch_size": 8, "num_train_steps": 1}, **keys}
    return make_plan(decode_run(ConfigSource(source), None), "x", 40)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            {"type": "flax", "factory": "tests.models.flax_models:nothing"},
            "does not know the layers of a model of type flax",
        ),
    ],
    ids=["flax"],
)
def test_families_that_cannot_lose_layers_say_why(model, message):
    with pytest.raises(ConfigError, match=message):
        planned([{"type": "drop_layers", "layers": [1]}], model=model)


def test_a_phase_knows_its_model():
    """FLOPs, and the adapters of a later surgery, are those of the model with fewer layers."""
    plan = planned([{"type": "drop_layers", "layers": [1, 3]}, {"type": "lora", "layers_to_transform": [2]}])
    first, second = plan.phases
    assert (plan.model.num_layers, first.model.num_layers, second.model.num_layers) == (5, 5, 3)
    assert flops_per_token(plan, first).causal == LLAMA.flops_per_token(40).causal
    fewer = dataclasses.replace(LLAMA, num_layers=3)
    adapters = plan.state_builder.abstract_state(second).model.body.layers.stacked.attn.q_proj
    assert adapters.layer.array.shape == (3,)
    alone = planned([{"type": "drop_layers", "layers": [1, 3]}])
    assert flops_per_token(alone, alone.phases[1]).causal == fewer.flops_per_token(40).causal


@pytest.mark.slow
def test_one_and_eight_devices_choose_the_same_layers(built):
    where = {"one": one_device(), "eight": layout(2)}
    rng, said, models = np.random.default_rng(1), {}, {}
    ids = rng.integers(0, 40, (3, 16, 32))
    plan = planned([{"type": "drop_layers", "num_layers": 2, "calibration_batches": 3}])
    first, second = plan.phases
    for name, placed in where.items():
        with placed.use():
            decided: list[LayerTable] = []
            state = enter_phase(plan.state_builder, first, placed, None)()
            before = jax.device_get(state.model)
            entered = enter_phase(
                plan.state_builder, second, placed, state, open_batches=lambda: Opened(ids), report=decided.append
            )()
            (table,) = decided
            said[name], models[name] = table.title, jax.device_get(entered.model)
            dropped = [int(layer) for layer in table.title.split("layers ")[1].split(" of ")[0].split(", ")]
            assert eqx.tree_equal(models[name], jax.device_get(without(before, dropped)))
            assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.model)), "the layers free their memory"
    assert said["one"].split(" of ")[0] == said["eight"].split(" of ")[0]


class Opened:
    """Batches of tokens {microbatch, batch, position}."""

    def __init__(self, ids):
        self.ids = iter(ids)

    def __next__(self):
        one = batch(next(self.ids))
        return jax.tree.map(lambda column: column.broadcast_axis(hax.Axis("microbatch", 1)), one, is_leaf=tree.is_named)

    def close(self):
        pass
