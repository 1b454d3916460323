"""Preference pairs: a prompt with a chosen and a rejected completion; the loss is computed on the completions."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import field
from typing import ClassVar

from jaxlm.core.errors import ConfigError
from jaxlm.data.formats.base import FormatConfig, Truncation
from jaxlm.data.formats.chat import OF_TEMPLATE
from jaxlm.data.formats.completions_format import Completions, CompletionsFormat, text_or_messages
from jaxlm.data.sources.record_files import Record
from jaxlm.data.sources.text_file import TextFile
from jaxlm.reading.choices import choice

_PROMPT = "prompt"
_WHITE_SPACE = re.compile(r"\s")


@choice(FormatConfig, "pairs")
class PairsFormat(CompletionsFormat):
    """Records with a chosen and a rejected completion, as texts or as lists of messages, for `data.type: pairs`.

    Attributes:
        prompt_field: key of the prompt. Records without the key `prompt` have it in both completions, as in
            `Anthropic/hh-rlhf`: it is what they begin with, up to the last white space, so that no token is cut. Null
            finds it there even if there is such a key.
        chosen_field: key of the preferred completion.
        rejected_field: key of the other completion.
        prompt_ends_with: with `prompt_field: null`, the text that ends the prompt, such as `"\\\\n\\\\nAssistant:"`. The
            prompt ends after its last occurrence in what both completions have in common; null ends it at the last white
            space.
            For messages it has no effect: the prompt is all messages that both lists begin with.
        truncation: what becomes of a prompt with a completion that is longer than `model.seq_len`: `keep_start` cuts off its
            end, `keep_end` its beginning, and `drop_overlength` leaves the pair out.
    """

    makes: ClassVar[str] = "pairs"

    prompt_field: str | None = _PROMPT
    chosen_field: str = "chosen"
    rejected_field: str = "rejected"
    prompt_ends_with: str | None = None
    truncation: Truncation = field(default="keep_start", kw_only=True)

    def __post_init__(self):
        if self.prompt_ends_with is not None and (self.prompt_field is not None or not self.prompt_ends_with):
            raise ConfigError(
                f"data.format.prompt_ends_with: {self.prompt_ends_with!r} given, but it needs a text, and has an effect only"
                " with prompt_field: null. Remove it, or set prompt_field to null"
            )

    @property
    def overlong(self) -> Truncation:
        return self.truncation

    @property
    def num_completions(self) -> int:
        return 2

    def records(self, file: TextFile) -> Iterator[Record]:
        # Only the usual key may be missing: another one was written by somebody whose data should have it.
        optional = [_PROMPT] if self.prompt_field == _PROMPT else []
        return file.records([key for key in self.keys if key not in optional], [*optional, *OF_TEMPLATE])

    def completions(self, record: Record) -> Completions:
        is_absent = self.prompt_field == _PROMPT and record.values.get(_PROMPT) is None
        prompt = None if self.prompt_field is None or is_absent else text_or_messages(record, self.prompt_field)
        chosen, rejected = (text_or_messages(record, key) for key in (self.chosen_field, self.rejected_field))
        if prompt is None and isinstance(chosen, str) and isinstance(rejected, str):
            return self._text_pair(record.where, chosen, rejected)
        return Completions(prompt, (chosen, rejected))

    def _text_pair(self, where: str, chosen: str, rejected: str) -> Completions:
        equal = itertools.takewhile(lambda two: two[0] == two[1], zip(chosen, rejected, strict=False))
        common = "".join(a for a, _ in equal)
        size = self._prompt_size(common)
        if not size:
            without = f", without {self.prompt_ends_with!r}" if common and self.prompt_ends_with else ""
            raise ConfigError(
                f"{where}: no prompt: '{self.chosen_field}' and '{self.rejected_field}' begin alike with {common[-80:]!r}"
                f"{without}. Set data.format.prompt_field to the key of the prompt, or prompt_ends_with"
            )
        return Completions(chosen[:size], (chosen[size:], rejected[size:]))

    def _prompt_size(self, common: str) -> int:
        """The number of characters of the prompt in what both completions begin with; 0 without any."""
        if self.prompt_ends_with is not None:
            end = common.rfind(self.prompt_ends_with)
            return 0 if end < 0 else end + len(self.prompt_ends_with)
        # TRL ends the prompt at the first character that differs, which may be inside of a token. What both completions
        # share after the white space has the same likelihood in both. A space belongs to the word that follows.
        spaces = [match.start() for match in _WHITE_SPACE.finditer(common)]
        return len(common) if not spaces else spaces[-1] + (common[spaces[-1]] != " ")
