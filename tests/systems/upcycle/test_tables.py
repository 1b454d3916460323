"""Tables of a paper: what is measured, and the files."""

import csv
import dataclasses
import re
import struct
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from jaxlm.core.errors import ConfigError
from jaxlm.core.values.batch_types import TokenBatch
from jaxlm.evals.base import ValidationSet
from jaxlm.evals.tables import Row, Subject, Table, TableConfig, check_tables, file_name
from jaxlm.interop.hf.families.gemma3 import Gemma3Config
from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.models.base import Inputs, LanguageModel, ModelConfig, vocab_axis
from jaxlm.models.inference import generate
from jaxlm.models.inference.decoding import begin, num_programs
from jaxlm.objectives.next_token import score_batch
from jaxlm.session.tables import latex, write_table
from jaxlm.systems.upcycle import measurements
from jaxlm.systems.upcycle.dba import DbaConfig
from jaxlm.systems.upcycle.measurements import LatencyTableConfig, MemoryTableConfig, PerplexityTableConfig
from tests.engine.helpers import F32, layout, one_device

SIZES: dict[str, Any] = {"hidden_dim": 64, "intermediate_dim": 48, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2}
LLAMA = LlamaConfig(seq_len=256, **SIZES)
DBA = DbaConfig(seq_len=256, sem_dim=16, geo_dim=32, **SIZES)
SHARED = DbaConfig(seq_len=256, sem_dim=16, geo_dim=32, num_key_heads=1, **SIZES)
SLIDING = Gemma3Config(seq_len=256, head_dim=8, sliding_window=32, sliding_window_pattern=2, **SIZES)
VOCAB = 40


def built(config: ModelConfig) -> LanguageModel:
    return jax.jit(lambda: config.build(vocab_axis(VOCAB), key=jax.random.key(0)))()


