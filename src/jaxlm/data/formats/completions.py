"""Prompts with completions, on which the loss is computed, also with preferences or rewards; and prompts alone."""

import abc
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, NamedTuple

from annotated_types import Interval

from jaxlm.core.errors import ConfigError, counted, listed, shown
from jaxlm.core.field_types import LARGEST_INT, is_float32, what_float32_needs
from jaxlm.core.rules import Rules, only
from jaxlm.data.formats.base import Begin, Encoder, FormatConfig, MaskedFormat, RecordsFormat, Truncation
from jaxlm.data.formats.chat import OF_TEMPLATE, Messages, are_messages, for_template, plain_text, template_variables
from jaxlm.data.formats.segments import RawContent, Segment, Segments
from jaxlm.data.sources.record_files import Record, TextFile
from jaxlm.data.tokenizer.chat_template import ChatTemplate
from jaxlm.reading.choices import choice

_SYSTEM, _USER, _ASSISTANT = "system", "user", "assistant"


class Completions(NamedTuple):
    """A prompt and its completions before tokenization.

    Attributes:
        prompt: a text, which the template ends with the header of the assistant's answer. Before it is rendered, it may be a
            list of messages, or None if all completions begin with it.
        completions: texts, or lists of messages, equally many for all records of a source.
        is_rendered: a chat template wrote all special tokens; otherwise BOS and EOS are added and the texts have none.
        numbers: numbers that belong to the record.
    """

    prompt: Any
    completions: tuple[Any, ...]
    is_rendered: bool = False
    numbers: tuple[float, ...] = ()


@dataclass(frozen=True)
class PromptedFormat(RecordsFormat):
    """Records with a prompt and one or more completions.

    Attributes:
        chat_template: for messages: `chatml`, `nanochat`, a Jinja template, or the path of a .jinja file; null uses the
            tokenizer's chat template.
    """

    bos_policy: ClassVar[Begin] = "prompt"

    chat_template: str | None = field(default=None, kw_only=True)

    def read(self, file: TextFile, encoder: Encoder) -> Iterator[RawContent]:
        for record in self.records(file):
            content = _rendered(record, self.completions(record), self.keys, encoder.template)
            is_rendered = content.is_rendered
            pairs = [self.segments(content.prompt, one, encoder, is_rendered) for one in content.completions]
            sequences = [encoder.sequence(*pair, is_rendered=is_rendered) for pair in pairs]
            segments = Segments(sequences, is_rendered, numbers=content.numbers)
            yield RawContent.of(record, (content.prompt, *content.completions), segments)

    def texts(self, file: TextFile) -> Iterator[str]:
        for record in self.records(file):
            content = self.completions(record)
            yield from (plain_text(content.prompt or "") + plain_text(one) for one in content.completions)

    @property
    def optional_keys(self) -> tuple[str, ...]:
        """The keys that a record may lack."""
        return ()

    def records(self, file: TextFile) -> Iterator[Record]:
        """Reads the records of a file."""
        optional = self.optional_keys
        return file.records([key for key in self.keys if key not in optional], [*optional, *OF_TEMPLATE])

    @abc.abstractmethod
    def completions(self, record: Record) -> Completions:
        """The prompt and the completions of a record, as it has them. Raises `ConfigError` if it has none."""

    @abc.abstractmethod
    def segments(self, prompt: str, completion: str, encoder: Encoder, is_rendered: bool) -> tuple[Segment, Segment]:
        """The segments of a prompt and a completion as texts."""


@dataclass(frozen=True)
class CompletionsFormat(PromptedFormat):
    """Records whose completions are an example together."""

    @property
    @abc.abstractmethod
    def num_completions(self) -> int:
        """Number of completions of each record."""

    def segments(self, prompt: str, completion: str, encoder: Encoder, is_rendered: bool) -> tuple[Segment, Segment]:
        """A sequence begins with a token that is not trained, and ends with one that is: BOS and EOS are enough."""
        needs = [is_rendered or not len(ids) for ids in (encoder.before, encoder.after)]
        return Segment(prompt, False, needed=needs[0]), Segment(completion, needed=needs[1])

    def no_targets_message(self, encoder: Encoder) -> str:
        return (
            f"{encoder.key}: no record has a prompt and {counted(self.num_completions, 'completion')} of at least one token"
            " each. Set data.enforce_bos and data.enforce_eos, or check the records"
        )

    @property
    def documents_per_sequence(self) -> int | None:
        return 1


