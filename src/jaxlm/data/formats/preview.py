"""Records before anything is tokenized: keys that nothing reads, what the loss is computed on, and one of them as text."""

import contextlib
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxlm.core.errors import ConfigError, listed
from jaxlm.data.formats.base import TRUNCATION_TEXT, Encoder, FormatConfig, Truncation
from jaxlm.data.formats.chat import (
    OF_TEMPLATE,
    REASONING,
    TOOLS,
    VARIABLES,
    ConversationFormat,
    are_messages,
    for_template,
    template_variables,
)
from jaxlm.data.formats.segments import TokenizedText, with_brackets
from jaxlm.data.sources.record_files import Record, TextFile, glance
from jaxlm.data.tokenizer.chat_template import ChatTemplate
from jaxlm.data.tokenizer.tokenizer import Tokenizer

_MAX_FILES, _RECORDS = 10, 100  # of each file


def describe_records(
    config: FormatConfig, tokenizer: Tokenizer, files: Sequence[TextFile], text_key: str
) -> str | None:
    """Says how the first records are read, and which of their keys are not; None if the configuration says it all."""
    first = [file for file in files if file.has_records][:_MAX_FILES]
    records: list[Record] = []
    with contextlib.suppress(ConfigError):  # said when they are tokenized, unless nobody reads what is wrong with them
        records.extend(
            record for file in first for record in itertools.islice(glance(file.path, config.keys), _RECORDS)
        )
    kinds = () if config.has_loss_mask else _kinds(config, records)  # masks are drawn
    has_turns = any(_turns(record.values.get(key)) for record in records for key in config.keys)
    template = config.template(tokenizer, "data.format") if has_turns else None
    unread = dict.fromkeys(key for record in records for key in _unread(config, template, record, text_key))
    unread |= dict.fromkeys(_left_out(config, template, records)) if template else {}
    return "; ".join((*kinds, *([f"not read: {listed(unread)}"] if unread else []))) or None


def _kinds(config: FormatConfig, records: Sequence[Record]) -> Iterator[str]:
    """Lists the keys of the format that have a text in the first record, those with messages, and those in no record."""
    first = records[0].values if records else {}
    kinds = {
        "read as text": [key for key in config.keys if isinstance(first.get(key), str)],
        "read as messages": [key for key in config.keys if are_messages(first.get(key))],
        "in no record": [key for key in config.keys if records and all(r.values.get(key) is None for r in records)],
    }
    return (f"{kind}: {listed(keys)}" for kind, keys in kinds.items() if keys)


def _unread(config: FormatConfig, template: ChatTemplate | None, record: Record, text_key: str) -> Iterator[str]:
    values = {key: value for key, value in record.values.items() if _says_something(value)}
    read, tools = {*config.keys, config.key_of_text(text_key)}, TOOLS
    if isinstance(config, ConversationFormat):
        tools = config.tools_field or TOOLS
    turns = {key: turns for key in config.keys if key != tools and (turns := _turns(values.get(key)))}
    if turns and template is not None:
        read |= {VARIABLES, *([tools] if TOOLS in template.reads.variables else [])}
    yield from (key for key in values if key not in read and (config.produces != "prompts" or key in OF_TEMPLATE))
    for key, turn in ((key, turn) for key, of_key in turns.items() for turn in of_key):
        said = [name for name in turn if name not in config.keys_of_turns and _says_something(turn[name])]
        for name in said:
            names = REASONING if name in REASONING else (name,)
            if template is None or not any(name in template.reads.keys for name in names):
                yield f"{key}[].{name}"


def _left_out(config: FormatConfig, template: ChatTemplate, records: Sequence[Record]) -> Iterator[str]:
    """The roles whose messages a template leaves out: what they say changes nothing."""
    seen: set[str] = set()
    for record in records:
        with contextlib.suppress(ConfigError):  # said when it is tokenized
            lists, tools = [record.values.get(key) for key in config.keys], TOOLS
            if isinstance(config, ConversationFormat):
                lists, tools = [config.messages(record)], config.tools_field or TOOLS
            variables = template_variables(record, template, tools)
            for messages in map(for_template, filter(are_messages, lists)):
                text = template.prompt(messages, record.where, variables)
                for role in [m["role"] for m in messages if m.get("content") and m["role"] not in seen]:
                    others = [m | {"content": "jaxlm"} if m["role"] == role else m for m in messages]
                    seen.add(role)
                    if template.prompt(others, record.where, variables) == text:
                        yield f"messages of the role {role}"


def _turns(value: Any) -> list[dict[str, Any]]:
    return [turn for turn in value if isinstance(turn, dict)] if isinstance(value, list) else []


def _says_something(value: Any) -> bool:
    return value is not None and value not in ("", [], {})


