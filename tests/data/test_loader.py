import dataclasses
import gc
import re
import threading
import time

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh

from jaxlm.core.axes import BATCH, DATA, MESH_AXES, MICROBATCH, POSITION, REPLICA
from jaxlm.core.mesh import AxisMappings, make_layout, mesh_shape
from jaxlm.core.sharding import Layout
from jaxlm.core.values.batch_types import TokenBatch
from jaxlm.data.batch_schedule import BatchSchedule, BatchStage
from jaxlm.data.best_fit import BestFitConfig, BestFitSequences, pack_best_fit
from jaxlm.data.cache.artifacts import DamagedError
from jaxlm.data.loader import ExampleBatches, eval_batches
from jaxlm.data.mixture import Mixture, MixtureStage
from jaxlm.data.packing import PackedSequences
from jaxlm.data.shuffle import permute
from jaxlm.data.tokens import TokensConfig
from tests.data.helpers import cache_of, numbered_cache, token_batches

SEQ_LEN = 8
SPEC = TokensConfig().batch_spec(SEQ_LEN)
NAMES = [
    field.name for field in dataclasses.fields(TokenBatch) if field.name not in ("annotations", "order", "row_keys")
]


def layout_of(replica: int = 1, data: int = 1, model: int = 1, **mapping: str) -> Layout:
    shape = (replica, data, model)
    if jax.device_count() < np.prod(shape):
        pytest.skip("needs simulated devices")
    devices = np.asarray(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    mesh = Mesh(devices, MESH_AXES, axis_types=(AxisType.Auto,) * 3)
    return Layout(mesh, {}, {BATCH: (REPLICA, DATA), **mapping})


@pytest.fixture(scope="module")
def windows():
    return PackedSequences(numbered_cache(SEQ_LEN * 37 + 3), SEQ_LEN)  # 38 sequences, the last one not full


def plain_rows(num_tokens: int, places: np.ndarray, document_length: int = 7) -> dict[str, np.ndarray]:
    """The expected sequences of a numbered cache: token i is i, and a document begins at each multiple."""
    at = places[:, None] * SEQ_LEN + np.arange(SEQ_LEN)
    inside, followed = at < num_tokens, at + 1 < num_tokens
    documents = at // document_length
    begins = np.maximum(documents * document_length, at[:, :1])
    return {
        "tokens": at * inside,
        "targets": (at + 1) * followed,
        "loss_mask": followed & ((at + 1) % document_length != 0),
        "segment_ids": (documents - documents[:, :1] + 1) * inside,
        "positions": (at - begins) * inside,
    }


def open_batches(windows, *, batch_size=8, num_microbatches=1, layout=None, seed=5, shuffle=True) -> ExampleBatches:
    layout = layout or layout_of()
    num_shards = layout.num_shards(BATCH)
    microbatch = -(-batch_size // (num_microbatches * num_shards)) * num_shards
    return token_batches(
        Mixture({"": windows}, [MixtureStage(0, (1,))], seed=seed, shuffle=shuffle),
        BatchSchedule((BatchStage(0, batch_size, num_microbatches, microbatch),)),
        layout,
    )


def rows(batch: TokenBatch) -> dict[str, np.ndarray]:
    """[rows, position] of every column, in the global order."""
    return {name: np.asarray(getattr(batch, name).array).reshape(-1, SEQ_LEN) for name in NAMES}


def take(batches: ExampleBatches, number: int) -> list[dict[str, np.ndarray]]:
    taken = [rows(next(batches)) for _ in range(number)]
    batches.close()
    return taken


def assert_same(first: list[dict[str, np.ndarray]], second: list[dict[str, np.ndarray]]) -> None:
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        for name in NAMES:
            np.testing.assert_array_equal(one[name], other[name], err_msg=name)


def test_axes_and_dtypes(windows):
    batches = open_batches(windows, num_microbatches=2)
    batch = next(batches)
    batches.close()
    for name in NAMES:
        column = getattr(batch, name)
        assert [(axis.name, axis.size) for axis in column.axes] == [(MICROBATCH, 2), (BATCH, 4), (POSITION, SEQ_LEN)]
        assert column.array.dtype == (np.float32 if name == "loss_mask" else np.int32)
    single = open_batches(windows)
    assert [axis.name for axis in next(single).tokens.axes] == [MICROBATCH, BATCH, POSITION]
    single.close()


@pytest.mark.parametrize("shuffle", [True, False])
def test_each_epoch_has_every_sequence_once(windows, shuffle):
    taken = take(open_batches(windows, shuffle=shuffle), 19)  # 152 examples: four epochs of 38
    starts = np.concatenate([batch["tokens"][:, 0] for batch in taken]).reshape(4, 38)
    for epoch in starts:
        np.testing.assert_array_equal(np.sort(epoch), np.arange(38) * SEQ_LEN)
    in_order = [(np.diff(epoch) == SEQ_LEN).all() for epoch in starts]
    assert in_order == [not shuffle] * 4
    assert len({tuple(epoch) for epoch in starts}) == (4 if shuffle else 1)


def test_rows_packed_by_best_fit_continue_exactly_on_fewer_devices():
    def sequences() -> BestFitSequences:
        lengths = np.random.default_rng(0).integers(2, 3 * SEQ_LEN, 60)
        ids = iter(range(int(lengths.sum())))
        cache, config = cache_of([[next(ids) for _ in range(n)] for n in lengths]), BestFitConfig(buffer_size=9)
        return BestFitSequences(cache, SEQ_LEN, config, pack_best_fit(cache.offsets, SEQ_LEN + 1, config))

    expected = take(open_batches(sequences()), 12)
    on_eight = open_batches(sequences(), layout=layout_of(data=8))
    begun = [rows(next(on_eight)) for _ in range(5)]
    position = on_eight.state()
    on_eight.close()
    on_two = open_batches(sequences(), layout=layout_of(data=2), num_microbatches=2)
    on_two.restore(position)
    assert_same([*begun, *take(on_two, 7)], expected)


def test_the_order_depends_only_on_the_seed(windows):
    assert_same(take(open_batches(windows), 6), take(open_batches(windows), 6))
    other = take(open_batches(windows, seed=6), 1)
    assert (other[0]["tokens"] != take(open_batches(windows), 1)[0]["tokens"]).any()


@pytest.mark.parametrize(
    "shape",
    [{"data": 8}, {"replica": 2, "data": 4}, {"data": 4, "model": 2}, {"data": 2, "model": 4, POSITION: "model"}],
    ids=str,
)
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_sharded_batches_equal_unsharded_ones(windows, shape, num_microbatches):
    layout = layout_of(**shape)
    options = {"batch_size": 16, "num_microbatches": num_microbatches}
    sharded = open_batches(windows, layout=layout, **options)
    first = next(sharded)
    shard = first.tokens.array.addressable_shards[0].data.shape
    num_shards = shape.get("replica", 1) * shape["data"]
    length = SEQ_LEN // 4 if POSITION in shape else SEQ_LEN
    assert shard == (num_microbatches, 16 // num_microbatches // num_shards, length)
    assert len(first.tokens.array.addressable_shards) == 8
    assert_same([rows(first), *take(sharded, 5)], take(open_batches(windows, **options), 6))


@pytest.mark.parametrize("tensor_parallel", [False, True], ids=["fsdp 8", "tp 2 x fsdp 4"])
@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("shuffle", [True, False])
def test_rows_under_a_runs_layout_equal_unsharded_rows(windows, tensor_parallel, num_microbatches, shuffle):
    mappings = AxisMappings("batch", ("embed",), ("mlp", "heads") if tensor_parallel else (), {}, {})
    sizes = {"embed": 32, "mlp": 64, "heads": 4, "kv_heads": 2, "head_size": 8, "vocab": 64, "layers": 2}
    if jax.device_count() != 8:
        pytest.skip("needs eight simulated devices")
    layout = make_layout(mesh_shape(8, replica=1, model=2 if tensor_parallel else 1), mappings, sizes)
    options = {"batch_size": 16, "num_microbatches": num_microbatches, "shuffle": shuffle}
    found = take(open_batches(windows, layout=layout, **options), 6)  # 96 examples: two epochs and a half
    epoch, index = np.divmod(np.arange(96), 38)
    places = permute(index, 38, seed=5, epoch=epoch) if shuffle else index
    for number, batch in enumerate(found):
        expected = plain_rows(windows.cache.num_tokens, places[16 * number : 16 * (number + 1)])
        for name in NAMES:
            np.testing.assert_array_equal(batch[name], expected[name], err_msg=name)


@settings(max_examples=12)
@given(before=st.integers(0, 12), num_microbatches=st.sampled_from([1, 2, 4, 8]))
def test_a_restored_position_continues_identically(windows, before, num_microbatches):
    expected = take(open_batches(windows), before + 3)
    first = open_batches(windows)
    for _ in range(before):
        next(first)
    state = first.state()
    first.close()
    again = open_batches(windows, num_microbatches=num_microbatches)
    again.restore(state)
    assert again.state() == state == {"examples": 8 * before, "step": before}
    assert_same(take(again, 3), expected[before:])


def test_the_position_is_valid_for_another_batch_size(windows):
    everything = take(open_batches(windows, batch_size=4), 10)
    order = np.concatenate([batch["tokens"][:, 0] for batch in everything])
    batches = open_batches(windows, batch_size=16)
    batches.restore({"examples": 12})
    np.testing.assert_array_equal(take(batches, 1)[0]["tokens"][:, 0], order[12:28])
    assert batches.state() == {"examples": 28, "step": 1}


SIZES = ((0, 4), (3, 16), (5, 8))


@pytest.mark.parametrize("before", [0, 2, 3, 4, 7])
def test_changing_batch_sizes_use_each_example_once_and_positions_resume(windows, before):
    """Compared with batches cut from the order one after another in a plain loop."""
    mixture = Mixture({"": windows}, [MixtureStage(0, (1,))], seed=5, shuffle=True)
    schedule = BatchSchedule(tuple(BatchStage(start, size, 2, size // 2) for start, size in SIZES))
    sizes = [4, 4, 4, 16, 16, 8, 8, 8, 8, 8]
    order = plain_rows(windows.cache.num_tokens, mixture.find(np.arange(sum(sizes)))[1])
    batches = token_batches(mixture, schedule, layout_of())
    for _ in range(before):
        next(batches)
    state = batches.state()
    batches.close()
    assert state == {"examples": sum(sizes[:before]), "step": before}
    again = token_batches(mixture, schedule, layout_of())
    again.restore(state)
    found = take(again, len(sizes) - before)
    assert [len(batch["tokens"]) for batch in found] == sizes[before:]
    for name in NAMES:
        np.testing.assert_array_equal(
            np.concatenate([batch[name] for batch in found]), order[name][sum(sizes[:before]) :], err_msg=name
        )


@pytest.mark.parametrize("read_first", [False, True])
def test_skipping_leaves_out_what_the_next_steps_would_have_read(windows, read_first):
    mixture = Mixture({"": windows}, [MixtureStage(0, (1,))], seed=5, shuffle=True)
    schedule = BatchSchedule(tuple(BatchStage(start, size, 1, size) for start, size in SIZES))
    batches = token_batches(mixture, schedule, layout_of())
    if read_first:
        next(batches)
        batches.read_ahead()
    batches.restore({"examples": 8, "step": 2})
    batches.skip(3)  # steps 2, 3 and 4 with 4, 16 and 16 examples; step 2 is still the next one
    assert batches.state() == {"examples": 44, "step": 2, "skipped": 36}
    expected = plain_rows(windows.cache.num_tokens, mixture.find(44 + np.arange(4))[1])
    listed = take(batches, 1)[0]
    np.testing.assert_array_equal(listed["tokens"], expected["tokens"])
    position = {"examples": 48, "step": 3, "skipped": 36}
    assert batches.state() == position
    batches.restore(position)
    batches.skip(1)
    assert batches.state() == {"examples": 64, "step": 3, "skipped": 52}


def test_records_of_a_step_are_those_of_its_batch():
    sources = {
        "a": PackedSequences(numbered_cache(SEQ_LEN * 20), SEQ_LEN),
        "b": PackedSequences(numbered_cache(SEQ_LEN * 9), SEQ_LEN),
    }
    mixture = Mixture(sources, [MixtureStage(0, (3, 1)), MixtureStage(13, (1, 1))], seed=2, shuffle=True)
    schedule = BatchSchedule(tuple(BatchStage(start, size, 1, size) for start, size in SIZES))
    batches = token_batches(mixture, schedule, layout_of())
    batches.restore({"examples": 7, "step": 2})  # for example after other batch sizes
    taken = {step: rows(next(batches))["tokens"][:, 0] // SEQ_LEN for step in range(2, 8)}
    for step, places in taken.items():
        description = batches.records(step)
        found = re.fullmatch(r"a: sequences? ([\d, ]+) of 20(?:; b: sequences? ([\d, ]+) of 9)?", description)
        assert found, description
        listed = [int(place) for part in found.groups() if part for place in part.split(", ")]
        assert sorted(listed) == sorted(places.tolist())
    batches.close()


def test_restoring_during_read_ahead(windows):
    expected = take(open_batches(windows), 6)
    batches = open_batches(windows)
    for _ in range(5):
        next(batches)
    batches.restore({"examples": 8})
    assert_same(take(batches, 4), expected[1:5])


def test_a_distant_position_costs_no_more_than_a_near_one(windows):
    batches = open_batches(windows)
    batches.restore({"examples": 10**15})
    began = time.monotonic()
    next(batches)
    assert time.monotonic() - began < 60
    batches.close()


class CountingWindows(PackedSequences):
    """Sequences that record which indices were read."""

    def __init__(self, cache, seq_len):
        super().__init__(cache, seq_len)
        self.reads: list[np.ndarray] = []

    def read(self, indices):
        self.reads.append(np.asarray(indices))
        return super().read(indices)


def test_each_row_is_read_once_even_if_many_devices_hold_it():
    counting = CountingWindows(numbered_cache(SEQ_LEN * 40), SEQ_LEN)
    batches = open_batches(counting, batch_size=16, layout=layout_of(data=2, model=4), shuffle=False)
    next(batches)
    batches.close()
    np.testing.assert_array_equal(counting.reads[0], np.arange(16))


def test_a_read_error_names_the_position_and_keeps_its_traceback():
    cache = numbered_cache(SEQ_LEN * 10)
    broken = PackedSequences(dataclasses.replace(cache, vocab_size=45), SEQ_LEN)
    batches = open_batches(broken, batch_size=2, shuffle=False)
    next(batches)
    next(batches)
    for _ in range(2):
        with pytest.raises(DamagedError, match=r"token \d+ \(document 7 of some\.txt\) is 4[5-9]") as caught:
            next(batches)
        functions = [entry.name for entry in caught.traceback]
        assert "read" in functions
    assert batches.state() == {"examples": 4, "step": 2}
    batches.close()


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def test_closing_during_a_read_is_prompt(windows):
    batches = open_batches(windows, batch_size=32)
    for _ in range(3):
        next(batches)
        began = time.monotonic()
        batches.close()
        batches.close()
        assert time.monotonic() - began < 30
    assert not prefetch_threads()


@pytest.mark.slow
def test_no_thread_survives_closing_or_garbage_collection(windows):
    closed = open_batches(windows)
    next(closed)
    closed.close()
    assert not prefetch_threads()
    forgotten = open_batches(windows)
    next(forgotten)
    del forgotten
    gc.collect()
    deadline = time.monotonic() + 60
    while prefetch_threads():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class TestEvaluation:
    @pytest.mark.parametrize("batch_size", [8, 16, 64])
    def test_one_pass_in_order_and_padding_at_the_end(self, windows, batch_size):
        found = [
            rows(b)
            for b in eval_batches(windows, SPEC, batch_size=batch_size, layout=layout_of(data=8), max_batches=None)
        ]
        assert len(found) == -(-38 // batch_size)
        expected = windows.read(np.arange(38))
        for name in NAMES:
            together = np.concatenate([batch[name] for batch in found])
            np.testing.assert_array_equal(together[:38], expected[name])
            assert not together[38:].any()

    def test_axes(self, windows):
        batch = next(iter(eval_batches(windows, SPEC, batch_size=8, layout=layout_of(), max_batches=None)))
        assert [(axis.name, axis.size) for axis in batch.tokens.axes] == [(BATCH, 8), (POSITION, SEQ_LEN)]

    @pytest.mark.parametrize(("most", "expected"), [(None, 5), (2, 2), (5, 5), (99, 5)])
    def test_maximum_number_of_batches(self, windows, most, expected):
        assert len(list(eval_batches(windows, SPEC, batch_size=8, layout=layout_of(), max_batches=most))) == expected


def test_a_batch_that_does_not_divide_is_padded(windows):
    """Twelve examples over eight devices in two microbatches: four rows are padding, and no example is lost."""
    plain = take(open_batches(windows, batch_size=12, layout=layout_of(data=4)), 3)
    padded = take(open_batches(windows, batch_size=12, num_microbatches=2, layout=layout_of(data=8)), 3)
    for one, two in zip(plain, padded, strict=True):
        assert {name: column.shape[0] for name, column in two.items()} == dict.fromkeys(NAMES, 16)
        for name in NAMES:
            np.testing.assert_array_equal(two[name][:12], one[name])
            assert not two[name][12:].any()