def _text_or_messages(record: Record, key: str) -> str | Messages:
    """The value under a key of a record. Raises `ConfigError` if it is neither a text nor a list of messages."""
    value = record.values.get(key)
    if isinstance(value, str):
        return value
    if are_messages(value):
        return for_template(value)
    problem = f"it is {value!r:.80}" if key in record.values else f"the record has the keys {listed(record.values)}"
    raise ConfigError(f"{record.where}: no text and no list of messages under '{key}': {problem}")


def _rendered(record: Record, content: Completions, keys: Sequence[str], template: ChatTemplate | None) -> Completions:
    """The texts of what a record has under `keys`. Without a prompt, it is the messages that all completions begin with;
    without completions, the template ends with the header of an answer."""
    prompt, are_texts = content.prompt, [isinstance(completion, str) for completion in content.completions]
    if all(are_texts) and isinstance(prompt, str):
        return content
    key = next(key for key in keys if are_messages(record.values.get(key)))
    if any(are_texts):
        raise ConfigError(
            f"{record.where}: '{key}' is a list of messages, and a completion is a text. Make the completions lists of"
            " messages, or texts after a prompt that is a text"
        )
    where = record.where
    if template is None:
        raise ConfigError(
            f"{where}: '{key}' is a list of messages, but the tokenizer has no chat template. Set data.format.chat_template"
        )
    variables = template_variables(record, template)
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


@choice(FormatConfig, "supervised")
class SupervisedFormat(MaskedFormat, PromptedFormat):
    """Records with a prompt and a completion, as texts or as lists of messages. Texts are tokenized separately, so the
    prompt's tokens are the same as at inference, and the loss is also computed on the EOS token. The chat template renders
    messages.

    Attributes:
        input_field: key of the prompt.
        output_field: key of the completion.
        context_field: key of a text that follows the prompt after a line break, unless it is empty, such as Alpaca's `input`.
        separate_with: text inserted between prompt and completion, as part of the prompt; null inserts nothing.
        mask_inputs: compute the loss on the completion only; `false` computes it on the prompt too.
    """

    input_field: str = "prompt"
    output_field: str = "response"
    separate_with: str | None = None
    mask_inputs: bool = True
    context_field: str | None = None

    newer_keys: ClassVar[tuple[str, ...]] = ("context_field", "chat_template")

    def prompt(self, record: Record) -> str | Messages:
        """Writes the prompt, including the context and `separate_with`. Raises `ConfigError` if there is none."""
        prompt, key = _text_or_messages(record, self.input_field), self.context_field
        context = "" if key is None or record.values.get(key, key) is None else _text_or_messages(record, key)
        if isinstance(prompt, str) and isinstance(context, str):
            return "\n".join(filter(None, (prompt, context))) + (self.separate_with or "")
        if context:
            raise ConfigError(
                f"{record.where}: '{key}' (context_field): only a text can follow a prompt, which is a text"
            )
        return prompt

    def completions(self, record: Record) -> Completions:
        return Completions(self.prompt(record), (_text_or_messages(record, self.output_field),))

    def segments(self, prompt: str, completion: str, encoder: Encoder, is_rendered: bool) -> tuple[Segment, Segment]:
        return Segment(prompt, not self.mask_inputs), Segment(completion, needed=True)

    def no_targets_message(self, encoder: Encoder) -> str:
        return (
            f"{encoder.key}: every completion under '{self.output_field}' is empty: no tokens to compute the loss on. Check"
            " the records"
        )


_PROMPT = "prompt"
_WHITE_SPACE = re.compile(r"\s")


