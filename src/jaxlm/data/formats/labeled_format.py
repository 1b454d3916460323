"""Token ids with a label for each of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from jaxlm.core.errors import ConfigError
from jaxlm.data.formats.base import Encoder, FormatConfig, RawContent, TokenizedText
from jaxlm.data.formats.pretokenized import IdsFormat, numbers_under, token_ids
from jaxlm.data.sources.document_files import has_records
from jaxlm.data.sources.text_file import TextFile
from jaxlm.data.tokenizer.tokenizer import Tokenizer
from jaxlm.reading.choices import choice

IGNORED = -100
"""The label of a token without loss, as in transformers."""


@choice(FormatConfig, "labeled")
class LabeledFormat(IdsFormat):
    """Records with the token ids of a text and as many labels, each of which is what the model should predict at that very
    token (not at the one before it), or -100 for nothing. For `data.type: labeled`.

    Attributes:
        input_ids_key: key, or column, of the token ids.
        labels_key: key, or column, of the labels.
    """

    makes: ClassVar[str] = "labels"

    input_ids_key: str = "input_ids"
    labels_key: str = "labels"

    @property
    def documents_per_sequence(self) -> int | None:
        return 1

    @property
    def has_loss_mask(self) -> bool:
        return True

    def can_read(self, name: str) -> bool:
        return has_records(name)

    def encoder(self, tokenizer: Tokenizer, *, bos: bool | None, eos: bool, key: str) -> Encoder:
        del bos, eos
        return LabeledEncoder(self.input_ids_key, self.labels_key, tokenizer, key)


@dataclass(frozen=True)
class LabeledEncoder(Encoder):
    """A record becomes a document of its tokens followed by its labels; only labels are targets."""

    input_ids_key: str
    labels_key: str
    tokenizer: Tokenizer
    key: str

    def read(self, file: TextFile) -> Iterator[RawContent]:
        for record in file.records((self.input_ids_key, self.labels_key)):
            given = [numbers_under(key, record) for key in (self.input_ids_key, self.labels_key)]
            ids = token_ids(given[0], record.where, self.tokenizer.vocab_size)
            labels = token_ids(given[1], record.where, self.tokenizer.vocab_size, IGNORED)
            if len(ids) != len(labels):
                raise ConfigError(
                    f"{record.where}: {len(ids)} token ids and {len(labels)} labels given, as many expected"
                )
            if len(ids):
                num_bytes = len(self.tokenizer.decode(ids.tolist()).encode())
                yield RawContent((ids, labels), len(ids), num_bytes, record.position, record.where)

    def encode(self, contents: Sequence[Any]) -> list[TokenizedText | None]:
        return [self._encoded(ids, labels) for ids, labels in contents]

    def _encoded(self, ids: np.ndarray, labels: np.ndarray) -> TokenizedText | None:
        is_target = np.concatenate([np.zeros(len(ids), bool), labels != IGNORED])
        if not is_target.any():
            return None
        return TokenizedText(np.concatenate([ids, np.maximum(labels, 0)]).astype(np.int32), is_target)

    def no_targets_message(self) -> str:
        return f"{self.key}: no record has a label other than {IGNORED}"
