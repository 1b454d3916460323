"""What the loss is computed on, seen before anything is tokenized: shares of the first records, and one of them drawn."""

import html
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxlm.core.errors import ConfigError
from jaxlm.data.formats.base import Encoder, TokenizedText
from jaxlm.data.sources.text_file import TextFile
from jaxlm.data.tokenizer.tokenizer import Tokenizer

MAX_RECORDS = 1000
_MASKED = ("⟦", "⟧")
# Text of a record must not move the cursor or change colors that it does not own.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_RESET = "\x1b[0m"


class Piece(NamedTuple):
    """Consecutive tokens of an example that are drawn alike.

    Attributes:
        is_trained: the loss is computed on them.
        is_special: they are special tokens.
        is_cut: they are beyond `model.seq_len`.
    """

    text: str
    is_trained: bool
    is_special: bool
    is_cut: bool

    @property
    def classes(self) -> str:
        """What the piece is, as names of a style sheet."""
        named = {"trained": self.is_trained and not self.is_cut, "special": self.is_special, "cut": self.is_cut}
        return " ".join(name for name, holds in named.items() if holds)

    @property
    def in_colors(self) -> str:
        """The text with ANSI escape sequences: trained tokens on green, special tokens bold, what is cut off struck out."""
        codes = ["9;31"] if self.is_cut else ["30;42"] if self.is_trained else ["2"]
        codes += ["1"] if self.is_special else []
        # A line ends in the terminal's own colors.
        lines = [f"\x1b[{';'.join(codes)}m{line}{_RESET}" if line else "" for line in _printable(self.text).split("\n")]
        return "\n".join(lines)


@dataclass(frozen=True)
class MaskPreview:
    """The first records of a source.

    Attributes:
        num_records: how many they are.
        num_empty: those without a token to compute the loss on.
        num_overlong: those that are longer than a sequence.
        num_tokens: tokens of all of them.
        num_trained: of these, the tokens that the loss is computed on, as far as they are within a sequence.
        drops_overlong: records that are longer are left out.
        where: of the example.
        example: the first record with a token to compute the loss on.
    """

    num_records: int
    num_empty: int
    num_overlong: int
    num_tokens: int
    num_trained: int
    drops_overlong: bool
    where: str
    example: tuple[Piece, ...]

    def describe(self) -> str:
        """The shares, in a line."""
        share = self.num_trained / max(self.num_tokens, 1)
        parts = [f"{share:.1%} of {self.num_tokens:,} tokens in the first {self.num_records:,} records"]
        if self.num_empty:
            parts.append(f"{self.num_empty:,} records have none and are left out")
        if self.num_overlong:
            fate = "are left out" if self.drops_overlong else "lose their ends"
            parts.append(f"{self.num_overlong:,} are longer than model.seq_len and {fate}")
        return "; ".join(parts)

    def draw(self, *, colors: bool) -> str:
        """The example as text. Without colors, what the loss is not computed on is in ⟦brackets⟧."""
        legend = f"{self.where}: the loss is computed on " + (
            "what is green" if colors else "what is not in ⟦brackets⟧"
        )
        if any(piece.is_cut for piece in self.example):
            legend += "; the end is beyond model.seq_len"
        if colors:
            return f"{legend}\n{''.join(piece.in_colors for piece in self.example)}"
        runs = itertools.groupby(self.example, key=lambda piece: piece.is_trained)
        texts = [(trained, "".join(_printable(piece.text) for piece in run)) for trained, run in runs]
        return f"{legend}\n{''.join(text if trained else text.join(_MASKED) for trained, text in texts)}"


def _printable(text: str) -> str:
    return _CONTROL.sub("\ufffd", text)


def preview_masks(
    encoder: Encoder, files: Iterable[TextFile], tokenizer: Tokenizer, seq_len: int, *, drops_overlong: bool, key: str
) -> MaskPreview:
    """Tokenizes the first records of some files. Args: key: of the source, for messages.

    Raises:
        ConfigError: a record cannot be read, or the loss would be computed on no token of any of them.
    """
    records = list(itertools.islice(itertools.chain.from_iterable(map(encoder.read, files)), MAX_RECORDS))
    texts = encoder.encode([record.content for record in records])
    found = [(record, text) for record, text in zip(records, texts, strict=True) if text is not None]
    if not found:
        first = f". The first record is {records[0].where}" if records else ""
        raise ConfigError(encoder.no_targets_message() + first)
    fitting = [(record, text, _within(text, seq_len, drops_overlong)) for record, text in found]
    trained = [int(within.sum()) for _, _, within in fitting]
    if not any(trained):
        raise ConfigError(
            f"{key}: of the first {len(records):,} records, none has a token to compute the loss on within model.seq_len"
            f" ({seq_len}). The first is {records[0].where}. Raise model.seq_len"
        )
    record, text, within = fitting[int(np.argmax(np.array(trained) > 0))]
    return MaskPreview(
        num_records=len(records),
        num_empty=len(records) - len(found),
        num_overlong=sum(len(text.ids) > seq_len + 1 for _, text in found),
        num_tokens=sum(len(text.ids) for _, text in found),
        num_trained=sum(trained),
        drops_overlong=drops_overlong,
        where=record.where,
        example=_pieces(text, within, tokenizer, seq_len),
    )


def _within(text: TokenizedText, seq_len: int, drops_overlong: bool) -> np.ndarray:
    """bool [tokens]: whether the loss is computed on each token."""
    within = np.ones(len(text.ids), bool) if text.target_mask is None else text.target_mask.astype(bool)
    within[:1] = False  # the first token of a document is never a target
    within[0 if drops_overlong and len(within) > seq_len + 1 else seq_len + 1 :] = False
    return within


def _pieces(text: TokenizedText, within: np.ndarray, tokenizer: Tokenizer, seq_len: int) -> tuple[Piece, ...]:
    ids = text.ids.tolist()
    special = {token for token in set(ids) if not tokenizer.decode([token])}
    kinds = [(bool(within[n]), token in special, n > seq_len) for n, token in enumerate(ids)]
    runs = itertools.groupby(range(len(ids)), key=kinds.__getitem__)
    return tuple(Piece(tokenizer.decode([ids[n] for n in run], special=True), *kind) for kind, run in runs)


def page_of(previews: Sequence[tuple[str, MaskPreview]]) -> str:
    """The examples of several sources as an HTML page without other files. Args: previews: with the source's key."""
    sections = [
        f"<h2>{html.escape(key)}</h2>\n<p>Trained: {html.escape(preview.describe())}.</p>\n"
        f"<p>{html.escape(preview.where)}</p>\n<pre>{''.join(map(_marked_up, preview.example))}</pre>"
        for key, preview in previews
    ]
    return _PAGE.replace("SECTIONS", "\n".join(sections))


def _marked_up(piece: Piece) -> str:
    return f'<span class="{piece.classes}">{html.escape(_printable(piece.text))}</span>'


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>What the loss is computed on</title>
<style>
body { font: 16px/1.5 sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; color-scheme: light dark; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; padding: 1em; border: 1px solid #8888; }
.trained { background: #2da44e55; }
.special { font-weight: bold; }
.cut { text-decoration: line-through; color: #cf222e; }
</style>
</head>
<body>
<h1>What the loss is computed on</h1>
<p>The loss is computed on tokens with a <span class="trained">green background</span>.
<span class="special">Special tokens</span> are bold. <span class="cut">What is beyond the sequence</span> is struck out.</p>
SECTIONS
</body>
</html>
"""
