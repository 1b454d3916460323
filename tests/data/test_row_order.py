"""The order of a row's tokens over devices, against counting which keys each query attends to."""

import dataclasses

import haliax as hax
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlm.core.sharding import AttentionWork, ContextSharding
from jaxlm.data.batch import BatchSpec, Column, token_columns
from jaxlm.data.row_order import block_tokens, by_blocks, imbalance, imbalances, row_orders, token_work, zigzag
from jaxlm.data.several_completions import GroupsConfig, UnpairedConfig
from jaxlm.data.tokens import TokensConfig
from tests.data.test_loader import layout_of

FULL = AttentionWork()
MIXED = AttentionWork(((None, 2), (9, 5)))


def segments_of(lengths: list[int], size: int) -> np.ndarray:
    """Documents of these lengths, as far as the row reaches, and padding."""
    ids = np.repeat(np.arange(1, len(lengths) + 1), lengths)[:size]
    return np.pad(ids, (0, size - len(ids))).astype(np.int32)


@st.composite
def rows(draw):
    num_shards, unit = draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from([2, 16, 32]))
    size = num_shards * unit
    lengths = draw(st.lists(st.integers(1, max(1, size)), max_size=10))
    windows = draw(st.lists(st.tuples(st.none() | st.integers(1, size), st.integers(1, 3)), min_size=1, max_size=3))
    return num_shards, segments_of(lengths, size), AttentionWork(tuple(windows), draw(st.booleans()))


@settings(max_examples=40)
@given(rows())
def test_the_work_of_a_token_is_the_number_of_keys_that_it_attends_to(case):
    _, ids, work = case
    at = np.arange(len(ids))
    distance = at[:, None] - at
    meets = (ids[:, None] == ids) & (ids != 0)
    total = np.zeros(len(ids), int)
    for window, num_layers in work.windows:
        reached = np.abs(distance) < (len(ids) + 1 if window is None else window)
        total += num_layers * (meets & reached & ((distance >= 0) | (not work.causal))).sum(axis=1)
    np.testing.assert_array_equal(token_work(ids, work), total)


def test_the_imbalance_of_each_order_that_divides_a_row():
    """Of one document over four devices, counted by hand: contiguous shards have 1, 3, 5 and 7 sixteenths of its pairs."""
    one = imbalances(np.ones(4096, np.int32), 4, FULL)
    assert one["none"] == pytest.approx(7 / 4, rel=1e-3)
    assert one["zigzag"] == 1
    assert one["blocks"] == pytest.approx(1, abs=1e-3)
    two = imbalances(segments_of([1024, 3072], 4096), 4, FULL)  # chunks with 1, 3 and 1, 3, 5, 7, 9, 11 fortieths
    assert two["none"] == pytest.approx(20 / 10, rel=2e-3)
    assert two["zigzag"] == pytest.approx(12 / 10, rel=2e-3)
    assert two["blocks"] == pytest.approx(1, abs=1e-3)
    assert imbalances(np.ones(12, np.int32), 4, FULL).keys() == {"none", "blocks"}, "12 tokens make no 8 chunks"


@settings(max_examples=40)
@given(rows())
def test_every_token_has_one_place_and_every_shard_equally_many(case):
    num_shards, ids, work = case
    for balance in ("zigzag", "blocks"):
        order = row_orders(balance, np.stack([ids, ids[::-1]]), num_shards, work)
        assert order.dtype == np.int32
        np.testing.assert_array_equal(np.sort(order, axis=-1), np.tile(np.arange(len(ids)), (2, 1)))
    order = by_blocks(ids, num_shards, work)
    block = block_tokens(len(ids), num_shards)
    shards = order.reshape(num_shards, -1)
    assert (np.diff(shards, axis=1) > 0).all(), "a shard has its tokens in the order of the text"
    firsts = shards.reshape(num_shards, -1, block)
    np.testing.assert_array_equal(firsts - firsts[..., :1], np.broadcast_to(np.arange(block), firsts.shape))
    loads = token_work(ids, work)[order].reshape(num_shards, -1).sum(axis=1)
    assert loads.sum() == token_work(ids, work).sum()
    assert imbalance(order, ids, num_shards, work) == pytest.approx(
        loads.max() / max(loads.mean(), 1e-9) if loads.any() else 1
    )
    np.testing.assert_array_equal(order, by_blocks(ids.copy(), num_shards, work))


def test_zigzag_gives_each_shard_an_early_and_a_late_chunk():
    assert zigzag(8, 2).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    for num_shards in (2, 8):
        ids = segments_of([4096], 4096)
        assert imbalance(zigzag(4096, num_shards), ids, num_shards, FULL) == pytest.approx(1, rel=1e-12)
        contiguous = imbalance(np.arange(4096), ids, num_shards, FULL)
        assert contiguous == pytest.approx(2 - 1 / num_shards, rel=1e-3)


@pytest.mark.parametrize(
    ("seq_len", "num_shards", "block"),
    [(131072, 8, 512), (32768, 8, 512), (16384, 8, 256), (4096, 8, 64), (1088, 8, 16), (64, 8, 1), (16, 8, 1)],
)
def test_short_rows_have_smaller_blocks(seq_len, num_shards, block):
    assert block_tokens(seq_len, num_shards) == block


