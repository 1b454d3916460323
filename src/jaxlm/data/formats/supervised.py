"""Prompts with completions; the loss is computed on the completions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from jaxlm.core.errors import ConfigError, listed
from jaxlm.data.formats.base import Begin, Encoder, FormatConfig, MaskedFormat, RawContent, TokenizedText
from jaxlm.data.sources.record_files import Record
from jaxlm.data.sources.text_file import TextFile
from jaxlm.data.tokenizer.tokenizer import Tokenizer, boundary_ids
from jaxlm.reading.choices import choice


@choice(FormatConfig, "supervised")
class SupervisedFormat(MaskedFormat):
    """Records with a prompt and a completion. Prompt and completion are tokenized separately, so the prompt's tokens are the
    same as at inference. The loss is also computed on the EOS token.

    Attributes:
        input_field: key of the prompt.
        output_field: key of the completion.
        separate_with: text inserted between prompt and completion, as part of the prompt; null inserts nothing.
        mask_inputs: compute the loss on the completion only; `false` computes it on the prompt too.
    """

    input_field: str = "prompt"
    output_field: str = "response"
    separate_with: str | None = None
    mask_inputs: bool = True

    begins_as: ClassVar[Begin] = "prompt"

    def encoder(self, tokenizer: Tokenizer, *, bos: bool | None, eos: bool, key: str) -> Encoder:
        return SupervisedEncoder(self, key, tokenizer, *boundary_ids(tokenizer, bos=bos, eos=eos))

    def texts(self, file: TextFile) -> Iterator[str]:
        return (prompt + completion for _, (prompt, completion), _ in self.pairs(file))

    def pairs(self, file: TextFile) -> Iterator[tuple[str, tuple[str, str], int]]:
        """For each record: its location, (prompt including `separate_with`, completion), and the position in the file."""
        keys = (self.input_field, self.output_field)
        for record in file.records(keys):
            prompt, completion = (_text(record, key) for key in keys)
            yield record.where, (prompt + (self.separate_with or ""), completion), record.position


def _text(record: Record, key: str) -> str:
    value = record.values.get(key)
    if not isinstance(value, str):
        problem = f"it is {value!r:.80}" if key in record.values else f"the record has the keys {listed(record.values)}"
        raise ConfigError(f"{record.where}: no text under '{key}': {problem}")
    return value


@dataclass(frozen=True)
class SupervisedEncoder(Encoder):
    """Tokenizes prompts and completions, with the ids `before` the prompt and `after` the completion."""

    config: SupervisedFormat
    key: str
    tokenizer: Tokenizer
    before: np.ndarray
    after: np.ndarray

    def read(self, file: TextFile) -> Iterator[RawContent]:
        for where, pair, position in self.config.pairs(file):
            yield RawContent(pair, sum(map(len, pair)), sum(len(text.encode()) for text in pair), position, where)

    def encode(self, contents: Sequence[Any]) -> list[TokenizedText | None]:
        ids = self.tokenizer.encode_arrays([text for pair in contents for text in pair])
        return [self._tokens(prompt, completion) for prompt, completion in zip(ids[::2], ids[1::2], strict=True)]

    def no_targets_message(self) -> str:
        return f"{self.key}: every completion under '{self.config.output_field}' is empty: no tokens to compute the loss on"

    def _tokens(self, prompt: np.ndarray, completion: np.ndarray) -> TokenizedText | None:
        if not len(completion):
            return None
        prompt, completion = np.concatenate([self.before, prompt]), np.concatenate([completion, self.after])
        target_mask = np.arange(len(prompt) + len(completion)) >= (len(prompt) if self.config.mask_inputs else 0)
        return TokenizedText(np.concatenate([prompt, completion]), target_mask)
