"""Records as sequences of segments, and the one way in which these become tokens and a target mask."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxlm.core.errors import ConfigError
from jaxlm.data.sources.record_files import Record
from jaxlm.data.tokenizer.tokenizer import Tokenizer


class Segment(NamedTuple):
    """A part of a sequence.

    Attributes:
        content: a text, or token ids: int32 [tokens].
        trained: whether the loss is computed on its tokens: on all or none of them, or bool [tokens] for ids.
        spans: of a rendered text, ranges (begin, end) of characters: the loss is computed on the tokens that overlap one.
        needed: whether the record is left out if the segment has no token.
    """

    content: str | np.ndarray
    trained: bool | np.ndarray = True
    spans: Sequence[tuple[int, int]] | None = None
    needed: bool = False


class Segments(NamedTuple):
    """A record before tokenization: the sequences that become one document, one after another.

    Attributes:
        sequences: segments of each. The target mask also says where the next sequence begins, so each of several begins
            without loss and ends with it.
        is_rendered: a chat template wrote the texts, special tokens included. Those of a sequence are tokenized as one, and a
            token is in the segment that it begins in. Otherwise texts have no special tokens, and each is tokenized by
            itself, so that the tokens of a prompt are the same as at inference.
        is_masked: whether a target mask is kept. Then a record without a target is left out.
        numbers: numbers that belong to the record, the same count for all records of a source.
        refusal: what is wrong with a record that would be left out, if it must not be.
    """

    sequences: Sequence[Sequence[Segment]]
    is_rendered: bool = False
    is_masked: bool = True
    numbers: Sequence[float] = ()
    refusal: str = ""


class RawContent(NamedTuple):
    """A document before tokenization.

    Attributes:
        content: its segments.
        size: approximate number of characters.
        num_bytes: bytes of its text.
        position: how many bytes of the file have been read after this document.
        where: the file and the line, record or row, for messages; empty if they are not needed.
        group: the number of its row group in a Parquet file of texts; 0 in other files.
    """

    content: Segments
    size: int
    num_bytes: int
    position: int
    where: str = ""
    group: int = 0

    @classmethod
    def of(cls, record: Record, texts: Sequence[str], content: Segments) -> "RawContent":
        """A record with its texts."""
        num_bytes = sum(len(text.encode()) for text in texts)
        return cls(content, sum(map(len, texts)), num_bytes, record.position, record.where)


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


def tokenize(contents: Sequence[Segments], tokenizer: Tokenizer) -> list[TokenizedText | None]:
    """Tokenizes records; None for one that is left out."""
    # As keys: a record repeats its prompt before each completion.
    texts: dict[bool, dict[str, None]] = {False: {}, True: {}}
    for content in contents:
        for sequence in content.sequences:
            texts[content.is_rendered] |= dict.fromkeys(_texts(sequence, content.is_rendered))
    plain, rendered = list(texts[False]), list(texts[True])
    ids_of = dict(zip(plain, tokenizer.encode_arrays(plain), strict=True))
    tokens_of = dict(zip(rendered, tokenizer.encode_with_offsets(rendered), strict=True)) if rendered else {}

    def parts(content: Segments) -> Iterator[_Part]:
        for sequence in content.sequences:
            if content.is_rendered:
                (text,) = _texts(sequence, True)
                yield from _split(sequence, *tokens_of[text])
            for segment in sequence if not content.is_rendered else ():
                ids = ids_of[segment.content] if isinstance(segment.content, str) else segment.content
                yield segment, ids, np.full(len(ids), segment.trained)

    return [_document(content, list(parts(content))) for content in contents]


_Part = tuple[Segment, np.ndarray, np.ndarray]  # ids and target mask of a segment


def _texts(sequence: Sequence[Segment], is_rendered: bool) -> list[str]:
    """Lists what is tokenized by itself."""
    texts = [segment.content for segment in sequence if isinstance(segment.content, str)]
    return ["".join(texts)] if is_rendered else texts


def _split(sequence: Sequence[Segment], ids: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> Iterator[_Part]:
    """The tokens of each segment of a rendered sequence. Args: begins, ends: characters of each token."""
    places = np.searchsorted(begins, np.cumsum([len(segment.content) for segment in sequence[:-1]], dtype=int))
    arrays = (np.split(array, places) for array in (ids, begins, ends))
    for segment, own, begin, end in zip(sequence, *arrays, strict=True):
        mask = np.full(len(own), segment.trained)
        if segment.spans is not None:
            mask = np.zeros(len(own), bool)
            for first, last in segment.spans:
                mask |= (begin < last) & (end > first)
        yield segment, own, mask


def _document(content: Segments, parts: Sequence[_Part]) -> TokenizedText | None:
    needed = [len(ids) > 0 for segment, ids, _ in parts if segment.needed]
    ids = np.concatenate([ids for _, ids, _ in parts])
    mask = np.concatenate([mask for _, _, mask in parts]) if content.is_masked else None
    if mask is not None and not needed:
        needed = [bool(mask[1:].any())]  # the first token of a document is never a target
    if not all(needed):
        if content.refusal:
            raise ConfigError(content.refusal)
        return None
    return TokenizedText(ids, mask, np.array(content.numbers, np.float32) if content.numbers else None)


def with_brackets(parts: Iterable[tuple[bool, str]]) -> str:
    """The parts of a text, each with whether it is trained; the others are in ⟦brackets⟧."""
    return "".join(text if is_trained else f"⟦{text}⟧" for is_trained, text in parts)