def batches_of(seq_len: int, num_batches: int) -> list[TokenBatch]:
    """Random batches of 8 sequences, whose first half only counts in each second one."""
    rng = np.random.default_rng(seq_len)
    axes = (Axis("batch", 8), Axis("position", seq_len))

    def named(array: np.ndarray) -> hax.NamedArray:
        return hax.named(jnp.asarray(array, jnp.int32), axes)

    made = []
    for number in range(num_batches):
        tokens = rng.integers(0, VOCAB, (8, seq_len))
        mask = np.ones((8, seq_len))
        mask[:, seq_len // 2 :] = number % 2
        positions = np.broadcast_to(np.arange(seq_len), tokens.shape)
        made.append(
            TokenBatch(
                tokens=named(tokens),
                targets=named(np.roll(tokens, -1, 1)),
                loss_mask=hax.named(jnp.asarray(mask, jnp.float32), axes),
                positions=named(positions),
                segment_ids=named(np.ones_like(tokens)),
            )
        )
    return made


def subject(config: ModelConfig = LLAMA, name: str = "student", **changes: Any) -> Subject:
    def validation(seq_len: int) -> list[ValidationSet]:
        return [ValidationSet(source, (), lambda: iter(batches_of(seq_len, 4))) for source in ("a", "b")]

    usual = Subject(name, built(config), F32, one_device(), config.seq_len, validation, score_batch, print)
    return dataclasses.replace(usual, **changes)


def rows(config: TableConfig, of: Subject) -> list[Row]:
    with of.layout.use():
        measured = config.rows(of)
    assert all(tuple(row) == tuple(column.name for column in config.columns) for row in measured)
    return measured


def test_every_field_of_a_table_is_listed():
    """Each is used in a test below."""
    choices = TableConfig.get_known_choices()
    fields = {kind: {field.name for field in dataclasses.fields(choices[kind])} for kind in choices}
    assert fields == {
        "perplexity": {"name", "seq_lens", "batches", "repeats"},
        "latency": {"name", "prompt_tokens", "new_tokens", "cache_dtypes", "batch_size", "warmup", "runs", "repeats"},
        "memory": {"name", "contexts", "cache_dtypes", "batch_size"},
    }


# Perplexity


@pytest.mark.slow
def test_perplexity_is_that_of_the_mean_loss_of_all_tokens():
    model = subject()
    (row,) = rows(PerplexityTableConfig(seq_lens=[16], batches=3), model)
    nats = tokens = 0.0
    for batch in batches_of(16, 3) * 2:  # of both sources
        hidden = model.model.hidden(Inputs(batch.tokens, batch.positions, batch.segment_ids)).final
        logits = np.asarray(model.model.logits(hidden).array, np.float64)
        losses = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(
            logits, np.asarray(batch.targets.array)[..., None], -1
        ).squeeze(-1)
        mask = np.asarray(batch.loss_mask.array)
        nats, tokens = nats + (losses * mask).sum(), tokens + mask.sum()
    assert row["tokens"] == tokens == 2 * 8 * (8 + 16 + 8)
    np.testing.assert_allclose(row["loss"], nats / tokens, rtol=1e-5)
    np.testing.assert_allclose(row["perplexity"], np.exp(nats / tokens), rtol=1e-5)
    assert row["loss_range"] == 0.0


@pytest.mark.slow
def test_repeats_read_the_next_batches():
    model = subject()
    whole, halves = (
        rows(PerplexityTableConfig(seq_lens=[16], batches=b, repeats=r), model)[0] for b, r in ((4, 1), (2, 2))
    )
    assert whole["tokens"] == halves["tokens"]
    np.testing.assert_allclose(whole["loss"], halves["loss"], rtol=1e-6)
    (first,) = rows(PerplexityTableConfig(seq_lens=[16], batches=2), model)
    other = 2 * halves["loss"] - first["loss"]  # both have as many tokens
    np.testing.assert_allclose(halves["loss_range"], abs(other - first["loss"]), rtol=1e-4)
    with pytest.raises(ConfigError, match="3 repeats of 2 batches given, but the validation data is used up after 2"):
        rows(PerplexityTableConfig(seq_lens=[16], batches=2, repeats=3), model)


@pytest.mark.slow
def test_context_lengths_default_to_the_longest():
    table, model = PerplexityTableConfig(batches=1), subject(max_tokens=24)
    assert [row["seq_len"] for row in rows(table, model)] == [24]


# Latency


@pytest.mark.slow
def test_the_first_call_is_not_a_sample(monkeypatch):
    """Compilation takes place in the runs before those that are timed, and every timed run runs the compiled programs."""
    calls = []
    timed = measurements.timed_generation

    def spied(generator, prompts, config):
        before = num_programs()
        seconds = timed(generator, prompts, config)
        calls.append((num_programs() - before, len(prompts[0]), config.max_new_tokens, seconds))
        return seconds

    monkeypatch.setattr(measurements, "timed_generation", spied)
    table = LatencyTableConfig(prompt_tokens=[20, 100], new_tokens=[4], warmup=2, runs=3, repeats=2)
    of = dataclasses.replace(LLAMA, seq_len=255)  # no other test has compiled its programs
    measured = rows(table, subject(of))
    assert [(prompt, new) for _, prompt, new, _ in calls] == [(20, 4)] * 5 + [(100, 4)] * 5 + [(20, 4)] * 5 + [
        (100, 4)
    ] * 5
    compiled = [number for number, *_ in calls]
    assert compiled[0] > 0
    assert compiled[5] > 0
    assert sum(compiled) == compiled[0] + compiled[5]
    samples = np.array([calls[n][3] for n in (2, 3, 4, 12, 13, 14)])
    row = measured[0]
    assert row["samples"] == 6
    np.testing.assert_allclose(row["prefill_ms"], 1e3 * np.median(samples[:, 0]))
    np.testing.assert_allclose(row["decode_tokens_per_s"], np.median(3 / samples[:, 1]))
    low, high = np.percentile(3 / samples[:, 1], (25, 75))
    np.testing.assert_allclose(row["decode_tokens_per_s_iqr"], high - low)


@pytest.mark.slow
def test_a_program_that_is_compiled_while_it_is_timed_is_an_error(monkeypatch):
    numbers = iter(range(10))
    monkeypatch.setattr(measurements, "num_programs", lambda: next(numbers))
    with pytest.raises(AssertionError, match="compiled while it was timed"):
        rows(LatencyTableConfig(prompt_tokens=[20], new_tokens=[4], warmup=1, runs=1), subject())


@pytest.mark.slow
def test_all_texts_of_a_batch_count_and_each_cache_dtype_is_measured(monkeypatch):
    seen = []

    def fake(generator, prompts, config):
        seen.append((len(prompts), config.cache_dtype))
        return 0.5, 2.0

    monkeypatch.setattr(measurements, "timed_generation", fake)
    table = LatencyTableConfig(
        prompt_tokens=[20], new_tokens=[5], cache_dtypes=["bfloat16", "int8"], batch_size=3, warmup=1, runs=1
    )
    measured = rows(table, subject())
    assert seen == [(3, "bfloat16")] * 2 + [(3, "int8")] * 2
    assert [row["cache"] for row in measured] == ["bfloat16", "int8"]
    assert {(row["prefill_ms"], row["decode_tokens_per_s"]) for row in measured} == {(500.0, 3 * 4 / 2)}
    (default,) = rows(LatencyTableConfig(prompt_tokens=[20], new_tokens=[5], warmup=1, runs=1), subject())
    assert (default["cache"], seen[-1]) == ("float32", (1, None))


# Memory


def values_per_token(config: Any) -> tuple[int, int]:
    """(cached values, cached vectors) of a token in all layers, from the configuration alone. A window saves none."""
    key, value = config.hidden_dim // config.num_heads, config.hidden_dim // config.num_heads
    if config in (DBA, SHARED):
        key = config.sem_dim // config.num_heads + config.geo_dim // config.num_heads
    if config is SLIDING:
        key = value = config.head_dim
    key_heads = 1 if config is SHARED else config.num_kv_heads
    values = key_heads * key + config.num_kv_heads * value
    return config.num_layers * values, config.num_layers * (key_heads + config.num_kv_heads)


@pytest.mark.slow
@pytest.mark.parametrize("config", [LLAMA, DBA, SHARED, SLIDING], ids=["llama", "dba", "one key", "sliding window"])
def test_the_cache_has_as_many_bytes_as_the_formula_says(config, monkeypatch):
    monkeypatch.setattr(measurements, "compile_generation", lambda *_: ())  # other tests compile
    table = MemoryTableConfig(contexts=[64, 200], cache_dtypes=["float32", "bfloat16", "int8"], batch_size=2)
    measured = rows(table, subject(config))
    values, vectors = values_per_token(config)
    per_token = {"float32": 4 * values, "bfloat16": 2 * values, "int8": values + 4 * vectors}
    assert [(row["cache"], row["context"]) for row in measured] == [(d, n) for d in per_token for n in (64, 200)]
    for row in measured:
        assert row["kv_bytes_per_token"] == per_token[str(row["cache"])]
        assert row["kv_bytes"] == per_token[str(row["cache"])] * int(row["context"]) * 2
        assert row["kv_bytes_per_device"] == row["kv_bytes"]
        assert (row["peak_bytes"], row["peak_source"]) == (None, None)
        assert row["slot_bytes"] == 2 * 2 * 4 * int(row["context"]) + 4  # positions, segments and the length


@pytest.mark.slow
def test_the_cache_of_generation_is_the_one_that_is_measured():
    """A prompt of 64 tokens and 64 new ones, whose lengths are not padded."""
    model = built(LLAMA)
    config = generate.GenerationConfig(64, cache_dtype="int8")
    request, _ = generate._request(model, [[1] * 64], config, None, None)
    state = begin(generate.Generator(model, model), request)
    held = sum(array.nbytes for array in jax.tree.leaves(state.cache.stacks))
    (row,) = rows(MemoryTableConfig(contexts=[128], cache_dtypes=["int8"]), subject())
    assert row["kv_bytes"] == held


@pytest.mark.slow
def test_a_batch_is_divided_over_devices():
    where = layout()
    with where.use():
        model = jax.tree.map(
            lambda a: hax.NamedArray(jax.device_put(a.array, where.parameter_sharding(a.axes)), a.axes),
            built(LLAMA),
            is_leaf=lambda a: isinstance(a, hax.NamedArray),
        )
    (row,) = rows(
        MemoryTableConfig(contexts=[64], cache_dtypes=["int8"], batch_size=3), subject(model=model, layout=where)
    )
    assert (row["batch"], row["kv_bytes"]) == (8, 8 * 64 * row["kv_bytes_per_token"])
    assert row["kv_bytes_per_device"] == row["kv_bytes"] / 8
    assert row["peak_source"] == "compiler"


@pytest.mark.slow
def test_peak_memory_grows_with_the_cache_and_contains_the_weights():
    measured = rows(MemoryTableConfig(contexts=[64, 256], cache_dtypes=["float32"]), subject())
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(built(LLAMA)))
    short, long = (row["peak_bytes"] for row in measured)
    assert weights < short
    assert long - short >= measured[1]["kv_bytes"] - measured[0]["kv_bytes"]


