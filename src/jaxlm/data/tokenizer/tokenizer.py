"""Text to token ids and back."""

import functools
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxlm.core.errors import ConfigError

if TYPE_CHECKING:
    import tokenizers

END_OF_TEXT = "<|endoftext|>"
# Names of the tokens that begin and end a document, for tokenizers whose settings do not tell.
_USUAL_NAMES = {
    "bos": (END_OF_TEXT, "<s>", "<|begin_of_text|>", "<bos>"),
    "eos": (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>"),
}
_SETTINGS = "tokenizer_config.json"
_CHAT_TEMPLATE = "chat_template.jinja"
# What a Hugging Face folder may hold for those who use the tokenizer in other ways.
_BESIDE = (_SETTINGS, "special_tokens_map.json", "added_tokens.json", _CHAT_TEMPLATE, "chat_template.json")
_LONG_TEXT = 1 << 20  # characters; longer texts are cut, so that all cores work on one, and in bounded memory
_ENCODED_AT_ONCE = 1 << 23  # characters
_LINE_ENDS = re.compile(r"(?<=[^\W_]\n)(?=[^\W_])")
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


class Tokenizer:
    """A `tokenizers` tokenizer and its special tokens. Text that looks like a special token is still text.

    Attributes:
        vocab_size: ids run from 0 to this, exclusive.
        bos_id, eos_id: of the tokens that begin and end a document; None where there is none.
    """

    def __init__(
        self,
        backend: "tokenizers.Tokenizer",
        bos_id: int | None,
        eos_id: int | None,
        beside: Mapping[str, bytes] | None = None,
    ):
        """Args: beside: the files that stood beside it (chat template, ...), which are kept for other programs."""
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True  # as the text that they are
        self._backend = backend
        self._cuts_lines = _begins_tokens_at_lines(backend)
        self.vocab_size: int = 1 + max(backend.get_vocab(with_added_tokens=True).values())
        self.bos_id = bos_id
        self.eos_id = eos_id
        self._beside = dict(beside or {})

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without special tokens around it. Uses all cores."""
        return [ids.tolist() for ids in self.encode_arrays(texts)]

    def encode_arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        """As `encode_batch`, each text as int32 [tokens]: for much text."""
        parts = [self._parts(text) for text in texts]
        encoded = self._encode(itertools.chain.from_iterable(parts))
        return [np.concatenate(list(itertools.islice(encoded, len(own)))) for own in parts]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Ids of each text, and the characters at which each token begins and ends: int32 [tokens] each.

        Here, text that looks like a special token is one: chat templates write them so.
        """
        encoded = self._marking.encode_batch(texts, add_special_tokens=False)
        pairs = [np.array(e.offsets, np.int32).reshape(-1, 2) for e in encoded]
        return [(np.asarray(e.ids, np.int32), p[:, 0], p[:, 1]) for e, p in zip(encoded, pairs, strict=True)]

    def encode_as_file_says(self, text: str, *, around: bool) -> list[int]:
        """Ids of a text as other programs get them from `tokenizer.json`: what looks like a special token is one.

        Args:
            around: with the special tokens that the file's post-processor puts around a text, if it has one.
        """
        return self._as_file_says.encode(text, add_special_tokens=around).ids

    @functools.cached_property
    def _as_file_says(self) -> "tokenizers.Tokenizer":
        import tokenizers

        return tokenizers.Tokenizer.from_str(self._json())

    @functools.cached_property
    def _marking(self) -> "tokenizers.Tokenizer":
        import tokenizers

        # A post-processor would take white space out of the offsets.
        made = json.loads(self._json()) | {"post_processor": None}
        return tokenizers.Tokenizer.from_str(json.dumps(made))

    @property
    def chat_template(self) -> str | None:
        """Of `chat_template.jinja` beside it, or of its settings; of several, the one named default; None without any."""
        if _CHAT_TEMPLATE in self._beside:
            return self._beside[_CHAT_TEMPLATE].decode("utf-8")
        found = self._settings.get("chat_template")
        if isinstance(found, list):
            found = {entry.get("name"): entry.get("template") for entry in found}.get("default")
        return found

    @property
    def template_names(self) -> dict[str, str]:
        """What a chat template calls the special tokens -> how they are written."""
        settings = {k: v.get("content") if isinstance(v, dict) else v for k, v in self._settings.items()}
        named = {k: v for k, v in settings.items() if k.endswith("_token") and isinstance(v, str)}
        numbers = {"bos_token": self.bos_id, "eos_token": self.eos_id}
        known = {k: self._backend.id_to_token(i) for k, i in numbers.items() if i is not None}
        return named | {name: token for name, token in known.items() if token is not None}

    @property
    def _settings(self) -> dict[str, Any]:
        return json.loads(self._beside.get(_SETTINGS, b"{}"))

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The text of ids; special tokens are left out unless `special`."""
        return self._backend.decode(list(ids), skip_special_tokens=not special)

    def token_bytes(self) -> np.ndarray:
        """int32 [vocab]: bytes of text that each token stands for; 0 for special tokens.

        Counted on raw bytes: a token may be half a character, which no decoder could show.

        Raises:
            ConfigError: the tokens are neither byte-level nor SentencePiece's, so that their bytes cannot be told.
        """
        counts = np.zeros(self.vocab_size, np.int32)
        length = self._length_rule()
        for token, number in self._backend.get_vocab(with_added_tokens=False).items():
            counts[number] = length(token)
        for number, token in self._backend.get_added_tokens_decoder().items():  # these are matched as they stand
            counts[number] = 0 if token.special else len(token.content.encode())
        return counts

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything that decides about ids."""
        return hashlib.sha256(f"{self._json()} {self.bos_id} {self.eos_id}".encode()).hexdigest()

    def save(self, folder: Path | str) -> None:
        """Writes `tokenizer.json` and `tokenizer_config.json`, as Hugging Face folders hold them, and what was beside."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in {**self._beside, **self._own_files({})}.items():
            (folder / name).write_bytes(content)

    def files(self, *, most_tokens: int) -> dict[str, bytes]:
        """What `save` writes, with settings that transformers needs to open a tokenizer of any origin."""
        needed = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": most_tokens}
        return {**self._beside, **self._own_files(needed)}

    def _own_files(self, defaults: Mapping[str, Any]) -> dict[str, bytes]:
        numbers = {"bos_token": self.bos_id, "eos_token": self.eos_id}
        names = {key: None if i is None else self._backend.id_to_token(i) for key, i in numbers.items()}
        settings = json.dumps({**defaults, **names, **self._settings})
        return {_SETTINGS: settings.encode(), "tokenizer.json": self._json().encode()}

    def _json(self) -> str:
        return self._backend.to_str(pretty=False)

    def _parts(self, text: str) -> list[str]:
        """A long text, cut only where the tokenizer ends one token and begins another.

        That is between a line that ends in a letter or digit and one that begins with one: the newline between them is
        a piece of its own for GPT-2, cl100k and `train_bpe` alike. For a tokenizer that does otherwise nothing is cut.
        """
        parts, start = [], 0
        while self._cuts_lines and len(text) - start > _LONG_TEXT:
            found = _LINE_ENDS.search(text, start + _LONG_TEXT)
            if found is None:
                break
            parts.append(text[start : found.start()])
            start = found.start()
        return [*parts, text[start:]]

    def _encode(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        for group in _grouped(texts, _ENCODED_AT_ONCE):
            for encoding in self._backend.encode_batch_fast(group, add_special_tokens=False):
                yield np.asarray(encoding.ids, np.int32)

    def _length_rule(self):
        made = json.loads(self._json())
        kinds = json.dumps([made["pre_tokenizer"], made["decoder"], made["normalizer"]])
        if '"ByteLevel"' in kinds:
            return len  # one character stands for one byte
        if "\u2581" in json.dumps(made, ensure_ascii=False) and not made["model"].get("continuing_subword_prefix"):
            return lambda token: 1 if _BYTE_TOKEN.fullmatch(token) else len(token.replace("\u2581", " ").encode())
        raise ConfigError(
            "data.tokenizer: bits per byte need to know how many bytes each token stands for, and this tokenizer is"
            f" neither byte-level nor SentencePiece's (its model is {made['model']['type']}). Use one that is"
        )


def load_tokenizer(path: str) -> Tokenizer:
    """The tokenizer in a `tokenizer.json`, or in a folder that holds one.

    The tokens that begin and end a document are the `bos_token` and `eos_token` of `tokenizer_config.json` beside it,
    else `bos_token_id` and `eos_token_id` of `config.json`, else tokens with the usual names.

    Raises:
        ConfigError: no such file, or not a tokenizer.
    """
    import tokenizers

    file = Path(path).expanduser()
    file = file / "tokenizer.json" if file.is_dir() else file
    if not file.is_file():
        raise ConfigError(
            f"data.tokenizer: '{path}': no tokenizer.json there (looked for {file.resolve()})."
            " Give a tokenizer.json, a folder with one, or 'bpe' to train one"
        )
    content = _read_json(file)
    if not isinstance(content.get("model"), dict):
        raise ConfigError(f"data.tokenizer: '{file}' is not a tokenizer: it has no \"model\"")
    backend = tokenizers.Tokenizer.from_file(str(file))
    beside = {name: file.with_name(name).read_bytes() for name in _BESIDE if file.with_name(name).is_file()}
    return Tokenizer(backend, _special_id(backend, file, "bos"), _special_id(backend, file, "eos"), beside)


def document_ends(tokenizer: Tokenizer, *, bos: bool, eos: bool) -> tuple[np.ndarray, np.ndarray]:
    """The ids in front of and behind every document.

    Raises:
        ConfigError: one is asked for that the tokenizer does not have.
    """
    ends = []
    for name, number, enforced in (("bos", tokenizer.bos_id, bos), ("eos", tokenizer.eos_id, eos)):
        if enforced and number is None:
            raise ConfigError(
                f"data.enforce_{name}: true, but the tokenizer has no {name.upper()} token. Set it to false"
            )
        ends.append(np.array([number] if enforced else [], np.int32))
    return ends[0], ends[1]


def _special_id(backend: "tokenizers.Tokenizer", file: Path, side: str) -> int | None:
    settings, model = _read_json(file.with_name("tokenizer_config.json")), _read_json(file.with_name("config.json"))
    if f"{side}_token" in settings:
        token = settings[f"{side}_token"]
        name = token.get("content") if isinstance(token, dict) else token
        if name is not None and backend.token_to_id(name) is None:
            raise ConfigError(
                f"data.tokenizer: {side}_token in tokenizer_config.json is '{name}', no token of '{file}'"
            )
        return None if name is None else backend.token_to_id(name)
    if f"{side}_token_id" in model:
        number = model[f"{side}_token_id"]
        return number[0] if isinstance(number, list) else number
    numbers = (backend.token_to_id(name) for name in _USUAL_NAMES[side])
    return next((number for number in numbers if number is not None), None)


def _read_json(file: Path) -> dict[str, Any]:
    """{} where there is no such file."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text())
    except ValueError as error:
        raise ConfigError(f"data.tokenizer: '{file}' is not JSON: {error}") from error
    return content if isinstance(content, dict) else {}


def _begins_tokens_at_lines(backend: "tokenizers.Tokenizer") -> bool:
    """Whether this is byte-level, splits newlines between words off, and adds nothing to the beginning of a text."""
    text, newline = "a\nb\n1\n2", "\u010a"  # as byte-level tokens write it
    if backend.normalizer is not None and backend.normalizer.normalize_str(text) != text:
        return False
    pieces = [] if backend.pre_tokenizer is None else backend.pre_tokenizer.pre_tokenize_str(text)
    return [piece for piece, _ in pieces] == list(text.replace("\n", newline))


def _grouped(texts: Iterable[str], most_characters: int) -> Iterator[list[str]]:
    group, size = [], 0
    for text in texts:
        group.append(text)
        size += len(text)
        if size >= most_characters:
            yield group
            group, size = [], 0
    if group:
        yield group
