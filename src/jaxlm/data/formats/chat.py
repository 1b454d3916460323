"""Conversations: rendered by a chat template, and what the assistant says is asked for."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np

from jaxlm.core.errors import ConfigError
from jaxlm.data.formats.base import Encoder, FormatConfig, MaskedFormat, RawContent, TokenizedText
from jaxlm.data.sources.text_file import TextFile
from jaxlm.data.tokenizer.chat_template import ChatTemplate
from jaxlm.data.tokenizer.tokenizer import Tokenizer

Messages = list[dict[str, Any]]


@FormatConfig.register_subclass("chat")
@dataclass(frozen=True)
class ChatFormat(MaskedFormat):
    """Records of messages, each with a `role` and a `content`. The template decides about every token: nothing is put
    before or behind what it renders, and the special tokens that it writes are those of the tokenizer.

    Attributes:
        messages_field: the key of the list of messages.
        chat_template: a template (jinja), or the path of a file that ends in .jinja; null takes the tokenizer's.
        mask_user_turns: ask for what the assistant says only: what the template has inside of `{% generation %}`, or, if it
            has no such block, what each of the assistant's messages adds to the conversation before it. False asks for all.
    """

    messages_field: str = "messages"
    chat_template: str | None = None
    mask_user_turns: bool = True

    @property
    def adds_special_tokens(self) -> bool:
        return False

    def encoder(self, tokenizer: Tokenizer, *, bos: bool, eos: bool, key: str) -> Encoder:
        del bos, eos
        return ChatEncoder(
            self, ChatTemplate.load(self.chat_template, tokenizer, f"{key}.chat_template"), tokenizer, key
        )

    def texts(self, file: TextFile) -> Iterator[str]:
        for _, messages, _ in self.conversations(file):
            yield "\n".join(str(message.get("content") or "") for message in messages)

    def conversations(self, file: TextFile) -> Iterator[tuple[str, Messages, int]]:
        """Where each is, its messages, and the position in the file."""
        for record in file.records((self.messages_field,)):
            messages = record.values.get(self.messages_field)
            if not _are_messages(messages):
                raise ConfigError(
                    f"{record.where}: no messages under '{self.messages_field}': a list expected, each with a 'role' and a"
                    f" 'content', {messages!r:.80} given. Keys: {', '.join(record.values) or 'none'}"
                )
            # Tables fill keys that only some messages have with nulls.
            yield record.where, [{k: v for k, v in m.items() if v is not None} for m in messages], record.position


@dataclass(frozen=True)
class ChatEncoder(Encoder):
    """Conversations into tokens."""

    config: ChatFormat
    template: ChatTemplate
    tokenizer: Tokenizer
    key: str

    def read(self, file: TextFile) -> Iterator[RawContent]:
        for where, messages, position in self.config.conversations(file):
            rendered = self.template.render(messages, where, mark=self.config.mask_user_turns)
            yield RawContent(rendered, len(rendered.text), len(rendered.text.encode()), position)

    def encode(self, contents: Sequence[Any]) -> list[TokenizedText | None]:
        encoded = self.tokenizer.encode_with_offsets([rendered.text for rendered in contents])
        tokens = []
        for rendered, (ids, begins, ends) in zip(contents, encoded, strict=True):
            asked = np.zeros(len(ids), bool)
            for begin, end in rendered.asked:
                asked |= (begins < end) & (ends > begin)
            # The first token is nobody's target.
            tokens.append(TokenizedText(ids, asked) if asked[1:].any() else None)
        return tokens

    def cache_key(self) -> dict[str, Any]:
        """See `Encoder.recipe`: the template, which may be the tokenizer's, and the names that it is given."""
        template = json.dumps([self.template.text, dict(self.template.names)])
        return {"chat_template": hashlib.sha256(template.encode()).hexdigest()}

    def no_targets_message(self) -> str:
        if self.template.has_generation:
            why = "its {% generation %} block marks nothing in them. Mend it, or take the block out: then whatever the"
            why += " assistant's messages add to a conversation is asked for"
        else:
            why = "none of their messages has the role 'assistant' and text that the template renders"
        return (
            f"{self.key}: the chat template ({self.template.origin}) gives no assistant tokens at all for the first"
            f" conversations: {why}. Or set mask_user_turns to false, to ask for every token"
        )


def _are_messages(found: Any) -> TypeGuard[Messages]:
    return (
        isinstance(found, list)
        and bool(found)
        and all(isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in found)
    )
