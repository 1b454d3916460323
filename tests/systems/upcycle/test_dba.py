"""Decoupled attention: what each kind of score depends on, caches, kernels, and sizes."""

import dataclasses
import functools

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.parameters import matrix_sides
from jaxlm.engine.state import shardings
from jaxlm.models.attention.api import AttentionMask, AttentionSpec, as_keys, attention
from jaxlm.models.attention.backends.splash import splash_attention
from jaxlm.models.attention.choose import AttentionTask, choose_attention
from jaxlm.models.base import Inputs, vocab_axis
from jaxlm.models.decoder import Decoder
from jaxlm.models.flops import matrix_operations
from jaxlm.models.inference.generate import GenerationConfig, generate, generate_tokens
from jaxlm.models.inference.unstacked import Generator, stack, unstack
from jaxlm.models.rope import DefaultRotary
from jaxlm.systems.upcycle.dba import DbaConfig
from tests.engine.helpers import layout
from tests.tiers import one_of

VOCAB, BATCH, LENGTH = vocab_axis(50), 2, 16
BASE = DbaConfig(
    seq_len=32,
    hidden_dim=32,
    intermediate_dim=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    sem_dim=16,
    geo_dim=24,
    initializer_range=0.2,
    rope=DefaultRotary(theta=100.0),
)
EVERYTHING = dataclasses.replace(
    BASE, gate="dynamic", null_slot=True, attention_bias=True, rope_semantic=True, rotary_dim=12, head_dim=12
)
VARIANTS = {
    "plain": BASE,
    "everything": EVERYTHING,
    "semantic alone": dataclasses.replace(BASE, geo_dim=0, gate="static"),
    "geometric alone": dataclasses.replace(BASE, sem_dim=0, sliding_window=4),
    "tied": dataclasses.replace(BASE, num_kv_heads=4, tie_qk=True),
    "one key": dataclasses.replace(BASE, num_key_heads=1),
    "shared keys": dataclasses.replace(EVERYTHING, num_kv_heads=4, num_key_heads=2, sliding_window=6),
}


@functools.cache
def built(config: DbaConfig, seed: int = 0) -> Decoder:
    """A model whose gates, null slots, biases and rotary pairs are random too."""
    rng = np.random.default_rng(seed)
    num_frequencies = config.RotarySize.size // 2

    def drawn(path, leaf):
        if path.endswith("pairs"):
            rows = [
                np.sort(rng.choice(num_frequencies, leaf.array.shape[-1], replace=False))
                for _ in range(leaf.array.size)
            ]
            return hax.named(
                jnp.asarray(rows[: leaf.array[..., 0].size], jnp.int32).reshape(leaf.array.shape), leaf.axes
            )
        if any(part in path for part in ("gate", "null_slot", "bias")):
            return hax.named(jnp.asarray(rng.normal(size=leaf.array.shape), jnp.float32), leaf.axes)
        return leaf

    return tree.map_leaves(drawn, jax.jit(lambda key: config.build(VOCAB, key=key))(jax.random.key(seed)))


def inputs(positions=None, segments=None, length=LENGTH, batch=BATCH) -> Inputs:
    axes = (hax.Axis("batch", batch), hax.Axis("position", length))
    ids = np.random.default_rng(1).integers(0, VOCAB.size, (batch, length))
    positions = np.tile(np.arange(length), (batch, 1)) if positions is None else positions
    segments = np.ones_like(ids) if segments is None else segments
    return Inputs(*(hax.named(jnp.asarray(a, jnp.int32), axes) for a in (ids, positions, segments)))


@jax.jit
def logits(model, read):
    return model.logits(model.hidden(read).final).rearrange(("batch", "position", "vocab")).array


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())
def test_flops_are_those_of_the_products_in_the_program(config):
    """The program computes the scores of masked tokens too. A null slot would be one more key."""
    config = dataclasses.replace(config, seq_len=LENGTH, null_slot=False)
    model = jax.eval_shape(lambda key: config.build(VOCAB, key=key), jax.random.key(0))
    program = jax.make_jaxpr(lambda model: logits(model, inputs()))(model)
    assert 3 * matrix_operations(program.jaxpr) == BATCH * LENGTH * config.flops_per_token(VOCAB.size).palm


