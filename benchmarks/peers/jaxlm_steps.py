"""Shared by jaxlm's peers: the compiled step of `jaxlm train`, one timed step after another. Needs jaxlm."""

import itertools

import jax.numpy as jnp

from jaxlm.commands.bench import random_batch
from jaxlm.engine.entry import enter_phase
from jaxlm.engine.sync import FlagSync
from jaxlm.session.compilation.step import compile_step


def take_steps(plan, clock, rows_of, *, weights=None, changed=lambda model: model):
    """Takes steps of the first phase as long as the clock says. Call it inside `plan.layout.use()`.

    Args:
        clock: a `common.Clock`.
        rows_of: inputs and targets of a step by its number, int32 [rows, length] each.
        weights: the model to start with, instead of one built from the seed.
        changed: the initial model, with other weights.
    """
    phase = plan.phases[0]
    enter = enter_phase(plan.state_builder, phase, plan.layout, None, weights)
    step = compile_step(plan, phase, lambda _: None).call
    state = enter()
    state = type(state)(**{**vars(state), "model": changed(state.model)})
    flags = FlagSync.unset(plan.layout)
    like = random_batch(plan, 0)
    for number in itertools.count():
        state, report = step(state, {}, _batch(like, *rows_of(number)), flags)
        if not clock.tick(report.metrics["train/loss"]):
            break


def _batch(like, inputs, targets):
    """The rows of a step as a training batch."""
    column = lambda array: type(like.tokens)(jnp.asarray(array).reshape(like.tokens.array.shape), like.tokens.axes)  # noqa: E731
    return type(like)(column(inputs), column(targets), like.loss_mask, like.segment_ids, like.positions)
