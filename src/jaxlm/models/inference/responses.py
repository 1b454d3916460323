"""Samples responses, for training on them: all tokens count, the last one too, and so do the probabilities that they were
sampled with.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray

from jaxlm.core import tree
from jaxlm.core.axes import BATCH, POSITION
from jaxlm.core.errors import ConfigError
from jaxlm.core.sharding import current_layout
from jaxlm.core.tracing import used_arguments
from jaxlm.models.base import Inputs, LanguageModel
from jaxlm.models.inference.decoding import Draw, Request, XlaOptions, begin, compile_programs, seen_tokens, write_until
from jaxlm.models.inference.padding import left_padded, program_rows
from jaxlm.models.inference.sampling import Sampling
from jaxlm.models.inference.unstacked import Generator
from jaxlm.models.linear import Linear


def check_samples_as_trained(model: LanguageModel) -> None:
    """Raises `ConfigError` if a training step computes other probabilities than a sampler does with the same weights."""
    axes = (Axis(BATCH, 1), Axis(POSITION, model.Pos.size))
    column: Any = NamedArray(jax.ShapeDtypeStruct((1, model.Pos.size), jnp.int32), axes)  # type: ignore[arg-type]
    key = jax.eval_shape(lambda: jax.random.key(0))
    read_key, *_ = used_arguments(
        lambda key, model, inputs: model.hidden(inputs, key=key).final, key, model, Inputs(column, column, column)
    )
    fp8 = [path for path, layer in tree.modules_by_path(model, Linear) if layer.fp8 is not None]
    differences = {
        f"{''.join(fp8[:1])} multiplies in fp8 (surgery fp8). Remove the surgery": fp8,
        "it is random (dropout). Set the dropout of the model and of its adapters to 0": read_key,
    }
    for difference, applies in differences.items():
        if applies:
            raise ConfigError(
                "data.type: rollouts samples from the model without what it does in training only, so that the ratios of the"
                f" objective would compare two models. In training, {difference}"
            )


class Noise(NamedTuple):
    """Holds what the random numbers of each row depend on: these numbers, the row's number, and the position of the token.

    Attributes:
        seed: of the run.
        step: number of the step that the responses are for.
        turn: number of earlier responses of the same rows.
    """

    seed: int
    step: int
    turn: int = 0

    def keys(self, rows: Sequence[int], num_rows: int) -> jax.Array:
        """One key per row of a program. Args: rows: the numbers of the first of them."""
        numbers = np.zeros(num_rows, np.uint32)
        numbers[: len(rows)] = rows
        return _row_keys(np.array(self, np.uint32), numbers)


@jax.jit
def _row_keys(words: jax.Array, numbers: jax.Array) -> jax.Array:
    key = jax.random.key(words[0])
    for word in (words[1], words[2]):
        key = jax.random.fold_in(key, word)
    return jax.vmap(functools.partial(jax.random.fold_in, key))(numbers)


class Responses(NamedTuple):
    """Sampled tokens, one row per prompt, on the host of every process.

    Attributes:
        tokens: int32 [rows, max_new_tokens], with the token that ended the row; -1 after it.
        logps: float32 [rows, max_new_tokens], log-likelihood of each token under the distribution that it was sampled from; 0
            after the end.
    """

    tokens: np.ndarray
    logps: np.ndarray


def sample_responses(
    generator: Generator,
    prompts: Sequence[Sequence[int]],
    rows: Sequence[int],
    noise: Noise,
    *,
    max_new_tokens: int,
    sampling: Sampling,
    stop_ids: Sequence[int],
    num_rows: int | None = None,
    xla_options: XlaOptions = (),
) -> Responses:
    """Continues each prompt until a stop token or `max_new_tokens`, all rows at once.

    Call it inside `layout.use()`, on all processes with the same arguments. The prompts and new tokens must fit into the
    model's `seq_len`.

    Args:
        rows: the number of each prompt's row. A row's tokens depend on it, and not on the other rows of the call.
        sampling: with a temperature above 0.
        num_rows: rows of the program, at least as many as prompts; None has as many. Equal numbers compile once.
        xla_options: what the programs are compiled with.
    """
    num_rows = program_rows(num_rows or len(prompts))
    request = _request(generator.model, prompts, noise.keys(rows, num_rows), max_new_tokens, sampling, stop_ids)
    state = begin(generator, request, xla_options=xla_options)
    state = write_until(generator, state, request.draw, max_new_tokens, xla_options)
    assert state.logps is not None, "they were asked for"
    return Responses(np.asarray(state.written)[: len(prompts)], np.asarray(state.logps)[: len(prompts)])


def _request(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    keys: jax.Array,
    max_new_tokens: int,
    sampling: Sampling,
    stop_ids: Sequence[int],
) -> Request:
    draw = Draw.of(keys, stop_ids, sampling.numbers)
    seen = seen_tokens(prompts, draw, model.Vocab.size)
    # The last token is not read again, so it needs no slot.
    capacity, slots = max_new_tokens, max_new_tokens - 1
    return Request(left_padded(prompts, len(keys)), draw, capacity, slots, with_logps=True, seen=seen)


class SamplingPrograms(NamedTuple):
    """The compiled programs of `sample_responses`.

    Attributes:
        prompts: reads the prompts and samples the first token of each.
        tokens: samples the other tokens, in a loop.
        cache: shapes, dtypes and shardings of the keys and values.
    """

    prompts: jax.stages.Compiled
    tokens: jax.stages.Compiled
    cache: Any


def compile_sampling(
    model: LanguageModel,
    num_rows: int,
    prompt_tokens: int,
    max_new_tokens: int,
    sampling: Sampling,
    xla_options: XlaOptions = (),
) -> SamplingPrograms:
    """Compiles the programs of `sample_responses` for a number of rows and a length of prompts, from shapes alone. Layers are
    stacked, as on all devices except a single CPU.

    Call it inside `layout.use()`. Args: model: shapes, dtypes and shardings.
    """
    num_rows, layout = program_rows(num_rows), current_layout()
    prompts = [[0] * prompt_tokens] * num_rows

    def made() -> Request:  # traced, because the devices may not exist
        return _request(model, prompts, Noise(0, 0).keys((), num_rows), max_new_tokens, sampling, ())

    where = None if layout is None else layout.replicated()
    place = lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=where)  # noqa: E731
    request = jax.tree.map(place, jax.eval_shape(made))
    first, others, state = compile_programs(Generator(model, model), request, xla_options)
    return SamplingPrograms(first, others, state.cache.stacks)
