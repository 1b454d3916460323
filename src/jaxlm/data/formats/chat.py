"""Conversations, rendered by a chat template; the loss is computed on the assistant's messages."""

import abc
import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, TypeGuard

import numpy as np

from jaxlm.core.bounded_read import parse_json
from jaxlm.core.errors import ConfigError, listed
from jaxlm.data.formats.base import Begin, Encoder, FormatConfig, MaskedFormat, RawContent, TokenizedText
from jaxlm.data.sources.record_files import Record
from jaxlm.data.sources.text_file import TextFile
from jaxlm.data.tokenizer.chat_template import ChatTemplate
from jaxlm.data.tokenizer.tokenizer import Tokenizer
from jaxlm.reading.choices import choice

Messages = list[dict[str, Any]]
_TOOLS = re.compile(r"\btools\b")  # the variable of a chat template


class Conversation(NamedTuple):
    """A conversation of a file.

    Attributes:
        where: its location, for messages.
        tools: what the record has under the key of the tools.
        position: in the file.
    """

    where: str
    messages: Messages
    tools: Any
    position: int


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
            it as `tools`. Records without the key have none. Null gives the template none.
    """

    begins_as: ClassVar[Begin] = "template"

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

    def cache_key(self) -> dict[str, Any]:
        # Folders of caches are named by the text of their keys, in which the keys of `chat` always had this order.
        options = super().cache_key()["format"]
        shared = {
            name: options.pop(name) for name in ("chat_template", "mask_user_turns", "tools_field") if name in options
        }
        return {"format": options | shared}

    def encoder(self, tokenizer: Tokenizer, *, bos: bool | None, eos: bool, key: str) -> Encoder:
        del bos, eos
        template = ChatTemplate.load(self.chat_template, tokenizer, f"{key}.chat_template")
        if self.tools_field is not None and not _TOOLS.search(template.text):
            raise ConfigError(
                f"{key}.tools_field: '{self.tools_field}' given, but the chat template reads no tools. Remove it, or set"
                " chat_template to one that has the variable `tools`"
            )
        return ChatEncoder(self, template, tokenizer, key)

    def texts(self, file: TextFile) -> Iterator[str]:
        for conversation in self.conversations(file):
            yield plain_text(conversation.messages)

    def conversations(self, file: TextFile) -> Iterator[Conversation]:
        """The conversations of a file."""
        optional = () if self.tools_field is None else (self.tools_field,)
        for record in file.records((self.key_of_messages,), optional):
            # Tables have nulls for keys that only some messages have.
            messages = [{k: v for k, v in m.items() if v is not None} for m in self.messages(record)]
            tools = None if self.tools_field is None else record.values.get(self.tools_field)
            yield Conversation(record.where, messages, tools, record.position)


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
        messages = record.values.get(self.messages_field)
        if not are_messages(messages):
            turns = messages if isinstance(messages, list) else []
            is_sharegpt = bool(turns) and all(isinstance(turn, Mapping) and "from" in turn for turn in turns)
            raise ConfigError(
                f"{record.where}: no messages under '{self.messages_field}': expected a list of messages, each with a"
                f" 'role' and a 'content', got {messages!r:.80}. Keys of the record: {listed(record.values)}"
                + (". For messages with 'from' and 'value', set format.type to sharegpt" if is_sharegpt else "")
            )
        return messages


@dataclass(frozen=True)
class ChatEncoder(Encoder):
    """Renders and tokenizes conversations."""

    config: ConversationFormat
    template: ChatTemplate
    tokenizer: Tokenizer
    key: str

    def read(self, file: TextFile) -> Iterator[RawContent]:
        for where, messages, raw_tools, position in self.config.conversations(file):
            tools = self._tools(raw_tools, where)
            rendered = self.template.render(messages, where, mark=self.config.mask_user_turns, tools=tools)
            yield RawContent(rendered, len(rendered.text), len(rendered.text.encode()), position, where)

    def encode(self, contents: Sequence[Any]) -> list[TokenizedText | None]:
        encoded = self.tokenizer.encode_with_offsets([rendered.text for rendered in contents])
        tokens = []
        for rendered, (ids, begins, ends) in zip(contents, encoded, strict=True):
            target_mask = np.zeros(len(ids), bool)
            for begin, end in rendered.target_spans:
                target_mask |= (begins < end) & (ends > begin)
            # The first token of a document is never a target.
            tokens.append(TokenizedText(ids, target_mask) if target_mask[1:].any() else None)
        return tokens

    def cache_key(self) -> dict[str, Any]:
        return self.template.cache_key()

    def _tools(self, value: Any, where: str) -> list[Any] | None:
        tools = value
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                tools = parse_json(value) if value.strip() else None
        if tools is not None and not isinstance(tools, list):
            raise ConfigError(
                f"{where}: expected a list of tools under '{self.config.tools_field}', or a text with one in JSON, got"
                f" {value!r:.80}. Set {self.key}.tools_field to the key of the tools"
            )
        return tools or None

    def no_targets_message(self) -> str:
        if self.template.has_generation:
            why = "its {% generation %} block is empty in all of them. Fix the block, or remove it: the loss is then"
            why += " computed on what each assistant message adds to the conversation"
        else:
            why = "none of their messages has the role 'assistant' and text that the template renders"
        return (
            f"{self.key}: the chat template ({self.template.origin}) marks no assistant tokens in the conversations read so"
            f" far: {why}. Or set mask_user_turns to false to compute the loss on every token"
        )


def are_messages(value: Any) -> TypeGuard[Messages]:
    """Whether a value is a list of messages, each with a role."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in value)
    )


def plain_text(content: str | Messages) -> str:
    """A text, or the text of messages without any template. Parts of a content count with their texts."""
    return content if isinstance(content, str) else "\n".join(map(_content_text, content))


def _content_text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    parts = content if isinstance(content, list) else [{"text": content}]
    return "".join(str(part.get("text") or "") for part in parts if isinstance(part, Mapping))