@pytest.mark.slow
def test_the_peak_of_a_device_counts_where_it_was_raised(monkeypatch):
    """The device reports its peak since the process started."""
    peaks = iter([5000, 6000, 6000, 6000])  # before and after each row, the smallest cache first
    monkeypatch.setattr(measurements, "peak_bytes_in_use", lambda: next(peaks))
    ran = []
    monkeypatch.setattr(
        measurements, "generate_tokens", lambda generator, prompts, config: ran.append(config.cache_dtype)
    )
    measured = rows(MemoryTableConfig(contexts=[64], cache_dtypes=["float32", "int8"]), subject())
    assert ran == ["int8", "float32"]
    assert [row["peak_source"] for row in measured] == ["compiler", "device"]
    assert measured[1]["peak_bytes"] == 6000


# What is refused


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (PerplexityTableConfig(seq_lens=[300]), "tables.0.seq_lens: 300 given, but lengths from 2 to 256 expected"),
        (PerplexityTableConfig(seq_lens=[8, 8]), "tables.0.seq_lens: 8 given twice"),
        (
            LatencyTableConfig(prompt_tokens=[20, 200], new_tokens=[64]),
            "prompt_tokens: 200 given, but lengths from 1 to 192",
        ),
        (
            LatencyTableConfig(prompt_tokens=[20, 192], new_tokens=[64, 128]),
            "together 320, but the models read at most 256",
        ),
        (LatencyTableConfig(new_tokens=[1]), "tables.0.new_tokens: 1 given, but lengths from 2"),
        (LatencyTableConfig(cache_dtypes=[]), "tables.0.cache_dtypes: an empty list given"),
        (LatencyTableConfig(cache_dtypes=["int8", "int8"]), "tables.0.cache_dtypes: int8 given twice"),
        (MemoryTableConfig(), "tables.0.contexts: null given, but the models read at most 256 tokens"),
        (MemoryTableConfig(contexts=[]), "tables.0.contexts: an empty list given"),
        (MemoryTableConfig(contexts=[2]), "tables.0.contexts: 2 given, but lengths from 3 to 256 expected"),
        (MemoryTableConfig(contexts=[64], cache_dtypes=[]), "tables.0.cache_dtypes: an empty list given"),
        (PerplexityTableConfig(name="../x"), "tables.0.name: '../x' given"),
        (PerplexityTableConfig(name=""), "tables.0.name: '' given"),
    ],
)
def test_tables_that_are_refused(table, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_tables([table], {"student": 256, "teacher": 512}, has_validation=True)


def test_lengths_that_fit_are_the_default():
    table = LatencyTableConfig()
    assert table._lengths("", 256) == [(128, 64), (128, 128)]
    assert table._lengths("", 4096) == [(p, n) for p in (128, 512, 1024, 2048) for n in (64, 128, 256)]
    assert LatencyTableConfig(new_tokens=[192])._lengths("", 700) == [(128, 192)]


def test_two_tables_of_a_type_have_names_and_perplexity_needs_data():
    one, other = LatencyTableConfig(), LatencyTableConfig(name="int8", cache_dtypes=["int8"])
    check_tables([one, other], {"x": 4096}, has_validation=False)
    assert [file_name(table) for table in (one, other)] == ["latency", "int8"]
    with pytest.raises(ConfigError, match=re.escape("tables.1.name: another table is written to latency.csv too")):
        check_tables([one, one], {"x": 4096}, has_validation=False)
    with pytest.raises(ConfigError, match=re.escape("tables.0: type perplexity needs validation data")):
        check_tables([PerplexityTableConfig()], {"x": 64}, has_validation=False)


# Files


def table_of(config: TableConfig, measured: list[Row]) -> Table:
    return Table(file_name(config), config.caption, config.columns, tuple(measured), config.picture)


TABLES: dict[str, tuple[TableConfig, list[Row]]] = {
    "perplexity": (
        PerplexityTableConfig(),
        [dict(zip([c.name for c in PerplexityTableConfig.columns], v, strict=True)) for v in (
            ("run_1 & co", "float32", 64, 1000, 2.0, 7.389, 1, 0.0),
            ("teacher", "bfloat16", 64, 1000, 800.0, float("inf"), 1, 0.0),
        )],
    ),
    "memory": (
        MemoryTableConfig(),
        [dict(zip([c.name for c in MemoryTableConfig.columns], v, strict=True)) for v in (
            ("run_1 & co", "float32", "int8", 1, 64, 100, 0, 6400, 6400, 516, 12345, "compiler"),
            ("run_1 & co", "float32", "bfloat16", 1, 64, 200, 0, 12800, 12800, 516, None, None),
            ("teacher", "bfloat16", "int8", 1, 64, 100, 0, 6400, 6400, 516, 12345, "device"),
        )],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", TABLES)
def test_files_of_a_table(kind, tmp_path):
    config, measured = TABLES[kind]
    names = write_table(table_of(config, measured), tmp_path)
    picture = {"perplexity": "perplexity_vs_context.png", "memory": "memory_scaling.png"}[kind]
    assert names == [f"{kind}.csv", f"{kind}.tex", picture]
    with (tmp_path / names[0]).open(newline="") as file:
        read = list(csv.DictReader(file))
    assert list(read[0]) == [column.name for column in config.columns]
    assert [row["model"] for row in read] == [row["model"] for row in measured]
    for row, original in zip(read, measured, strict=True):
        for name, value in original.items():
            assert row[name] == ("" if value is None else str(value))
    png = (tmp_path / picture).read_bytes()
    assert png.startswith(b"\x89PNG")
    assert len(png) > 1000
    width, height = struct.unpack(">II", png[16:24])
    assert width > 500
    assert height > 300


@pytest.mark.parametrize("kind", TABLES)
def test_latex_is_balanced_and_escaped(kind):
    config, measured = TABLES[kind]
    text = latex(table_of(config, measured))
    opened: list[str] = []
    for what, name in re.findall(r"\\(begin|end)\{(\w+)\}", text):
        if what == "begin":
            opened.append(name)
        else:
            assert opened.pop() == name
    assert opened == []
    bare = re.sub(r"\\[\\{}&%$#_]", "", text)
    assert bare.count("{") == bare.count("}")
    assert r"run\_1 \& co" in text
    lines = text.splitlines()
    body = lines[lines.index(r"    \midrule") + 1 : lines.index(r"    \bottomrule")]
    assert len(body) == len(measured)
    assert {len(re.findall(r"(?<!\\)&", line)) for line in body} == {len(config.columns) - 1}
    (kinds,) = re.findall(r"\\begin\{tabular\}\{(\w+)\}", text)
    assert len(kinds) == len(config.columns)
    outside_math = re.sub(r"\$[^$]*\$", "", bare)
    assert not re.search(r"(?<!\\)[_^#~]", outside_math.replace(r"\label{tab:" + kind + "}", ""))


def test_every_column_says_what_it_is():
    for kind in TableConfig.get_known_choices().values():
        assert all(column.meaning and column.title for column in kind.columns)
        assert len({column.name for column in kind.columns}) == len(kind.columns)
