"""Fewer key/value heads, against closed forms in float64, heads that are alike up to a rotation, and transformers."""

import dataclasses
import json

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import check_fields
from jaxlm.core.values.batch_types import TokenBatch
from jaxlm.engine.state import shardings
from jaxlm.interop.hf.families.gemma2 import Gemma2Config
from jaxlm.interop.hf.families.gemma3 import Gemma3Config
from jaxlm.interop.hf.families.glm4 import Glm4Config
from jaxlm.interop.hf.families.gpt2 import Gpt2Config
from jaxlm.interop.hf.families.gpt_neox import GptNeoxConfig
from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.interop.hf.families.mixtral import MixtralConfig
from jaxlm.interop.hf.families.mpt import MptConfig
from jaxlm.interop.hf.families.olmo2 import Olmo2Config
from jaxlm.interop.hf.families.qwen2 import Qwen2Config
from jaxlm.interop.hf.families.qwen2_moe import Qwen2MoeConfig
from jaxlm.interop.hf.families.qwen3 import Qwen3Config
from jaxlm.interop.hf.families.smollm3 import SmolLm3Config
from jaxlm.interop.hf.folder import save_folder
from jaxlm.models.base import vocab_axis
from jaxlm.models.mixers.attention import SelfAttention
from jaxlm.systems.nanochat.model import NanoConfig
from jaxlm.systems.upcycle.bottleneck import HeadFeatures
from jaxlm.systems.upcycle.dba import DbaConfig
from jaxlm.systems.upcycle.pool_kv_heads import (
    PoolKvHeadsConfig,
    aligned,
    any_rotation,
    loss_of_mean,
    rotation_of_pairs,
)
from tests.engine.helpers import layout, one_device
from tests.surgery.trained import nll, trained
from tests.tiers import one_of

SIZES = {"seq_len": 32, "hidden_dim": 32, "intermediate_dim": 48, "num_layers": 2, "num_heads": 8}
MHA = {**SIZES, "num_kv_heads": 8}
LLAMA = LlamaConfig(**MHA)
MIXED = Qwen2MoeConfig(
    **{**MHA, "num_layers": 3},
    num_experts=4,
    mlp_only_layers=[1],
    dense_intermediate_dim=24,
    shared_expert_intermediate_dim=16,
)
POOLED = {
    "llama": LLAMA,
    "biased": dataclasses.replace(LLAMA, attention_bias=True),
    "qwen2": Qwen2Config(**MHA),
    "qwen3": Qwen3Config(**{**MHA, "head_dim": 8}),
    "gemma3, local and global": Gemma3Config(**{**MHA, "num_layers": 3, "head_dim": 8}, sliding_window_pattern=2),
    "gemma2": Gemma2Config(**{**MHA, "head_dim": 8}),
    "glm4, neighbors rotate": Glm4Config(**{**MHA, "head_dim": 8}),
    "gpt_neox, a part rotates": GptNeoxConfig(**MHA),
    "mpt, alibi": MptConfig(**MHA),
    "smollm3, some layers do not rotate": SmolLm3Config(**MHA, no_rope_layer_interval=2),
    "mixtral": MixtralConfig(**MHA),
    "layers with and without experts": MIXED,
}
QUICK = ("biased", "gemma3, local and global", "glm4, neighbors rotate", "layers with and without experts")
FAMILIES = [
    pytest.param(config, id=name, marks=() if name in QUICK else pytest.mark.slow) for name, config in POOLED.items()
]
HEAD, INPUTS = 8, 20


def attentions(model):
    return dict(tree.modules_by_path(model, SelfAttention))


def replaced(model, change):
    """The model with `change(path, plain array)` in the place of some leaves."""
    return tree.map_leaves(lambda path, leaf: hax.named(jnp.asarray(change(path, leaf)), leaf.axes), model)


