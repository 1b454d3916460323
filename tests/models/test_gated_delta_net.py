"""Gated DeltaNet layers: packed documents, caches, and devices that divide heads or tokens, against one device."""

import dataclasses
import functools

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from jax.sharding import AxisType, Mesh

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.sharding import ContextSharding, Layout, for_compute
from jaxlm.interop.hf.families.qwen3_5 import Qwen35Config
from jaxlm.models.attention.api import AttentionMask
from jaxlm.models.base import Inputs
from jaxlm.models.decoders.hybrid import gated_delta_net
from jaxlm.models.mixers.base import LayerContext
from jaxlm.models.mixers.gated_delta_net import GatedDeltaNet
from tests.tiers import one_of

ROWS, LENGTH, WIDTH = 2, 256, 24
DOCUMENTS = {
    "packed": [40, 1, 3, 55, 30, 127],
    "padded": [40, 1, 3, 55, 30, 63],
}  # then the last two devices have padding


@functools.lru_cache
def mixer(heads: int = 2) -> GatedDeltaNet:
    """A layer that remembers long, so that a leak between documents is large."""
    sizes = {"num_state_heads": heads, "num_value_heads": 2 * heads, "state_key_dim": 8, "state_value_dim": 6}
    config = Qwen35Config(hidden_dim=WIDTH, initializer_range=0.5, **sizes)
    layer = gated_delta_net(config, jax.random.key(0), norm_eps=1e-6)
    return dataclasses.replace(layer, A_log=hax.full_like(layer.A_log, np.log(0.05)))


@functools.lru_cache
def stream() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(ROWS, LENGTH, WIDTH)).astype(np.float32)


def segments_of(documents) -> np.ndarray:
    ids = np.repeat(np.arange(1, len(documents) + 1), documents)
    return np.tile(np.pad(ids, (0, LENGTH - len(ids))), (ROWS, 1)).astype(np.int32)


def _context(segments, order=None) -> LayerContext:
    axes = (Axis("batch", segments.shape[0]), Axis("position", segments.shape[1]))
    ids, order = (None if a is None else hax.named(jnp.asarray(a), axes) for a in (segments, order))
    return LayerContext(AttentionMask.of(Inputs(ids, ids, ids)), None, None, order=order)


@jax.jit
def apply(layer, x, segments, cache=None):
    """The output, and the cache after it."""
    out, new = layer(hax.named(x, ("batch", "position", "embed")), _context(segments), cache)
    return out.rearrange(("batch", "position", "embed")).array, new


@pytest.mark.slow
@pytest.mark.parametrize("documents", DOCUMENTS.values(), ids=DOCUMENTS)
def test_documents_of_a_row_are_as_alone(documents):
    segments = segments_of(documents)
    packed, _ = apply(mixer(), stream(), segments)
    start, scale = 0, float(jnp.abs(packed).max())
    for size in documents:
        # Alone in a row of the same length, behind padding.
        alone, ids = np.zeros_like(stream()), np.zeros_like(segments)
        alone[:, LENGTH - size :], ids[:, LENGTH - size :] = stream()[:, start : start + size], 1
        expected, _ = apply(mixer(), alone, ids)
        np.testing.assert_allclose(
            packed[:, start : start + size], expected[:, LENGTH - size :], rtol=0, atol=1e-6 * scale
        )
        start += size
    assert not packed[:, start:].any()


def test_a_document_does_not_see_another():
    segments, changed = segments_of(DOCUMENTS["packed"]), stream().copy()
    changed[:, 44:99] += 3.0
    (out, _), (other, _) = (apply(mixer(), x, segments) for x in (stream(), changed))
    assert (out[:, :44] == other[:, :44]).all()
    assert (out[:, 99:] == other[:, 99:]).all()
    assert (out[:, 44:99] != other[:, 44:99]).any()


@pytest.mark.slow
def test_decoding_goes_on_behind_padding():
    """Rows of different lengths begin at different places, and padding comes before each part."""
    expected, _ = apply(mixer(), stream()[:, :64], np.ones((ROWS, 64), np.int32))
    cache = mixer().init_cache(Axis("batch", ROWS), 64, jnp.int8)
    done = [0, 0]
    for new in ((33, 30), (0, 17), (1, 1), (1, 1), (5, 12), (1, 1)):
        width = max(*new, 1)
        x, ids = np.full((ROWS, width, WIDTH), 9.0, np.float32), np.zeros((ROWS, width), np.int32)
        for row, count in enumerate(new):
            if count:
                x[row, width - count :], ids[row, width - count :] = stream()[row, done[row] : done[row] + count], 1
        out, cache = apply(mixer(), x, ids, cache)
        for row, count in enumerate(new):
            wanted = expected[row, done[row] : done[row] + count]
            np.testing.assert_allclose(out[row, width - count :], wanted, rtol=0, atol=1e-6 * jnp.abs(expected).max())
            done[row] += count


