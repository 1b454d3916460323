"""Every file format as its usual writer produces it; errors for damaged files name the position."""

import bz2
import gzip
import json
import lzma
import random
import re
import subprocess
import sys

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.data.sources import document_files as formats
from tests.data.helpers import find_files, refused, some_text

TEXTS = [some_text(seed, 30) for seed in range(40)]
# One frame with a checksum, written by the reference implementation's binding.
ZSTD = bytes.fromhex("28b52ffd2416b100007b2274657874223a202266726f6d207a737464227d0aab3203ed")


def read(path, text_key="text"):
    [file] = find_files([str(path)], "data.train_urls", text_key)
    return list(file.read())


def texts(path, text_key="text"):
    return [document.text for document in read(path, text_key)]


def zstd(raw):
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(raw)
    return sink.getvalue().to_pybytes()


COMPRESS = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd}


def lines(records):
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def table(**columns):
    return pa.table({"id": list(range(len(TEXTS))), "text": TEXTS} | columns)


def write_table(path, content, how):
    if how == "parquet":
        pq.write_table(content, path, row_group_size=7)
    elif how == "feather":
        feather.write_feather(content, path, compression="zstd", chunksize=7)
    else:
        new = {"stream": pa.ipc.new_stream, "file": pa.ipc.new_file}[how]
        with new(str(path), content.schema) as writer:
            writer.write_table(content, max_chunksize=7)
    return path


@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize("suffix", [".txt", ".py", ".jsonl", ".json"])
def test_text_and_records_in_every_compression(tmp_path, suffix, compression):
    records = [{"id": number, "text": text} for number, text in enumerate(TEXTS)]
    raw = {".jsonl": lines(records), ".json": json.dumps(records).encode()}.get(suffix, TEXTS[0].encode())
    path = tmp_path / f"x{suffix}{compression}"
    path.write_bytes(COMPRESS[compression](raw))
    found = read(path)
    assert [document.text for document in found] == (TEXTS if suffix.startswith(".json") else TEXTS[:1])
    positions = [document.position for document in found]
    assert positions == sorted(positions)
    assert positions[-1] == path.stat().st_size


@pytest.mark.parametrize("compression", COMPRESS)
def test_concatenated_compressed_streams(tmp_path, compression):
    path = tmp_path / f"x.jsonl{compression}"
    path.write_bytes(b"".join(COMPRESS[compression](lines([{"text": text}])) for text in TEXTS[:3]))
    assert texts(path) == TEXTS[:3]


def test_zstd_with_a_checksum(tmp_path):
    (tmp_path / "x.jsonl.zst").write_bytes(ZSTD * 2)
    assert texts(tmp_path / "x.jsonl.zst") == ["from zstd", "from zstd"]


def test_one_record(tmp_path):
    (tmp_path / "x.json").write_text(json.dumps({"body": "größe", "id": 1}))
    assert texts(tmp_path / "x.json", "body") == ["größe"]
    (tmp_path / "x.json").write_text(" \n")
    assert texts(tmp_path / "x.json") == []


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())], ids=str
)
@pytest.mark.parametrize("how", ["parquet", "stream", "file", "feather"])
def test_tables(tmp_path, how, kind):
    path = tmp_path / ("x.parquet" if how == "parquet" else "x.arrow")
    if how == "feather" and kind == pa.string_view():
        pytest.skip("feather's writer takes no views")
    found = read(write_table(path, table(body=pa.array(TEXTS[::-1]).cast(kind)), how), "body")
    assert [document.text for document in found] == TEXTS[::-1]
    positions = [document.position for document in found]
    assert positions == sorted(positions)
    assert 0 < positions[0] < positions[-1] <= path.stat().st_size
    assert positions[-1] > 0.9 * path.stat().st_size or how in ("stream", "file")


def test_tables_are_read_in_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "_ROWS", 4)
    for how in ("parquet", "stream", "file"):
        path = tmp_path / ("x.parquet" if how == "parquet" else "x.arrow")
        assert texts(write_table(path, table(), how)) == TEXTS


def test_memory_does_not_grow_with_the_table(tmp_path):
    text = "".join(random.Random(0).choices("abcdefgh ", k=1 << 16))
    schema = pa.schema({"text": pa.string()})
    with pq.ParquetWriter(tmp_path / "x.parquet", schema, compression="none", use_dictionary=False) as writer:
        for _ in range(16):
            writer.write_table(pa.table({"text": [text] * 64}, schema))
    before, most = pa.total_allocated_bytes(), 0
    for _ in find_files([str(tmp_path / "x.parquet")], "x", "text")[0].read():
        most = max(most, pa.total_allocated_bytes() - before)
    assert most < 0.4 * (tmp_path / "x.parquet").stat().st_size


