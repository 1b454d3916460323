"""Best-fit packing against nanochat's rows, and against a packer that searches a list."""

import dataclasses
import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import check_fields
from jaxlm.data import best_fit
from jaxlm.data.best_fit import BestFitConfig, BestFitSequences, open_rows, pack_best_fit
from jaxlm.data.cache.artifacts import METADATA, write_metadata
from jaxlm.data.cache.token_cache import GROUPS, TOKEN_CACHE, TokenCache
from jaxlm.data.data import Data
from jaxlm.data.examples import ExampleRange
from jaxlm.data.formats.completions import SupervisedFormat
from jaxlm.data.formats.documents import PretokenizedFormat
from jaxlm.data.mixture import Mixture, MixtureStage
from jaxlm.data.tokens import TokensConfig
from tests.data.helpers import cache_of, open_data, small_tokenizer, some_text, write_records

VECTORS = Path(__file__).parents[1] / "vectors"
GOLDEN = json.loads((VECTORS / "best_fit_rows.json").read_text())
WRAPPED = json.loads((VECTORS / "best_fit_wrapped.json").read_text())
BOS = 1
Row = list[tuple[int, int, int]]  # (document, first token, number of tokens)
lengths_of_documents = st.lists(st.integers(1, 14), min_size=1, max_size=40)
configs = st.builds(
    BestFitConfig,
    fill=st.sampled_from(["crop", "split", "pad"]),
    buffer_size=st.integers(1, 8),
    refill_size=st.integers(1, 5),
    document_mask=st.booleans(),
)


def documents_of(lengths: list[int]) -> list[list[int]]:
    """Documents that begin with BOS. All other tokens of all documents are different."""
    numbers = iter(range(2, 1 << 16))
    return [[BOS, *(next(numbers) for _ in range(length - 1))] for length in lengths]


def sequences_of(documents: list[list[int]], seq_len: int, config: BestFitConfig, **options: Any) -> BestFitSequences:
    cache = cache_of(documents)
    return BestFitSequences(cache, seq_len, config, pack_best_fit(cache.offsets, seq_len + 1, config), **options)


def columns_of(sequences: BestFitSequences) -> dict[str, np.ndarray]:
    return sequences.read(np.arange(len(sequences)))


def rows_by_hand(lengths: list[int], capacity: int, config: BestFitConfig) -> list[Row]:
    """Searches a list of waiting documents for each place of each row, as nanochat does; at the end, until it is empty."""
    if config.fill == "pad":
        lengths = [min(length, capacity) for length in lengths]
    coming = [(number, 0, length) for number, length in enumerate(lengths)]
    waiting: list[tuple[int, int, int]] = []
    rows: list[Row] = []
    while True:
        row: Row = []
        room = capacity
        while room > 0:
            while len(waiting) < config.buffer_size and coming:
                waiting += coming[: config.refill_size]
                del coming[: config.refill_size]
            fitting = [piece for piece in waiting if piece[2] <= room]
            if fitting:
                piece = max(fitting, key=lambda p: p[2])  # the first of the longest
                waiting.remove(piece)
            elif not waiting or config.fill == "pad":
                break
            else:
                number, first, length = min(waiting, key=lambda p: p[2])  # the first of the shortest
                waiting.remove((number, first, length))
                piece = (number, first, room)
                if config.fill == "split":
                    waiting.append((number, first + room - 1, length - room + 1))
            row.append(piece)
            room -= piece[2]
        if capacity - room >= 2:
            rows.append(row)
        elif not waiting:
            return rows


