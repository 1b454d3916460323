"""Conversations, rendered by a chat template; the loss is computed on the assistant's messages."""

import abc
import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, TypeGuard

from jaxlm.core.errors import ConfigError, listed
from jaxlm.core.safe_io import parse_json
from jaxlm.data.formats.base import Begin, Encoder, FormatConfig, MaskedFormat
from jaxlm.data.formats.segments import RawContent, Segment, Segments
from jaxlm.data.sources.record_files import Record, TextFile
from jaxlm.data.tokenizer.chat_template import ChatTemplate
from jaxlm.data.tokenizer.rendering import GIVEN, ToolArguments
from jaxlm.data.tokenizer.tokenizer import Tokenizer
from jaxlm.reading.choices import choice

Messages = list[dict[str, Any]]
TOOLS, VARIABLES = "tools", "chat_template_kwargs"
OF_TEMPLATE = (TOOLS, VARIABLES)
"""Keys of records with messages, for their chat template."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of messages for what the assistant thinks: a template reads one of them."""
TRAINED_IF = ("weight", "train", "training", "train_detail")
"""Keys of messages that say whether an answer is trained, or with what begins and ends in it."""


@dataclass(frozen=True)
class ConversationFormat(MaskedFormat):
    """Base of formats with conversations. The chat template determines every token: no BOS or EOS is added, and special
    tokens written by the template are the tokenizer's.

    Attributes:
        chat_template: `chatml`, `nanochat`, a Jinja template, or the path of a .jinja file; null uses the tokenizer's chat
            template.
        mask_user_turns: compute the loss only on the assistant's text: what the template puts inside `{% generation %}`, or,
            without such a block, what each assistant message adds to the conversation before it. `false` computes the loss
            on every token.
        tools_field: key of the tools that a conversation may call: a list, or a text with a list in JSON. The template gets
            it as `tools`. Records without the key have none. Null is `tools`, if the template reads them.
    """

    bos_policy: ClassVar[Begin] = "template"
    keys_of_turns: ClassVar[tuple[str, ...]] = ("role", "content", *TRAINED_IF)
    newer_keys: ClassVar[tuple[str, ...]] = ("tools_field",)

    chat_template: str | None = field(default=None, kw_only=True)
    mask_user_turns: bool = field(default=True, kw_only=True)
    tools_field: str | None = field(default=None, kw_only=True)

    @property
    @abc.abstractmethod
    def key_of_messages(self) -> str:
        """The key of the conversation in a record."""

    @abc.abstractmethod
    def messages(self, record: Record) -> Messages:
        """The conversation of a record. Raises `ConfigError` if it has none."""

    def template(self, tokenizer: Tokenizer, key: str) -> ChatTemplate:
        template = ChatTemplate.load(self.chat_template, tokenizer, f"{key}.chat_template")
        if self.tools_field is not None and TOOLS not in template.reads.variables:
            raise ConfigError(
                f"{key}.tools_field: '{self.tools_field}' given, but the chat template reads no tools. Remove it, or set"
                " chat_template to one that has the variable `tools`"
            )
        return template

    def read(self, file: TextFile, encoder: Encoder) -> Iterator[RawContent]:
        template = encoder.template
        assert template is not None, "see `template`"
        for record, messages in self.conversations(file):
            mark, untrained = self.mask_user_turns, _untrained(messages, record.where)
            if untrained and not mark:
                raise ConfigError(
                    f"{record.where}: message {untrained[0] + 1} is not to be trained, but {encoder.key}.mask_user_turns is"
                    " false, which trains every token. Set it to true, or remove the record"
                )
            variables = template_variables(record, template, self.tools_field or TOOLS)
            rendered = template.render(messages, record.where, mark=mark, variables=variables, without=untrained)
            segment = Segment(rendered.text, spans=rendered.target_spans)
            yield RawContent.of(record, (rendered.text,), Segments([[segment]], is_rendered=True))

    def no_targets_message(self, encoder: Encoder) -> str:
        template = encoder.template
        assert template is not None, "see `template`"
        if template.reads.marks:
            why = "its {% generation %} block is empty in all of them. Fix the block, or remove it: the loss is then"
            why += " computed on what each assistant message adds to the conversation"
        else:
            why = "none of their messages has the role 'assistant' and text that the template renders"
        return (
            f"{encoder.key}: the chat template ({template.origin}) marks no assistant tokens in the conversations read so"
            f" far: {why}. Or set mask_user_turns to false to compute the loss on every token"
        )

    def texts(self, file: TextFile) -> Iterator[str]:
        for _, messages in self.conversations(file):
            yield plain_text(messages)

    def conversations(self, file: TextFile) -> Iterator[tuple[Record, Messages]]:
        """Reads the conversations of a file, each with its record."""
        optional = [key for key in self.keys if key != self.key_of_messages]
        for record in file.records((self.key_of_messages,), [*optional, *OF_TEMPLATE]):
            yield record, for_template(self.messages(record))