@choice(FormatConfig, "pairs")
class PairsFormat(CompletionsFormat):
    """Records with a chosen and a rejected completion, as texts or as lists of messages, for `data.type: pairs`.

    Attributes:
        prompt_field: key of the prompt. Records without the key `prompt` have it in both completions, as in
            `Anthropic/hh-rlhf`: it is what they begin with, up to the last white space, so that no token is cut. Null
            finds it there even if there is such a key.
        chosen_field: key of the preferred completion.
        rejected_field: key of the other completion.
        prompt_ends_with: with `prompt_field: null`, the text that ends the prompt, such as `"\\\\n\\\\nAssistant:"`. The
            prompt ends after its last occurrence in what both completions have in common; null ends it at the last white
            space.
            For messages it has no effect: the prompt is all messages that both lists begin with.
        truncation: what becomes of a prompt with a completion that is longer than `model.seq_len`: `keep_start` cuts off its
            end, `keep_end` its beginning, and `drop_overlength` leaves the pair out.
    """

    key_rules: ClassVar[Rules] = (only("prompt_ends_with", when="prompt_field", is_=None),)
    produces: ClassVar[str] = "pairs"

    prompt_field: str | None = _PROMPT
    chosen_field: str = "chosen"
    rejected_field: str = "rejected"
    prompt_ends_with: str | None = None
    truncation: Truncation = field(default="keep_start", kw_only=True)

    def __post_init__(self):
        if self.prompt_ends_with == "":
            raise ConfigError(
                "prompt_ends_with: '' given, a text expected. Null ends the prompt at the last white space"
            )

    @property
    def overlong(self) -> Truncation:
        return self.truncation

    @property
    def num_completions(self) -> int:
        return 2

    @property
    def optional_keys(self) -> tuple[str, ...]:
        # Only the usual key may be missing: another one was written by somebody whose data should have it.
        return (_PROMPT,) if self.prompt_field == _PROMPT else ()

    def completions(self, record: Record) -> Completions:
        is_absent = self.prompt_field == _PROMPT and record.values.get(_PROMPT) is None
        prompt = None if self.prompt_field is None or is_absent else _text_or_messages(record, self.prompt_field)
        chosen, rejected = (_text_or_messages(record, key) for key in (self.chosen_field, self.rejected_field))
        if prompt is None and isinstance(chosen, str) and isinstance(rejected, str):
            return self._text_pair(record.where, chosen, rejected)
        return Completions(prompt, (chosen, rejected))

    def _text_pair(self, where: str, chosen: str, rejected: str) -> Completions:
        equal = itertools.takewhile(lambda two: two[0] == two[1], zip(chosen, rejected, strict=False))
        common = "".join(a for a, _ in equal)
        size = self._prompt_size(common)
        if not size:
            without = f", without {self.prompt_ends_with!r}" if common and self.prompt_ends_with else ""
            raise ConfigError(
                f"{where}: no prompt: '{self.chosen_field}' and '{self.rejected_field}' begin alike with {common[-80:]!r}"
                f"{without}. Set data.format.prompt_field to the key of the prompt, or prompt_ends_with"
            )
        return Completions(chosen[:size], (chosen[size:], rejected[size:]))

    def _prompt_size(self, common: str) -> int:
        """The number of characters of the prompt in what both completions begin with; 0 without any."""
        if self.prompt_ends_with:
            end = common.rfind(self.prompt_ends_with)
            return 0 if end < 0 else end + len(self.prompt_ends_with)
        # TRL ends the prompt at the first character that differs, which may be inside of a token. What both completions
        # share after the white space has the same likelihood in both. A space belongs to the word that follows.
        spaces = [match.start() for match in _WHITE_SPACE.finditer(common)]
        return len(common) if not spaces else spaces[-1] + (common[spaces[-1]] != " ")


@choice(FormatConfig, "unpaired")
class UnpairedFormat(CompletionsFormat):
    """Records with a prompt, a completion and a label, for `data.type: unpaired`. Prompt and completion are texts, or lists
    of messages.

    Attributes:
        prompt_field: key of the prompt.
        completion_field: key of the completion.
        label_field: key of the label: true (or 1) for a desirable completion, false (or 0) for another.
    """

    produces: ClassVar[str] = "unpaired"

    prompt_field: str = "prompt"
    completion_field: str = "completion"
    label_field: str = "label"

    @property
    def num_completions(self) -> int:
        return 1

    def completions(self, record: Record) -> Completions:
        label = record.values.get(self.label_field)
        if label not in (0, 1):  # True and False are equal to them
            raise ConfigError(
                f"{record.where}: expected true or false under '{self.label_field}', got {label!r:.80}. Keys of the record:"
                f" {listed(record.values)}"
            )
        prompt, completion = (_text_or_messages(record, key) for key in (self.prompt_field, self.completion_field))
        return Completions(prompt, (completion,), numbers=(float(label),))


