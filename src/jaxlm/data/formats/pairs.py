"""Preference pairs: a prompt with a chosen and a rejected completion; the loss is computed on the completions."""

import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from jaxlm.core.errors import ConfigError
from jaxlm.data.formats.base import Encoder, FormatConfig, RawContent, TokenizedText
from jaxlm.data.formats.chat import Messages, are_messages, plain_text
from jaxlm.data.sources.document_files import has_records
from jaxlm.data.sources.record_files import Record
from jaxlm.data.sources.text_file import TextFile
from jaxlm.data.tokenizer.chat_template import ChatTemplate
from jaxlm.data.tokenizer.tokenizer import Tokenizer, boundary_ids

_USER = "user"
_Half = tuple[np.ndarray, np.ndarray]  # ids, and whether the loss is computed on each of them


class Pair(NamedTuple):
    """A pair before tokenization.

    Attributes:
        prompt: the prompt as text. For a conversation, rendered up to the header of the assistant's answer.
        chosen, rejected: the completions.
        is_rendered: a chat template wrote all special tokens; otherwise BOS and EOS are added and the texts have none.
    """

    prompt: str
    chosen: str
    rejected: str
    is_rendered: bool


@FormatConfig.register_subclass("pairs")
@dataclass(frozen=True)
class PairsFormat(FormatConfig):
    """Records with a chosen and a rejected completion, as texts or as lists of messages, for `data.type: pairs`.

    Attributes:
        prompt_field: key of the prompt; null if both completions begin with it, as in `Anthropic/hh-rlhf`. The prompt is
            then what they have in common.
        chosen_field: key of the preferred completion.
        rejected_field: key of the other completion.
        prompt_ends_with: with `prompt_field: null`, the text that ends the prompt, such as `"\\\\n\\\\nAssistant:"`. The
            prompt ends after its last occurrence in what both completions have in common; null ends it at the last space.
            For messages it has no effect: the prompt is all messages that both lists begin with.
        chat_template: for messages: `chatml`, `nanochat`, a Jinja template, or the path of a .jinja file; null uses the
            tokenizer's chat template.
    """

    makes: ClassVar[str] = "pairs"

    prompt_field: str | None = "prompt"
    chosen_field: str = "chosen"
    rejected_field: str = "rejected"
    prompt_ends_with: str | None = None
    chat_template: str | None = None

    def __post_init__(self):
        if self.prompt_ends_with is not None and (self.prompt_field is not None or not self.prompt_ends_with):
            raise ConfigError(
                f"data.format.prompt_ends_with: {self.prompt_ends_with!r} given, but it needs a text, and has an effect only"
                " with prompt_field: null. Remove it, or set prompt_field to null"
            )

    @property
    def documents_per_sequence(self) -> int | None:
        return 1

    def can_read(self, name: str) -> bool:
        return has_records(name)

    def given_template(self) -> str | None:
        return self.chat_template

    def encoder(self, tokenizer: Tokenizer, *, bos: bool, eos: bool, key: str) -> Encoder:
        template = None
        if self.chat_template is not None or tokenizer.chat_template is not None:
            template = ChatTemplate.load(self.chat_template, tokenizer, f"{key}.chat_template")
        return PairsEncoder(self, key, tokenizer, template, *boundary_ids(tokenizer, bos=bos, eos=eos))

    def texts(self, file: TextFile) -> Iterator[str]:
        for record in self._records(file):
            prompt, chosen, rejected = self.fields(record)
            yield from (_plain(prompt or "") + _plain(completion) for completion in (chosen, rejected))

    def _records(self, file: TextFile) -> Iterator[Record]:
        keys = (self.prompt_field, self.chosen_field, self.rejected_field)
        return file.records([key for key in keys if key is not None])

    def pairs(self, file: TextFile, template: ChatTemplate | None) -> Iterator[tuple[Pair, int]]:
        """The pairs of a file, and the position in the file after each."""
        for record in self._records(file):
            yield self._pair(record, template), record.position

    def fields(self, record: Record) -> tuple[Any, Any, Any]:
        """Prompt (None without a `prompt_field`), chosen and rejected of a record; texts or lists of messages."""
        prompt = None if self.prompt_field is None else _text_or_messages(record, self.prompt_field)
        return (
            prompt,
            _text_or_messages(record, self.chosen_field),
            _text_or_messages(record, self.rejected_field),
        )

    def _pair(self, record: Record, template: ChatTemplate | None) -> Pair:
        prompt, chosen, rejected = self.fields(record)
        if isinstance(chosen, str) != isinstance(rejected, str) or (
            isinstance(chosen, str) and isinstance(prompt, list)
        ):
            raise ConfigError(
                f"{record.where}: '{self.chosen_field}' and '{self.rejected_field}' must both be lists of messages, or both"
                " be texts after a prompt that is a text"
            )
        if isinstance(chosen, str):
            return self._text_pair(record.where, prompt, chosen, rejected)
        if template is None:
            raise ConfigError(
                f"{record.where}: '{self.chosen_field}' is a list of messages, but the tokenizer has no chat template. Set"
                " data.format.chat_template"
            )
        return _rendered_pair(record.where, prompt, chosen, rejected, template)

    def _text_pair(self, where: str, prompt: str | None, chosen: str, rejected: str) -> Pair:
        if prompt is not None:
            return Pair(prompt, chosen, rejected, is_rendered=False)
        equal = itertools.takewhile(lambda two: two[0] == two[1], zip(chosen, rejected, strict=False))
        common, end_text = "".join(a for a, _ in equal), self.prompt_ends_with
        end = common.rfind(" " if end_text is None else end_text)
        if end < 0:
            raise ConfigError(
                f"{where}: no prompt: '{self.chosen_field}' and '{self.rejected_field}' begin alike with {common[-80:]!r},"
                f" without {'a space' if end_text is None else repr(end_text)}. Set data.format.prompt_field, or"
                " prompt_ends_with"
            )
        size = end + (0 if end_text is None else len(end_text))
        return Pair(chosen[:size], chosen[size:], rejected[size:], is_rendered=False)


