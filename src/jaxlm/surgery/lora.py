"""Low-rank adapters on linear layers.

Source: Hu et al. 2021, LoRA: Low-Rank Adaptation of Large Language Models (arXiv:2106.09685), section 4.1:
W x + (alpha / r) B A x, with A random and B zero, so that the adapted model begins as the model it was.
Kalajdzievski 2023 (arXiv:2312.03732): alpha / sqrt(r) keeps the update's size the same for every rank (`rslora`).
Dropout on what A reads, while training, as in the released code (microsoft/LoRA, `loralib/layers.py`) and in PEFT.

    x {.., In} --- W (frozen) -------------------------------------+--- {.., Out}
               \\-- dropout -- A {rank, In} -- B {Out, rank} * scale --/
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import haliax as hax
import jax
from haliax import Axis, NamedArray

from jaxlm.core import tree
from jaxlm.core.axes import LAYERS, LORA, axes_of
from jaxlm.core.errors import ConfigError, check_probability
from jaxlm.models.base import LanguageModel
from jaxlm.models.layers import DropoutLayer, dropout
from jaxlm.models.linear import Linear
from jaxlm.surgery.base import SurgeryConfig


class LoraLinear(DropoutLayer):
    """A linear layer with a low-rank adapter beside it.

    Attributes:
        base: the layer as it was.
        a: {layers, lora_rank, In}; without `layers` where the base is not stacked.
        b: {layers, Out, lora_rank}.
        scale: what the adapter's output is multiplied by.
        dropout: the probability with which each number that A reads is dropped.
        key: what is dropped is drawn by it; None at rest, and whenever nothing is learned.
    """

    base: Linear
    a: NamedArray
    b: NamedArray
    scale: float = eqx.field(static=True)
    dropout: float = eqx.field(static=True, default=0.0)
    key: jax.Array | None = None

    @staticmethod
    def around(base: Linear, *, rank: int, scale: float, dropout: float, key: jax.Array) -> "LoraLinear":
        """An adapter that changes nothing yet: A uniform within +-1/sqrt(fan in), B zero."""
        Rank = Axis(LORA, rank)
        inputs, outputs = axes_of(base.In), axes_of(base.Out)
        stacked = tuple(ax for ax in base.weight.axes if ax not in (*inputs, *outputs))
        bound = 1.0 / math.sqrt(math.prod(ax.size for ax in inputs))
        a = hax.random.uniform(key, (*stacked, Rank, *inputs), minval=-bound, maxval=bound)
        return LoraLinear(base, a, hax.zeros((*stacked, *outputs, Rank)), scale, dropout)

    def __call__(self, inputs: NamedArray) -> NamedArray:
        """{.., In} to {.., Out}."""
        low = hax.dot(dropout(inputs, self.dropout, self.key), self.a, axis=self.base.In)
        return self.base(inputs) + hax.dot(low, self.b, axis=LORA) * self.scale

    def with_key(self, key: jax.Array) -> "LoraLinear":
        """The same layer, drawing by this key what it drops, if it drops anything."""
        return dataclasses.replace(self, key=key) if self.dropout else self

    @property
    def weight(self) -> NamedArray:
        """The weight of the plain layer that computes the same: what the loss reads of an adapted head."""
        return self.merged().weight

    def merged(self) -> Linear:
        """One plain layer that computes the same."""
        change = hax.dot(self.b, self.a, axis=LORA) * self.scale
        weight = self.base.weight + change.rearrange(self.base.weight.axes).astype(self.base.weight.dtype)
        return eqx.tree_at(lambda layer: layer.weight, self.base, weight)


@SurgeryConfig.register_subclass("lora")
@dataclass(frozen=True)
class LoraConfig(SurgeryConfig):
    """Puts adapters beside the linear layers whose path matches. Train them alone with `trainable: ["\\\\.[ab]$"]`.

    Attributes:
        target: regular expression on the paths of linear layers.
        rank: of the adapter.
        alpha: the adapter's output is scaled by alpha / rank.
        dropout: the probability with which each number that an adapter reads is dropped in training; never otherwise.
        rslora: scale by alpha / sqrt(rank) instead.
        from_peft: begin with the adapters of a folder that PEFT has written, or of the hub's `name@revision`; the keys
            above are its own then, and may be left out. Null begins with adapters that change nothing yet.
    """

    target: str = ".*"
    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    rslora: bool = False
    from_peft: str | None = None

    def apply(
        self, model: LanguageModel, *, refs: Mapping[str, LanguageModel], calibration: Any, key: jax.Array
    ) -> LanguageModel:
        """The model with a new adapter at every matching layer; those of `from_peft` take their places afterwards.

        Raises:
            ConfigError: no linear layer matches, or one that has an adapter already; the rank is not positive, or dropout
                would not reach a layer.
        """
        if self.rank < 1:
            raise ConfigError(f"surgery lora: rank {self.rank} given, 1 or more expected")
        check_probability("surgery lora: dropout", self.dropout)
        scale = self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)
        number = iter(range(1_000_000))

        def adapt(layer: Linear) -> LoraLinear:
            key_of_layer = jax.random.fold_in(key, next(number))
            return LoraLinear.around(layer, rank=self.rank, scale=scale, dropout=self.dropout, key=key_of_layer)

        adapted = tree.map_modules(model, Linear, self.target, adapt)
        self._check_was_free(model)
        self._check_dropout_reaches(adapted)
        return adapted

    def _check_was_free(self, model: LanguageModel) -> None:
        """A layer has one adapter at the most: a second would hide the first from whatever reads or writes adapters."""
        matched = [
            path
            for path, _ in tree.modules_by_path(model, LoraLinear)
            if re.search(self.target, path) or re.search(self.target, f"{path}.base")
        ]
        if matched:
            raise ConfigError(
                f"surgery lora: target '{self.target}' matches {', '.join(matched)}, where there is an adapter already. Let"
                " it match other layers; an adapter that is there is trained further without a surgery"
            )

    def _check_dropout_reaches(self, model: LanguageModel) -> None:
        """Layers of the body are called; of a head the loss reads the weight alone."""
        heads = [
            path
            for path, layer in tree.modules_by_path(model, LoraLinear)
            if layer.dropout and not layer.base.weight.has_axis(LAYERS)
        ]
        if heads:
            raise ConfigError(
                f"surgery lora: dropout: {self.dropout} given, and target '{self.target}' matches {', '.join(heads)}, of"
                " which the loss reads the weight, so that nothing can be dropped before it. Let the target match layers"
                " of the body alone ('attn|mlp'), or leave dropout out"
            )


def merge_lora(model: LanguageModel) -> LanguageModel:
    """The model with every adapter folded into the layer that it stands beside."""
    return tree.map_modules(model, LoraLinear, ".*", LoraLinear.merged)