@pytest.mark.slow
def test_a_gate_of_a_half_is_no_gate():
    without = built(BASE)
    gated = jax.jit(lambda key: dataclasses.replace(BASE, gate="dynamic").build(VOCAB, key=key))(jax.random.key(0))
    shared = dict(tree.leaves(without))
    gated = tree.map_leaves(lambda path, leaf: shared.get(path, leaf), gated)
    np.testing.assert_allclose(logits(gated, inputs()), logits(without, inputs()), atol=1e-6)


@pytest.mark.slow
def test_an_open_gate_leaves_only_the_semantic_score():
    """With logits of +inf the geometric factor is 0 and the semantic one doubles, as its weights may do instead."""
    config = dataclasses.replace(BASE, gate="static")
    model = tree.map_leaves(lambda p, x: x * 0 + 40.0 if p.endswith("gate.logits") else x, built(config))
    alone = dataclasses.replace(BASE, geo_dim=0)
    shared = dict(tree.leaves(model))
    semantic = tree.map_leaves(lambda p, x: shared[p] * (2 if "q_sem" in p else 1), built(alone))
    np.testing.assert_allclose(logits(model, inputs()), logits(semantic, inputs()), atol=1e-5)


@pytest.mark.slow
def test_semantic_scores_do_not_depend_on_positions():
    config = dataclasses.replace(BASE, geo_dim=0, num_layers=1)
    model, read = built(config), inputs()
    last = logits(model, read)[:, -1]
    order = np.r_[np.random.default_rng(2).permutation(LENGTH - 1), LENGTH - 1]
    shuffled = Inputs(
        read.tokens.take("position", hax.named(jnp.asarray(order), "position")), read.positions, read.segment_ids
    )
    np.testing.assert_allclose(logits(model, shuffled)[:, -1], last, atol=1e-5)
    turned = dataclasses.replace(config, rope_semantic=True)
    moved = tree.map_leaves(lambda p, x: dict(tree.leaves(model))[p], built(turned))
    assert not np.allclose(logits(moved, shuffled)[:, -1], logits(moved, read)[:, -1], atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("config", [BASE, EVERYTHING], ids=["plain", "everything"])
def test_geometric_scores_depend_on_distances_alone(config):
    model, positions = built(config), np.tile(np.arange(LENGTH), (BATCH, 1))
    np.testing.assert_allclose(logits(model, inputs(positions + 11)), logits(model, inputs(positions)), atol=1e-5)
    assert not np.allclose(logits(model, inputs(2 * positions)), logits(model, inputs(positions)), atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("config", one_of(VARIANTS.values(), but=3), ids=VARIANTS.keys())
def test_decoding_with_a_cache_computes_the_same(config):
    model, read = built(config), inputs()
    expected = logits(model, read)

    @jax.jit
    def extended(model, cache, part):
        hidden = model.hidden(part, cache=cache)
        return model.logits(hidden.final).rearrange(("batch", "position", "vocab")).array, hidden.cache

    cache = model.init_cache(hax.Axis("batch", BATCH), LENGTH, jnp.float32)
    for start, stop in ((0, 9), *((at, at + 1) for at in range(9, LENGTH))):
        part = Inputs(*(a["position", start:stop] for a in (read.tokens, read.positions, read.segment_ids)))
        out, cache = extended(model, cache, part)
        np.testing.assert_allclose(out, expected[:, start:stop], atol=1e-4)


@pytest.mark.slow
def test_generation_continues_as_the_whole_text_says():
    model, prompt = built(EVERYTHING), [[3, 1, 4, 1, 5, 9, 2, 6]]
    new = generate(model, prompt, max_new_tokens=8, temperature=0.0)[0]
    text = np.array([prompt[0] + new] * BATCH)
    axes = (hax.Axis("batch", BATCH), hax.Axis("position", text.shape[1]))
    read = Inputs(
        *(hax.named(jnp.asarray(a), axes) for a in (text, np.tile(np.arange(16), (BATCH, 1)), np.ones_like(text)))
    )
    assert np.argmax(logits(model, read)[0, 7:15], axis=-1).tolist() == new


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [((32, 8, 64, 128, 256), 608), ((32, 8, 64, 0, 2048), 1024), ((4, 2, 8, 16, 24), 36)],
    ids=["guide's preset", "its teacher", "small"],
)
def test_the_cache_has_the_features_of_keys_and_values(sizes, expected):
    """G (d_s + d_g + d_v) values for each token and layer; the guide's teacher has 1,024."""
    heads, kv_heads, head, sem, geo = sizes
    config = dataclasses.replace(
        BASE, hidden_dim=heads * head, num_heads=heads, num_kv_heads=kv_heads, head_dim=head, sem_dim=sem, geo_dim=geo
    )
    config.check()
    model = jax.eval_shape(lambda: config.build(VOCAB, key=jax.random.key(0)))
    cache = jax.eval_shape(lambda: model.init_cache(hax.Axis("batch", 3), 7, jnp.bfloat16))
    values = sum(leaf.size for leaf in jax.tree.leaves(cache.stacks))
    assert values == expected * config.num_layers * 3 * 7
    assert expected == config.KVHeads.size * (config.KeySize.size + config.HeadSize.size)


SHARED = ("one key", "shared keys")


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARED)
def test_a_shared_key_is_the_same_as_a_copy_of_it_for_each_value(name):
    """Values of a token in the cache: key_heads (d_s + d_g) + kv_heads d_v."""
    config = VARIANTS[name]
    model, copies = built(config), dataclasses.replace(config, num_key_heads=None)
    values, keys = config.KVHeads, config.KeyHeads
    leaves = dict(tree.leaves(model))

    def copied(path, leaf):
        ours = leaves[path]
        if ours.axes == leaf.axes:
            return ours
        ordered = ours.rearrange(("key_heads", ...))
        repeated = np.repeat(np.asarray(ordered.array), values.size // keys.size, axis=0)
        return hax.named(jnp.asarray(repeated), (values, *ordered.axes[1:])).rearrange(leaf.axes)

    other = tree.map_leaves(copied, built(copies))
    assert sum(leaf.axes != leaves[path].axes for path, leaf in tree.leaves(other)) >= 3
    np.testing.assert_allclose(logits(model, inputs()), logits(other, inputs()), atol=1e-5)
    of_keys, of_values = keys.size * config.KeySize.size, values.size * config.HeadSize.size
    cache_of = lambda dtype: jax.eval_shape(lambda: model.init_cache(hax.Axis("batch", 3), 7, dtype))  # noqa: E731
    assert cache_of(jnp.bfloat16).bytes_per_token == 2 * config.num_layers * (of_keys + of_values)
    scales = 4 * (keys.size + values.size)
    assert cache_of(jnp.int8).bytes_per_token == config.num_layers * (of_keys + of_values + scales)


@pytest.mark.slow
@pytest.mark.parametrize("name", one_of(SHARED))
def test_heads_on_several_devices_meet_a_shared_key_on_each(name):
    """Tensor parallelism over heads and FSDP at once: logits, gradients, and what it writes from a cache."""
    config = VARIANTS[name]
    model, read = built(config), inputs(batch=8)
    prompt = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1]]
    total = lambda model, read: jnp.sum(jnp.sin(model.logits(model.hidden(read).final).array))  # noqa: E731
    expected, gradients = logits(model, read), eqx.filter_jit(eqx.filter_grad(total))(model, read)
    written = generate(model, prompt, max_new_tokens=6, temperature=0.0)
    meshes = layout(model=2)
    with meshes.use():
        sharded = jax.device_put(model, shardings(model, meshes))
        placed = {path: leaf.array.sharding.spec for path, leaf in tree.leaves(sharded)}
        assert "model" in placed["body.layers.stacked.attn.q_geo.weight"]
        assert "model" not in placed["body.layers.stacked.attn.k_geo.weight"]
        assert "data" in placed["body.layers.stacked.attn.k_geo.weight"]
        found, of_shards = logits(sharded, read), eqx.filter_jit(eqx.filter_grad(total))(sharded, read)
        assert generate(sharded, prompt, max_new_tokens=6, temperature=0.0) == written
    np.testing.assert_allclose(found, expected, atol=1e-4)
    others = dict(tree.leaves(of_shards))
    for path, leaf in tree.leaves(gradients):
        if path.endswith("pairs"):  # integers
            continue
        size = float(jnp.abs(leaf.array).max())
        np.testing.assert_allclose(others[path].array, leaf.array, atol=1e-4 * size, err_msg=path)


