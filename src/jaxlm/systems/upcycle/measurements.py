"""The tables: perplexity and memory by context length, and time to read a prompt and to write after it."""

import time
from collections.abc import Sequence
from dataclasses import field
from itertools import islice
from typing import ClassVar

import jax
import numpy as np
from haliax import Axis

from jaxlm.core.axes import BATCH
from jaxlm.core.devices import peak_bytes_in_use
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import PositiveInt
from jaxlm.core.runtime import from_main
from jaxlm.evals.loss import NOTHING, EvalLoss, LossMeter, perplexity
from jaxlm.evals.tables import (
    BATCH_SIZE,
    CACHE,
    DTYPE,
    MODEL,
    Column,
    Picture,
    Row,
    Subject,
    TableConfig,
    check_distinct,
    lengths_that_fit,
)
from jaxlm.hardware.hlo import bytes_per_device, planned_bytes
from jaxlm.models.base import LanguageModel
from jaxlm.models.inference.cache import DecodingCache
from jaxlm.models.inference.decoding import num_programs
from jaxlm.models.inference.generate import (
    CACHE_DTYPES,
    CacheDtype,
    GenerationConfig,
    compile_generation,
    generate_tokens,
    stream_tokens,
)
from jaxlm.models.inference.padding import round_up
from jaxlm.models.inference.unstacked import Generator
from jaxlm.reading.choices import choice


@choice(TableConfig, "perplexity")
class PerplexityTableConfig(TableConfig):
    """Loss and perplexity of the validation data, by context length. All models read the same tokens.

    Attributes:
        seq_lens: context lengths; null measures the longest that all models can read.
        batches: most batches of each source in a repeat.
        repeats: number of times that a loss is measured, each on the next `batches` batches of the data. The table shows
            the mean over all tokens, and how far the losses of the repeats are apart.
    """

    reads_validation: ClassVar[bool] = True
    columns: ClassVar[tuple[Column, ...]] = (
        MODEL,
        DTYPE,
        Column("seq_len", "context", "tokens of a sequence"),
        Column("tokens", "tokens", "number of tokens that were predicted", ",.0f"),
        Column("loss", "loss (nats)", "mean loss in nats per token, over all repeats", ".4f"),
        Column("perplexity", "perplexity", "exp(loss)", ".3f"),
        Column("repeats", "repeats", "number of parts of the data"),
        Column("loss_range", "range of losses", "largest minus smallest loss of a repeat", ".4f"),
    )
    picture: ClassVar[Picture | None] = Picture("_vs_context", "seq_len", ("perplexity",))

    seq_lens: list[PositiveInt] | None = None
    batches: PositiveInt = 100
    repeats: PositiveInt = 1

    @property
    def caption(self) -> str:
        return f"Loss and perplexity of validation data, at most {self.batches * self.repeats} batches of each source."

    def check(self, key: str, max_tokens: int) -> None:
        self._lengths(key, max_tokens)

    def rows(self, subject: Subject) -> list[Row]:
        meter = LossMeter(subject.precision, subject.score, None)
        return [self._row(subject, meter, n) for n in self._lengths("tables", subject.max_tokens)]

    def _lengths(self, key: str, max_tokens: int) -> tuple[int, ...]:
        return lengths_that_fit(f"{key}.seq_lens", self.seq_lens, [max_tokens], max_tokens, at_least=2)

    def _row(self, subject: Subject, meter: LossMeter, seq_len: int) -> Row:
        parts = self._parts(subject, meter, seq_len)
        total = sum(parts, NOTHING)
        losses = [part.loss for part in parts]
        return {
            "model": subject.name,
            "dtype": str(subject.precision.compute),
            "seq_len": seq_len,
            "tokens": round(total.tokens),
            "loss": total.loss,
            "perplexity": perplexity(total.loss),
            "repeats": self.repeats,
            "loss_range": max(losses) - min(losses),
        }

    def _parts(self, subject: Subject, meter: LossMeter, seq_len: int) -> list[EvalLoss]:
        """The sums of each repeat, over all sources."""
        parts = [NOTHING] * self.repeats
        for source in subject.validation(seq_len):
            batches = ((batch, None) for batch in source.batches())
            for number in range(self.repeats):
                parts[number] += meter.measure(subject.model, islice(batches, self.batches))[0]
        empty = [number for number, part in enumerate(parts) if not part.tokens]
        if empty:
            raise ConfigError(
                f"tables: type perplexity: {self.repeats} repeats of {self.batches} batches given, but the validation data is"
                f" used up after {empty[0]}, with sequences of {seq_len} tokens. Lower repeats or batches, or add data"
            )
        return parts


