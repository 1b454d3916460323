"""Time to read a prompt, and tokens per second after it."""

import time
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import PositiveInt
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
from jaxlm.models.inference.generate import CacheDtype, GenerationConfig, num_programs, stream_tokens
from jaxlm.models.inference.unstacked import Generator
from jaxlm.reading.choices import choice

_PROMPTS, _NEW_TOKENS = (128, 512, 1024, 2048), (64, 128, 256)
_SHORTEST = 2  # new tokens: the first one comes with the prompt


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
            if not self.cache_dtypes:
                raise ConfigError(f"{key}.cache_dtypes: an empty list given. Name a dtype, or remove it")
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
            _SHORTEST if self.new_tokens is None else min(self.new_tokens, default=_SHORTEST)
        )
        prompts = lengths_that_fit(f"{key}.prompt_tokens", self.prompt_tokens, _PROMPTS, longest_prompt)
        most = max_tokens - min(prompts)
        new_tokens = lengths_that_fit(f"{key}.new_tokens", self.new_tokens, _NEW_TOKENS, most, at_least=_SHORTEST)
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