MAX_RECORDS = 1000
_MAX_BLOCKS = 10  # of MAX_RECORDS that are searched for a token to compute the loss on
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
        truncation: what becomes of those that are longer.
        where: of the example.
        example: the first record with a token to compute the loss on; empty if none of these records has one.
        advice: why that may be so.
    """

    num_records: int
    num_empty: int
    num_overlong: int
    num_tokens: int
    num_trained: int
    truncation: Truncation
    where: str
    example: tuple[Piece, ...]
    advice: str = ""

    def describe(self) -> str:
        """The shares, in a line."""
        if not self.example:
            return (
                f"warning: none of the first {self.num_records:,} records has a token to compute the loss on within"
                f" model.seq_len. If the others have none either, the run will not start: {self.advice}"
            )
        share = self.num_trained / max(self.num_tokens, 1)
        parts = [f"{share:.1%} of {self.num_tokens:,} tokens in the first {self.num_records:,} records"]
        if self.num_empty:
            parts.append(f"{self.num_empty:,} records have none and are left out")
        if self.num_overlong:
            parts.append(
                f"{self.num_overlong:,} are longer than model.seq_len and {TRUNCATION_TEXT[self.truncation].happens}"
            )
        return "; ".join(parts)

    def draw(self, *, colors: bool) -> str:
        """The example as text. Without colors, what the loss is not computed on is in ⟦brackets⟧."""
        legend = f"{self.where}: the loss is computed on " + (
            "what is green" if colors else "what is not in ⟦brackets⟧"
        )
        if any(piece.is_cut for piece in self.example):
            legend += f"; {TRUNCATION_TEXT[self.truncation].lost} is beyond model.seq_len"
        if colors:
            return f"{legend}\n{''.join(piece.in_colors for piece in self.example)}"
        runs = itertools.groupby(self.example, key=lambda piece: piece.is_trained)
        texts = ((trained, "".join(_printable(piece.text) for piece in run)) for trained, run in runs)
        return f"{legend}\n{with_brackets(texts)}"


def _printable(text: str) -> str:
    return _CONTROL.sub("\ufffd", text)


class _Tokenized(NamedTuple):
    """A tokenized record.

    Attributes:
        within: bool [tokens]: whether the loss is computed on each token within a sequence.
    """

    where: str
    text: TokenizedText
    within: np.ndarray


def preview_masks(
    encoder: Encoder, files: Iterable[TextFile], tokenizer: Tokenizer, seq_len: int, *, truncation: Truncation, key: str
) -> MaskPreview:
    """Tokenizes the first records of some files, and up to ten times as many until one has a token to compute the loss on.

    Args:
        key: of the source, for messages.

    Raises:
        ConfigError: a record cannot be read, or the loss would be computed on no token of all files.
    """
    records = itertools.chain.from_iterable(map(encoder.read, files))
    tokenized_records: list[_Tokenized] = []
    example, first, num_records = None, "", 0
    for _ in range(_MAX_BLOCKS):
        block = list(itertools.islice(records, MAX_RECORDS))
        first, num_records = first or (block[0].where if block else ""), num_records + len(block)
        texts = zip(block, encoder.encode([record.content for record in block]), strict=True)
        new = [_Tokenized(r.where, t, _within(t, seq_len, truncation)) for r, t in texts if t is not None]
        tokenized_records += new
        example = next((record for record in new if record.within.any()), None)
        if example is not None or len(block) < MAX_RECORDS:
            break
    advice = "raise model.seq_len" if tokenized_records else encoder.no_targets_message()
    if example is None and next(records, None) is None:
        if not tokenized_records:
            raise ConfigError(advice + (f". The first record is {first}" if first else ""))
        raise ConfigError(
            f"{key}: of all {num_records:,} records, none has a token to compute the loss on within model.seq_len"
            f" ({seq_len}). The first is {first}. Raise model.seq_len"
        )
    return MaskPreview(
        num_records=num_records,
        num_empty=num_records - len(tokenized_records),
        num_overlong=sum(len(record.text.ids) > seq_len + 1 for record in tokenized_records),
        num_tokens=sum(len(record.text.ids) for record in tokenized_records),
        num_trained=sum(int(record.within.sum()) for record in tokenized_records),
        truncation=truncation,
        where=example.where if example is not None else first,
        example=_pieces(example, tokenizer, seq_len, truncation) if example is not None else (),
        advice=advice,
    )


def _within(text: TokenizedText, seq_len: int, truncation: Truncation) -> np.ndarray:
    within = np.ones(len(text.ids), bool) if text.target_mask is None else text.target_mask.astype(bool)
    within[:1] = False  # the first token of a document is never a target
    room = seq_len + 1
    if len(within) > room and truncation == "keep_end":
        within[: len(within) - room + 1] = False
    elif len(within) > room:
        within[0 if truncation == "drop_overlength" else room :] = False
    return within


def _pieces(record: _Tokenized, tokenizer: Tokenizer, seq_len: int, truncation: Truncation) -> tuple[Piece, ...]:
    ids = record.text.ids.tolist()
    special = {token for token in set(ids) if not tokenizer.decode([token])}
    start = max(0, len(ids) - seq_len - 1) if truncation == "keep_end" else 0
    kinds = [
        (bool(record.within[n]), token in special, not start <= n <= start + seq_len) for n, token in enumerate(ids)
    ]
    runs = itertools.groupby(range(len(ids)), key=kinds.__getitem__)
    return tuple(Piece(tokenizer.decode([ids[n] for n in run], special=True), *kind) for kind, run in runs)
