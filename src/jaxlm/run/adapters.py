"""Reads and writes a model's LoRA adapters in PEFT's format."""

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
    """The model with its adapters, if any, merged into their base layers."""
    return merge_lora(model) if tree.modules(model, LoraLinear) else model


def export_adapters(folder: Path, model: LanguageModel, plan: Plan, dtype: Any) -> None:
    """Writes only the adapters, in PEFT's format."""
    adapters = [
        Adapter(path, layer.a, layer.b, layer.base.In, layer.base.Out, layer.scale, layer.dropout)
        for path, layer in tree.modules_by_path(model, LoraLinear)
    ]
    if not adapters:
        raise ConfigError("the checkpoint has no adapters. Remove --adapters")
    save_adapters(
        folder, adapters, plan.config.model, plan.layout, dtype=dtype, base=str(plan.config.initialize_from_hf)
    )


def with_adapters(model: LanguageModel, folder: Path, config: ModelConfig, layout: Layout) -> LanguageModel:
    """The model with the adapters of a PEFT folder, in its dtype, for inference only. Call it inside `layout.use()`."""
    leaves = tree.leaves(model)
    read = read_adapters(folder, config, axis_sizes(leaves).get(LAYERS, 0))
    lora = LoraConfig(**{**read.keys, "dropout": 0.0})
    abstract = jax.eval_shape(lambda m: lora.apply(m, refs={}, calibration=None, key=jax.random.key(0)), model)
    dtype = next(leaf.dtype for _, leaf in leaves if tree.is_inexact(leaf))
    values = dict(leaves) | _place_leaves(read, abstract, layout, folder, dtype)
    return tree.map_leaves(lambda path, _: values[path if path in values else path.replace(".base.", ".")], abstract)


def initial_adapter_leaves(plan: Plan, phase: Phase) -> dict[str, hax.NamedArray]:
    """Leaf path -> value of the adapters that a phase's surgeries load from PEFT folders; empty if they load none."""
    abstract, leaves = plan.state_builder.abstract_state(phase).model, {}
    for folder, read in _read_for(plan, phase):
        leaves |= _place_leaves(read, abstract, plan.layout, folder)
    return leaves


def check_adapters(plan: Plan) -> None:
    """Reads all PEFT folders that phases load. Raises `ConfigError` if `initial_adapter_leaves` would."""
    for phase in plan.phases:
        for _ in _read_for(plan, phase):
            pass


def _read_for(plan: Plan, phase: Phase) -> Iterator[tuple[Path, ReadAdapters]]:
    """The PEFT folders that a phase's surgeries load, each with its contents."""
    abstract = plan.state_builder.abstract_state(phase).model
    num_layers = axis_sizes(tree.leaves(abstract)).get(LAYERS, 0)
    loras = [surgery for surgery in phase.surgeries if isinstance(surgery, LoraConfig)]
    for lora, name in [(lora, lora.from_peft) for lora in loras if lora.from_peft is not None]:
        folder = main_first(functools.partial(peft_folder, name))
        read = read_adapters(folder, plan.config.model, num_layers)
        paths = [path for path, _ in tree.modules_by_path(abstract, LoraLinear)]
        _check_agreement(lora, read, [path for path in paths if re.search(lora.target, path)], folder)
        yield folder, read


def _check_agreement(lora: LoraConfig, read: ReadAdapters, matched: Sequence[str], folder: Path) -> None:
    """Raises `ConfigError` if the surgery's keys, or the paths that its target matches, differ from the folder's."""
    problems = [
        f"{key}: {getattr(lora, key)} given, but the folder has {value}"
        for key, value in read.keys.items()
        if key != "target" and getattr(lora, key) != value
    ]
    problems += [
        f"target: matches {path}, which has no adapter in the folder" for path in matched if path not in read.a
    ]
    problems += [
        f"target: '{lora.target}' does not match {path}, which has an adapter in the folder"
        for path in read.a
        if path not in matched
    ]
    if problems:
        raise ConfigError(
            f"surgery lora: from_peft: the adapters in {folder} do not match the surgery's other keys:\n"
            + "\n".join(f"  {problem}" for problem in problems)
            + "\nRemove these keys: they are read from adapter_config.json"
        )


def _place_leaves(
    read: ReadAdapters, abstract: LanguageModel, layout: Layout, folder: Path, dtype: Any = None
) -> dict[str, hax.NamedArray]:
    """The adapters as leaves of a model that has them, with the layout's parameter sharding.

    Args:
        dtype: dtype of the leaves; None means those of `abstract`.
    """
    leaves, values = dict(tree.leaves(abstract)), {}
    for side, arrays in (("a", read.a), ("b", read.b)):
        for module, array in arrays.items():
            leaf = leaves[f"{module}.{side}"]
            axes = leaf.axes
            shape = tuple(axis.size for axis in axes)
            if array.size != np.prod(shape) or array.shape[-1 if side == "b" else -2] != read.keys["rank"]:
                raise ConfigError(
                    f"{folder}: lora_{side.upper()} of {module}: shape {list(array.shape)} in the file (layers first) does"
                    f" not match {dict(zip([axis.name for axis in axes], shape, strict=True))}"
                )
            cast = array.reshape(shape).astype(leaf.dtype if dtype is None else dtype)
            placed = jax.device_put(cast, layout.parameter_sharding(axes))
            values[f"{module}.{side}"] = hax.NamedArray(placed, axes)
    return values
