"""Latent attention whose tokens eight devices divide: against one device, and what the devices send each other."""

import dataclasses
import math
from collections import Counter

import haliax as hax
import jax
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.hardware.hlo import collectives_per_run
from jaxlm.models.attention.api import AttentionMask
from jaxlm.models.base import Inputs
from jaxlm.models.stacks import layer_contexts
from tests.models.test_context import DOCUMENTS, LENGTH, REVERSED, ROWS, layout, tokens_of
from tests.models.test_mixers import LATENTS, MODELS

CONFIG = dataclasses.replace(MODELS["latent attention"], num_heads=8)
LATENT, ROTATED = LATENTS["kv_lora_rank"], LATENTS["qk_rope_head_dim"]


def arrays(order=slice(None)):
    """A layer with random numbers in every parameter; its inputs and the gradient of its output, and the tokens' columns."""
    layer = CONFIG.attention(jax.random.split(jax.random.key(0), 4))
    keys = iter(jax.random.split(jax.random.key(1), 20))
    layer = tree.map_leaves(lambda _, leaf: 0.4 * hax.random.normal(next(keys), leaf.axes), layer)
    rng = np.random.default_rng(0)
    x, d_out = (rng.normal(size=(ROWS, LENGTH, CONFIG.hidden_dim)).astype(np.float32)[:, order] for _ in range(2))
    return layer, x, d_out, *(column[:, order] for column in tokens_of(DOCUMENTS["packed"]))


def gradients(layer, x, d_out, positions, segments, *, in_text_order=True):
    """The output, and the gradients of the layer and of x."""
    axes = (hax.Axis("batch", ROWS), hax.Axis("position", LENGTH))
    columns = [hax.named(column, axes) for column in (positions, segments)]
    inputs = Inputs(
        columns[0], *columns, order=None if in_text_order else columns[0]
    )  # only whether there is one matters
    (context, *_) = layer_contexts(CONFIG.rotated_kinds, inputs, AttentionMask.of(inputs), "auto")

    def attend(layer, x):
        out, _ = layer(hax.named(x, (*axes, CONFIG.Embed)), context, None)
        return out.rearrange((*axes, CONFIG.Embed)).array

    out, backward = jax.vjp(attend, layer, x)
    return out, *backward(d_out)


FURTHER = pytest.mark.soak
CASES = [
    ("gather", 2),
    ("ring", None),
    ("ulysses", None),
    *(
        pytest.param(*case, marks=FURTHER)
        for case in [("gather", None), ("ring", 2), ("ulysses", 2), ("usp 2x4", None)]
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "tensor"), CASES)
def test_devices_compute_what_one_device_does_and_exchange_latents(method, tensor):
    """Args: tensor: devices that divide the heads, beside those that divide the tokens."""
    order = np.arange(LENGTH) if method == "ulysses" else REVERSED
    out, d_layer, d_x = jax.jit(gradients)(*arrays())
    expected = (out[:, order], d_layer, d_x[:, order])
    with layout(method, tensor=tensor).use():
        run = jax.jit(lambda *given: gradients(*given, in_text_order=method == "ulysses"))
        program = run.lower(*arrays(order)).compile()
    for ours, theirs in zip(jax.tree.leaves(program(*arrays(order))), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6 * np.abs(theirs).max())
    if (numbers := exchanged(method, 8 // (tensor or 1))) is not None:
        assert sent_floats(program.as_text()) == numbers


def sent_floats(program: str) -> Counter[str]:
    """Kind of collective -> float32 numbers of its outputs on a device, apart from sums of gradients of weights."""
    counts: Counter[str] = Counter()
    for one, number in collectives_per_run(program).items():
        if one.dtype == "f32" and one.kind != "all-reduce":
            counts[one.kind] += number * math.prod(one.shape)
    return counts


def exchanged(method: str, devices: int) -> dict[str, int] | None:
    """The same by the definition of the method, forward and backward. Args: devices: that divide the tokens."""
    row, part = (ROWS * tokens * (LATENT + ROTATED) for tokens in (LENGTH, LENGTH // devices))
    if method == "gather":
        return {"all-gather": row, "reduce-scatter": part}
    if method == "ring":  # each part visits the other devices forward, again backward, and its gradient comes home
        return {"collective-permute": (3 * devices - 1) * part}
    if method == "ulysses":  # queries and outputs, and their gradients, are exchanged by heads
        by_head = 2 * ROWS * LENGTH * (CONFIG.head_dim + CONFIG.v_head_dim)
        return {"all-gather": row, "reduce-scatter": part, "all-to-all": by_head}
    return None