@choice(FormatConfig, "chat")
class ChatFormat(ConversationFormat):
    """Records with a list of messages, each with a `role` and a `content`.

    Attributes:
        messages_field: key of the list of messages.
    """

    messages_field: str = "messages"

    @property
    def key_of_messages(self) -> str:
        return self.messages_field

    def messages(self, record: Record) -> Messages:
        return given_messages(record, self.messages_field)


def are_messages(value: Any) -> TypeGuard[Messages]:
    """Tells whether a value is a list of messages, each with a role."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in value)
    )


def given_messages(record: Record, key: str) -> Messages:
    """Reads the messages under a key of a record. Raises `ConfigError` if there are none."""
    messages = record.values.get(key)
    if not are_messages(messages):
        turns = messages if isinstance(messages, list) else []
        is_sharegpt = bool(turns) and all(isinstance(turn, Mapping) and "from" in turn for turn in turns)
        raise ConfigError(
            f"{record.where}: no messages under '{key}': expected a list of messages, each with a"
            f" 'role' and a 'content', got {messages!r:.80}. Keys of the record: {listed(record.values)}"
            + (". For messages with 'from' and 'value', set format.type to sharegpt" if is_sharegpt else "")
        )
    return messages


def for_template(messages: Sequence[Mapping[str, Any]]) -> Messages:
    """Messages as a chat template gets them: see `_cleaned`. The texts of a content that has only texts are joined."""
    cleaned = _cleaned(messages)
    for message in cleaned:
        if thoughts := [message[name] for name in REASONING if name in message]:  # as transformers gives them
            message.update({"thinking": message.get("thinking", thoughts[0]), "reasoning_content": thoughts[0]})
        if isinstance(parts := message.get("content"), list):
            texts = [part.get("text", "") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
            is_text = len(texts) == len(parts) and all(isinstance(text, str) for text in texts)
            message["content"] = "".join(texts) if is_text else parts
    return cleaned


def _cleaned(value: Any) -> Any:
    """Copies a value so that no mapping has a null, and the arguments of calls are mappings.

    Tables have nulls for keys that only other records have, and cannot say which of them somebody wrote. So that JSON gives
    the same tokens, its nulls are left out too. Those in texts with JSON, as OpenAI writes arguments, stay.
    """

    def clean(values: dict[str, Any]) -> dict[str, Any]:
        kept = {key: item for key, item in values.items() if item is not None}
        arguments = _parsed(given := kept.get("arguments"))
        if "name" in kept and isinstance(arguments, dict):
            text = given if isinstance(given, str) else json.dumps(arguments, ensure_ascii=False)
            kept["arguments"] = ToolArguments(arguments, text)
        return kept

    return json.loads(json.dumps(value, default=str), object_hook=clean)


def _parsed(value: Any) -> Any:
    """Parses a text that is JSON; returns other values as they are."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return parse_json(value) if value.strip() else None
    return value


def template_variables(record: Record, template: ChatTemplate, tools_field: str = TOOLS) -> dict[str, Any]:
    """Collects what the template gets of a record beside messages: its tools, and the variables in TRL's column of them."""
    tools = (_parsed(record.values.get(tools_field)) if TOOLS in template.reads.variables else None) or []
    variables = _parsed(record.values.get(VARIABLES)) or {}
    if not isinstance(tools, list) or not isinstance(variables, dict) or not variables.keys().isdisjoint(GIVEN):
        raise ConfigError(
            f"{record.where}: expected a list of tools under '{tools_field}' and a mapping under '{VARIABLES}' without"
            f" {', '.join(GIVEN)}, or texts with them in JSON, got {tools!r:.80} and {variables!r:.80}. Correct the record,"
            " or rename the keys"
        )
    return {**_cleaned(variables), TOOLS: _cleaned(tools) or None}


