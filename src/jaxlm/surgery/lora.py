"""Low-rank adapters on linear layers.

Source: Hu et al. 2021, LoRA: Low-Rank Adaptation of Large Language Models (arXiv:2106.09685), section 4.1:
W x + (alpha / r) B A x, with A random and B zero, so that the adapted model begins as the model it was.
Kalajdzievski 2023 (arXiv:2312.03732): alpha / sqrt(r) keeps the update's size the same for every rank (`rslora`).

    x {.., In} --- W (frozen) ------------------------+--- {.., Out}
               \\-- A {rank, In} -- B {Out, rank} * scale --------/
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import haliax as hax
import jax
from haliax import Axis, NamedArray

from jaxlm.core import tree
from jaxlm.core.axes import LORA
from jaxlm.core.errors import ConfigError
from jaxlm.models.base import LanguageModel
from jaxlm.models.linear import Linear
from jaxlm.surgery.base import SurgeryConfig


class LoraLinear(eqx.Module):
    """A linear layer with a low-rank adapter beside it.

    Attributes:
        base: the layer as it was.
        a: {layers, lora_rank, In}; without `layers` where the base is not stacked.
        b: {layers, Out, lora_rank}.
        scale: what the adapter's output is multiplied by.
    """

    base: Linear
    a: NamedArray
    b: NamedArray
    scale: float = eqx.field(static=True)

    @staticmethod
    def around(base: Linear, *, rank: int, scale: float, key: jax.Array) -> "LoraLinear":
        """An adapter that changes nothing yet: A uniform within +-1/sqrt(fan in), B zero."""
        Rank = Axis(LORA, rank)
        inputs, outputs = _axes(base.In), _axes(base.Out)
        stacked = tuple(ax for ax in base.weight.axes if ax not in (*inputs, *outputs))
        bound = 1.0 / math.sqrt(math.prod(ax.size for ax in inputs))
        a = hax.random.uniform(key, (*stacked, Rank, *inputs), minval=-bound, maxval=bound)
        return LoraLinear(base, a, hax.zeros((*stacked, *outputs, Rank)), scale)

    def __call__(self, inputs: NamedArray) -> NamedArray:
        """{.., In} to {.., Out}."""
        low = hax.dot(inputs, self.a, axis=self.base.In)
        return self.base(inputs) + hax.dot(low, self.b, axis=LORA) * self.scale

    @property
    def weight(self) -> NamedArray:
        """The weight of the plain layer that computes the same: what the loss reads of an adapted head."""
        return self.merged().weight

    def merged(self) -> Linear:
        """One plain layer that computes the same."""
        change = hax.dot(self.b, self.a, axis=LORA) * self.scale
        weight = self.base.weight + change.rearrange(self.base.weight.axes).astype(self.base.weight.dtype)
        return eqx.tree_at(lambda layer: layer.weight, self.base, weight)


def _axes(spec: Any) -> tuple[Axis, ...]:
    return (spec,) if isinstance(spec, Axis) else tuple(spec)


@SurgeryConfig.register_subclass("lora")
@dataclass(frozen=True)
class LoraConfig(SurgeryConfig):
    """Puts adapters beside the linear layers whose path matches. Train them alone with `trainable: ["\\\\.[ab]$"]`.

    Attributes:
        target: regular expression on the paths of linear layers.
        rank: of the adapter.
        alpha: the adapter's output is scaled by alpha / rank.
        rslora: scale by alpha / sqrt(rank) instead.
    """

    target: str = ".*"
    rank: int = 8
    alpha: float = 16.0
    rslora: bool = False

    def apply(
        self, model: LanguageModel, *, refs: Mapping[str, LanguageModel], calibration: Any, key: jax.Array
    ) -> LanguageModel:
        """The model with an adapter at every matching layer.

        Raises:
            ConfigError: no linear layer matches, or the rank is not positive.
        """
        if self.rank < 1:
            raise ConfigError(f"surgery lora: rank {self.rank} given, 1 or more expected")
        scale = self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)
        number = iter(range(1_000_000))

        def adapt(layer: Linear) -> LoraLinear:
            return LoraLinear.around(layer, rank=self.rank, scale=scale, key=jax.random.fold_in(key, next(number)))

        return tree.map_modules(model, Linear, self.target, adapt)


def merge_lora(model: LanguageModel) -> LanguageModel:
    """The model with every adapter folded into the layer that it stands beside."""
    return tree.map_modules(model, LoraLinear, ".*", LoraLinear.merged)
