"""Unpaired preferences: a prompt with one completion that is desirable or not; the loss is computed on the completion."""

from collections.abc import Iterator
from typing import ClassVar

from jaxlm.core.errors import ConfigError, listed
from jaxlm.data.formats.base import FormatConfig
from jaxlm.data.formats.chat import OF_TEMPLATE
from jaxlm.data.formats.completions_format import Completions, CompletionsFormat, text_or_messages
from jaxlm.data.sources.record_files import Record
from jaxlm.data.sources.text_file import TextFile
from jaxlm.reading.choices import choice


@choice(FormatConfig, "unpaired")
class UnpairedFormat(CompletionsFormat):
    """Records with a prompt, a completion and a label, for `data.type: unpaired`. Prompt and completion are texts, or lists
    of messages.

    Attributes:
        prompt_field: key of the prompt.
        completion_field: key of the completion.
        label_field: key of the label: true (or 1) for a desirable completion, false (or 0) for another.
    """

    makes: ClassVar[str] = "unpaired"

    prompt_field: str = "prompt"
    completion_field: str = "completion"
    label_field: str = "label"

    @property
    def num_completions(self) -> int:
        return 1

    def records(self, file: TextFile) -> Iterator[Record]:
        return file.records(self.keys, OF_TEMPLATE)

    def completions(self, record: Record) -> Completions:
        label = record.values.get(self.label_field)
        if label not in (0, 1):  # True and False are equal to them
            raise ConfigError(
                f"{record.where}: expected true or false under '{self.label_field}', got {label!r:.80}. Keys of the record:"
                f" {listed(record.values)}"
            )
        prompt, completion = (text_or_messages(record, key) for key in (self.prompt_field, self.completion_field))
        return Completions(prompt, (completion,), numbers=(float(label),))
