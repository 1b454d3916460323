"""MLPs that compute a few tokens at a time, against the same MLPs on all tokens, on one device and on eight."""

import dataclasses
import functools
import re

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from jax.sharding import AxisType, Mesh

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.products.fp8 import Fp8
from jaxlm.core.sharding import Layout, for_compute
from jaxlm.core.tracing import tracing
from jaxlm.hardware.hlo import collectives_by_kind
from jaxlm.interop.hf.families.gpt2 import Gpt2Config
from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.interop.hf.families.mixtral import MixtralConfig
from jaxlm.interop.hf.families.qwen2_moe import Qwen2MoeConfig
from jaxlm.models.layers import GatedMlp, Mlp, TiledMlp, tiled_mlps
from jaxlm.models.linear import Linear
from jaxlm.models.remat import RematConfig
from jaxlm.surgery.lora_layers import AdapterSize, LoraLinear
from tests.engine.helpers import MODEL, TinyRun, arrays, one_device, phase
from tests.engine.helpers import layout as layout_of
from tests.tiers import one_of

Embed, Features, ROWS, TOKENS = Axis("embed", 32), Axis("mlp", 96), 8, 20
TILE = 12  # divides the tokens of neither one nor eight devices


@functools.lru_cache
def context_layout() -> Layout:
    """Two devices divide the tokens of a row."""
    names = ("replica", "data", "model", "context")
    mesh = Mesh(np.array(jax.devices()).reshape(1, 4, 1, 2), names, axis_types=(AxisType.Auto,) * 4)
    return Layout(mesh, {"embed": "data"}, {"batch": ("replica", "data"), "position": "context"})


LAYOUTS = {
    "one device": one_device,
    "fsdp 8": layout_of,
    "tp 2 x fsdp 4": lambda: layout_of(model=2),
    "context 2 x fsdp 4": context_layout,
}


def linear(In, Out, key, **options):
    return Linear.init(In, Out, std=0.3, key=jax.random.key(key), **options)


def gated(change=lambda layer, key: layer):
    layers = ((Embed, Features), (Embed, Features), (Features, Embed))
    return GatedMlp(*(change(linear(*axes, key), key) for key, axes in enumerate(layers)), activation="silu")


def plain():
    up, down = linear(Embed, Features, 0, use_bias=True), linear(Features, Embed, 1, use_bias=True)
    return Mlp(up, down, "silu")  # XLA without optimizations rounds the erf of gelu by the form of the loop


def adapted(layer, key, dropout=0.0):
    sized = LoraLinear.sized(layer, [AdapterSize(4, 8.0)], dropout=dropout, use_dora=False, key=jax.random.key(key))
    b = hax.random.normal(jax.random.key(key + 9), sized.b.axes) * 0.1
    return dataclasses.replace(sized, b=b, key=jax.random.key(key) if dropout else None)


def quantized(layer, _):
    return dataclasses.replace(layer, fp8=Fp8("rowwise"))


MLPS = {"gated": gated, "plain": plain, "lora": lambda: gated(adapted), "fp8": lambda: gated(quantized)}
slow = functools.partial(pytest.param, marks=pytest.mark.slow)
INPUT = hax.random.normal(jax.random.key(5), (Axis("batch", ROWS), Axis("position", TOKENS), Embed))


def results(mlp, where, given=INPUT):
    """Output and gradients, of the input and of the weights."""
    arrays, rest = eqx.partition(mlp, eqx.is_inexact_array)

    @jax.jit
    def run(arrays, x):
        def loss(arrays, x):
            with tracing(quantized_products=True):  # as in a step: only the forward pass
                out = for_compute(eqx.combine(arrays, rest))(hax.auto_sharded(x))
            return (hax.sin(out) * (1 + hax.arange(Embed))).sum().array, out.array

        (_, out), gradients = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(arrays, x)
        return out, gradients

    with where.use():
        return run(arrays, given)


@pytest.mark.slow
@pytest.mark.parametrize(
    "where", ["one device", "context 2 x fsdp 4", "tp 2 x fsdp 4", pytest.param("fsdp 8", marks=pytest.mark.soak)]
)
@pytest.mark.parametrize("name", ["gated", *map(slow, ("plain", "lora", "fp8"))])
def test_output_is_bitwise_and_gradients_are_those_of_all_tokens_at_once(name, where):
    mlp, where = MLPS[name](), LAYOUTS[where]()
    (out, gradients), (expected, expected_gradients) = results(TiledMlp(mlp, TILE), where), results(mlp, where)
    np.testing.assert_array_equal(out, expected)
    pairs = zip(jax.tree.leaves(gradients), jax.tree.leaves(expected_gradients), strict=True)
    # Rowwise, fp8 has one scale for the gradients of the tokens that a product sums over: here, of a tile.
    tolerance = 0.1 if name == "fp8" else 1e-6
    for ours, theirs in pairs:
        assert np.abs(ours - theirs).max() <= tolerance * np.abs(theirs).max()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", one_of(["rowwise", "tensorwise"]))
