"""The interface of formats: how the records of files become tokens and a loss mask."""

import abc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, NamedTuple

import draccus
import numpy as np

from jaxlm.data.formats.segments import RawContent, Segment, Segments, TokenizedText, tokenize
from jaxlm.data.sources.document_files import has_records
from jaxlm.data.sources.record_files import TextFile
from jaxlm.data.tokenizer.chat_template import ChatTemplate
from jaxlm.data.tokenizer.tokenizer import Tokenizer, boundary_ids
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
    has_loss_mask: ClassVar[bool] = False
    """Whether documents say on which of their tokens the loss is computed."""
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

    def key_of_text(self, source_key: str) -> str | None:
        """The key, or column, that this format reads text from; None if it reads none.

        Args:
            source_key: the `text_key` of the source.
        """
        return None

    def given_template(self) -> str | None:
        """The key `chat_template`, which may be the path of a .jinja file; None without it, or in formats that have none."""
        return getattr(self, "chat_template", None)

    def encoder(self, tokenizer: Tokenizer, *, bos: bool | None, eos: bool, key: str) -> "Encoder":
        """Binds the format to a tokenizer.

        Args:
            bos: whether documents begin with BOS; None, if they begin as a `prompt`, for what the tokenizer itself does.
            key: config path of the format (`data.format`), for messages.

        Raises:
            ConfigError: the tokenizer lacks something the format needs.
        """
        template, nothing = self.template(tokenizer, key), np.zeros(0, np.int32)
        if self.bos_policy not in ("text", "prompt"):
            return Encoder(self, key, tokenizer, template, nothing, nothing)
        ends = eos and self.produces != "prompts"  # a prompt goes on
        return Encoder(self, key, tokenizer, template, *boundary_ids(tokenizer, bos=bos, eos=ends))

    def template(self, tokenizer: Tokenizer, key: str) -> ChatTemplate | None:
        """The chat template for messages; None in formats without any, and without one of the format or the tokenizer, which
        only texts do without. Args: key: as for `encoder`. Raises like `encoder`."""
        given = self.given_template()
        if self.bos_policy in ("text", "ids") or (given is None and tokenizer.chat_template is None):
            return None
        return ChatTemplate.load(given, tokenizer, f"{key}.chat_template")

    @abc.abstractmethod
    def read(self, file: TextFile, encoder: "Encoder") -> Iterator[RawContent]:
        """Reads the documents of a file.

        Raises:
            ConfigError: a record cannot be read. The message names the file and the line, record or row.
        """

    @abc.abstractmethod
    def no_targets_message(self, encoder: "Encoder") -> str:
        """The error message if no document that was read has a target token, with advice."""

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
class Encoder:
    """A format bound to a tokenizer.

    Attributes:
        key: config path of the format, for messages.
        template: renders messages; None if the format or the tokenizer has none.
        before, after: ids to put around texts.
    """

    format: FormatConfig
    key: str
    tokenizer: Tokenizer
    template: ChatTemplate | None
    before: np.ndarray
    after: np.ndarray

    def read(self, file: TextFile) -> Iterator[RawContent]:
        """Reads the documents of a file. Raises like `FormatConfig.read`."""
        return self.format.read(file, self)

    def encode(self, contents: Sequence[Segments]) -> list[TokenizedText | None]:
        """Tokenizes documents; None for a document without target tokens. Thread-safe."""
        return tokenize(contents, self.tokenizer)

    def sequence(self, *texts: Segment, is_rendered: bool = False) -> tuple[Segment, ...]:
        """Joins texts. If no template has rendered them, they get `before` and `after`, trained as their neighbors are."""
        if is_rendered:
            return texts
        return (Segment(self.before, texts[0].trained), *texts, Segment(self.after, texts[-1].trained))

    def cache_key(self) -> dict[str, Any]:
        """Whatever determines the tokens besides the format and the tokenizer, as plain JSON."""
        return {} if self.template is None else self.template.cache_key()

    def no_targets_message(self) -> str:
        """The error message if no document that was read has a target token, with advice."""
        return self.format.no_targets_message(self)


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

    has_loss_mask: ClassVar[bool] = True

    pack: bool = field(default=True, kw_only=True)
    truncation: Truncation = field(default="keep_start", kw_only=True)

    @property
    def documents_per_sequence(self) -> int | None:
        return 0 if self.pack else 1

    @property
    def overlong(self) -> Truncation:
        return self.truncation
