"""Attention whose tokens eight devices divide, against attention by definition on one device."""

import dataclasses
import functools
import itertools
import re

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh

from jaxlm.core.sharding import ContextSharding, Layout
from jaxlm.core.tracing import tracing
from jaxlm.models.attention import api
from jaxlm.models.attention.api import AttentionMask, AttentionSpec, as_keys, attention
from jaxlm.models.attention.backends.blockwise import UNMODIFIED_SCORES, Reach
from jaxlm.models.attention.choose import AttentionChoice, AttentionTask, choose_attention
from jaxlm.models.attention.context.partial import Tokens, attends, block_pairs, expected_partners
from jaxlm.models.attention.null_slot import NullSlot
from jaxlm.models.attention.scores import ScoreRule
from jaxlm.models.attention.sharding import AttentionSharding, head_repeats
from jaxlm.models.base import Inputs
from tests.models import cudnn_stand_in
from tests.tiers import one_of

LENGTH, ROWS, SIZE = 256, 2, 16
USP = ContextSharding(ring=("context",), heads=("context_heads",))
# Method -> sizes of (context, context_heads, model), and what the devices do.
METHODS = {
    "gather": ((8, 1, 1), ContextSharding(gather=("context",))),
    "ring": ((8, 1, 1), ContextSharding(ring=("context",))),
    "ulysses": ((8, 1, 1), ContextSharding(heads=("context",))),
    "usp 2x4": ((2, 4, 1), USP),
    "usp 4x2": ((4, 2, 1), USP),
}
ZIGZAGS = {
    f"zigzag {name}": (METHODS[name][0], dataclasses.replace(METHODS[name][1], balance="zigzag"))
    for name in ("ring", "usp 2x4")
}
# The last device, or the last two, has padding only.
DOCUMENTS = {"one": [256], "packed": [40, 1, 59, 30, 126], "padded": [40, 1, 59, 30, 60]}
REVERSED = np.arange(LENGTH)[::-1]
ZIGZAG = np.arange(LENGTH).reshape(16, 16)[[n for i in range(8) for n in (i, 15 - i)]].ravel()


