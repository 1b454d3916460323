"""Prompts: what a model answers while it trains. Rewards see the record's other keys."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from jaxlm.core.errors import ConfigError
from jaxlm.data.formats.base import Begin, Encoder, FormatConfig, RawContent, RecordsFormat, TokenizedText
from jaxlm.data.formats.chat import OF_TEMPLATE, plain_text, template_variables
from jaxlm.data.formats.completions import checked_template, template_of, text_or_messages
from jaxlm.data.sources.record_files import TextFile
from jaxlm.data.tokenizer.chat_template import ChatTemplate
from jaxlm.data.tokenizer.tokenizer import Tokenizer, boundary_ids
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

    def encoder(self, tokenizer: Tokenizer, *, bos: bool | None, eos: bool, key: str) -> Encoder:
        del eos  # a prompt goes on
        template = template_of(self, tokenizer, key)
        before, _ = boundary_ids(tokenizer, bos=bos, eos=False)
        return PromptsEncoder(self, key, tokenizer, template, before)

    def texts(self, file: TextFile) -> Iterator[str]:
        for record in file.records((self.prompt_field,)):
            yield plain_text(text_or_messages(record, self.prompt_field))


class _Prompt(NamedTuple):
    """A prompt before tokenization. A rendered one has all special tokens; another one gets BOS."""

    text: str
    is_rendered: bool
    where: str


@dataclass(frozen=True)
class PromptsEncoder(Encoder):
    """Tokenizes each record's prompt as one document, with the ids `before` a text."""

    config: PromptsFormat
    key: str
    tokenizer: Tokenizer
    template: ChatTemplate | None
    before: np.ndarray

    def read(self, file: TextFile) -> Iterator[RawContent]:
        field = self.config.prompt_field
        for record in file.records((field,), OF_TEMPLATE):
            content = text_or_messages(record, field)
            if isinstance(content, str):
                prompt = _Prompt(content, False, record.where)
            else:
                template = checked_template(self.template, record.where, field)
                text = template.prompt(content, record.where, template_variables(record, template))
                prompt = _Prompt(text, True, record.where)
            yield RawContent(prompt, len(prompt.text), len(prompt.text.encode()), record.position, record.where)

    def encode(self, contents: Sequence[Any]) -> list[TokenizedText | None]:
        plain = iter(self.tokenizer.encode_arrays([p.text for p in contents if not p.is_rendered]))
        rendered = iter(self.tokenizer.encode_with_offsets([p.text for p in contents if p.is_rendered]))
        return [
            self._tokens(p, next(rendered)[0] if p.is_rendered else np.concatenate([self.before, next(plain)]))
            for p in contents
        ]

    def cache_key(self) -> dict[str, Any]:
        return {} if self.template is None else self.template.cache_key()

    def no_targets_message(self) -> str:
        return f"{self.key}: there is no record. Check the files"

    def _tokens(self, prompt: _Prompt, ids: np.ndarray) -> TokenizedText:
        if not len(ids):  # leaving it out would shift the records that follow
            raise ConfigError(
                f"{prompt.where}: the prompt under '{self.config.prompt_field}' has no token. Set data.enforce_bos, or remove"
                " the record"
            )
        return TokenizedText(ids)
