"""Proofs that a field has an effect: an exact error, or an exact difference in a program, the state or the schedule.

Each proof compares the plan of a base tree with that of the same tree after changing one field, and states the
expected difference. A changed start-up message is not a proof. A program is the smallest that the field changes.
"""

import ast
import functools
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import jax
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.core.axes import MICROBATCH
from jaxlm.core.errors import ConfigError
from jaxlm.core.tracing import tracing
from jaxlm.engine.phases import Phase
from jaxlm.engine.state import OBJECTIVE_SLOT, RunState, sharded_shapes
from jaxlm.plan.load_config import decode_run
from jaxlm.plan.plan import Plan, make_plan
from jaxlm.reading.yaml import ConfigSource
from jaxlm.session.compilation.step import abstract_batch, trace_step
from jaxlm.session.references import abstract_annotations, abstract_references
from tests.small_runs import Tree

_ROOT = Path(__file__).parents[2]
Part = Literal["loss", "update", "step"]
"""What is lowered: the loss of a microbatch, the optimizer's update, or the step, which has both and the gradient."""


def _trace_loss(plan: Plan, phase: Phase) -> jax.stages.Traced:
    def loss(state: RunState, refs: Any, batch: Any) -> Any:
        slot, model = state.slots.get(OBJECTIVE_SLOT), plan.precision.cast_to_compute(state.model)
        keyed = phase.objective.prepare_batch(batch, state.key)
        first = jax.tree.map(lambda column: column[MICROBATCH, 0], keyed, is_leaf=tree.is_named)
        first = phase.objective.annotate(refs, first, slot, model)
        with tracing(quantized_products=True):
            return phase.objective.terms(model, first, slot, key=state.key)

    batch = abstract_batch(plan, phase)
    if phase.objective.facts.annotation_key is not None:
        batch = replace(batch, annotations=abstract_annotations(plan, phase, batch))
    state = sharded_shapes(plan.state_builder.abstract_state(phase), plan.layout)
    return jax.jit(loss).trace(state, abstract_references(plan, phase), batch)


def _trace_update(plan: Plan, phase: Phase) -> jax.stages.Traced:
    abstract = plan.state_builder.abstract_state(phase)
    optimizer = phase.transformation(abstract.model)

    def update(state: RunState) -> Any:
        trainable, _ = phase.split(state.model)
        return optimizer.update(trainable, state.opt_state, trainable)

    return jax.jit(update).trace(abstract)


_TRACE: dict[Part, Callable[[Plan, Phase], jax.stages.Traced]] = {
    "loss": _trace_loss,
    "update": _trace_update,
    "step": trace_step,
}


class Outcome:
    """The result of a configuration tree: a plan or an error. Everything is computed lazily."""

    def __init__(self, tree: Tree):
        self.tree = tree
        self._programs: dict[Part, str] = {}
        self._constants: dict[Part, Counter[tuple[str, ...]]] = {}

    @functools.cached_property
    def _planned(self) -> Plan | ConfigError:
        try:
            return make_plan(decode_run(ConfigSource(self.tree), None), self.tree["trainer"]["id"], 64)
        except ConfigError as error:
            return error

    @property
    def error(self) -> str:
        """The message of the `ConfigError`; empty if there is none."""
        return str(self._planned) if isinstance(self._planned, ConfigError) else ""

    @property
    def plan(self) -> Plan:
        """The plan, if there is one."""
        assert isinstance(self._planned, Plan), self.error
        return self._planned

    def program(self, part: Part) -> str:
        """The lowered program of every phase."""
        if part not in self._programs:
            with self.plan.layout.use():
                lowered = [_TRACE[part](self.plan, phase).lower() for phase in self.plan.phases]
            self._programs[part] = "\n".join(one.as_text() for one in lowered)
        return self._programs[part]

    def constants(self, part: Part) -> Counter[tuple[str, ...]]:
        """How often each number or list of numbers, rounded to five digits, is a constant of the program."""
        if part not in self._constants:
            found = re.findall(r"dense<([-+.\deE, \[\]]+)>", self.program(part))
            numbers = (re.findall(r"[^\[\], ]+", one) for one in found)
            self._constants[part] = Counter(tuple(_digits(float(number)) for number in one) for one in numbers)
        return self._constants[part]

    @functools.cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Path -> shape of every array in the first phase's state."""
        state = self.plan.state_builder.abstract_state(self.plan.phases[0])
        return {path: tuple(tree.raw(leaf).shape) for path, leaf in tree.leaves(state)}

    @functools.cached_property
    def parameters(self) -> dict[str, np.ndarray]:
        """Path -> initial parameters of the first phase."""
        builder = self.plan.state_builder
        model = builder.entry(self.plan.phases[0]).model(builder.initial_model())
        return {path: np.asarray(tree.raw(leaf)) for path, leaf in tree.leaves(model)}

    @functools.cached_property
    def decays(self) -> dict[str, float]:
        """Path -> weight decay of every trainable parameter of the first phase."""
        phase = self.plan.phases[0]
        groups = phase.groups(self.plan.state_builder.abstract_state(phase).model)
        return {path: group.weight_decay for group in groups for path in group.paths}


