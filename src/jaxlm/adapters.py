"""Adapters of a model to PEFT's files and back."""

import re
from pathlib import Path
from typing import Any

import haliax as hax
import jax
import numpy as np

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.sharding import Layout
from jaxlm.interop.peft import Adapter, save_adapters
from jaxlm.interop.peft_import import read_adapters
from jaxlm.interop.weights import axis_sizes
from jaxlm.models.base import LanguageModel, ModelConfig
from jaxlm.plan import Plan
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
        Adapter(path, layer.a, layer.b, layer.base.In, layer.base.Out, layer.scale)
        for path, layer in tree.modules_by_path(model, LoraLinear)
    ]
    if not adapters:
        raise ConfigError("the checkpoint has no adapters. Leave --adapters out")
    save_adapters(
        folder, adapters, plan.config.model, plan.layout, dtype=dtype, base=str(plan.config.initialize_from_hf)
    )


def with_adapters(model: LanguageModel, folder: Path, config: ModelConfig, layout: Layout) -> LanguageModel:
    """The model with the adapters of a PEFT folder beside its layers, in its own dtype. Call it inside `layout.use()`.

    Raises:
        ConfigError: they are no plain LoRA, or not this model's.
    """
    read = read_adapters(folder, config, axis_sizes(tree.leaves(model)))
    target = f"^({'|'.join(map(re.escape, read.a))})$"
    lora = LoraConfig(target=target, rank=read.rank, alpha=read.alpha, rslora=read.rslora)
    abstract = jax.eval_shape(lambda m: lora.apply(m, refs={}, calibration=None, key=jax.random.key(0)), model)
    there = dict(tree.leaves(model))
    dtype = next(tree.raw(leaf).dtype for leaf in there.values() if tree.is_inexact(leaf))

    def filled(path: str, leaf: Any) -> Any:
        module, _, side = path.rpartition(".")
        if side not in ("a", "b") or module not in read.a:
            return there[path.replace(".base.", ".")]
        array = {"a": read.a, "b": read.b}[side][module]
        shape = tuple(axis.size for axis in leaf.axes)
        if array.size != np.prod(shape) or array.shape[-1 if side == "b" else -2] != read.rank:
            raise ConfigError(
                f"{folder}: lora_{side.upper()} of {module}: {list(array.shape)} in the file (layers first), which does not"
                f" make {dict(zip([axis.name for axis in leaf.axes], shape, strict=True))}"
            )
        place = layout.parameter_sharding(leaf.axes)
        return hax.NamedArray(jax.device_put(array.reshape(shape).astype(dtype), place), leaf.axes)

    return tree.map_leaves(filled, abstract)