def endless_by_hand(
    lengths: list[int], groups: list[int], capacity: int, config: BestFitConfig, num_rows: int
) -> list[list[tuple[int, int]]]:
    """Rows of (document, number of tokens), from documents that come group after group, and again from the first one."""

    def batches() -> Iterator[list[int]]:
        for number in itertools.cycle(range(len(groups))):
            first = sum(groups[:number])
            in_group = list(range(first, first + groups[number]))
            for start in range(0, len(in_group), config.refill_size):
                yield in_group[start : start + config.refill_size]

    coming, waiting, rows = batches(), [], []
    for _ in range(num_rows):
        row, room = [], capacity
        while room:
            while len(waiting) < config.buffer_size:
                waiting += next(coming)
            fitting = [place for place, document in enumerate(waiting) if lengths[document] <= room]
            longest = max(fitting, key=lambda place: lengths[waiting[place]], default=None)
            shortest = min(range(len(waiting)), key=lambda place: lengths[waiting[place]])
            document = waiting.pop(shortest if longest is None else longest)
            row.append((document, min(room, lengths[document])))
            room -= row[-1][1]
        rows.append(row)
    return rows


def rows_in(sequences: BestFitSequences) -> list[Row]:
    """The rows, by document instead of token."""
    offsets, rows = sequences.cache.offsets, []
    for number in range(len(sequences)):
        starts, lengths, _ = sequences._index.pieces_of(np.array([number]))
        documents = np.searchsorted(offsets, starts, side="right") - 1
        rows.append(
            list(zip(documents.tolist(), (starts - offsets[documents]).tolist(), lengths.tolist(), strict=True))
        )
    return rows


def test_the_rows_are_those_of_nanochat():
    """The reference starts over after its last document. Here that is a cache with the documents three times."""
    lengths = GOLDEN["doc_lengths_incl_bos"] * 3
    config = BestFitConfig(buffer_size=GOLDEN["buffer_size"], refill_size=GOLDEN["refill_batch"])
    documents = documents_of(lengths)
    sequences = sequences_of(documents, GOLDEN["T"], config)
    expected = GOLDEN["rows_as_doc_and_tokens_taken"]
    assert [[[d, n] for d, first, n in row if not first] for row in rows_in(sequences)][: len(expected)] == expected
    columns = sequences.read(np.arange(len(expected)))
    for number, row in enumerate(expected):
        tokens = [token for document, count in row for token in documents[document][:count]]
        assert columns["tokens"][number].tolist() == tokens[:-1]
        assert columns["targets"][number].tolist() == tokens[1:]
    assert columns["loss_mask"].all(), "BOS is a target, too"
    assert (columns["segment_ids"] == 1).all(), "attention crosses documents"
    np.testing.assert_array_equal(columns["positions"], np.tile(np.arange(GOLDEN["T"]), (len(expected), 1)))


@settings(max_examples=60)
@given(lengths=lengths_of_documents, seq_len=st.integers(1, 9), config=configs)
def test_agrees_with_searching_a_list(lengths, seq_len, config):
    sequences, expected = (
        sequences_of(documents_of(lengths), seq_len, config),
        rows_by_hand(lengths, seq_len + 1, config),
    )
    assert rows_in(sequences) == expected
    in_rows = {(d, place) for row in expected for d, first, n in row for place in range(first, first + n)}
    assert sequences._index.num_dropped_tokens == sum(lengths) - len(in_rows)
    ends = {d: max(first + n for e, first, n in row if e == d) for row in expected for d, _, _ in row}
    assert ends.keys() >= {d for d, length in enumerate(lengths) if length > 1}
    if config.fill == "crop":
        assert sequences._index.num_cuts == sum(ends[d] < lengths[d] for d in ends)


