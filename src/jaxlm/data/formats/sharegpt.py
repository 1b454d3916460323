"""Conversations as ShareGPT exports them: turns with `from` and `value`; the loss is computed on the assistant's."""

from collections.abc import Mapping
from dataclasses import field
from types import MappingProxyType
from typing import ClassVar

from jaxlm.core.errors import ConfigError, listed
from jaxlm.data.formats.base import FormatConfig
from jaxlm.data.formats.chat import TRAINED_IF, ConversationFormat, Messages
from jaxlm.data.sources.record_files import Record
from jaxlm.reading.choices import choice

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
