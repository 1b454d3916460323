"""Tokenizers: text to token ids and back, and special tokens that are added to them."""

import contextlib
import functools
import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxlm.core.errors import ConfigError
from jaxlm.core.hashing import note_file
from jaxlm.core.safe_io import SMALL, read_bytes, read_json_object
from jaxlm.core.values.sums import DummyPrefix
from jaxlm.data.tokenizer.content import check_content
from jaxlm.data.tokenizer.folder_settings import add_folder_settings, template_in, with_text_level

if TYPE_CHECKING:
    import tokenizers


@contextlib.contextmanager
def pattern_errors(key: str = "data.tokenizer") -> Iterator[None]:
    """Raises `ConfigError` where the library panics because a regular expression takes too many steps, or gives up."""
    try:
        yield
    except BaseException as error:
        if type(error) is Exception:
            raise ConfigError(f"{key}: it cannot encode a text: {error}. Its tokenizer.json is damaged") from error
        if not is_panic(error):
            raise
        raise ConfigError(
            f"{key}: the regular expression that cuts text into pieces gives up on a text ({error}). Nested repetitions,"
            " such as (a+)+, can match in exponentially many ways. Write it so that there is only one"
        ) from error


def is_panic(error: BaseException) -> bool:
    """Returns whether code in Rust has panicked. The type cannot be imported, and is no `Exception`."""
    return type(error).__name__ == "PanicException"