def _digits(number: float) -> str:
    return f"{number:.4e}"


@functools.cache
def _cached(text: str) -> Outcome:
    return Outcome(json.loads(text))


def outcome_of(tree: Tree) -> Outcome:
    """The outcome of a tree, planned once for all fields that are changed in it."""
    return _cached(json.dumps(tree))


class Proof(Protocol):
    """Fails if changing a field does not have the expected effect."""

    def check(self, before: Outcome, after: Outcome) -> None:
        """Asserts the difference."""
        ...


@dataclass(frozen=True)
class Refused:
    """The changed value gives an error with this text."""

    pattern: str

    def check(self, before: Outcome, after: Outcome) -> None:
        assert not before.error
        assert re.search(self.pattern, after.error), f"the error is {after.error!r}"


@dataclass(frozen=True)
class Allowed:
    """The base gives an error with this text; after the change a value that the run reads from the plan is this."""

    pattern: str
    value: "Value"

    def check(self, before: Outcome, after: Outcome) -> None:
        assert re.search(self.pattern, before.error), f"the error is {before.error!r}"
        assert self.value.read(after.plan) == self.value.expected


@dataclass(frozen=True)
class Program:
    """The lowered program has more matches of `gains` and fewer of `loses` than the base.

    Attributes:
        part: what is lowered.
        alone: whether other fields of the base may have the same effect, so that the field needs a program of its own.
            Otherwise the base has no match of `gains`, or the changed program none of `loses`.
    """

    gains: str = ""
    loses: str = ""
    alone: bool = True
    part: Part = "loss"

    def check(self, before: Outcome, after: Outcome) -> None:
        assert self.gains or self.loses
        for pattern, sign in ((self.gains, 1), (self.loses, -1)):
            if pattern:
                old, new = (len(re.findall(pattern, outcome.program(self.part))) for outcome in (before, after))
                assert sign * (new - old) > 0, f"{pattern}: {old} before and {new} after"
                assert self.alone or 0 in (old, new), f"{pattern}: {old} before and {new} after"


@dataclass(frozen=True)
class Constant:
    """The program has this number or list of numbers as a constant more often than the base.

    Attributes:
        alone: whether other fields of the base change these numbers too, so that the field needs a program of its own.
        part: what is lowered.
    """

    numbers: tuple[float, ...]
    alone: bool
    part: Part

    def __init__(self, *numbers: float, alone: bool = False, part: Part = "loss"):
        object.__setattr__(self, "numbers", numbers)
        object.__setattr__(self, "alone", alone)
        object.__setattr__(self, "part", part)

    def check(self, before: Outcome, after: Outcome) -> None:
        wanted = tuple(map(_digits, self.numbers))
        old, new = (outcome.constants(self.part)[wanted] for outcome in (before, after))
        assert new > old, f"{wanted}: {old} before and {new} after"