@pytest.mark.parametrize("compression", list(COMPRESS)[1:])
def test_truncated_and_damaged_compression(tmp_path, compression):
    noise = random.Random(0)
    raw = lines([{"text": "".join(noise.choices("abcdefghijklmnop", k=500))} for _ in range(200)])
    whole = COMPRESS[compression](raw)
    path = tmp_path / f"x.jsonl{compression}"
    for cut in (1, 4, 20, len(whole) // 2, len(whole) - 3):
        path.write_bytes(whole[:-cut])
        with pytest.raises(ConfigError, match=rf"x\.jsonl\{compression}: line \d+: the file is truncated or damaged"):
            read(path)
    path.write_bytes(b"this was never compressed")
    with pytest.raises(
        ConfigError, match=r"line 1: the file is truncated or damaged, or its content does not match its suffix"
    ):
        read(path)
    path = tmp_path / f"x.txt{compression}"
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=r"x\.txt.*: while it was read: the file is truncated"):
        read(path)


@pytest.mark.parametrize("how", ["parquet", "stream", "file"])
def test_truncated_tables(tmp_path, how):
    path = write_table(tmp_path / ("x.parquet" if how == "parquet" else "x.arrow"), table(), how)
    whole = path.read_bytes()
    for size in (len(whole) // 3, len(whole) - 300, 5):
        path.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match=r"x\.\w+: row \d+: the file is truncated or damaged"):
            read(path)


