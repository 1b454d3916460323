"""Measures a model on the first batches of a phase's data, for surgeries whose values depend on it. Nothing is stored."""

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp

from jaxlm.core import tree
from jaxlm.core.axes import MICROBATCH
from jaxlm.core.precision import Precision
from jaxlm.core.sharding import Layout
from jaxlm.data.base import Batches
from jaxlm.engine.state import shardings
from jaxlm.models.base import LanguageModel
from jaxlm.surgery.base import SurgeryConfig

OpenBatches = Callable[[], Batches]


def calibrate(
    surgery: SurgeryConfig, model: LanguageModel, precision: Precision, layout: Layout, open_batches: OpenBatches
) -> Any:
    """What `surgery.measure` returns, summed over its calibration batches. None if it is not calibrated.

    Args:
        model: the model that the surgery will change, in the dtype of storage. It keeps its buffers.
        open_batches: opens the phase's batches at its first step.
    """
    if not surgery.num_calibration_batches:
        return None

    def measure(model: LanguageModel, part: Any) -> Any:
        return surgery.measure(precision.cast_to_compute(model), part.supervised())

    def over_microbatches(model: LanguageModel, batch: Any) -> Any:
        first = jax.tree.map(lambda column: column[MICROBATCH, 0], batch, is_leaf=tree.is_named)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(measure, model, first))
        add = lambda sums, part: jax.tree.map(jnp.add, sums, measure(model, part))  # noqa: E731
        return hax.fold(add, MICROBATCH)(zeros, batch)

    with contextlib.closing(open_batches()) as batches:
        sums, program = None, None
        for batch in itertools.islice(iter(lambda: next(batches), None), surgery.num_calibration_batches):
            if program is None:
                abstract = jax.eval_shape(over_microbatches, model, batch)
                program = jax.jit(over_microbatches, out_shardings=shardings(abstract, layout))
            new = program(model, batch)
            sums = new if sums is None else jax.tree.map(jnp.add, sums, new)
            jax.block_until_ready(sums)  # simulated devices deadlock if many programs are in flight
    return sums