END_OF_TEXT = "<|endoftext|>"
# Common names of the BOS and EOS tokens, for tokenizers without settings.
_COMMON_NAMES = {
    "bos": (END_OF_TEXT, "<s>", "<|begin_of_text|>", "<bos>", "<|bos|>"),
    "eos": (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>"),
}
_MASK_NAMES = ("<|mask|>", "[MASK]", "<mask>", "<|mdm_mask|>")  # the last is LLaDA's
_SETTINGS = "tokenizer_config.json"
_CHAT_TEMPLATE = "chat_template.jinja"
# In a checkpoint: `chat_template` in the configuration -> the template in that file.
_GIVEN_TEMPLATES = "given_chat_templates.json"
_GENERATION, _MODEL = "generation_config.json", "config.json"
# Further files of a Hugging Face folder that speak of its tokens, copied for other programs, and its model card.
_EXTRA_FILES = (
    *(_SETTINGS, "special_tokens_map.json", "added_tokens.json", "README.md"),
    *(_CHAT_TEMPLATE, "chat_template.json", _GIVEN_TEMPLATES, _GENERATION, _MODEL),
)
_MODEL_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")  # the keys of config.json that speak of tokens
_LONG_TEXT = 1 << 20  # characters; longer texts are split, to use all cores and bounded memory
_CHARACTERS_PER_CALL = 1 << 23
_LINE_ENDS = re.compile(r"(?<=[^\W_]\n)(?=[^\W_])")
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


class Tokenizer:
    """A tokenizer of the library `tokenizers`, and its special tokens. Text that looks like a special token stays text.

    Attributes:
        vocab_size: all ids are below this.
        bos_id, eos_id: ids of the tokens that begin and end a document; None if the tokenizer has none.
        stop_ids: ids that end generated text: EOS, and those that generation_config.json and config.json list.
        special_ids: `bos_token_id`, `eos_token_id` and `pad_token_id` for a config.json: as they were in the one beside the
            tokenizer, else its own. May have lists.
    """

    def __init__(
        self,
        backend: "tokenizers.Tokenizer",
        bos_id: int | None,
        eos_id: int | None,
        extra_files: Mapping[str, bytes] | None = None,
    ):
        """Wraps a tokenizer of the library.

        Args:
            extra_files: name -> content of files saved with the tokenizer (settings, chat template, ...).
        """
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True  # as plain text
        self._backend = backend
        self._can_split_at_lines = _can_split_at_lines(backend)
        self.vocab_size: int = 1 + max(backend.get_vocab(with_added_tokens=True).values())
        self.bos_id = bos_id
        self.eos_id = eos_id
        self._extra_files = dict(extra_files or {})
        model = with_text_level(json.loads(self._extra_files.get(_MODEL, b"{}")))
        self._model_ids = {key: model[key] for key in _MODEL_KEYS if key in model}
        generation = json.loads(self._extra_files.get(_GENERATION, b"{}"))
        listed = [*_as_list(generation.get("eos_token_id")), *_as_list(self._model_ids.get("eos_token_id")), eos_id]
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys(number for number in listed if type(number) is int))
        self.special_ids: dict[str, Any] = {"bos_token_id": bos_id, "eos_token_id": eos_id, **self._model_ids}

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without added special tokens."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without added special tokens. Uses all cores."""
        return [ids.tolist() for ids in self.encode_arrays(texts)]

    def encode_arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Like `encode_batch`, but returns int32 arrays [tokens]: for large amounts of text."""
        pieces = [self._split_long_text(text) for text in texts]
        encoded = self._encode(itertools.chain.from_iterable(pieces))
        return [np.concatenate(list(itertools.islice(encoded, len(of_text)))) for of_text in pieces]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """For each text: ids, and the begin and end character of each token; int32 [tokens] each.

        Unlike in `encode_batch`, text that looks like a special token becomes that token, as chat templates need. White
        space that it swallows (`rstrip`, as in Phi-3) is not its own: it may be in an answer that the token is not in.
        """
        with pattern_errors():
            encoded = self._backend_with_offsets.encode_batch(texts, add_special_tokens=False)
        greedy, tokens = self._greedy, []
        for text, encoding in zip(texts, encoded, strict=True):
            ids, pairs = np.array(encoding.ids, np.int32), np.array(encoding.offsets, np.int32).reshape(-1, 2)
            for at in np.flatnonzero(np.isin(ids, list(greedy))) if greedy else ():
                content = greedy[int(ids[at])]
                begin = text.find(content, *pairs[at].tolist())
                pairs[at] = (begin, begin + len(content)) if begin >= 0 else pairs[at]
            tokens.append((ids, pairs[:, 0], pairs[:, 1]))
        return tokens

    def encode_like_transformers(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of a text as transformers encodes it: text that looks like a special token becomes that token.

        Args:
            add_special_tokens: add the special tokens of the post-processor in `tokenizer.json`, if it has one. Like
                transformers, this ignores `add_bos_token` in `tokenizer_config.json`.
        """
        with pattern_errors():
            return self._unmodified_backend.encode(text, add_special_tokens=add_special_tokens).ids

    @functools.cached_property
    def _greedy(self) -> dict[int, str]:
        added = self._backend.get_added_tokens_decoder()
        return {number: token.content for number, token in added.items() if token.lstrip or token.rstrip}

    @functools.cached_property
    def text_prefix(self) -> tuple[int, ...] | None:
        """The ids that a Hugging Face tokenizer itself puts in front of every text, as transformers does; None for a
        tokenizer that was trained here, whose files say nothing about it."""
        plain, whole = (self.encode_like_transformers("a", add_special_tokens=add) for add in (False, True))
        starts = [start for start in range(len(whole)) if whole[start : start + len(plain)] == plain]
        prefix = tuple(whole[: starts[0]]) if plain and starts else ()
        is_hugging_face = "tokenizer_class" in self._settings or bool(self._model_ids)
        return prefix if prefix or is_hugging_face else None

    def ids_before(self, *, bos: bool | None) -> tuple[int, ...]:
        """The ids to put in front of every text.

        Args:
            bos: BOS if the tokenizer has one, or nothing; None for what the tokenizer itself puts there, or BOS if it was
                trained here.
        """
        if bos is None and self.text_prefix is not None:
            return self.text_prefix
        return () if bos is False or self.bos_id is None else (self.bos_id,)

    @functools.cached_property
    def _unmodified_backend(self) -> "tokenizers.Tokenizer":
        import tokenizers

        return tokenizers.Tokenizer.from_str(self._json())

    @functools.cached_property
    def _backend_with_offsets(self) -> "tokenizers.Tokenizer":
        import tokenizers

        # A post-processor may exclude white space from the offsets.
        content = json.loads(self._json()) | {"post_processor": None}
        return tokenizers.Tokenizer.from_str(json.dumps(content))

    def vocabulary(self) -> dict[str, int]:
        """Token -> id, added tokens included."""
        return self._backend.get_vocab(with_added_tokens=True)

    @property
    def mask_id(self) -> int | None:
        """The id of the token that hides others: `mask_token` of the settings, else one with a common name; None without."""
        given = self._settings.get("mask_token")
        name = given.get("content") if isinstance(given, dict) else given
        names = _MASK_NAMES if name is None else (name,)
        return next((n for n in map(self._backend.token_to_id, names) if n is not None), None)

    def with_mask_token(self, number: int) -> "Tokenizer":
        """A copy whose settings name this token as the one that hides others."""
        settings = json.dumps({**self._settings, "mask_token": self._backend.id_to_token(number)}).encode()
        files = self._extra_files | {_SETTINGS: settings}
        return Tokenizer(self._backend, self.bos_id, self.eos_id, files)

    def writes_text_with(self, number: int) -> bool:
        """Tells whether texts can have this token: one that was learned, and not an added one."""
        added = self._backend.get_added_tokens_decoder()
        return number not in added and number in self.encode(self.decode([number], special=True))

    def is_special(self) -> np.ndarray:
        """bool [vocab]: the special tokens, BOS and EOS, and ids without a token."""
        special = np.ones(self.vocab_size, bool)
        special[list(self.vocabulary().values())] = False
        for number, token in self._backend.get_added_tokens_decoder().items():
            special[number] |= token.special
        special[[number for number in (self.bos_id, self.eos_id, self.mask_id) if number is not None]] = True
        return special

    @property
    def chat_template(self) -> str | None:
        """The template in `chat_template.jinja` or in the settings; of several, the one named `default`; None without any."""
        if _CHAT_TEMPLATE in self._extra_files:
            return self._extra_files[_CHAT_TEMPLATE].decode("utf-8")
        return template_in(self._settings)

    def note_template(self, log: Callable[[str], None]) -> None:
        """Logs that the settings have another chat template than the file beside them."""
        given = (self.chat_template, template_in(self._settings))
        if len({str(text).rstrip("\n") for text in given if text is not None}) > 1:
            log(f"note: the tokenizer's chat_template in {_SETTINGS}: ignored: transformers follows {_CHAT_TEMPLATE}")

    @property
    def given_templates(self) -> dict[str, str]:
        """Path of a .jinja file -> its text, for the chat templates that a run was configured with."""
        return json.loads(self._extra_files.get(_GIVEN_TEMPLATES, b"{}"))

    def with_chat_template(self, text: str, templates: Mapping[str, str], turn_ends: Sequence[int] = ()) -> "Tokenizer":
        """A copy with this chat template.

        Args:
            templates: see `given_templates`.
            turn_ends: more ids that end generated text.
        """
        settings = {name: value for name, value in self._settings.items() if name != "chat_template"}
        files = {_CHAT_TEMPLATE: text, _SETTINGS: json.dumps(settings), _GIVEN_TEMPLATES: json.dumps(dict(templates))}
        if not set(turn_ends) <= set(self.stop_ids):
            generation = json.loads(self._extra_files.get(_GENERATION) or json.dumps(self.special_ids))
            generation.pop("_from_model_config", None)  # transformers would read config.json instead
            files[_GENERATION] = json.dumps(generation | {"eos_token_id": [*self.stop_ids, *turn_ends]})
        encoded = {name: content.encode("utf-8") for name, content in files.items()}
        return Tokenizer(self._backend, self.bos_id, self.eos_id, self._extra_files | encoded)

    @property
    def template_names(self) -> dict[str, str]:
        """Variables of chat templates for special tokens (`bos_token`, ...) -> the text of the token."""
        settings = {k: v.get("content") if isinstance(v, dict) else v for k, v in self._settings.items()}
        named = {k: v for k, v in settings.items() if k.endswith("_token") and isinstance(v, str)}
        ids = {"bos_token": self.bos_id, "eos_token": self.eos_id}
        known = {k: self._backend.id_to_token(i) for k, i in ids.items() if i is not None}
        return named | {name: token for name, token in known.items() if token is not None}

    @property
    def _settings(self) -> dict[str, Any]:
        return json.loads(self._extra_files.get(_SETTINGS, b"{}"))

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The text of ids. Args: special: keep special tokens."""
        return self._backend.decode(list(ids), skip_special_tokens=not special)

    def token_bytes(self) -> np.ndarray:
        """int32 [vocab]: number of bytes of text of each token; 0 for special tokens.

        Counted on raw bytes, because a token may be part of a character, which cannot be decoded.

        Raises:
            ConfigError: the tokenizer is neither byte-level nor SentencePiece, so the bytes of its tokens are unknown.
        """
        counts = np.zeros(self.vocab_size, np.int32)
        num_bytes = self._token_length_function()
        for token, number in self._backend.get_vocab(with_added_tokens=False).items():
            counts[number] = num_bytes(token)
        for number, token in self._backend.get_added_tokens_decoder().items():  # stored as plain text
            counts[number] = 0 if token.special else len(token.content.encode())
        return counts

    def known_token_bytes(self, log: Callable[[str], None]) -> np.ndarray | None:
        """`token_bytes`; None, with a line that says so, if the bytes of the tokens are unknown."""
        try:
            return self.token_bytes()
        except ConfigError as error:
            log(f"note: no bits per byte: {error}")
            return None

    def dummy_prefix(self) -> DummyPrefix | None:
        """The space that the tokenizer puts in front of every text; None if it puts none, or has no BOS before a text.

        A text that itself begins with a space may get none, and then looks the same.
        """
        first = "".join(self._backend.encode("a", add_special_tokens=False).tokens)[:1]
        space = first if first in ("\u2581", "\u0120") else None
        if space is None or self.bos_id is None:
            return None
        tokens = np.zeros(self.vocab_size, bool)
        for token, number in self._backend.get_vocab(with_added_tokens=False).items():
            tokens[number] = token.startswith(space)
        return DummyPrefix(self.bos_id, tokens)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything that determines the ids."""
        return hashlib.sha256(f"{self._json()} {self.bos_id} {self.eos_id}".encode()).hexdigest()

    def save(self, folder: Path | str) -> None:
        """Writes the tokenizer, its settings and the config.json of its model, in the layout of Hugging Face folders."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files().items():
            (folder / name).write_bytes(content)

    def files(self, *, max_length: int | None = None) -> dict[str, bytes]:
        """The files of a Hugging Face folder. `max_length` makes them those of an export, with the settings that transformers
        needs to open them, and without the config.json of another model.
        """
        defaults = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_length}
        ids = {"bos_token": self.bos_id, "eos_token": self.eos_id}
        names = {key: None if i is None else self._backend.id_to_token(i) for key, i in ids.items()}
        settings = {**names, **self._settings} if max_length is None else {**defaults, **names, **self._settings}
        if "tokenizer_class" in self._settings:  # another program's settings stay what they are
            settings = self._settings
        extra = dict(self._extra_files)
        if max_length is not None:
            extra = {name: content for name, content in extra.items() if name not in (_GIVEN_TEMPLATES, _MODEL)}
        return {**extra, _SETTINGS: json.dumps(settings).encode(), "tokenizer.json": self._json().encode()}

    def _json(self) -> str:
        return self._backend.to_str(pretty=False)

    def _split_long_text(self, text: str) -> list[str]:
        """Splits a long text, only at positions where the tokenizer always starts a new token.

        That is between a line ending in a letter or digit and one starting with a letter or digit: GPT-2, cl100k and
        `train_bpe` all treat the newline between them as a separate piece. Other tokenizers get the text unsplit.
        """
        pieces, start = [], 0
        while self._can_split_at_lines and len(text) - start > _LONG_TEXT:
            line_end = _LINE_ENDS.search(text, start + _LONG_TEXT)
            if line_end is None:
                break
            pieces.append(text[start : line_end.start()])
            start = line_end.start()
        return [*pieces, text[start:]]

    def _encode(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        for group in _grouped(texts, _CHARACTERS_PER_CALL):
            with pattern_errors():
                encodings = self._backend.encode_batch_fast(group, add_special_tokens=False)
            yield from (np.asarray(encoding.ids, np.int32) for encoding in encodings)

    def _token_length_function(self):
        content = json.loads(self._json())
        stages = json.dumps([content["pre_tokenizer"], content["decoder"], content["normalizer"]])
        if '"ByteLevel"' in stages:
            return len  # one character per byte
        if "\u2581" in json.dumps(content, ensure_ascii=False) and not content["model"].get(
            "continuing_subword_prefix"
        ):
            return lambda token: 1 if _BYTE_TOKEN.fullmatch(token) else len(token.replace("\u2581", " ").encode())
        raise ConfigError(
            "data.tokenizer: bits per byte needs the number of bytes of each token, but this tokenizer is neither byte-level"
            f" nor SentencePiece (its model is {content['model']['type']}). Use a byte-level or SentencePiece tokenizer"
        )


def load_tokenizer(path: str, vocab_size: int | None = None, *, of_run: bool = False) -> Tokenizer:
    """Loads the tokenizer from a `tokenizer.json`, or from a folder that contains one.

    BOS and EOS are `bos_token` and `eos_token` of `tokenizer_config.json` in the same folder, else `bos_token_id` and
    `eos_token_id` of `config.json`, else tokens with common names (`<s>`, `<|endoftext|>`, ...).

    Args:
        vocab_size: the size that it must have; None accepts any.
        of_run: whether a run has saved it, so that the steps of its tokenizer.json are those it was trained with.

    Raises:
        ConfigError: the file does not exist or is not a tokenizer, or it has another size.
    """
    import tokenizers

    file = Path(os.path.expanduser(path))
    file = file / "tokenizer.json" if file.is_dir() else file
    if not file.is_file():
        raise ConfigError(
            f"data.tokenizer: '{path}': no tokenizer.json found (looked for {file.resolve()})."
            " Give a tokenizer.json, a folder that contains one, or 'bpe' to train one"
        )
    content = _read_json(file)
    if not isinstance(content.get("model"), dict):
        raise ConfigError(f"data.tokenizer: '{file}' is not a tokenizer: it has no \"model\"")
    try:
        check_content(content, file)
        backend = tokenizers.Tokenizer.from_file(str(file))
    except ConfigError:
        raise
    except BaseException as error:  # the library raises plain exceptions, and panics
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        raise ConfigError(f"data.tokenizer: '{file}' is not a tokenizer: {error}") from error
    if not backend.get_vocab(with_added_tokens=True):
        raise ConfigError(
            f"data.tokenizer: '{file}' has no tokens: its vocabulary is empty. Download or train it again"
        )
    names = (_SETTINGS, "added_tokens.json", "special_tokens_map.json", _MODEL)
    settings, added, special, model = (_read_json(file.with_name(name)) for name in names)
    try:
        add_folder_settings(backend, settings, added, special, model, rebuild=not of_run)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise ConfigError(
            f"data.tokenizer: the tokens that the files beside '{file}' add are damaged: {error}"
        ) from error
    for beside in (file.with_name(name) for name in _EXTRA_FILES if name != "README.md"):
        note_file(beside)
    extra_files = {
        name: read_bytes(file.with_name(name), SMALL) for name in _EXTRA_FILES if file.with_name(name).is_file()
    }
    _read_json(file.with_name(_GENERATION))  # raises if it is damaged
    bos, eos = (_special_id(backend, file, side) for side in ("bos", "eos"))
    tokenizer = Tokenizer(backend, bos, eos, extra_files)
    if vocab_size not in (None, tokenizer.vocab_size):
        raise ConfigError(
            f"data.vocab_size: {vocab_size} given, but the tokenizer {path} has {tokenizer.vocab_size} tokens. Remove"
            f" vocab_size, or set it to {tokenizer.vocab_size}"
        )
    return tokenizer


def boundary_ids(tokenizer: Tokenizer, *, bos: bool | None, eos: bool) -> tuple[np.ndarray, np.ndarray]:
    """The ids to put before and after every document: BOS and EOS, or nothing.

    Args:
        bos: None for what `Tokenizer.ids_before` puts there without it.

    Raises:
        ConfigError: the tokenizer does not have the token.
    """
    wants_bos = bos or (bos is None and tokenizer.text_prefix is None)
    for name, number, enforced in (("bos", tokenizer.bos_id, wants_bos), ("eos", tokenizer.eos_id, eos)):
        if enforced and number is None:
            raise ConfigError(
                f"data.enforce_{name}: true, but the tokenizer has no {name.upper()} token. Set it to false"
            )
    before, after = tokenizer.ids_before(bos=bos), [tokenizer.eos_id] if eos else []
    return np.array(before, np.int32), np.array(after, np.int32)


def _special_id(backend: "tokenizers.Tokenizer", file: Path, side: str) -> int | None:
    settings = _read_json(file.with_name("tokenizer_config.json"))
    model = with_text_level(_read_json(file.with_name("config.json")))
    if f"{side}_token" in settings:
        token = settings[f"{side}_token"]
        name = token.get("content") if isinstance(token, dict) else token
        if name is not None and not isinstance(name, str):
            raise ConfigError(f"data.tokenizer: {side}_token in tokenizer_config.json is {name!r}, a string expected")
        if name is not None and backend.token_to_id(name) is None:
            raise ConfigError(
                f"data.tokenizer: {side}_token in tokenizer_config.json is '{name}', which is not a token of '{file}'"
            )
        return None if name is None else backend.token_to_id(name)
    if f"{side}_token_id" in model:
        number = model[f"{side}_token_id"]
        number = number[0] if isinstance(number, list) and number else number
        if number is not None and type(number) is not int:
            raise ConfigError(f"data.tokenizer: {side}_token_id in config.json is {number!r}, an integer expected")
        if number is None or (0 <= number < 2**32 and backend.id_to_token(number) is not None):
            return number
    numbers = (backend.token_to_id(name) for name in _COMMON_NAMES[side])
    return next((number for number in numbers if number is not None), None)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file; {} if the file does not exist."""
    if not file.is_file():
        return {}
    try:
        return read_json_object(file)
    except ConfigError as error:
        raise ConfigError(f"data.tokenizer: {error}") from error