def layout(method: str, *, rows: int = 1, tensor: int | None = None) -> Layout:
    """Args: rows: devices that divide the rows. tensor: those that divide the heads, instead of context devices."""
    sizes, context = (METHODS | ZIGZAGS)[method]
    sizes = (rows, sizes[0] // rows // (tensor or 1), sizes[1], tensor or 1)
    names = ("data", "context", "context_heads", "model")
    mesh = Mesh(np.asarray(jax.devices()).reshape(sizes), names, axis_types=(AxisType.Auto,) * 4)
    mapping = {"batch": "data", "position": context.axes, "heads": "model", "kv_heads": "model"}
    return Layout(mesh, mapping, mapping, context)


def tokens_of(documents) -> tuple[np.ndarray, np.ndarray]:
    """Positions and segments, [B, T], of rows that begin with these documents."""
    segments = np.repeat(np.arange(1, len(documents) + 1), documents)
    positions = np.concatenate([np.arange(size) for size in documents])
    pad = (0, LENGTH - len(segments))
    return tuple(np.tile(np.pad(a, pad).astype(np.int32), (ROWS, 1)) for a in (positions, segments))


@functools.lru_cache
def case(kv_heads: int, heads: int, dtype=jnp.float32, size: int = SIZE) -> tuple:
    """Queries, keys, values, and the gradient of the output."""
    rng, shapes = np.random.default_rng(0), (heads, kv_heads, kv_heads, heads)
    return tuple(rng.normal(size=(ROWS, LENGTH, number, size)).astype(dtype) for number in shapes)


@functools.lru_cache
def program(
    method: str | None,
    window=None,
    backend="auto",
    rule=UNMODIFIED_SCORES,
    causal=True,
    in_text_order=True,
    has_sink=False,
    **mesh,
):
    """A function of (queries, keys, values, gradient, positions, segments) -> output and gradients, and its layout."""
    place = layout(method, **mesh) if method else None

    def run(q, k, v, d_out, positions, segments):
        def attend(q, k, v, *sink):
            q, k, v = (
                hax.named(a, ("batch", "position", h, "head_size")) for a, h in zip((q, k, v), HEADS, strict=True)
            )
            columns = [hax.named(a, ("batch", "position")) for a in (positions, segments)]
            sharding = AttentionSharding.of(q, k)
            order = None if in_text_order else columns[0]  # only whether there is one matters
            mask = AttentionMask.of(Inputs(columns[0], *columns, order=order))
            options = {"window": window, "backend": backend, "rule": rule, "causal": causal, "sharding": sharding}
            slot = NullSlot(hax.named(sink[0], "heads")) if sink else None
            return attention(q, as_keys(k), as_keys(v), AttentionSpec(mask, null_slot=slot, **options)).array

        out, gradients = jax.vjp(attend, q, k, v, *[jnp.linspace(-1, 3, q.shape[2])] * has_sink)
        return (out, *gradients(d_out))

    return jax.jit(run), place


HEADS = ("heads", "kv_heads", "kv_heads")


def run(arrays, method=None, **options):
    attend, place = program(method, **options)
    if place is None:
        return attend(*arrays)
    with place.use():
        return attend(*arrays)


def check_equal(actual, expected, order, tolerance=2e-6):
    """Compares the output and the gradients of queries, keys and values, relative to the largest entry of each."""
    names = ("out", "dq", "dk", "dv", "d_sink")[: len(expected)]
    for name, a, b in zip(names, actual, expected, strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        b = b if name == "d_sink" else b[:, order]
        assert np.all(np.isfinite(a)), name
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max(), err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", one_of([2, 1, 8]))
@pytest.mark.parametrize("method", one_of(METHODS, but=4))
def test_devices_compute_what_one_device_does(method, kv_heads):
    orders = {"text": np.arange(LENGTH)} if method == "ulysses" else {"zigzag": ZIGZAG, "reversed": REVERSED}
    for documents, window, order in itertools.product(DOCUMENTS, (None, 100), orders.values()):
        arrays = (*case(kv_heads, 8), *tokens_of(DOCUMENTS[documents]))
        expected = run(arrays, window=window, backend="reference")
        check_equal(run([a[:, order] for a in arrays], method, window=window), expected, order)


@pytest.mark.slow
@pytest.mark.parametrize("method", one_of(METHODS, but=3))
def test_bfloat16_agrees_with_float32_within_its_precision(method):
    tokens = tokens_of(DOCUMENTS["packed"])
    expected = run((*case(2, 8), *tokens), backend="reference")
    check_equal(run((*case(2, 8, jnp.bfloat16), *tokens), method), expected, slice(None), 2e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"rule": ScoreRule(soft_cap=2.0), "causal": False},
        {"causal": False, "window": 30},
        {"rule": ScoreRule(alibi_max=8.0), "has_sink": True, "window": 100},
    ],
    ids=["bidirectional soft cap", "bidirectional window", "alibi and sink in a window"],
)
@pytest.mark.parametrize("method", one_of(["ring", "gather", "ulysses", "usp 2x4"], but=2))
def test_other_scores_and_masks(method, options):
    arrays = (*case(2, 8), *tokens_of(DOCUMENTS["packed"]))
    order = np.arange(LENGTH) if method == "ulysses" else ZIGZAG
    expected = run(arrays, backend="reference", **options)
    check_equal(run([a[:, order] for a in arrays], method, **options), expected, order)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "kv_heads"),
    one_of([("gather", 1), ("ring", 2), ("ulysses", 1), ("gather", 2), ("ring", 1), ("ulysses", 2)], but=3),
)
def test_rows_and_heads_are_divided_too(method, kv_heads):
    """Two devices for rows, two for heads, two for tokens. One key/value head does not divide over those for heads."""
    arrays = (*case(kv_heads, 8), *tokens_of(DOCUMENTS["packed"]))
    options = {"rule": ScoreRule(alibi_max=8.0), "has_sink": True}
    attend, place = program(method, rows=2, tensor=2, **options)
    mapping = place.compute if kv_heads == 2 else {k: v for k, v in place.compute.items() if k != "kv_heads"}
    with Layout(place.mesh, mapping, mapping, place.context).use():
        check_equal(attend(*arrays), run(arrays, backend="reference", **options), slice(None))