_CONTEXTS = (512, 1024, 2048, 4096)
_MEMORY_NEW_TOKENS = 2  # one with the prompt, one by itself
_MEMORY_SHORTEST = _MEMORY_NEW_TOKENS + 1
_DEVICE, _COMPILER = "device", "compiler"


@choice(TableConfig, "memory")
class MemoryTableConfig(TableConfig):
    """Bytes of the KV cache, by context length and dtype, and peak memory of generation.

    Attributes:
        contexts: tokens of a text; null measures those of 512, 1024, 2048 and 4096 that fit.
        cache_dtypes: dtypes of the KV cache (float32, bfloat16, int8).
        batch_size: texts at once. It is rounded up to a multiple of the devices that share a batch.
    """

    columns: ClassVar[tuple[Column, ...]] = (
        MODEL,
        DTYPE,
        CACHE,
        BATCH_SIZE,
        Column("context", "context", "tokens of each text that the cache has room for"),
        Column(
            "kv_bytes_per_token",
            "bytes/token",
            "keys, values and, with int8, their float32 scales, of one token in all layers",
            ",",
        ),
        Column("state_bytes_per_row", "bytes/text", "states of recurrent layers, of one text whatever its length", ","),
        Column("kv_bytes", "KV cache (bytes)", "all of them, on all devices together, as allocated", ","),
        Column("kv_bytes_per_device", "per device", "the part of a device", ","),
        Column(
            "slot_bytes", "slots (bytes)", "what the cache holds besides: positions and segments, as allocated", ","
        ),
        Column("peak_bytes", "peak (bytes)", "peak memory of a device while it generates, weights included", ","),
        Column(
            "peak_source",
            "peak of",
            f"{_DEVICE}: what the device reports, which is its peak since the process started, if this row raised it;"
            f" {_COMPILER}: what the largest program needs, by the compiler's analysis",
        ),
    )
    picture: ClassVar[Picture | None] = Picture("_scaling", "context", ("kv_bytes", "peak_bytes"), ("cache",))

    contexts: list[PositiveInt] | None = None
    cache_dtypes: list[CacheDtype] = field(default_factory=lambda: ["bfloat16", "int8"])
    batch_size: PositiveInt = 1

    @property
    def caption(self) -> str:
        return "Memory of the KV cache, and peak memory of generation with it."

    def check(self, key: str, max_tokens: int) -> None:
        self._lengths(key, max_tokens)
        check_distinct(f"{key}.cache_dtypes", self.cache_dtypes)

    def rows(self, subject: Subject) -> list[Row]:
        rows = [
            self._cache_row(subject, dtype, context)
            for dtype in self.cache_dtypes
            for context in self._lengths("tables", subject.max_tokens)
        ]
        generator = Generator.of(subject.model)
        # The smallest first: what a device reports never falls.
        for row in sorted(rows, key=lambda row: row["kv_bytes"]):
            row["peak_bytes"], row["peak_source"] = self._peak(generator, row["cache"], row["context"])
        return rows

    def _lengths(self, key: str, max_tokens: int) -> tuple[int, ...]:
        return lengths_that_fit(f"{key}.contexts", self.contexts, _CONTEXTS, max_tokens, at_least=_MEMORY_SHORTEST)

    def _cache_row(self, subject: Subject, dtype: str, context: int) -> Row:
        num_rows = round_up(self.batch_size, subject.layout.num_shards(BATCH))
        cache = _allocated(subject.model, num_rows, context, dtype)
        per_token, per_row = cache.bytes_per_token, cache.bytes_per_row
        arrays = jax.tree.leaves(cache.stacks)
        num_bytes = sum(array.nbytes for array in arrays)
        assert num_bytes == num_rows * (per_token * context + per_row), "all tokens have as many bytes"
        return {
            "model": subject.name,
            "dtype": str(subject.precision.compute),
            "cache": dtype,
            "batch": num_rows,
            "context": context,
            "kv_bytes_per_token": per_token,
            "state_bytes_per_row": per_row,
            "kv_bytes": num_bytes,
            "kv_bytes_per_device": sum(map(bytes_per_device, arrays)),
            "slot_bytes": sum(array.nbytes for array in jax.tree.leaves(cache)) - num_bytes,
        }

    def _peak(self, generator: Generator, dtype: str, context: int) -> tuple[int | None, str | None]:
        """Peak memory of a device, and who says so; None if nobody does."""
        config = GenerationConfig(_MEMORY_NEW_TOKENS, temperature=0.0, cache_dtype=dtype)
        prompt_tokens = context - _MEMORY_NEW_TOKENS
        before = peak_bytes_in_use()
        if before is not None:
            generate_tokens(generator, [[0] * prompt_tokens] * self.batch_size, config)
            after = peak_bytes_in_use() or 0
            if from_main(lambda: after > before):  # all processes compile, or none
                return after, _DEVICE
        needed = [
            num_bytes
            for program in compile_generation(generator, self.batch_size, prompt_tokens, config)
            if (num_bytes := planned_bytes(program)) is not None
        ]
        return (max(needed), _COMPILER) if needed else (None, None)


