"""Samplers: what continues prompts with the current weights; here, the devices that train."""

import abc
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import draccus
import jax

from jaxlm.core.field_types import LARGEST_INT, PositiveInt
from jaxlm.core.precision import Precision
from jaxlm.core.sharding import Layout
from jaxlm.core.tracing import BlockSizes, tracing
from jaxlm.data.base import Log
from jaxlm.data.tokenizer.tokenizer import Tokenizer
from jaxlm.models.inference.decoding import XlaOptions
from jaxlm.models.inference.padding import padded_length
from jaxlm.models.inference.responses import Noise, sample_responses
from jaxlm.models.inference.sampling import Sampling
from jaxlm.models.inference.unstacked import Generator
from jaxlm.reading.choices import Registry, choice


@dataclass(frozen=True)
class SamplerContext:
    """Holds what a sampler may need of the run.

    Attributes:
        layout: the mesh that the model is sharded over.
        precision: how the model is cast for computation.
        log: writes a line to the console of process 0.
        progress: says that the run has not stopped, while one call takes long.
        export: writes the weights of the model that trains, without adapters, to a new folder in the format of transformers.
            All processes call it.
        vocab_size: all ids of the run's tokens are below this.
        xla_options, block_sizes: what the training step is compiled with.
    """

    layout: Layout
    precision: Precision
    log: Log
    progress: Callable[[], None] = lambda: None
    export: Callable[[Any, Path], None] = lambda model, folder: None
    vocab_size: int = LARGEST_INT
    xla_options: XlaOptions = ()
    block_sizes: BlockSizes = field(default_factory=BlockSizes)


@dataclass(frozen=True)
class SamplingRequest:
    """Describes what is sampled.

    Attributes:
        step: the step that the samples are for, counted from 0. With the seed, it determines them.
        seed: the run's.
        rows: the number of each prompt's row in the whole rollout. A row's tokens depend on it, and not on the other rows.
        turn: number of earlier requests that have sampled for the same rows, in a conversation with an environment.
        max_new_tokens: the most tokens that are sampled for a prompt.
        sampling: what tokens are drawn from; its temperature is above 0.
        stop_ids: tokens that end a sample. They are part of it.
        num_rows: number of prompts of the largest request of this kind, for samplers that compile a program for it; None if
            this is it.
        room: the most tokens that are of use, if fewer than `max_new_tokens`. More are cut off.
    """

    step: int
    seed: int
    rows: Sequence[int]
    max_new_tokens: int
    sampling: Sampling
    stop_ids: tuple[int, ...]
    turn: int = 0
    num_rows: int | None = None
    room: int | None = None


class Sample(NamedTuple):
    """Holds what follows a prompt.

    Attributes:
        tokens: with the token that ended it, and nothing after it.
        logps: log-likelihood of each token under the distribution that it was sampled from; 0 where the mask is.
        mask: 1 where the policy has written the token, 0 where an environment has.
        is_finished: whether a stop token or an environment ended it, and not a limit.
        turn_ends: number of tokens up to the end of each turn of the policy; empty if all tokens are one turn.
        reward: the sum of an environment's rewards.
    """

    tokens: tuple[int, ...]
    logps: tuple[float, ...]
    mask: tuple[int, ...]
    is_finished: bool
    turn_ends: tuple[int, ...] = ()
    reward: float = 0.0


class Sampler(abc.ABC):
    """Continues prompts. All processes call it with the same arguments, and get the same samples."""

    @abc.abstractmethod
    def sample(self, model: Any, prompts: Sequence[Sequence[int]], request: SamplingRequest) -> list[Sample]:
        """One sample for each prompt. A prompt with several samples is given several times, one after another.

        Args:
            model: the one that trains, in the dtypes and with the sharding of its parameters.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Releases what it holds."""