@settings(max_examples=40)
@given(lengths=lengths_of_documents, seq_len=st.integers(1, 9), config=configs, data=st.data())
def test_columns_agree_with_packing_one_token_at_a_time(lengths, seq_len, config, data):
    documents = documents_of(lengths)
    masks = [data.draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)) for n in lengths]
    given_mask = data.draw(st.booleans())
    cache = cache_of(documents)
    if given_mask:
        cache = dataclasses.replace(cache, target_mask=np.concatenate(masks).astype(np.uint8))
    sequences = BestFitSequences(cache, seq_len, config, pack_best_fit(cache.offsets, seq_len + 1, config))
    expected = rows_by_hand(lengths, seq_len + 1, config)
    if not expected:
        assert not len(sequences)
        return
    columns, targets = columns_of(sequences), sequences.target_positions(np.arange(len(sequences)))
    num_padding = 0
    for number, row in enumerate(expected):
        # The document, the token's number in it, and its number in the piece.
        places = [(d, first + i, i) for d, first, n in row for i in range(n)]
        segments = [s for s, (_, _, n) in enumerate(row, start=1) for _ in range(n)]
        ids = [documents[d][place] for d, place, _ in places]
        counted = [float((place == 0 or i > 0) and (not given_mask or masks[d][place])) for d, place, i in places]
        inputs = range(min(len(places), seq_len))
        padding = [0] * (seq_len - len(inputs))
        num_padding += len(padding)
        shifted = [0] * (seq_len + 1 - len(places))
        assert columns["tokens"][number].tolist() == [ids[i] for i in inputs] + padding
        assert columns["targets"][number].tolist() == ids[1:] + shifted
        assert columns["loss_mask"][number].tolist() == counted[1:] + shifted
        masked = config.document_mask
        assert columns["segment_ids"][number].tolist() == [segments[i] if masked else 1 for i in inputs] + padding
        assert columns["positions"][number].tolist() == [places[i][2] if masked else i for i in inputs] + padding
        in_cache = [int(cache.offsets[d]) + place for d, place, _ in places[1:]]
        assert targets[number].tolist()[: len(in_cache)] == in_cache
    assert sequences.padding == pytest.approx(num_padding / (len(expected) * seq_len))


@settings(max_examples=40)
@given(lengths=lengths_of_documents, seq_len=st.integers(1, 9), config=configs)
def test_split_documents_lose_nothing(lengths, seq_len, config):
    documents = documents_of(lengths)
    sequences = sequences_of(documents, seq_len, dataclasses.replace(config, fill="split"))
    if not len(sequences):
        assert lengths == [1]
        return
    columns = columns_of(sequences)
    targets = Counter(columns["targets"][columns["loss_mask"] > 0].tolist())
    expected = Counter(token for document in documents for token in document[1:])
    assert targets[BOS] <= len(documents) + len(sequences)
    del targets[BOS]
    assert targets == expected
    inputs = Counter(columns["tokens"][columns["segment_ids"] > 0].tolist())
    assert all(inputs[token] == 1 for document in documents for token in document[1:-1])


def test_a_range_of_rows_has_the_columns_and_targets_of_its_rows():
    sequences = sequences_of(documents_of([5, 9, 3, 20, 7, 16, 2, 11] * 4), 15, BestFitConfig(buffer_size=4))
    part, rows = ExampleRange(sequences, 3, 6), np.array([0, 2])
    np.testing.assert_array_equal(part.target_positions(rows), sequences.target_positions(rows + 3))
    np.testing.assert_array_equal(part.read(rows)["tokens"], sequences.read(rows + 3)["tokens"])
    # The rows begin at the same tokens with a document mask, but what a reference says about them differs.
    masked = BestFitSequences(sequences.cache, 15, BestFitConfig(buffer_size=4, document_mask=True), sequences._index)
    np.testing.assert_array_equal(masked.starts(rows), sequences.starts(rows))
    assert part.arrangement == sequences.arrangement != masked.arrangement


