"""Documents that are token ids already."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from jaxlm.core.errors import ConfigError, listed
from jaxlm.core.safe_io import map_array
from jaxlm.data.formats.base import Begin, Encoder, FormatConfig, RawContent, TokenizedText
from jaxlm.data.sources.document_files import ARRAYS, has_records
from jaxlm.data.sources.record_files import Record
from jaxlm.data.sources.text_file import TextFile
from jaxlm.data.tokenizer.tokenizer import Tokenizer
from jaxlm.reading.choices import choice


@dataclass(frozen=True)
class IdsFormat(FormatConfig):
    """Base of formats with token ids."""

    begins_as: ClassVar[Begin] = "ids"

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

    @property
    def documents_per_sequence(self) -> int | None:
        return None

    def can_read(self, name: str) -> bool:
        return has_records(name) or name.endswith(ARRAYS)

    def encoder(self, tokenizer: Tokenizer, *, bos: bool | None, eos: bool, key: str) -> Encoder:
        del bos, eos
        return PretokenizedEncoder(self.input_ids_key, tokenizer, key)


@dataclass(frozen=True)
class PretokenizedEncoder(Encoder):
    """Validates token ids and passes them through."""

    input_ids_key: str
    tokenizer: Tokenizer
    key: str

    def read(self, file: TextFile) -> Iterator[RawContent]:
        token_bytes = self.tokenizer.known_token_bytes(lambda _: None)
        for where, values, position in self._arrays(file):
            ids = token_ids(values, where, self.tokenizer.vocab_size)
            if not len(ids):
                continue
            if token_bytes is None:
                num_bytes = len(self.tokenizer.decode(ids.tolist()).encode())
            else:
                num_bytes = int(token_bytes[ids].sum())
            yield RawContent(ids, len(ids), num_bytes, position, where)

    def encode(self, contents: Sequence[Any]) -> list[TokenizedText | None]:
        return [TokenizedText(ids) for ids in contents]

    def no_targets_message(self) -> str:
        return f"{self.key}: the files hold no token ids"

    def _arrays(self, file: TextFile) -> Iterator[tuple[str, Any, int]]:
        if not file.path.name.endswith(ARRAYS):
            for record in file.records((self.input_ids_key,)):
                yield record.where, numbers_under(self.input_ids_key, record), record.position
            return
        array = map_array(file.path)
        rows = array if array.ndim == 2 else array[None]
        for number, row in enumerate(rows, start=1):
            yield f"{file.path}: row {number}", row, file.size * number // len(rows)


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
    """int32 [tokens]. Args: ignored: a number that is no token. Raises `ConfigError` if they are no list of ids."""
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