@pytest.mark.slow
def test_a_row_without_tokens_is_zero_and_has_no_gradient():
    arrays = (*case(2, 8), *tokens_of([LENGTH]))
    for method in ("gather", "ring"):
        for leaf in run((*arrays[:-1], np.zeros_like(arrays[-1])), method):
            np.testing.assert_array_equal(leaf, np.zeros_like(leaf))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["zigzag ring", "zigzag usp 2x4"])
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_fused_kernels_of_each_hop_compute_the_same(monkeypatch, method, documents):
    cudnn_stand_in.install(monkeypatch)
    monkeypatch.setattr(
        api,
        "choose_attention",
        lambda task, _: AttentionChoice("cudnn_rows" if task.in_zigzag_ring else "reference", ""),
    )
    tokens = tokens_of({**DOCUMENTS, "padded": [200]}[documents])
    arrays = (*case(2, 8), *tokens)
    order = ZIGZAG if method == "zigzag ring" else np.arange(LENGTH).reshape(4, 64)[[0, 3, 1, 2]].ravel()
    expected = run(arrays, backend="reference", has_sink=True)
    check_equal(run([a[:, order] for a in arrays], method, in_text_order=False, has_sink=True), expected, order)


# --- What it costs ------------------------------------------------------------------------------------------------------


def compiled(method: str | None, arrays, **options) -> jax.stages.Compiled:
    attend, place = program(method, **options)
    if place is None:
        return attend.lower(*arrays).compile()
    with place.use():
        spec = place.compute_sharding((hax.Axis("batch", ROWS), hax.Axis("position", LENGTH)))
        return attend.lower(*(jax.device_put(a, spec) for a in arrays)).compile()


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_queries_are_never_gathered(method):
    """With one key/value head for eight queries, the largest array that may be gathered has an eighth of their size."""
    arrays = (*case(1, 8), *tokens_of([LENGTH]))
    gathered = re.findall(r"= \w+\[([\d,]*)\]\S* all-gather\(", compiled(method, arrays).as_text())
    sizes = [int(np.prod([int(n) for n in shape.split(",")])) for shape in gathered]
    assert max(sizes, default=0) <= ROWS * LENGTH * SIZE
    assert ("gather" in method) == (ROWS * LENGTH * SIZE in sizes)


@pytest.mark.slow
def test_exchanging_heads_divides_the_products():
    """An eighth of the compiled FLOPs of one device. Without context parallelism every device computes them all."""
    arrays = (*case(8, 8, size=128), *tokens_of([LENGTH]))
    flops = {method: compiled(method, arrays).cost_analysis()["flops"] for method in (None, "ulysses")}
    assert flops["ulysses"] <= 1.1 / 8 * flops[None]


def pairs_by_device(tokens: Tokens, order: np.ndarray, devices: int, reach: Reach, block: int) -> np.ndarray:
    """Number of pairs of blocks that each device multiplies, for one row."""
    columns = [a[order].reshape(devices, -1) for a in tokens]
    keys = Tokens(*(a.ravel() for a in columns))
    queries = (Tokens(*(a[device] for a in columns)) for device in range(devices))
    return np.array([np.sum(block_pairs(q, keys, reach, block, block)) for q in queries])


@pytest.mark.slow
def test_a_zigzag_divides_the_blocks_of_a_causal_row_evenly():
    tokens = Tokens(jnp.arange(LENGTH), jnp.ones(LENGTH, int))
    one = pairs_by_device(tokens, np.arange(LENGTH), 1, Reach(), 16)
    assert one == 16 * 17 / 2
    counts = pairs_by_device(tokens, ZIGZAG, 8, Reach(), 16)
    assert max(counts) == min(counts) == one / 8
    contiguous = pairs_by_device(tokens, np.arange(LENGTH), 8, Reach(), 16)
    assert max(contiguous) == 31, "the last device has 31 of 136"