ZIGZAG = np.arange(LENGTH).reshape(16, 16)[[n for i in range(8) for n in (i, 15 - i)]].ravel()
USP = ContextSharding(ring=("context",), heads=("context_heads",))
ZIGZAG_USP = np.arange(LENGTH).reshape(4, 64)[[0, 3, 1, 2]].ravel()
BLOCKS = np.random.default_rng(2).permutation(LENGTH)
# Key heads, sizes of (context, context_heads, model), how attention is divided, order of the tokens.
DIVIDED = {
    "heads": (8, (8, 1, 1), ContextSharding(gather=("context",)), None),
    "heads, any order": (8, (8, 1, 1), ContextSharding(ring=("context",), balance="blocks"), BLOCKS),
    "states": (2, (8, 1, 1), ContextSharding(gather=("context",)), None),
    "states of a zigzag": (2, (8, 1, 1), ContextSharding(ring=("context",), balance="zigzag"), ZIGZAG),
    "both": (4, (2, 4, 1), dataclasses.replace(USP, balance="zigzag"), ZIGZAG_USP),
    "states beside tensor parallelism": (4, (4, 1, 2), ContextSharding(heads=("context",)), None),
    "tensor parallelism": (4, (1, 1, 4), ContextSharding(), None),
}


@functools.lru_cache
def _program(heads: int, name: str | None):
    """A function of (layer, x, segments, order) -> output and gradients of layer and x, and where it runs."""

    def run(layer, x, segments, order):
        def out_of(layer, x):
            x = hax.auto_sharded(hax.named(x, ("batch", "position", "embed")))
            out, new = for_compute(layer)(x, _context(segments, order), None)
            return out.rearrange(("batch", "position", "embed")).array, new

        (out, cache), pullback = jax.vjp(out_of, layer, x)
        weights = jnp.asarray(np.random.default_rng(1).normal(size=out.shape), jnp.float32)
        weights = weights if order is None else jnp.take_along_axis(weights, order[..., None], axis=1)
        return out, cache, pullback((weights, jax.tree.map(jnp.zeros_like, cache)))

    if name is None:
        return jax.jit(run), None
    _, (context, groups, model), sharding, _ = DIVIDED[name]
    sizes = (8 // (context * groups * model), context, groups, model)
    mesh = Mesh(
        np.asarray(jax.devices()).reshape(sizes),
        ("data", "context", "context_heads", "model"),
        axis_types=(AxisType.Auto,) * 4,
    )
    mapping = {"batch": "data", "position": sharding.axes, "state_heads": "model"}
    return jax.jit(run), Layout(mesh, {"embed": "context"} | mapping, mapping, sharding)


@pytest.mark.slow
@pytest.mark.parametrize("name", one_of(DIVIDED, but=3))
def test_devices_compute_what_one_does(name):
    heads, _, _, order = DIVIDED[name]
    run, place = _program(heads, name)
    alone, _ = _program(heads, None)
    for documents in DOCUMENTS.values():
        segments, x = segments_of(documents), stream()
        expected = alone(mixer(heads), x, segments, None)
        places = np.arange(LENGTH) if order is None else order
        with place.use():
            got = run(
                mixer(heads),
                x[:, places],
                segments[:, places],
                None if order is None else np.tile(order, (ROWS, 1)).astype(np.int32),
            )
        out, cache, (d_layer, d_x) = got
        wanted, kept, (d_wanted, d_x_wanted) = expected
        for what, one, other in (
            ("out", out, wanted[:, places]),
            ("dx", d_x, d_x_wanted[:, places]),
            *((path, leaf.array, dict(tree.leaves(d_wanted))[path].array) for path, leaf in tree.leaves(d_layer)),
        ):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * np.abs(other).max(), err_msg=what)
        if documents is DOCUMENTS["packed"]:
            for leaf, other in zip(jax.tree.leaves(cache), jax.tree.leaves(kept), strict=True):
                np.testing.assert_allclose(leaf, other, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("length", one_of([8, 16, 24]))
def test_rows_of_few_tokens_per_device(length):
    """The convolution reads three earlier tokens, which may be on several devices."""
    run, place = _program(2, "states")
    x, segments = stream()[:, :length], segments_of([LENGTH])[:, :length]
    expected, *_ = _program(2, None)[0](mixer(2), x, segments, None)
    with place.use():
        out, *_ = run(mixer(2), x, segments, None)
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_an_order_without_consecutive_tokens_needs_as_many_heads():
    run, place = _program(2, "heads, any order")
    order = np.tile(BLOCKS, (ROWS, 1)).astype(np.int32)
    message = r"balance: blocks given, but the 2 key heads .* 8 devices .* Set balance: zigzag"
    with place.use(), pytest.raises(ConfigError, match=message):
        run(mixer(2), stream(), segments_of([LENGTH]), order)