def _untrained(messages: Messages, where: str) -> list[int]:
    """Finds the numbers of messages that are not to be trained, as OpenAI's, ShareGPT's and Axolotl's files say it."""
    given = [(n, key, m["role"], m[key]) for n, m in enumerate(messages) for key in TRAINED_IF if m.get(key, []) != []]
    first: dict[int, tuple[str, Any]] = {}
    for number, key, role, value in given:
        if value not in (0, 1) or (value and key != "weight" and role != "assistant"):
            raise ConfigError(
                f"{where}: message {number + 1}: {key}: {value!r:.40} given for the role '{role}'. Only answers of the"
                " assistant are trained (1), or not (0), each as a whole. Correct the record"
            )
        other, said = first.setdefault(number, (key, value))
        if said != value:
            raise ConfigError(
                f"{where}: message {number + 1}: {other}: {said!r} and {key}: {value!r} given. One of them says that the"
                " message is trained, the other that it is not. Correct the record"
            )
    return [number for number, _, _, value in given if not value]


def renders_messages(config: FormatConfig, files: Iterable[TextFile]) -> bool:
    """Returns whether a chat template writes tokens: in formats of conversations, and in others if a record has messages."""
    if config.bos_policy == "template":
        return True
    records = (record for file in files for record in file.records((), config.keys))
    return any(_has_mapping(record.values.get(key)) for record in records for key in config.keys)


def _has_mapping(value: Any) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, list) and any(map(_has_mapping, value)))


def plain_text(content: str | Messages) -> str:
    """A text, or the text of messages without any template. Parts of a content count with their texts."""
    return content if isinstance(content, str) else "\n".join(map(_content_text, content))


def _content_text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    parts = content if isinstance(content, list) else [{"text": content}]
    return "".join(str(part.get("text") or "") for part in parts if isinstance(part, Mapping))


_FROM, _VALUE = "from", "value"
_ROLES = MappingProxyType(
    {
        "human": "user",
        "user": "user",
        "gpt": "assistant",
        "chatgpt": "assistant",
        "assistant": "assistant",
        "system": "system",
        "tool": "tool",
        "observation": "tool",
    }
)


@choice(FormatConfig, "sharegpt")
class ShareGptFormat(ConversationFormat):
    """Records with a list of turns, each with `from` (`human`, `gpt`, `system` or `tool`) and `value`. The chat template gets
    them as messages with a `role` (`user`, `assistant`, `system` or `tool`) and a `content`.

    Attributes:
        conversations_field: key of the list of turns.
        roles: the roles of further names under `from`, or other ones for the usual names.
        system_field: key of the system message, for conversations that do not begin with one. Null reads none.
    """

    keys_of_turns: ClassVar[tuple[str, ...]] = (_FROM, _VALUE, *TRAINED_IF)
    newer_keys: ClassVar[tuple[str, ...]] = ("tools_field", "system_field")

    conversations_field: str = "conversations"
    roles: dict[str, str] = field(default_factory=dict)
    system_field: str | None = "system"

    @property
    def key_of_messages(self) -> str:
        return self.conversations_field

    def messages(self, record: Record) -> Messages:
        turns, roles = record.values.get(self.conversations_field), {**_ROLES, **self.roles}
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, Mapping) for turn in turns):
            raise ConfigError(
                f"{record.where}: no conversation under '{self.conversations_field}': expected a list of turns, each with"
                f" '{_FROM}' and '{_VALUE}', got {turns!r:.80}. Keys of the record: {listed(record.values)}"
            )
        messages = []
        for number, turn in enumerate(turns):
            name, text = turn.get(_FROM), turn.get(_VALUE)
            if not isinstance(name, str) or not isinstance(text, str):
                raise ConfigError(
                    f"{record.where}: turn {number + 1} of '{self.conversations_field}': expected texts under '{_FROM}' and"
                    f" '{_VALUE}', got {dict(turn)!r:.80}"
                )
            if name not in roles:
                raise ConfigError(
                    f"{record.where}: turn {number + 1} of '{self.conversations_field}' is from '{name}', which has no role."
                    f" Known: {', '.join(roles)}. Set format.roles, such as {{{name}: assistant}}"
                )
            others = {key: value for key, value in turn.items() if key not in (_FROM, _VALUE)}
            messages.append({**others, "role": roles[name], "content": text})
        system = record.values.get(self.system_field or "") or ""
        if not system or messages[0]["role"] != "system":
            return [*([{"role": "system", "content": system}] if system else []), *messages]
        if system.strip() != messages[0]["content"].strip():
            raise ConfigError(
                f"{record.where}: {system!r:.80} under '{self.system_field}' is not the system message that the conversation"
                " begins with. Correct the record, or set format.system_field to null"
            )
        return messages
