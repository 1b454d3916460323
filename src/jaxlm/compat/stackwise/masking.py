"""Translates masks and time: `data.masking`, `model.time_embedding` and `preset.depth_times`."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxlm.compat.section import Section, Translated
from jaxlm.compat.stackwise.growth import WHOLE, Growth
from jaxlm.compat.stackwise.keys import MASK, Objective
from jaxlm.core.errors import shown
from jaxlm.core.values.mask_schedule import ContinuousSchedule, SteppedSchedule

_FRACTIONS = (0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85)
_NUM_STEPS = 8
_SCHEDULE = ("mask_schedule_type", "min_mask_fraction", "max_mask_fraction")
_OF_MODEL = ("mask_fraction_min", "mask_fraction_max")
_OF_INPUT = ("time_embedding_dim", "time_encoding_type")
_OF_DEPTH = ("stack_time_mapping", "time_per_stack")
_LEARNED = "learned"
_MAPPINGS = ("linear", "exponential")
_PER_STACK = 100
_ROWS = "model.time_embedding.num_time_steps"
_MOST_ROWS = 10_000
_ROUNDING = 1e-6  # of a fraction, in float32


def put_masking(
    growth: Growth, training: Section, progressive: Section, model: Section, objective: Objective, out: Translated
) -> None:
    """Writes the masks and the time embedding."""
    by_depth, has_table = _put_time(growth, training, progressive, objective, out)
    _ids(training, model)
    if objective.name == "mlm":
        out.put("data.masking.mode", "fixed_count", training, "time_step_masking")
    fractions, num_steps = training.take("time_step_mask_fractions"), training.number("num_time_steps")
    if num_steps is not None and (not isinstance(num_steps, int) or num_steps < 1):
        raise training.error("num_time_steps", f"{num_steps} given, a positive integer expected")
    stepped = training.choice("time_step_masking", (True, False), True)
    without_list = by_depth and fractions is None
    if objective.name == "diffusion" or without_list or not stepped:
        reason = (
            "masks of any fraction are drawn, so that the loss is a bound"
            if objective.name == "diffusion"
            else "each stack has the fraction of its own time, by mask_schedule_type"
            if without_list
            else "time_step_masking is false"
        )
        if not stepped and (objective.name == "diffusion" or without_list):
            training.note("time_step_masking", f"no effect: {reason}")
        if fractions is not None:
            training.note("time_step_mask_fractions", f"no effect: {reason}")
        if has_table:
            out.put(_ROWS, num_steps or _NUM_STEPS, training, "num_time_steps")
        elif num_steps is not None and not by_depth:
            training.note("num_time_steps", f"no effect: {reason}")
        _put_schedule(training, model, out, from_zero=objective.name == "diffusion")
        return
    if fractions is None and num_steps in (None, _NUM_STEPS) and not any(key in training for key in _SCHEDULE):
        fractions = list(_FRACTIONS)
    if fractions is None:
        num_steps = num_steps or _NUM_STEPS
        out.put("data.masking.num_time_steps", num_steps, training, "num_time_steps")
        schedule = _put_schedule(training, model, out, from_zero=False)
        if has_table:
            _put_rows(SteppedSchedule.of(schedule, num_steps).by_step, training, "num_time_steps", out)
        return
    if not isinstance(fractions, list) or not all(type(fraction) in (int, float) for fraction in fractions):
        raise training.error("time_step_mask_fractions", f"{shown(fractions)} given, a list of fractions expected")
    if num_steps not in (None, len(fractions)):
        raise training.error("num_time_steps", f"{num_steps} given, but time_step_mask_fractions has {len(fractions)}")
    out.put("data.masking.time_step_mask_fractions", fractions, training, "time_step_mask_fractions")
    if has_table:
        _put_rows(fractions, training, "time_step_mask_fractions", out)
    for key in _SCHEDULE:
        training.ignore(key, "no effect: time_step_mask_fractions says the fraction of each step")
    for key in _OF_MODEL:
        model.ignore(key, "no effect: training.time_step_mask_fractions says the fraction of each step")


def drop_masking(training: Section, progressive: Section, model: Section, objective: Objective) -> None:
    """Takes the keys of masks and times for an objective that hides no tokens."""
    why = f"no effect: training_objective {objective.name} hides no tokens"
    keys = (*_SCHEDULE, "mask_token_id", "time_step_masking", "num_time_steps", "time_step_mask_fractions")
    for section, names in ((training, keys), (model, (*_OF_MODEL, "special_mask_id"))):
        for key in names:
            if section.take(key) is not None:
                section.note(key, why)
    for key in ("time_interpretation", *_OF_INPUT, *_OF_DEPTH):
        progressive.ignore(key, why)


def _ids(training: Section, model: Section) -> None:
    for section, key in ((training, "mask_token_id"), (model, "special_mask_id")):
        section.ignore(
            key,
            f"no effect: the mask is the tokenizer's own, or {MASK}. Name another one in data.masking.mask_token",
        )


def _put_rows(fractions: Sequence[float], training: Section, key: str, out: Translated) -> None:
    """Writes the rows of a learned table, in which each time step has a row of its own.

    Raises:
        ConfigError: steps are too close to each other.
    """
    ordered = np.unique(fractions)
    for rows in range(len(ordered), _MOST_ROWS + 1):
        lowest, highest = (np.floor((ordered + end) * rows).clip(0, rows - 1) for end in (-_ROUNDING, _ROUNDING))
        if (lowest[1:] > highest[:-1]).all():
            out.put(_ROWS, rows, training, key)
            return
    raise training.error(
        key,
        f"fractions of {len(ordered)} time steps given, of which two are only {np.diff(ordered).min():.2g} apart, with"
        f" time_encoding_type: {_LEARNED}: a table of {_MOST_ROWS:,} rows, one for each equal part of the fraction, would not"
        " tell them apart. Set fewer steps, or time_encoding_type: sinusoidal",
    )


def _put_schedule(training: Section, model: Section, out: Translated, *, from_zero: bool) -> ContinuousSchedule:
    """Writes how the fraction grows with the time, and returns it.

    Args:
        from_zero: whether no ends are written that were not given: a bound needs all fractions.
    """
    kind = training.choice("mask_schedule_type", ("linear", "cosine", "exponential"), "linear")
    out.put("data.masking.mask_schedule_type", kind, training, "mask_schedule_type")
    ends = []
    for end, default in (("min", 0.15), ("max", 0.9)):
        mine, other = training.number(f"{end}_mask_fraction"), model.number(f"mask_fraction_{end}")
        if None not in (mine, other) and mine != other:
            raise training.error(
                f"{end}_mask_fraction", f"{mine} given, but model.mask_fraction_{end} is {other}. Remove one of them"
            )
        value = other if mine is None else mine
        ends.append(default if value is None else value)
        if value is not None or not from_zero:
            out.put(f"data.masking.{end}_mask_fraction", ends[-1], training, f"{end}_mask_fraction")
    if kind == "exponential" and ends[0] <= 0:
        raise training.error("min_mask_fraction", f"{ends[0]} given, but an exponential schedule begins above 0")
    return ContinuousSchedule(kind, *ends)


def _put_time(
    growth: Growth, training: Section, progressive: Section, objective: Objective, out: Translated
) -> tuple[bool, bool]:
    """Writes what time is.

    Returns:
        Whether it is the depth of a stack, and whether the model learns a table with a row for each time step.
    """
    key = "time_interpretation"
    time = progressive.choice(key, ("input", "depth"), "depth" if growth.is_progressive else None)
    if time == "input":
        for name in _OF_DEPTH:
            progressive.ignore(name, "no effect with time_interpretation: input")
        kind = progressive.choice("time_encoding_type", ("sinusoidal", _LEARNED), "sinusoidal")
        embedding: dict[str, Any] = {"type": kind, "dim": progressive.take("time_embedding_dim", 512)}
        for name, value in embedding.items():
            out.put(f"model.time_embedding.{name}", value, progressive, key)
        return False, kind == _LEARNED
    for name in _OF_INPUT:
        progressive.ignore(name, "no effect with time_interpretation: depth")
    if not growth.is_progressive:
        for name in _OF_DEPTH:
            progressive.ignore(name, WHOLE)
        if time is not None:
            progressive.note(key, WHOLE)
        return False, False
    mapping = progressive.take("stack_time_mapping", "linear")
    if mapping == "custom" or not (isinstance(mapping, list) or callable(mapping) or mapping in _MAPPINGS):
        raise progressive.error(
            "stack_time_mapping",
            f"{shown(mapping)} given. A function can only be given in Python: write linear, exponential, or the list of the"
            " stacks' time steps, from the least noise to the most, such as [0, 50, 150]",
        )
    times: dict[str, Any] = {"mapping": mapping}
    per_stack = progressive.number("time_per_stack")
    is_stepped = objective.name != "diffusion" and training.peek("time_step_masking") is not False
    fractions = training.peek("time_step_mask_fractions") if is_stepped else None
    if (num_steps := training.peek("num_time_steps")) is not None:
        times["num_time_steps"] = num_steps
    if num_steps is not None or fractions is not None:
        key_of_steps = "num_time_steps" if num_steps is not None else "time_step_mask_fractions"
        if per_stack is not None:
            progressive.note("time_per_stack", f"no effect: training.{key_of_steps} says how many time steps there are")
        per_stack = None
    else:
        times["time_per_stack"] = per_stack = _PER_STACK if per_stack is None else per_stack
    if callable(mapping):
        total = num_steps or (len(fractions or ()) if per_stack is None else per_stack * growth.num_stacks)
        steps = [mapping(stack, growth.num_stacks, total) for stack in range(growth.num_stacks)]
        times |= {"order": "training", "mapping": steps}
    else:
        _note_order(progressive, mapping, per_stack, growth)
    for name, value in times.items():
        out.put(f"preset.depth_times.{name}", value, progressive, "stack_time_mapping" if name == "mapping" else key)
    return True, False


def _note_order(progressive: Section, mapping: Any, per_stack: Any, growth: Growth) -> None:
    """Says which stack has which time, and how to have the guide's. Args: per_stack: None if other keys give the steps."""
    said, instead = [], []
    if growth.at == "append":
        said.append("the stack beside the head, which trains last, has the least noise")
        instead.append("--preset.depth_times.order training")
    if mapping == "linear" and isinstance(per_stack, int):
        said.append("linear spreads the stacks from the first time step to the last")
        instead.append(f"--preset.depth_times.mapping '{[per_stack * stack for stack in range(growth.num_stacks)]}'")
    if said:
        progressive.note(
            "time_interpretation",
            f"depth: {', and '.join(said)}. In the guide, stack k in the order of training has the time step k x"
            f" time_per_stack: set {' '.join(instead)} for that",
        )