def _can_split_at_lines(backend: "tokenizers.Tokenizer") -> bool:
    """Tells whether the tokenizer is byte-level, makes newlines between words pieces of their own, and adds no prefix."""
    text, newline = "a\nb\n1\n2", "\u010a"  # a newline in byte-level tokens
    if backend.normalizer is not None and backend.normalizer.normalize_str(text) != text:
        return False
    pieces = [] if backend.pre_tokenizer is None else backend.pre_tokenizer.pre_tokenize_str(text)
    return [piece for piece, _ in pieces] == list(text.replace("\n", newline))


def _grouped(texts: Iterable[str], min_characters: int) -> Iterator[list[str]]:
    group, size = [], 0
    for text in texts:
        group.append(text)
        size += len(text)
        if size >= min_characters:
            yield group
            group, size = [], 0
    if group:
        yield group


_KEY = "data.added_tokens"
_TOKENIZER = "tokenizer.json"


def open_tokenizer(path: str, added: Sequence[str], vocab_size: int | None) -> Tokenizer:
    """Loads a tokenizer and adds special tokens to it. Their ids follow those that it has.

    Args:
        vocab_size: the size that it must have with them; None accepts any.

    Raises:
        ConfigError: as `load_tokenizer`; or one of the tokens is not new.
    """
    if not added:
        return load_tokenizer(path, vocab_size)
    grown = with_added_tokens(load_tokenizer(path), added)
    if vocab_size not in (None, grown.vocab_size):
        raise ConfigError(
            f"data.vocab_size: {vocab_size} given, but with {_KEY} the tokenizer {path} has {grown.vocab_size} tokens. Remove"
            f" vocab_size, or set it to {grown.vocab_size}"
        )
    return grown