def test_blocks_are_even_for_the_documents_that_packed_rows_have():
    """Lognormal lengths with a median of 1,800 tokens, in rows of 128k over 8 devices."""
    rng, found = np.random.default_rng(0), []
    for _ in range(20):
        ids = segments_of(rng.lognormal(np.log(1800), 1.6, 400).astype(int).clip(1).tolist(), 131072)
        orders = (np.arange(len(ids)), zigzag(len(ids), 8), by_blocks(ids, 8, FULL))
        found.append([imbalance(order, ids, 8, FULL) for order in orders])
        assert imbalance(by_blocks(ids, 8, MIXED), ids, 8, MIXED) <= 1.03
    contiguous, in_zigzag, blocks = np.mean(found, axis=0)
    assert contiguous == pytest.approx(2.44, abs=0.15)
    assert in_zigzag == pytest.approx(1.87, abs=0.15)
    assert np.max(found, axis=0)[2] <= 1.03
    assert blocks == pytest.approx(1, abs=1e-3)


LENGTH = 32
CONFIGS = {"tokens": (TokensConfig(), ()), "groups": (GroupsConfig(), (4,)), "unpaired": (UnpairedConfig(), ())}


@pytest.fixture
def balanced():
    """Two rows, of which four devices share each, and two each of four parts that exchange heads."""
    where = layout_of(data=2, model=4, position="model")
    return lambda balance: dataclasses.replace(
        where, context=ContextSharding(ring=("model",), balance=balance, work=MIXED)
    )


@pytest.mark.parametrize("balance", ["zigzag", "blocks"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_the_columns_of_a_batch_are_in_one_order(balanced, kind, balance):
    config, _ = CONFIGS[kind]
    spec = config.batch_spec(LENGTH)
    columns = config.random_columns(2, LENGTH, 100, 0)
    rng = np.random.default_rng(0)
    for name in (name for name in columns if name.endswith("segment_ids")):  # each sequence has documents of its own
        lengths = rng.integers(1, 20, (*columns[name].shape[:-1], 10))
        columns[name] = np.apply_along_axis(lambda one: segments_of(one.tolist(), LENGTH), -1, lengths)
    read = lambda rows: {name: column[rows] for name, column in columns.items()}  # noqa: E731
    where, leading = balanced(balance), (hax.Axis("batch", 2),)
    make = BatchSpec(lambda **arrays: arrays, spec.columns)
    batch = make.assemble(read, leading, where)
    orders = {name for name in batch if name.endswith("order")}
    assert orders == ({"order", "mismatched_order"} if kind == "unpaired" else {"order"})
    for name, column in columns.items():
        found, prefix = np.asarray(batch[name].array), "mismatched_" if name.startswith("mismatched") else ""
        if hax.Axis("position", LENGTH) in batch[name].axes:
            order = np.asarray(batch[f"{prefix}order"].array)
            ids = columns[f"{prefix}segment_ids"]
            np.testing.assert_array_equal(order, row_orders(balance, ids, 4, MIXED))
            column = np.take_along_axis(column, order, axis=-1)
        np.testing.assert_array_equal(found, column, err_msg=name)
    abstract = make.abstract(leading, where)
    for name, array in batch.items():
        assert (abstract[name].axes, abstract[name].dtype) == (array.axes, array.dtype)
        assert abstract[name].array.sharding == array.array.sharding
    assert spec.takes_order
    spec.assemble(read, leading, where)  # its own class has these columns


def test_annotations_with_axes_of_their_own_follow_their_tokens(balanced):
    Pos, layers = hax.Axis("position", LENGTH), hax.Axis("layers", 3)
    spec = BatchSpec(
        lambda **arrays: arrays,
        {**token_columns(Pos), "annotations.x": Column(np.float32, (layers, Pos, hax.Axis("embed", 2)))},
    )
    columns = TokensConfig().random_columns(2, LENGTH, 100, 0)
    x = np.arange(2 * 3 * LENGTH * 2, dtype=np.float32).reshape(2, 3, LENGTH, 2)
    batch = spec.assemble(
        lambda rows: {**columns, "annotations.x": x[rows]}, (hax.Axis("batch", 2),), balanced("blocks")
    )
    order = np.asarray(batch["order"].array)
    expected = np.stack([row[:, index] for row, index in zip(x, order, strict=True)])
    np.testing.assert_array_equal(np.asarray(batch["annotations.x"].array), expected)
    assert (order != np.arange(LENGTH)).any()


def test_a_batch_without_the_column_does_not_take_an_order():
    tokens = token_columns(hax.Axis("position", LENGTH))
    assert not BatchSpec(lambda tokens: tokens, {"tokens": tokens["tokens"]}).takes_order
    own = BatchSpec(lambda tokens, segment_ids: tokens, {n: tokens[n] for n in ("tokens", "segment_ids")})
    assert not own.takes_order


def test_devices_that_exchange_heads_share_a_shard():
    if jax.device_count() < 8:
        pytest.skip("needs simulated devices")
    where = layout_of(replica=2, data=2, model=2, position="model")
    context = ContextSharding(ring=("data",), heads=("model",), balance="zigzag")
    assert dataclasses.replace(where, context=context).num_row_shards == 2
