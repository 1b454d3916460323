"""Measures reading caches in shuffled order, and building caches compared with `tokenizers` alone.

    python benchmarks/data.py [--repeats 7] [--characters 12000000]

(a) Reads windows of 1,024 tokens, 64 per batch, from a memory-mapped cache of 100 million tokens on one core. This
    includes the order, reading, and the columns of a training batch, but not placing them on a device. Then reads the
    same from a mixture of four sources whose weights change twice per repeat.
(b) Builds a cache (reading .jsonl, checksums, writing, fsync) and compares it with `encode_batch` and
    `encode_batch_fast` of the library `tokenizers` on the same texts in memory. All use all cores and run in turn. A
    ratio of 0.9 means that everything around the tokenizer costs a tenth of the time. Ratios of CPU seconds depend less
    on other load on the machine, but say nothing about idle cores.

The text is the source files of Python's standard library. The last line printed is JSON.
"""

import argparse
import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tokenizers
from processes import spread

from jaxlm.data.cache.artifacts import Artifacts
from jaxlm.data.cache.build import build_cache
from jaxlm.data.cache.token_cache import TOKEN_CACHE, TokenCache, cache_key
from jaxlm.data.formats.documents import TextFormat
from jaxlm.data.mixture import Mixture, MixtureStage, block_counts
from jaxlm.data.packing import PackedSequences
from jaxlm.data.sources.files import open_files, sources_of
from jaxlm.data.sources.record_files import TextFile
from jaxlm.data.tokenizer.tokenizer import Tokenizer
from jaxlm.data.tokenizer.train_bpe import train_bpe

SEQ_LEN, BATCH = 1024, 64
CACHE_TOKENS, DOCUMENT_TOKENS = 100_000_000, 600
BATCHES_PER_REPEAT = 200
NUM_SOURCES = 4  # of the mixture
VOCABULARY = 8192


