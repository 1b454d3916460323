"""Trains a byte-level BPE tokenizer on the run's training text."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxlm.core.atomic_io import atomic_folder, folder_lock
from jaxlm.core.errors import ConfigError
from jaxlm.data.cache.cache_dir import disk_full_errors, writable_folder
from jaxlm.data.cache.cache_key import CacheKey, check_cache_key, files_key
from jaxlm.data.sources.text_file import TextFile
from jaxlm.data.tokenizer.tokenizer import END_OF_TEXT, Tokenizer, load_tokenizer

MIN_VOCAB_SIZE = 257  # every byte, and the end of text
MADE_FROM = "made_from.json"
_MAX_CHARACTERS = 1 << 28  # of training text; more barely changes the vocabulary, and takes time and memory
_MAX_PIECE = 1 << 20
_REPORT_EVERY_S = 5.0

# Words with a leading space, runs of up to three digits, punctuation, indentation as one piece: the pattern of cl100k,
# adapted to code, where most white space is indentation.
_PIECE_PATTERN = "|".join(
    (
        r"'(?i:[sdmt]|ll|ve|re)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+[ \t]*",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE of `vocab_size` tokens, or fewer if the texts do not have enough distinct pairs.

    Source: Sennrich et al. 2016 (arXiv:1508.07909), algorithm 1, over bytes as in GPT-2.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(tokenizers.Regex(_PIECE_PATTERN), behavior="isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer=trainer)
    end = backend.token_to_id(END_OF_TEXT)
    return Tokenizer(backend, bos_id=end, eos_id=end)


def load_or_train_tokenizer(
    folder: Path,
    files: Sequence[TextFile],
    texts: Callable[[], Iterable[str]],
    vocab_size: int,
    log: Callable[[str], None],
    formats: Mapping[str, Any],
) -> Tokenizer:
    """Loads the tokenizer in `folder`, and trains it first if it does not exist.

    Args:
        files: the files that the texts come from.
        formats: source name -> `FormatConfig.cache_key` of sources whose format is not plain text.

    Raises:
        ConfigError: the existing tokenizer was trained on something else. The message lists the differences.
    """
    made_from = {"vocab_size": vocab_size, **files_key(files)} | ({"formats": dict(formats)} if formats else {})
    if not folder.exists():
        with folder_lock(writable_folder(folder.parent), log):
            if not folder.exists():  # another process may have trained it meanwhile
                log(f"training a BPE tokenizer of {vocab_size:,} tokens on {len(files):,} files ...")
                _train(folder, texts(), vocab_size, json.dumps(made_from), log)
    check_cache_key("tokenizer", folder, _made_from(folder), made_from)
    return load_tokenizer(str(folder))


def _made_from(folder: Path) -> CacheKey:
    path = folder / MADE_FROM
    try:
        cache_key = json.loads(path.read_text())
        if isinstance(cache_key, dict) and isinstance(cache_key.get("files"), dict):
            return cache_key
    except (OSError, ValueError, RecursionError):
        pass
    raise ConfigError(
        f"data.cache_dir: {folder} was not written by jaxlm, or is damaged: {path} is missing or unreadable."
        " Choose another data.cache_dir, or delete this folder to train the tokenizer again"
    )


def _train(folder: Path, texts: Iterable[str], vocab_size: int, made_from: str, log: Callable[[str], None]) -> None:
    tokenizer = train_bpe(_first_characters(texts, _MAX_CHARACTERS, log), vocab_size)
    if tokenizer.vocab_size < vocab_size:
        log(f"the training text yields only {tokenizer.vocab_size:,} tokens; the vocabulary has that size")
    with disk_full_errors(folder), atomic_folder(folder) as unfinished:
        tokenizer.save(unfinished)
        (unfinished / MADE_FROM).write_text(made_from)


def _first_characters(texts: Iterable[str], max_characters: int, log: Callable[[str], None]) -> Iterator[str]:
    """The first texts, in pieces of limited length. Logs how much has been read."""
    seen, reported = 0, time.monotonic()
    for text in texts:
        for piece in _pieces(text):
            yield piece
            seen += len(piece)
            if seen >= max_characters:
                log(f"the tokenizer is trained only on the first {seen:,} characters of the text")
                return
            if time.monotonic() - reported > _REPORT_EVERY_S:
                reported = time.monotonic()
                log(f"training the tokenizer: {seen:,} characters read, at most {max_characters:,}")


def _pieces(text: str) -> Iterator[str]:
    """A text in pieces of at most `_MAX_PIECE` characters, cut before the last white space if there is any.

    The library works on pieces in parallel, and takes time quadratic in the length of a word.
    """
    begin = 0
    while len(text) - begin > _MAX_PIECE:
        end = begin + _MAX_PIECE
        cut = max(text.rfind(" ", begin + 1, end), text.rfind("\n", begin + 1, end))
        end = cut if cut > begin else end
        yield text[begin:end]
        begin = end
    yield text[begin:]
