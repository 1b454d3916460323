"""Prompts with several completions each; the loss is computed on the completions. Formats of such records extend this."""

import abc
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np

from jaxlm.core.errors import ConfigError, counted, listed
from jaxlm.data.formats.base import Begin, Encoder, FormatConfig, RawContent, RecordsFormat, TokenizedText
from jaxlm.data.formats.chat import Messages, are_messages, for_template, plain_text, template_variables
from jaxlm.data.sources.record_files import Record
from jaxlm.data.sources.text_file import TextFile
from jaxlm.data.tokenizer.chat_template import ChatTemplate
from jaxlm.data.tokenizer.tokenizer import Tokenizer, boundary_ids

_SYSTEM, _USER, _ASSISTANT = "system", "user", "assistant"
_Sequence = tuple[np.ndarray, np.ndarray]  # ids of a prompt and a completion


class Completions(NamedTuple):
    """A prompt and its completions before tokenization.

    Attributes:
        prompt: a text, which the template ends with the header of the assistant's answer. Before it is rendered, it may be a
            list of messages, or None if all completions begin with it.
        completions: texts, or lists of messages, equally many for all records of a source.
        is_rendered: a chat template wrote all special tokens; otherwise BOS and EOS are added and the texts have none.
        numbers: numbers that belong to the record.
        trains_prompt: compute the loss on the prompt too.
        trains_empty: train a completion without text, of which only EOS is left.
    """

    prompt: Any
    completions: tuple[Any, ...]
    is_rendered: bool = False
    numbers: tuple[float, ...] = ()
    trains_prompt: bool = False
    trains_empty: bool = True


@dataclass(frozen=True)
class PromptedFormat(RecordsFormat):
    """Records with a prompt and one or more completions.

    Attributes:
        chat_template: for messages: `chatml`, `nanochat`, a Jinja template, or the path of a .jinja file; null uses the
            tokenizer's chat template.
    """

    begins_as: ClassVar[Begin] = "prompt"

    chat_template: str | None = field(default=None, kw_only=True)

    def encoder(self, tokenizer: Tokenizer, *, bos: bool | None, eos: bool, key: str) -> Encoder:
        template = template_of(self, tokenizer, key)
        return CompletionsEncoder(self, key, tokenizer, template, *boundary_ids(tokenizer, bos=bos, eos=eos))

    def texts(self, file: TextFile) -> Iterator[str]:
        for record in self.records(file):
            content = self.completions(record)
            yield from (plain_text(content.prompt or "") + plain_text(one) for one in content.completions)

    @abc.abstractmethod
    def records(self, file: TextFile) -> Iterator[Record]:
        """Reads the records of a file."""

    @abc.abstractmethod
    def completions(self, record: Record) -> Completions:
        """The prompt and the completions of a record, as it has them. Raises `ConfigError` if it has none."""

    @abc.abstractmethod
    def nothing_to_train_on(self) -> str:
        """What is missing if no record has a prompt and completions, with advice, for the error message."""


@dataclass(frozen=True)
class CompletionsFormat(PromptedFormat):
    """Records whose completions are an example together."""

    @property
    @abc.abstractmethod
    def num_completions(self) -> int:
        """Number of completions of each record."""

    def nothing_to_train_on(self) -> str:
        return (
            f"no record has a prompt and {counted(self.num_completions, 'completion')} of at least one token each. Set"
            " data.enforce_bos and data.enforce_eos, or check"
        )

    @property
    def documents_per_sequence(self) -> int | None:
        return 1


def template_of(config: FormatConfig, tokenizer: Tokenizer, key: str) -> ChatTemplate | None:
    """The chat template for messages; None if neither the format nor the tokenizer has one, which only texts do without."""
    if config.given_template() is None and tokenizer.chat_template is None:
        return None
    return ChatTemplate.load(config.given_template(), tokenizer, f"{key}.chat_template")


def text_or_messages(record: Record, key: str) -> str | Messages:
    """The value under a key of a record. Raises `ConfigError` if it is neither a text nor a list of messages."""
    value = record.values.get(key)
    if isinstance(value, str):
        return value
    if are_messages(value):
        return for_template(value)
    problem = f"it is {value!r:.80}" if key in record.values else f"the record has the keys {listed(record.values)}"
    raise ConfigError(f"{record.where}: no text and no list of messages under '{key}': {problem}")


def checked_template(template: ChatTemplate | None, where: str, key: str) -> ChatTemplate:
    """The template. Raises `ConfigError` if there is none. Args: key: the key of the record that has messages."""
    if template is None:
        raise ConfigError(
            f"{where}: '{key}' is a list of messages, but the tokenizer has no chat template. Set data.format.chat_template"
        )
    return template