def with_groups(model, num_groups, like):
    """The model whose heads of a group are made of the first by `like(path, heads of a group)`. A kv head is on axis 1."""

    def change(path, leaf):
        if "k_proj" not in path and "v_proj" not in path:
            return leaf.array
        array = np.asarray(leaf.rearrange(("layers", "kv_heads", ...)).array)
        grouped = array.reshape(array.shape[0], num_groups, -1, *array.shape[2:])
        shape, axes = array.shape, leaf.rearrange(("layers", "kv_heads", ...)).axes
        made = like(path, np.repeat(grouped[:, :, :1], grouped.shape[2], axis=2)).reshape(shape)
        return hax.named(jnp.asarray(made), axes).rearrange(leaf.axes).array

    return replaced(model, change)


def pooled(surgery, model, sums=None):
    made = jax.jit(lambda model: surgery.apply(model, key=jax.random.key(1)))(model)
    if sums is None:
        return made
    fill = jax.jit(lambda new, old, sums: surgery.fill(new, old, refs={}, sums=sums, key=jax.random.key(2)))
    return fill(made, model, sums)


def batch(seed=0, vocab=40):
    rng = np.random.default_rng(seed)
    axes = (hax.Axis("batch", 8), hax.Axis("position", 24))
    ids = np.minimum(rng.geometric(0.15, (8, 24)) - 1, vocab - 1)
    tokens, positions, segments = (
        hax.named(jnp.asarray(a, jnp.int32), axes) for a in (ids, np.tile(np.arange(24), (8, 1)), np.ones_like(ids))
    )
    return TokenBatch(tokens, tokens, hax.ones(axes), segments, positions)


def ids():
    return np.random.default_rng(0).integers(0, 40, (2, 24))


@pytest.mark.slow
@pytest.mark.parametrize("config", one_of(FAMILIES, but=4))
def test_heads_that_are_equal_in_a_group_change_nothing(config, built, as_inputs, logits_of):
    model = with_groups(built(config), 2, lambda path, heads: heads)
    expected = logits_of(model, as_inputs(ids()))
    for method in ("mean", "first"):
        surgery = PoolKvHeadsConfig(num_kv_heads=2, method=method)
        new, changed = pooled(surgery, model), surgery.changed(config)
        assert changed == new.config == dataclasses.replace(config, num_kv_heads=2)
        shape = jax.eval_shape(lambda config=changed: config.build(vocab_axis(40), key=jax.random.key(0)))
        assert jax.tree.structure(new) == jax.tree.structure(shape)
        assert [leaf.shape for leaf in jax.tree.leaves(new)] == [leaf.shape for leaf in jax.tree.leaves(shape)]
        np.testing.assert_allclose(logits_of(new, as_inputs(ids())), expected, atol=1e-5 * np.abs(expected).max())


def test_heads_are_means_and_everything_else_keeps_its_bits(built):
    model = built(dataclasses.replace(LLAMA, attention_bias=True))
    old = dict(tree.leaves(model))
    for method in ("mean", "first", "random"):
        new = dict(tree.leaves(pooled(PoolKvHeadsConfig(num_kv_heads=4, method=method), model)))
        assert new.keys() == old.keys()
        for path, leaf in new.items():
            before = np.asarray(old[path].array)
            if "k_proj" not in path and "v_proj" not in path:
                np.testing.assert_array_equal(leaf.array, before, err_msg=path)
                continue
            grouped = before.astype(np.float64).reshape(2, 4, 2, *before.shape[2:])
            if method == "random":
                assert np.std(leaf.array) == pytest.approx(0 if path.endswith("bias") else 0.02, rel=0.1)
            else:
                expected = grouped.mean(axis=2) if method == "mean" else grouped[:, :, 0]
                np.testing.assert_allclose(leaf.array, expected, rtol=1e-6, atol=1e-7, err_msg=path)