@dataclass(frozen=True)
class SamplerConfig(Registry, draccus.ChoiceRegistry, abc.ABC):
    """Describes what samples the responses."""

    @classmethod
    def default_choice_name(cls) -> str | None:
        return "local"

    def check(self) -> None:
        """Raises `ConfigError` if it cannot be opened, before anything is compiled."""
        return

    def check_opens(self, sampling: Sampling, *, dry: bool) -> None:
        """Raises `ConfigError` if it cannot sample with these options, or needs something that is not there. Process 0 calls
        it before anything is compiled.

        Args:
            dry: write nothing, and do not wait for a server that is not ready.
        """
        return

    def check_tokens(self, tokenizer: Tokenizer, *, dry: bool) -> None:
        """Raises `ConfigError` if it has other tokens than the run. Called after `check_opens`, by process 0."""
        return

    @abc.abstractmethod
    def open(self, context: SamplerContext) -> Sampler:
        """Opens the sampler, on every process."""

    def rows_at_once(self, num_rows: int) -> int:
        """Counts the rows of a rollout that the devices that train sample at the same time; 0 if they sample none."""
        return 0


@choice(SamplerConfig, "local")
class LocalSamplerConfig(SamplerConfig):
    """Samples on the devices that train, with the weights in the compute dtype, sharded as they are.

    Attributes:
        max_rows: the most responses that are sampled at the same time; null samples all responses of a rollout at once. Their
            keys and values take memory, `max_rows` times the tokens of the longest prompt and `max_new_tokens`.
    """

    max_rows: PositiveInt | None = None

    def open(self, context: SamplerContext) -> Sampler:
        return LocalSampler(self, context)

    def rows_at_once(self, num_rows: int) -> int:
        return min(self.max_rows or num_rows, num_rows)


class LocalSampler(Sampler):
    """Samples with a KV cache, in one program for the prompts and one for all new tokens.

    A conversation with an environment asks `sample` once per turn, with the text so far as the prompts.
    """

    def __init__(self, config: LocalSamplerConfig, context: SamplerContext):
        self._config, self._context = config, context
        # One function for all calls: jax keeps something for each that it traces, `jax.eval_shape` makes one in each call.
        self._to_compute = jax.jit(context.precision.cast_to_compute)

    def sample(self, model: Any, prompts: Sequence[Sequence[int]], request: SamplingRequest) -> list[Sample]:
        generator = Generator.of(self._cast(model))  # until this returns: a step deletes the buffers that it shares
        num_rows = request.num_rows or len(prompts)
        most = self._config.rows_at_once(num_rows)
        samples: dict[int, Sample] = {}
        for places in _calls(prompts, most):
            with tracing(block_sizes=self._context.block_sizes):
                responses = sample_responses(
                    generator,
                    [prompts[place] for place in places],
                    [request.rows[place] for place in places],
                    Noise(request.seed, request.step, request.turn),
                    max_new_tokens=request.max_new_tokens,
                    sampling=request.sampling,
                    stop_ids=request.stop_ids,
                    num_rows=most,
                    xla_options=self._context.xla_options,
                )
            self._context.progress()
            for place, tokens, logps in zip(places, responses.tokens, responses.logps, strict=True):
                written = tuple(tokens[tokens >= 0].tolist())
                ones, is_finished = (1,) * len(written), written[-1] in request.stop_ids
                samples[place] = Sample(written, tuple(logps[: len(written)].tolist()), ones, is_finished)
        return [samples[place] for place in range(len(prompts))]

    def _cast(self, model: Any) -> Any:
        """The model in its compute dtypes. What has them already is not copied."""
        arrays, structure = jax.tree.flatten(model)
        wanted = [leaf.dtype for leaf in jax.tree.leaves(self._to_compute.eval_shape(model))]
        others = [number for number, array in enumerate(arrays) if array.dtype != wanted[number]]
        for number, array in zip(
            others, _astype([arrays[n] for n in others], tuple(wanted[n] for n in others)), strict=True
        ):
            arrays[number] = array
        return jax.tree.unflatten(structure, arrays)

    def close(self) -> None:
        return


@functools.partial(jax.jit, static_argnums=1)
def _astype(arrays: list[jax.Array], dtypes: tuple[Any, ...]) -> list[jax.Array]:
    return [array.astype(dtype) for array, dtype in zip(arrays, dtypes, strict=True)]


def _calls(prompts: Sequence[Sequence[int]], most: int) -> Iterator[list[int]]:
    """The places of the prompts that are sampled together: short ones with short ones, as they are padded to one length."""
    in_order = sorted(range(len(prompts)), key=lambda place: padded_length(len(prompts[place])))
    return (in_order[at : at + most] for at in range(0, len(in_order), most))