def test_fp8_has_scales_for_each_tile_in_both_passes(recipe):
    """The gradients are those of the tiles, one MLP call each."""
    mlp = gated(lambda layer, _: dataclasses.replace(layer, fp8=Fp8(recipe)))
    tokens = INPUT.array.reshape(-1, Embed.size)
    parts = [tokens[start : start + TILE] for start in range(0, len(tokens), TILE)]
    tiles = [results(mlp, one_device(), hax.named(part, (Axis("tile", len(part)), Embed))) for part in parts]
    outs, gradients = zip(*tiles, strict=True)
    d_mlps, d_xs = zip(*gradients, strict=True)
    expected = (
        jnp.concatenate(outs),
        jax.tree.map(lambda *parts: sum(parts), *d_mlps),
        jnp.concatenate([d_x.array for d_x in d_xs]),
    )
    out, gradients = results(TiledMlp(mlp, TILE), one_device())
    for ours, theirs in zip(jax.tree.leaves((out, gradients)), jax.tree.leaves(expected), strict=True):
        assert np.abs(ours.reshape(theirs.shape) - theirs).max() <= 1e-6 * np.abs(theirs).max()


@pytest.mark.slow
def test_tiles_and_devices_drop_different_inputs():
    """Half of the inputs of one adapter. With the same mask for each tile, each of its rows would be there several times."""
    mlp = gated(lambda layer, key: adapted(layer, key, dropout=0.5) if key == 0 else layer)
    same = dataclasses.replace(INPUT, array=jnp.ones_like(INPUT.array))
    for where in (one_device(), layout_of()):
        with where.use():
            out = np.asarray(jax.jit(lambda x, m=mlp: TiledMlp(m, 4)(x).array)(same)).reshape(-1, Embed.size)
        assert len(np.unique(out, axis=0)) == ROWS * TOKENS


def hidden_program(config, as_inputs, built):
    """The compiled gradient of a model on 4 rows of 32 tokens."""
    model, inputs = built(config), as_inputs([list(range(32))] * 4)
    weights, rest = eqx.partition(model, eqx.is_inexact_array)
    loss = lambda weights: (eqx.combine(weights, rest).hidden(inputs).final.array ** 2).sum()  # noqa: E731
    return jax.jit(jax.grad(loss)).lower(weights).compile().as_text()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["none", slow("full"), slow(RematConfig(offload=["residual"]))])
def test_no_array_has_hidden_features_of_all_tokens(policy, tiny_llama, as_inputs, built):
    config = dataclasses.replace(tiny_llama, intermediate_dim=80, gradient_checkpointing=policy)
    whole = hidden_program(config, as_inputs, built)
    tiled = hidden_program(dataclasses.replace(config, mlp_tile_tokens=16), as_inputs, built)
    hidden = re.compile(r"f32\[(?:\d+,)*(?:4,32|32,4|128|8,16|8,1,16),80\]")
    assert hidden.search(whole)
    assert not hidden.search(tiled)
    assert re.search(r"f32\[(?:1,)?16,80\]", tiled)


@pytest.mark.slow
def test_devices_exchange_as_much_as_without_tiles():
    """Each device computes its own tokens, and the gradients of the weights are summed over devices once."""
    exchanged = []
    for tile in (None, TILE):
        model = dataclasses.replace(MODEL, mlp_tile_tokens=tile)
        text = TinyRun(layout_of(), phase(model=model), model=model).compiled_text(arrays(0))
        exchanged.append(collectives_by_kind(text))
        assert ("f32[12,64]" in text) == (tile is not None), "a device has 32 tokens"
    assert exchanged[0] == exchanged[1]


@pytest.mark.slow
def test_frozen_weights_have_no_gradient():
    """The loop of the backward pass adds up only gradients that are needed."""
    mlp = tiled_mlps(gated(adapted), TILE)
    trained = tree.map_leaves(lambda path, leaf: leaf if path.endswith((".a", ".b")) else None, mlp)
    frozen = tree.map_leaves(lambda path, leaf: None if path.endswith((".a", ".b")) else leaf, mlp)
    loss = lambda trained: eqx.combine(trained, frozen, is_leaf=tree.is_named)(INPUT).sum().array  # noqa: E731
    text = jax.jit(jax.grad(loss)).lower(trained).compile().as_text()
    loops = [line for line in text.splitlines() if " while(" in line and "transpose" in line]
    assert loops
    carried = [line.split(" while(")[0] for line in loops]
    assert not any(re.search(r"f32\[1,(96,32|32,96)\]", line) for line in carried)


@pytest.mark.parametrize("config", [Gpt2Config(num_layers=1), LlamaConfig(num_layers=1), Qwen2MoeConfig(num_layers=1)])
def test_dense_mlps_of_families_are_tiled(config):
    model = eqx.filter_eval_shape(config.build, Axis("vocab", 64), key=jax.random.key(0))
    (stack,) = dataclasses.replace(model.body, mlp_tile_tokens=8).stacks
    assert len(tree.modules(tiled_mlps(stack.layers.stacked, 8), TiledMlp)) == 1


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (
            lambda: LlamaConfig(mlp_tile_tokens=8, gradient_checkpointing=["mlp"]),
            r"8 given, but gradient_check.* saves mlp",
        ),
        (
            lambda: eqx.filter_eval_shape(
                MixtralConfig(num_layers=1, mlp_tile_tokens=8).build, Axis("vocab", 64), key=jax.random.key(0)
            ),
            r"8 given, but no layer of this model has an MLP that all tokens go through",
        ),
    ],
)
def test_models_without_an_mlp_to_divide_are_refused(refused, message):
    with pytest.raises(ConfigError, match=rf"model\.mlp_tile_tokens: {message}"):
        refused()