@pytest.mark.slow
@pytest.mark.parametrize("cache_dtype", ["float32", "int8"])
def test_texts_continue_from_a_cache_with_shared_keys(cache_dtype):
    """One row and several, whose caches have different forms."""
    generator, prompts = Generator.of(built(VARIANTS["one key"])), [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1]]
    config = GenerationConfig(8, temperature=0.0, cache_dtype=cache_dtype)
    together = generate_tokens(generator, prompts, config)
    assert together == [generate_tokens(generator, [prompt], config)[0] for prompt in prompts]


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 3])
def test_a_cache_with_shared_keys_is_unstacked_and_stacked_again(rows):
    model = built(VARIANTS["one key"])
    cache = model.init_cache(hax.Axis("batch", rows), 5, jnp.int8)
    numbers = lambda path, leaf: jax.tree.map(lambda x: jnp.arange(x.size).astype(x.dtype).reshape(x.shape), leaf)  # noqa: E731
    cache = tree.map_leaves(numbers, cache)
    again = jax.jit(lambda cache: stack(unstack(cache)))(cache)
    assert jax.tree.structure(again.stacks) == jax.tree.structure(cache.stacks)
    for ours, expected in zip(jax.tree.leaves(again.stacks), jax.tree.leaves(cache.stacks), strict=True):
        np.testing.assert_array_equal(ours, expected)