@choice(FormatConfig, "groups")
class GroupsFormat(CompletionsFormat):
    """Records with a prompt, a list of responses to it and a list of their rewards, for `data.type: groups`. The prompt is a
    text or a list of messages; the responses are texts.

    Attributes:
        group_size: number of responses in each record.
        prompt_field: key of the prompt.
        responses_field: key of the list of responses.
        rewards_field: key of the list of rewards.
    """

    produces: ClassVar[str] = "groups"

    group_size: Annotated[int, Interval(ge=2, le=LARGEST_INT)] = 4
    prompt_field: str = "prompt"
    responses_field: str = "responses"
    rewards_field: str = "rewards"

    @property
    def num_completions(self) -> int:
        return self.group_size

    def completions(self, record: Record) -> Completions:
        prompt = _text_or_messages(record, self.prompt_field)
        responses = self._list(record, self.responses_field, "texts", lambda item: isinstance(item, str))
        rewards = self._list(record, self.rewards_field, "numbers", lambda item: type(item) in (int, float))
        for number, reward in enumerate(rewards):
            if not is_float32(reward):
                raise ConfigError(
                    f"{record.where}: {self.rewards_field}[{number}]: {shown(reward)} given, {what_float32_needs(reward)}"
                    " expected. Correct the record, or remove it"
                )
        if not isinstance(prompt, str):
            responses = [[{"role": "assistant", "content": response}] for response in responses]
        return Completions(prompt, tuple(responses), numbers=tuple(map(float, rewards)))

    def _list(self, record: Record, key: str, what: str, accepts: Any) -> list[Any]:
        entries = record.values.get(key)
        if not isinstance(entries, list) or len(entries) != self.group_size or not all(map(accepts, entries)):
            raise ConfigError(
                f"{record.where}: expected a list of {self.group_size} {what} under '{key}' (data.format.group_size), got"
                f" {entries!r:.80}. Keys of the record: {listed(record.values)}"
            )
        return entries


@choice(FormatConfig, "prompts")
class PromptsFormat(RecordsFormat):
    """Records with a prompt, as a text or a list of messages, for `data.type: rollouts`. Rewards see the other keys of the
    record.

    Attributes:
        prompt_field: key of the prompt.
        chat_template: for messages: `chatml`, `nanochat`, a Jinja template, or the path of a .jinja file; null uses the
            tokenizer's chat template. It renders them up to the header of the assistant's answer,
            or to the end of the one that they end with.
    """

    produces: ClassVar[str] = "prompts"
    bos_policy: ClassVar[Begin] = "prompt"

    prompt_field: str = "prompt"
    chat_template: str | None = None

    @property
    def documents_per_sequence(self) -> int | None:
        return 1

    def read(self, file: TextFile, encoder: Encoder) -> Iterator[RawContent]:
        key = self.prompt_field
        for record in file.records((key,), OF_TEMPLATE):
            content = Completions(_text_or_messages(record, key), ())
            text, _, is_rendered, _ = _rendered(record, content, (key,), encoder.template)
            prompt = Segment(text, needed=is_rendered or not len(encoder.before))
            sequence = encoder.sequence(prompt, is_rendered=is_rendered)
            # Leaving it out would shift the records that follow.
            refusal = (
                f"{record.where}: the prompt under '{key}' has no token. Set data.enforce_bos, or remove the record"
            )
            segments = Segments([sequence], is_rendered, is_masked=False, refusal=refusal)
            yield RawContent.of(record, (text,), segments)

    def no_targets_message(self, encoder: Encoder) -> str:
        return f"{encoder.key}: no records found. Check the files"

    def texts(self, file: TextFile) -> Iterator[str]:
        for record in file.records((self.prompt_field,)):
            yield plain_text(_text_or_messages(record, self.prompt_field))
