"""Groups: a prompt with several sampled responses and their rewards; the loss is computed on the responses."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from annotated_types import Interval

from jaxlm.core.errors import ConfigError, listed
from jaxlm.core.field_types import LARGEST_INT, is_float32, shown, what_float32_needs
from jaxlm.data.formats.base import FormatConfig
from jaxlm.data.formats.chat import OF_TEMPLATE
from jaxlm.data.formats.completions_format import Completions, CompletionsFormat, text_or_messages
from jaxlm.data.sources.record_files import Record
from jaxlm.data.sources.text_file import TextFile
from jaxlm.reading.choices import choice


@choice(FormatConfig, "groups")
class GroupsFormat(CompletionsFormat):
    """Records with a prompt, a list of responses to it and a list of their rewards, for `data.type: groups`. The prompt is a
    text or a list of messages; the responses are texts.

    Attributes:
        group_size: number of responses in each record.
        prompt_field: key of the prompt.
        responses_field: key of the list of responses.
        rewards_field: key of the list of rewards.
    """

    makes: ClassVar[str] = "groups"

    group_size: Annotated[int, Interval(ge=2, le=LARGEST_INT)] = 4
    prompt_field: str = "prompt"
    responses_field: str = "responses"
    rewards_field: str = "rewards"

    @property
    def num_completions(self) -> int:
        return self.group_size

    def records(self, file: TextFile) -> Iterator[Record]:
        return file.records(self.keys, OF_TEMPLATE)

    def completions(self, record: Record) -> Completions:
        prompt = text_or_messages(record, self.prompt_field)
        responses = self._list(record, self.responses_field, "texts", lambda item: isinstance(item, str))
        rewards = self._list(record, self.rewards_field, "numbers", lambda item: type(item) in (int, float))
        for number, reward in enumerate(rewards):
            if not is_float32(reward):
                raise ConfigError(
                    f"{record.where}: {self.rewards_field}[{number}]: {shown(reward)} given, {what_float32_needs(reward)}"
                    " expected. Correct the record, or remove it"
                )
        if not isinstance(prompt, str):
            responses = [[{"role": "assistant", "content": response}] for response in responses]
        return Completions(prompt, tuple(responses), numbers=tuple(map(float, rewards)))

    def _list(self, record: Record, key: str, what: str, accepts: Any) -> list[Any]:
        entries = record.values.get(key)
        if not isinstance(entries, list) or len(entries) != self.group_size or not all(map(accepts, entries)):
            raise ConfigError(
                f"{record.where}: expected a list of {self.group_size} {what} under '{key}' (data.format.group_size), got"
                f" {entries!r:.80}. Keys of the record: {listed(record.values)}"
            )
        return entries
