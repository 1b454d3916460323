"""LoRA: low-rank adapters on linear layers.

Source: Hu et al. 2021, LoRA: Low-Rank Adaptation of Large Language Models (arXiv:2106.09685), section 4.1:
W x + (alpha / r) B A x, with A random and B zero, so that the adapted model initially equals the base model.
Kalajdzievski 2023 (arXiv:2312.03732): alpha / sqrt(r) keeps the size of the update independent of the rank (`rslora`).
Dropout on the input of A in training, as in the released code (microsoft/LoRA, `loralib/layers.py`) and in PEFT.

    x {.., In} --- W (frozen) -------------------------------------+--- {.., Out}
               \\-- dropout -- A {rank, In} -- B {Out, rank} * scale --/
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import numpy as np
from haliax import Axis, AxisSpec, NamedArray

from jaxlm.core import tree
from jaxlm.core.axes import LORA, VOCAB, axes_of
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import BelowOne, NonNegativeFloat, PositiveInt
from jaxlm.core.matmul import Weight, dot
from jaxlm.core.publish import Location
from jaxlm.core.runtime import main_first
from jaxlm.core.sharding import Layout
from jaxlm.interop.hf.family import family_of_config
from jaxlm.interop.hf.weights import axis_sizes
from jaxlm.interop.peft.read import ReadAdapters, lora_keys, peft_folder, read_adapters
from jaxlm.interop.peft.write import Adapter, save_adapters
from jaxlm.models.base import LanguageModel, ModelConfig
from jaxlm.models.layers import DropoutLayer, dropout
from jaxlm.models.linear import Linear
from jaxlm.models.remat import ADAPTED, checkpoint_name
from jaxlm.models.stacks import Body, path_before_splits
from jaxlm.surgery.base import SurgeryConfig


class LoraLinear(DropoutLayer):
    """A linear layer with a low-rank adapter.

    Attributes:
        base: the original layer.
        a: {layers, lora_rank, In}; without `layers` if the base is not stacked.
        b: {layers, Out, lora_rank}; without `layers` if the base is not stacked.
        scale: multiplier of the adapter's output.
        dropout: dropout probability of the adapter's input.
        key: random key for dropout; None outside training.
    """

    base: Linear
    a: NamedArray
    b: NamedArray
    scale: float = eqx.field(static=True)
    dropout: float = eqx.field(static=True, default=0.0)
    key: jax.Array | None = None

    @staticmethod
    def around(base: Linear, *, rank: int, scale: float, dropout: float, key: jax.Array) -> "LoraLinear":
        """Adds an adapter that is initially zero: A is uniform within +-1/sqrt(fan in), B is zero."""
        Rank = Axis(LORA, rank)
        inputs, outputs = axes_of(base.In), axes_of(base.Out)
        stacked = tuple(ax for ax in base.weight.axes if ax not in (*inputs, *outputs))
        bound = 1.0 / math.sqrt(math.prod(ax.size for ax in inputs))
        a = hax.random.uniform(key, (*stacked, Rank, *inputs), minval=-bound, maxval=bound)
        return LoraLinear(base, a, hax.zeros((*stacked, *outputs, Rank)), scale, dropout)

    def __call__(self, inputs: NamedArray) -> NamedArray:
        """{.., In} to {.., Out}."""
        low = dot(dropout(inputs, self.dropout, self.key), self.a, self.base.In)
        out = (self.base(inputs) + dot(low, self.b, LORA) * self.scale).astype(inputs.dtype)
        return checkpoint_name(out, ADAPTED)

    def operand(self, x: NamedArray) -> NamedArray:
        """As `Linear.operand`."""
        return self.base.operand(x)

    def with_key(self, key: jax.Array) -> "LoraLinear":
        """Returns the layer with this dropout key, or unchanged if it has no dropout."""
        return dataclasses.replace(self, key=key) if self.dropout else self

    @property
    def In(self) -> AxisSpec:
        return self.base.In

    @property
    def Out(self) -> AxisSpec:
        return self.base.Out

    @property
    def weight(self) -> Weight:
        """The merged weight, which the loss reads if the head is adapted."""
        return self.merged().weight

    def merged(self) -> Linear:
        """Merges the adapter into a plain layer with the same output."""
        assert isinstance(self.base.weight, NamedArray)
        delta = hax.dot(self.b, self.a, axis=LORA) * self.scale
        weight = self.base.weight + delta.rearrange(self.base.weight.axes).astype(self.base.weight.dtype)
        return eqx.tree_at(lambda layer: layer.weight, self.base, weight)


@SurgeryConfig.register_subclass("lora")
@dataclass(frozen=True)
class LoraConfig(SurgeryConfig):
    """Adds LoRA adapters to the linear layers whose path matches. Train only the adapters with `trainable: ["\\\\.[ab]$"]`.

    Attributes:
        target: regular expression searched for in the paths of linear layers; matching layers get an adapter.
        rank: rank of the adapters.
        alpha: adapter outputs are scaled by alpha / rank.
        dropout: dropout probability of the adapters' inputs in training.
        rslora: scale by alpha / sqrt(rank) instead of alpha / rank.
        from_peft: load initial adapters from a folder saved by PEFT, or from a Hub `name` or `name@revision`. The other keys
            default to the values in that folder. Null starts with new adapters that do not change the model's outputs.
    """

    target: str = ".*"
    rank: PositiveInt = 8
    alpha: NonNegativeFloat = 16.0
    dropout: BelowOne = 0.0
    rslora: bool = False
    from_peft: str | None = None

    def apply(self, model: LanguageModel, *, key: jax.Array) -> LanguageModel:
        scale = self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)
        indices = itertools.count()

        def adapt(layer: Linear) -> LoraLinear:
            layer_key = jax.random.fold_in(key, next(indices))
            return LoraLinear.around(layer, rank=self.rank, scale=scale, dropout=self.dropout, key=layer_key)

        adapted = tree.map_modules(model, Linear, self.target, adapt)
        self._check_no_adapters(model)
        self._check_dropout_applies(adapted)
        return adapted

    def merge(self, model: LanguageModel) -> LanguageModel:
        return tree.map_modules(model, LoraLinear, self.target, LoraLinear.merged)

    def initial_leaves(self, model: LanguageModel, config: ModelConfig) -> Mapping[str, np.ndarray | jax.Array]:
        if self.from_peft is None:
            return {}
        folder = main_first(functools.partial(peft_folder, self.from_peft))
        read = _read(folder, model, config)
        paths = [path for path, _ in tree.modules_by_path(model, LoraLinear)]
        self._check_agreement(read, [path for path in paths if re.search(self.target, path)])
        return read.leaves(model)

    def keys_from_files(self, given: Collection[str], config: ModelConfig) -> Mapping[str, Any]:
        missing = {field.name for field in dataclasses.fields(self)}.difference(given)
        if self.from_peft is None or not missing:
            return {}
        return {key: value for key, value in lora_keys(peft_folder(self.from_peft), config).items() if key in missing}

    def _check_no_adapters(self, model: LanguageModel) -> None:
        """Refuses a second adapter on a layer: it would hide the first one from code that reads or writes adapters."""
        paths = [path for path, _ in tree.modules_by_path(model, LoraLinear)]
        matches = [p for p in paths if re.search(self.target, p) or re.search(self.target, f"{p}.base")]
        if matches:
            raise ConfigError(
                f"surgery lora: target '{self.target}' matches {', '.join(matches)}, which already has an adapter. Change"
                " target to match other layers. To continue training existing adapters, remove the surgery"
            )

    def _check_dropout_applies(self, model: LanguageModel) -> None:
        """Refuses dropout on a head: the loss reads its weight and never calls the layer."""
        adapters = tree.modules_by_path(model, LoraLinear)
        in_vocab = lambda layer: VOCAB in [axis.name for axis in axes_of(layer.Out)]  # noqa: E731
        heads = [path for path, layer in adapters if layer.dropout and in_vocab(layer)]
        if heads:
            raise ConfigError(
                f"surgery lora: dropout: {self.dropout} given, but target '{self.target}' matches {', '.join(heads)}. The"
                " loss reads its weight directly, so dropout cannot be applied to its input. Set target to layers of the"
                " body ('attn|mlp'), or remove dropout"
            )

    def _check_agreement(self, read: ReadAdapters, matched: Sequence[str]) -> None:
        """Raises `ConfigError` if this surgery's keys, or the paths that its target matches, differ from the folder's."""
        problems = [
            f"{key}: {getattr(self, key)} given, but the folder has {value}"
            for key, value in read.keys.items()
            if key != "target" and getattr(self, key) != value
        ]
        problems += [
            f"target: matches {path}, which has no adapter in the folder" for path in matched if path not in read.a
        ]
        problems += [
            f"target: '{self.target}' does not match {path}, which has an adapter in the folder"
            for path in read.a
            if path not in matched
        ]
        if problems:
            raise ConfigError(
                f"surgery lora: from_peft: the adapters in {read.folder} do not match the surgery's other keys:\n"
                + "\n".join(f"  {problem}" for problem in problems)
                + "\nRemove these keys: they are read from adapter_config.json"
            )


def _read(folder: Path, model: LanguageModel, config: ModelConfig) -> ReadAdapters:
    if any(len(body.stacks) > len({stack.structure for stack in body.stacks}) for body in tree.modules(model, Body)):
        raise ConfigError(
            f"surgery lora: from_peft: the adapters in {folder} are for all layers, but these have been cut into stacks. Put"
            " the lora surgery before split_at"
        )
    return read_adapters(folder, config, axis_sizes(tree.leaves(model)))


def lora_for_inference(folder: Path, config: ModelConfig) -> LoraConfig:
    """The surgery that adds the adapters of a PEFT folder, without dropout. Reads no weights."""
    return LoraConfig(**{**lora_keys(folder, config), "dropout": 0.0})


def add_adapters(model: LanguageModel, folder: Path, config: ModelConfig, layout: Layout) -> LanguageModel:
    """The model with the adapters of a PEFT folder, in its dtype, for inference only. Call it inside `layout.use()`."""
    leaves = tree.leaves(model)
    read = _read(folder, model, config)
    lora = lora_for_inference(folder, config)
    abstract = jax.eval_shape(lambda m: lora.apply(m, key=jax.random.key(0)), model)
    dtype = next(leaf.dtype for _, leaf in leaves if tree.is_inexact(leaf))
    values = dict(leaves)
    for path, array in read.leaves(abstract).items():
        axes = dict(tree.leaves(abstract))[path].axes
        values[path] = NamedArray(jax.device_put(array.astype(dtype), layout.parameter_sharding(axes)), axes)
    return tree.map_leaves(lambda path, _: values[path if path in values else path.replace(".base.", ".")], abstract)


def round_adapters(model: LanguageModel, dtype: Any) -> LanguageModel:
    """The model with its adapters as they are after `save_peft` in this dtype."""

    def rounded(layer: LoraLinear) -> LoraLinear:
        pair = tuple(array.astype(dtype).astype(array.dtype) for array in (layer.a, layer.b))
        return eqx.tree_at(lambda it: (it.a, it.b), layer, pair)

    return tree.map_modules(model, LoraLinear, ".*", rounded)


def save_peft(
    folder: Location,
    model: LanguageModel,
    config: ModelConfig,
    layout: Layout,
    *,
    dtype: Any,
    base: str,
    files: Mapping[str, bytes] | None = None,
) -> None:
    """Writes only the adapters of a model, in PEFT's format. Every process must call this.

    Args:
        base: name of the base model, for adapter_config.json.
        files: additional files to write, such as the model card.
    """
    adapted = tree.modules_by_path(model, LoraLinear)
    if not adapted:
        raise ConfigError("the checkpoint has no adapters. Remove --adapters")
    family_of_config(config)  # raises for a model that PEFT does not know
    (body,) = tree.modules(model, Body)
    adapters = [
        Adapter(*path_before_splits(path, body), m.a, m.b, m.base.In, m.base.Out, m.scale, m.dropout)
        for path, m in adapted
    ]
    sizes = axis_sizes(tree.leaves(model))
    save_adapters(folder, adapters, config, body.num_layers, sizes, layout, dtype=dtype, base=base, files=files or {})