@dataclass(frozen=True)
class Shapes:
    """State arrays that match each pattern have this shape and had another one; None means that no array matches."""

    expected: Mapping[str, tuple[int, ...] | None]

    def check(self, before: Outcome, after: Outcome) -> None:
        for pattern, shape in self.expected.items():
            old, new = ({s for p, s in o.shapes.items() if re.search(pattern, p)} for o in (before, after))
            assert new == (set() if shape is None else {shape}), f"{pattern}: {new}"
            assert old != new, f"{pattern}: {old} before too"


@dataclass(frozen=True)
class Initial:
    """Initial parameters that match `pattern` are multiplied by `factor`; None means other random numbers."""

    pattern: str
    factor: float | None = None

    def check(self, before: Outcome, after: Outcome) -> None:
        pairs = [
            (before.parameters[path], new) for path, new in after.parameters.items() if re.search(self.pattern, path)
        ]
        assert pairs
        for old, new in pairs:
            assert old.shape == new.shape
            if self.factor is None:
                assert not np.any(old == new)
            else:
                np.testing.assert_allclose(new, old * self.factor, rtol=1e-6)


@dataclass(frozen=True)
class Rates:
    """The learning rates at these steps of the first phase have these values and had others."""

    expected: Mapping[int, float]

    def check(self, before: Outcome, after: Outcome) -> None:
        for step, rate in self.expected.items():
            old, new = (
                float(phase.optimizer.schedule(phase.num_steps)(step))
                for phase in (before.plan.phases[0], after.plan.phases[0])
            )
            assert new == pytest.approx(rate, rel=1e-5), f"step {step}"
            assert old != pytest.approx(rate, rel=1e-3), f"step {step} before"


@dataclass(frozen=True)
class Decays:
    """Parameters that match each pattern have this weight decay and had another one."""

    expected: Mapping[str, float]

    def check(self, before: Outcome, after: Outcome) -> None:
        for pattern, decay in self.expected.items():
            old, new = ({d for p, d in o.decays.items() if re.search(pattern, p)} for o in (before, after))
            assert new == {decay}, f"{pattern}: {new}"
            assert old
            assert old != new, f"{pattern}: {old} before too"


@dataclass(frozen=True)
class Value:
    """A value that the run reads from the plan is this and was another one."""

    read: Callable[[Plan], Any]
    expected: Any

    def check(self, before: Outcome, after: Outcome) -> None:
        assert self.read(after.plan) == self.expected
        assert self.read(before.plan) != self.expected


@dataclass(frozen=True)
class Change:
    """Another value for a field, and the proof that it has an effect.

    Attributes:
        also: keys that the field needs, set before and after the change.
    """

    value: Any
    proof: Proof
    also: Tree = field(default_factory=dict)


@dataclass(frozen=True)
class ShownIn:
    """A test shows the effect: `path::name`, with class names in between."""

    test: str


@dataclass(frozen=True)
class Section:
    """The field is a section whose own fields are listed."""


RANDOM_BITS = Program(gains=str(0x1BD11BDA))
"""A constant of Threefry, which draws the dropout masks."""

Entry = Change | ShownIn | Section
Table = dict[str, dict[str, Entry]]
"""Name of a base tree -> path of a field -> the proof of its effect."""


@functools.cache
def _parsed(path: str) -> ast.Module:
    return ast.parse((_ROOT / path).read_text(encoding="utf-8"))


def assert_test_exists(test: str) -> None:
    """Fails if the test does not exist: `path::name`, with class names in between."""
    path, *names = test.split("::")
    assert names[-1].startswith("test_")
    body = _parsed(path).body
    for name in names:
        definitions = [node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name]
        assert definitions, f"{path} has no {name}"
        body = definitions[0].body
