"""Small corpora and caches of known tokens."""

import functools
import json
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.core.sharding import Layout
from jaxlm.data.base import Log
from jaxlm.data.batch_schedule import BatchSchedule
from jaxlm.data.cache.artifacts import Artifacts, Key
from jaxlm.data.cache.build import Workers, build_cache
from jaxlm.data.cache.token_cache import TOKEN_CACHE, TokenCache
from jaxlm.data.formats.base import Encoder
from jaxlm.data.loader import BatchReader, ExampleBatches
from jaxlm.data.mixture import Mixture
from jaxlm.data.sources.files import open_files, sources_of
from jaxlm.data.sources.record_files import TextFile
from jaxlm.data.tokenizer.tokenizer import Tokenizer
from jaxlm.data.tokenizer.train_bpe import train_bpe
from jaxlm.data.tokens import TokensConfig

WORDS = [
    "def",
    "return",
    "self",
    "value",
    "größe",
    "名前",
    "x",
    "import",
    "42",
    "1999",
    "\n    ",
    "\n",
    "(",
    "):",
    "🙂",
]

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@functools.cache
def some_text(seed: int, num_words: int = 60) -> str:
    """Words, code and non-Latin scripts, determined by the seed."""
    chooser = random.Random(seed)
    return " ".join(chooser.choice(WORDS) + str(chooser.randrange(30)) for _ in range(num_words))


def write_records(path: Path, records: Iterable[object]) -> None:
    """Writes JSON lines."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def open_data(config: Any, seq_len: int, log: Callable[[str], None] = lambda _: None) -> Any:
    """Opens a data section, as a run does after it has checked its keys."""
    config.check()
    return config.open(config.corpus.load_tokenizer(log), seq_len, log)


def write_corpus(folder: Path, num_files: int = 6) -> list[str]:
    """Writes text files and a file of records; returns the documents in reading order."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = [some_text(seed) for seed in range(num_files)]
    records = [some_text(100 + seed, 20) for seed in range(num_files)]
    for number, text in enumerate(texts):
        (folder / f"b{number}.txt").write_text(text)
    write_records(folder / "a.jsonl", ({"text": text} for text in records))
    return [*records, *texts]


def built(
    folder: Path, files: Sequence[TextFile], encoder: Encoder, made_from: Key, log: Log, *workers: Workers
) -> TokenCache:
    """Opens the token cache in a folder, which is built if it does not exist."""
    make = lambda made: build_cache(made, files, encoder, made_from, log, *workers)  # noqa: E731
    return Artifacts(folder.parent).open_or_make(TOKEN_CACHE, made_from, make, log, name=folder.name)


def refused(path: Path, content: bytes, read: Callable[[Path], object], message: str) -> None:
    """Asserts that a file with this content is refused with a message that names file and position."""
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read(path)


def small_tokenizer(vocab_size: int = 320) -> Tokenizer:
    """A BPE tokenizer trained on `some_text`."""
    return train_bpe([some_text(seed) for seed in range(20)], vocab_size)


def cache_of(documents: Sequence[Sequence[int]], vocab_size: int = 1 << 16) -> TokenCache:
    """A cache in memory."""
    lengths = [len(document) for document in documents]
    tokens = np.array([token for document in documents for token in document], np.uint16)
    offsets = np.array([0, *np.cumsum(lengths)], np.int64)
    return TokenCache(Path("cache/train"), tokens, offsets, vocab_size, 0, "", {"some.txt": len(documents)})


def numbered_cache(num_tokens: int, document_length: int = 7) -> TokenCache:
    """A cache in which token i is i, in documents of equal length."""
    numbers = list(range(num_tokens))
    return cache_of([numbers[at : at + document_length] for at in range(0, num_tokens, document_length)])


def find_files(
    urls: Sequence[str],
    key: str,
    text_key: str,
    mirror: Path = Path("cache/mirror"),
    log: Callable[[str], None] = print,
) -> list[TextFile]:
    """The files of all URLs, as a run lists them."""
    keys = [f"{key}[{number}]" for number in range(len(urls))]
    listed = [(key, sources_of(url, key, mirror, None)) for key, url in zip(keys, urls, strict=True)]
    return open_files(listed, text_key, mirror, log)


def token_batches(mixture: Mixture, schedule: BatchSchedule, layout: Layout, first_step: int = 0) -> ExampleBatches:
    """Training batches of the token sequences of a mixture."""
    spec = TokensConfig().batch_spec(mixture.examples_of(0).seq_len)
    return ExampleBatches(BatchReader(mixture, spec, schedule, layout), first_step)
