"""Samples on the devices that train."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxlm.core.field_types import PositiveInt
from jaxlm.core.tracing import tracing
from jaxlm.data.rollouts.sampler import Sample, Sampler, SamplerConfig, SamplerContext, SamplingRequest
from jaxlm.models.inference.kv_cache import padded_length
from jaxlm.models.inference.responses import Noise, sample_responses
from jaxlm.models.inference.unstacked import Generator
from jaxlm.reading.choices import choice


@choice(SamplerConfig, "local")
class LocalSamplerConfig(SamplerConfig):
    """Samples on the devices that train, with the weights in the compute dtype, sharded as they are.

    Attributes:
        max_rows: the most responses that are sampled at the same time; null samples all responses of a rollout at once. Their
            keys and values take memory, `max_rows` times the tokens of the longest prompt and `max_new_tokens`.
    """

    max_rows: PositiveInt | None = None

    def check(self) -> None:
        return

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
                samples[place] = _sample(tokens, logps, request.stop_ids)
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


def _sample(tokens: np.ndarray, logps: np.ndarray, stop_ids: Sequence[int]) -> Sample:
    written = tuple(tokens[tokens >= 0].tolist())
    return Sample(written, tuple(logps[: len(written)].tolist()), (1,) * len(written), written[-1] in stop_ids)
