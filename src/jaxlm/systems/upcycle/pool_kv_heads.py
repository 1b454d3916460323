"""Gives a model fewer key/value heads: neighboring heads become one (grouped-query attention, a smaller cache).

The new head is the mean of its group. Averaging loses less after each of the heads has been turned towards the others,
without a change of what the model computes, since a head's features may be turned as a whole:

* Values by any orthogonal matrix, whose inverse the output projection applies.
* Keys by one that commutes with the rotary embedding: a rotation of the two features of each pair, and any orthogonal matrix
  of the features that are not rotated. Queries turn with their keys.

With W_r the projection of head r of a group, R_r its rotation, and C the second moment of the inputs, the mean of the heads
loses the least for the data where

    sum_rs tr(R_r W_r C W_s^T R_s^T)

is largest. Starting without rotations, each head in turn gets the best one for the sum of the others, so that the sum only
grows: the mean of turned heads never loses more on the measured data than the mean of the heads as they are.

Source: Ainslie et al. 2023, "GQA: Training Generalized Multi-Query Transformer Models from Multi-Head Checkpoints"
(arXiv:2305.13245), section 2.1: the mean was best; figure 4 compares with the first head and with new ones. Rotations: Jin
et al. 2024, "Align Attention Heads Before Merging Them" (arXiv:2412.20677), section 3.2.

Shapes: G groups, R heads of a group, D features of a head, I inputs (the last is the constant 1, with the biases, if any).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray

from jaxlm.core import tree
from jaxlm.core.axes import HEAD_SIZE, HEADS, KV_HEADS, LAYERS, axes_of
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import NonNegativeInt, PositiveInt
from jaxlm.core.rules import Rules, only
from jaxlm.core.sharding import current_layout
from jaxlm.core.values.batch_types import TokenBatch
from jaxlm.core.values.logged import LayerTable
from jaxlm.models.base import Inputs, LanguageModel, ModelConfig, vocab_axis
from jaxlm.models.decoder import Decoder, DecoderConfig
from jaxlm.models.linear import Linear
from jaxlm.models.mixers.attention import Attention, SelfAttention, other_mixer
from jaxlm.models.norms import HeadwiseLayerNorm, RMSNorm
from jaxlm.models.stacks import Body
from jaxlm.reading.choices import choice
from jaxlm.surgery.base import SurgeryConfig, Wants
from jaxlm.surgery.input_moments import InputMoments, by_layer, heads_of_layers, input_moments, moment_of_layers
from jaxlm.systems.upcycle.bottleneck import HeadFeatures

_NUM_ROUNDS = 10

Rule = Callable[[jax.Array], jax.Array]
"""Of the allowed matrices R [D, D], the one with the largest tr(R A). Args: A [D, D]."""


def aligned(heads_GRDI: jax.Array, moment_II: jax.Array, best: Rule) -> jax.Array:
    """The rotations of the heads of each group, [G, R, D, D]."""
    num_heads, size = heads_GRDI.shape[1:3]

    def of_group(heads_RDI: jax.Array) -> jax.Array:
        products_RDSE = jnp.einsum("rdi,ij,sej->rdse", heads_RDI, moment_II, heads_RDI)

        def turn(number: jax.Array, turns_RDD: jax.Array) -> jax.Array:
            head = number % num_heads
            others_RDD = turns_RDD.at[head].set(0.0)
            return turns_RDD.at[head].set(best(jnp.einsum("dse,sfe->df", products_RDSE[head], others_RDD)))

        unturned = jnp.broadcast_to(jnp.eye(size), (num_heads, size, size))
        return jax.lax.fori_loop(0, _NUM_ROUNDS * num_heads, turn, unturned)

    return jax.vmap(of_group)(heads_GRDI)


def any_rotation(a_DD: jax.Array) -> jax.Array:
    """The `Rule` for values: all orthogonal matrices."""
    u, _, vh = jnp.linalg.svd(a_DD)
    return vh.T @ u.T


def rotation_of_pairs(features: HeadFeatures) -> Rule:
    """The `Rule` for keys: orthogonal matrices that commute with the rotary embedding."""
    first, second, unrotated = (jnp.asarray(f, int) for f in (features.first, features.second, features.unrotated))

    def best(a_DD: jax.Array) -> jax.Array:
        cos, sin = a_DD[first, first] + a_DD[second, second], a_DD[first, second] - a_DD[second, first]
        length = jnp.hypot(cos, sin)
        is_zero = length == 0
        cos, sin = jnp.where(is_zero, 1.0, cos / length), jnp.where(is_zero, 0.0, sin / length)
        turn = jnp.zeros_like(a_DD)
        turn = turn.at[first, first].set(cos).at[second, second].set(cos)
        turn = turn.at[first, second].set(-sin).at[second, first].set(sin)
        if not len(unrotated):
            return turn
        rows, columns = jnp.meshgrid(unrotated, unrotated, indexing="ij")
        return turn.at[rows, columns].set(any_rotation(a_DD[rows, columns]))

    return best


def loss_of_mean(heads_GRDI: jax.Array, moment_II: jax.Array) -> jax.Array:
    """Measures how much heads differ from their group's mean, relative to them: root mean square over heads and inputs."""
    sizes = lambda w: jnp.einsum("grdi,ij,grdj->", w, moment_II, w)  # noqa: E731
    difference = heads_GRDI - heads_GRDI.mean(axis=1, keepdims=True)
    return jnp.sqrt(jnp.maximum(sizes(difference) / sizes(heads_GRDI), 0.0))


