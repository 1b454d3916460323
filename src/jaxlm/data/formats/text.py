"""Plain text; the loss is computed on every token."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxlm.data.formats.base import Encoder, FormatConfig, RawContent, TokenizedText
from jaxlm.data.sources.document_files import format_of
from jaxlm.data.sources.text_file import TextFile
from jaxlm.data.tokenizer.tokenizer import Tokenizer, boundary_ids
from jaxlm.reading.choices import choice


@choice(FormatConfig, "text")
class TextFormat(FormatConfig):
    """Plain text. Documents are concatenated and may be split across sequences.

    Attributes:
        text_key: key, or column, of the text; null uses the `text_key` of the source.
    """

    text_key: str | None = None

    @property
    def documents_per_sequence(self) -> int | None:
        return None

    def can_read(self, name: str) -> bool:
        return format_of(name) is not None

    def key_of_text(self, source_key: str) -> str | None:
        return self.text_key or source_key

    def encoder(self, tokenizer: Tokenizer, *, bos: bool | None, eos: bool, key: str) -> Encoder:
        del key
        return TextEncoder(tokenizer, *boundary_ids(tokenizer, bos=bos, eos=eos))

    def texts(self, file: TextFile) -> Iterator[str]:
        return file.documents()


@dataclass(frozen=True)
class TextEncoder(Encoder):
    """Tokenizes texts, with the ids `before` and `after` around each."""

    tokenizer: Tokenizer
    before: np.ndarray
    after: np.ndarray

    def read(self, file: TextFile) -> Iterator[RawContent]:
        for document in file.read():
            text = document.text
            yield RawContent(text, len(text), len(text.encode()), document.position, group=document.group)

    def encode(self, contents: Sequence[Any]) -> list[TokenizedText | None]:
        return [
            TokenizedText(np.concatenate([self.before, ids, self.after]))
            for ids in self.tokenizer.encode_arrays(contents)
        ]

    def no_targets_message(self) -> str:
        return "the data contains no text"