def main() -> None:
    """Runs both parts and prints the results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7, help="measured repeats of each part (default 7)")
    parser.add_argument("--characters", type=int, default=12_000_000, help="characters of text to tokenize")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = {
            "reading": reading(Path(folder), options.repeats),
            "tokenizing": tokenizing(Path(folder), options.repeats, options.characters),
            "cores": len(os.sched_getaffinity(0)),
            "load_average": os.getloadavg()[0],
            "versions": {
                "python": platform.python_version(),
                "numpy": np.__version__,
                "tokenizers": tokenizers.__version__,
            },
        }
    print(json.dumps(result))


def reading(folder: Path, repeats: int) -> dict[str, float]:
    """Tokens/s on one core, for one source and for a mixture whose weights change within each repeat."""
    caches = [_random_cache(folder / str(number), CACHE_TOKENS // NUM_SOURCES) for number in range(NUM_SOURCES)]
    mixed = {f"source{number}": PackedSequences(cache, SEQ_LEN) for number, cache in enumerate(caches)}
    weights = [dict(zip(mixed, values, strict=True)) for values in ((5, 3, 1, 1), (1, 2, 3, 4))]
    examples = BATCHES_PER_REPEAT * BATCH
    stages = [
        MixtureStage(number * examples // 2, block_counts(weights[number % 2], list(mixed), 2048))
        for number in range(2 * (repeats + 1))
    ]
    single = Mixture(
        {"": PackedSequences(_random_cache(folder, CACHE_TOKENS), SEQ_LEN)},
        [MixtureStage(0, (1,))],
        seed=0,
        shuffle=True,
    )
    mixture = Mixture(mixed, stages, seed=0, shuffle=True)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        rates = [
            (_reading_rate(single, number * BATCHES_PER_REPEAT), _reading_rate(mixture, number * BATCHES_PER_REPEAT))
            for number in range(repeats + 1)
        ]
    finally:
        os.sched_setaffinity(0, cores)
    of_one, of_mixture = zip(*rates[1:], strict=True)
    return {
        **{f"tokens_per_second_{name}": value for name, value in _summary(list(of_one)).items()},
        **{f"mixture_tokens_per_second_{name}": value for name, value in _summary(list(of_mixture)).items()},
    }


def _reading_rate(mixture: Mixture, first: int) -> float:
    began = time.perf_counter()
    for number in range(first, first + BATCHES_PER_REPEAT):
        examples = number * BATCH + np.arange(BATCH)
        mixture.read(examples)
    return BATCHES_PER_REPEAT * BATCH * SEQ_LEN / (time.perf_counter() - began)


def _random_cache(folder: Path, num_tokens: int) -> TokenCache:
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    path = folder / "tokens.bin"
    rng.integers(0, VOCABULARY, num_tokens, np.uint16).tofile(path)
    ends = rng.geometric(1 / DOCUMENT_TOKENS, num_tokens // DOCUMENT_TOKENS).cumsum()
    offsets = np.concatenate([[0], ends[ends < num_tokens], [num_tokens]]).astype(np.int64)
    tokens = np.asarray(np.memmap(path, np.uint16, mode="r"))
    return TokenCache(folder, tokens, offsets, VOCABULARY, 0, "", {"random": len(offsets) - 1})


def tokenizing(folder: Path, repeats: int, characters: int) -> dict[str, float]:
    """Tokens/s on all cores, and quartiles of each repeat's ratio to `tokenizers` alone."""
    texts = _texts(characters)
    tokenizer = train_bpe(texts[:200], VOCABULARY)
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    files = _files(str(folder / "text.jsonl"))
    backend = tokenizer._backend  # the same tokenizer, without our wrapper
    contestants: dict[str, Callable[[], int]] = {
        "cache": lambda: _build(folder / "cache", files, tokenizer),
        "encode_batch": lambda: _num_tokens(backend.encode_batch(texts, add_special_tokens=False)),
        "encode_batch_fast": lambda: _num_tokens(backend.encode_batch_fast(texts, add_special_tokens=False)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(repeats + 1):
        for name, run in contestants.items():
            began, cpu_began = time.perf_counter(), time.process_time()
            num_tokens = run()
            seconds[name].append((time.perf_counter() - began) / num_tokens)
            cpu_seconds[name].append((time.process_time() - cpu_began) / num_tokens)
        print(f"repeat {number}: " + ", ".join(f"{name} {1 / s[-1]:,.0f} tokens/s" for name, s in seconds.items()))
    result: dict[str, float] = {"characters": sum(map(len, texts))}
    for name, costs in seconds.items():
        result[f"{name}_tokens_per_second_median"] = _summary([1 / s for s in costs[1:]])["median"]
    for name in ("encode_batch", "encode_batch_fast"):
        for what, costs in (("ratio", seconds), ("cpu_ratio", cpu_seconds)):
            ratios = [alone / ours for alone, ours in zip(costs[name][1:], costs["cache"][1:], strict=True)]
            result |= {f"{what}_to_{name}_{kind}": value for kind, value in _summary(ratios).items()}
    return result


def _texts(characters: int) -> list[str]:
    texts, size = [], 0
    for file in _files("stdlib:train"):
        for text in file.documents():
            if size >= characters:
                return texts
            texts.append(text)
            size += len(text)
    return texts


def _files(url: str) -> list[TextFile]:
    mirror = Path("unused")
    return open_files([("text", sources_of(url, "text", mirror, None))], "text", mirror, print)


def _build(folder: Path, files: list[TextFile], tokenizer: Tokenizer) -> int:
    made_from = cache_key(files, tokenizer, bos=False, eos=False)
    encoder = TextFormat().encoder(tokenizer, bos=False, eos=False, key="")
    make = lambda made: build_cache(made, files, encoder, made_from, lambda _: None)  # noqa: E731
    cache = Artifacts(folder.parent).open_or_make(TOKEN_CACHE, made_from, make, lambda _: None, name=folder.name)
    shutil.rmtree(folder)
    return cache.num_tokens


def _num_tokens(encodings: list[tokenizers.Encoding]) -> int:
    return sum(len(encoding) for encoding in encodings)


def _summary(values: list[float]) -> dict[str, float]:
    median, first, third = spread(values)
    return {"median": median, "first_quartile": first, "third_quartile": third}


if __name__ == "__main__":
    main()