class TestIndexOnDisk:
    """The index is built once, and is never trusted if its content is damaged."""

    @pytest.fixture
    def cache(self, tmp_path) -> TokenCache:
        cache = cache_of(documents_of([5, 9, 3, 20, 7, 16, 2, 11] * 8))
        return dataclasses.replace(cache, folder=tmp_path / "train", fingerprint="f")

    @pytest.fixture
    def builds(self, monkeypatch) -> list[int]:
        calls: list[int] = []

        def counted(offsets, capacity, config, *, truncation, pack=pack_best_fit):
            calls.append(capacity)
            return pack(offsets, capacity, config, truncation=truncation)

        monkeypatch.setattr(best_fit, "pack_best_fit", counted)
        return calls

    def test_it_is_built_once_for_each_key(self, cache, builds):
        config = BestFitConfig(buffer_size=4)
        first, again = (open_rows(cache, 15, config) for _ in range(2))
        assert builds == [16]
        for name in ("firsts", "starts", "lengths"):
            np.testing.assert_array_equal(getattr(again, name), getattr(pack_best_fit(cache.offsets, 16, config), name))
            assert getattr(again, name).dtype == getattr(first, name).dtype
        assert (again.num_cuts, again.num_dropped_tokens) == (first.num_cuts, first.num_dropped_tokens)
        open_rows(cache, 15, dataclasses.replace(config, document_mask=True))  # has the same rows
        assert builds == [16]
        others = [dataclasses.replace(config, **{name: value}) for name, value in (("fill", "pad"), ("buffer_size", 5))]
        for other in (*others, dataclasses.replace(config, refill_size=3)):
            open_rows(cache, 15, other)
        open_rows(dataclasses.replace(cache, fingerprint="g"), 15, config)
        open_rows(cache, 14, config)
        assert builds == [16, 16, 16, 16, 16, 15]


