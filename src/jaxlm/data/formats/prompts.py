"""Prompts: what a model answers while it trains. Rewards see the record's other keys."""

from collections.abc import Iterator
from typing import ClassVar

from jaxlm.data.formats.base import Begin, Encoder, FormatConfig, RecordsFormat
from jaxlm.data.formats.chat import OF_TEMPLATE, plain_text
from jaxlm.data.formats.completions import Completions, rendered, template_of, text_or_messages
from jaxlm.data.formats.segments import RawContent, Segment, Segments
from jaxlm.data.sources.record_files import TextFile
from jaxlm.data.tokenizer.chat_template import ChatTemplate
from jaxlm.data.tokenizer.tokenizer import Tokenizer
from jaxlm.reading.choices import choice


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

    def template(self, tokenizer: Tokenizer, key: str) -> ChatTemplate | None:
        return template_of(self, tokenizer, key)

    def read(self, file: TextFile, encoder: Encoder) -> Iterator[RawContent]:
        field = self.prompt_field
        for record in file.records((field,), OF_TEMPLATE):
            content = Completions(text_or_messages(record, field), ())
            text, _, is_rendered, _ = rendered(record, content, (field,), encoder.template)
            segment = Segment(text, needed=is_rendered or not len(encoder.before))
            sequence = (segment,) if is_rendered else encoder.framed(segment)
            # Leaving it out would shift the records that follow.
            refusal = (
                f"{record.where}: the prompt under '{field}' has no token. Set data.enforce_bos, or remove the record"
            )
            segments = Segments([sequence], is_rendered, is_masked=False, refusal=refusal)
            yield RawContent.of(record, (text,), segments)

    def no_targets_message(self, encoder: Encoder) -> str:
        return f"{encoder.key}: there is no record. Check the files"

    def texts(self, file: TextFile) -> Iterator[str]:
        for record in file.records((self.prompt_field,)):
            yield plain_text(text_or_messages(record, self.prompt_field))