@pytest.mark.parametrize("order", [np.arange(LENGTH), ZIGZAG], ids=["text", "zigzag"])
@pytest.mark.parametrize(
    ("reach", "exact"),
    [(Reach(), True), (Reach(causal=False), True), (Reach(33), False), (Reach(33, causal=False), False)],
)
def test_forecasts_expect_as_many_pairs_of_blocks_as_a_document_has(reach, exact, order):
    """Of windows they expect a few more, because no block has any before the first or after the last token."""
    tokens, block, devices = Tokens(jnp.arange(LENGTH), jnp.ones(LENGTH, int)), 16, 8
    counted = pairs_by_device(tokens, order, devices, reach, block).sum()
    row_blocks = LENGTH // block
    for num_partners in (row_blocks, row_blocks // devices):
        hops = row_blocks // num_partners
        expected = row_blocks * hops * expected_partners(num_partners, row_blocks, block, reach)
        assert expected == counted if exact else counted <= expected <= 1.2 * counted


def test_blocks_of_other_documents_and_outside_of_windows_cost_nothing():
    text = np.arange(LENGTH)
    documents = Tokens(jnp.asarray(text % 64), jnp.asarray(text // 64 + 1))
    assert pairs_by_device(documents, text, 1, Reach(), 16) == 4 * 4 * 5 / 2
    one = Tokens(jnp.asarray(text), jnp.ones(LENGTH, int))
    assert pairs_by_device(one, text, 1, Reach(16), 16) == 16 + 15
    assert pairs_by_device(one, text, 1, Reach(16, causal=False), 16) == 16 + 2 * 15


@pytest.mark.slow
@given(st.data())
def test_no_pair_of_blocks_that_attend_to_each_other_is_left_out(data):
    size = 24
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=6))
    segments = np.repeat(np.arange(1, len(lengths) + 1), lengths)[:size]
    positions = np.concatenate([np.arange(n) for n in lengths])[:size]
    pad = (0, size - len(segments))
    order = np.array(data.draw(st.permutations(range(size))))
    tokens = Tokens(*(jnp.asarray(np.pad(a, pad)[order]) for a in (positions, segments)))
    reach = Reach(data.draw(st.sampled_from([None, 1, 3])), data.draw(st.booleans()))
    needed = np.asarray(attends(tokens, tokens, reach)).reshape(6, 4, 6, 4).any((1, 3))
    assert not np.any(needed & ~np.asarray(block_pairs(tokens, tokens, reach, 4, 4)))


# --- What can be divided ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kv_heads", "group", "devices", "repeats"),
    [(8, 1, 8, 1), (8, 4, 2, 1), (2, 4, 8, 4), (1, 8, 8, 8), (6, 2, 4, 2), (3, 8, 8, 8)],
)
def test_few_key_heads_are_repeated_as_often_as_needed(kv_heads, group, devices, repeats):
    assert head_repeats(kv_heads, group, devices) == repeats


def test_query_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="12 query heads in groups of 6 do not divide over 8 devices"):
        head_repeats(2, 6, 8)


def test_backends_that_need_whole_rows_say_so():
    task = AttentionTask("tpu", jnp.dtype(jnp.bfloat16), 1024, head_size=128, context=METHODS["ring"][1])
    choice = choose_attention(task)
    assert (choice.name, choice.degraded) == ("blockwise", True)
    assert "not splash: devices divide the tokens of a row" in choice.reason


def test_second_derivatives_are_taken_by_definition():
    arrays = (*case(2, 8), *tokens_of(DOCUMENTS["packed"]))
    with tracing(twice_differentiable=True):
        actual = run([a[:, ZIGZAG] for a in arrays], "ring")
    check_equal(actual, run(arrays, backend="reference"), ZIGZAG)