class TestRowsThatNeverEnd:
    """With `wrap: true`, as nanochat's loader makes them."""

    @pytest.mark.parametrize("name", WRAPPED["cases"])
    def test_rows_equal_those_of_nanochats_loader(self, name, tmp_path):
        case = WRAPPED["cases"][name]
        sizes = 2 + np.arange(sum(case["files"])) * 7919 % 997 % 397
        groups = [
            min(case["row_group"], size - first)
            for size in case["files"]
            for first in range(0, size, case["row_group"])
        ]
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        cache = dataclasses.replace(
            cache_of([[BOS]]), folder=tmp_path / "train", offsets=offsets, documents_of_groups=np.array(groups)
        )
        rows = open_rows(cache, WRAPPED["T"], BestFitConfig(wrap=True))
        starts, lengths, _ = rows.pieces_of(np.arange(WRAPPED["num_rows"]))
        tokens = np.repeat(np.searchsorted(offsets, starts, side="right") - 1, lengths).astype(np.int32)
        assert hashlib.sha256(tokens.tobytes()).hexdigest() == case["sha256"]

    @pytest.mark.slow
    @settings(max_examples=40)
    @given(
        groups=st.lists(st.integers(1, 9), min_size=1, max_size=5),
        capacity=st.integers(2, 10),
        config=configs,
        part=st.integers(1, 40),
        data=st.data(),
    )
    def test_agree_with_searching_a_list(self, groups, capacity, config, part, data):
        num_documents, num_rows = sum(groups), 60
        lengths = data.draw(st.lists(st.integers(1, 14), min_size=num_documents, max_size=num_documents))
        config = dataclasses.replace(config, fill="crop", wrap=True)
        cache = dataclasses.replace(cache_of(documents_of(lengths)), documents_of_groups=np.array(groups))
        expected = endless_by_hand(lengths, groups, capacity, config, num_rows)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(best_fit, "_PART", part)
            patch.setattr(best_fit, "_open", lambda folder, made_from, build: build())
            rows = open_rows(cache, capacity - 1, config)
            order = data.draw(st.permutations(range(num_rows)))  # any row may be the first that is read
            found = {row: [array.tolist() for array in rows.pieces_of(np.array([row]))[:2]] for row in order[:20]}
            together = rows.pieces_of(np.arange(num_rows))
        for row, (starts, taken) in found.items():
            numbers = np.searchsorted(cache.offsets, starts, side="right") - 1
            assert (numbers.tolist(), taken) == tuple(map(list, zip(*expected[row], strict=True)))
        np.testing.assert_array_equal(together[2], [len(row) for row in expected])
        np.testing.assert_array_equal(together[1], [length for row in expected for _, length in row])
        (first, count) = (rows.first_pass, np.cumsum([len(row) for row in expected]))
        assert len(first) == np.searchsorted(count, num_documents) + 1, "a pass has as many documents as there are"

    def test_the_next_start_reads_the_parts_from_disk(self, tmp_path, monkeypatch):
        monkeypatch.setattr(best_fit, "_PART", 10)
        config = BestFitConfig(buffer_size=4, refill_size=3, wrap=True)
        cache = dataclasses.replace(cache_of(documents_of([5, 9, 3, 20, 7, 16, 2, 11] * 4)), folder=tmp_path / "train")
        expected = open_rows(cache, 15, config).pieces_of(np.arange(90))
        monkeypatch.setattr(best_fit, "pack_part", None)
        for found, array in zip(open_rows(cache, 15, config).pieces_of(np.arange(90)), expected, strict=True):
            np.testing.assert_array_equal(found, array)

    @pytest.mark.slow
    def test_few_parts_are_open_at_a_time(self, tmp_path, monkeypatch):
        monkeypatch.setattr(best_fit, "_PART", 10)
        cache = dataclasses.replace(cache_of(documents_of([5, 9, 3, 20, 7, 16, 2, 11] * 4)), folder=tmp_path / "train")
        rows = open_rows(cache, 15, BestFitConfig(buffer_size=4, refill_size=3, wrap=True))
        expected = rows.pieces_of(np.arange(90))
        before = len(list(Path("/proc/self/fd").iterdir()))
        rows.pieces_of(np.array([300]))
        assert len(list(tmp_path.rglob("cache.json"))) > 30, "this many parts"
        assert len(list(Path("/proc/self/fd").iterdir())) <= before + 4 * (best_fit._MAX_OPEN + 1)
        for found, array in zip(rows.pieces_of(np.arange(90)), expected, strict=True):
            np.testing.assert_array_equal(found, array)

    def test_row_groups_come_from_the_files(self, config):
        wrapped = {"packing": BestFitConfig(buffer_size=100, refill_size=5)}  # more than there are documents
        data, lines = opened(config, **wrapped)
        assert data.train[""].cache.documents_of_groups.tolist() == [8] * 9
        assert any("rows of 64 tokens" in line and "the next pass follows without a break" in line for line in lines)
        for examples in (data.train[""], data.validation[0].examples):
            sizes = np.diff(examples.cache.offsets).tolist()
            expected = endless_by_hand(
                sizes, [8] * (len(sizes) // 8), 65, BestFitConfig(buffer_size=100, refill_size=5), 300
            )
            mixture = Mixture({"": examples}, [MixtureStage(0, (1,))], seed=0, shuffle=False)
            columns = mixture.read(np.arange(300))
            tokens = np.concatenate([columns["tokens"], columns["targets"][:, -1:]], axis=1)
            documents = np.split(np.asarray(examples.cache.tokens), examples.cache.offsets[1:-1])
            assert tokens.ravel().tolist() == [int(t) for row in expected for d, n in row for t in documents[d][:n]]
        assert examples.num_evaluated(None) == len(examples) < 300 == examples.num_evaluated(300)

    @pytest.mark.parametrize(
        ("changes", "wraps"),
        [
            ({}, True),
            ({"shuffle": True}, False),
            ({"num_validation_sequences": 3, "num_validation_files": None}, False),
            ({"packing": BestFitConfig(fill="split")}, False),
        ],
    )
    def test_endless_rows_are_the_default_only_for_all_documents_in_order(self, config, changes, wraps):
        config = dataclasses.replace(config, **{"packing": BestFitConfig(), **changes})
        assert opened(config, 32)[0].train[""].is_endless == wraps
        explicit = dataclasses.replace(config, packing=dataclasses.replace(config.packing, wrap=wraps))
        assert explicit.identity() == config.identity()
        assert ("wrap" in config.identity()["packing"]) == wraps, "older runs have no such key"
        if not wraps:
            with pytest.raises(ConfigError, match=r"data\.packing\.wrap: true given together with data\."):
                dataclasses.replace(config, packing=dataclasses.replace(config.packing, wrap=True)).check()

    def test_a_cache_of_an_earlier_version_has_no_row_groups_and_says_so(self, config):
        wrapped = {"packing": BestFitConfig()}
        cache = opened(config, **wrapped)[0].train[""].cache
        metadata = dict(TOKEN_CACHE.at(cache.folder).metadata)
        del metadata[GROUPS]
        write_metadata(cache.folder / METADATA, metadata)
        data, lines = opened(config, **wrapped)
        assert data.train[""].cache.documents_of_groups is None
        assert f"(an earlier version made {cache.folder}, without the ends of row groups)" in " ".join(lines)


@pytest.fixture
def shards(tmp_path) -> list[list[str]]:
    """The documents of four shards as nanochat publishes them: a column of text, small row groups, zstd."""
    folder = tmp_path / "shards"
    folder.mkdir()
    texts = [[some_text(100 * n + i, 5 + (7 * i) % 40) for i in range(24)] for n in range(4)]
    for number, column in enumerate(texts):
        options: dict[str, Any] = {"row_group_size": 8, "compression": "zstd", "use_dictionary": False}
        pq.write_table(pa.table({"text": column}), folder / f"shard_{number:05d}.parquet", **options)
    return texts


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    small_tokenizer().save(folder)
    return folder


@pytest.fixture
def config(shards, tokenizer_folder, tmp_path) -> TokensConfig:
    return TokensConfig(
        train_urls=[f"{tmp_path}/shards"],
        num_validation_files=1,
        cache_dir=f"{tmp_path}/cache",
        tokenizer=str(tokenizer_folder),
        enforce_eos=False,
        shuffle=False,
        packing=BestFitConfig(buffer_size=10, refill_size=4, wrap=False),
    )


def opened(config: TokensConfig, seq_len: int = 64, **changes: Any) -> tuple[Data, list[str]]:
    config, lines = dataclasses.replace(config, **changes), []
    return open_data(config, seq_len, lines.append), lines


def test_shards_are_packed_and_the_last_one_is_for_validation(config, shards):
    data, lines = opened(config)
    tokenizer = config.corpus.load_tokenizer(print)
    splits = {
        "train": (data.train[""], [*shards[0], *shards[1], *shards[2]]),
        "validation": (data.validation[0].examples, shards[3]),
    }
    for split, (sequences, texts) in splits.items():
        documents = [[tokenizer.bos_id, *ids] for ids in tokenizer.encode_batch(texts)]
        expected = columns_of(sequences_of(documents, 64, config.packing))
        found = sequences.read(np.arange(len(sequences)))
        for name, column in expected.items():
            np.testing.assert_array_equal(found[name], column, err_msg=name)
        rows = rows_by_hand([len(document) for document in documents], 65, config.packing)
        num_tokens, kept = sum(map(len, documents)), sum(n for row in rows for _, _, n in row)
        line = next(line for line in lines if line.startswith(f"{split}: ") and "rows" in line)
        assert f"{len(rows)} rows of 64 tokens" in line
        assert f"losing {num_tokens - kept:,} of {num_tokens:,} tokens ({1 - kept / num_tokens:.1%})" in line
    assert "losing" not in " ".join(opened(config, packing=BestFitConfig(fill="split"))[1])
    # Rows that are much shorter than the documents lose most of them.
    said = {length: " ".join(opened(config, length)[1]) for length in (8, 64)}
    assert [float(share) > 50 for share in re.findall(r"tokens \((.*?)%\)", said[8])] == [True, True]
    advice = {length: text.count("%). Set data.packing.fill: split, which loses none") for length, text in said.items()}
    assert advice == {8: 2, 64: 0}


def test_the_rows_are_shown_with_their_documents(config):
    sequences, tokenizer = opened(config)[0].train[""], config.corpus.load_tokenizer(print)
    rows = rows_in(sequences)
    assert any(length < 64 for row in rows[:3] for _, _, length in row)
    for number in range(3):
        first, *parts = sequences.show(number, tokenizer)
        row = {name: column[0] for name, column in sequences.read(np.array([number])).items()}
        assert first == "loss on 64 of 64 tokens"
        headers, texts = zip(*(part.split(" ---\n", 1) for part in parts), strict=True)
        whole = [*row["tokens"].tolist(), int(row["targets"][-1])]
        assert "".join(texts).replace("⟦", "").replace("⟧", "") == tokenizer.decode(whole, special=True)
        assert texts[0].startswith("⟦<|endoftext|>⟧")
        assert all(text.startswith("<|endoftext|>") for text in texts[1:])
        for header, (document, _, length) in zip(headers, rows[number], strict=False):
            size = int(sequences.cache.offsets[document + 1] - sequences.cache.offsets[document])
            part = f", tokens 1 to {length} of {size}" if length < size else ""
            assert header == f"--- document {document % 24 + 1} of shard_0000{document // 24}.parquet{part}"


def test_files_held_out_are_neither_trained_on_nor_listed_twice(config, shards, tmp_path):
    twice = [f"{tmp_path}/shards/shard_00003.parquet", f"{tmp_path}/shards"]
    data, _ = opened(config, train_urls=twice, cache_dir=f"{tmp_path}/other")
    names = [list(sequences.cache.documents_of) for sequences in (data.train[""], data.validation[0].examples)]
    assert names == [["shard_00003.parquet", "shard_00000.parquet", "shard_00001.parquet"], ["shard_00002.parquet"]]
    (tmp_path / "held_out.txt").write_text("other text " * 200)
    given_too = {"validation_urls": [f"{tmp_path}/held_out.txt"], "cache_dir": f"{tmp_path}/third"}
    data, _ = opened(config, **given_too)
    assert list(data.validation[0].examples.cache.documents_of) == ["held_out.txt"]
    assert len(data.train[""].cache.documents_of) == 3
    assert opened(config)[0].train[""].cache.fingerprint == data.train[""].cache.fingerprint
    with pytest.raises(ConfigError, match=r"data\.num_validation_files: 4 given, but train_urls lists 4 files"):
        dataclasses.replace(config, num_validation_files=4).check()
    with pytest.raises(ConfigError, match=r"data\.num_validation_files: 1 given without train_urls"):
        check_fields(dataclasses.replace(config, train_urls=[], id="some/dataset"), "data")


def test_records_with_a_loss_mask_are_padded_and_never_cut(config, tmp_path):
    pairs = [{"input": some_text(i, 3), "output": some_text(50 + i, 4 + i % 9)} for i in range(40)]
    write_records(tmp_path / "pairs.jsonl", pairs)
    record_format = SupervisedFormat(input_field="input", output_field="output")
    places = {"train_urls": [f"{tmp_path}/pairs.jsonl"], "num_validation_files": None, "format": record_format}
    packing = BestFitConfig(fill="pad", document_mask=True)
    data, lines = opened(config, 128, **places, packing=packing, enforce_eos=True)
    greedy, _ = opened(config, 128, **places, packing=None, enforce_eos=True)
    columns, usual = (each.train[""].read(np.arange(len(each.train[""]))) for each in (data, greedy))

    def answers(read: dict[str, np.ndarray]) -> list[int]:
        return sorted(read["targets"][read["loss_mask"] > 0].tolist())

    assert answers(columns) == answers(usual)
    assert len(columns["tokens"]) <= len(usual["tokens"])
    assert "losing 0 of" in " ".join(lines)
    with pytest.raises(
        ConfigError, match=r"data\.packing\.fill: crop given, but the records of data\.format have a loss"
    ):
        dataclasses.replace(config, **places).check()
    unpacked = {**places, "format": dataclasses.replace(record_format, pack=False)}
    with pytest.raises(ConfigError, match=r"data\.format\.pack: false given together with data\.packing"):
        dataclasses.replace(config, **unpacked, packing=packing).check()


def test_rows_without_bos_are_refused(config):
    with pytest.raises(
        ConfigError, match=r"data\.packing: .* given without enforce_bos: true or null, .* but .* false"
    ):
        check_fields(dataclasses.replace(config, enforce_bos=False), "data")
    with pytest.raises(
        ConfigError, match=r"data\.format\.type: pretokenized given, whose documents need not begin with BOS"
    ):
        dataclasses.replace(config, format=PretokenizedFormat()).check()


def test_another_packing_is_other_data(config):
    usual = config.identity()
    assert usual["packing"]["fill"] == "crop"
    assert "packing" not in dataclasses.replace(config, packing=None).identity()
    for field in dataclasses.fields(BestFitConfig):
        if field.name != "type":
            value = {"fill": "split", "document_mask": True, "wrap": True}.get(field.name, 7)
            other = dataclasses.replace(config, packing=dataclasses.replace(config.packing, **{field.name: value}))
            assert other.identity() != usual


def test_a_larger_buffer_cuts_less():
    lengths = np.random.default_rng(0).integers(2, 400, 3000)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    lost = [
        pack_best_fit(offsets, 129, BestFitConfig(buffer_size=size, refill_size=1)).num_dropped_tokens
        for size in (1, 10, 100, 1000)
    ]
    assert lost == sorted(lost, reverse=True)
    assert lost[0] > 1.05 * lost[-1]


@settings(max_examples=40)
@given(lengths=lengths_of_documents, capacity=st.integers(2, 10))
def test_without_overlong_documents_the_rows_are_those_of_the_others(lengths, capacity):
    offsets, config = np.concatenate([[0], np.cumsum(lengths)]), BestFitConfig(fill="pad")
    found = pack_best_fit(offsets, capacity, config, truncation="drop_overlength")
    fits = np.array(lengths) <= capacity
    expected = pack_best_fit(np.concatenate([[0], np.cumsum(np.array(lengths)[fits])]), capacity, config)
    np.testing.assert_array_equal(found.firsts, expected.firsts)
    np.testing.assert_array_equal(found.lengths, expected.lengths)
    moved_by = (offsets[:-1] - (np.cumsum(np.array(lengths) * fits) - np.array(lengths) * fits))[fits]
    kept = np.concatenate([[0], np.cumsum(np.array(lengths)[fits])])
    documents = np.searchsorted(kept, expected.starts, side="right") - 1
    np.testing.assert_array_equal(found.starts, expected.starts + moved_by[documents])
    assert (found.num_cuts, found.num_dropped_tokens) == ((~fits).sum(), sum(lengths) - found.lengths.sum())


@settings(max_examples=40)
@given(lengths=lengths_of_documents, capacity=st.integers(2, 10))
def test_the_ends_of_overlong_documents_are_packed_like_their_beginnings(lengths, capacity):
    offsets, config = np.concatenate([[0], np.cumsum(lengths)]), BestFitConfig(fill="pad")
    found = pack_best_fit(offsets, capacity, config, truncation="keep_end")
    expected = pack_best_fit(offsets, capacity, config)
    for name in ("firsts", "lengths", "num_cuts", "num_dropped_tokens"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    ends = offsets[1:][np.searchsorted(offsets, expected.starts, side="right") - 1]
    np.testing.assert_array_equal(found.starts, np.maximum(expected.starts, ends - capacity))
