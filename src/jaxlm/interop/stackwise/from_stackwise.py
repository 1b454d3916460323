"""Translates StackWise's configurations (sections `model`, `training` and `data`) to jaxlm's.

Source: StackWise's guide to progressive training, and the fields of its configuration classes. Every key is translated, or
accepted with a note that says why it has no effect, or refused with what to do instead. Nothing is ignored silently.
"""

from collections.abc import Collection, Mapping
from typing import Any

from jaxlm.interop.section import Section
from jaxlm.interop.stackwise.data import put_data
from jaxlm.interop.stackwise.growth import Growth, drop_growth, put_growth
from jaxlm.interop.stackwise.kinds import check_kinds
from jaxlm.interop.stackwise.masking import drop_masking, put_masking
from jaxlm.interop.stackwise.model import put_model
from jaxlm.interop.stackwise.objective import put_objective
from jaxlm.interop.stackwise.training import put_training
from jaxlm.interop.translated import Translated
from jaxlm.reading.targets import Resolved
from jaxlm.reading.yaml import ConfigSource

_MODEL, _TRAINING, _DATA = "model", "training", "data"


def is_stackwise(tree: Mapping[str, Any], own: Collection[str]) -> bool:
    """Whether a file is a configuration of StackWise: jaxlm's own have a section `trainer` instead of `training`.

    Args:
        own: the keys of jaxlm's configurations. A file with one that StackWise does not have is jaxlm's.
    """
    return _TRAINING in tree and not (tree.keys() - {_MODEL, _DATA}) & set(own)


def from_stackwise(source: ConfigSource) -> Resolved:
    """Translates a configuration.

    Raises:
        ConfigError: it is not valid, or asks for what jaxlm cannot do.
    """
    notes: list[str] = []
    top = Section(source, (), source.tree, notes)
    model, training, data = (top.section(name) for name in (_MODEL, _TRAINING, _DATA))
    top.done()
    progressive, architecture = training.section("progressive"), model.section("architecture")
    check_kinds((model, training, progressive, data))
    out = Translated()
    objective = put_objective(progressive, training, out)
    put_model(model, objective, out)
    num_sequences = put_data(model, data, training, objective, out)
    growth = Growth.of(training, progressive, architecture)
    if growth.is_progressive:
        put_growth(growth, training, progressive, objective, out)
    else:
        drop_growth(growth, training, progressive, out)
    put_training(training, growth.is_progressive, num_sequences, out)
    if objective.hides_tokens:
        put_masking(growth, training, progressive, model, objective, out)
    else:
        drop_masking(training, progressive, model, objective)
    for section in (architecture, progressive, model, training, data):
        section.done()
    return Resolved(out.source(), None, tuple(notes), "stackwise")
