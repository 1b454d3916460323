"""The interface of formats: how the records of files become tokens and a loss mask."""

import abc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, NamedTuple

import draccus
import numpy as np

from jaxlm.data.sources.document_files import has_records
from jaxlm.data.sources.record_files import TextFile
from jaxlm.data.tokenizer.tokenizer import Tokenizer
from jaxlm.reading.choices import Registry
from jaxlm.reading.decode import encode

Truncation = Literal["keep_start", "keep_end", "drop_overlength"]
Begin = Literal["text", "prompt", "template", "ids"]


class Fate(NamedTuple):
    """Says what happens to what is too long, for messages.

    Attributes:
        done: after "were".
        happens: after "longer documents".
        lost: the part that is beyond the limit.
    """

    done: str
    happens: str
    lost: str


TRUNCATION_TEXT: Mapping[Truncation, Fate] = {
    "keep_start": Fate("truncated", "lose their ends", "the end"),
    "keep_end": Fate("truncated at the beginning", "lose their beginnings", "the beginning"),
    "drop_overlength": Fate("left out", "are left out", "the end"),
}


class RawContent(NamedTuple):
    """A document before tokenization.

    Attributes:
        content: the document in whatever form the format's encoder expects.
        size: approximate number of characters.
        num_bytes: bytes of its text.
        position: how many bytes of the file have been read after this document.
        where: the file and the line, record or row, for messages; empty if they are not needed.
        group: the number of its row group in a Parquet file of texts; 0 in other files.
    """

    content: Any
    size: int
    num_bytes: int
    position: int
    where: str = ""
    group: int = 0


class TokenizedText(NamedTuple):
    """A tokenized document.

    Attributes:
        ids: int32 [tokens].
        target_mask: bool [tokens], true where the loss is computed on a token; None means all tokens.
        numbers: float32 [N], numbers that belong to the document, N for every document; None means none.
    """

    ids: np.ndarray
    target_mask: np.ndarray | None = None
    numbers: np.ndarray | None = None


class Encoder(abc.ABC):
    """A format bound to a tokenizer."""

    @abc.abstractmethod
    def read(self, file: TextFile) -> Iterator[RawContent]:
        """The documents of a file.

        Raises:
            ConfigError: a record cannot be read. The message names the file and the line, record or row.
        """

    @abc.abstractmethod
    def encode(self, contents: Sequence[Any]) -> list[TokenizedText | None]:
        """Tokenizes documents; None for a document without target tokens. Must be thread-safe."""

    def cache_key(self) -> dict[str, Any]:
        """Whatever determines the tokens besides the format and the tokenizer, as plain JSON."""
        return {}

    @abc.abstractmethod
    def no_targets_message(self) -> str:
        """The error message if no document that was read has a target token, with advice."""


@dataclass(frozen=True)
class FormatConfig(Registry, draccus.ChoiceRegistry, abc.ABC):
    """Turns the records of a source into tokens. The fields named `..._field` and `..._key` hold the keys that it reads."""

    produces: ClassVar[str] = "documents"
    """What the records become: the data section must expect the same."""
    bos_policy: ClassVar[Begin] = "text"
    """What documents begin with. `text`: with BOS, unless the data section says otherwise. `prompt`: if it does not say, as
    the tokenizer begins a text by itself, so that what a model answers looks the same in programs that only know the
    tokenizer. `template`: a chat template writes it. `ids`: with what they are given."""

    keys_of_turns: ClassVar[tuple[str, ...]] = ("role", "content")
    """The keys of a message that this format reads. Others are for the chat template."""
    newer_keys: ClassVar[tuple[str, ...]] = ()
    """Options that older runs do not have, left out at their defaults."""

    @classmethod
    def default_choice_name(cls) -> str | None:
        return "text"

    @property
    def keys(self) -> list[str]:
        """Lists the keys of a record that this format reads, beside those for a chat template."""
        names = [item.name for item in fields(self) if item.name.endswith(("_field", "_key"))]
        return [key for key in (getattr(self, name) for name in names) if key is not None]

    @property
    def documents_per_sequence(self) -> int | None:
        """Maximum documents per sequence (0: as many as fit) if documents are never split; None if they may be."""
        return None

    @property
    def overlong(self) -> Truncation:
        """The fate of a document that is longer than a sequence."""
        return "keep_start"

    @abc.abstractmethod
    def can_read(self, name: str) -> bool:
        """Tells whether a file with this name may hold records of this format."""

    @property
    def has_loss_mask(self) -> bool:
        """Tells whether documents say on which of their tokens the loss is computed."""
        return False

    def key_of_text(self, source_key: str) -> str | None:
        """The key, or column, that this format reads text from; None if it reads none.

        Args:
            source_key: the `text_key` of the source.
        """
        return None

    def given_template(self) -> str | None:
        """The key `chat_template`, which may be the path of a .jinja file; None without it, or in formats that have none."""
        return getattr(self, "chat_template", None)

    @abc.abstractmethod
    def encoder(self, tokenizer: Tokenizer, *, bos: bool | None, eos: bool, key: str) -> Encoder:
        """Binds the format to a tokenizer.

        Args:
            bos: whether documents begin with BOS; None, if they begin as a `prompt`, for what the tokenizer itself does.
            key: config path of the format (`data.format`), for messages.

        Raises:
            ConfigError: the tokenizer lacks something the format needs.
        """

    @abc.abstractmethod
    def texts(self, file: TextFile) -> Iterator[str]:
        """The plain text in a file, for training a tokenizer and for compression baselines.

        Raises:
            ConfigError: the file has no text.
        """

    def cache_key(self) -> dict[str, Any]:
        """The options that determine the tokens, as plain JSON; {} for text, whose `text_key` is part of the files' key."""
        options = {name: value for name, value in encode(self).items() if name not in _NOT_IN_KEY}
        for name in self.newer_keys:
            if options[name] == getattr(type(self), name):
                del options[name]
        return {} if options["type"] == "text" else {"format": options}


# Options that determine the sequences and not the tokens.
_NOT_IN_KEY = ("pack", "truncation")


@dataclass(frozen=True)
class RecordsFormat(FormatConfig):
    """Base of formats that only files of records can hold."""

    def can_read(self, name: str) -> bool:
        return has_records(name)


@dataclass(frozen=True)
class MaskedFormat(RecordsFormat):
    """Base of formats with a loss mask. Their documents are records, and are never split across sequences.

    Attributes:
        pack: pack as many documents into each sequence as fit; false gives each document a sequence of its own.
        truncation: what becomes of a document that is longer than `model.seq_len`: `keep_start` cuts off its end,
            `keep_end` its beginning, and `drop_overlength` leaves it out.
    """

    pack: bool = field(default=True, kw_only=True)
    truncation: Truncation = field(default="keep_start", kw_only=True)

    @property
    def documents_per_sequence(self) -> int | None:
        return 0 if self.pack else 1

    @property
    def has_loss_mask(self) -> bool:
        return True

    @property
    def overlong(self) -> Truncation:
        return self.truncation
