"""Documents: plain text, token ids, or token ids with a label for each; the loss is computed on all tokens."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from jaxlm.core.errors import ConfigError, listed
from jaxlm.core.safe_io import map_array
from jaxlm.data.formats.base import Begin, Encoder, FormatConfig, RecordsFormat
from jaxlm.data.formats.segments import RawContent, Segment, Segments
from jaxlm.data.sources.document_files import ARRAYS, format_of, has_records
from jaxlm.data.sources.record_files import Record, TextFile
from jaxlm.data.tokenizer.tokenizer import Tokenizer
from jaxlm.reading.choices import choice


@choice(FormatConfig, "text")
class TextFormat(FormatConfig):
    """Plain text. Documents are concatenated and may be split across sequences.

    Attributes:
        text_key: key, or column, of the text; null uses the `text_key` of the source.
    """

    text_key: str | None = None

    def can_read(self, name: str) -> bool:
        return format_of(name) is not None

    def key_of_text(self, source_key: str) -> str | None:
        return self.text_key or source_key

    def read(self, file: TextFile, encoder: Encoder) -> Iterator[RawContent]:
        for document in file.read():
            text = document.text
            content = Segments([encoder.sequence(Segment(text))], is_masked=False)
            yield RawContent(content, len(text), len(text.encode()), document.position, group=document.group)

    def no_targets_message(self, encoder: Encoder) -> str:
        return "the data contains no text"

    def texts(self, file: TextFile) -> Iterator[str]:
        return file.documents()


@dataclass(frozen=True)
class IdsFormat(FormatConfig):
    """Base of formats with token ids."""

    bos_policy: ClassVar[Begin] = "ids"

    def texts(self, file: TextFile) -> Iterator[str]:
        raise ConfigError(
            f"data.tokenizer: {file.name} holds token ids, so there is no text to train a tokenizer on. Set data.tokenizer to"
            " the tokenizer that made them"
        )


@choice(FormatConfig, "pretokenized")
class PretokenizedFormat(IdsFormat):
    """Token ids made with `data.tokenizer`, used as they are: no BOS or EOS is added. A 1-D .npy file is one document; a 2-D
    .npy file has one document per row. Other files hold lists of ids under a key.

    Attributes:
        input_ids_key: key, or column, of the token ids; not used for .npy files.
    """

    input_ids_key: str = "input_ids"

    def can_read(self, name: str) -> bool:
        return has_records(name) or name.endswith(ARRAYS)

    def read(self, file: TextFile, encoder: Encoder) -> Iterator[RawContent]:
        tokenizer = encoder.tokenizer
        token_bytes = tokenizer.known_token_bytes(lambda _: None)
        for where, values, position in self._arrays(file):
            ids = token_ids(values, where, tokenizer.vocab_size)
            if not len(ids):
                continue
            num_bytes = _num_bytes(ids, tokenizer) if token_bytes is None else int(token_bytes[ids].sum())
            yield RawContent(Segments([[Segment(ids)]], is_masked=False), len(ids), num_bytes, position, where)

    def no_targets_message(self, encoder: Encoder) -> str:
        return f"{encoder.key}: the files hold no token ids"

    def _arrays(self, file: TextFile) -> Iterator[tuple[str, Any, int]]:
        if not file.path.name.endswith(ARRAYS):
            for record in file.records((self.input_ids_key,)):
                yield record.where, numbers_under(self.input_ids_key, record), record.position
            return
        array = map_array(file.path)
        rows = array if array.ndim == 2 else array[None]
        for number, row in enumerate(rows, start=1):
            yield f"{file.path}: row {number}", row, file.size * number // len(rows)


def _num_bytes(ids: np.ndarray, tokenizer: Tokenizer) -> int:
    return len(tokenizer.decode(ids.tolist()).encode())


def numbers_under(key: str, record: Record) -> Any:
    """Reads the token ids or labels under a key of a record. Raises `ConfigError` if there are none."""
    if (values := record.values.get(key)) is None:
        problem = "null" if key in record.values else "missing"
        raise ConfigError(
            f"{record.where}: the token ids under '{key}' are {problem}. Keys of the record: {listed(record.values)}. Set"
            " the keys of format, or remove such records"
        )
    return values


def token_ids(values: Any, where: str, vocab_size: int, ignored: int | None = None) -> np.ndarray:
    """Returns int32 [tokens]. Args: ignored: a number that is not a token. Raises `ConfigError` for what is not a list."""
    try:
        ids = np.asarray(values)
    except ValueError as error:
        raise ConfigError(
            f"{where}: expected token ids (a list of integers), got a list with lists of different lengths. A record holds"
            " one document: write one record for each of them"
        ) from error
    if ids.ndim != 1 or (ids.dtype.kind not in "iu" and len(ids)):
        raise ConfigError(f"{where}: expected token ids (a list of integers), got an array of {ids.dtype} {ids.shape}")
    wrong = ids[((ids < 0) | (ids >= vocab_size)) & (ids != ignored)] if len(ids) else ids
    if len(wrong):
        what = "token id" if ignored is None else f"label (or {ignored})"
        raise ConfigError(
            f"{where}: {what} {wrong[0]} given, but the tokenizer has {vocab_size} tokens. Set data.tokenizer to the"
            " tokenizer that made them"
        )
    return ids.astype(np.int32)


IGNORED = -100
"""The label of a token without loss, as in transformers."""


@choice(FormatConfig, "labeled")
class LabeledFormat(RecordsFormat, IdsFormat):
    """Records with the token ids of a text and as many labels, each of which is what the model should predict at that very
    token (not at the one before it), or -100 for nothing. For `data.type: labeled`.

    Attributes:
        input_ids_key: key, or column, of the token ids.
        labels_key: key, or column, of the labels.
    """

    produces: ClassVar[str] = "labels"
    has_loss_mask: ClassVar[bool] = True

    input_ids_key: str = "input_ids"
    labels_key: str = "labels"

    @property
    def documents_per_sequence(self) -> int | None:
        return 1

    def read(self, file: TextFile, encoder: Encoder) -> Iterator[RawContent]:
        size = encoder.tokenizer.vocab_size
        for record in file.records((self.input_ids_key, self.labels_key)):
            given = [numbers_under(key, record) for key in (self.input_ids_key, self.labels_key)]
            ids, labels = token_ids(given[0], record.where, size), token_ids(given[1], record.where, size, IGNORED)
            if len(ids) != len(labels):
                raise ConfigError(
                    f"{record.where}: {len(ids)} token ids and {len(labels)} labels given, as many expected"
                )
            if len(ids):
                # Only labels are targets: no text is continued.
                content = Segments([[Segment(ids, False), Segment(np.maximum(labels, 0), labels != IGNORED)]])
                num_bytes = _num_bytes(ids, encoder.tokenizer)
                yield RawContent(content, len(ids), num_bytes, record.position, record.where)

    def no_targets_message(self, encoder: Encoder) -> str:
        return f"{encoder.key}: no record has a label other than {IGNORED}"
