"""Trains a byte-level BPE tokenizer on the run's training text."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import PositiveInt
from jaxlm.data.cache.artifacts import Artifact, Artifacts, Files, Kind
from jaxlm.data.sources.record_files import TextFile, files_key
from jaxlm.data.tokenizer.tokenizer import END_OF_TEXT, Tokenizer, load_tokenizer, pattern_errors

TRAIN_BPE = "bpe"
DEFAULT_VOCAB_SIZE = 8192
_NUM_BYTES = 256
_MAX_PIECE = 1 << 20
_REPORT_EVERY_S = 5.0

# Words with the space or sign before them, digits, punctuation; then what is done with white space.
_WORDS = (r"'(?i:[sdmt]|ll|ve|re)", r"[^\r\n\p{L}\p{N}]?\p{L}+")
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = (r"\s+(?!\S)", r"\s+")
PATTERNS = {
    # Adapted to code, where most white space is indentation.
    "code": "|".join((*_WORDS, r"\p{N}{1,3}", _SIGNS, r"\s*[\r\n]+[ \t]*", *_SPACES)),
    "gpt4": "|".join((*_WORDS, r"\p{N}{1,3}", _SIGNS, r"\s*[\r\n]", *_SPACES)),
    "nanochat": "|".join((*_WORDS, r"\p{N}{1,2}", _SIGNS, r"\s*[\r\n]", *_SPACES)),
}


@dataclass(frozen=True)
class BpeConfig:
    """A byte-level BPE tokenizer that is trained on the training files.

    Attributes:
        pattern: how text is cut into pieces, which tokens never cross: `code` keeps the white space that indents a line
            together; `gpt4` cuts as cl100k does, with up to three digits in a piece; `nanochat` the same with two; anything
            else is a regular expression that matches one piece.
        special_tokens: tokens that no text becomes. They have the last ids of the vocabulary, in this order; the first one
            begins and ends documents (BOS and EOS). Null means `<|endoftext|>` alone, with id 0.
        max_characters: train on the first characters of the text, this many. More barely changes the vocabulary, and takes
            time and memory.
        max_document_characters: train on at most this many characters of each document, its first; null means all.
        type: must be `bpe`.
    """

    pattern: str = "code"
    special_tokens: list[str] | None = None
    max_characters: PositiveInt = 1 << 28
    max_document_characters: PositiveInt | None = None
    type: Literal["bpe"] = "bpe"

    def check(self, vocab_size: int | None) -> None:
        """Raises `ConfigError` if a tokenizer of this size cannot be trained."""
        tokens = [END_OF_TEXT] if self.special_tokens is None else self.special_tokens
        smallest = _NUM_BYTES + len(tokens)
        if not tokens or not all(tokens) or len(set(tokens)) < len(tokens):
            raise ConfigError(
                f"data.tokenizer.special_tokens: {tokens} given, one or more different tokens expected, none of them empty"
            )
        if surrogates := [token for token in tokens if any("\ud800" <= letter <= "\udfff" for letter in token)]:
            raise ConfigError(
                f"data.tokenizer.special_tokens: {surrogates[0]!r} given, which has half of a surrogate pair and is not text."
                " Write the character itself, or \\U and its eight hexadecimal digits"
            )
        if vocab_size is not None and vocab_size < smallest:
            one = "one for the end of text" if self.special_tokens is None else f"{len(tokens)} special tokens"
            raise ConfigError(
                f"data.vocab_size: {vocab_size} given, at least {smallest} expected: one token for each byte and {one}"
            )
        if self.pattern in PATTERNS:
            return
        if self.pattern.replace("_", "").isalnum() or not self.pattern:
            raise ConfigError(
                f"data.tokenizer.pattern: '{self.pattern}' given, {', '.join(PATTERNS)} or a regular expression expected"
            )
        import tokenizers

        try:
            tokenizers.Regex(self.pattern)
        except Exception as error:  # the library raises plain exceptions
            raise ConfigError(
                f"data.tokenizer.pattern: '{self.pattern}' is not a regular expression: {error}"
            ) from error

    def cache_key(self) -> dict[str, Any]:
        """Returns what determines the tokens besides the text and the size, as plain JSON; {} for the defaults."""
        default = asdict(BpeConfig())
        return {name: value for name, value in asdict(self).items() if value != default[name]}


def bpe_config(tokenizer: str | BpeConfig) -> BpeConfig | None:
    """Says how the tokenizer of a configuration is trained; None if it is the path of one."""
    if isinstance(tokenizer, BpeConfig):
        return tokenizer
    return BpeConfig() if tokenizer == TRAIN_BPE else None


def train_bpe(texts: Iterable[str], vocab_size: int, config: BpeConfig | None = None) -> Tokenizer:
    """Trains a byte-level BPE of `vocab_size` tokens, or fewer if the texts do not have enough distinct pairs.

    Source: Sennrich et al. 2016 (arXiv:1508.07909), algorithm 1, over bytes as in GPT-2.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    config = config or BpeConfig()
    last = config.special_tokens or []
    backend = tokenizers.Tokenizer(models.BPE())
    pattern = PATTERNS.get(config.pattern, config.pattern)
    split = pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(last),
        special_tokens=[] if last else [END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    with pattern_errors("data.tokenizer.pattern"):
        backend.train_from_iterator(texts, trainer=trainer)
    for token in last:
        if backend.token_to_id(token) is not None:
            raise ConfigError(
                f"data.tokenizer.special_tokens: '{token}' given, which is a token of the text too. Give one that the text"
                " does not have, such as '<|bos|>'"
            )
    backend.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in last])
    boundary = backend.token_to_id(last[0] if last else END_OF_TEXT)
    return Tokenizer(backend, bos_id=boundary, eos_id=boundary)


def _read(stored: Artifact) -> Tokenizer:
    for name in stored.crc32:
        stored.raw(name)
    return load_tokenizer(str(stored.folder))


TOKENIZER = Kind("tokenizer", _read, metadata="made_from.json")


def load_or_train_tokenizer(
    store: Artifacts,
    files: Sequence[TextFile],
    texts: Callable[[], Iterable[str]],
    vocab_size: int,
    log: Callable[[str], None],
    formats: Mapping[str, Any],
    config: BpeConfig,
) -> Tokenizer:
    """Loads the tokenizer `tokenizer` of a store, and trains it first if it does not exist.

    Args:
        files: the files that the texts come from.
        formats: source name -> `FormatConfig.cache_key` of sources whose format is not plain text.

    Raises:
        ConfigError: the existing tokenizer was trained on something else (the message lists the differences) or is damaged.
    """
    made_from = {"vocab_size": vocab_size, **config.cache_key(), **files_key(files)}
    made_from |= {"formats": dict(formats)} if formats else {}

    def make(made: Files) -> dict[str, Any]:
        log(f"training a BPE tokenizer of {vocab_size:,} tokens on {len(files):,} files ...")
        _train(texts(), vocab_size, config, log).save(made.folder)
        return {}

    return store.open_or_make(TOKENIZER, made_from, make, log, name="tokenizer")


def _train(texts: Iterable[str], vocab_size: int, config: BpeConfig, log: Callable[[str], None]) -> Tokenizer:
    beginnings = (text[: config.max_document_characters] for text in texts)
    tokenizer = train_bpe(_first_characters(beginnings, config.max_characters, log), vocab_size, config)
    if tokenizer.vocab_size < vocab_size:
        log(f"the training text yields only {tokenizer.vocab_size:,} tokens; the vocabulary has that size")
    return tokenizer


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
