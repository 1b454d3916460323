"""Text to token ids and back: a byte-level BPE, trained here or loaded."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jaxlm.core.errors import ConfigError

if TYPE_CHECKING:
    import tokenizers

END_OF_TEXT = "<|endoftext|>"
# Names under which tokenizers keep the token that ends, and the one that begins, a document.
_EOS_NAMES = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>")
_BOS_NAMES = (END_OF_TEXT, "<s>", "<|begin_of_text|>", "<bos>")

# Words with a leading space, runs of up to three digits, punctuation, indentation as one piece: the split of cl100k,
# written out again for code, where indentation is most of the white space.
_PIECES = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+[ \t]*|\s+(?!\S)|\s+"
)


class Tokenizer:
    """A `tokenizers` tokenizer with its special tokens found.

    Attributes:
        vocab_size: ids run from 0 to this, exclusive.
        bos_id, eos_id: of the tokens that begin and end a document; None where there is none.
    """

    def __init__(self, backend: "tokenizers.Tokenizer", bos: str | None = None, eos: str | None = None):
        self._backend = backend
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.bos_id = self._special_id(bos, _BOS_NAMES)
        self.eos_id = self._special_id(eos, _EOS_NAMES)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without special tokens around it. Uses all cores."""
        return [encoding.ids for encoding in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; special tokens are left out."""
        return self._backend.decode(list(ids), skip_special_tokens=True)

    def token_bytes(self) -> np.ndarray:
        """int32 [vocab]: bytes of text that each token stands for; 0 for special tokens.

        Counted on raw bytes: a token may be half a character, which no decoder could show.
        """
        counts = np.zeros(self.vocab_size, np.int32)
        special = {token.content for token in self._backend.get_added_tokens_decoder().values() if token.special}
        to_byte = _byte_alphabet()
        for token, number in self._backend.get_vocab(with_added_tokens=True).items():
            if token not in special:
                whole = all(char in to_byte for char in token)
                counts[number] = len(token) if whole else len(token.encode())
        return counts

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything that decides about ids."""
        return hashlib.sha256(self._json().encode()).hexdigest()

    def save(self, folder: Path | str) -> None:
        """Writes `tokenizer.json` and `tokenizer_config.json`, as Hugging Face folders hold them."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        names = {"bos_token": self.bos_id, "eos_token": self.eos_id}
        special = {k: self._backend.id_to_token(v) for k, v in names.items() if v is not None}
        (folder / "tokenizer_config.json").write_text(json.dumps(special))
        (folder / "tokenizer.json").write_text(self._json())

    def _json(self) -> str:
        return self._backend.to_str(pretty=False)

    def _special_id(self, given: str | None, usual: Sequence[str]) -> int | None:
        candidates = (given,) if given is not None else usual
        return next((i for name in candidates if (i := self._backend.token_to_id(name)) is not None), None)


def load_tokenizer(path: str) -> Tokenizer:
    """The tokenizer in a `tokenizer.json`, or in a folder that holds one.

    Raises:
        ConfigError: no such file, or not a tokenizer.
    """
    import tokenizers

    file = Path(path).expanduser()
    file = file / "tokenizer.json" if file.is_dir() else file
    if not file.is_file():
        raise ConfigError(f"data.tokenizer: '{path}': no tokenizer.json there (looked for {file.resolve()})")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:
        raise ConfigError(f"data.tokenizer: '{file}' is not a tokenizer: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True  # text that looks like a special token is still text
    settings = file.parent / "tokenizer_config.json"
    special = json.loads(settings.read_text()) if settings.is_file() else {}
    return Tokenizer(backend, _content(special.get("bos_token")), _content(special.get("eos_token")))


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of exactly `vocab_size` tokens, or fewer where the texts do not give so many.

    Source: Sennrich et al. 2016 (arXiv:1508.07909), algorithm 1, over bytes as in GPT-2.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(tokenizers.Regex(_PIECES), behavior="isolated")
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
    backend.encode_special_tokens = True
    return Tokenizer(backend)


def _content(token: object) -> str | None:
    return token.get("content") if isinstance(token, dict) else token if isinstance(token, str) else None


def _byte_alphabet() -> set[str]:
    """The characters by which byte-level tokenizers write the 256 bytes, one each."""
    from tokenizers import pre_tokenizers

    return set(pre_tokenizers.ByteLevel.alphabet())