@pytest.mark.slow
@pytest.mark.parametrize("config", one_of(FAMILIES, but=4))
def test_turned_heads_compute_the_same(config, built, as_inputs, logits_of):
    """Exact before heads become one. Norms of queries and keys that have weights leave keys as they are."""
    model, surgery = built(config), PoolKvHeadsConfig(num_kv_heads=2, align=True)
    surgery.changed(config)
    turned = jax.jit(surgery._aligned)(model, jax.jit(surgery.measure)(model, batch()))
    expected = logits_of(model, as_inputs(ids()))
    np.testing.assert_allclose(logits_of(turned, as_inputs(ids())), expected, atol=1e-5 * np.abs(expected).max())
    has_norm = any(attention.k_norm is not None for attention in attentions(model).values())
    for path, attention in attentions(turned).items():
        before = attentions(model)[path]
        weights = [[getattr(one, f"{n}_proj").weight.array for n in "qkvo"] for one in (before, attention)]
        changes = [float(jnp.abs(new - old).max()) for old, new in zip(*weights, strict=True)]
        assert changes[2] > 0.1
        assert changes[3] > 0.1
        assert changes[0] == changes[1] == 0 if has_norm else min(changes[:2]) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["biased", "glm4, neighbors rotate", "gpt_neox, a part rotates", "mpt, alibi"])
def test_heads_that_are_turned_copies_become_one_without_loss(name, built, as_inputs, logits_of):
    """Copies of one head with keys turned pair by pair and values by any orthogonal matrix, which numpy made; queries and
    outputs of each group are turned alike, so that alignment finds what was done."""
    config, rng = POOLED[name], np.random.default_rng(3)
    model = built(config)
    size = config.HeadSize.size
    kind = config.kinds[0]
    rotated = 0 if kind.rope is None else kind.rope.num_rotated(size)
    features = HeadFeatures.of(size, rotated, interleaved=kind.interleaved)

    def orthogonal(n):
        return np.linalg.qr(rng.normal(size=(n, n)))[0]

    def key_turn():
        turn = np.zeros((size, size))
        for f, s in zip(features.first, features.second, strict=True):
            angle = rng.uniform(-np.pi, np.pi)
            turn[np.ix_((f, s), (f, s))] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
        rest = list(features.unrotated)
        turn[np.ix_(rest, rest)] = orthogonal(len(rest))
        return turn

    turns = {
        letter: np.stack([[make() for _ in range(config.KVHeads.size)] for _ in range(config.num_layers)])
        for letter, make in (("k", key_turn), ("v", lambda: orthogonal(size)))
    }

    def change(path, leaf):
        letter = {"q_proj": "k", "k_proj": "k", "v_proj": "v", "o_proj": "v"}.get(path.split(".")[-2])
        if letter is None or path.endswith("o_proj.bias"):
            return leaf.array
        head = "heads" if "q_proj" in path or "o_proj" in path else "kv_heads"
        first = leaf.rearrange(("layers", head, "head_size", ...))
        made = np.einsum("lgde,lge...->lgd...", turns[letter], np.asarray(first.array, np.float64))
        return hax.named(jnp.asarray(made, jnp.float32), first.axes).rearrange(leaf.axes).array

    copies = with_groups(model, 2, lambda path, heads: heads)
    turned = replaced(copies, change)
    read = as_inputs(ids())
    expected = logits_of(copies, read)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(logits_of(turned, read), expected, atol=1e-5 * scale)
    surgery = PoolKvHeadsConfig(num_kv_heads=2, align=True, calibration_batches=0)
    np.testing.assert_allclose(logits_of(pooled(surgery, turned), read), expected, atol=1e-4 * scale)
    averaged = logits_of(pooled(PoolKvHeadsConfig(num_kv_heads=2), turned), read)
    assert np.abs(averaged - expected).max() > 0.1 * scale


