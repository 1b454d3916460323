"""The objective of all stacks."""

from dataclasses import dataclass
from typing import Literal

from jaxlm.interop.section import Section
from jaxlm.interop.translated import Translated

MASK = "<|mask|>"


@dataclass(frozen=True)
class Objective:
    """A `training_objective`.

    Attributes:
        name: in StackWise.
        hides_tokens: whether masks are drawn.
        looks_both_ways: which attention it needs; None for either.
    """

    name: Literal["mlm", "clm", "custom", "diffusion"]
    hides_tokens: bool
    looks_both_ways: bool | None


_OBJECTIVES = {
    one.name: one
    for one in (
        Objective("mlm", True, True),
        Objective("clm", False, False),
        Objective("custom", False, None),
        Objective("diffusion", True, True),
    )
}
_TYPES = {"clm": "next_token"}


def put_objective(progressive: Section, training: Section, out: Translated) -> Objective:
    """Writes the objective of all stacks."""
    name = progressive.choice("training_objective", _OBJECTIVES, "mlm")
    training.ignore(
        "fine_tune_mode", f"no effect: all stacks have the objective progressive.training_objective ({name})"
    )
    out.put("objective.type", _TYPES.get(name, name), progressive, "training_objective")
    return _OBJECTIVES[name]
