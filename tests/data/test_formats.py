"""Prompts with completions, token ids, and document boundaries."""

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.data.config import DataConfig
from jaxlm.data.formats.chat import ChatFormat
from jaxlm.data.formats.completions import SupervisedFormat
from jaxlm.data.formats.documents import PretokenizedFormat, TextFormat
from jaxlm.data.sources.record_files import read_records
from jaxlm.data.tokens import TokensConfig
from tests.data.helpers import open_data, small_tokenizer, some_text, write_records

PAIRS = [(f"Say {some_text(n, 3)}\n", f" {some_text(50 + n, 1 + n)}") for n in range(6)]
DOLLY = Path(__file__).parents[3] / "shared" / "data" / "dolly_instructions_700.jsonl"
GPT2 = DOLLY.with_name("gpt2_tokenizer")


@pytest.fixture
def base(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "tokenizer")
    return TokensConfig(cache_dir=f"{tmp_path}/cache", tokenizer=f"{tmp_path}/tokenizer")


def sequences_of(config: DataConfig, seq_len: int = 64, **changes):
    config = dataclasses.replace(config, **changes)
    return open_data(config, seq_len).train[""]


def write_pairs(path: Path, names=("prompt", "response")) -> str:
    write_records(path, (dict(zip(names, pair, strict=True)) for pair in PAIRS))
    return str(path)


def test_a_format_can_set_its_text_key(base, tmp_path):
    path = write_pairs(tmp_path / "a.jsonl")
    first = sequences_of(base, train_urls=[path], format=TextFormat(text_key="response"))
    second = sequences_of(base, train_urls=[path], text_key="response", cache_dir=f"{tmp_path}/other")
    assert first.cache.fingerprint == second.cache.fingerprint
    with pytest.raises(ConfigError, match="text_key: 'prompt' has no effect"):
        sequences_of(base, train_urls=[path], text_key="prompt", format=TextFormat(text_key="response"))
    with pytest.raises(ConfigError, match="text_key: 'prompt' has no effect"):
        sequences_of(base, train_urls=[path], text_key="prompt", format=ChatFormat(chat_template="x"))


def test_token_ids_are_used_unchanged(base, tokenizer, tmp_path):
    documents = [[1, 2, 3, 4], [299, 0, 7, 7]]
    flat = [*documents[0], *documents[1]]
    np.save(tmp_path / "rows.npy", np.array(documents, np.uint16))
    np.save(tmp_path / "one.npy", np.array(documents[0], np.int64))
    pq.write_table(pa.table({"ids": documents}), tmp_path / "a.parquet")
    write_records(tmp_path / "a.jsonl", ({"input_ids": ids} for ids in documents))
    for number, (name, key) in enumerate({"rows.npy": "input_ids", "a.parquet": "ids", "a.jsonl": "input_ids"}.items()):
        cache = sequences_of(
            base, 4, train_urls=[f"{tmp_path}/{name}"], cache_dir=f"{tmp_path}/{number}", format=PretokenizedFormat(key)
        ).cache
        assert (cache.tokens.tolist(), cache.offsets.tolist()) == (flat, [0, 4, 8])
        assert cache.num_bytes == tokenizer.token_bytes()[flat].sum()
    both = sequences_of(base, 4, train_urls=[f"{tmp_path}/*.npy"], format=PretokenizedFormat())
    assert list(both.cache.documents_of.values()) == [1, 2]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([0, 300], "token id 300 given, but the tokenizer has 300 tokens"),
        ([-1], "token id -1"),
        (["a"], r"expected token ids \(a list of integers\), got an array of <U1"),
        ([0.5], "got an array of float64"),
        ([[1, 2], [3]], r"a\.jsonl: line 1: .* got a list with lists of different lengths"),
        ([[1, 2], [3, 4]], r"a\.jsonl: line 1: .* got an array of int64 \(2, 2\)"),
        ([1, None, 2], "got an array of object"),
        ([2**70], "got an array of object"),
        ([True], "got an array of bool"),
        (0, "got an array of int64"),
        ({"1": 2}, "got an array of object"),
        ([7, "\ud800"], r"a\.jsonl: line 1: the text is not valid Unicode"),
        (None, r"a\.jsonl: line 1: the token ids under 'input_ids' are null"),
    ],
)
def test_invalid_token_ids_are_refused(base, tmp_path, ids, message):
    (tmp_path / "a.jsonl").write_text(json.dumps({"input_ids": ids}) + "\n")
    with pytest.raises(ConfigError, match=message):
        sequences_of(base, train_urls=[f"{tmp_path}/a.jsonl"], format=PretokenizedFormat())