@pytest.mark.slow
def test_two_heads_get_the_best_rotation():
    """Procrustes: the sum of the two turned heads' products is that of the singular values; for keys, of the absolute values
    of complex products. The loss of the mean follows."""
    rng = np.random.default_rng(0)
    heads = rng.normal(size=(1, 2, HEAD, INPUTS)) * np.geomspace(1, 0.05, INPUTS)
    x = rng.normal(size=(300, INPUTS)) @ rng.normal(size=(INPUTS, INPUTS))
    moment = x.T @ x / len(x)
    cross, (one, two) = heads[0, 0] @ moment @ heads[0, 1].T, heads[0]
    features = HeadFeatures.of(HEAD, 6, interleaved=False)
    pairs = np.eye(HEAD)[list(features.first)] + 1j * np.eye(HEAD)[list(features.second)]
    by_pair = np.abs(np.einsum("pd,de,pe->p", pairs, cross, pairs.conj()))
    whole = np.linalg.svd(cross, compute_uv=False).sum()
    rest = np.linalg.svd(cross[6:, 6:], compute_uv=False).sum()
    total = sum(np.trace(w @ moment @ w.T) for w in (one, two))
    for rule, best in ((any_rotation, whole), (rotation_of_pairs(features), by_pair.sum() + rest)):
        turns = np.asarray(aligned(jnp.asarray(heads, jnp.float32), jnp.asarray(moment, jnp.float32), rule))
        np.testing.assert_allclose(turns @ turns.swapaxes(2, 3), np.broadcast_to(np.eye(HEAD), turns.shape), atol=1e-5)
        turned = turns @ heads
        found = np.trace(turned[0, 0] @ moment @ turned[0, 1].T)
        assert found == pytest.approx(best, rel=1e-4)
        loss = loss_of_mean(jnp.asarray(turned, jnp.float32), jnp.asarray(moment, jnp.float32))
        assert float(loss) == pytest.approx(np.sqrt((total - 2 * best) / (2 * total)), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("config", [POOLED["biased"], MIXED], ids=["one stack", "two stacks"])
def test_alignment_loses_less_in_every_layer(config, built):
    surgery, model = PoolKvHeadsConfig(num_kv_heads=2, align=True), built(config)
    sums = jax.jit(surgery.measure)(model, batch())
    table = surgery.describe(model, sums)
    assert table.source == "pool_kv_heads"
    assert "over 192 tokens" in table.title
    rows = np.asarray(table.rows)
    assert rows.shape == (config.num_layers, 4)
    assert (rows[:, 1] < rows[:, 0] - 0.01).all()
    assert (rows[:, 3] < rows[:, 2] - 0.01).all()
    losses = surgery.losses(model, sums)
    by_stack = {path: iter(np.asarray(of_stack)) for path, of_stack in losses.items()}
    expected = [next(by_stack[sorted(by_stack)[stack]]) for stack in model.body.stack_of_layer]
    np.testing.assert_allclose(rows, expected, atol=1e-4)


def test_moments_of_turned_weights_start_anew(built):
    model = built(LLAMA)
    kept = dict(tree.leaves(PoolKvHeadsConfig(num_kv_heads=2, align=True).moved(model, None)))
    assert {path for path in dict(tree.leaves(model)) if path not in kept} == {
        f"body.layers.stacked.attn.{name}.weight" for name in ("q_proj", "o_proj")
    }
    assert PoolKvHeadsConfig(num_kv_heads=2).moved(model, None) is model


@pytest.mark.slow
def test_eight_devices_and_one_make_the_same_heads(built, as_inputs, logits_of):
    surgery, model = PoolKvHeadsConfig(num_kv_heads=2, align=True), built(LLAMA)
    sums = jax.jit(surgery.measure)(model, batch())
    whole, table = pooled(surgery, model, sums), surgery.describe(model, sums)
    meshes = layout()
    with meshes.use():
        sharded = jax.device_put(model, shardings(model, meshes))
        sums = jax.jit(surgery.measure)(sharded, batch())
        made, other = pooled(surgery, sharded, sums), surgery.describe(sharded, sums)
    np.testing.assert_allclose(other.rows, table.rows, atol=2e-4)
    expected = logits_of(whole, as_inputs(ids()))
    found = logits_of(jax.device_get(made), as_inputs(ids()))
    np.testing.assert_allclose(found, expected, atol=1e-3 * np.abs(expected).max())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["biased", "qwen2", "gemma2"])