def _text_or_messages(record: Record, key: str) -> str | Messages:
    value = record.values.get(key)
    if isinstance(value, str):
        return value
    if are_messages(value):
        return [{k: v for k, v in m.items() if v is not None} for m in value]
    given = f"it is {value!r:.80}" if key in record.values else f"the record has the keys {', '.join(record.values)}"
    raise ConfigError(f"{record.where}: no text and no list of messages under '{key}': {given}")


def _plain(content: str | Messages) -> str:
    return content if isinstance(content, str) else plain_text(content)


def _rendered_pair(
    where: str, prompt: str | Messages | None, chosen: Messages, rejected: Messages, template: ChatTemplate
) -> Pair:
    """Renders both conversations. Messages that both begin with belong to the prompt."""
    before = [{"role": _USER, "content": prompt}] if isinstance(prompt, str) else (prompt or [])
    # UltraFeedback and others repeat the prompt in the completions.
    conversations = [m if m[: len(before)] == before else [*before, *m] for m in (chosen, rejected)]
    # The last message of each list is its completion.
    leading = zip(conversations[0][:-1], conversations[1][:-1], strict=False)
    shared = [message for message, _ in itertools.takewhile(lambda two: two[0] == two[1], leading)]
    if not shared:
        raise ConfigError(f"{where}: no prompt: the two lists of messages begin differently")
    text = template.prompt(shared, where)
    wholes = [template.render(conversation, where, mark=False).text for conversation in conversations]
    if not all(whole.startswith(text) for whole in wholes):
        raise ConfigError(
            f"{where}: the completion cannot be located: the chat template ({template.origin}) renders the prompt differently"
            " without it. Use another template"
        )
    return Pair(text, wholes[0][len(text) :], wholes[1][len(text) :], is_rendered=True)


@dataclass(frozen=True)
class PairsEncoder(Encoder):
    """Tokenizes each pair as one document: prompt and chosen completion, then prompt and rejected completion.

    The target mask of both completions is set, so it also says where the second half begins. A text prompt and its completion
    are tokenized separately, so the prompt's tokens are the same as at inference. Rendered text is tokenized as a whole.
    """

    config: PairsFormat
    key: str
    tokenizer: Tokenizer
    template: ChatTemplate | None
    before: np.ndarray
    after: np.ndarray

    def read(self, file: TextFile) -> Iterator[RawContent]:
        for pair, position in self.config.pairs(file, self.template):
            texts = (pair.prompt, pair.chosen, pair.rejected)
            yield RawContent(pair, sum(map(len, texts)), sum(len(text.encode()) for text in texts), position)

    def encode(self, contents: Sequence[Any]) -> list[TokenizedText | None]:
        plain, rendered = ([pair for pair in contents if pair.is_rendered is kind] for kind in (False, True))
        halves = {False: iter(self._plain_halves(plain)), True: iter(self._rendered_halves(rendered))}
        return [_document(next(halves[pair.is_rendered]), next(halves[pair.is_rendered])) for pair in contents]

    def cache_key(self) -> dict[str, Any]:
        if self.template is None:
            return {}
        template = json.dumps([self.template.text, dict(self.template.names)])
        return {"chat_template": hashlib.sha256(template.encode()).hexdigest()}

    def no_targets_message(self) -> str:
        return (
            f"{self.key}: no pair has a prompt and two completions of at least one token each. Set data.enforce_bos and"
            " data.enforce_eos, or check the records"
        )

    def _plain_halves(self, pairs: Sequence[Pair]) -> Iterator[_Half]:
        ids = iter(self.tokenizer.encode_arrays([text for p in pairs for text in (p.prompt, p.chosen, p.rejected)]))
        for prompt, *completions in zip(ids, ids, ids, strict=True):
            for completion in completions:
                yield _half(np.concatenate([self.before, prompt]), np.concatenate([completion, self.after]))

    def _rendered_halves(self, pairs: Sequence[Pair]) -> Iterator[_Half]:
        texts = [p.prompt + completion for p in pairs for completion in (p.chosen, p.rejected)]
        prompts = [p.prompt for p in pairs for _ in (p.chosen, p.rejected)]
        for prompt, (ids, begins, _) in zip(prompts, self.tokenizer.encode_with_offsets(texts), strict=True):
            size = int(np.searchsorted(begins, len(prompt)))
            yield _half(ids[:size], ids[size:])


def _half(prompt: np.ndarray, completion: np.ndarray) -> _Half:
    is_target = np.arange(len(prompt) + len(completion)) >= len(prompt)
    return np.concatenate([prompt, completion]), is_target


def _document(chosen: _Half, rejected: _Half) -> TokenizedText | None:
    """Both halves as one document; None if one of them has no prompt or no completion."""
    ids, masks = zip(chosen, rejected, strict=True)
    if not all(mask.any() and not mask.all() for mask in masks):
        return None
    return TokenizedText(np.concatenate(ids), np.concatenate(masks))