def test_a_list_of_token_ids_costs_no_call_for_each_id(tmp_path):
    """Counts the calls of Python functions that reading a record makes."""

    def num_calls(num_ids):
        (tmp_path / "a.jsonl").write_text(json.dumps({"input_ids": [7] * num_ids}))
        calls = []
        sys.setprofile(lambda _, event, __: calls.append(event) if event == "call" else None)
        try:
            (record,) = read_records(tmp_path / "a.jsonl", ["input_ids"])
        finally:
            sys.setprofile(None)
        assert record.values == {"input_ids": [7] * num_ids}
        return len(calls)

    assert num_calls(10_000) == num_calls(1)


def test_ragged_rows_with_nulls_in_tables_of_token_ids(base, tmp_path):
    """Rows may have any length, also none. A null in a row, or for a row, is named."""
    path, config = (
        tmp_path / "a.parquet",
        {"train_urls": [f"{tmp_path}/a.parquet"], "format": PretokenizedFormat("ids")},
    )
    pq.write_table(pa.table({"ids": pa.array([[1, 2, 3], [], [4]], pa.list_(pa.int32()))}), path)
    cache = sequences_of(base, 4, **config).cache
    assert (cache.tokens.tolist(), cache.offsets.tolist()) == ([1, 2, 3, 4], [0, 3, 4])
    for row, message in (([4, None], "expected token ids"), (None, "the token ids under 'ids' are null")):
        pq.write_table(pa.table({"ids": pa.array([[1, 2, 3], row], pa.list_(pa.int32()))}), path)
        with pytest.raises(ConfigError, match=rf"a\.parquet: row 2: {message}"):
            sequences_of(base, **config, cache_dir=f"{tmp_path}/{message}")
    (tmp_path / "b.jsonl").write_text('{"ids": [1]}\n{"tokens": [1]}\n')
    with pytest.raises(ConfigError, match=r"b\.jsonl: line 2: .*'ids' are missing\. Keys of the record: tokens"):
        sequences_of(base, **config | {"train_urls": [f"{tmp_path}/b.jsonl"]}, cache_dir=f"{tmp_path}/b")


@pytest.mark.parametrize("how", ["parquet", "arrow"])
def test_records_of_tables_that_are_not_utf8_name_file_and_rows(base, tmp_path, how):
    raw = pa.array([*[b"good"] * 300, b"\xff\xfe", b"good"])
    response = pa.Array.from_buffers(pa.string(), 302, raw.buffers())
    messages = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]] * 301
    roles = pa.StructArray.from_arrays([pa.array(["assistant"]), response.slice(300, 1)], ["role", "content"])
    nested = pa.concat_arrays([pa.array(messages, pa.list_(roles.type)), pa.ListArray.from_arrays([0, 1], roles)])
    content, path = pa.table({"prompt": ["x"] * 302, "response": response, "messages": nested}), tmp_path / f"a.{how}"
    if how == "parquet":
        pq.write_table(content, path)
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, content.schema) as writer:
            writer.write_table(content)
    rows = "257 to 302" if how == "parquet" else "1 to 302"
    for fmt in (SupervisedFormat(), ChatFormat(chat_template="{{ messages[0].content }}")):
        with pytest.raises(ConfigError, match=rf"a\.{how}: rows {rows}: not UTF-8 text, or damaged: .*Invalid UTF8"):
            sequences_of(base, train_urls=[str(path)], format=fmt)


