"""Adapters of a model to PEFT's files and back."""

import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import haliax as hax
import jax
import numpy as np

from jaxlm.core import tree
from jaxlm.core.axes import LAYERS
from jaxlm.core.errors import ConfigError
from jaxlm.core.runtime import main_first
from jaxlm.core.sharding import Layout
from jaxlm.engine.phases import Phase
from jaxlm.interop.hf.weights import axis_sizes
from jaxlm.interop.peft.read import ReadAdapters, read_adapters
from jaxlm.interop.peft.section import peft_folder
from jaxlm.interop.peft.write import Adapter, save_adapters
from jaxlm.models.base import LanguageModel, ModelConfig
from jaxlm.run.plan import Plan
from jaxlm.surgery.lora import LoraConfig, LoraLinear, merge_lora


def without_adapters(model: LanguageModel) -> LanguageModel:
    """The model with its adapters, if there are any, folded into the layers that they stand beside."""
    return merge_lora(model) if tree.modules(model, LoraLinear) else model


def export_adapters(folder: Path, model: LanguageModel, plan: Plan, dtype: Any) -> None:
    """Writes the adapters alone, in PEFT's layout.

    Raises:
        ConfigError: there are none, or their layers have no tensor of their own there.
    """
    adapters = [
        Adapter(path, layer.a, layer.b, layer.base.In, layer.base.Out, layer.scale, layer.dropout)
        for path, layer in tree.modules_by_path(model, LoraLinear)
    ]
    if not adapters:
        raise ConfigError("the checkpoint has no adapters. Leave --adapters out")
    save_adapters(
        folder, adapters, plan.config.model, plan.layout, dtype=dtype, base=str(plan.config.initialize_from_hf)
    )


def with_adapters(model: LanguageModel, folder: Path, config: ModelConfig, layout: Layout) -> LanguageModel:
    """The model with the adapters of a PEFT folder beside its layers, in its own dtype, for use and no further learning.
    Call it inside `layout.use()`.

    Raises:
        ConfigError: they are no plain LoRA, or not this model's.
    """
    leaves = tree.leaves(model)
    read = read_adapters(folder, config, axis_sizes(leaves).get(LAYERS, 0))
    lora = LoraConfig(**{**read.keys, "dropout": 0.0})
    abstract = jax.eval_shape(lambda m: lora.apply(m, refs={}, calibration=None, key=jax.random.key(0)), model)
    dtype = next(leaf.dtype for _, leaf in leaves if tree.is_inexact(leaf))
    there = dict(leaves) | _placed(read, abstract, layout, folder, dtype)
    return tree.map_leaves(lambda path, _: there[path if path in there else path.replace(".base.", ".")], abstract)


def initial_adapter_leaves(plan: Plan, phase: Phase) -> dict[str, hax.NamedArray]:
    """The adapters that a phase begins with from PEFT folders, by the paths of their leaves; empty where it names none.

    Raises:
        ConfigError: they are no plain LoRA, not this model's, or not what the surgery's keys say.
    """
    abstract, found = plan.state_builder.abstract_state(phase).model, {}
    for folder, read in _read_for(plan, phase):
        found |= _placed(read, abstract, plan.layout, folder, plan.precision.params)
    return found


def check_adapters(plan: Plan) -> None:
    """Looks at all PEFT folders that phases begin with. Raises `ConfigError`: see `initial_adapter_leaves`."""
    for phase in plan.phases:
        for _ in _read_for(plan, phase):
            pass


def _read_for(plan: Plan, phase: Phase) -> Iterator[tuple[Path, ReadAdapters]]:
    """The folders that a phase's surgeries name, each with what is in it."""
    abstract = plan.state_builder.abstract_state(phase).model
    num_layers = axis_sizes(tree.leaves(abstract)).get(LAYERS, 0)
    loras = [one for one in phase.surgeries if isinstance(one, LoraConfig)]
    for lora, name in [(one, one.from_peft) for one in loras if one.from_peft is not None]:
        folder = main_first(functools.partial(peft_folder, name))
        read = read_adapters(folder, plan.config.model, num_layers)
        paths = [path for path, _ in tree.modules_by_path(abstract, LoraLinear)]
        _check_agreement(lora, read, [path for path in paths if re.search(lora.target, path)], folder)
        yield folder, read


def _check_agreement(lora: LoraConfig, read: ReadAdapters, matched: Sequence[str], folder: Path) -> None:
    """Raises `ConfigError` where the surgery's keys, and the paths that its target matches, are not the folder's."""
    problems = [
        f"{key}: {getattr(lora, key)} given, {value} there"
        for key, value in read.keys.items()
        if key != "target" and getattr(lora, key) != value
    ]
    problems += [f"target: matches {path}, which has no adapter there" for path in matched if path not in read.a]
    problems += [
        f"target: '{lora.target}' does not match {path}, which has one" for path in read.a if path not in matched
    ]
    if problems:
        raise ConfigError(
            f"surgery lora: from_peft: {folder} holds other adapters than the keys beside it say:\n"
            + "\n".join(f"  {problem}" for problem in problems)
            + "\nLeave these keys out: they are taken from adapter_config.json"
        )


def _placed(
    read: ReadAdapters, abstract: LanguageModel, layout: Layout, folder: Path, dtype: Any
) -> dict[str, hax.NamedArray]:
    """What was read as leaves of a model with room for it, where they rest."""
    leaves, found = dict(tree.leaves(abstract)), {}
    for side, arrays in (("a", read.a), ("b", read.b)):
        for module, array in arrays.items():
            axes = leaves[f"{module}.{side}"].axes
            shape = tuple(axis.size for axis in axes)
            if array.size != np.prod(shape) or array.shape[-1 if side == "b" else -2] != read.keys["rank"]:
                raise ConfigError(
                    f"{folder}: lora_{side.upper()} of {module}: {list(array.shape)} in the file (layers first), which"
                    f" does not make {dict(zip([axis.name for axis in axes], shape, strict=True))}"
                )
            placed = jax.device_put(array.reshape(shape).astype(dtype), layout.parameter_sharding(axes))
            found[f"{module}.{side}"] = hax.NamedArray(placed, axes)
    return found
