"""Groups of responses to the same prompt, side by side, with their rewards."""

from dataclasses import field
from typing import ClassVar

import numpy as np
from haliax import Axis

from jaxlm.core.axes import GROUP, POSITION
from jaxlm.core.errors import ConfigError
from jaxlm.core.values.batch_types import GroupBatch
from jaxlm.data.batch import BatchSpec, Column, Columns, random_tokens, token_columns
from jaxlm.data.cache.token_cache import TokenCache
from jaxlm.data.config import DataConfig
from jaxlm.data.formats.base import FormatConfig
from jaxlm.data.formats.completions_format import CompletionsFormat
from jaxlm.data.formats.groups_format import GroupsFormat
from jaxlm.data.several_completions import ComparedCompletions, SeveralCompletions
from jaxlm.reading.choices import choice


@choice(DataConfig, "groups")
class GroupsConfig(DataConfig):
    """Groups of responses that a model has sampled for the same prompt, with their rewards. `model.seq_len` limits each
    prompt with a response; longer ones are truncated at the end.
    """

    reads: ClassVar[str] = "groups"

    format: FormatConfig = field(default_factory=GroupsFormat)

    def batch_spec(self, seq_len: int) -> BatchSpec[GroupBatch]:
        Group = Axis(GROUP, self._group_size())
        rewards = {"rewards": Column(np.float32, (Group,))}
        return BatchSpec(GroupBatch.of, rewards | token_columns(Group, Axis(POSITION, seq_len)))

    def arrange(self, cache: TokenCache, record_format: FormatConfig, seq_len: int) -> "RewardedGroups":
        del record_format
        names = [f"response {number + 1}" for number in range(self._group_size())]
        return RewardedGroups(SeveralCompletions(cache, seq_len, names, "groups"))

    def random_columns(self, num_examples: int, seq_len: int, vocab_size: int, seed: int) -> Columns:
        shape = (num_examples, self._group_size())
        rewards = np.random.default_rng(seed).integers(0, 2, shape).astype(np.float32)
        return {"rewards": rewards, **random_tokens((*shape, seq_len), vocab_size, seed)}

    def _group_size(self) -> int:
        formats = [source.config.format for source in self.sources()]
        sizes = {config.num_completions for config in formats if isinstance(config, CompletionsFormat)}
        if not sizes:
            self.check_mixture()  # raises for other formats
        if len(sizes) != 1:
            raise ConfigError(
                f"data.configs: groups of {' and '.join(map(str, sorted(sizes)))} responses given, but all sources must have"
                " the same format.group_size"
            )
        return sizes.pop()


class RewardedGroups(ComparedCompletions):
    """Groups with the rewards of their responses."""

    def __init__(self, groups: SeveralCompletions):
        assert groups.cache.numbers is not None, "groups have rewards"
        self._rewards = groups.cache.numbers[groups.documents]
        super().__init__(
            groups,
            np.flatnonzero(np.ptp(self._rewards, axis=1) == 0),
            wording=("groups have equal rewards", "none of their responses is better than the others"),
            if_all="so no response is better than another. Check rewards_field of the format, and the function that"
            " computed the rewards",
        )

    def read(self, indices: np.ndarray) -> Columns:
        return {"rewards": self._rewards[indices], **self._examples.read(indices)}