def rendered(record: Record, content: Completions, keys: Sequence[str], template: ChatTemplate | None) -> Completions:
    """The texts of what a record has under `keys`. Without a prompt, it is the messages that all completions begin with."""
    prompt, are_texts = content.prompt, [isinstance(completion, str) for completion in content.completions]
    if all(are_texts) and isinstance(prompt, str):
        return content
    key = next(key for key in keys if are_messages(record.values.get(key)))
    if any(are_texts):
        raise ConfigError(
            f"{record.where}: '{key}' is a list of messages, and a completion is a text. Make the completions lists of"
            " messages, or texts after a prompt that is a text"
        )
    template = checked_template(template, record.where, key)
    where, variables = record.where, template_variables(record, template)
    before = [{"role": _USER, "content": prompt}] if isinstance(prompt, str) else (prompt or [])
    conversations = [_joined(before, messages, where) for messages in content.completions]
    # The last message of each list is its completion.
    leading = zip(*(conversation[:-1] for conversation in conversations), strict=False)
    equal = itertools.takewhile(lambda several: all(_is_same(one, several[0]) for one in several), leading)
    shared = [several[0] for several in equal]
    if before and all(messages[0]["role"] == _ASSISTANT for messages in content.completions):
        shared = before
    if not shared:
        raise ConfigError(f"{where}: no prompt: the lists of messages begin differently")
    for conversation in conversations:
        roles = [message["role"] for message in conversation[len(shared) :]]
        if _ASSISTANT not in roles:
            raise ConfigError(
                f"{where}: a completion has no message with the role '{_ASSISTANT}': its messages after the prompt have the"
                f" roles {', '.join(roles)}. Remove the record, or rename the roles"
            )
    text = template.prompt(shared, where, variables)
    conversations = [[*shared, *conversation[len(shared) :]] for conversation in conversations]
    wholes = [template.render(c, where, mark=False, variables=variables).text for c in conversations]
    if not all(whole.startswith(text) for whole in wholes):
        raise ConfigError(
            f"{where}: the completion cannot be located: the chat template ({template.origin}) renders the prompt differently"
            " without it. Use another template"
        )
    return content._replace(prompt=text, completions=tuple(whole[len(text) :] for whole in wholes), is_rendered=True)


def _joined(prompt: Messages, messages: Messages, where: str) -> Messages:
    """A conversation of a prompt, and of a list that continues it, or repeats it in part or as a whole.

    UltraFeedback and others repeat the prompt in the completions, some with a system message or earlier turns before it.
    """
    if not prompt or messages[0]["role"] not in (_SYSTEM, _USER):
        return [*prompt, *messages]
    for begin in range(len(messages) - len(prompt)):
        if all(map(_is_same, prompt, messages[begin:])):
            return messages
    sizes = range(min(len(prompt), len(messages) - 1), -1, -1)
    repeated = next(n for n in sizes if all(map(_is_same, prompt[len(prompt) - n :], messages)))
    after = messages[repeated:]
    roles = prompt[-1]["role"], after[0]["role"]
    if roles[1] == _SYSTEM or roles == (_USER, _USER):
        raise ConfigError(
            f"{where}: two prompts: {prompt[-1].get('content')!r:.80} is not in the messages beside it, which begin with"
            f" {messages[0].get('content')!r:.80}. Correct the record, or set data.format.prompt_field to null or another key"
        )
    return [*prompt, *after]


def _is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    contents = [m["content"].strip() if isinstance(m.get("content"), str) else m.get("content") for m in (one, other)]
    return contents[0] == contents[1] and {**one, "content": None} == {**other, "content": None}


@dataclass(frozen=True)
class CompletionsEncoder(Encoder):
    """Tokenizes each record as one document: the prompt and its first completion, the prompt and its second, and so on.

    The target mask of all completions is set, so it also says where the next sequence begins. A text prompt and its
    completion are tokenized separately, so the prompt's tokens are the same as at inference. Rendered text is tokenized as a
    whole.
    """

    config: PromptedFormat
    key: str
    tokenizer: Tokenizer
    template: ChatTemplate | None
    before: np.ndarray
    after: np.ndarray

    def read(self, file: TextFile) -> Iterator[RawContent]:
        for record in self.config.records(file):
            content = rendered(record, self.config.completions(record), self.config.keys, self.template)
            texts = (content.prompt, *content.completions)
            num_bytes = sum(len(text.encode()) for text in texts)
            yield RawContent(content, sum(map(len, texts)), num_bytes, record.position, record.where)

    def encode(self, contents: Sequence[Any]) -> list[TokenizedText | None]:
        plain, rendered = ([content for content in contents if content.is_rendered is kind] for kind in (False, True))
        sequences = {False: self._plain(plain), True: self._rendered(rendered)}
        return [
            self._document(content, [next(sequences[content.is_rendered]) for _ in content.completions])
            for content in contents
        ]

    def cache_key(self) -> dict[str, Any]:
        return {} if self.template is None else self.template.cache_key()

    def no_targets_message(self) -> str:
        return f"{self.key}: {self.config.nothing_to_train_on()} the records"

    def _plain(self, contents: Sequence[Completions]) -> Iterator[_Sequence]:
        ids = iter(self.tokenizer.encode_arrays([t for c in contents for t in (c.prompt, *c.completions)]))
        for content in contents:
            prompt = next(ids)
            for completion in itertools.islice(ids, len(content.completions)):
                yield np.concatenate([self.before, prompt]), completion

    def _rendered(self, contents: Sequence[Completions]) -> Iterator[_Sequence]:
        texts = [c.prompt + completion for c in contents for completion in c.completions]
        prompts = [c.prompt for c in contents for _ in c.completions]
        for prompt, (ids, begins, _) in zip(prompts, self.tokenizer.encode_with_offsets(texts), strict=True):
            size = int(np.searchsorted(begins, len(prompt)))
            yield ids[:size], ids[size:]

    def _document(self, content: Completions, sequences: Sequence[_Sequence]) -> TokenizedText | None:
        """All sequences as one document; None if one of them has no prompt or no completion."""
        ids, masks = [], []
        for prompt, completion in sequences:
            ends = completion if content.is_rendered else np.concatenate([completion, self.after])
            needed = (prompt, ends) if content.trains_empty else (completion,)
            if not all(map(len, needed)):
                return None
            ids += [prompt, ends]
            masks += [np.full(len(prompt), content.trains_prompt), np.ones(len(ends), bool)]
        numbers = np.array(content.numbers, np.float32) if content.numbers else None
        return TokenizedText(np.concatenate(ids), np.concatenate(masks), numbers)
