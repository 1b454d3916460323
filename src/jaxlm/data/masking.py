"""The section `data.masking`: which tokens of a sequence are hidden from the model that predicts them.

How many are hidden follows from the time of the sequence (`core/values/mask_schedule.py`). Which ones, and the times, are
uniform random numbers that depend on what they are for, and on nothing that was drawn before.

Source: masked language modeling: Devlin et al. 2019 (arXiv:1810.04805), section 3.1; a random fraction of each sequence:
Nie et al. 2025, "Large Language Diffusion Models" (arXiv:2502.09992), section 2.2; random numbers: SplitMix64's finalizer
as a hash of a counter (Steele et al. 2014), and the radical inverse of van der Corput 1935 with a random digital shift.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import Fraction, NumReplicas, NumTimeSteps, PositiveFraction, PositiveInt, Seed
from jaxlm.core.rules import Rules, excludes, ordered
from jaxlm.core.values.mask_schedule import (
    NEARLY_NONE,
    WITHOUT_BOUND,
    ContinuousSchedule,
    MaskSchedule,
    ScheduleType,
    SteppedSchedule,
)
from jaxlm.data.base import TRAIN
from jaxlm.data.batch import Columns
from jaxlm.data.examples import Examples, WrappedExamples
from jaxlm.data.shuffle import mix
from jaxlm.data.tokenizer.tokenizer import END_OF_TEXT, Tokenizer
from jaxlm.reading.decode import encode
from jaxlm.reading.effects import field

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FRACTION_BITS = 53  # of a float64


def hashed(words: Sequence[int | np.ndarray]) -> np.ndarray:
    """uint64 [count]: a hash of words, each a number or int64 [count]. The order of the words matters."""
    state = np.zeros(1, np.uint64)
    for word in words:
        state = mix((state ^ np.asarray(word, np.int64).astype(np.uint64)) + _GOLDEN)
    return state


def uniform_numbers(words: Sequence[int | np.ndarray], width: int) -> np.ndarray:
    """float64 [count, width]: numbers in [0, 1) for each of `count` hashes. Args: words: as in `hashed`."""
    counters = np.arange(1, width + 1, dtype=np.uint64) * _GOLDEN
    return _as_fraction(mix(hashed(words)[:, None] + counters))


def stratified(numbers: np.ndarray, words: Sequence[int], strata: int = 1) -> np.ndarray:
    """float64 [count]: numbers in [0, 1) for consecutive integers from 0, spread evenly over each range of these.

    Of 2^k integers from a multiple of 2^k on, one is in each of 2^k equal intervals, all at the same place in their interval:
    (u + b) / B for b = 0, ..., B - 1 in some order. With S strata, this holds for S 2^k integers from a multiple of S 2^k on.

    Args:
        numbers: int64 [count].
        words: numbers that choose the shift, as in `hashed`.
        strata: the number S of consecutive integers that are in as many equal intervals.
    """
    groups, strata_of = np.divmod(np.asarray(numbers, np.int64), strata)
    reversed_bits = groups.astype(np.uint64)
    for shift, bits in enumerate(_SWAPPED):
        width = np.uint64(1 << shift)
        reversed_bits = ((reversed_bits >> width) & bits) | ((reversed_bits & bits) << width)
    return (strata_of + _as_fraction(reversed_bits ^ hashed(words))) / strata


_SWAPPED = tuple(
    np.uint64(sum(((1 << (1 << shift)) - 1) << place for place in range(0, 64, 2 << shift))) for shift in range(6)
)
"""For each power of two, the lower half of each group of twice as many bits."""


def _as_fraction(words: np.ndarray) -> np.ndarray:
    return (words >> np.uint64(64 - _FRACTION_BITS)).astype(np.float64) * 2.0**-_FRACTION_BITS


_SUGGESTED = "<|mask|>"
_VERSION = 2  # of the masks of equal keys. Before 2, each source had a shift of the times of its own
_CHOSEN, _REPLACED, _WORDS = range(3)  # what random numbers are for
_ROUNDING = 1e-9  # of a number of tokens: a fraction such as 0.15 of 100 must not be 14


@dataclass(frozen=True)
class MaskingConfig:
    """Hides tokens, which the objectives `mlm` and `diffusion` predict from the others. Special tokens, padding and tokens
    without loss are never hidden. Which ones are depends on the sequence, on how often it has been read, and on `seed` alone:
    neither on the batch nor on the number of devices.

    The times of the sequences are spread evenly over each batch.

    Attributes:
        mask_token: the token that hides others. Null is the tokenizer's mask token, or one that it calls <|mask|>, [MASK] or
            <mask>. A tokenizer that has none gets one by `data.added_tokens: ["<|mask|>"]`, and the model one more row.
        mode: `bernoulli` hides each token with the probability of the mask fraction; `fixed_count` hides
            int(tokens * fraction) of those that may be hidden.
        mask_schedule_type: how the fraction grows with the time of the sequence, from `min_mask_fraction` to
            `max_mask_fraction`: `linear`; `cosine`: by 1 - cos(pi t / 2); `exponential`: by a factor.
        min_mask_fraction: fraction at time 0.
        max_mask_fraction: fraction at time 1.
        num_time_steps: number of times, at equal distances. Null draws any time, which the objective `diffusion` needs.
        time_step_mask_fractions: the fraction of each time step, instead of a schedule: `[0.15]` for BERT's.
        times: first and last time that sequences have, such as those of a stack of layers (`preset.depth_times`); twice the
            same for a single one. The loss of the objective `diffusion` is then the share of these times in the bound: the
            shares of ranges that make up [0, 1] add up to it. Null is [0, 1].
        strata: spread the times evenly over groups of this many sequences, twice as many, four times as many, and so on. With
            1, these are the powers of two. Set it for the objective `diffusion_blocks` with another number of blocks.
        mask_replicas: hide tokens of each sequence in only this many ways, each of which counts as a sequence of its own, so
            that one pass reads the text as many times. Null hides others in every epoch.
        validation_replicas: ways in which each validation sequence is read.
        random_fraction: fraction of the hidden tokens that are replaced by a random token instead (BERT: 0.1).
        unchanged_fraction: fraction of the hidden tokens that are left as they are (BERT: 0.1).
        seed: random seed of the masks.
    """

    key_rules: ClassVar[Rules] = (
        excludes(
            "mask_schedule_type",
            "min_mask_fraction",
            "max_mask_fraction",
            "num_time_steps",
            when="time_step_mask_fractions",
            why="which already says the fraction of each time step",
        ),
        ordered("min_mask_fraction", "max_mask_fraction"),
    )

    mask_token: str | None = None
    mode: Literal["bernoulli", "fixed_count"] = "bernoulli"
    mask_schedule_type: ScheduleType = "linear"
    min_mask_fraction: PositiveFraction = 0.001
    max_mask_fraction: PositiveFraction = 1.0
    num_time_steps: NumTimeSteps | None = None
    time_step_mask_fractions: list[PositiveFraction] | None = None
    times: list[Fraction] | None = None
    strata: PositiveInt = 1
    mask_replicas: PositiveInt | None = None
    validation_replicas: NumReplicas = field(1, on_resume="evaluations")
    random_fraction: Fraction = 0.0
    unchanged_fraction: Fraction = 0.0
    seed: Seed = 0

    def __post_init__(self):
        if self.time_step_mask_fractions == []:
            raise ConfigError("data.masking.time_step_mask_fractions: [] given, at least one fraction expected")
        self._check_times()
        if self.random_fraction + self.unchanged_fraction > 1:
            raise ConfigError(
                f"data.masking.random_fraction: {self.random_fraction} given, and unchanged_fraction:"
                f" {self.unchanged_fraction}. Together they must not be above 1"
            )

    def _check_times(self) -> None:
        if self.times is None:
            return
        if len(self.times) != 2 or self.times[0] > self.times[1]:
            raise ConfigError(f"data.masking.times: {self.times} given, a first and a last time in [0, 1] expected")
        if self.is_stepped and self.times[0] < self.times[1]:
            raise ConfigError(
                f"data.masking.times: {self.times} given, but with num_time_steps or time_step_mask_fractions, only single"
                " steps have a fraction. Give the time of one of them twice, or remove these keys"
            )

    @property
    def summary(self) -> str:
        """The number of hidden tokens, in words."""
        ends = np.array([0.0, 1.0] if self.times is None else self.times)
        fractions = " to ".join(dict.fromkeys(f"{fraction:.4g}" for fraction in self.schedule.fractions(ends)))
        times = "" if self.times is None else f", time {' to '.join(dict.fromkeys(f'{time:.4g}' for time in ends))}"
        return f"mask fraction {fractions}{times}"

    @property
    def mask_range(self) -> tuple[float, float]:
        """The smallest and the largest mask fraction that a sequence may have."""
        fractions = self.time_step_mask_fractions
        if fractions is None or self.times is not None:
            fractions = self.schedule.fractions(np.array(self.times or [0.0, 1.0])).tolist()
        return min(fractions), max(fractions)

    def check_length(self, seq_len: int) -> None:
        """Raises `ConfigError` if sequences of this length are too short for a hidden token, and leave nothing to predict."""
        largest = self.mask_range[1]
        if largest * seq_len < 1 - _ROUNDING:
            key = "max_mask_fraction" if self.time_step_mask_fractions is None else "time_step_mask_fractions"
            key = key if self.times is None else "times"
            raise ConfigError(
                f"data.masking.{key}: {encode(getattr(self, key))} given, with which at most a fraction of {largest:.4g} is"
                f" hidden: less than one token of a sequence of {seq_len} (model.seq_len). Hide more"
            )

    @property
    def is_stepped(self) -> bool:
        """Tells whether only a few times have a fraction."""
        return self.time_step_mask_fractions is not None or self.num_time_steps is not None

    @property
    def schedule(self) -> MaskSchedule:
        """The mask fractions by time."""
        if self.time_step_mask_fractions is not None:
            return SteppedSchedule(tuple(self.time_step_mask_fractions))
        continuous = ContinuousSchedule(self.mask_schedule_type, self.min_mask_fraction, self.max_mask_fraction)
        return continuous if self.num_time_steps is None else SteppedSchedule.of(continuous, self.num_time_steps)

    @property
    def has_rates(self) -> bool:
        """Tells whether batches have the weights of the bound: any fraction may occur (with `times`, any of the part that
        was asked for), and hidden tokens are independent and hidden."""
        smallest, largest = self.mask_range
        if self.times is None:
            any_fraction = smallest <= NEARLY_NONE and largest >= 1 - _ROUNDING
        else:
            any_fraction = self.times[0] < self.times[1]
        return (
            not self.is_stepped
            and any_fraction
            and self.mode == "bernoulli"
            and not self.random_fraction + self.unchanged_fraction
        )

    def identity(self) -> dict[str, Any]:
        """Returns what the training data depends on, as plain JSON."""
        keys = {name: value for name, value in encode(self).items() if name != "validation_replicas"}
        return {**keys, "version": _VERSION}

    def ranges(self, count: int) -> list[float]:
        """The largest mask fraction in each of `count` ranges of times. A batch has the same number of sequences in each.

        Raises:
            ConfigError: batches do not.
        """
        if not self.has_rates:
            raise ConfigError(
                "data.masking does not hide each token with the same probability, from none at time 0 to all at time 1."
                f" Remove {WITHOUT_BOUND}"
            )
        if self.mask_replicas is not None:
            raise ConfigError(
                f"data.masking.mask_replicas: {self.mask_replicas} spreads times over the ways of hiding tokens of a"
                " sequence, and not over a batch. Remove it"
            )
        doublings = count // self.strata
        if count % self.strata or doublings & (doublings - 1):
            evenly = ", ".join(str(self.strata << doubling) for doubling in range(3))
            raise ConfigError(
                f"data.masking.strata: {self.strata} spreads the times of a batch evenly over {evenly}, ... equal parts of"
                f" all times. Set it to {count}"
            )
        ends = np.arange(1, count + 1) / count
        return self.schedule.fractions(self.times_of(ends)).tolist()

    def times_of(self, uniform: np.ndarray) -> np.ndarray:
        """The times that have these uniform numbers in [0, 1), float64 likewise."""
        times = self.schedule.times(uniform)
        if self.times is None:
            return times
        first, last = self.times
        return first + (last - first) * times

    def rates(self, times: np.ndarray) -> np.ndarray:
        """The weights of hidden tokens in the bound at some times, float64 likewise, for masks that have them (`has_rates`).
        Of a part of the times, they are those of its share in the bound."""
        rates = self.schedule.rates(times)
        assert rates is not None, "the schedule is continuous"
        return rates if self.times is None else rates * (self.times[1] - self.times[0])

    def check_batch_size(self, size: int) -> None:
        """Raises `ConfigError` if batches of this many sequences cannot have one in each range of times."""
        if self.strata > size:
            raise ConfigError(
                f"data.masking.strata: {self.strata} given, but a batch has only {size} sequences. Set it to a divisor of"
                f" {size}"
            )

    def hide(self, examples: Examples, source: str, split: str, tokenizer: Tokenizer) -> "MaskedExamples":
        """The examples of a split with hidden tokens. Args: source: its name."""
        is_special, mask_id = tokenizer.is_special(), self.mask_id(tokenizer)
        is_special[mask_id] = True  # the tokenizer may not know what this token is for
        masker = Masker(self, mask_id, is_special, zlib.crc32(f"{split} {source}".encode()))
        return MaskedExamples(examples, masker, self.mask_replicas if split == TRAIN else self.validation_replicas)

    def mask_id(self, tokenizer: Tokenizer) -> int:
        """The id of the mask token. Raises `ConfigError` if the tokenizer has none."""
        number = tokenizer.mask_id if self.mask_token is None else tokenizer.vocabulary().get(self.mask_token)
        if number is None:
            what = "no mask token" if self.mask_token is None else f"no token '{self.mask_token}'"
            name = _SUGGESTED if self.mask_token is None else self.mask_token
            raise ConfigError(
                f"data.masking: the tokenizer has {what}. Add it: data.added_tokens: ['{name}'] (for a tokenizer that is"
                f" trained, data.tokenizer: {{type: bpe, special_tokens: ['{END_OF_TEXT}', '{name}']}}), or name another one"
                " in data.masking.mask_token"
            )
        if number in (tokenizer.bos_id, tokenizer.eos_id):
            name = next(token for token, other in tokenizer.vocabulary().items() if other == number)
            raise ConfigError(
                f"data.masking.mask_token: '{name}' given, which begins or ends documents. Name a token that no text has"
            )
        if self.mask_token is not None and tokenizer.writes_text_with(number):
            raise ConfigError(
                f"data.masking.mask_token: '{self.mask_token}' given, which texts may have, and which could not be told from"
                f" a hidden token. Name a token that no text has, or add one: data.added_tokens: ['{_SUGGESTED}']"
            )
        return number


@dataclass(frozen=True)
class Masker:
    """Hides tokens of sequences.

    Attributes:
        config: the section.
        mask_id: id of the mask token.
        is_special: bool [vocab], the tokens that are never hidden, nor put in the place of others.
        source: number that tells the text's source from others.
    """

    config: MaskingConfig
    mask_id: int
    is_special: np.ndarray
    source: int = 0

    def identity(self) -> dict[str, Any]:
        """Returns what masks depend on besides the sequences and their numbers, as plain JSON."""
        special = np.flatnonzero(self.is_special).tolist()
        return {**self.config.identity(), "mask_id": self.mask_id, "special": special, "source": self.source}

    def mask(self, columns: Columns, indices: np.ndarray, draws: np.ndarray, uniform_times: np.ndarray) -> Columns:
        """The columns of `MaskedBatch`.

        Args:
            columns: those of `TokenBatch`, [rows, seq_len] each.
            indices: int64 [rows], the numbers of the sequences in their source.
            draws: int64 [rows], how many times each was read before.
            uniform_times: float64 [rows], a number in [0, 1) for the time of each.
        """
        config, tokens = self.config, columns["tokens"]
        times = config.times_of(uniform_times)
        fractions = config.schedule.fractions(times)[:, None]
        draw = lambda purpose: uniform_numbers(  # noqa: E731
            (config.seed, self.source, purpose, indices, draws), tokens.shape[1]
        )
        maskable = _maskable(columns) & ~self.is_special[tokens]
        chosen = draw(_CHOSEN)
        if config.mode == "bernoulli":
            hidden = maskable & (chosen < fractions)
        else:
            order = np.argsort(np.where(maskable, chosen, 2.0), axis=1, kind="stable")
            ranks = np.empty_like(order)
            np.put_along_axis(ranks, order, np.arange(tokens.shape[1])[None], axis=1)
            counts = np.floor(maskable.sum(axis=1, keepdims=True) * fractions + _ROUNDING)
            hidden = maskable & (ranks < counts)
        replaced = np.where(hidden, self.mask_id, tokens)
        if config.random_fraction or config.unchanged_fraction:
            share, words = draw(_REPLACED), np.flatnonzero(~self.is_special)
            random = words[(draw(_WORDS) * len(words)).astype(int)]
            replaced = np.where(hidden & (share < config.random_fraction), random, replaced)
            replaced = np.where(hidden & (share >= 1 - config.unchanged_fraction), tokens, replaced)
        made = {
            "tokens": replaced.astype(np.int32),
            "targets": tokens,
            "loss_mask": hidden.astype(np.float32),
            "maskable": maskable.astype(np.float32),
            "segment_ids": columns["segment_ids"],
            "positions": columns["positions"],
            "mask_fractions": fractions[:, 0].astype(np.float32),
            "mask_ids": np.full(len(tokens), self.mask_id, np.int32),
        }
        if config.has_rates:
            made["rates"] = config.rates(times).astype(np.float32)
        return made


def _maskable(columns: Columns) -> np.ndarray:
    """bool [rows, seq_len]: which tokens are targets of the next-token loss. The first of a document, which nothing precedes,
    is one if the token after it is."""
    segments, after = columns["segment_ids"], columns["loss_mask"] > 0
    before = np.concatenate([after[:, :1], after[:, :-1]], axis=1)
    begins = np.ones(segments.shape, bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return np.where(begins, after, before) & (segments != 0)


_TIMES = 3  # what a random shift is for; the masks have the numbers before


class MaskedExamples(WrappedExamples):
    """Examples of which some tokens are hidden: in `num_replicas` ways, each an example of its own, or in a new way whenever
    one is drawn.

    Of R ways, index i R + r is way r of example i.

    Args:
        num_replicas: None for a new way at every draw. Then `read` alone returns that of the first.
    """

    def __init__(self, examples: Examples, masker: Masker, num_replicas: int | None):
        super().__init__(examples)
        self._masker, self._num_replicas = masker, num_replicas
        self.is_endless = examples.is_endless and num_replicas is None
        self.arrangement = {**examples.arrangement, "masking": {**masker.identity(), "replicas": num_replicas}}

    def __len__(self) -> int:
        return len(self._examples) * (self._num_replicas or 1)

    @property
    def summary(self) -> str | None:
        ways = "in a new way in each epoch" if self._num_replicas is None else f"in {self._num_replicas} ways"
        masked = f"tokens of each sequence are hidden {ways}"
        return masked if self._examples.summary is None else f"{self._examples.summary}; {masked}"

    def _of(self, indices: np.ndarray) -> np.ndarray:
        return indices // (self._num_replicas or 1)

    def target_positions(self, indices: np.ndarray) -> np.ndarray:
        return super().target_positions(indices) - 1  # a token is its own target

    def read(self, indices: np.ndarray) -> Columns:
        return self._masked(self._of(indices), indices % (self._num_replicas or 1), indices)

    def read_drawn(self, indices: np.ndarray, epochs: np.ndarray, numbers: np.ndarray) -> Columns:
        return self.read(indices) if self._num_replicas is not None else self._masked(indices, epochs, numbers)

    def _masked(self, indices: np.ndarray, draws: np.ndarray, order: np.ndarray) -> Columns:
        """Args: order: numbers over any range of which times are spread evenly."""
        masker = self._masker
        # The same shift for all sources, whose examples are in one batch.
        times = stratified(order, (masker.config.seed, _TIMES), masker.config.strata)
        return masker.mask(self._examples.read(indices), indices, draws, times)