def test_halves_of_surrogate_pairs_in_records_are_refused(base, tmp_path):
    (tmp_path / "a.jsonl").write_text(
        '{"prompt": "a", "response": "b"}\n{"prompt": "a", "response": "b\\ud83d", "id": 1}\n'
    )
    (tmp_path / "b.jsonl").write_text('{"messages": [{"role": "user", "content": "\\ud83d"}]}\n')
    cases = {"a.jsonl: line 2": SupervisedFormat(), "b.jsonl: line 1": ChatFormat(chat_template="x")}
    for where, fmt in cases.items():
        with pytest.raises(ConfigError, match=rf"{where}: the text is not valid Unicode: '\\ud83d'"):
            sequences_of(base, train_urls=[f"{tmp_path}/{where.split(':')[0]}"], format=fmt)


def test_formats_refuse_unsuitable_files(base, tmp_path):
    (tmp_path / "a.txt").write_text("text")
    np.save(tmp_path / "a.npy", np.arange(3))
    (tmp_path / "b.npy").write_bytes(b"no array")
    for name, how in {"a.txt": ChatFormat(chat_template="x"), "a.npy": TextFormat()}.items():
        with pytest.raises(ConfigError, match=f"'{name}' cannot hold records of this format"):
            sequences_of(base, train_urls=[f"{tmp_path}/{name}"], format=how)
    with pytest.raises(ConfigError, match=r"b\.npy: not an array"):
        sequences_of(base, train_urls=[f"{tmp_path}/b.npy"], format=PretokenizedFormat())
    (tmp_path / "c.npy").write_bytes((tmp_path / "a.npy").read_bytes()[:100])
    np.savez(tmp_path / "several.npz", np.arange(3))
    (tmp_path / "several.npz").rename(tmp_path / "d.npy")
    for name in "cd":
        with pytest.raises(ConfigError, match=rf"{name}\.npy: not an array"):
            sequences_of(base, train_urls=[f"{tmp_path}/{name}.npy"], format=PretokenizedFormat())
    with pytest.raises(ConfigError, match="holds token ids, so there is no text"):
        sequences_of(base, train_urls=[f"{tmp_path}/a.npy"], format=PretokenizedFormat(), tokenizer="bpe")


@pytest.mark.trap("T9")
def test_another_tokenizer_with_the_same_cache_is_an_error(base, tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    sequences_of(base, train_urls=[f"{tmp_path}/a.txt"])
    small_tokenizer(310).save(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"built from other inputs:\n  tokenizer: was .*, is now "):
        sequences_of(base, train_urls=[f"{tmp_path}/a.txt"], tokenizer=f"{tmp_path}/other")


def test_sequences_are_shuffled_by_default():
    assert TokensConfig().shuffle is True


@pytest.mark.slow
@pytest.mark.skipif(not DOLLY.is_file(), reason="needs the shared data")
def test_dolly_is_tokenized_as_transformers_does(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = TokensConfig(
        train_urls=[str(DOLLY)],
        cache_dir=f"{tmp_path}/c",
        tokenizer=str(GPT2),
        format=SupervisedFormat(),
        enforce_bos=False,
    )
    sequences = sequences_of(config, 512)
    reference = transformers.AutoTokenizer.from_pretrained(str(GPT2))
    records = [json.loads(line) for line in DOLLY.read_text().splitlines()]
    kept = [record for record in records if record["response"]]
    assert len(sequences.cache.offsets) - 1 == len(kept)
    for number, record in enumerate(kept):
        own = slice(*sequences.cache.offsets[number : number + 2])
        prompt, answer = (reference(record[key])["input_ids"] for key in ("prompt", "response"))
        assert sequences.cache.tokens[own].tolist() == [*prompt, *answer, reference.eos_token_id]
        assert sequences.cache.target_mask[own].tolist() == [0] * len(prompt) + [1] * (len(answer) + 1)
    assert sequences.padding < 0.25
