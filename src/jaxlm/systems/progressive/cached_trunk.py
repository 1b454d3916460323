"""Another objective, on layers whose input is stored: the frozen layers below run once for each example.

What a frozen, deterministic trunk computes of a sequence never changes. It is stored by example, so that later epochs, in
another order, and later starts of the run read it too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from jaxlm.core import tree
from jaxlm.core.axes import BATCH, POSITION
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import PositiveInt
from jaxlm.core.tracing import used_arguments
from jaxlm.core.values.batch_types import LabeledBatch, MaskedBatch, TokenBatch
from jaxlm.core.values.sums import Sum
from jaxlm.models.base import Hidden, Inputs, LanguageModel, WrappedModel, layer_tap
from jaxlm.models.decoder import as_transformer
from jaxlm.models.distillation.layerwise import Int8Array
from jaxlm.models.linear import Linear
from jaxlm.models.stack_paths import newest_stack
from jaxlm.models.stacks import body_of
from jaxlm.objectives.base import ITSELF, Metrics, ObjectiveConfig, ObjectiveFacts
from jaxlm.objectives.next_token import NextToken
from jaxlm.reading.choices import choice
from jaxlm.reading.decode import choice_name


class ModelPart(WrappedModel):
    """Some layers of a model, with its embeddings, final norm and head.

    Attributes:
        base: the model.
        first, stop: numbers of the first layer that runs, and of the one after the last; None for all from the first on.
        stream: {batch, position, embed}, the input of the first layer, whatever tokens the model reads; None for the
            embeddings of the tokens.
    """

    base: LanguageModel
    first: int = eqx.field(static=True)
    stop: int | None = eqx.field(static=True, default=None)
    stream: NamedArray | None = None

    @staticmethod
    def of(whole: LanguageModel, first: int, stop: int | None = None, stream: NamedArray | None = None) -> "ModelPart":
        traits = replace(whole.traits, denoisers=())
        return ModelPart(whole, first, stop, stream, is_causal=whole.is_causal, traits=traits)

    def hidden(
        self, inputs: Inputs, *, cache: Any = None, taps: Sequence[str] = (), key: jax.Array | None = None
    ) -> Hidden:
        assert cache is None, "objectives do not decode"
        whole = as_transformer(self.base, "cannot run only some of its layers")
        return whole.forward_layers(self.first, self.stop, inputs, self.stream, taps=taps, key=key)


Sequences = TokenBatch | MaskedBatch | LabeledBatch
_SEQUENCES = (TokenBatch, MaskedBatch, LabeledBatch)


@choice(ObjectiveConfig, "cached_trunk")
class CachedTrunk(ObjectiveConfig):
    """Trains upper layers on the stored output of frozen lower ones (the trunk). When the phase begins, the trunk reads each
    sequence that its steps will read, once, and what it computes is kept on disk beside the tokens; the steps start from
    there. Everything that it depends on must be frozen, and nothing in it random (dropout). Where tokens are hidden,
    `data.masking` must have `mask_replicas`: each way of hiding those of a sequence is stored as a sequence of its own. Each
    sequence takes 2 bytes a token and feature in bfloat16, on the disk of `data.cache_dir`.

    Attributes:
        objective: the loss of the phase.
        num_layers: number of layers in the trunk, from the first one; null for all layers below the stack that the surgery
            `grow` has added last.
        int8: store 8-bit integers with a scale for each token. The losses are then those of a slightly different trunk.
    """

    objective: ObjectiveConfig = field(default_factory=NextToken)
    num_layers: PositiveInt | None = None
    int8: bool = False

    def __post_init__(self):
        inner = self.objective.facts
        reads_sequences = inner.pacing is None and self.facts.batch_types
        changes_phase = type(self.objective).prepare is not ObjectiveConfig.prepare
        refusals = {
            "which has a trunk of its own": inner.asks_itself,
            "whose blocks do not read each other, so there is no trunk": inner.num_shares > 1,
            "which changes its phase (`prepare`)": changes_phase,
            "which asks another model in every step": inner.references or inner.holds_reference,
            "which does not train on sequences by the final hidden states of the model": not reads_sequences,
            "with which the model may not read the same each time that a sequence comes (remove noise on embeddings:"
            " neftune_alpha)": not inner.inputs_repeat,
        }
        if why := next((why for why, applies in refusals.items() if applies), None):
            name = choice_name(type(self.objective))
            raise ConfigError(f"objective.objective: {name} given, {why}. Use it without cached_trunk")

    @property
    def facts(self) -> ObjectiveFacts:
        inner = self.objective.facts
        return replace(
            inner,
            inner=self.objective,
            batch_types=tuple(kind for kind in inner.batch_types if kind in _SEQUENCES),
            asks_itself=True,
            annotation_key={"trunk": self.num_layers, "int8": self.int8, "inputs": {}},
            flops=lambda model, references: inner.flops(model.above(self._first_layer(model.model)), references),
        )

    def annotate(
        self, refs: Mapping[str, LanguageModel], batch: Sequences, slot: Any = None, model: Any = None
    ) -> Sequences:
        trunk = refs.get(ITSELF)
        if batch.annotations is not None or trunk is None:
            return batch
        stream = _stream(trunk, self._first_layer(trunk), Inputs.of(batch.supervised())).rearrange((BATCH, ...))
        stored = _Int8Stream(Int8Array.of(stream), stream.dtype) if self.int8 else stream
        return replace(batch, annotations={"stream": stored})

    def _first_layer(self, model: LanguageModel) -> int:
        """The number of the first layer that a step computes, whose input is stored."""
        body = body_of(model, "objective cached_trunk")
        if self.num_layers is None:
            newest = newest_stack(body)
            if newest is None:
                raise ConfigError(
                    "objective cached_trunk: num_layers: null given, but this model has not grown. Set it to the number of"
                    " layers that are frozen, or add layers with the surgery grow"
                )
            first = body.layer_numbers[newest][0]
            if first == 0:
                raise ConfigError(
                    "objective cached_trunk: the layers that the model has grown last come first (at: prepend), so that there"
                    " is no trunk below them, and those above depend on what trains. Use the objective alone"
                )
            return first
        if self.num_layers >= body.num_layers:
            raise ConfigError(
                f"objective cached_trunk: num_layers: {self.num_layers} given, but the model has {body.num_layers} layers, of"
                " which at least one must train"
            )
        return self.num_layers

    def check(self, batch: Any, model: LanguageModel, trainable: Any) -> None:
        """Raises `ConfigError` if what is stored would change while the model trains, too."""
        self.objective.check(batch, model, trainable)
        if model.traits.denoisers:
            raise ConfigError(
                "objective cached_trunk: which layers of this model compute a text depends on the share of its tokens that is"
                " hidden (surgery denoisers), so that no trunk reads all of them. Use the objective alone, or grow the model"
                " in this phase, after which all layers read each text"
            )
        first, trained = self._first_layer(model), {path for path, _ in tree.leaves(trainable)}
        inputs = _abstract_inputs(model, has_fractions=MaskedBatch in self.facts.batch_types)
        key = jax.eval_shape(lambda: jax.random.key(0))
        arrays, structure = jax.tree.flatten(model)
        paths = [path for path, leaf in tree.leaves(model) for _ in jax.tree.leaves(leaf)]

        def run(arrays: Sequence[jax.Array], key: jax.Array, inputs: Inputs) -> NamedArray:
            return _stream(jax.tree.unflatten(structure, arrays), first, inputs, key)

        used = used_arguments(run, arrays, key, inputs)
        read = dict.fromkeys(path for path, is_used in zip(paths, used, strict=False) if is_used)
        moving = [path for path in read if path in trained]
        where = f"objective cached_trunk: the output of layer {first - 1} is stored, but"
        if moving:
            raise ConfigError(
                f"{where} trainable matches {moving[0]}, on which it depends, so that it changes with every step. Freeze it"
                " (adapters of the trunk and embeddings too; a tied head is the embedding), set num_layers to fewer layers,"
                " or use the objective without cached_trunk"
            )
        if used[len(paths)]:
            raise ConfigError(
                f"{where} it is random in training (dropout), so that it differs in every step. Set the dropout of these"
                " layers to 0, or use the objective without cached_trunk"
            )
        layers = [(path, layer.fp8) for path, layer in tree.modules_by_path(model, Linear) if f"{path}.weight" in read]
        coupled = [path for path, fp8 in layers if fp8 is not None and not fp8.scales_rows_alone]
        if coupled:
            raise ConfigError(
                f"{where} {coupled[0]} multiplies in fp8 with one scale for all sequences of a microbatch (surgery fp8,"
                " recipe: tensorwise), so that it depends on the sequences beside it. Set recipe: rowwise, exclude the layers"
                " of the trunk, or use the objective without cached_trunk"
            )
        jax.eval_shape(lambda m, i: ModelPart.of(m, first, stream=_stream(m, first, i)).hidden(i).final, model, inputs)

    def terms(
        self, model: LanguageModel, batch: Sequences, slot: Any, *, key: jax.Array | None
    ) -> tuple[dict[str, Sum], Metrics, Any]:
        """Those of the inner objective. A batch without stored streams, as in evaluations, runs all layers."""
        if batch.annotations is None:
            return self.objective.terms(model, batch, slot, key=key)
        stored = batch.annotations["stream"]
        stream = stored.floats() if isinstance(stored, _Int8Stream) else stored
        upper = ModelPart.of(model, self._first_layer(model), stream=stream)
        return self.objective.terms(upper, replace(batch, annotations=None), slot, key=key)

    def init_slot(self, trainable: Any) -> Any:
        return self.objective.init_slot(trainable)

    def update_slot(self, slot: Any, trainable: Any, updates: jax.Array) -> Any:
        return self.objective.update_slot(slot, trainable, updates)

    def prepare_batch(self, batch: Any, key: jax.Array | None) -> Any:
        return self.objective.prepare_batch(batch, key)

    def weights(self, batch: Sequences) -> dict[str, jax.Array]:
        return self.objective.weights(batch)


class _Int8Stream(eqx.Module):
    """A stream in 8 bits. Attributes: dtype: of the stream that it was made of."""

    stream: Int8Array
    dtype: jnp.dtype = eqx.field(static=True)

    def floats(self) -> NamedArray:
        return self.stream.floats(self.dtype)


def _stream(model: LanguageModel, first: int, inputs: Inputs, key: jax.Array | None = None) -> NamedArray:
    """The residual stream before layer `first`. What the model computes beyond it is dead code."""
    tap = layer_tap(first - 1)
    return model.hidden(inputs, taps=(tap,), key=key).taps[tap]


def _abstract_inputs(model: LanguageModel, *, has_fractions: bool) -> Inputs:
    axes = (Axis(BATCH, 1), Axis(POSITION, model.Pos.size))
    column: Any = hax.NamedArray(jax.ShapeDtypeStruct((1, model.Pos.size), jnp.int32), axes)  # type: ignore[arg-type]
    fractions: Any = hax.NamedArray(jax.ShapeDtypeStruct((1,), jnp.float32), axes[:1])  # type: ignore[arg-type]
    return Inputs(column, column, column, mask_fractions=fractions if has_fractions else None)