@pytest.mark.slow
def test_optimizers_see_the_projection_to_a_shared_key_as_a_matrix():
    config = VARIANTS["shared keys"]
    weight = dict(tree.leaves(built(config)))["body.layers.stacked.attn.k_geo.weight"]
    assert matrix_sides(weight.axes[1:]) == ((config.KeyHeads, config.GeoSize), (config.Embed,))


@pytest.mark.slow
@pytest.mark.parametrize(("key_size", "value_size"), [(12, 64), (24, 16)], ids=["narrow keys", "narrow values"])
@pytest.mark.parametrize("kernel", one_of(["splash", "blockwise"]))
def test_kernels_pad_what_is_narrower(kernel, key_size, value_size, monkeypatch):
    """Against all scores at once, with gradients. Splash runs in Pallas's interpreter."""
    rng, length = np.random.default_rng(0), 128
    row = (hax.Axis("batch", 2), hax.Axis("position", length))
    heads, sizes = {"q": ("heads", 4), "k": ("kv_heads", 2), "v": ("kv_heads", 2)}, (key_size, key_size, value_size)
    named = [
        hax.named(
            jnp.asarray(rng.normal(size=(2, length, n, size)), jnp.float32),
            (*row, hax.Axis(name, n), hax.Axis("head_size", size)),
        )
        for (name, n), size in zip(heads.values(), sizes, strict=True)
    ]
    segments = np.repeat([[1] * 50 + [2] * 70 + [0] * 8], 2, axis=0)
    ids = hax.named(jnp.asarray(segments, jnp.int32), row)
    mask = AttentionMask.of(Inputs(ids, hax.named(jnp.asarray(np.tile(np.arange(length), (2, 1))), row), ids))
    weight = jnp.asarray(rng.normal(size=(2, length, 4, value_size)), jnp.float32)

    def total(named, backend):
        q, k, v = named
        out = attention(q, as_keys(k), as_keys(v), AttentionSpec(mask, scale=0.3, backend=backend))
        assert out.axes == (*q.axes[:-1], v.axes[-1])
        return jnp.sum(out.array * weight)

    expected = jax.value_and_grad(total)(named, "reference")
    if kernel == "splash":
        monkeypatch.setattr("jaxlm.models.attention.choose.current_platform", lambda: "tpu", raising=False)
        monkeypatch.setattr("jaxlm.models.attention.api.current_platform", lambda: "tpu")
        interpreted = functools.partial(splash_attention, interpret=True)
        monkeypatch.setattr("jaxlm.models.attention.api.splash_attention", interpreted)
    found = jax.value_and_grad(total)(named, kernel)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    for ours, theirs in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(ours.array, theirs.array, atol=1e-5 * float(jnp.abs(theirs.array).max()))