def test_transformers_reads_the_export(name, built, as_inputs, logits_of, tmp_path):
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    config, surgery = POOLED[name], PoolKvHeadsConfig(num_kv_heads=2, align=True, calibration_batches=0)
    new, changed = pooled(surgery, built(config)), surgery.changed(config)
    save_folder(tmp_path, new, changed, one_device(), dtype=np.float32, files={}, special_ids={})
    assert json.loads((tmp_path / "config.json").read_text())["num_key_value_heads"] == 2
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = theirs(torch.tensor(ids()), use_cache=False).logits.numpy()
    np.testing.assert_allclose(logits_of(new, as_inputs(ids())), expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("name", ["gpt_neox, a part rotates", "mpt, alibi"])
def test_an_export_that_has_no_place_for_fewer_heads_is_refused(name, built, tmp_path):
    config, surgery = POOLED[name], PoolKvHeadsConfig(num_kv_heads=2)
    new, changed = pooled(surgery, built(config)), surgery.changed(config)
    with pytest.raises(ConfigError, match="cannot represent this model") as error:
        save_folder(tmp_path / "out", new, changed, one_device(), dtype=np.float32, files={}, special_ids={})
    assert "model.num_kv_heads: 2 would become 8" in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("seed", one_of([0, 1, 2]))
def test_aligned_heads_lose_less_than_means_of_a_trained_model(seed):
    config = LlamaConfig(**{**MHA, "seq_len": 64, "hidden_dim": 64, "num_heads": 4, "num_kv_heads": 4})
    teacher, batches, held_out = trained(dataclasses.replace(config, num_layers=3, initializer_range=0.1), seed)
    losses, calibration = {"teacher": float(nll(teacher, held_out))}, batches()
    assert losses["teacher"] < 2.6
    for name, keys in {
        "aligned": {"align": True},
        "aligned without data": {"align": True, "calibration_batches": 0},
        "mean": {},
        "random": {"method": "random"},
    }.items():
        surgery = PoolKvHeadsConfig(num_kv_heads=2, **keys)
        sums = jax.jit(surgery.measure)(teacher, calibration) if surgery.wants.num_batches else None
        losses[name] = float(nll(pooled(surgery, teacher, sums), held_out))
    assert losses["aligned"] <= losses["mean"]
    assert losses["aligned without data"] <= losses["mean"]
    assert losses["mean"] < losses["random"]


REFUSED = {
    "num_kv_heads: 3 given, but the model has 8 key/value heads: 1, 2, 4 expected": (LLAMA, {"num_kv_heads": 3}),
    "num_kv_heads: 8 given, but the model has 8 key/value heads: 1, 2, 4 expected": (LLAMA, {"num_kv_heads": 8}),
    "num_kv_heads: 1 given, but the model has 1 key/value heads: so none can be pooled": (
        dataclasses.replace(LLAMA, num_kv_heads=1),
        {"num_kv_heads": 1},
    ),
    "a model of type olmo2 given, but a norm over all key heads together": (Olmo2Config(**SIZES), {}),
    "a model of type dba given, but its attention is DecoupledAttention. Put pool_kv_heads before": (
        DbaConfig(**MHA, sem_dim=32, geo_dim=32),
        {},
    ),
    "a model of type gpt2 given, but its config has no number of key/value heads": (Gpt2Config(num_layers=2), {}),
    "a model of type nano given, but its config has no number": (NanoConfig(num_layers=2), {}),
    "a model of type mpt given, but its queries, keys and values are clipped": (
        MptConfig(**MHA, clip_qkv=1.0),
        {"align": True},
    ),
}


def test_keys_without_an_effect_are_refused():
    for keys, message in (
        ({"method": "first", "align": True}, "align: true given without method: mean, but method is first"),
        ({"calibration_batches": 4}, "calibration_batches: 4 given without align"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_fields(PoolKvHeadsConfig(num_kv_heads=2, **keys))


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_pooled_is_refused_with_the_reason(message):
    config, keys = REFUSED[message]
    with pytest.raises(ConfigError, match="surgery pool_kv_heads: ") as error:
        PoolKvHeadsConfig(**{"num_kv_heads": 2} | keys).changed(config)
    assert message in str(error.value)