READ_DAMAGED = """
import random, sys
from pathlib import Path
from jaxlm.core.errors import ConfigError
from jaxlm.data.sources.record_files import read_records
path, unread = Path(sys.argv[1]), 0
whole = path.read_bytes()
for seed in range(200):
    chooser, damaged = random.Random(seed), bytearray(whole)
    for _ in range(chooser.choice([1, 3, 20])):
        damaged[chooser.randrange(len(whole))] = chooser.choice([0, 1, 127, 128, 255])
    path.write_bytes(damaged[: len(whole) if seed % 4 else chooser.randrange(len(whole))])
    try:
        for record in read_records(path, None):
            repr(record)
    except ConfigError as error:
        assert path.name in str(error)
        unread += 1
print(unread)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["parquet", "stream", "file"])
def test_damaged_tables_end_no_process(tmp_path, how):
    nested = [[{"role": "user", "content": text}, {"role": "assistant", "content": None}] for text in TEXTS]
    content = table(messages=nested, same=pa.array(TEXTS).dictionary_encode(), large=pa.array(TEXTS, pa.large_string()))
    path = write_table(tmp_path / ("x.parquet" if how == "parquet" else "x.arrow"), content, how)
    done = subprocess.run([sys.executable, "-c", READ_DAMAGED, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 30


@pytest.mark.parametrize("how", ["parquet", "stream", "file"])
class TestTablesWithoutText:
    def refused(self, tmp_path, how, content, message, text_key="text"):
        path = tmp_path / ("x.parquet" if how == "parquet" else "x.arrow")
        with pytest.raises(ConfigError, match=rf"x\.\w+: {message}"):
            read(write_table(path, content, how), text_key)

    def test_no_such_column(self, tmp_path, how):
        message = r"no column 'body' \(data\.text_key\)\. The file has: id \(int64\), text \(string\)"
        self.refused(tmp_path, how, table(), message, "body")

    def test_a_column_of_another_type(self, tmp_path, how):
        self.refused(tmp_path, how, table(), r"column 'id' \(data\.text_key\) holds int64, not text", "id")
        self.refused(tmp_path, how, table(raw=[b"x"] * 40), r"column 'raw' .* holds binary, not text", "raw")

    def test_null(self, tmp_path, how):
        content = table(body=[*TEXTS[:20], None, *TEXTS[21:]])
        self.refused(tmp_path, how, content, r"row 21: the text under data\.text_key 'body' is null", "body")

    def test_not_utf8(self, tmp_path, how):
        raw = pa.array([*[b"good"] * 20, b"\xff\xfe", *[b"good"] * 19])
        content = table(body=pa.Array.from_buffers(pa.string(), 40, raw.buffers()))
        message = r"rows 15 to 21: not UTF-8 text, or damaged: .*Invalid UTF8 sequence at string index 6\."
        self.refused(tmp_path, how, content, message, "body")


NO_TEXT = "no text under data.text_key 'text'"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.txt", b"good \xe9 bad", "not UTF-8 text (byte 0xe9 at offset 5)"),
        ("x.py", b"# coding: latin-1\n\xe9\xe8", "not UTF-8 text (byte 0xe9 at offset 18)"),
        ("x.jsonl", b'{"text": "a"}\n{"text": \n', "line 2: not JSON"),
        (
            "x.jsonl",
            b'{"text": "a"}\n{"text": "b", "n": 1, "n": 2}\n',
            "line 2: the key 'n' is given twice in one object",
        ),
        ("x.json", b'[{"a": {"text": "b", "text": "c"}}]', "the key 'text' is given twice in one object"),
        ("x.jsonl", b'{"text": "a b"\n', "line 1: not JSON (Expecting ',' delimiter at column 15)"),
        ("x.jsonl", b'{"text": "a b\n', "line 1: not JSON (Unterminated string starting at column 10)"),
        ("x.json", b'{"text": "a b', "not JSON (Unterminated string starting at line 1, column 10)"),
        ("x.jsonl", b'{"text": "\xff"}\n', "line 1: not UTF-8 text (byte 0xff at offset 10)"),
        ("x.jsonl", b'{"text": "a\\ud800"}\n', r"line 1: the text is not valid Unicode: '\ud800' at character 1"),
        ("x.jsonl", b'{"text": "a"}\n\n{"body": "a"}\n', f"line 3: {NO_TEXT}. Keys of the record: body"),
        ("x.jsonl", b'{"text": 5}\n', f"line 1: {NO_TEXT}"),
        ("x.jsonl", b"[1, 2]\n", f"line 1: {NO_TEXT}"),
        ("x.jsonl", b'{"text": ["a"]}', f'line 1: {NO_TEXT} (it is ["a"])'),
        ("x.json", b'[{"text": "a"}, {"body": "b"}]', f"record 2: {NO_TEXT}. Keys of the record: body"),
        ("x.json", b'[{"text": null}]', f"record 1: {NO_TEXT} (it is null)"),
        ("x.json", b'[{"text": NaN}]', f"record 1: {NO_TEXT} (it is NaN). Keys of"),
        ("x.json", b'"text"', f"record 1: {NO_TEXT}. Keys of the record: none"),
        ("x.json", b'[{"text": "a\\ud800"}]', "record 1: the text is not valid Unicode"),
        ("x.json", b'[{"text": "a"},\n {"text": ]', "not JSON (Expecting value at line 2, column 11)"),
        (
            "x.json",
            b'{"text": "a"}\n{"text": "b"}',
            "not JSON (Extra data at line 2, column 1). If it has one record per line, rename it to .jsonl",
        ),
        (
            "x.jsonl",
            b'{"text": "a"}\n{"text": "b", "id": 1' + b"0" * 4999 + b"}\n",
            "line 2: the JSON has a number with 5,000 digits, at most 4,300 expected. Put it in quotes",
        ),
        ("x.json", b"-1" + b"0" * 5999, "the JSON has a number with 6,000 digits, at most 4,300 expected"),
        ("x.jsonl.gz", gzip.compress(b'{"text": "a"}\n{"text": "\xff"}\n', mtime=0), "line 2: not UTF-8 text"),
    ],
)
def test_unreadable_text_names_file_and_place(tmp_path, name, content, message):
    refused(tmp_path / name, content, read, re.escape(f"{name}: {message}"))


def test_json_lines_are_not_advised_to_become_json_lines(tmp_path):
    refused(
        tmp_path / "x.jsonl", b'{"text": "a"}\r{"text": "b"}\r', read, r"line 1: not JSON \(Extra data at column 15\)$"
    )


@pytest.mark.parametrize(
    ("name", "ending"),
    [("x.csv", ".csv"), ("x.csv.gz", ".csv.gz"), ("x.parquet.gz", ".parquet.gz"), ("x.gz", ".gz"), ("x", "")],
)
def test_other_suffixes_are_refused(tmp_path, name, ending):
    (tmp_path / name).write_text("x")
    with pytest.raises(
        ConfigError, match=rf"has the suffix '{ending}'\. Allowed: \.txt, \.jsonl, .*compressed with \.gz"
    ):
        read(tmp_path / name)
