"""Prompts with completions; the loss is computed on the completions."""

from collections.abc import Iterator
from typing import ClassVar

from jaxlm.core.errors import ConfigError
from jaxlm.data.formats.base import FormatConfig, MaskedFormat
from jaxlm.data.formats.chat import OF_TEMPLATE, Messages
from jaxlm.data.formats.completions_format import Completions, PromptedFormat, text_or_messages
from jaxlm.data.sources.record_files import Record
from jaxlm.data.sources.text_file import TextFile
from jaxlm.reading.choices import choice


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

    def records(self, file: TextFile) -> Iterator[Record]:
        return file.records(self.keys, OF_TEMPLATE)

    def prompt(self, record: Record) -> str | Messages:
        """Writes the prompt, including the context and `separate_with`. Raises `ConfigError` if there is none."""
        prompt, key = text_or_messages(record, self.input_field), self.context_field
        context = "" if key is None or record.values.get(key, key) is None else text_or_messages(record, key)
        if isinstance(prompt, str) and isinstance(context, str):
            return "\n".join(filter(None, (prompt, context))) + (self.separate_with or "")
        if context:
            raise ConfigError(
                f"{record.where}: '{key}' (context_field): only a text can follow a prompt, which is a text"
            )
        return prompt

    def completions(self, record: Record) -> Completions:
        prompt, completion = self.prompt(record), text_or_messages(record, self.output_field)
        return Completions(prompt, (completion,), trains_prompt=not self.mask_inputs, trains_empty=False)

    def nothing_to_train_on(self) -> str:
        return f"every completion under '{self.output_field}' is empty: no tokens to compute the loss on. Check"