def _allocated(model: LanguageModel, num_rows: int, context: int, dtype: str) -> DecodingCache:
    cache = jax.jit(lambda model: model.init_cache(Axis(BATCH, num_rows), context, CACHE_DTYPES[dtype]))(model)
    if not isinstance(cache, DecodingCache):
        raise ConfigError(
            f"tables: type memory: a model of type {type(model).__name__} has no KV cache. Remove the table, or the model"
        )
    return cache


_PROMPTS, _LATENCY_NEW_TOKENS = (128, 512, 1024, 2048), (64, 128, 256)
_LATENCY_SHORTEST = 2  # new tokens: the first one comes with the prompt


@choice(TableConfig, "latency")
class LatencyTableConfig(TableConfig):
    """Time to read a prompt, and new tokens per second after it. Prompts are random tokens, and no token ends a text.

    Attributes:
        prompt_tokens: lengths of prompts; null measures those of 128, 512, 1024 and 2048 that fit.
        new_tokens: numbers of tokens to generate, at least 2; null measures those of 64, 128 and 256 that fit.
        cache_dtypes: dtypes of the KV cache (float32, bfloat16, int8); null measures the dtype of the activations.
        batch_size: texts to generate at once.
        warmup: runs before those that are timed, at least 1: the first one compiles.
        runs: timed runs of each combination in a repeat.
        repeats: number of times that all combinations are measured, one after the other, so that what slows the machine for
            a while meets all of them. Medians are over the runs of all repeats.
    """

    columns: ClassVar[tuple[Column, ...]] = (
        MODEL,
        DTYPE,
        CACHE,
        BATCH_SIZE,
        Column("prompt_tokens", "prompt", "tokens of a prompt"),
        Column("new_tokens", "new", "tokens that are generated after each prompt"),
        Column("samples", "runs", "number of timed runs"),
        Column("prefill_ms", "prefill (ms)", "median time until the first new token of each text is known", ".2f"),
        Column("prefill_ms_iqr", "IQR", "distance of the quartiles of that time", ".2f"),
        Column(
            "decode_tokens_per_s",
            "decode (tokens/s)",
            "median number of further tokens per second, of all texts of the batch together",
            ".1f",
        ),
        Column("decode_tokens_per_s_iqr", "IQR", "distance of the quartiles of that number", ".1f"),
    )
    picture: ClassVar[Picture | None] = Picture(
        "_vs_context", "prompt_tokens", ("prefill_ms", "decode_tokens_per_s"), ("cache", "new_tokens")
    )

    prompt_tokens: list[PositiveInt] | None = None
    new_tokens: list[PositiveInt] | None = None
    cache_dtypes: list[CacheDtype] | None = None
    batch_size: PositiveInt = 1
    warmup: PositiveInt = 3
    runs: PositiveInt = 10
    repeats: PositiveInt = 1

    @property
    def caption(self) -> str:
        return (
            f"Median of {self.runs * self.repeats} runs with batches of {self.batch_size}, after {self.warmup} runs that are"
            " not counted. IQR is the distance of the quartiles."
        )

    def check(self, key: str, max_tokens: int) -> None:
        self._lengths(key, max_tokens)
        if self.cache_dtypes is not None:
            check_distinct(f"{key}.cache_dtypes", self.cache_dtypes)

    def rows(self, subject: Subject) -> list[Row]:
        generator = Generator.of(subject.model)
        dtypes = self.cache_dtypes or [None]
        lengths = self._lengths("tables", subject.max_tokens)
        grid = [(dtype, prompt, new) for dtype in dtypes for prompt, new in lengths]
        times: dict[tuple[str | None, int, int], list[tuple[float, float]]] = {cell: [] for cell in grid}
        for _ in range(self.repeats):
            for dtype, prompt, new in grid:
                times[dtype, prompt, new] += self._times(generator, prompt, new, dtype)
        return [self._row(subject, *cell, np.array(seconds)) for cell, seconds in times.items()]

    def _lengths(self, key: str, max_tokens: int) -> list[tuple[int, int]]:
        """Prompt and new tokens of each combination. Those that are given must fit; of the defaults, others are left out."""
        longest_prompt = max_tokens - (
            _LATENCY_SHORTEST if self.new_tokens is None else min(self.new_tokens, default=_LATENCY_SHORTEST)
        )
        prompts = lengths_that_fit(f"{key}.prompt_tokens", self.prompt_tokens, _PROMPTS, longest_prompt)
        most = max_tokens - min(prompts)
        new_tokens = lengths_that_fit(
            f"{key}.new_tokens", self.new_tokens, _LATENCY_NEW_TOKENS, most, at_least=_LATENCY_SHORTEST
        )
        pairs = [(prompt, new) for prompt in prompts for new in new_tokens]
        for prompt, new in pairs:
            if prompt + new > max_tokens and self.prompt_tokens is not None and self.new_tokens is not None:
                raise ConfigError(
                    f"{key}: prompt_tokens {prompt} and new_tokens {new} given, together {prompt + new}, but the models read"
                    f" at most {max_tokens} tokens. Remove one of them"
                )
        return [(prompt, new) for prompt, new in pairs if prompt + new <= max_tokens]

    def _times(self, generator: Generator, prompt: int, new: int, dtype: str | None) -> list[tuple[float, float]]:
        """Seconds of the prefill and of the other tokens, of each timed run."""
        rng = np.random.default_rng(0)
        prompts = rng.integers(0, generator.model.Vocab.size, (self.batch_size, prompt)).tolist()
        config = GenerationConfig(new, temperature=0.0, cache_dtype=dtype)
        for _ in range(self.warmup):
            timed_generation(generator, prompts, config)
        compiled = num_programs()
        samples = [timed_generation(generator, prompts, config) for _ in range(self.runs)]
        assert num_programs() == compiled, "a program was compiled while it was timed"
        return samples

    def _row(self, subject: Subject, dtype: str | None, prompt: int, new: int, seconds: np.ndarray) -> Row:
        prefill_ms = 1e3 * seconds[:, 0]
        rates = self.batch_size * (new - 1) / seconds[:, 1]
        return {
            "model": subject.name,
            "dtype": str(subject.precision.compute),
            "cache": dtype or str(subject.precision.compute),
            "batch": self.batch_size,
            "prompt_tokens": prompt,
            "new_tokens": new,
            "samples": len(seconds),
            "prefill_ms": float(np.median(prefill_ms)),
            "prefill_ms_iqr": float(np.ptp(np.percentile(prefill_ms, (25, 75)))),
            "decode_tokens_per_s": float(np.median(rates)),
            "decode_tokens_per_s_iqr": float(np.ptp(np.percentile(rates, (25, 75)))),
        }


def timed_generation(
    generator: Generator, prompts: Sequence[Sequence[int]], config: GenerationConfig
) -> tuple[float, float]:
    """Generates, and returns the seconds until the host has the first new tokens, and from there to the last."""
    pieces = stream_tokens(generator, prompts, config, every=config.max_new_tokens, first=1)
    begin = time.perf_counter()
    next(pieces)
    first = time.perf_counter()
    for _ in pieces:
        pass
    return first - begin, time.perf_counter() - first