def with_added_tokens(tokenizer: Tokenizer, added: Sequence[str]) -> Tokenizer:
    """The tokenizer with more special tokens. Raises `ConfigError` if one of them is not new."""
    import tokenizers

    known = tokenizer.vocabulary()
    for number, token in enumerate(added):
        if not token or token != token.strip():
            raise ConfigError(f"{_KEY}: {token!r} given, a text without white space around it expected")
        if token in added[:number]:
            raise ConfigError(f"{_KEY}: '{token}' is given twice. Remove one of them")
        if token in known:
            raise ConfigError(f"{_KEY}: '{token}' is a token already, with the id {known[token]}. Remove it")
    files = tokenizer.files()
    backend = tokenizers.Tokenizer.from_str(files.pop(_TOKENIZER).decode("utf-8"))
    backend.add_special_tokens([tokenizers.AddedToken(token, normalized=False, special=True) for token in added])
    ids = [backend.token_to_id(token) for token in added]
    if ids != list(range(tokenizer.vocab_size, tokenizer.vocab_size + len(added))):
        raise ConfigError(
            f"{_KEY}: the new tokens got the ids {ids}, but the tokenizer's last id is {tokenizer.vocab_size - 1}: its ids"
            " have gaps. Give it a tokenizer.json without gaps"
        )
    return Tokenizer(backend, tokenizer.bos_id, tokenizer.eos_id, files)
