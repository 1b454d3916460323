"""Prompts with completions; the loss is computed on the completions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from jaxlm.core.errors import ConfigError, listed
from jaxlm.data.formats.base import Begin, Encoder, FormatConfig, MaskedFormat, RawContent, TokenizedText
from jaxlm.data.formats.chat import OF_TEMPLATE, Messages, plain_text
from jaxlm.data.formats.completions_format import encoded_whole, one_completion, template_of, text_or_messages
from jaxlm.data.sources.record_files import Record
from jaxlm.data.sources.text_file import TextFile
from jaxlm.data.tokenizer.chat_template import ChatTemplate
from jaxlm.data.tokenizer.tokenizer import Tokenizer, boundary_ids
from jaxlm.reading.choices import choice


@choice(FormatConfig, "supervised")
class SupervisedFormat(MaskedFormat):
    """Records with a prompt and a completion, as texts or as lists of messages. Texts are tokenized separately, so the
    prompt's tokens are the same as at inference, and the loss is also computed on the EOS token. The chat template renders
    messages.

    Attributes:
        input_field: key of the prompt.
        output_field: key of the completion.
        context_field: key of a text that follows the prompt after a line break, unless it is empty, such as Alpaca's `input`.
        separate_with: text inserted between prompt and completion, as part of the prompt; null inserts nothing.
        mask_inputs: compute the loss on the completion only; `false` computes it on the prompt too.
        chat_template: for messages: `chatml`, `nanochat`, a Jinja template, or the path of a .jinja file; null uses the
            tokenizer's chat template.
    """

    input_field: str = "prompt"
    output_field: str = "response"
    separate_with: str | None = None
    mask_inputs: bool = True
    context_field: str | None = None
    chat_template: str | None = None

    begins_as: ClassVar[Begin] = "prompt"
    newer_keys: ClassVar[tuple[str, ...]] = ("context_field", "chat_template")

    def encoder(self, tokenizer: Tokenizer, *, bos: bool | None, eos: bool, key: str) -> Encoder:
        template = template_of(self, tokenizer, key)
        return SupervisedEncoder(self, key, tokenizer, template, *boundary_ids(tokenizer, bos=bos, eos=eos))

    def texts(self, file: TextFile) -> Iterator[str]:
        for record in self.records(file):
            yield plain_text(self.prompt(record)) + plain_text(text_or_messages(record, self.output_field))

    def records(self, file: TextFile) -> Iterator[Record]:
        """The records of a file."""
        return file.records(self.keys, OF_TEMPLATE)

    def prompt(self, record: Record) -> str | Messages:
        """The prompt, including the context and `separate_with`. Raises `ConfigError` if there is none."""
        prompt, key = text_or_messages(record, self.input_field), self.context_field
        context = "" if key is None else record.values.get(key)
        if not isinstance(context or "", str) or (context and not isinstance(prompt, str)):
            raise ConfigError(
                f"{record.where}: {context!r:.80} under '{key}' (context_field), but a text after a text is expected"
            )
        if key is not None and key not in record.values:
            raise ConfigError(f"{record.where}: nothing under '{key}' (context_field), but under {listed(record.values)}")
        if not isinstance(prompt, str):
            return prompt
        return "\n".join(filter(None, (prompt, context))) + (self.separate_with or "")


@dataclass(frozen=True)
class SupervisedEncoder(Encoder):
    """Tokenizes prompts and completions, with the ids `before` the prompt and `after` the completion if they are texts."""

    config: SupervisedFormat
    key: str
    tokenizer: Tokenizer
    template: ChatTemplate | None
    before: np.ndarray
    after: np.ndarray

    def read(self, file: TextFile) -> Iterator[RawContent]:
        for record in self.config.records(file):
            content = one_completion(record, self.config.prompt(record), self.config.output_field, self.template)
            text = content.prompt + content.completions[0]
            yield RawContent(content, len(text), len(text.encode()), record.position, record.where)

    def encode(self, contents: Sequence[Any]) -> list[TokenizedText | None]:
        plain, whole = ([content for content in contents if content.is_rendered is kind] for kind in (False, True))
        ids = iter(self.tokenizer.encode_arrays([text for c in plain for text in (c.prompt, *c.completions)]))
        rendered = encoded_whole(self.tokenizer, whole)
        none = np.zeros(0, np.int32)
        return [
            self._tokens(none, *next(rendered), none)
            if content.is_rendered
            else self._tokens(self.before, next(ids), next(ids), self.after)
            for content in contents
        ]

    @property
    def messages_template(self) -> ChatTemplate | None:
        return self.template

    def no_targets_message(self) -> str:
        return f"{self.key}: every completion under '{self.config.output_field}' is empty: no tokens to compute the loss on"

    def _tokens(self, *parts: np.ndarray) -> TokenizedText | None:
        """Args: parts: what is before the prompt, the prompt, the completion, and what is after it."""
        before, prompt, completion, _ = map(len, parts)
        if not completion:
            return None
        ids = np.concatenate(parts)
        return TokenizedText(ids, np.arange(len(ids)) >= (before + prompt if self.config.mask_inputs else 0))