_CALIBRATION_BATCHES = 8
_MEMBERS, _TURNED = "members", "turned_head_size"


@choice(SurgeryConfig, "pool_kv_heads")
class PoolKvHeadsConfig(SurgeryConfig):
    """Gives a model fewer key/value heads, for good: neighboring heads become one. All other weights stay as they are.

    Attributes:
        num_kv_heads: key/value heads of the model after the surgery; fewer than before, and a divisor of that number.
        method: what a head is made of. `mean`: the mean of its group. `first`: the first head of its group. `random`: new
            values. The last two are for comparison.
        align: turn the heads of a group towards each other before. This changes queries and output projections too, so that
            the model computes the same until heads become one. Only with `method: mean`.
        calibration_batches: training batches on which `align` measures the inputs of each layer; null means 8. The log has
            what the means lose, by layer. 0 measures nothing: all inputs count alike.
    """

    num_kv_heads: PositiveInt
    method: Literal["mean", "first", "random"] = "mean"
    align: bool = False
    calibration_batches: NonNegativeInt | None = None

    key_rules: ClassVar[Rules] = (only("align", when="method", is_="mean"), only("calibration_batches", when="align"))

    def changed(self, config: ModelConfig) -> ModelConfig:
        model = jax.eval_shape(lambda: config.build(vocab_axis(16), key=jax.random.key(0)))
        problem = _problem(config, model)
        if problem is None and self.align:
            problem = _alignment_problem(model)
        if problem is not None:
            name = type(config).__name__.removesuffix("Config").lower()
            raise ConfigError(f"surgery pool_kv_heads: a model of type {name} given, but {problem}")
        self._check(config)
        return replace(config, num_kv_heads=self.num_kv_heads)  # pyright: ignore[reportCallIssue]

    def _check(self, config: Any) -> None:
        before = config.KVHeads.size
        if self.num_kv_heads >= before or before % self.num_kv_heads:
            fitting = [number for number in range(1, before) if before % number == 0]
            expected = (
                f"{', '.join(map(str, fitting))} expected" if fitting else "so none can be pooled. Remove the surgery"
            )
            raise ConfigError(
                f"surgery pool_kv_heads: num_kv_heads: {self.num_kv_heads} given, but the model has {before} key/value"
                f" heads: {expected}"
            )

    @property
    def wants(self) -> Wants:
        num_batches = _CALIBRATION_BATCHES if self.calibration_batches is None else self.calibration_batches
        return Wants(num_batches=self.align * num_batches, measure=self.measure, describe=self.describe)

    def measure(self, model: LanguageModel, batch: TokenBatch) -> dict[str, InputMoments]:
        """Path of an attention -> moments of its inputs."""
        paths = {f"{path}.k_proj": path for path, _ in tree.modules_by_path(model, Attention)}
        moments = input_moments(model, list(paths), Inputs.of(batch))
        return {attention: moments[path] for path, attention in paths.items()}

    def apply(self, model: LanguageModel, *, key: jax.Array) -> LanguageModel:
        if self.wants.num_batches:  # `fill` turns the heads
            return self._pooled(model, key)
        return self._pooled(self._aligned(model, {}), key)

    def fill(
        self, model: LanguageModel, before: LanguageModel, *, sums: Mapping[str, InputMoments], key: jax.Array, **_: Any
    ) -> LanguageModel:
        return self._pooled(self._aligned(before, sums), key)

    def moved(self, moments: Any, sums: Any) -> Any:
        """Moments of queries and outputs do not go on where these were turned. Pooled heads have another shape."""
        if not self.align:
            return moments
        turned = tuple(
            f"{path}.{name}" for path, _ in tree.modules_by_path(moments, Attention) for name in ("q_proj", "o_proj")
        )
        return tree.map_leaves(lambda path, leaf: None if path.startswith(turned) else leaf, moments)

    def describe(self, model: LanguageModel, sums: Mapping[str, InputMoments]) -> LayerTable:
        layout = current_layout()
        replicated = None if layout is None else layout.replicated()
        losses = jax.jit(self.losses, out_shardings=replicated)(model, sums)
        rows = {path: iter(np.asarray(of_stack).tolist()) for path, of_stack in losses.items()}
        paths = [path for path, _ in tree.modules_by_path(model, SelfAttention)]
        stack_of_layer = next(iter(tree.modules(model, Body))).stack_of_layer
        count = next(iter(sums.values())).count.array
        title = (
            f"what heads differ by from the mean of their group, relative to them, over {int(np.asarray(count).max()):,}"
            " tokens"
        )
        columns = ("keys", "aligned keys", "values", "aligned values")
        return LayerTable("pool_kv_heads", title, columns, [next(rows[paths[stack]]) for stack in stack_of_layer])

    def losses(self, model: LanguageModel, sums: Mapping[str, InputMoments]) -> dict[str, jax.Array]:
        """Path of an attention -> `loss_of_mean` of keys and values before and after alignment [layers, 4]. Traced."""
        turned = dict(tree.modules_by_path(self._aligned(model, sums), SelfAttention))
        of_heads = lambda k, v, moment: [loss_of_mean(self._groups(heads), moment) for heads in (k, v)]  # noqa: E731
        losses = {}
        for path, attention in tree.modules_by_path(model, SelfAttention):
            before, after = (by_layer(of_heads, *_heads(one, sums[path])) for one in (attention, turned[path]))
            losses[path] = jnp.stack([before[0], after[0], before[1], after[1]], axis=1)
        return losses

    def merge(self, model: LanguageModel) -> LanguageModel:
        return model

    def _groups(self, heads_GDI: jax.Array) -> jax.Array:
        """The heads of each group, [new heads, members, D, I]."""
        return heads_GDI.reshape(self.num_kv_heads, -1, *heads_GDI.shape[1:])

    def _pooled(self, model: LanguageModel, key: jax.Array) -> LanguageModel:
        if not isinstance(model, Decoder):
            raise ConfigError("surgery pool_kv_heads: the layers of this model are not known. Remove the surgery")
        config: Any = model.config
        numbers = {path: number for number, (path, _) in enumerate(tree.modules_by_path(model, SelfAttention))}

        def pooled(path: str, attention: SelfAttention) -> SelfAttention:
            _check_plain(path, attention.k_proj, attention.v_proj)
            keys = jax.random.split(jax.random.fold_in(key, numbers[path]))
            k, v = (
                self._pooled_heads(layer, config.initializer_range, key)
                for layer, key in zip((attention.k_proj, attention.v_proj), keys, strict=True)
            )
            return replace(attention, k_proj=k, v_proj=v)

        model = tree.map_modules_by_path(model, SelfAttention, ".*", pooled)
        return replace(model, config=replace(config, num_kv_heads=self.num_kv_heads))  # pyright: ignore[reportCallIssue]

    def _pooled_heads(self, layer: Linear, std: float, key: jax.Array) -> Linear:
        Out = tuple(axis.resize(self.num_kv_heads) if axis.name == KV_HEADS else axis for axis in axes_of(layer.Out))
        weight = self._pooled_array(layer.weight)  # pyright: ignore[reportArgumentType]
        bias = None if layer.bias is None else self._pooled_array(layer.bias)
        if self.method == "random":
            weight = (hax.random.normal(key, weight.axes) * std).astype(weight.dtype)
            bias = None if bias is None else hax.zeros_like(bias)
        return replace(layer, weight=weight, bias=bias, Out=Out)

    def _pooled_array(self, array: NamedArray) -> NamedArray:
        KVHeads = array.resolve_axis(KV_HEADS)
        Groups, Members = KVHeads.resize(self.num_kv_heads), Axis(_MEMBERS, KVHeads.size // self.num_kv_heads)
        grouped = array.unflatten_axis(KV_HEADS, (Groups, Members))
        if self.method == "first":
            return grouped[_MEMBERS, 0]
        return hax.mean(grouped.astype(jnp.float32), Members).astype(array.dtype)

    def _aligned(self, model: LanguageModel, sums: Mapping[str, InputMoments]) -> LanguageModel:
        """The model with turned heads, which computes the same. Args: sums: without some of them, all inputs count alike."""
        if not self.align:
            return model
        features = _features(model)

        def turned(path: str, attention: SelfAttention) -> SelfAttention:
            _check_plain(path, attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)

            def of_layer(k_GDI: jax.Array, v_GDI: jax.Array, moment_II: jax.Array) -> tuple[jax.Array, jax.Array]:
                of_heads = lambda heads, rule: aligned(self._groups(heads), moment_II, rule).reshape(  # noqa: E731
                    heads.shape[0], *[heads.shape[1]] * 2
                )
                return of_heads(k_GDI, rotation_of_pairs(features)), of_heads(v_GDI, any_rotation)

            turns = by_layer(of_layer, *_heads(attention, sums.get(path)))
            of_keys, of_values = (_named_turns(array, attention.k_proj) for array in turns)
            attention = replace(attention, v_proj=_turned(attention.v_proj, of_values))
            out = replace(attention.o_proj, weight=_turned_array(attention.o_proj.weight, of_values))
            attention = replace(attention, o_proj=out)
            if isinstance(attention.k_norm, RMSNorm) or isinstance(attention.q_norm, RMSNorm):
                return attention  # the weights of a norm after the projection fix the directions of keys
            return replace(
                attention, q_proj=_turned(attention.q_proj, of_keys), k_proj=_turned(attention.k_proj, of_keys)
            )

        return tree.map_modules_by_path(model, SelfAttention, ".*", turned)


def _problem(config: ModelConfig, model: LanguageModel) -> str | None:
    """Explains why the key/value heads of a model cannot be pooled."""
    attentions = tree.modules(model, Attention)
    if not isinstance(config, DecoderConfig) or not isinstance(model, Decoder):
        return "its config has no number of key/value heads that can change alone. Remove the surgery"
    if kind := other_mixer(model):
        return f"some of its layers are {kind}, whose heads are not those of attention. Remove the surgery"
    if other := next((a for a in attentions if not isinstance(a, SelfAttention)), None):
        return f"its attention is {type(other).__name__}. Put pool_kv_heads before the surgery that makes it"
    norms = [attention.k_norm for attention in attentions]  # pyright: ignore[reportAttributeAccessIssue]
    if any(isinstance(norm, RMSNorm | HeadwiseLayerNorm) and norm.weight.has_axis(KV_HEADS) for norm in norms):
        return "a norm over all key heads together has a weight for each of them. Remove the surgery"
    return None


def _alignment_problem(model: LanguageModel) -> str | None:
    attention: Any = tree.modules(model, Attention)[0]
    if attention.clip_qkv is not None:
        return "its queries, keys and values are clipped, which turned ones would not be alike. Remove align"
    if attention.gate_proj is not None:
        return "its heads have a gate for each feature, which turned values would not fit. Remove align"
    forms = {
        (kind.rope.num_rotated(attention.q_proj.weight.axis_size(HEAD_SIZE)), kind.interleaved)
        for kind in next(iter(tree.modules(model, Body))).kinds_by_layer
        if kind.rope is not None
    }
    if len(forms) > 1:
        return "its layers rotate different features. Remove align"
    return None


def _features(model: LanguageModel) -> HeadFeatures:
    """Returns where heads have the pairs that rotate. Layers without rotation may be turned as the others are."""
    attention = tree.modules(model, SelfAttention)[0]
    size = attention.q_proj.weight.axis_size(HEAD_SIZE)
    kinds = [kind for kind in next(iter(tree.modules(model, Body))).kinds_by_layer if kind.rope is not None]
    if not kinds:
        return HeadFeatures.of(size, 0, interleaved=False)
    assert kinds[0].rope is not None
    return HeadFeatures.of(size, kinds[0].rope.num_rotated(size), interleaved=kinds[0].interleaved)


def _check_plain(path: str, *layers: Any) -> None:
    if not all(isinstance(layer, Linear) and isinstance(layer.weight, NamedArray) for layer in layers):
        raise ConfigError(
            f"surgery pool_kv_heads: {path} has adapters or stored weights, whose heads cannot be pooled. Merge them before"
        )


def _heads(attention: SelfAttention, moments: InputMoments | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Keys and values [L, G, D, I], and moments of inputs [L, I, I]."""
    keys, values = (heads_of_layers(layer, KV_HEADS) for layer in (attention.k_proj, attention.v_proj))
    return keys, values, moment_of_layers(attention.k_proj, moments)


def _named_turns(array: jax.Array, layer: Linear) -> NamedArray:
    Layers, KVHeads, Size = (layer.weight.resolve_axis(name) for name in (LAYERS, KV_HEADS, HEAD_SIZE))
    return NamedArray(array, (Layers, KVHeads, Axis(_TURNED, Size.size), Size))


def _turned(layer: Linear, turns: NamedArray) -> Linear:
    bias = None if layer.bias is None else _turned_array(layer.bias, turns)
    return replace(layer, weight=_turned_array(layer.weight, turns), bias=bias)


def _turned_array(array: Any, turns: NamedArray) -> NamedArray:
    """An array of key/value heads, or of query heads, with turned features."""
    axes, KVHeads = array.axes, turns.resolve_axis(KV_HEADS)
    heads = array.astype(jnp.float32)
    if is_of_queries := HEADS in (axis.name for axis in axes):
        Heads = array.resolve_axis(HEADS)
        heads = heads.unflatten_axis(HEADS, (KVHeads, Axis(_MEMBERS, Heads.size // KVHeads.size)))
    out = hax.dot(turns, heads, axis=HEAD_SIZE, precision=jax.lax.Precision.HIGHEST).rename({_TURNED: HEAD_SIZE})
    if is_of_queries:
        out = out.flatten_axes((KV_HEADS, _MEMBERS), HEADS)
    return out.rearrange(axes).astype(array.dtype)
