"""What a format is: records of files into tokens, and which of them are asked for."""

import abc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import draccus
import numpy as np

from jaxlm.config.decode import encode
from jaxlm.data.sources.document_files import has_records
from jaxlm.data.sources.text_file import TextFile
from jaxlm.data.tokenizer.tokenizer import Tokenizer


class RawContent(NamedTuple):
    """A document that is read and not yet tokenized.

    Attributes:
        what: its format's own form of it.
        size: about as many characters.
        num_bytes: of its text.
        position: bytes of its file that are read by then.
    """

    what: Any
    size: int
    num_bytes: int
    position: int


class TokenizedText(NamedTuple):
    """A document.

    Attributes:
        ids: int32 [tokens].
        targets: bool [tokens], which are asked for; None where all are.
    """

    ids: np.ndarray
    targets: np.ndarray | None = None


class Encoder(abc.ABC):
    """A format that knows its tokenizer."""

    @abc.abstractmethod
    def read(self, file: TextFile) -> Iterator[RawContent]:
        """The documents of a file.

        Raises:
            ConfigError: what cannot be read; names the file and its line, record or row.
        """

    @abc.abstractmethod
    def encode(self, contents: Sequence[Any]) -> list[TokenizedText | None]:
        """Each document's tokens; None for one that has nothing to learn from. Called from several threads."""

    @abc.abstractmethod
    def cache_key(self) -> dict[str, Any]:
        """What else than format and tokenizer decides about the tokens: plain JSON."""

    @abc.abstractmethod
    def no_targets_message(self) -> str:
        """What to say, and to advise, where not one of the first documents has a target."""


@dataclass(frozen=True)
class FormatConfig(draccus.PluginRegistry, abc.ABC, discover_packages_path="jaxlm.data.formats"):
    """How the records of a source become tokens."""

    @classmethod
    def default_choice_name(cls) -> str | None:
        """Text."""
        return "text"

    @property
    @abc.abstractmethod
    def has_loss_mask(self) -> bool:
        """Whether some tokens are read and not asked for; a cache then holds which."""

    @property
    @abc.abstractmethod
    def adds_special_tokens(self) -> bool:
        """Whether `data.enforce_bos` and `data.enforce_eos` apply."""

    @property
    @abc.abstractmethod
    def documents_per_sequence(self) -> int | None:
        """1, or as many as fit (0), where documents are never cut in two; None where they are."""

    @abc.abstractmethod
    def can_read(self, name: str) -> bool:
        """Whether a file of this name may hold such records."""

    @abc.abstractmethod
    def encoder(self, tokenizer: Tokenizer, *, bos: bool, eos: bool, key: str) -> Encoder:
        """Args: key: where it is configured (`data.format`), for messages.

        Raises:
            ConfigError: the tokenizer lacks what the format needs.
        """

    @abc.abstractmethod
    def texts(self, file: TextFile) -> Iterator[str]:
        """The plain text in a file, to train a tokenizer on and to compress.

        Raises:
            ConfigError: there is none.
        """

    def cache_key(self) -> dict[str, Any]:
        """What decides about the tokens, without the tokenizer: plain JSON; {} for text, whose key the files tell."""
        kept = {name: value for name, value in encode(self).items() if name != "pack"}
        return {} if kept["type"] == "text" else {"format": kept}


@dataclass(frozen=True)
class MaskedFormat(FormatConfig):
    """What formats share whose records are asked for in part: they have keys, and none is cut in two.

    Attributes:
        pack: as many of them as fit into a window; false gives each a window of its own.
    """

    pack: bool = field(default=True, kw_only=True)

    @property
    def has_loss_mask(self) -> bool:
        return True

    @property
    def documents_per_sequence(self) -> int | None:
        return 0 if self.pack else 1

    def can_read(self, name: str) -> bool:
        return has_records(name)
