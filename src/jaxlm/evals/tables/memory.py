"""Memory of the KV cache, and of generation as a whole, by context length."""

from dataclasses import field
from typing import ClassVar

import jax
from haliax import Axis

from jaxlm.core.axes import BATCH
from jaxlm.core.devices import peak_bytes_in_use
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import PositiveInt
from jaxlm.core.runtime import from_main
from jaxlm.evals.tables.base import (
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
from jaxlm.models.base import KVCache, LanguageModel
from jaxlm.models.inference.generate import (
    CACHE_DTYPES,
    CacheDtype,
    GenerationConfig,
    compile_generation,
    generate_tokens,
)
from jaxlm.models.inference.kv_cache import kv_bytes_per_token, round_up
from jaxlm.models.inference.unstacked import Generator
from jaxlm.reading.choices import choice

_CONTEXTS = (512, 1024, 2048, 4096)
_NEW_TOKENS = 2  # one with the prompt, one by itself
_SHORTEST = _NEW_TOKENS + 1
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
        if not self.cache_dtypes:
            raise ConfigError(
                f"{key}.cache_dtypes: an empty list given. Name at least one of {', '.join(CACHE_DTYPES)}"
            )
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
        return lengths_that_fit(f"{key}.contexts", self.contexts, _CONTEXTS, max_tokens, at_least=_SHORTEST)

    def _cache_row(self, subject: Subject, dtype: str, context: int) -> Row:
        num_rows = round_up(self.batch_size, subject.layout.num_shards(BATCH))
        cache = _allocated(subject.model, num_rows, context, dtype)
        per_token = kv_bytes_per_token(subject.model, CACHE_DTYPES[dtype])
        arrays = jax.tree.leaves((cache.keys, cache.values))
        num_bytes = sum(array.nbytes for array in arrays)
        assert num_bytes == per_token * num_rows * context, "all tokens have as many bytes"
        return {
            "model": subject.name,
            "dtype": str(subject.precision.compute),
            "cache": dtype,
            "batch": num_rows,
            "context": context,
            "kv_bytes_per_token": per_token,
            "kv_bytes": num_bytes,
            "kv_bytes_per_device": sum(map(bytes_per_device, arrays)),
            "slot_bytes": sum(array.nbytes for array in jax.tree.leaves(cache)) - num_bytes,
        }

    def _peak(self, generator: Generator, dtype: str, context: int) -> tuple[int | None, str | None]:
        """Peak memory of a device, and who says so; None if nobody does."""
        config = GenerationConfig(_NEW_TOKENS, temperature=0.0, cache_dtype=dtype)
        prompt_tokens = context - _NEW_TOKENS
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


def _allocated(model: LanguageModel, num_rows: int, context: int, dtype: str) -> KVCache:
    cache = jax.jit(lambda model: model.init_cache(Axis(BATCH, num_rows), context, CACHE_DTYPES[dtype]))(model)
    if not isinstance(cache, KVCache):
        raise ConfigError(
            f"tables: type memory: a model of type {type(model).__name__} has no KV cache. Remove the table, or the model"
        )
    return cache