def test_fused_kernels_take_padded_heads_but_no_null_slot():
    task = AttentionTask("tpu", jnp.dtype(jnp.bfloat16), 2048, head_size=12, value_size=64, group=4)
    assert choose_attention(task).name == "splash"
    assert task.kernel_size == 64
    assert dataclasses.replace(task, head_size=60, value_size=33).kernel_size == 64
    assert dataclasses.replace(task, head_size=36, value_size=None).kernel_size == 36
    with_slot = choose_attention(dataclasses.replace(task, null_slot=True))
    assert (with_slot.name, with_slot.degraded) == ("reference", True)
    assert "null slot" in with_slot.reason


@pytest.mark.slow
def test_a_null_slot_takes_weight_from_every_token():
    """Where each token is alone in its document and all scores are equal, half of its output is the slot's."""
    config = dataclasses.replace(BASE, null_slot=True, num_layers=1)
    zero = lambda p, x: x * 0 if any(n in p for n in ("q_sem", "q_geo")) else x  # noqa: E731
    with_slot = tree.map_leaves(zero, built(config))
    leaves = dict(tree.leaves(with_slot))
    attn = with_slot.body.layers.stacked.attn
    one_layer = jax.tree.map(lambda x: x["layers", 0], attn, is_leaf=tree.is_named)
    read = inputs(segments=np.tile(np.arange(1, LENGTH + 1), (BATCH, 1)), positions=np.zeros((BATCH, LENGTH)))
    x = hax.random.normal(jax.random.key(5), (*read.tokens.axes, config.Embed))
    from jaxlm.models.stacks import layer_contexts

    (context,) = layer_contexts(config.rotated_kinds[:1], read, AttentionMask.of(read), "reference")
    out, _ = one_layer(x, context, None)
    value = (one_layer.v_proj(x) + one_layer.null_slot.values) / 2
    by_head = hax.concatenate("kv_heads", [value["kv_heads", hax.dslice(n // 2, 1)] for n in range(4)])
    expected = one_layer.o_proj(by_head.rename({"kv_heads": "heads"}))
    np.testing.assert_allclose(out.array, expected.rearrange(out.axes).array, atol=1e-5)
    assert leaves["body.layers.stacked.attn.null_slot.values"].array.any()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"sem_dim": 0, "geo_dim": 0}, "model.sem_dim: 0 given, and geo_dim too"),
        ({"geo_dim": 12}, "model.geo_dim: 12 given, so each of 4 heads has 3.*set it to 16"),
        ({"sem_dim": 12, "rope_semantic": True}, "model.sem_dim: 12 given, so each of 4 heads has 3"),
        ({"rotary_dim": 4}, "model.geo_dim: 24 given, 6 features for each of 4 heads, but.*frequencies for 4"),
        ({"tie_qk": True}, "model.tie_qk: true given.*as many key/value heads .2. as query heads .4."),
        (
            {"sem_dim": 10},
            "model.sem_dim: 10 given, which cannot be divided among 4 heads.*a multiple of 4, such as 12",
        ),
        ({"num_key_heads": 4}, "model.num_key_heads: 4 given, which does not divide model.num_kv_heads = 2"),
        ({"num_kv_heads": 4, "num_key_heads": 2, "tie_qk": True}, "as many key heads .2. as query heads .4."),
        (
            {"num_key_heads": 1, "rotary_dim": 2},
            "frequencies for 2 .rotary_dim., 2 times because as many heads share a key",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused(keys, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(BASE, **keys).check()
