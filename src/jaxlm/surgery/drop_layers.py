"""Drops layers (depth pruning): the residual stream goes past them.

Source: Men et al. 2024, ShortGPT: Layers in Large Language Models are More Redundant Than You Expect (arXiv:2403.03853),
section 3.2. A layer matters little if its output has the direction of its input. Its Block Influence, over tokens, is

    1 - E[h_in . h_out / (|h_in| |h_out|)]

Layers with the least Block Influence are dropped all at once, as in the paper.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray

from jaxlm.core import tree
from jaxlm.core.axes import EMBED
from jaxlm.core.errors import ConfigError, within
from jaxlm.core.field_types import NonNegativeInt, PositiveInt
from jaxlm.core.rules import Rules, one_of, only
from jaxlm.core.values.batch_types import TokenBatch
from jaxlm.core.values.logged import LayerTable
from jaxlm.models.base import EMBEDDING, Inputs, LanguageModel, ModelConfig, RewardModel, layer_tap
from jaxlm.models.decoder import as_transformer
from jaxlm.models.stacks import body_of, taken_layers
from jaxlm.reading.choices import choice
from jaxlm.surgery.base import SurgeryConfig, Wants

_CALIBRATION_BATCHES = 8


@choice(SurgeryConfig, "drop_layers")
class DropLayersConfig(SurgeryConfig):
    """Drops layers, for good: the model of the phase, of all later phases and of exports has fewer. Set `layers`, or
    `num_layers` to drop those that change the residual stream the least.

    Attributes:
        layers: numbers of the layers to drop, counted from 0.
        num_layers: drop this many layers: those with the least Block Influence (1 minus the cosine between input and output,
            averaged over tokens of the phase's training data). All layers must be of the same kind.
        calibration_batches: training batches to measure the Block Influence on; null means 8. Only with `num_layers`.
    """

    layers: list[NonNegativeInt] | None = None
    num_layers: PositiveInt | None = None
    calibration_batches: PositiveInt | None = None

    key_rules: ClassVar[Rules] = (one_of("layers", "num_layers"), only("calibration_batches", when="num_layers"))

    def changed(self, config: ModelConfig) -> ModelConfig:
        with within("surgery drop_layers"):
            num_layers = config.Layers.size
            self._check(num_layers)
            if self.num_layers is not None:
                _check_alike(config)
            return config.with_layers(self._structure(num_layers))

    def apply(self, model: LanguageModel, *, key: jax.Array) -> LanguageModel:
        return self._taken(model)

    @property
    def wants(self) -> Wants:
        num_batches = 0 if self.num_layers is None else self.calibration_batches or _CALIBRATION_BATCHES
        return Wants(num_batches=num_batches, measure=self.measure, describe=self.describe)

    def measure(self, model: LanguageModel, batch: TokenBatch) -> Mapping[str, jax.Array]:
        """Sums of cosines {layers}, and the number of tokens."""
        names = (EMBEDDING, *map(layer_tap, range(body_of(model, "surgery drop_layers").num_layers)))
        taps = model.hidden(Inputs.of(batch), taps=names).taps
        streams = [taps[name].rearrange((*batch.tokens.axes, ...)).astype(jnp.float32) for name in names]
        counts = (batch.segment_ids.array != 0).astype(jnp.float32)
        cosines = [jnp.sum(counts * _cosine(*pair)) for pair in itertools.pairwise(streams)]
        return {"cosines": jnp.stack(cosines), "tokens": jnp.sum(counts)}

    def describe(self, model: LanguageModel, sums: Mapping[str, Any]) -> LayerTable:
        sums = jax.tree.map(np.asarray, sums)
        influence = 1 - sums["cosines"] / sums["tokens"]
        kept = np.asarray(self._chosen(sums)).tolist()
        dropped = [layer for layer in range(len(influence)) if layer not in kept]
        title = (
            f"layers {', '.join(map(str, dropped))} of {len(influence)} are dropped, which matter least over"
            f" {int(sums['tokens']):,} tokens"
        )
        rows = [[number] for number in influence.tolist()]
        return LayerTable("drop_layers", title, ("Block Influence",), rows)

    def fill(self, model: LanguageModel, before: LanguageModel, *, sums: Any, **_: Any) -> LanguageModel:
        return _gathered(model, before, self._chosen(sums))

    def moved(self, tree: Any, sums: Any) -> Any:
        moved = self._taken(tree)
        return moved if sums is None else _gathered(moved, tree, self._chosen(sums))

    def merge(self, model: LanguageModel) -> LanguageModel:
        return model

    def _taken(self, model: LanguageModel) -> LanguageModel:
        kept = self._structure(body_of(model, "surgery drop_layers").num_layers)
        with within("surgery drop_layers"):
            return _with_layers(model, kept)

    def _structure(self, num_layers: int) -> Sequence[int]:
        """The layers that remain; the first ones as long as nothing has been measured."""
        if self.num_layers is not None:
            return range(num_layers - self.num_layers)
        dropped = self.layers or ()
        return [layer for layer in range(num_layers) if layer not in dropped]

    def _chosen(self, sums: Mapping[str, Any]) -> jax.Array:
        """Numbers of the layers that remain, ascending: those with the smallest cosines; of equal ones, the first."""
        assert self.num_layers is not None
        by_influence = jnp.argsort(jnp.asarray(sums["cosines"]), stable=True)
        return jnp.sort(by_influence[: by_influence.shape[0] - self.num_layers])

    def _check(self, num_layers: int) -> None:
        """Raises `ConfigError` if the keys do not suit a model with this many layers."""
        if self.layers is not None:
            known = len(set(self.layers)) == len(self.layers) and all(layer < num_layers for layer in self.layers)
            if not known or not 0 < len(self.layers) < num_layers:
                raise ConfigError(
                    f"layers: {list(self.layers)} given, but the model has {num_layers} layers. Expected different"
                    f" numbers from 0 to {num_layers - 1}, at least one of them, and not all"
                )
        elif self.num_layers is not None and self.num_layers >= num_layers:
            raise ConfigError(
                f"num_layers: {self.num_layers} given, but the model has {num_layers} layers, of which at least one"
                " must remain"
            )


def _check_alike(config: ModelConfig) -> None:
    """Raises `ConfigError` if it depends on which layers are dropped what the config of the model is."""
    alone = [config.with_layers([layer]) for layer in range(config.Layers.size)]
    different = next((layer for layer, one in enumerate(alone) if one != alone[0]), None)
    if different is not None:
        raise ConfigError(
            f"num_layers given, but layer {different} of the model is of another kind than layer 0 (windows, rotary"
            " embeddings or experts), so that the data would decide what the config of the model is. Set `layers` instead, to"
            " the numbers of the layers to drop"
        )


def _with_layers(model: LanguageModel, kept: Sequence[int]) -> LanguageModel:
    if isinstance(model, RewardModel):
        base = _with_layers(model.base, kept)
        return replace(model, base=base, traits=base.traits)
    return as_transformer(model, "has no layers that jaxlm can take out").with_layers(kept)


def _cosine(before: NamedArray, after: NamedArray) -> jax.Array:
    """The cosine between two residual streams, {batch, position}; 0 where one of them is zero."""
    at = [axis.name for axis in before.axes].index(EMBED)
    x, y = before.array, after.array
    norms = jnp.linalg.norm(x, axis=at) * jnp.linalg.norm(y, axis=at)
    return jnp.sum(x * y, axis=at) / jnp.where(norms > 0, norms, 1.0)


def _gathered(model: LanguageModel, before: LanguageModel, kept: jax.Array) -> LanguageModel:
    """A model with fewer layers, with those at `kept` of the model before. Both have one stack, and the same paths."""
    old = dict(tree.leaves(before))
    return tree.map_leaves(lambda path, leaf: taken_layers(old[path], kept), model)
